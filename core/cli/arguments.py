"""What can be typed: the verbs, their options, and the settings that they come to."""

import argparse
import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Never

from tllm_core import __version__
from tllm_core.contracts.values import clipped
from tllm_core.errors import ConfigError
from tllm_core.registry import Registry, suggestion

if TYPE_CHECKING:
    from tllm_core.config import Settings

FLAGS = {
    "engine": ("engine.name", "NAME", 'which engine: a name or "module:Object"'),
    "transport": ("transport.name", "NAME", "how frames travel"),
    "launcher": ("launcher.name", "NAME", "who starts the engine"),
    "model": ("engine.options.model", "MODEL", "a directory, a GGUF file, a name of the catalogue, or a hub id"),
    "dtype": ("engine.options.dtype", "DTYPE", "float32, bfloat16, ..."),
}
"""Flags that stand for a setting: the key, what is shown, and the help."""

VERBS: dict[str, tuple[str, str]] = {
    "demo": ("generating", "answer a question with a small real model, in a process of its own"),
    "generate": ("generating", "continue or answer a prompt"),
    "chat": ("generating", "talk with a model"),
    "worker": ("serving", "run an engine that other processes attach to"),
    "explain": ("inspecting", "what would be started, and why"),
    "config": ("inspecting", "every setting with its value and origin"),
    "plugins": ("inspecting", "what is installed, and whether it works"),
    "conformance": ("conforming", "test a transport, an engine or a launcher by the suite of its kind"),
    "check": ("checking", "check the settings, start the engine, make a round trip"),
}
"""verb -> the module of this package that has `add_VERB(parser)` and `VERB(arguments)`, and the help."""


class _Parser(argparse.ArgumentParser):
    def __init__(self, **given: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **given})


