"""Engines that nobody asked anything for a long time answer at once, over every transport that crosses processes."""

from tests.soak.conftest import IDLE_S, IdleEngines
from tests.soak.idle_engines import PROMPT, TOKENS, TRANSPORTS
from tllm_core.engines.echo import expected_tokens

AT_ONCE_S = 2.0
"""Less than any default time-out or pause of a client library, which a connection that was lost would cost."""


def test_engines_that_idled_answer_at_once(idle_engines: IdleEngines) -> None:
    """Seventy seconds, ten minutes in `make soak`. No connection was made anew, and nothing was logged."""
    found = idle_engines.wait()
    print(f"after {found['idle_s']:.0f} s: { ({name: round(took, 4) for name, took in found['took_s'].items()}) } s")
    assert found["idle_s"] == IDLE_S
    assert found["healthy"] == dict.fromkeys(TRANSPORTS, True)
    assert found["tokens"] == dict.fromkeys(TRANSPORTS, expected_tokens(PROMPT, TOKENS))
    assert found["connections"][0] == found["connections"][1]
    assert found["warnings"] == []
    assert found["broker_errors"] == []
    assert idle_engines.errors.read_text() == ""
    assert [path.name for path in idle_engines.directory.rglob("*") if not path.is_dir()] == ["stderr"]
    assert max(found["took_s"].values()) < AT_ONCE_S
