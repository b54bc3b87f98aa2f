"""Over a broker as beside it: deaths, freezes, aborts and departures reach exactly those whom they concern."""

import os
import signal

import pytest

from tests.attach.conftest import AttachedProcess
from tests.brokers.conftest import LONG, Setup, until
from tllm_core import EngineDeadError, Expelled, GenerationExecutor, SamplingParams
from tllm_core.conformance.proxy import CutProxy
from tllm_core.engines.echo import expected_tokens

STREAM = SamplingParams(max_tokens=LONG)


def worker_counts(executor: GenerationExecutor) -> dict[str, int]:
    return executor.stats().extra["worker"]


def begun(process: AttachedProcess) -> None:
    process.until("tokens")


def test_a_killed_engine_wakes_owner_and_attached_with_its_cause(broker: Setup) -> None:
    owned = broker.shared(settings={"liveness.dead_after_s": 60.0})  # so that they are told, or not at all
    attached = broker.attach_process(owned)
    begun(attached)
    result = owned.executor.generate_async([4, 5], STREAM)
    os.kill(owned.rank0.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        result.result(30)
    error = attached.until("error")
    assert error["error"] == "EngineDeadError"
    assert "SIGKILL" in error["message"]
    assert attached.is_exact()


def test_a_world_that_dies_without_a_word_is_noticed_by_its_silence(broker: Setup) -> None:
    owned = broker.shared()
    attached = broker.attach_process(owned)
    begun(attached)
    for process in (owned.content.watcher, owned.rank0):
        os.kill(process.pid, signal.SIGSTOP)
    assert attached.until("error")["error"] == "EngineDeadError"
    assert attached.is_exact()
    for process in (owned.content.watcher, owned.rank0):
        os.kill(process.pid, signal.SIGCONT)


def test_a_stopped_rank_is_noticed_and_named(broker: Setup) -> None:
    owned = broker.shared()
    attached = broker.attach_process(owned)
    begun(attached)
    os.kill(owned.rank0.pid, signal.SIGSTOP)
    error = attached.until("error")
    assert (error["error"], "rank 0" in error["message"]) == ("EngineDeadError", True)


def test_the_owners_shutdown_tells_attached_frontends(broker: Setup) -> None:
    owned = broker.shared()
    attached = broker.attach_process(owned)
    begun(attached)
    owned.executor.shutdown(20)
    error = attached.until("error")
    assert (error["error"], "stopped" in error["message"]) == ("EngineDeadError", True)


def test_a_killed_frontends_requests_are_aborted_and_nobody_elses(broker: Setup) -> None:
    owned = broker.shared()
    doomed, other = broker.attach_process(owned, 1), broker.attach_process(owned, 50, 600)
    begun(doomed)
    begun(other)
    doomed.kill()
    until(lambda: worker_counts(owned.executor)["requests"] <= 1, "the dead frontend's request is aborted")
    other.until("done")
    assert other.is_exact()


def test_a_frozen_frontend_is_expelled_for_its_silence_and_may_begin_anew(broker: Setup) -> None:
    owned = broker.shared(settings={"liveness.frontend_dead_after_s": 1.0, "liveness.frontend_beat_s": 0.1})
    frozen = broker.attach_process(owned, 1, LONG, "again")
    begun(frozen)
    os.kill(frozen.pid, signal.SIGSTOP)
    until(lambda: worker_counts(owned.executor)["sessions"] == 1, "its session is ended")
    assert worker_counts(owned.executor)["requests"] == 0
    os.kill(frozen.pid, signal.SIGCONT)
    assert frozen.until("error")["error"] == Expelled.__name__
    frozen.until("done")


def test_aborts_in_every_phase_have_one_outcome_each(broker: Setup) -> None:
    executor = broker.own(max_batch_size=2)
    running = [executor.generate_async([number], STREAM) for number in range(1, 3)]
    queued = [executor.generate_async([number], STREAM) for number in range(3, 6)]
    until(lambda: running[0].outputs[0].token_ids or _step(running[0]), "the first runs")
    for result in (queued[0], queued[0], running[0]):
        result.abort()
    at_once = executor.generate_async([9], STREAM)
    at_once.abort()
    for result in (queued[0], running[0], at_once):
        assert result.result(30).outputs[0].finish_reason == "abort"
    executor.abort_all()
    for result in (*running, *queued, at_once):
        assert result.result(30).outputs[0].finish_reason == "abort"
    until(lambda: worker_counts(executor)["requests"] == 0, "the engine owes nothing")
    executor.abort(at_once.client_id)  # unknown by now: a quiet no-op
    short = executor.generate([7, 8], SamplingParams(max_tokens=4))
    assert short.outputs[0].token_ids == expected_tokens([7, 8], 4)


def _step(result) -> list[int]:
    return list(next(iter(result)).outputs[0].token_ids)


def test_twenty_frontends_attach_at_once_with_different_ids(broker: Setup) -> None:
    owned = broker.shared()
    frontends = [broker.attach(owned) for _ in range(20)]
    results = [
        frontend.generate_async([number + 1], SamplingParams(max_tokens=5)) for number, frontend in enumerate(frontends)
    ]
    for number, result in enumerate(results):
        assert result.result(30).outputs[0].token_ids == expected_tokens([number + 1], 5)
    assert len({result.client_id >> 48 for result in results}) == 20


def test_control_calls_are_answered_and_fail_at_once_with_the_engine(broker: Setup) -> None:
    owned = broker.shared()
    frontend = broker.attach(owned)
    assert frontend.stats().running == 0
    os.kill(owned.rank0.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        until(lambda: frontend.stats() is None, "the call fails")


def test_a_cut_and_a_slow_path_of_one_frontend_change_nothing_that_it_receives(broker: Setup) -> None:
    owned = broker.shared()
    with CutProxy("127.0.0.1", broker.server.port) as proxy:
        url = broker.server.url.replace(str(broker.server.port), str(proxy.port))
        frontend = broker.attach(owned, url=url)
        result = frontend.generate_async([3, 4], SamplingParams(max_tokens=3000))
        tokens: list[int] = []
        for number, update in enumerate(result):
            tokens += update.outputs[0].token_ids_diff
            if number in (20, 60, 100):
                proxy.cut()
                proxy.heal()
            elif number == 140:
                proxy.delay_s = 0.02
            elif number == 160:
                proxy.delay_s, proxy.bytes_per_s = 0.0, 60_000
        assert tokens == expected_tokens([3, 4], 3000)
        frontend.shutdown(5)


def test_a_thawed_generation_changes_nothing_for_the_next_one(broker: Setup) -> None:
    old = broker.shared()
    frontend = broker.attach_process(old)
    begun(frontend)
    stopped = (old.content.watcher, old.rank0)
    for process in stopped:
        os.kill(process.pid, signal.SIGSTOP)
    assert frontend.until("error")["error"] == "EngineDeadError"
    executor = broker.own()
    stream = executor.generate_async([6, 7], SamplingParams(max_tokens=500))
    for process in stopped:
        os.kill(process.pid, signal.SIGCONT)
    assert stream.result(60).outputs[0].token_ids == expected_tokens([6, 7], 500)
