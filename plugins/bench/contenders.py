"""The transports that are measured beside each other, each over its own broker where it needs one."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from tllm_core.config import Settings, Text, load_settings
from tllm_core.contracts.messages import Plain
from tllm_core.errors import ConfigError
from tllm_core.registry import Registry

if TYPE_CHECKING:
    from tllm_core.conformance.broker import BrokerProcess


class Contender(Struct, frozen=True):
    """One transport, as it was chosen. library: what its limits are measured with. options: its own settings.

    broker: where its broker is, and who started that; empty where it needs none.
    """

    name: str
    library: str
    options: dict[str, Plain]
    overrides: dict[str, Any]
    config: str | None
    broker: str = ""

    @property
    def label(self) -> str:
        """Its column: "module:Class" is too wide for one."""
        return self.name if ":" not in self.name else self.library

    def settings(self, engine_options: dict[str, Plain]) -> Settings:
        """An echo engine with these options, over this transport."""
        engine = {"engine.name": "echo", "engine.options": engine_options}
        return load_settings(self.config, overrides={**self.overrides, **engine})


def add_transport_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say over what is measured."""
    parser.add_argument(
        "--transport",
        action="append",
        metavar="NAME[,NAME...]",
        help="how frames travel (default: zmq); several are measured in turn in every round",
    )
    parser.add_argument("--config", metavar="FILE", help="a TOML file, as other verbs take it")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="any setting, such as transport.nats.url=nats://host:4222; without a url a broker of its own is started",
    )


def positive(text: str) -> int:
    """An option's whole number of 1 or more."""
    with contextlib.suppress(ValueError):
        value = int(text)
        if value >= 1:
            return value
    raise argparse.ArgumentTypeError(f"must be a whole number of 1 or more, not {text!r}")


def names_of(arguments: argparse.Namespace) -> list[str]:
    """The transports that were typed, each once. Raises ConfigError for none."""
    typed = ",".join(arguments.transport or ["zmq"]).split(",")
    names = list(dict.fromkeys(name.strip() for name in typed if name.strip()))
    if not names:
        raise ConfigError("--transport names none; it should be like --transport zmq,nats")
    return names


@contextlib.contextmanager
def contenders(arguments: argparse.Namespace, names: Sequence[str]) -> Iterator[list[Contender]]:
    """Finds each transport, and starts brokers for those that have no url; they end with the context.

    Raises ConfigError for a transport that can't be used, and where a broker has neither a url nor a server to start.
    """
    with contextlib.ExitStack() as stack:
        yield [_contender(arguments, name, stack) for name in names]


def _contender(arguments: argparse.Namespace, name: str, stack: contextlib.ExitStack) -> Contender:
    overrides: dict[str, Any] = {**dict(map(_assignment, arguments.set)), "transport.name": name}
    if arguments.launcher is not None:
        overrides["launcher.name"] = arguments.launcher
    origins = dict.fromkeys(overrides, "--set") | {"transport.name": "--transport", "launcher.name": "--launcher"}
    options = load_settings(arguments.config, overrides=overrides, origins=origins).transport.options
    library = Registry().transport(name).name
    broker = ""
    if library in _SERVERS:
        broker = "given"
        if options.get("url") is None:
            server = stack.enter_context(_started(name, library))
            overrides["transport.options.url"] = options["url"] = server.url
            broker = f"started for this run, {server.url}"
    return Contender(name, library, options, overrides, arguments.config, broker)


def _assignment(typed: str) -> tuple[str, Text]:
    key, equals, value = typed.partition("=")
    if not equals or "." not in key:
        raise ConfigError(f"--set {typed}: must be SECTION.KEY=VALUE, as in --set transport.nats.url=nats://host:4222")
    return key, Text(value)


# ---------------------------------------------------------------------------------------------------- brokers


def _nats() -> BrokerProcess:
    from tllm_core.conformance.broker import nats_server

    return nats_server()


def _valkey() -> BrokerProcess:
    from tllm_core.conformance.broker import valkey_server

    return valkey_server()


_SERVERS: dict[str, Callable[[], BrokerProcess]] = {"nats": _nats, "redis": _valkey}


def _started(name: str, library: str) -> BrokerProcess:
    try:
        server = _SERVERS[library]().start()
    except ConfigError as error:
        raise ConfigError(f"{error}; or say where one is: --set transport.{name}.url=...") from None
    print(f"{name}: no url is given; measured over {server.url}, started for this run", file=sys.stderr)
    return server
