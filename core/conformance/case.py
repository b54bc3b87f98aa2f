"""What a case is: one promise, checked on its own, within a time limit; a hang is a failure.

Cases are plain pytest methods. They use no fixtures, so that all they do lies within their time limit, and they run on a thread
of their own, so that one which hangs can be told, with the place where it hangs.
"""

from __future__ import annotations

import enum
import functools
import os
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NoReturn

import pytest
from msgspec import Struct

STRICT = "TLLM_CONFORMANCE_STRICT"
BLAME = "If this fails:"


class Case(Struct, frozen=True):
    """invariants: of DESIGN section 2, such as "I2". needs: the capability that it is about, None = every subject owes it.

    proves: it also shows that a capability is there which is not claimed. promise, blame: of its docstring.
    """

    name: str
    invariants: tuple[str, ...]
    needs: enum.Flag | None
    proves: bool
    timeout_s: float
    promise: str
    blame: str


def case(
    *invariants: str, needs: enum.Flag | None = None, proves: bool = False, timeout_s: float = 30.0
) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Makes a method of a Suite a case. Its docstring is the promise, and after "If this fails:" what that most likely means."""

    def decorate(check: Callable[[Any], None]) -> Callable[[Any], None]:
        promise, found, blame = (check.__doc__ or "").partition(BLAME)
        if not (promise.strip() and found):
            raise TypeError(f"{check.__qualname__} needs a docstring: the promise, and {BLAME!r} what it means")
        about = Case(check.__name__, invariants, needs, proves, timeout_s, _one_line(promise), _one_line(blame))

        @functools.wraps(check)
        def run(self: Suite) -> None:
            self._run(about, check)

        run.__tllm_case__ = about  # type: ignore[attr-defined]
        return run

    return decorate


def case_of(attribute: object) -> Case | None:
    """What `case` noted on a method; None for any other attribute."""
    return getattr(attribute, "__tllm_case__", None)


def missing(reason: str) -> NoReturn:
    """Something that the case needs is not on this machine: a failure where TLLM_CONFORMANCE_STRICT=1, else a skip."""
    if os.environ.get(STRICT, "") not in ("", "0"):
        pytest.fail(f"{reason} ({STRICT} is set)", pytrace=False)
    pytest.skip(f"NOT CHECKED: {reason}")


class Suite:
    """What all suites share. `open`: what a case opens ends with it. `endings`: what ends the processes of a case that hangs."""

    open: ExitStack
    endings: list[Callable[[], None]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, attribute in vars(cls).items():
            if any(case_of(vars(base).get(name)) for base in cls.__mro__[1:]) and not _is_strict_xfail(attribute):
                raise TypeError(
                    f"{cls.__qualname__}.{name} replaces a case of the suite; to tell that it does not hold yet, mark it with "
                    '@pytest.mark.xfail(strict=True, reason="...") and have it call super()'
                )

    @property
    def subject(self) -> str:
        """Who is tested, as a person would name it."""
        raise NotImplementedError

    def claimed(self) -> enum.Flag | None:
        """The capabilities that the subject declares."""
        return None

    def _run(self, about: Case, check: Callable[[Any], None]) -> None:
        claimed = self.claimed()
        if about.needs is None or (claimed is not None and about.needs in claimed):
            self._within_time(about, check)
            return
        if not about.proves:
            pytest.skip(f"{self.subject} does not claim {about.needs.name}")
        try:
            self._within_time(about, check)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            pytest.skip(f"{self.subject} does not claim {about.needs.name}, and it does not hold")
        pytest.skip(f"{self.subject} does not claim {about.needs.name}, though it holds: it may be declared")

    def _within_time(self, about: Case, check: Callable[[Any], None]) -> None:
        outcome: list[BaseException] = []

        def body() -> None:
            try:
                with self.open:
                    check(self)
            except BaseException as error:
                outcome.append(error)

        self.open, self.endings = ExitStack(), []
        thread = threading.Thread(target=body, name=about.name, daemon=True)
        thread.start()
        thread.join(about.timeout_s)
        if thread.is_alive():
            where = _stack_of(thread)
            for end in self.endings:
                end()
            pytest.fail(f"not done after {about.timeout_s:g} s; it was at\n{where}", pytrace=False)
        if outcome:
            raise outcome[0]


def _is_strict_xfail(attribute: object) -> bool:
    marks = getattr(attribute, "pytestmark", [])
    return any(mark.name == "xfail" and mark.kwargs.get("strict") and mark.kwargs.get("reason") for mark in marks)


def _stack_of(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else "nowhere"


def _one_line(text: str) -> str:
    return " ".join(text.split())
