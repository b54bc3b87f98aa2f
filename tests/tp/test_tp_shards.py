"""Who computes what of a model that is spread over ranks, and what each of them reads of it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.tp.ranks import Ranks
from tests.tp.reference import expected, forward, load, prompt_of, reference
from tllm_core.engines.tp.config import ModelConfig, read_config
from tllm_core.engines.tp.models.shard import heads_of, shard_of
from tllm_core.engines.tp.prepare import resolve
from tllm_core.engines.tp.runner import Runner
from tllm_core.engines.tp.weights import Checkpoint
from tllm_core.errors import ConfigError, ModelError

pytest.importorskip("transformers")


@given(kv_heads=st.integers(1, 12), group=st.integers(1, 9), size=st.integers(1, 12))
def test_every_query_head_is_somewhere_once_and_beside_its_kv_head(kv_heads: int, group: int, size: int) -> None:
    ranks = [heads_of(kv_heads * group, kv_heads, rank, size) for rank in range(size)]
    assert len({(heads.num_kv, heads.num_queries) for heads in ranks}) == 1
    places = [place for heads in ranks for place in zip(heads.kv, heads.queries, strict=True)]
    assert sorted(q for _, queries in places for q in queries) == list(range(kv_heads * group))
    assert all(q // group == kv for kv, queries in places for q in queries)
    assert all(len(queries) <= heads.group for heads in ranks for queries in heads.queries)
    assert ranks[0].num_kv == -(-kv_heads // size)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "per_rank"),
    [
        (9, 3, 1, (3, 3)),
        (9, 3, 2, (2, 3)),  # SmolLM2: one rank has a kv head of zeros
        (9, 3, 3, (1, 3)),
        (9, 3, 4, (1, 3)),  # and one rank nothing but zeros
        (9, 3, 6, (1, 2)),  # each kv head on two ranks
        (32, 8, 8, (1, 4)),
        (32, 8, 16, (1, 2)),
        (64, 4, 8, (1, 8)),
        (8, 1, 4, (1, 2)),
    ],
)
def test_kv_heads_and_query_heads_beside_each(heads: int, kv_heads: int, size: int, per_rank: tuple[int, int]) -> None:
    found = heads_of(heads, kv_heads, size - 1, size)
    assert (found.num_kv, found.group) == per_rank


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("inner", "vocab"), [(96, 160), (1536, 49152), (83, 161), (8960, 5)])
def test_columns_and_rows_are_somewhere_once(small: Path, size: int, inner: int, vocab: int) -> None:
    config = read_config(small)
    wide = {"num_heads": 8, "num_kv_heads": 2, "intermediate_size": inner, "vocab_size": vocab}
    config = ModelConfig(**{**{name: getattr(config, name) for name in config.__struct_fields__}, **wide})
    shards = [shard_of(config, rank, size) for rank in range(size)]
    assert [column for shard in shards for column in shard.inner] == list(range(inner))
    assert [row for shard in shards for row in shard.vocab] == list(range(vocab))
    assert all(shard.vocab_rows == -(-vocab // size) >= len(shard.vocab) for shard in shards)
    if inner % 16 == 0:
        assert all(shard.inner.start % 16 == 0 for shard in shards)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("small")
    reference("Llama", {"attention_bias": True, "mlp_bias": True}).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights are nearly all of its size, in several files with an index."""
    directory = tmp_path_factory.mktemp("wide")
    sizes = {"hidden_size": 256, "intermediate_size": 768, "vocab_size": 4096, "num_attention_heads": 8}
    reference("Llama", {**sizes, "num_key_value_heads": 4}).save_pretrained(directory, max_shard_size="2MB")
    assert (directory / "model.safetensors.index.json").exists()
    return directory