class _Verbs(argparse._SubParsersAction):  # type: ignore[type-arg]
    """Lists every verb, also one that a plugin adds without a help text."""

    def add_parser(self, name: str, **given: Any) -> Any:
        return super().add_parser(name, **{"help": "a plugin's verb", **given})


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments, with `run` set. Ends the process as argparse does: 0 after help, 2 after a mistake.

    Raises ConfigError for arguments that are no text, PluginError for a verb whose plugin can't be used.
    """
    _check_text(argv)
    verb = argv[0] if argv and not argv[0].startswith("-") else None
    parser = _Parser(
        prog="tllm", description="An LLM behind a boundary that never leaves you waiting for a dead engine."
    )
    parser.add_argument("--version", action="version", version=f"tllm-core {__version__}")
    commands = parser.add_subparsers(metavar="VERB", parser_class=_Parser, action=_Verbs)
    for name, (module, text) in VERBS.items():
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name == verb:
            _fill(command, name, module)
    if verb is None:
        parser.epilog = _list_plugin_verbs(commands)
    elif verb not in VERBS:
        _add_plugin_verb(verb, parser, commands)
    parser.set_defaults(run=lambda arguments: parser.print_help())
    arguments, more = parser.parse_known_args(argv)
    if more:
        parser.error(f"unrecognized arguments: {clipped(' '.join(more))}{_quoting(arguments, more)}")
    return arguments


def _quoting(arguments: argparse.Namespace, more: Sequence[str]) -> str:
    """Words that follow a text are most likely the rest of it."""
    text = getattr(arguments, "prompt", None) or getattr(arguments, "question", None)
    if text is None or any(word.startswith("-") for word in more):
        return ""
    return "; a text of several words is one argument: put it in quotes"


def add_common(parser: argparse.ArgumentParser) -> None:
    """The options that every verb with settings has."""
    group = parser.add_argument_group("settings")
    group.add_argument("--config", metavar="FILE", help="a TOML file (else $TLLM_CONFIG, else ./tllm.toml)")
    group.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="any setting; may be repeated")
    for flag, (_, metavar, text) in FLAGS.items():
        group.add_argument(f"--{flag}", metavar=metavar, help=text)
    add_debug(parser)


def add_debug(parser: argparse.ArgumentParser) -> None:
    """`--debug`."""
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def settings_of(
    arguments: argparse.Namespace,
    registry: Registry,
    *,
    defaults: dict[str, Any] | None = None,
    needs_engine: bool = False,
) -> "Settings":
    """The settings that the common options come to. A flag of its own goes before `--set`, in any order of typing.

    defaults: of the verb itself, below the flags and above files. Raises ConfigError, where `needs_engine` also for no engine.
    """
    from tllm_core.config import load_settings

    overrides, origins = _overrides(arguments, defaults or {})

    def loaded() -> "Settings":
        look = defaults is None
        return load_settings(
            arguments.config, overrides=overrides, origins=origins, look_in_cwd=look, registry=registry
        )

    settings = loaded()
    if settings.engine.name is not None or settings.attach.file is not None:
        return settings
    if arguments.model is not None:
        overrides["engine.name"], origins["engine.name"] = "tp", "default, as a model is given"
        return loaded()
    if needs_engine:
        raise ConfigError(no_engine(registry))
    return settings


def no_engine(registry: Registry) -> str:
    """What is said where no engine is chosen."""
    return (
        "no engine is chosen: give --engine NAME or --model MODEL, set `name` in the section [engine] of tllm.toml, or "
        f"$TLLM_ENGINE__NAME (installed: {', '.join(registry.names('engine'))})"
    )


def _overrides(arguments: argparse.Namespace, defaults: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    from tllm_core.config import Text

    overrides = dict(defaults)
    origins = dict.fromkeys(defaults, f"tllm {arguments.verb}")
    for item in arguments.set:
        key, equals, value = item.partition("=")
        if not equals or "." not in key:
            raise ConfigError(f"--set {item}: must be SECTION.KEY=VALUE, as in --set engine.name=echo")
        overrides[key], origins[key] = Text(value), "--set"
    for flag, (key, _, _) in FLAGS.items():
        value = getattr(arguments, flag)
        if value is not None:
            overrides.pop(key, None)
            overrides[key], origins[key] = Text(value), f"--{flag}"
    return overrides, origins


def _fill(parser: argparse.ArgumentParser, verb: str, module: str) -> None:
    code = importlib.import_module(f"tllm_core.cli.{module}")
    add: Callable[[argparse.ArgumentParser], None] = getattr(code, f"add_{verb}")
    add(parser)
    parser.set_defaults(run=getattr(code, verb), verb=verb)


# ---------------------------------------------------------------------------------------- verbs that are not there


def _add_plugin_verb(verb: str, parser: argparse.ArgumentParser, commands: "argparse._SubParsersAction[Any]") -> None:
    from tllm_core.cli.plugin_verbs import add_all_verbs, add_verb_of

    registry = Registry()
    names = registry.names("plugin")
    if verb in names:  # most are called as their plugin is
        add_verb_of(verb, commands, registry)
    if verb not in commands.choices:
        add_all_verbs(commands, registry)
    if verb not in commands.choices and verb in names:
        parser.error(f"the plugin {verb!r} has no verb of that name")
    if verb not in commands.choices:
        _unknown_verb(parser, verb, list(commands.choices))


def _unknown_verb(parser: argparse.ArgumentParser, verb: str, known: Sequence[str]) -> Never:
    parser.error(f"there is no verb {verb!r}{suggestion(verb, known)}; there are: {', '.join(known)}")


def _list_plugin_verbs(commands: "argparse._SubParsersAction[Any]") -> str | None:
    from tllm_core.cli.plugin_verbs import add_all_verbs

    broken = add_all_verbs(commands, Registry())
    return f"plugins that can't be used ('tllm plugins' says why): {', '.join(broken)}" if broken else None


def _check_text(argv: Sequence[str]) -> None:
    for position, argument in enumerate(argv, 1):
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"argument {position} is not UTF-8 text: {argument!r}") from None
