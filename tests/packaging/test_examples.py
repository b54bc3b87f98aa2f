"""The examples run as they are and end by themselves."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def printed(name: str) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name],
        capture_output=True,
        text=True,
        timeout=110,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_many_callers_each_receive_their_tokens() -> None:
    assert "100 callers received 3200 tokens" in printed("many_callers.py")


def test_every_caller_hears_of_the_engine_s_death() -> None:
    lines = printed("engine_death.py").splitlines()
    assert len([line for line in lines if "SIGKILL" in line]) == 3
    assert lines[-1] == "healthy: False"


@pytest.mark.model
def test_text_is_streamed() -> None:
    assert "Paris" in printed("text.py")
