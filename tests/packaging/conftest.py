"""The project's own wheel, built once for all files of this folder."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path

import pytest

from tests.packaging.building import ROOT, copy_of, run


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, as a release is; by whichever of pytest's parallel processes asks for it first."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    built = shared / "wheel"
    with (shared / "wheel.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            fresh = tmp_path_factory.mktemp("dist")
            run(sys.executable, "-m", "build", "--outdir", fresh, copy_of(ROOT, fresh / "tree"), cwd=fresh)
            fresh.rename(built)
    return next(built.glob("*.whl"))
