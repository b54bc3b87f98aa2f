"""Signatures of a real version, to bind calls against."""

import inspect
import json
from pathlib import Path
from typing import Any

from tests.tp.flashinfer_stand_in.rules import Refused

_HERE = Path(__file__).parent


def stored(version: str) -> dict[str, Any]:
    """What tools/flashinfer_signatures.py found."""
    content: dict[str, Any] = json.loads((_HERE / f"{version}.json").read_text())
    return content


class Signatures:
    def __init__(self, version: str) -> None:
        self._signatures = {name: _signature(p) for name, p in stored(version)["signatures"].items()}

    def has(self, name: str) -> bool:
        return name in self._signatures

    def bind(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], computed: set[str]) -> dict[str, Any]:
        """All arguments, defaults included. Those that are not `computed` here must have their default."""
        signature = self._signatures[name]
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise Refused(f"{name}: {error}") from None
        unknown = computed - set(signature.parameters)
        assert not unknown, f"{name} has no {unknown}"
        for argument, value in bound.arguments.items():
            if argument not in computed and value is not signature.parameters[argument].default:
                raise Refused(f"{name}: the stand-in does not compute {argument}={value!r}")
        bound.apply_defaults()
        return bound.arguments


def _signature(parameters: list[dict[str, Any]]) -> inspect.Signature:
    return inspect.Signature(
        [
            inspect.Parameter(
                p["name"], getattr(inspect.Parameter, p["kind"]), default=p.get("default", inspect._empty)
            )
            for p in parameters
            if p["name"] != "self"
        ]
    )
