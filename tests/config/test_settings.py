"""Settings: precedence, origins, and errors that name file, key and what was meant."""

import enum
import itertools
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import hypothesis.strategies as st
import pytest
from hypothesis import given
from msgspec import Meta, Struct

from tllm_core.config import Settings, Text, convert_options, load_settings, masked, shown_settings, unused_tables
from tllm_core.config.convert import check_layer
from tllm_core.config.sources import Value
from tllm_core.errors import ConfigError, PluginError
from tllm_core.registry import Registry

PLUGINS = """
from msgspec import Struct, field
from tllm_core.contracts.interfaces import Capability, EngineSpec, Launcher, Transport
from tllm_core.errors import ConfigError

class Fault(Struct, forbid_unknown_fields=True):
    at_step: int = 0

class EngineSettings(Struct, forbid_unknown_fields=True):
    def __post_init__(self):
        if self.block_size < 1:
            raise ConfigError(f"block_size must be at least 1, not {self.block_size}")

    model: str | None = None
    block_size: int = 16
    rate: float | None = None
    eager: bool = False
    stop_ids: tuple[int, ...] = ()
    tags: tuple[str, ...] = ()
    fault: Fault = field(default_factory=Fault)

class CarrierSettings(Struct, forbid_unknown_fields=True):
    url: str = "carrier://127.0.0.1"
    password: str | None = None
    retry_s: float = 1.0

class Empty(Struct, forbid_unknown_fields=True):
    pass

class Carrier(Transport):
    name, settings_type, capabilities = "carrier", CarrierSettings, Capability.CROSS_PROCESS
    def listen(self, engine, generation): raise NotImplementedError
    def connect(self, engine, peer): raise NotImplementedError

class Start(Launcher):
    name, settings_type = "start", Empty
    def launch(self, spec): raise NotImplementedError

SPEC = EngineSpec(name="mock", settings_type=EngineSettings, load="nowhere:Engine")
"""
ENTRIES = """
[tllm_core.transports]
carrier = config_plugins:Carrier
zmq = config_plugins:Carrier
inproc = config_plugins:Carrier
[tllm_core.engines]
mock = config_plugins:SPEC
other = config_plugins:SPEC
[tllm_core.launchers]
spawn = config_plugins:Start
inline = config_plugins:Start
[tllm_core.plugins]
metrics = config_plugins
"""


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "config_plugins.py").write_text(PLUGINS)
    info = folder / "acme_config-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-config\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    sys.path.insert(0, str(folder))
    yield Registry(path=[str(folder)], environ={})
    sys.path.remove(str(folder))
    sys.modules.pop("config_plugins", None)


