"""GGUF files of more than one family, written by gguf itself, through the converter and into the engine."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tp.reference import POSITIONS, VOCAB, expected, forward, load, prompt_of, reference
from tllm_core.engines.tp.config import read_config
from tllm_core.engines.tp.prepare import resolve
from tllm_core.errors import ModelError

gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers")

HEADS, KV_HEADS, LAYERS = 4, 2, 2


def write(path: Path, architecture: str, model: Any) -> None:
    """`model` of transformers as a GGUF file, with a tokenizer whose words are single characters."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(POSITIONS)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    letters = [chr(256 + i) for i in range(VOCAB - 1)]
    writer.add_token_list([*letters, letters[0] + letters[1]])
    writer.add_token_merges([f"{letters[0]} {letters[1]}"])
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], LAYERS)
    for name, tensor in model.state_dict().items():
        short = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(short, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def convert(model: Any, architecture: str, directory: Path) -> Path:
    path = directory / "small.gguf"
    write(path, architecture, model)
    return resolve(str(path), str(directory / "cache"), lambda name, done: None)


@pytest.mark.parametrize(("family", "head_dim"), [("Qwen2", 16), ("Qwen3", 128)])
def test_a_gguf_of_another_family_computes_what_the_model_did(family: str, head_dim: int, tmp_path: Path) -> None:
    model, prompt = reference(family, {"head_dim": head_dim}), prompt_of(40)
    directory = convert(model, family.lower(), tmp_path)
    assert read_config(directory).architecture == f"{family}ForCausalLM"
    logits = forward(load(directory), [(prompt, 0, [0, 1, 2])])
    torch.testing.assert_close(logits, expected(model, prompt), atol=1e-4, rtol=0)


def test_sizes_that_transformers_reads_otherwise_are_refused_and_not_made_up(tmp_path: Path) -> None:
    """It takes every Qwen3 in a GGUF file to have heads of 128."""
    with pytest.raises(
        ModelError, match=r"takes model\.layers\.\d\.self_attn\..* to be \[.*\], and it is \[.*\] there"
    ):
        convert(reference("Qwen3", {"head_dim": 16}), "qwen3", tmp_path)


def test_a_gguf_without_one_of_its_tensors_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = reference("Qwen2", {"head_dim": 16})
    tensors = model.state_dict()
    del tensors["model.layers.1.mlp.down_proj.weight"]
    monkeypatch.setattr(model, "state_dict", lambda: tensors)
    with pytest.raises(ModelError, match=r"it lacks model\.layers\.1\.mlp\.down_proj\.weight"):
        convert(model, "qwen2", tmp_path)
