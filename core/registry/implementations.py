"""Checks the hooks of a plugin before they are in use: on a manager of its own, so that a bad one never reaches the other."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pluggy

from tllm_core.contracts import hookspecs
from tllm_core.registry.words import suggestion

_MARK = f"{hookspecs.PROJECT}_impl"
_SPECIFICATION = f"{hookspecs.PROJECT}_spec"


def new_manager() -> pluggy.PluginManager:
    """A plugin manager that knows our hooks and has no plugins."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def hook_complaint(found: Any) -> str | None:
    """What is wrong with the hooks of `found`, in words; None where nothing is, also where it has none."""
    if type(found).__hash__ is None:
        return f"a {type(found).__qualname__} can't be hashed, which what is registered must be; define __hash__"
    trial = new_manager()
    try:
        trial.register(found, name="plugin")
        trial.check_pending()
    except pluggy.PluginValidationError as error:
        return _worded(" ".join(str(error).split()))
    implemented = (_implementation_complaint(found, impl) for impl in _implementations(trial, found))
    return next(filter(None, implemented), None) or _unmarked(found)


def _worded(text: str) -> str:
    """pluggy's complaint, in our words where it is one of the two that are everyday."""
    if unknown := re.search(r"unknown hook '(\w+)'", text):
        return f"unknown hook {unknown[1]!r}{suggestion(unknown[1], _hook_names())}"
    if argument := re.search(r"for hook '(\w+)'.*Argument\(s\) \{'(\w+)'", text):
        known = list(inspect.signature(getattr(hookspecs, argument[1])).parameters)
        close = suggestion(argument[2], known)
        return f"{argument[1]} has no argument {argument[2]!r}{close}; there are: {', '.join(known)}"
    return text


def _implementations(trial: pluggy.PluginManager, found: Any) -> Iterator[pluggy.HookImpl]:
    for caller in trial.get_hookcallers(found) or ():
        yield from caller.get_hookimpls()


def _implementation_complaint(found: Any, impl: pluggy.HookImpl) -> str | None:
    name = impl.function.__name__
    if impl.hookwrapper or impl.wrapper:
        return f"{name} is a hook wrapper, and these hooks are called one by one; implement it without wrapper=True"
    if isinstance(found, type) and next(iter(inspect.signature(impl.function).parameters), "") == "self":
        return (
            f"{name} takes self, and {found.__qualname__} is a class; name an instance of it, or make it a staticmethod"
        )
    return None


def _unmarked(found: Any) -> str | None:
    """A function that is named as a hook is one whose mark was forgotten: it would never be called."""
    for name in _hook_names():
        function = getattr(found, name, None)
        if inspect.isroutine(function) and not (hasattr(function, _MARK) or hasattr(function, _SPECIFICATION)):
            return (
                f"{name} is not marked with @hookimpl (of tllm_core.contracts.hookspecs), so it would never be called"
            )
    return None


def _hook_names() -> list[str]:
    return [name for name in vars(hookspecs) if name.startswith("tllm_")]