@pytest.fixture
def load(registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """load_settings from the text of a ./tllm.toml, an environment and overrides."""
    monkeypatch.chdir(tmp_path)

    def loaded(text: str | None = None, environ: dict[str, str] | None = None, **given: Any) -> Settings:
        if text is not None:
            (tmp_path / "tllm.toml").write_text(text)
        return load_settings(environ=environ or {}, look_in_cwd=True, registry=registry, **given)

    return loaded


def test_defaults_need_nothing(load: Any) -> None:
    settings = load()
    assert (settings.engine.name, settings.transport.name, settings.launcher.name) == (None, "zmq", "spawn")
    assert settings.ledger.mailbox_bytes == 64 * 2**20
    assert settings.origins == {}


Given = tuple[int, str]
"""A value, and the table that it is given in: the engine's own, or `options`, which stands for it."""
given_or_not = st.none() | st.tuples(st.integers(1, 99), st.sampled_from(["mock", "options"]))


@given(given_or_not, given_or_not, given_or_not)
def test_the_higher_source_wins_and_is_named_whatever_else_is_given(
    registry: Registry, file: Given | None, variable: Given | None, keyword: Given | None
) -> None:
    path = Path(sys.path[0]) / "precedence.toml"
    path.write_text(f"[engine.{file[1]}]\nblock_size = {file[0]}\n" if file else "")
    name = f"TLLM_ENGINE__{variable[1].upper()}__BLOCK_SIZE" if variable else ""
    environ = {name: str(variable[0])} if variable else {}
    overrides = {f"engine.{keyword[1]}.block_size": keyword[0]} if keyword else {}
    settings = load_settings(path, overrides=overrides | {"engine.name": "mock"}, environ=environ, registry=registry)
    shown = {line.key: line for line in shown_settings(settings, registry)}["engine.mock.block_size"]
    by_precedence = [(keyword, "keyword"), (variable, f"${name}"), (file, str(path)), ((16, ""), "default")]
    value, origin = next((given[0], origin) for given, origin in by_precedence if given)
    assert (shown.value, shown.origin) == (value, origin)
    assert settings.engine.options.get("block_size", 16) == value


def test_the_order_in_which_overrides_are_given_changes_nothing(load: Any) -> None:
    given = {
        "engine.name": "mock",
        "engine.options": {"block_size": 4},
        "transport.name": "carrier",
        "ledger.mailbox_bytes": 65536,
    }
    loaded = [load(overrides=dict(order)) for order in itertools.permutations(given.items())]
    assert all(settings == loaded[0] for settings in loaded)


def test_options_of_the_chosen_plugin_may_be_given_without_its_name(load: Any) -> None:
    text = "[engine]\nname = 'mock'\n[engine.options]\nblock_size = 4\nmodel = 'file'\n"
    settings = load(text, {"TLLM_ENGINE__MOCK__MODEL": "env"})
    assert settings.engine.options == {"block_size": 4, "model": "env"}
    assert settings.origins["engine.mock.block_size"] == "tllm.toml"
    by_reference = load("", overrides={"engine.name": "config_plugins:SPEC", "engine.options": {"block_size": 2}})
    assert by_reference.engine.options == {"block_size": 2}


def test_options_of_what_is_not_chosen_are_checked_and_not_used(load: Any) -> None:
    text = "[engine]\nname = 'mock'\n[engine.other]\nblock_size = 1\n[transport.carrier]\nretry_s = 2.0\n"
    settings = load(text)
    assert settings.engine.options == {}
    assert settings.transport.options == {}
    assert unused_tables(settings) == {"engine.other": "tllm.toml", "transport.carrier": "tllm.toml"}
    with pytest.raises(ConfigError, match=r"engine\.other\.blok_size: unknown key \(did you mean 'block_size'\?\)"):
        load("[engine]\nname = 'mock'\n[engine.other]\nblok_size = 1\n")
    with pytest.raises(ConfigError, match=r"tllm\.toml: transport\.carrier\.retry_s: expected float, got str"):
        load("[transport.carrier]\nretry_s = 'x'\n")
    with pytest.raises(
        ConfigError, match=r"there is no engine 'otter' \(did you mean 'other'\?\); installed: mock, other"
    ):
        load("[engine]\nname = 'mock'\n[engine.otter]\nblok_size = 1\n")


def test_what_is_not_chosen_need_not_be_complete() -> None:
    layer = {("engine", "x", "colour"): Value("red", "here")}
    check_layer(Choosy, layer, ("engine", "x"))
    with pytest.raises(ConfigError, match="'size' must be given"):
        convert_options(Choosy, {"colour": "red"}, "engine.x")


class Colour(enum.Enum):
    RED = "red"
    GREEN = "green"


class Dog(Struct, tag="dog"):
    bark: Literal["low", "high"] = "low"


class Cat(Struct, tag="cat"):
    lives: int = 9


class Choosy(Struct, forbid_unknown_fields=True, kw_only=True):
    size: int
    colour: Colour = Colour.RED
    level: int | Literal["low", "high"] | None = None
    pets: tuple[Dog | Cat, ...] = ()
    named: dict[str, Colour] = {}
    rate: float = 0.0
    name: str = ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"colour": "rde"}, "x.colour: unknown value 'rde'; it must be one of: 'red', 'green'"),
        ({"colour": Text("rde")}, "x.colour: unknown value 'rde'; it must be one of: 'red', 'green'"),
        ({"colour": 3}, "x.colour: expected str, got int; it must be one of: 'red', 'green'"),
        ({"level": "middle"}, "x.level: unknown value 'middle'; it must be one of: 'low', 'high'"),
        ({"level": Text("middle")}, "x.level: unknown value 'middle'; it must be one of: 'low', 'high'"),
        ({"pets": [{"type": "cow"}]}, "x.pets[0].type: invalid value 'cow'; it must be one of: 'dog', 'cat'"),
        ({"pets": Text('[{"type": "cow"}]')}, "x.pets[0].type: invalid value 'cow'; it must be one of: 'dog', 'cat'"),
        (
            {"pets": [{"type": "cat"}, {"type": "dog", "bark": "x"}]},
            "x.pets[1].bark: unknown value 'x'; it must be one of: 'low', 'high'",
        ),
        ({"named": {"a": "blue"}}, "x.named[...]: unknown value 'blue'; it must be one of: 'red', 'green'"),
    ],
)
def test_where_only_some_values_are_allowed_they_are_listed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        convert_options(Choosy, {"size": 1} | options, "x")


