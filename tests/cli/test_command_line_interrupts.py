"""A signal at any moment of the command line's start ends it with the signal's exit code, and no traceback."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = "import sys\nfrom tllm_core.entry import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
"""What an installer makes of the entry point."""

STRIKE = """
import os, signal, sys

class Strike:
    \"\"\"Sends this very process a signal when one module is looked for.\"\"\"
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == os.environ["STRIKE_AT"]:
            os.kill(os.getpid(), int(os.environ["STRIKE_WITH"]))

sys.meta_path.insert(0, Strike)
"""


@pytest.fixture
def interrupted(tmp_path: Path) -> "Interrupted":
    return Interrupted(tmp_path)


class Interrupted:
    """`tllm plugins --json` with a signal at the import of one module."""

    def __init__(self, folder: Path) -> None:
        (folder / "tllm").write_text(SCRIPT)
        (folder / "sitecustomize.py").write_text(STRIKE)
        self._folder = folder
        self._path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))

    def __call__(
        self, module: str, prefix: str = "", number: int = signal.SIGINT
    ) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            ["bash", "-c", f"{prefix} exec {sys.executable} {self._folder / 'tllm'} plugins --json"],
            env=os.environ | {"STRIKE_AT": module, "STRIKE_WITH": str(int(number)), "PYTHONPATH": self._path},
            cwd=self._folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


@pytest.mark.parametrize(
    "module",
    [
        "tllm_core.cli",
        "traceback",
        "tllm_core.errors",
        "tllm_core.cli.arguments",
        "argparse",
        "msgspec",
        "tllm_core.registry",
        "tllm_core.cli.inspecting",
        "tllm_core.engines.echo",
        "tllm_core.plugins.bench",
    ],
)
def test_an_interrupt_while_things_are_imported_is_exit_code_130(interrupted: Interrupted, module: str) -> None:
    done = interrupted(module)
    assert (done.returncode, done.stderr, done.stdout) == (128 + signal.SIGINT, "", "")


@pytest.mark.parametrize(
    "module",
    [
        "tllm_core.registry",
        "tllm_core.cli.inspecting",
        "tllm_core.transports.zmq",
        "tllm_core.transports.nats",
        "tllm_core.engines.echo",
        "tllm_core.plugins.bench",
    ],
)
def test_a_termination_while_things_are_imported_is_exit_code_143(interrupted: Interrupted, module: str) -> None:
    done = interrupted(module, number=signal.SIGTERM)
    assert (done.returncode, done.stderr, done.stdout) == (128 + signal.SIGTERM, "", "")


def test_without_an_interrupt_it_runs(interrupted: Interrupted) -> None:
    done = interrupted("no.such.module")
    assert (done.returncode, done.stderr) == (0, "")
    assert '"echo"' in done.stdout


def test_a_background_job_whose_interrupts_are_ignored_keeps_ignoring_them(interrupted: Interrupted) -> None:
    done = interrupted("tllm_core.cli.inspecting", prefix="trap '' INT;")
    assert (done.returncode, done.stderr) == (0, "")
