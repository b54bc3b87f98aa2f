"""`tllm bench engine` on a tiny model: who takes part, and what limits are made of."""

import argparse
import json
from pathlib import Path

import pytest
import torch

from tests.tp.flashinfer_runs import save_model
from tllm_core.plugins.bench import engine
from tllm_core.plugins.bench.engine_limits import BandwidthLimit, Sizes


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


def test_our_speed_stands_beside_its_limit(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    engine.add_arguments(parser)
    options = [
        "--model",
        str(model_dir),
        "--batch",
        "1,3",
        "--prompt-tokens",
        "9",
        "--new-tokens",
        "8",
        "--rounds",
        "1",
    ]
    # The prompt of 512 tokens is longer than a tiny model's limit.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "PREFILL_TOKENS", 32)
        assert engine.run(parser.parse_args([*options, "--threads", "1", "--json"])) == 0
    report = json.loads(capsys.readouterr().out)
    assert [case["batch"] for case in report["cases"]] == [1, 3, 1]
    for case in report["cases"]:
        assert set(case["tokens_per_s"]) == {"ours", "gemm_limit"}
        assert min(case["tokens_per_s"].values()) > 0


def test_the_sizes_of_a_model_are_those_of_its_weights(model_dir: Path) -> None:
    from safetensors.torch import load_file

    sizes = Sizes.of(str(model_dir))
    stored = load_file(model_dir / "model.safetensors")
    # But norms, which are nothing beside them, and the embedding, of which a step reads a row per token.
    products = [w for name, w in stored.items() if w.dim() == 2 and "embed_tokens" not in name]
    assert sizes.weights == sum(w.numel() for w in products)
    assert sizes.kv == 2 * 2 * 64


def test_the_bandwidth_limit_reads_all_weights_once_per_step_and_every_sequence_its_keys(model_dir: Path) -> None:
    limit = BandwidthLimit(str(model_dir), "bfloat16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limit, "_bytes_per_s", lambda: 1e9)
        sizes = Sizes.of(str(model_dir))
        step_bytes = 2 * (sizes.weights + 4 * 15 * 2 * sizes.kv)
        assert limit.decode(4, prompt_tokens=10, new_tokens=10) == pytest.approx(4 * 1e9 / step_bytes)
        assert limit.prefill(100) == pytest.approx(100 * 1e9 / (2 * sizes.weights))


@pytest.mark.gpu
@pytest.mark.model
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_ours_is_faster_than_transformers_and_told_beside_what_memory_allows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("flashinfer")
    parser = argparse.ArgumentParser()
    engine.add_arguments(parser)
    options = ["--device", "cuda", "--attention", "flashinfer", "--dtype", "bfloat16", "--batch", "1,16,64", "--json"]
    assert engine.run(parser.parse_args([*options, "--compare", "transformers"])) == 0
    report = json.loads(capsys.readouterr().out)
    with capsys.disabled():
        for case in report["cases"]:
            print(f"\n{case['name']}: {case['tokens_per_s']['ours']} tokens/s, to others {case['ours_to']}")
    for case in report["cases"]:
        assert case["ours_to"]["bandwidth_limit"] <= 1.1
        assert case["ours_to"]["generate"] > 1
        assert case["ours_to"]["continuous_batching"] > 1
