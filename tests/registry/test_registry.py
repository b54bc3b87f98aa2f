"""Plugins by name: found, checked, and named when they are broken, without harm to the others."""

import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tllm_core.errors import PluginError
from tllm_core.registry import Registry, load_object

GOOD = """
from msgspec import Struct
from tllm_core.contracts.interfaces import Capability, EngineSpec, Launcher, Transport

class Settings(Struct):
    url: str = ""

class Good(Transport):
    name, settings_type, capabilities = "good", Settings, Capability.CROSS_PROCESS
    def listen(self, engine, generation): raise NotImplementedError
    def connect(self, engine, peer): raise NotImplementedError

class Half(Transport):
    name, settings_type, capabilities = "half", Settings, Capability.NONE
    def listen(self, engine, generation): raise NotImplementedError

class NoSettings(Good):
    settings_type = dict

class Start(Launcher):
    name, settings_type = "start", Settings
    def launch(self, spec): raise NotImplementedError

SPEC = EngineSpec(name="good", settings_type=Settings, load="nowhere:Engine")
"""

Install = Callable[..., Path]


def registry(tmp_path: Path, **environ: str) -> Registry:
    return Registry(path=[str(tmp_path)], environ=environ)


def test_each_kind_is_found_by_its_entry_point_name(install: Install, tmp_path: Path) -> None:
    kinds = {"transport a": "fine:Good", "engine b": "fine:SPEC", "launcher c": "fine:Start", "plugin d": "fine"}
    install("acme-fine", "fine", GOOD, kinds)
    found = registry(tmp_path)
    assert found.transport("a").name == "good"
    assert found.engine("b").load == "nowhere:Engine"
    assert found.launcher("c").name == "start"
    assert found.plugin("d") is sys.modules["fine"]
    assert found.transport("fine:Good") is found.transport("a")


def test_nothing_is_imported_before_it_is_asked_for(install: Install, tmp_path: Path) -> None:
    install("acme-lazy", "lazy_one", GOOD, {"transport lazy": "lazy_one:Good"})
    found = registry(tmp_path)
    assert found.names("transport") == ["lazy"]
    assert "lazy_one" not in sys.modules
    found.transport("lazy")
    assert "lazy_one" in sys.modules


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("from json import no_such_name", "ImportError: cannot import name 'no_such_name'"),
        ("raise SystemExit('bye')", "SystemExit: bye"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("class Good(:", "SyntaxError"),
        ("class Unrelated: pass", "AttributeError: module 'bad' has no attribute 'Good'"),
        ("Good = 5", "it must be a subclass of Transport, not 5"),
        ("import tllm_core.of_another_version", "there is no module 'tllm_core.of_another_version'"),
    ],
)
def test_a_broken_plugin_is_named_with_its_cause_and_harms_no_other(
    install: Install, tmp_path: Path, code: str, cause: str
) -> None:
    install("acme-bad", "bad", code, {"transport bad": "bad:Good"}, version="2.3")
    install("acme-fine", "fine", GOOD, {"transport fine": "fine:Good"})
    found = registry(tmp_path)
    assert found.transport("fine").name == "good"
    with pytest.raises(PluginError) as caught:
        found.transport("bad")
    assert "acme-bad 2.3 (entry point bad = bad:Good)" in str(caught.value)
    assert cause in str(caught.value)
    states = {item.name: (item.status, item.detail) for item in found.found()}
    assert states["fine"] == ("ok", "")
    assert states["bad"][0] == "broken"
    assert cause in states["bad"][1]


@pytest.mark.parametrize(
    ("attribute", "cause"),
    [("Half", "Half does not implement connect"), ("NoSettings", "settings_type must be a msgspec Struct class")],
)
def test_an_incomplete_transport_is_told_what_it_lacks(
    install: Install, tmp_path: Path, attribute: str, cause: str
) -> None:
    install("acme-half", "half_done", GOOD, {"transport x": f"half_done:{attribute}"})
    with pytest.raises(PluginError, match=cause):
        registry(tmp_path).transport("x")


@pytest.mark.parametrize(("kind", "wanted"), [("engine", "an EngineSpec"), ("launcher", "a subclass of Launcher")])
def test_an_entry_point_of_the_wrong_kind_says_what_it_must_be(
    install: Install, tmp_path: Path, kind: str, wanted: str
) -> None:
    install("acme-mix", "mixed_up", GOOD, {f"{kind} x": "mixed_up:Good"})
    with pytest.raises(PluginError, match=f"must be {wanted}"):
        getattr(registry(tmp_path), kind)("x")


