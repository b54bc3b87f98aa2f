"""Reading safetensors: one file or several, fused without a second copy, and every way a directory can be wrong."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tllm_core.engines.tp.weights import Checkpoint, Piece
from tllm_core.errors import ModelError

A = torch.arange(12, dtype=torch.float32).view(4, 3)
B = torch.arange(6, dtype=torch.float32).view(2, 3) + 100


def whole(name: str, *shape: int) -> Piece:
    return Piece(name, shape, 0, shape[0], shape[0])


@pytest.fixture
def single(tmp_path: Path) -> Path:
    save_file({"a": A, "b": B}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_file({"a": A}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": B}, tmp_path / "model-00002-of-00002.safetensors")
    index = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return tmp_path


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_tensors_of_one_or_several_files_are_stacked(layout: str, request: pytest.FixtureRequest) -> None:
    with Checkpoint(request.getfixturevalue(layout)) as checkpoint:
        stacked = checkpoint.joined([whole("a", 4, 3), whole("b", 2, 3)], 0, torch.float32, torch.float32)
        assert "a" in checkpoint
        assert "c" not in checkpoint
    assert torch.equal(stacked, torch.cat([A, B]))


def test_weights_are_rounded_to_the_asked_type_even_where_they_are_computed_in_a_wider_one(tmp_path: Path) -> None:
    exact = torch.tensor([[1.0 + 2**-12]])
    save_file({"x": exact}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        rounded = checkpoint.joined([whole("x", 1, 1)], 0, torch.bfloat16, torch.float32)
        kept = checkpoint.joined([whole("x", 1, 1)], 0, torch.float32, torch.float32)
    assert rounded.dtype == torch.float32
    assert rounded.item() == 1.0
    assert torch.equal(kept, exact)


def test_a_tensor_outlives_its_checkpoint(single: Path) -> None:
    with Checkpoint(single) as checkpoint:
        tensor = checkpoint.tensor("a", [4, 3], torch.float32)
    (single / "model.safetensors").unlink()
    assert torch.equal(tensor, A)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_holds_one_copy(tmp_path: Path) -> None:
    """Anonymous memory grows by the fused tensor alone: what is read stays a mapped file."""
    rows = 2 << 20
    save_file({"a": torch.ones(rows, 8), "b": torch.ones(rows, 8)}, tmp_path / "model.safetensors")
    before = _anonymous_bytes()
    with Checkpoint(tmp_path) as checkpoint:
        stacked = checkpoint.joined([whole("a", rows, 8), whole("b", rows, 8)], 0, torch.float32, torch.float32)
        grown = _anonymous_bytes() - before
    assert stacked.nbytes == 128 << 20
    assert grown < 1.25 * stacked.nbytes


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("axis", [0, 1])
def test_loading_a_part_takes_memory_for_that_part_alone(tmp_path: Path, axis: int) -> None:
    size = 4096
    save_file({"a": torch.ones(size, size), "b": torch.ones(size, size)}, tmp_path / "model.safetensors")
    part = size // 4
    before = _anonymous_bytes()
    with Checkpoint(tmp_path) as checkpoint:
        pieces = [Piece(name, (size, size), part, 2 * part, part) for name in "ab"]
        joined = checkpoint.joined(pieces, axis, torch.float32, torch.float32)
        grown = _anonymous_bytes() - before
    assert joined.nbytes == 32 << 20
    assert grown < 1.25 * joined.nbytes


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_rows_and_columns_are_cut_and_filled_up_with_zeros(layout: str, request: pytest.FixtureRequest) -> None:
    with Checkpoint(request.getfixturevalue(layout)) as checkpoint:
        rows = checkpoint.joined(
            [Piece("a", (4, 3), 1, 3, 3), Piece("b", (2, 3), 0, 0, 1), Piece("b", (2, 3), 1, 2, 1)],
            0,
            torch.float32,
            torch.float32,
        )
        columns = checkpoint.joined(
            [Piece("a", (4, 3), 2, 3, 2), Piece("a", (4, 3), 0, 1, 1)], 1, torch.float32, torch.float32
        )
    zeros = torch.zeros(1, 3)
    assert torch.equal(rows, torch.cat([A[1:3], zeros, zeros, B[1:]]))
    assert torch.equal(columns, torch.cat([A[:, 2:], torch.zeros(4, 1), A[:, :1]], dim=1))


def test_neighbours_of_one_tensor_are_read_as_one_and_not_copied(single: Path) -> None:
    with Checkpoint(single) as checkpoint:
        pieces = [Piece("a", (4, 3), 0, 2, 2), Piece("a", (4, 3), 2, 3, 1)]
        joined = checkpoint.joined(pieces, 0, torch.float32, torch.float32)
        mapped = checkpoint.joined([Piece("a", (4, 3), 0, 3, 3)], 0, torch.float32, torch.float32)
        assert torch.equal(joined, A[:3])
        assert joined.data_ptr() == mapped.data_ptr()


def _anonymous_bytes() -> int:
    found = re.search(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) * 1024


def test_a_missing_tensor_is_named(single: Path) -> None:
    with Checkpoint(single) as checkpoint, pytest.raises(ModelError, match=r"the weights lack the tensor model\.norm"):
        checkpoint.tensor("model.norm.weight", [3], torch.float32)


def test_a_wrong_shape_is_named_with_both(single: Path) -> None:
    message = r"model\.safetensors: a is of shape \[4, 3\], but config\.json asks for \[5, 3\]"
    with Checkpoint(single) as checkpoint, pytest.raises(ModelError, match=message):
        checkpoint.tensor("a", [5, 3], torch.float32)


def test_a_directory_without_weights_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no weights: no \*\.safetensors file$"):
        Checkpoint(tmp_path)


def test_other_formats_are_pointed_out(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is not read"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 20, -1])
def test_a_truncated_file_is_named(single: Path, keep: int) -> None:
    path = single / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors can't be read; is it complete\?"):
        Checkpoint(single)


def test_a_shard_that_is_gone_is_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with Checkpoint(sharded) as checkpoint, pytest.raises(ModelError, match=r"00002-of-00002\.safetensors is named by"):
        checkpoint.tensor("b", [2, 3], torch.float32)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_a_broken_index_is_named(sharded: Path, content: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match=r"index\.json is no index"):
        Checkpoint(sharded)
