"""Finds, loads and checks plugins by entry-point name or "module:Object"; one bad plugin is named and harms no other.

Nothing is imported before it is asked for. What was asked for is also registered with pluggy, so that a transport, an
engine or a launcher may implement hooks too.
"""

import contextlib
import io
import logging
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from tllm_core.contracts.interfaces import EngineSpec, Launcher, Transport
from tllm_core.contracts.values import clipped
from tllm_core.errors import PluginError
from tllm_core.registry.entries import KINDS, Entry, Kind, canonical, installed_entries
from tllm_core.registry.implementations import new_manager
from tllm_core.registry.loading import Broken, MissingExtra, load_entry, load_object, load_reference
from tllm_core.registry.words import cause, suggestion, two_of_one_name, unknown_name

__all__ = ["DISABLE", "KINDS", "Found", "Kind", "Registry", "Status", "load_object", "suggestion"]

log = logging.getLogger("tllm_core.registry")

DISABLE = "TLLM_DISABLE_PLUGINS"
"""Names of distributions or entry points, comma separated, that are treated as if they were not installed; `all` = each that
is not tllm-core's own."""

OWN = "tllm-core"

Status: TypeAlias = Literal["ok", "missing extra", "broken", "disabled"]


class Found(Struct, frozen=True):
    """What `tllm plugins` prints of one entry point; `detail` says why, and what to do, where `status` is not ok, and what it
    printed where it did."""

    name: str
    kind: Kind
    distribution: str
    version: str
    status: Status
    detail: str = ""


class Registry:
    """Looks plugins up. Every method may be called from any thread and raises PluginError for whatever goes wrong.

    path: where distributions are looked for, None = `sys.path`. environ: None = `os.environ`.
    """

    def __init__(self, *, path: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> None:
        self.manager = new_manager()
        self._path = path
        self._typed = _names((os.environ if environ is None else environ).get(DISABLE, ""))
        self._blocked = self._typed | {canonical(word) for word in self._typed}
        self._loaded: dict[tuple[Kind, str], Any] = {}
        self._installed: tuple[Entry, ...] | None = None
        self._lock = threading.RLock()
        _ALL.add(self)

    @property
    def hooks(self) -> Any:
        """pluggy's relay: `registry.hooks.tllm_admit(...)` calls every plugin that was asked for."""
        return self.manager.hook

    def transport(self, name: str) -> type[Transport]:
        """The Transport subclass of that name."""
        return self._get("transport", name)  # type: ignore[no-any-return]

    def engine(self, name: str) -> EngineSpec:
        """The EngineSpec of that name; the engine itself is not imported."""
        return self._get("engine", name)  # type: ignore[no-any-return]

    def launcher(self, name: str) -> type[Launcher]:
        """The Launcher subclass of that name."""
        return self._get("launcher", name)  # type: ignore[no-any-return]

    def plugin(self, name: str) -> object:
        """The cross-cutting plugin of that name: from now on its hooks are called."""
        return self._get("plugin", name)

    def names(self, kind: Kind) -> list[str]:
        """The entry-point names of that kind, sorted; imports nothing."""
        return sorted({entry.name for entry in self._entries if entry.kind == kind and not self._is_blocked(entry)})

    def origin(self, kind: Kind, name: str) -> str:
        """The distribution and version that `name` comes from, or "module:Object" as it is; imports nothing."""
        return name if ":" in name else self._choose(kind, name).origin

    def found(self) -> list[Found]:
        """Every entry point with its state. Imports each of them, and activates none; never raises.

        Standard output is kept from them meanwhile, which is the whole process's.
        """
        order = sorted(self._entries, key=lambda entry: (KINDS.index(entry.kind), entry.name, entry.distribution))
        return [self._probe(entry) for entry in order]

    def _get(self, kind: Kind, name: str) -> Any:
        with self._lock:
            if (kind, name) not in self._loaded:
                found = load_reference(kind, name) if ":" in name else load_entry(self._choose(kind, name))
                if not self.manager.is_registered(found):
                    self.manager.register(found, name=f"{kind} {name!r} of {self.origin(kind, name)}")
                self._loaded[kind, name] = found
            return self._loaded[kind, name]

    @property
    def _entries(self) -> tuple[Entry, ...]:
        if self._installed is None:
            self._installed = tuple(installed_entries(self._path))
            self._tell_unknown_blocked(self._installed)
        return self._installed

    def _tell_unknown_blocked(self, installed: Sequence[Entry]) -> None:
        """A name that is nobody's disables nothing; said once per process."""
        known = {name for entry in installed for name in (entry.name, canonical(entry.distribution))} | {"all"}
        nobodys = {word for word in self._typed if not {word, canonical(word)} & known}
        for word in sorted(nobodys - _TOLD):
            _TOLD.add(word)
            close = suggestion(word, sorted(known))
            log.warning("$%s: nothing is called %r%s; it disables nothing", DISABLE, word, close)

    def _is_blocked(self, entry: Entry) -> bool:
        names = {entry.name, canonical(entry.distribution)}
        return bool(names & self._blocked) or ("all" in self._blocked and OWN not in names)

    def _choose(self, kind: Kind, name: str) -> Entry:
        named = [entry for entry in self._entries if (entry.kind, entry.name) == (kind, name)]
        allowed = [entry for entry in named if not self._is_blocked(entry)]
        if not named:
            raise PluginError(unknown_name(kind, name, self.names(kind)))
        if not allowed:
            raise PluginError(f"{named[0]} is disabled by ${DISABLE}")
        if len(allowed) > 1:
            raise Broken(f"{kind} {name!r}", f"{two_of_one_name(allowed)}, or set {DISABLE}={allowed[-1].distribution}")
        return allowed[0]

    def _probe(self, entry: Entry) -> Found:
        printed = io.BytesIO()
        with contextlib.redirect_stdout(io.TextIOWrapper(printed, "utf-8", "replace", write_through=True)) as stream:
            status, detail = self._state(entry)
        said = b"" if stream.closed else printed.getvalue()
        if words := " ".join(said.decode("utf-8", "replace").split()):
            detail = "; ".join(filter(None, (detail, f"it prints when it is imported: {clipped(words, 80)!r}")))
        return Found(entry.name, entry.kind, entry.distribution, entry.version, status, detail)

    def _state(self, entry: Entry) -> tuple[Status, str]:
        if self._is_blocked(entry):
            return "disabled", f"by ${DISABLE}"
        try:
            load_entry(self._choose(entry.kind, entry.name))
        except MissingExtra as error:
            return "missing extra", error.why
        except Broken as error:
            return "broken", error.why
        except Exception as error:  # a list that says what is wrong must not be what goes wrong
            return "broken", cause(error)
        return "ok", ""


_TOLD: set[str] = set()
_ALL: weakref.WeakSet[Registry] = weakref.WeakSet()


def _renew_locks() -> None:
    # Another thread of the parent, which a fork doesn't have, may have held one.
    for registry in list(_ALL):
        registry._lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_locks)


def _names(text: str) -> frozenset[str]:
    return frozenset({word.strip() for word in text.split(",")} - {""})
