"""Our own engines keep what every engine promises."""

import json
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from tllm_core.conformance import EngineConformance
from tllm_core.contracts.interfaces import Engine, EngineCapability, EngineContext, EngineSpec
from tllm_core.contracts.messages import EngineInfo, EngineRequest, IterationStats, Output, Step
from tllm_core.engines.echo import EchoSettings
from tllm_core.engines.echo.engine import EchoEngine

VOCAB, LIMIT, HIDDEN = 320, 192, 64
OWN_ENDS = range(2, VOCAB, 16)
"""So many that a random model comes to one."""
NORMS = (
    "model.norm.weight",
    *(f"model.layers.{layer}.{name}_layernorm.weight" for layer in range(2) for name in ("input", "post_attention")),
)


class TestEcho(EngineConformance):
    engine = "echo"
    settings: ClassVar[dict[str, Any]] = {"max_seq_len": 192, "vocab_size": 64, "eos_token_id": 5, "max_batch_size": 16}
    bad_settings: ClassVar[dict[str, Any]] = {"faults": [{"at": "start", "do": "raise", "message": "no weights here"}]}
    many_ranks: ClassVar[dict[str, Any]] = {"world_size": 2}


class SelfDriven(Engine):
    """Echo on a thread of its own: steps go on without anybody asking, and `step` fetches what there is."""

    capabilities = EngineCapability.DETERMINISTIC | EngineCapability.SELF_DRIVEN
    thread: threading.Thread | None = None

    def __init__(self, settings: EchoSettings) -> None:
        super().__init__(settings)
        self.echo = EchoEngine(settings)
        self.changed, self.closed = threading.Condition(), False
        self.outputs: list[Output] = []

    def start(self, context: EngineContext) -> EngineInfo:
        context.phase("starting the thread")
        info = self.echo.start(context)
        self.context = context
        self.thread = threading.Thread(target=self.drive, name="self-driven", daemon=True)
        self.thread.start()
        return info

    def drive(self) -> None:
        with self.changed:
            while not self.closed:
                step = self.echo.step()
                self.outputs += step.outputs
                if step.outputs:
                    self.context.wake()
                # Also while it works, so that others come to their turn.
                self.changed.wait(0.0005 if step.again else None)

    def submit(self, request: EngineRequest) -> None:
        with self.changed:
            self.echo.submit(request)
            self.changed.notify()

    def abort(self, request_id: int) -> None:
        with self.changed:
            self.echo.abort(request_id)
            self.outputs = [output for output in self.outputs if output.request_id != request_id]

    def step(self) -> Step:
        with self.changed:
            outputs, self.outputs = self.outputs, []
        return Step(outputs, False)

    def control(self, method, args, ranks):
        with self.changed:
            return self.echo.control(method, args, ranks)

    def stats(self) -> IterationStats:
        with self.changed:
            return self.echo.stats()

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify()
        if self.thread is not None:
            self.thread.join()
        self.echo.close()


SPEC = EngineSpec(name="self-driven", settings_type=EchoSettings, load=f"{__name__}:SelfDriven")


class TestSelfDriven(EngineConformance):
    engine = SPEC
    settings: ClassVar[dict[str, Any]] = {"max_seq_len": 192, "vocab_size": 64, "max_batch_size": 16}


class TestTp(EngineConformance):
    engine = "tp"
    bad_settings: ClassVar[dict[str, Any]] = {"model": "/nowhere/at/all"}
    many_ranks: ClassVar[dict[str, Any]] = {"tensor_parallel_size": 2}

    @classmethod
    def setup_class(cls) -> None:
        cls.directory = tempfile.TemporaryDirectory(prefix="tllm-tiny-")
        save_tiny_model(Path(cls.directory.name))
        cls.settings = {
            "model": cls.directory.name,
            "max_seq_len": LIMIT,
            "num_blocks": 64,
            "max_num_seqs": 16,
            "max_batched_tokens": 64,
            "threads": 1,
            "kv_events": 1000,
        }

    @classmethod
    def teardown_class(cls) -> None:
        super().teardown_class()
        cls.directory.cleanup()


def save_tiny_model(directory: Path) -> None:
    """A Llama with random weights, the same every time."""
    import torch
    from safetensors.torch import save_file

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": LIMIT,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": list(OWN_ENDS),
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes()}
    weights |= {name: torch.ones(HIDDEN) for name in NORMS}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def shapes() -> Iterator[tuple[str, tuple[int, int]]]:
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    yield "lm_head.weight", (VOCAB, HIDDEN)
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        for name, width in (("q", HIDDEN), ("k", HIDDEN // 2), ("v", HIDDEN // 2), ("o", HIDDEN)):
            yield f"{prefix}.self_attn.{name}_proj.weight", (width, HIDDEN)
        for name in ("gate", "up"):
            yield f"{prefix}.mlp.{name}_proj.weight", (2 * HIDDEN, HIDDEN)
        yield f"{prefix}.mlp.down_proj.weight", (HIDDEN, 2 * HIDDEN)