def test_a_missing_driver_is_answered_by_the_smallest_extra_that_has_it(install: Install, tmp_path: Path) -> None:
    requires = (
        "Provides-Extra: all\nProvides-Extra: mqtt\n"
        "Requires-Dist: aio-things; extra == 'all'\nRequires-Dist: mqtt_driver-py>=2; extra == 'all'\n"
        "Requires-Dist: mqtt_driver-py>=2; extra == 'mqtt'\n"
    )
    install("acme-mqtt", "acme_mqtt", "import mqtt_driver.client", {"transport mq": "acme_mqtt:X"}, requires)
    found = registry(tmp_path)
    with pytest.raises(PluginError, match=r"needs the module 'mqtt_driver': pip install 'acme-mqtt\[mqtt\]'"):
        found.transport("mq")
    assert [item.status for item in found.found()] == ["missing extra"]


def test_a_driver_that_no_extra_names_is_answered_by_the_extra_of_the_plugin_s_name(
    install: Install, tmp_path: Path
) -> None:
    requires = "Provides-Extra: mq\nRequires-Dist: something-else; extra == 'mq'\n"
    install("acme-mq", "acme_mq", "import unheard_of", {"transport mq": "acme_mq:X"}, requires)
    with pytest.raises(PluginError, match=r"pip install 'acme-mq\[mq\]'"):
        registry(tmp_path).transport("mq")


def test_what_an_engine_will_need_is_looked_for_before_it_starts(install: Install, tmp_path: Path) -> None:
    spec = GOOD.replace('load="nowhere:Engine"', 'load="nowhere:Engine", requires=("json", "acme_gpu_driver")')
    install("acme-engine", "needy", spec, {"engine needy": "needy:SPEC"})
    found = registry(tmp_path)
    assert [item.status for item in found.found()] == ["missing extra"]
    with pytest.raises(PluginError, match="acme_gpu_driver"):
        found.engine("needy")


def test_a_stale_entry_point_is_no_missing_extra(install: Install, tmp_path: Path) -> None:
    install("acme-stale", "stale", "", {"transport old": "stale.removed:X", "transport older": "gone_away:X"})
    states = {item.name: item for item in registry(tmp_path).found()}
    assert {item.status for item in states.values()} == {"broken"}
    assert "there is no module 'gone_away'" in states["older"].detail
    assert "install it anew" in states["older"].detail


def test_an_unknown_name_lists_what_is_installed_and_the_closest(install: Install, tmp_path: Path) -> None:
    install("acme-fine", "fine", GOOD, {"transport carrier": "fine:Good", "transport pigeon": "fine:Good"})
    with pytest.raises(
        PluginError, match=r"no transport 'carier' \(did you mean 'carrier'\?\); installed: carrier, pigeon"
    ):
        registry(tmp_path).transport("carier")


def test_two_distributions_with_one_name_are_both_named_until_one_is_disabled(install: Install, tmp_path: Path) -> None:
    install("acme-one", "one", GOOD, {"transport same": "one:Good"})
    install("acme-two", "two", GOOD, {"transport same": "two:Good", "transport other": "two:Good"})
    found = registry(tmp_path)
    with pytest.raises(PluginError, match=r"acme-(one|two) 1\.0 .* and acme-(one|two) 1\.0 .* both have that name"):
        found.transport("same")
    assert found.transport("other").name == "good"
    assert [item.status for item in found.found()] == ["ok", "broken", "broken"]
    chosen = registry(tmp_path, TLLM_DISABLE_PLUGINS="Acme_One")
    assert chosen.transport("same").__module__ == "two"


def test_a_disabled_plugin_says_so_and_is_not_imported(install: Install, tmp_path: Path) -> None:
    install(
        "acme-off", "switched_off", GOOD, {"transport off": "switched_off:Good", "transport on": "switched_off:Good"}
    )
    found = registry(tmp_path, TLLM_DISABLE_PLUGINS="off, nothing")
    assert found.names("transport") == ["on"]
    with pytest.raises(PluginError, match="disabled by \\$TLLM_DISABLE_PLUGINS"):
        found.transport("off")
    assert {item.name: item.status for item in found.found()} == {"off": "disabled", "on": "ok"}


