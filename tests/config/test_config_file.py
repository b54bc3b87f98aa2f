"""The config file: whatever the path leads to, it is read or refused in one line that names it, and never waited for."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tllm_core.config import load_settings
from tllm_core.config.sources import MAX_FILE_BYTES
from tllm_core.errors import ConfigError

PATIENCE_S = 60.0
"""For a process that does not wait for anything."""


def fifo(folder: Path) -> Path:
    os.mkfifo(folder / "fifo.toml")
    return folder / "fifo.toml"


def directory(folder: Path) -> Path:
    (folder / "folder.toml").mkdir()
    return folder / "folder.toml"


def endless(folder: Path) -> Path:
    (folder / "device.toml").symlink_to("/dev/zero")
    return folder / "device.toml"


def huge(folder: Path) -> Path:
    path = folder / "huge.toml"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse: it takes no room on the disk
    return path


def just_too_large(folder: Path) -> Path:
    return written(folder, "large.toml", b"#" * (MAX_FILE_BYTES + 1))


def unix_socket(folder: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(str(folder / "socket.toml"))
    return folder / "socket.toml"


def no_text(folder: Path) -> Path:
    return written(folder, "latin.toml", "[engine]\nname = 'é'\n".encode("latin-1"))


def too_deep(folder: Path) -> Path:
    return written(folder, "deep.toml", b"x = " + b"[" * 100_000)


def many_keys_deep(folder: Path) -> Path:
    return written(folder, "keys.toml", b"engine.echo." + b"a." * 2_000 + b"a = 1")


def too_many_digits(folder: Path) -> Path:
    return written(folder, "digits.toml", b"x = " + b"9" * 5_000)


def endless_link(folder: Path) -> Path:
    (folder / "loop.toml").symlink_to(folder / "loop.toml")
    return folder / "loop.toml"


def too_long_a_name(folder: Path) -> Path:
    return folder / f"{'x' * 300}.toml"


def written(folder: Path, name: str, content: bytes) -> Path:
    (folder / name).write_bytes(content)
    return folder / name


ODD: list[tuple[Callable[[Path], Path], str]] = [
    (fifo, "a config file must be a regular file, and this is a FIFO"),
    (directory, "the config file can't be read: Is a directory"),
    (endless, "a config file must be a regular file, and this is a device"),
    (unix_socket, "the config file can't be read: "),
    (huge, "a config file may have 1048576 bytes, and this has more"),
    (just_too_large, "a config file may have 1048576 bytes, and this has more"),
    (no_text, "not UTF-8 text, at byte 17"),
    (too_deep, "bad TOML: it is nested too deeply"),
    (many_keys_deep, "bad TOML: it is nested too deeply"),
    (too_many_digits, "bad TOML: Exceeds the limit (4300 digits)"),
    (endless_link, "the config file can't be read: Too many levels of symbolic links"),
    (too_long_a_name, "the config file can't be read: File name too long"),
]


@pytest.mark.parametrize(("made", "words"), ODD, ids=[made.__name__ for made, _ in ODD])
def test_what_is_no_config_file_is_named_with_what_it_is(
    tmp_path: Path, made: Callable[[Path], Path], words: str
) -> None:
    path = made(tmp_path)
    for given, environ in ((path, {}), (None, {"TLLM_CONFIG": str(path)})):
        with pytest.raises(ConfigError, match=f"^{re.escape(f'{path}: {words}')}"):
            load_settings(given, environ=environ)


@pytest.mark.parametrize("made", [fifo, directory, endless, huge, endless_link], ids=lambda made: made.__name__)
def test_a_tllm_toml_that_is_no_file_is_named_by_every_verb(tmp_path: Path, made: Callable[[Path], Path]) -> None:
    made(tmp_path).rename(tmp_path / "tllm.toml")
    for verb in ("config", "check"):
        status, _, told = tllm(verb, folder=tmp_path)
        assert (status, told.count("\n")) == (2, 1), told
        assert told.startswith("tllm: tllm.toml: ")


def test_a_link_to_nothing_is_not_taken_for_no_tllm_toml(tmp_path: Path) -> None:
    (tmp_path / "tllm.toml").symlink_to(tmp_path / "gone.toml")
    with pytest.raises(ConfigError, match=r"the config file can't be read: No such file or directory$"):
        load_settings(tmp_path / "tllm.toml", environ={})
    assert tllm("config", folder=tmp_path)[0] == 2


def test_a_name_that_no_file_can_have_is_shown_readably() -> None:
    with pytest.raises(ConfigError, match=r"^a\\x00b\.toml: the config file can't be read: embedded null byte$"):
        load_settings("a\0b.toml", environ={})


def test_a_name_that_is_not_utf_8_works_and_is_shown_in_every_terminal(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/caf\xe9.toml"
    Path(os.fsdecode(path)).write_text("[engine]\nname = 'echo'\n")
    settings = load_settings(os.fsdecode(path), environ={})
    assert settings.origins["engine.name"] == f"{tmp_path}/caf\\udce9.toml"
    for form in ((), ("--json",)):
        status, shown, told = tllm("config", *form, folder=tmp_path, config=os.fsdecode(path))
        assert (status, told) == (0, "")
    assert json.loads(shown)["engine.name"]["origin"] == f"{tmp_path}/caf\\udce9.toml"


def test_the_largest_file_that_is_read_is_read_whole(tmp_path: Path) -> None:
    text = b"[engine]\nname = 'echo'\n"
    path = written(tmp_path, "full.toml", b"#" * (MAX_FILE_BYTES - 1 - len(text)) + b"\n" + text)
    assert load_settings(path, environ={}).engine.name == "echo"


def tllm(verb: str, *arguments: str, folder: Path, config: str | None = None) -> tuple[int, str, str]:
    """The command line in a process of its own: status, standard output, standard error."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TLLM_")}
    done = subprocess.run(
        [Path(sys.executable).with_name("tllm"), verb, *arguments],
        cwd=folder,
        env=environ | ({"TLLM_CONFIG": config} if config else {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr
