"""A broker that stays away: what callers, health and the engine make of it, and how all go on once it is back."""

import asyncio
import os
import signal
import threading
import time

import pytest

from tests.brokers.conftest import LONG, Setup, until
from tllm_core import BrokerLost, EngineDeadError, SamplingParams
from tllm_core.engines.echo import expected_tokens

STREAMS = 64


class Crowd:
    """Streams of one executor, consumed by tasks of one loop on a thread; each ends complete or with an error."""

    def __init__(self, executor, count: int, max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens)
        self.prompts = [[number + 1, 7] for number in range(count)]
        self.results = [executor.generate_async(prompt, params) for prompt in self.prompts]
        self.tokens: list[list[int]] = [[] for _ in self.prompts]
        self.errors: list[tuple[BaseException, float]] = []
        self._thread = threading.Thread(target=lambda: asyncio.run(self._consume()))
        self._thread.start()

    async def _consume(self) -> None:
        await asyncio.gather(*map(self._follow, range(len(self.results))))

    async def _follow(self, number: int) -> None:
        try:
            async for update in self.results[number]:
                self.tokens[number] += update.outputs[0].token_ids_diff
        except Exception as error:
            self.errors.append((error, time.monotonic()))

    def begun(self) -> bool:
        return all(self.tokens)

    def join(self) -> None:
        self._thread.join(120)
        assert not self._thread.is_alive()

    def check_prefixes(self) -> None:
        for prompt, tokens in zip(self.prompts, self.tokens, strict=True):
            assert tokens == expected_tokens(prompt, len(tokens))


def test_a_broker_that_stays_away_ends_all_with_its_own_error_and_the_engine_aborts_them(broker: Setup) -> None:
    down_s = 1.5
    settings = {"liveness.broker_down_after_s": down_s}
    owned = broker.shared(settings=settings, step_interval_s=0.02, max_batch_size=2 * STREAMS)
    attached = broker.attach(owned, settings=settings)
    crowds = [Crowd(owned.executor, 64, LONG), Crowd(attached, 64, LONG)]
    for crowd in crowds:
        until(crowd.begun, "every stream begins")
    since = time.monotonic()
    broker.server.kill()
    for crowd in crowds:
        crowd.join()
        crowd.check_prefixes()
        assert {type(error) for error, _ in crowd.errors} == {BrokerLost}
        took_s = [at - since for _, at in crowd.errors]
        print(f"told after {min(took_s):.2f} to {max(took_s):.2f} s of {down_s} s")
        assert down_s * 0.5 < min(took_s)
        assert max(took_s) < down_s + 10
    with pytest.raises(BrokerLost):
        owned.executor.generate([1, 2])
    broker.server.restart()
    fresh = until(lambda: _attached_again(broker, owned), "somebody can attach again")
    until(lambda: fresh.stats().extra["worker"]["requests"] == 0, "the engine aborts the orphans")
    assert fresh.generate([5, 6], SamplingParams(max_tokens=9)).outputs[0].token_ids == expected_tokens([5, 6], 9)


def _attached_again(broker: Setup, owned):
    try:
        return broker.attach(owned)
    except EngineDeadError:
        raise
    except Exception as error:
        print(error)
        return None


def test_an_outage_shows_in_health_and_goes_again(broker: Setup) -> None:
    executor = broker.own()
    assert executor.check_health()
    broker.server.kill()
    until(lambda: not executor.health().path.up, "health shows that the path is down")
    assert executor.health().state == "ready"
    assert "path" in str(executor.health().reason)
    broker.server.restart()
    until(lambda: executor.health().path.up, "health shows that it is back")
    assert executor.generate([5, 6], SamplingParams(max_tokens=9)).outputs[0].token_ids == expected_tokens([5, 6], 9)


@pytest.mark.parametrize("dead", [True, False], ids=["of a dead engine", "of a live one"])
def test_a_shutdown_is_bounded_while_the_broker_is_frozen(broker: Setup, dead: bool) -> None:
    executor = broker.own()
    broker.server.freeze()
    try:
        if dead:
            os.kill(executor.health().ranks[0].pid, signal.SIGKILL)
            until(lambda: executor.health().state == "dead", "the death is noticed")
        began = time.monotonic()
        executor.shutdown(5)
        assert time.monotonic() - began < 4 * 5
        assert ("SIGKILL" if dead else "was shut down") in str(executor.health().cause)
    finally:
        broker.server.thaw()
