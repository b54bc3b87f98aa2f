"""Mutation proof of the conformance suites: products that are broken on purpose, and the case that fails each of them.

A suite is worth what it can fail. Every class of `transport_*.py`, `engine_*.py` and `launcher_*.py` is one of ours with a
single fault, said in its docstring; above it stands which case must catch it, and with what words:

    @caught_by("TestInproc", "test_frames_arrive_in_order_and_once", r"\\[b'1999'\\] at place 0")
    class Reorders(InprocTransport):
        '''Hands out the last frame first.'''

The tests run that one case over the mutant, as a plugin's author would (a class that derives from the suite), and demand that
it fails by an assertion or time limit of the suite with those words, so that it fails for this fault and no other; and that
the same case passes for the class of ours that is named first, which the mutant is put in the place of.

To add one, also for a plugin of your own: derive from a class that passes the suite, break one promise in a few lines, and
name the case. Where no case fails, the suite has a hole: write the case (in `core/conformance/`, with the promise and "If
this fails: ..." in its docstring), not another mutant. `python -m pytest tests/mutants -k NAME` runs one.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

from msgspec import Struct

from tllm_core.contracts.interfaces import Engine, Launcher, Transport

KINDS = {"transport": Transport, "engine": Engine, "launcher": Launcher}
Subject = TypeVar("Subject", bound=type)


class Mutant(Struct, frozen=True):
    """cls: the broken class. suite: of tests/conformance, for the class of ours that is whole. catches: the case that must fail.

    words: a regular expression found in what that case then says.
    """

    cls: Any
    suite: str
    catches: str
    words: str

    @property
    def reference(self) -> str:
        """How a config names it."""
        return f"{self.cls.__module__}:{self.cls.__qualname__}{'.spec' if self.kind == 'engine' else ''}"

    @property
    def kind(self) -> str:
        """The attribute of a suite's class that says who is tested."""
        return next(name for name, kind in KINDS.items() if issubclass(self.cls, kind))

    def __str__(self) -> str:
        return str(self.cls.__name__)


MUTANTS: list[Mutant] = []
"""Of the modules that were imported."""


def caught_by(suite: str, case: str, words: str) -> Callable[[Subject], Subject]:
    """Notes which case of the suites must fail the decorated class, and with what words."""

    def note(cls: Subject) -> Subject:
        MUTANTS.append(Mutant(cls, suite, case, words))
        return cls

    return note


def mutants_of(*modules: ModuleType) -> list[Mutant]:
    """Those of these modules, in their order."""
    names = [module.__name__ for module in modules]
    return sorted(
        (one for one in MUTANTS if one.cls.__module__ in names), key=lambda one: names.index(one.cls.__module__)
    )