@pytest.mark.parametrize(
    ("value", "place", "words"),
    [
        (math.nan, "rate", "must be a finite number, not nan"),
        (Text("nan"), "rate", "must be a finite number, not nan"),
        (-math.inf, "rate", "must be a finite number, not -inf"),
        (Text("inf"), "rate", "must be a finite number, not inf"),
        (2**64, "size", "is a number of more than 64 bits"),
        (Text("9" * 30), "size", "is a number of more than 64 bits"),
        ("a\0b", "name", r"must not contain a NUL character: 'a\x00b'"),
        (Text("a\0b"), "name", r"must not contain a NUL character: 'a\x00b'"),
        ("a\udcffb", "name", r"is not UTF-8 text: 'a\udcffb'"),
        (Text("a\udcffb"), "name", r"is not UTF-8 text: 'a\udcffb'"),
        ({"k": "a\udcff"}, "named.k", r"is not UTF-8 text: 'a\udcff'"),
        ({"a\udcff": "red"}, "named", r"is not UTF-8 text: 'a\udcff'"),
    ],
)
def test_what_no_setting_can_be_is_refused_where_it_is_set(value: Any, place: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(f'x.{place}: {words}')}$"):
        convert_options(Choosy, {"size": 1, place.partition(".")[0]: value}, "x")


def test_text_becomes_what_its_field_is(load: Any) -> None:
    environ = {
        "TLLM_ENGINE__NAME": "mock",
        "TLLM_ENGINE__MOCK__RATE": "2",
        "TLLM_ENGINE__MOCK__EAGER": "true",
        "TLLM_ENGINE__MOCK__STOP_IDS": "[1, 2]",
        "TLLM_ENGINE__MOCK__TAGS": "a, b",
        "TLLM_ENGINE__MOCK__FAULT__AT_STEP": "7",
    }
    settings = load(environ=environ, overrides={"engine.mock.block_size": Text("32"), "engine.mock.model": Text("12")})
    expected = {"rate": 2.0, "eager": True, "stop_ids": (1, 2), "tags": ("a", "b"), "fault": {"at_step": 7}}
    assert settings.engine.options == expected | {"block_size": 32, "model": "12"}
    assert all(type(key) is str for key in settings.engine.options)
    assert type(settings.engine.options["model"]) is str


