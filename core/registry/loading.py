"""Imports what an entry point or a "module:Object" names, and checks that it is what its kind must be."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from msgspec import Struct

from tllm_core.contracts.interfaces import Capability, EngineSpec, Launcher, Transport
from tllm_core.errors import PluginError
from tllm_core.registry.entries import Entry, Kind, owner_of, top_level
from tllm_core.registry.implementations import hook_complaint
from tllm_core.registry.interrupts import is_of_signal
from tllm_core.registry.words import cause, remedy


class Broken(PluginError):
    """The plugin `who` can't be used; `why` is the part of the message that says so."""

    verb = "is broken"

    def __init__(self, who: str, why: str) -> None:
        super().__init__(f"{who} {self.verb}: {why}")
        self.why = why


class MissingExtra(Broken):
    """A third-party module that the plugin needs is not installed."""

    verb = "is not fully installed"


def load_object(reference: str) -> Any:
    """The object that "module:Object" (or "module:Object.attribute", or "module") names.

    Raises PluginError where there is none. Where a third-party module is missing it says which extra has it.
    """
    try:
        return _resolve(reference)
    except BaseException as error:  # SystemExit too: what is loaded must not end its host
        if is_of_signal(error):
            raise
        owner = owner_of(reference)
        _explain(f"{reference!r} of {owner.origin}" if owner else repr(reference), reference, owner, error)


def load_entry(entry: Entry) -> Any:
    """The checked object of an entry point; PluginError names the distribution, the entry point and the cause."""
    try:
        found = _resolve(entry.value)
        _require(found)
        complaint = _complaint(entry.kind, found)
    except BaseException as error:  # SystemExit too: a plugin must not end its host
        if is_of_signal(error):
            raise
        _explain(str(entry), entry.value, entry, error)
    if complaint:
        raise Broken(str(entry), complaint)
    return found


def load_reference(kind: Kind, reference: str) -> Any:
    """The checked object of a "module:Object" that stands where a name could."""
    found, who = load_object(reference), f"{kind} {reference!r}"
    try:
        complaint = _complaint(kind, found)
    except Exception as error:  # what is looked at may be the author's own code: properties, metaclasses, reprs
        raise Broken(who, cause(error)) from error
    if complaint:
        raise Broken(who, complaint)
    return found


def _resolve(reference: str) -> Any:
    module, _, attributes = reference.partition(":")
    found: Any = importlib.import_module(module)
    for attribute in filter(None, attributes.split(".")):
        found = getattr(found, attribute)
    return found


def _require(found: Any) -> None:
    """An engine's spec imports nothing; what the engine itself will need is looked for, not imported."""
    for module in found.requires if isinstance(found, EngineSpec) else ():
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)


def _explain(who: str, reference: str, owner: Entry | None, error: BaseException) -> NoReturn:
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing and top_level(missing) not in {top_level(reference), "tllm_core", *sys.stdlib_module_names}:
        raise MissingExtra(who, f"it needs the module {missing!r}: {remedy(top_level(missing), owner)}") from error
    if missing and top_level(missing) not in sys.stdlib_module_names:
        stale = f"there is no module {missing!r}; where an installation is stale or incomplete, install it anew"
        raise Broken(who, stale) from error
    raise Broken(who, cause(error)) from error


def _complaint(kind: Kind, found: Any) -> str | None:
    return _CHECKS[kind](found) or hook_complaint(found)


def _class_complaint(found: Any, parent: type, attributes: Mapping[str, type]) -> str | None:
    if not isinstance(found, type) or not issubclass(found, parent):
        return f"it must be a subclass of {parent.__name__}, not {found!r}"
    if inspect.isabstract(found):
        return f"{found.__qualname__} does not implement {', '.join(sorted(getattr(found, '__abstractmethods__', ())))}"
    wrong = (name for name, expected in attributes.items() if not _fits(getattr(found, name, None), expected))
    name = next(wrong, None)
    if name is None:
        return None
    what = "msgspec Struct class" if attributes[name] is Struct else attributes[name].__name__
    return f"{found.__qualname__}.{name} must be a {what}, not {getattr(found, name, None)!r}"


def _fits(value: object, expected: type) -> bool:
    if expected is Struct:
        return isinstance(value, type) and issubclass(value, Struct)
    return isinstance(value, expected)


def _transport_complaint(found: Any) -> str | None:
    return _class_complaint(found, Transport, {"name": str, "settings_type": Struct, "capabilities": Capability})


def _engine_complaint(found: Any) -> str | None:
    return None if isinstance(found, EngineSpec) else f"it must be an EngineSpec, not {found!r}"


def _launcher_complaint(found: Any) -> str | None:
    return _class_complaint(found, Launcher, {"name": str, "settings_type": Struct, "needs": Capability})


def _plugin_complaint(found: Any) -> str | None:
    if found is None or isinstance(found, _VALUES) or inspect.isroutine(found):
        return f"it must be a module or an object whose methods are hooks, not {found!r}"
    return None


_VALUES = (int, float, str, bytes, tuple, list, dict, set, frozenset)

_CHECKS: dict[Kind, Callable[[Any], str | None]] = {
    "transport": _transport_complaint,
    "engine": _engine_complaint,
    "launcher": _launcher_complaint,
    "plugin": _plugin_complaint,
}
