"""A CUDA graph without a GPU: what a function does to memory is recorded, and done again with nothing of Python in between.

As on a GPU, a replay knows addresses, not values: whatever Python computed or looked up while recording stays as it was. And
what makes the host wait for the device, or copies from memory that only Python knows, can't be recorded.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tp.flashinfer_stand_in.rules import Refused

_WAITS = {
    "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero", "aten::masked_select", "aten::lift_fresh",
}  # fmt: skip
"""Values that Python asks for, results whose size depends on values, and tensors that Python makes of its own."""


class Tape:
    """A `Recorder` of the engine's graphs. `recorded`, `replayed`: how often."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        steps: list[Callable[[], None]] = []
        with _Recording(steps):
            run()
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            for step in steps:
                step()

        return replay


class _Recording(TorchDispatchMode):
    def __init__(self, steps: list[Callable[[], None]]) -> None:
        super().__init__()
        self._steps = steps
        self.in_kernel = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.in_kernel:
            return func(*args, **kwargs)
        if func._schema.name in _WAITS or _selects(func._schema.name, args):
            raise Refused(f"{func._schema.name} can't be recorded: the host would wait for the device")
        before = func(*args, **kwargs)
        if not func._schema.name.startswith(("aten::empty", "aten::new_empty")):
            self._steps.append(lambda: _write(before, func(*args, **kwargs)))
        return before

    def __enter__(self) -> "_Recording":
        _active.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        _active.remove(self)
        super().__exit__(*error)

    @contextmanager
    def kernel(self, body: Callable[[], None]) -> Iterator[None]:
        self._steps.append(body)
        self.in_kernel = True
        try:
            yield
        finally:
            self.in_kernel = False


_active: list[_Recording] = []


def launch(body: Callable[[], None], *tensors: torch.Tensor) -> None:
    """Runs a kernel, whose inner steps are no business of a tape; not where `tensors` are places without content."""
    if any(tensor.is_meta for tensor in tensors):
        return
    if not _active:
        body()
        return
    with _active[-1].kernel(body):
        body()


def recording() -> bool:
    return bool(_active)


def _selects(name: str, args: tuple[Any, ...]) -> bool:
    """x[mask]: its size is known to the device alone."""
    indices = args[1] if name in ("aten::index", "aten::index_put_") else ()
    return any(index is not None and index.dtype == torch.bool for index in indices)


def _write(before: Any, now: Any) -> None:
    """Puts a replayed operation's results where the recorded one's were; views and what works in place are there already."""
    if isinstance(before, torch.Tensor):
        if before.data_ptr() != now.data_ptr():
            before.copy_(now)
    elif isinstance(before, (list, tuple)):
        for old, new in zip(before, now, strict=True):
            _write(old, new)