def test_variables_of_others_are_ignored(load: Any) -> None:
    environ = {
        "TLLM_TRANSPORT_PORT": "tcp://10.0.0.1:80",
        "TLLM_LOG_LEVEL": "info",
        "TLLM_OTHER__THING": "1",
        "TLLM_ENGINE__": "x",
        "TLLM_ENGINE__NAME": "",
        "TLLM_DISABLE_PLUGINS": "x",
    }
    assert load(environ=environ) == load()


def test_the_file_is_found_by_keyword_then_variable_and_in_the_folder_for_the_command_line_only(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("given", "variable", "tllm"):
        (tmp_path / f"{name}.toml").write_text(f"[engine.options]\nmodel = '{name}'\n")

    def model(**given: Any) -> Any:
        settings = load_settings(
            given.pop("config", None), overrides={"engine.name": "mock"}, registry=registry, **given
        )
        return settings.engine.options.get("model")

    environ = {"TLLM_CONFIG": str(tmp_path / "variable.toml")}
    assert model(config="given.toml", environ=environ, look_in_cwd=True) == "given"
    assert model(environ=environ, look_in_cwd=True) == "variable"
    assert model(environ={}, look_in_cwd=True) == "tllm"
    assert model(environ={}) is None


MOCK = "[engine]\nname = 'mock'\n[engine.mock]\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[transport]\nnam = 'zmq'", "transport.nam: unknown key (did you mean 'name'?)"),
        ("[transprt]\nname = 'zmq'", "transprt: unknown section (did you mean 'transport'?)"),
        ("engine = 'mock'", "engine: must be a section: [engine]"),
        ("[engine]\nname = 3", 'engine.name: must be a name or "module:Object"'),
        ("[engine]\nmock = 3", "engine.mock: must be a table of options: [engine.mock]"),
        (MOCK + "blok_size = 1", "engine.mock.blok_size: unknown key (did you mean 'block_size'?)"),
        (MOCK + "block_size = '1'", "engine.mock.block_size: expected int, got str"),
        (MOCK + "block_size = 0", "engine.mock: block_size must be at least 1, not 0"),
        (MOCK + "fault = {at = 1}", "engine.mock.fault.at: unknown key"),
        (MOCK + "stop_ids = [1, 'x']", "engine.mock.stop_ids[1]: expected int, got str"),
        ("[transport.carier]\nurl = ''", "transport.carier: there is no transport 'carier' (did you mean 'carrier'?)"),
        ("[ledger]\nmailbox_bytes = 1", "ledger.mailbox_bytes: expected int >= 65536"),
        ("[plugins]\nenabel = ['metrics']", "plugins.enabel: unknown key (did you mean 'enable'?)"),
        ("[plugins.metrcs]\nport = 1", "plugins.metrcs: there is no plugin 'metrcs' (did you mean 'metrics'?)"),
        (
            "[transport]\nname = 'pigeon'",
            "transport.name: there is no transport 'pigeon'; installed: carrier, inproc, zmq",
        ),
        ("[transport]\nname = zmq", "bad TOML: Invalid value (at line 2, column 8)"),
    ],
)
def test_a_wrong_file_is_told_where_and_what(load: Any, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"tllm.toml: {message}")):
        load(text)


def test_a_wrong_variable_flag_or_keyword_is_named_as_such(load: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"\$TLLM_ENGINE__MOCK__BLOCK_SIZE: engine\.mock\.block_size: expected int, got str"
    ):
        load(environ={"TLLM_ENGINE__NAME": "mock", "TLLM_ENGINE__MOCK__BLOCK_SIZE": "many"})
    with pytest.raises(ConfigError, match=r"--set: wire\.windw: unknown key"):
        load(overrides={"wire.windw": Text("1")}, origins={"wire.windw": "--set"})
    with pytest.raises(PluginError, match=r"keyword: engine\.name: there is no engine 'mok' \(did you mean 'mock'\?\)"):
        load(overrides={"engine.name": "mok"})


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_file_that_can_t_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "absent.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(
        ConfigError, match=r"absent\.toml: (the config file can't be read: No such file|not UTF-8 text)"
    ):
        load_settings(path, environ={})


