"""Frontends in processes of their own over a broker: the end of one concerns nobody else."""

import os
import signal

from tests.attach.conftest import AttachedProcess
from tests.brokers.conftest import LONG, Setup, until
from tllm_core import Expelled, GenerationExecutor


def worker_counts(executor: GenerationExecutor) -> dict[str, int]:
    return executor.stats().extra["worker"]


def begun(process: AttachedProcess) -> None:
    process.until("tokens")


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
