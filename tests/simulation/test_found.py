"""What the simulation has found: the schedule, and the few frames that it comes down to."""

from __future__ import annotations

import itertools
from collections import Counter

from tllm_core.contracts.messages import EngineInfo
from tllm_core.wire.session import FrontendSession
from tllm_core.wire.sessions import EngineSessions
from tllm_core.wire.settings import DEFAULT_WIRE
from tllm_core.wire.terms import Terms

from .runner import run_one

PEER = b"\x01" * 16


def terms() -> Terms:
    return Terms(key=b"k" * 32, generation=7, settings=DEFAULT_WIRE, counters=Counter())


def test_a_late_confirmation_of_an_abandoned_attach_does_not_end_the_newer_session():
    """Schedule 2006923: its path stalled between Welcome and the first acknowledgement, and the same peer began anew."""
    numbers, to_frontend, to_engine = itertools.count(1), [], []
    engine = EngineSessions(
        lambda peer, frame: to_frontend.append(frame),
        lambda peer: None,
        terms(),
        owner=b"",
        info=EngineInfo(model="m"),
        liveness=None,
        random_bytes=lambda size: next(numbers).to_bytes(size, "little"),
    )
    confirmations = []
    for attempt in (1, 2):
        frontend = FrontendSession(to_engine.append, terms(), peer=PEER)
        frontend.begin(bytes([attempt]) * 16)
        engine.take([frontend.hello()], now=attempt)
        frontend.read([to_frontend.pop()])
        frontend.session.pump(now=attempt)
        confirmations.append(to_engine.pop())
    engine.take([confirmations[1]], now=3.0)
    newer = frontend.session.number
    assert list(engine.table) == [newer]
    assert engine.take([confirmations[0]], now=4.0) == []
    assert list(engine.table) == [newer]
    assert engine.table[newer].confirmed


def test_its_schedule_is_clean():
    found = run_one(2006923)
    assert found is None, found.violation
