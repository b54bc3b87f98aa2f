"""A choice stays one when settings are loaded over settings, also where it is what the default would be."""

from tllm_core.config import Settings, load_settings
from tllm_core.config.settings import Choice, EngineChoice


def pair(settings: Settings, **overrides: str) -> tuple[str, str]:
    loaded = load_settings(settings, overrides={key.replace("_", "."): value for key, value in overrides.items()})
    return loaded.transport.name, loaded.launcher.name


def test_what_a_program_chose_is_kept_beside_a_keyword() -> None:
    chosen = Settings(engine=EngineChoice("echo"), transport=Choice("zmq"))
    assert pair(chosen, launcher_name="inline") == ("zmq", "inline")
    assert pair(load_settings(chosen), launcher_name="inline") == ("zmq", "inline")


def test_what_nobody_chose_follows_the_keyword() -> None:
    assert pair(Settings(engine=EngineChoice("echo")), launcher_name="inline") == ("inproc", "inline")
    loaded = load_settings(None, overrides={"engine.name": "echo"}, environ={})
    assert pair(loaded, transport_name="inproc") == ("inproc", "inline")


def test_what_followed_from_one_choice_follows_the_next_one() -> None:
    loaded = load_settings(None, overrides={"engine.name": "echo", "transport.name": "inproc"}, environ={})
    assert pair(loaded) == ("inproc", "inline")
    assert pair(loaded, transport_name="zmq") == ("zmq", "spawn")
