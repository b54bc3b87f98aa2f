"""Reads safetensors straight into the tensors that the model computes with: only the parts that a rank needs, and never
anything twice.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open

from tllm_core.errors import ModelError

_INDEX = "model.safetensors.index.json"


class Piece(NamedTuple):
    """Rows or columns `start` to `stop` of one stored tensor, which config.json says is of `shape`.

    extent: how many rows or columns it takes where it goes; those beyond its own are zeros.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    extent: int


class Checkpoint:
    """The tensors of a model directory, in one file or several. A context manager: its files are mapped while it is open.

    Raises ModelError where the directory has no weights, or a file can't be read.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[Path, Any] = {}
        self._where = _locate(directory) if (directory / _INDEX).exists() else self._scan()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def dtype(self, name: str) -> torch.dtype:
        """The type that tensor `name` is stored in."""
        empty: torch.Tensor = self._read(name, lambda file: file.get_slice(name)[:0])
        return empty.dtype

    def bytes_as(self, dtype: torch.dtype) -> int:
        """About what all its tensors take in memory as `dtype`."""
        paths = set(self._where.values())
        try:
            size = sum(path.stat().st_size for path in paths)
        except OSError as error:
            raise ModelError(f"{error.filename} can't be read: {error.strerror}") from None
        stored = min(self.dtype(name).itemsize for name in self._where)
        return size * max(dtype.itemsize, stored) // stored

    def tensor(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A copy of one tensor in `dtype`."""
        return self.joined([Piece(name, tuple(shape), 0, shape[0], shape[0])], 0, dtype, dtype).clone()

    def joined(self, pieces: Sequence[Piece], axis: int, stored: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
        """Pieces one after the other along `axis`, along which they are cut, rounded to `stored` and held in `dtype`.

        A single one that needs no conversion is the mapped file itself: to be read, and not after this checkpoint is
        closed. Raises ModelError, which names the tensor, where one is missing or is not of its shape.
        """
        pieces = _merged(pieces)
        sources = [self._part(piece, axis) for piece in pieces]
        rounded = [source.to(stored) if source.dtype.itemsize > stored.itemsize else source for source in sources]
        if len(pieces) == 1 and pieces[0].stop - pieces[0].start == pieces[0].extent:
            return rounded[0].to(dtype).contiguous()
        shape = list(pieces[0].shape)
        shape[axis] = sum(piece.extent for piece in pieces)
        padded = any(piece.stop - piece.start != piece.extent for piece in pieces)
        target = torch.zeros(shape, dtype=dtype) if padded else torch.empty(shape, dtype=dtype)
        start = 0
        for source, piece in zip(rounded, pieces, strict=True):
            target.narrow(axis, start, source.shape[axis]).copy_(source)
            start += piece.extent
        return target

    def _part(self, piece: Piece, axis: int) -> torch.Tensor:
        """A view of the mapped file: nothing else of it is read."""
        name, shape = piece.name, list(piece.shape)
        found = self._read(name, lambda file: file.get_slice(name).get_shape())
        if found != shape:
            raise ModelError(f"{self._where[name]}: {name} is of shape {found}, but config.json asks for {shape}")
        where = slice(piece.start, piece.stop)
        part: torch.Tensor = self._read(
            name, lambda file: file.get_slice(name)[where] if axis == 0 else file.get_slice(name)[:, where]
        )
        return part

    def _read(self, name: str, read: Callable[[Any], Any]) -> Any:
        path = self._where.get(name)
        if path is None:
            raise ModelError(f"{self.directory}: the weights lack the tensor {name}")
        try:
            return read(self._open(path))
        except SafetensorError as error:
            raise ModelError(f"{path} can't be read; is it complete? ({error})") from None

    def _open(self, path: Path) -> Any:
        opened = self._files.get(path)
        if opened is None:
            try:
                opened = self._files[path] = safe_open(path, framework="pt")
            except FileNotFoundError:
                raise ModelError(f"{path} is named by {_INDEX} but is not there") from None
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} can't be read; is it complete? ({error})") from None
        return opened

    def _scan(self) -> dict[str, Path]:
        paths = sorted(self.directory.glob("*.safetensors"))
        if not paths:
            other = next((p for kind in ("*.bin", "*.pth", "*.gguf") for p in self.directory.glob(kind)), None)
            hint = f"; {other.name} is not read: name a GGUF file itself, or convert to safetensors" if other else ""
            raise ModelError(f"{self.directory} has no weights: no *.safetensors file{hint}")
        return {name: path for path in paths for name in self._open(path).keys()}  # noqa: SIM118 - no mapping


def _merged(pieces: Sequence[Piece]) -> list[Piece]:
    """Neighbours of one tensor as one piece."""
    merged = [pieces[0]]
    for piece in pieces[1:]:
        last = merged[-1]
        if piece.name == last.name and piece.start == last.stop and last.stop - last.start == last.extent:
            merged[-1] = last._replace(stop=piece.stop, extent=last.extent + piece.extent)
        else:
            merged.append(piece)
    return merged


def _locate(directory: Path) -> dict[str, Path]:
    path = directory / _INDEX
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        return {name: directory / file for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} is no index of safetensors files: {error!r}") from None
