"""What people read when a plugin can't be used."""

import difflib
from collections.abc import Sequence

from tllm_core.registry.entries import Entry, Kind, canonical

_DRIVER_NAMES = ("{}", "{}-py", "py{}", "python-{}", "{}-python")
"""How the distributions of client libraries are named after their module: nats-py, pyzmq, flashinfer-python."""


def suggestion(word: str, known: Sequence[str]) -> str:
    """The text " (did you mean 'x'?)" with the closest of `known`, or "" where nothing is close."""
    close = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


def remedy(module: str, owner: Entry | None) -> str:
    """The command that installs a missing top-level module: the smallest extra of `owner` that has it, where one has."""
    if owner is not None:
        drivers = {form.format(canonical(module)) for form in _DRIVER_NAMES}
        having = [extra for extra, names in owner.extras.items() if drivers & set(names)]
        if not having and owner.name in owner.extras:
            having = [owner.name]
        if having:
            extra = min(having, key=lambda extra: (extra != owner.name, len(owner.extras[extra]), extra))
            return f"pip install '{owner.distribution}[{extra}]'" if extra else f"pip install {owner.distribution}"
    return f"install what provides it, most likely by pip install {module}"


def two_of_one_name(entries: Sequence[Entry]) -> str:
    """For entry points of one kind and name in more than one distribution; says what to do but the variable to set."""
    return f"{' and '.join(f'{entry.origin} ({entry.value})' for entry in entries)} both have that name; uninstall one"


def unknown_name(kind: Kind, name: str, names: Sequence[str]) -> str:
    """For a name that no installed distribution has; `names` are those that there are."""
    if not names:
        return f"there is no {kind} {name!r}: no {kind} is installed at all; is tllm-core itself installed with pip?"
    also = '"module:Object" names one that is not'
    return f"there is no {kind} {name!r}{suggestion(name, names)}; installed: {', '.join(names)}; {also}"


def cause(error: BaseException) -> str:
    """What was raised, in one line. Also for an error that can't say what it is."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}".removesuffix(": ")