def test_inproc_and_inline_imply_each_other(load: Any) -> None:
    inproc = load(overrides={"transport.name": "inproc"})
    assert inproc.launcher.name == "inline"
    assert inproc.origins["launcher.name"] == "default, as the transport is inproc"
    assert load(overrides={"launcher.name": "inline"}).transport.name == "inproc"
    both = load(overrides={"transport.name": "inproc", "launcher.name": "spawn"})
    assert (both.transport.name, both.launcher.name) == ("inproc", "spawn")


def test_settings_that_were_loaded_take_further_overrides_and_keep_their_origins(load: Any, registry: Registry) -> None:
    text = MOCK + "block_size = 4\n[ledger]\nmailbox_bytes = 70000\n[plugins]\nenable = ['metrics']\n"
    first = load(text)
    second = load_settings(first, overrides={"engine.mock.model": "m"}, registry=registry)
    assert second.engine.options == {"block_size": 4, "model": "m"}
    assert second.ledger == first.ledger
    assert second.plugins.enable == ("metrics",)
    assert second.origins["engine.mock.block_size"] == "tllm.toml"
    assert second.origins["engine.mock.model"] == "keyword"


def test_keywords_may_be_paths_and_structs_and_become_plain(load: Any) -> None:
    fault = sys.modules["config_plugins"].Fault(at_step=3)
    settings = load(overrides={"engine.name": "mock", "engine.options": {"model": Path("/m"), "fault": fault}})
    assert settings.engine.options == {"model": "/m", "fault": {"at_step": 3}}


def test_options_of_enabled_plugins_are_kept_by_name(load: Any) -> None:
    settings = load("[plugins]\nenable = ['metrics']\n[plugins.metrics]\nport = 9\n")
    assert settings.plugins.options == {"metrics": {"port": 9}}


def test_every_setting_is_shown_with_secrets_masked(load: Any, registry: Registry) -> None:
    text = "[transport]\nname = 'carrier'\n[transport.carrier]\nurl = 'nats://me:hush@host/?token=hush&a=1'\npassword = 'hush'\n"
    shown = {line.key: line for line in shown_settings(load(text), registry)}
    assert shown["transport.carrier.url"].value == "nats://***@host/?token=***&a=1"
    assert shown["transport.carrier.password"].value == "***"
    assert shown["transport.carrier.retry_s"].origin == "default"
    assert shown["transport.name"].origin == "tllm.toml"
    assert "hush" not in str(list(shown.values()))
    assert {"wire", "liveness", "ledger", "plugins", "attach", "engine"} <= {key.partition(".")[0] for key in shown}


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("api_key", "x", "***"),
        ("key_file", "/run/key", "/run/key"),
        ("max_batched_tokens", 5, 5),
        ("stop_token_id", 5, 5),
        ("password", None, None),
        ("servers", ["nats://a:b@h"], ["nats://***@h"]),
        ("nested", {"token": "x", "n": 1}, {"token": "***", "n": 1}),
    ],
)
def test_masking_hides_secrets_and_nothing_else(key: str, value: Any, shown: Any) -> None:
    assert masked(key, value) == shown


class Options(Struct, forbid_unknown_fields=True):
    size: Annotated[int, Meta(gt=0)]
    mode: str = "fast"


def test_options_are_converted_where_they_are_used() -> None:
    assert convert_options(Options, {"size": 2}, "engine.x") == Options(2)
    for options, message in [
        ({"size": 0}, "engine.x.size: expected int >= 1"),
        ({"size": 1, "mood": ""}, "engine.x.mood: unknown key (did you mean 'mode'?)"),
        ({}, "engine.x: 'size' must be given"),
    ]:
        with pytest.raises(ConfigError, match=re.escape(message)):
            convert_options(Options, options, "engine.x")


