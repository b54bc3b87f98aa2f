"""Reads safetensors straight into the tensors that the model computes with; the whole model is never held twice."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from tllm_core.errors import ModelError

_INDEX = "model.safetensors.index.json"


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
        return self._mapped(name).dtype

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
        return self.stacked([name], [shape], dtype, dtype).clone()

    def stacked(
        self, names: Sequence[str], shapes: Sequence[Sequence[int]], stored: torch.dtype, dtype: torch.dtype
    ) -> torch.Tensor:
        """Tensors one below the other along their first axis, rounded to `stored` and held in `dtype`.

        A single one that needs no conversion is the mapped file itself: to be read, and not after this checkpoint is
        closed. Raises ModelError, which names the tensor, where one is missing or is not of its shape.
        """
        sources = [self._shaped(name, shape) for name, shape in zip(names, shapes, strict=True)]
        rounded = [source.to(stored) if source.dtype.itemsize > stored.itemsize else source for source in sources]
        if len(rounded) == 1:
            return rounded[0].to(dtype)
        target = torch.empty(sum(shape[0] for shape in shapes), *shapes[0][1:], dtype=dtype)
        start = 0
        for source in rounded:
            target[start : start + source.shape[0]] = source
            start += source.shape[0]
        return target

    def _shaped(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        tensor = self._mapped(name)
        if list(tensor.shape) != list(shape):
            raise ModelError(
                f"{self._where[name]}: {name} is of shape {list(tensor.shape)}, but config.json asks for {list(shape)}"
            )
        return tensor

    def _mapped(self, name: str) -> torch.Tensor:
        path = self._where.get(name)
        if path is None:
            raise ModelError(f"{self.directory}: the weights lack the tensor {name}")
        try:
            tensor: torch.Tensor = self._open(path).get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"{path} can't be read; is it complete? ({error})") from None
        return tensor

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


def _locate(directory: Path) -> dict[str, Path]:
    path = directory / _INDEX
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        return {name: directory / file for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} is no index of safetensors files: {error!r}") from None
