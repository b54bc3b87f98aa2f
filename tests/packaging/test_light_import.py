"""`import tllm_core` and the command line's help stay light."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "tokenizers", "numpy", "safetensors", "gguf", "zmq", "nats", "redis", "uvloop")


@pytest.mark.parametrize(
    "code",
    [
        "import tllm_core",
        "import tllm_core; tllm_core.GenerationExecutor; tllm_core.LLM; tllm_core.SamplingParams; tllm_core.RequestError",
        "import tllm_core.contracts.interfaces, tllm_core.config, tllm_core.registry",
        "from tllm_core.cli import main; main(['plugins', '--help'])",
    ],
)
def test_nothing_heavy_is_imported(code: str) -> None:
    check = f"""
import sys
try:
    {code}
except SystemExit as ended:
    assert not ended.code
print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.strip() == "[]"
