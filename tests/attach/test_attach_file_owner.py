"""An attach file is its owner's: one of another user is refused, and no other user can read one."""

import os
from pathlib import Path

import pytest

from tllm_core import GenerationExecutor
from tllm_core.attach import AttachFile, read_attach_file, write_attach_file
from tllm_core.contracts.interfaces import EngineAddress
from tllm_core.errors import ConfigError

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away or become another user")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    address = EngineAddress(transport="zmq", engine="e", generation=1, endpoints={"zmq": "ipc:///nowhere"})
    path = tmp_path / "engine.json"
    write_attach_file(path, AttachFile(engine="echo", transport="zmq", address=address, key="ab" * 32))
    return path


@needs_root
def test_a_file_of_another_user_is_refused_and_its_owner_named(path: Path) -> None:
    os.chown(path, NOBODY, NOBODY)
    with pytest.raises(ConfigError, match=f"belongs to user {NOBODY}"):
        read_attach_file(path)
    with pytest.raises(ConfigError, match=f"belongs to user {NOBODY}"):
        GenerationExecutor.attach(path)


@needs_root
def test_another_user_can_not_read_it(path: Path) -> None:
    for directory in path.parents:
        if directory.is_relative_to("/tmp") and directory != Path("/tmp"):
            directory.chmod(0o755)
    os.seteuid(NOBODY)
    try:
        with pytest.raises(ConfigError, match="Permission denied"):
            read_attach_file(path)
    finally:
        os.seteuid(0)
