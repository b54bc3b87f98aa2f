"""Health is read from what is known already: it asks nobody, never blocks and never raises."""

import os
import signal
import threading

import pytest

from tests.faults.conftest import DEADLINE_S, LONG, SLOW, Worlds, until
from tllm_core import EngineDeadError
from tllm_core.contracts.interfaces import PORT_UP, PortState
from tllm_core.health import PATH_UP, path_health


def test_an_engine_with_nothing_to_do_and_a_busy_one_are_well(anywhere: Worlds) -> None:
    executor = anywhere(**SLOW)
    health = executor.health()
    assert (health.state, health.ok, health.reason, health.hung) == ("ready", True, None, None)
    assert (health.in_flight, health.last_result_age_s, health.last_step_age_s) == (0, None, None)
    assert health.path == PATH_UP
    result = executor.generate_async([1], LONG)
    next(result)
    health = executor.health()
    assert health.ok
    assert health.in_flight == 1
    assert health.last_result_age_s is not None


def test_the_age_of_a_step_falls_with_the_next(spawned_ipc: Worlds) -> None:
    executor = spawned_ipc(step_interval_s=0.5)
    result = executor.generate_async([1], LONG)
    seen: list[float] = []

    def fell() -> bool:
        age = executor.health().last_step_age_s
        if age is not None:
            seen.append(age)
        return max(seen, default=0.0) >= 0.2 and seen[-1] < max(seen) / 2

    until(fell, "a step is seen to take time, and another one to begin")
    result.abort()


def test_a_death_is_the_reason_and_nothing_else_is(spawned_ipc: Worlds) -> None:
    executor = spawned_ipc(**SLOW)
    result = executor.generate_async([1], LONG)
    os.kill(executor.health().ranks[0].pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        result.result(DEADLINE_S)
    health = executor.health()
    assert not executor.check_health()
    assert health.reason is not None
    assert "killed by SIGKILL" in health.reason
    assert (health.state, health.hung, health.last_step_age_s, health.path) == ("dead", None, None, PATH_UP)


def test_health_may_be_asked_by_anybody_until_long_after_the_end(anywhere: Worlds) -> None:
    executor = anywhere(**SLOW)
    stop, failed = threading.Event(), []

    def ask() -> None:
        try:
            while not stop.is_set():
                executor.check_health()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    next(executor.generate_async([1], LONG))
    executor.shutdown(20)
    stop.set()
    for thread in threads:
        thread.join()
    assert failed == []
    assert (executor.health().state, executor.check_health()) == ("closed", False)


def test_a_path_is_down_where_its_port_says_so_or_proves_nothing() -> None:
    assert path_health(PORT_UP, ok_at=98.5, now=100.0, stale_s=2.0) == PATH_UP
    frozen = path_health(PORT_UP, ok_at=97.0, now=100.0, stale_s=2.0)
    assert (frozen.up, frozen.down_s) == (False, 3.0)
    lost = path_health(PortState(False, "connection refused", 90.0), ok_at=99.9, now=100.0, stale_s=2.0)
    assert (lost.up, lost.reason, lost.down_s) == (False, "connection refused", 10.0)
    unknown = path_health(PortState(False, "the engine does not listen"), ok_at=100.0, now=100.0, stale_s=2.0)
    assert (unknown.up, unknown.down_s) == (False, None)