def test_metadata_that_can_t_be_read_hides_no_neighbour(install: Install, tmp_path: Path) -> None:
    (install("acme-torn", "torn", "", {"transport torn": "torn:X"}) / "entry_points.txt").write_bytes(
        b"[x\nno = sense\n\xff"
    )
    (install("acme-bare", "bare", "", {"transport bare": "bare:X"}) / "METADATA").unlink()
    install("acme-fine", "fine", GOOD, {"transport fine": "fine:Good"})
    assert registry(tmp_path).transport("fine").name == "good"


HOOKS = """
from tllm_core.contracts.hookspecs import hookimpl

@hookimpl
def {name}({arguments}):
    return "full"
"""


def test_a_plugin_s_hooks_are_called_once_it_was_asked_for(install: Install, tmp_path: Path) -> None:
    install("acme-hooks", "hooked", HOOKS.format(name="tllm_admit", arguments="in_flight"), {"plugin guard": "hooked"})
    found = registry(tmp_path)
    assert [item.status for item in found.found()] == ["ok"]
    assert found.hooks.tllm_admit(request=None, in_flight=9) is None
    found.plugin("guard")
    assert found.hooks.tllm_admit(request=None, in_flight=9) == "full"


@pytest.mark.parametrize(
    ("name", "arguments", "cause"),
    [
        ("tllm_admitt", "in_flight", r"unknown hook 'tllm_admitt' \(did you mean 'tllm_admit'\?\)"),
        ("tllm_admit", "colour", "colour"),
    ],
)
def test_a_hook_that_fits_no_specification_is_refused_and_stays_out(
    install: Install, tmp_path: Path, name: str, arguments: str, cause: str
) -> None:
    install("acme-typo", "typo", HOOKS.format(name=name, arguments=arguments), {"plugin typo": "typo"})
    found = registry(tmp_path)
    with pytest.raises(PluginError, match=cause):
        found.plugin("typo")
    assert found.manager.get_plugins() == set()
    found.manager.check_pending()


def test_a_keyboard_interrupt_during_an_import_is_not_swallowed(install: Install, tmp_path: Path) -> None:
    install("acme-slow", "slow_one", "raise KeyboardInterrupt", {"transport slow": "slow_one:X"})
    with pytest.raises(KeyboardInterrupt):
        registry(tmp_path).transport("slow")


def test_threads_that_ask_at_once_get_one_object(install: Install, tmp_path: Path) -> None:
    install("acme-fine", "fine", GOOD, {"transport fine": "fine:Good"})
    found, got = registry(tmp_path), []
    threads = [threading.Thread(target=lambda: got.append(found.transport("fine"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 8
    assert len(set(got)) == 1


def test_an_object_is_loaded_by_reference_and_its_absence_explained() -> None:
    assert load_object("json:JSONDecoder.decode") is __import__("json").JSONDecoder.decode
    for reference, cause in [("json:nope", "no attribute 'nope'"), ("no_such_thing_here:x", "no module"), (":x", "x")]:
        with pytest.raises(PluginError, match=cause):
            load_object(reference)


def test_a_missing_module_of_ours_says_which_extra_has_it(monkeypatch: pytest.MonkeyPatch, install: Install) -> None:
    install("acme-engine", "acme_engine", "import torch_of_acme", {"engine e": "acme_engine:SPEC"},
            "Provides-Extra: gpu\nRequires-Dist: torch_of_acme>=2; extra == 'gpu'\n")  # fmt: skip
    with pytest.raises(
        PluginError, match=r"'acme_engine:Engine' of acme-engine 1\.0 .*pip install 'acme-engine\[gpu\]'"
    ):
        load_object("acme_engine:Engine")


def test_a_name_to_disable_that_is_nobodys_is_told_once(
    install: Install, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install("acme-once", "acme_once", GOOD, {"transport once_only": "acme_once:Good"})
    for _ in range(2):
        registry(tmp_path, TLLM_DISABLE_PLUGINS="once_onyl, all, Acme_Once").names("transport")
    [told] = caplog.messages
    assert (
        told == "$TLLM_DISABLE_PLUGINS: nothing is called 'once_onyl' (did you mean 'once_only'?); it disables nothing"
    )