class Meter:
    """Counts the bytes that are cut out of checkpoints."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read_bytes = 0
        part = Checkpoint._part

        def counted(checkpoint: Checkpoint, *args: Any) -> torch.Tensor:
            tensor = part(checkpoint, *args)
            self.read_bytes += tensor.nbytes
            return tensor

        monkeypatch.setattr(Checkpoint, "_part", counted)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_rank_reads_its_own_part_of_the_files(wide: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = sum(tensor.nbytes for file in wide.glob("*.safetensors") for tensor in load_file(file).values())
    meter = Meter(monkeypatch)
    with Ranks(wide, size) as ranks:
        assert stored <= meter.read_bytes <= 1.01 * stored  # norms are on every rank
        prompt = prompt_of(20)
        logits = forward(ranks, [(prompt, 0, [0, 1])])
    torch.testing.assert_close(logits, forward(load(wide), [(prompt, 0, [0, 1])]), atol=1e-4, rtol=0)


def test_more_ranks_than_heads_are_refused_with_both_numbers(small: Path) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size 5 is more than the 4 heads"):
        shard_of(read_config(small), 0, 5)


def test_more_ranks_than_heads_are_refused_before_any_of_them_has_loaded_torch(small: Path) -> None:
    code = (
        "import sys\n"
        "from tllm_core.engines.tp.prepare import prepare\n"
        "from tllm_core.engines.tp.spec import TpSettings\n"
        "from tllm_core.errors import ConfigError\n"
        "try: prepare(TpSettings(model=sys.argv[1], tensor_parallel_size=5), lambda name, done: None)\n"
        "except ConfigError as error: print(error)\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(small)], capture_output=True, text=True, check=True)
    refused, loaded = done.stdout.splitlines()
    assert refused.startswith("tensor_parallel_size 5 is more than the 4 heads")
    assert loaded == "False"


def test_all_ranks_have_the_same_bits_in_their_residual_stream(small: Path) -> None:
    """Else they part, token by token, and nobody notices. The final norm is the last that all ranks compute alike."""
    seen: dict[int, list[torch.Tensor]] = {}
    with Ranks(small, 3) as ranks:
        for runner in ranks.runners:
            model = runner._model
            assert model is not None
            head, rank = model.head, runner.group.rank

            def spy(x: torch.Tensor, rank: int = rank, head: Any = head) -> torch.Tensor:
                seen.setdefault(rank, []).append(x.clone())
                return head(x)  # type: ignore[no-any-return]

            model.head = spy  # type: ignore[assignment]
        forward(ranks, [(prompt_of(33), 0, [0, 1, 2])])
    assert sorted(seen) == [0, 1, 2]
    assert torch.equal(seen[0][0], seen[1][0])
    assert torch.equal(seen[0][0], seen[2][0])


def test_a_bias_behind_a_sum_is_added_once(small: Path, tmp_path: Path) -> None:
    """With nothing but that bias in a layer, the logits say how often it was added."""
    weights = load_file(small / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith("_proj.weight"):
            tensor.zero_()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((small / "config.json").read_bytes())
    prompt = prompt_of(5)
    one = forward(load(tmp_path), [(prompt, 0, [0])])
    with Ranks(tmp_path, 3) as ranks:
        torch.testing.assert_close(forward(ranks, [(prompt, 0, [0])]), one, atol=1e-5, rtol=0)


def test_the_cache_of_a_rank_holds_its_own_kv_heads(small: Path) -> None:
    with Ranks(small, 2) as ranks:
        shapes = [runner._attention.cache.shape[4] for runner in ranks.runners if runner._attention is not None]
    assert shapes == [1, 1]


@pytest.mark.parametrize("level", [1, 2])
def test_ranks_sleep_and_wake_with_the_same_logits(small: Path, level: int) -> None:
    prompt = prompt_of(20)
    with Ranks(small, 2) as ranks:
        before = forward(ranks, [(prompt, 0, [0, 1])])
        ranks.all(lambda runner: runner.sleep(level))
        ranks.all(lambda runner: runner.wakeup())
        assert torch.equal(forward(ranks, [(prompt, 0, [0, 1])]), before)


def test_ranks_take_new_weights(small: Path, tmp_path: Path) -> None:
    model, prompt = reference("Llama", {"attention_bias": True, "mlp_bias": True}, seed=9), prompt_of(20)
    model.save_pretrained(tmp_path)
    with Ranks(small, 2) as ranks:
        ranks.all(lambda runner: runner.update(tmp_path))
        logits = forward(ranks, [(prompt, 0, [0, 1])])
        torch.testing.assert_close(logits, expected(model, prompt), atol=1e-4, rtol=0)
        ranks.all(lambda runner: runner.sleep(2))
        ranks.all(lambda runner: runner.update(small))
        ranks.all(Runner.wakeup)
        logits = forward(ranks, [(prompt, 0, [0, 1])])
    torch.testing.assert_close(logits, forward(load(small), [(prompt, 0, [0, 1])]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("field", ["sliding_window", "rope_theta"])
def test_weights_of_a_model_that_computes_otherwise_are_refused(tmp_path: Path, field: str) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    reference("Mistral", {"sliding_window": 40}).save_pretrained(model)
    reference("Mistral", {"sliding_window": 40}).save_pretrained(other)
    config = json.loads((other / "config.json").read_text())
    (config["rope_parameters"] if field == "rope_theta" else config)[field] = 41
    (other / "config.json").write_text(json.dumps(config))
    runner = load(model)
    with pytest.raises(ModelError, match=r"is another model: its (windows|rope) is"):
        runner.update(other)


def test_a_missing_tensor_is_named_on_every_rank(small: Path, tmp_path: Path) -> None:
    weights = load_file(small / "model.safetensors")
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((small / "config.json").read_bytes())
    with (
        pytest.raises(ModelError, match=r"lack the tensor model\.layers\.1\.mlp\.down_proj\.weight"),
        Ranks(tmp_path, 2),
    ):
        pass


@pytest.mark.model
@pytest.mark.timeout(900)
def test_smollm2_on_numbers_of_ranks_by_which_its_9_heads_on_3_do_not_divide() -> None:
    directory = resolve("smollm2-135m", None, lambda name, done: None)
    prompt = prompt_of(48)
    alone = forward(load(directory), [(prompt, 0, [0, 1, 2])])
    for size in (2, 3, 4):
        with Ranks(directory, size) as ranks:
            spread = forward(ranks, [(prompt, 0, [0, 1, 2])])
        torch.testing.assert_close(spread, alone, atol=2e-3, rtol=0)
