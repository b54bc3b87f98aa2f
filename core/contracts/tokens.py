"""Token ids in one int32 buffer."""

import sys
from array import array
from collections.abc import Iterable, Iterator
from typing import Self, overload

from tllm_core.errors import RequestError

MAX_TOKEN_ID = 2**31 - 1
_BYTES = frozenset("Bbc")
"""Formats of buffers that are text or binary data, and not token ids."""


class TokenIds:
    """An immutable sequence of int32 token ids in one little-endian buffer; crosses a process boundary without a copy.

    `view` is a memoryview of format "i", shape [length]; `torch.frombuffer(ids.view, dtype=torch.int32)` does not copy.
    """

    __slots__ = ("view",)

    def __init__(self, buffer: bytes | bytearray | memoryview) -> None:
        raw = memoryview(buffer).cast("B")
        if sys.byteorder != "little":
            swapped = array("i", raw.tobytes())
            swapped.byteswap()
            raw = memoryview(swapped).cast("B")
        self.view = raw.cast("i")

    @classmethod
    def of(cls, values: "TokenIds | Iterable[int]", field: str = "prompt_token_ids") -> Self:
        """Snapshots `values`: any iterable of ints, or a 1-D int32 buffer (numpy, array, torch through numpy).

        Raises RequestError for anything that is no flat sequence of token ids in [0, 2^31), also for all kinds of bytes.
        """
        if isinstance(values, cls):
            return values
        if (buffer := _buffer_format(values)) in _BYTES or isinstance(values, str | bytes):
            raise RequestError(f"{field} must be token ids, not {type(values).__name__}; LLM takes text", field=field)
        if isinstance(values, list | tuple) and bool in set(map(type, values)):
            raise RequestError(f"{field} has a bool, which is no token id", field=field)
        try:
            ids = array("i", _int32_bytes(values)) if buffer == "i" else array("i", values)
        except OverflowError:
            raise RequestError(f"{field} has a token id outside [0, {MAX_TOKEN_ID}]", field=field) from None
        except TypeError:
            raise RequestError(f"{field} must be a flat sequence of integer token ids", field=field) from None
        except Exception as error:  # of the caller's own iterator or __index__
            problem = f"{type(error).__name__}: {error}"
            raise RequestError(f"{field} can't be read as token ids: {problem}", field=field) from error
        if ids and min(ids) < 0:
            raise RequestError(f"{field} has the negative token id {min(ids)}", field=field)
        if sys.byteorder != "little":
            ids.byteswap()
        return cls(ids.tobytes())

    def tolist(self) -> list[int]:
        return self.view.tolist()

    def __len__(self) -> int:
        return len(self.view)

    def __iter__(self) -> Iterator[int]:
        return iter(self.view)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self.view[index] if isinstance(index, int) else self.view[index].tolist()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenIds):
            return self.view == other.view
        return self.tolist() == other

    def __hash__(self) -> int:
        return hash(self.view.tobytes())

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self.view[:8])) + (", ..." if len(self) > 8 else "")
        return f"TokenIds([{shown}], length={len(self)})"


def _buffer_format(values: object) -> str | None:
    """The item format of a flat buffer, as in `struct`; None for anything else."""
    try:
        view = memoryview(values)  # type: ignore[arg-type]
    except (TypeError, ValueError, BufferError):
        return None
    return view.format if view.ndim == 1 else None


def _int32_bytes(values: object) -> bytes:
    return memoryview(values).tobytes()  # type: ignore[arg-type]
