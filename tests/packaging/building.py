"""Commands as a person would type them, and trees to build from."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEFT_BY_BUILDS = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")


def run(*command: str | Path, cwd: Path, timeout: float = 300, **variables: str) -> str:
    """What it printed. Runs with `variables`, and without those that would tell Python or tllm-core of this checkout."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PYTEST_", "TLLM_"))}
    kept = {key: os.environ[key] for key in ("TLLM_CACHE",) if key in os.environ}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**environ, **kept, **variables},
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def copy_of(tree: Path, target: Path) -> Path:
    """A build leaves files behind in its tree, so that it gets one of its own."""
    return Path(shutil.copytree(tree, target, ignore=LEFT_BY_BUILDS, symlinks=True))