def test_an_empty_path_of_the_config_file_is_refused_and_an_empty_variable_is_not_given(load: Any) -> None:
    (Path.cwd() / "tllm.toml").write_text("[engine]\nname = 'mock'\n")
    with pytest.raises(ConfigError, match="path of the config file is empty"):
        load(config="")
    assert load(environ={"TLLM_CONFIG": ""}).engine.name == "mock"


def test_a_file_that_begins_with_the_mark_of_utf8_is_read(load: Any, tmp_path: Path) -> None:
    (tmp_path / "marked.toml").write_bytes(b"\xef\xbb\xbf[engine]\nname = 'mock'\n")
    assert load(config=tmp_path / "marked.toml").engine.name == "mock"


def test_a_plugin_that_is_not_there_is_told_with_its_place_before_it_is_loaded(load: Any) -> None:
    words = "there is no plugin 'metrcs' (did you mean 'metrics'?)"
    with pytest.raises(PluginError, match=re.escape(f"tllm.toml: plugins.enable: {words}")):
        load("[plugins]\nenable = ['metrics', 'metrcs']")
    with pytest.raises(PluginError, match=r"\$TLLM_PLUGINS__ENABLE: plugins\.enable: there is no plugin 'nope'"):
        load("", environ={"TLLM_PLUGINS__ENABLE": "nope"})
    assert load("[plugins]\nenable = ['metrics', 'nowhere:at_all']").plugins.enable == ("metrics", "nowhere:at_all")


@pytest.mark.parametrize("run", ["os", "os:", ":path", "os:path.join", "two words", "a b:c"])
def test_what_frontends_run_is_a_module_and_a_function(load: Any, run: str) -> None:
    words = f'tllm.toml: frontends: run must be "module:function", not {run!r}'
    with pytest.raises(ConfigError, match=re.escape(words)):
        load(f"[frontends]\nrun = '{run}'")
    assert load("[frontends]\nrun = 'my.app:serve'").frontends.run == "my.app:serve"


@pytest.mark.parametrize("section", ["attach", "frontends"])
def test_an_empty_text_takes_back_what_the_file_says(load: Any, section: str) -> None:
    key, value = {"attach": ("file", "at.json"), "frontends": ("run", "my_app:serve")}[section]
    text = f"[{section}]\n{key} = '{value}'\n"
    assert getattr(getattr(load(text), section), key) == value
    name = f"{section}.{key}"
    assert getattr(getattr(load(text, overrides={name: Text("")}), section), key) is None
    assert getattr(getattr(load(f"[{section}]\n{key} = ''\n"), section), key) is None


@pytest.mark.parametrize(
    ("text", "over", "message"),
    [
        ("[engine]\nname = 5", {"engine.name": "mock"}, 'engine.name: must be a name or "module:Object"'),
        (MOCK + "block_size = 'x'", {"engine.mock.block_size": 2}, "engine.mock.block_size: expected int, got str"),
        (MOCK + "block_size = 'x'", {"engine.options.block_size": 2}, "engine.mock.block_size: expected int, got str"),
        ("[ledger]\nmailbox_bytes = 1", {"ledger.mailbox_bytes": 70000}, "ledger.mailbox_bytes: expected int >= 65536"),
        ("[wire]\nwindow_frames = []", {"wire.window_frames": 64}, "wire.window_frames: expected int, got array"),
    ],
)
def test_what_another_source_goes_before_is_checked_as_well(
    load: Any, text: str, over: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"tllm.toml: {message}")):
        load(text, overrides=over)


def test_a_name_that_nobody_could_read_is_shortened(load: Any) -> None:
    for text in (f"{'k' * 100_000} = 1", f"[transport]\nname = '{'n' * 100_000}'", f"[wire]\n{'k' * 100_000} = 1"):
        with pytest.raises(ConfigError, match=r"tllm\.toml: .*(kkk|nnn)\.\.\.(kkk|nnn)") as caught:
            load(text)
        assert len(str(caught.value)) < 500
