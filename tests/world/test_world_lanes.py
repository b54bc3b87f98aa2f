"""Whole worlds with real lanes: commands in, step batches out, inline and in processes."""

import os
import secrets
import signal
import time
from collections import defaultdict

import pytest
from msgspec import convert

from tllm_core.contracts.interfaces import Beaten, Capability, Exited, Failed, Listening, Ready, WorldSpec
from tllm_core.contracts.messages import (
    FINISH_REASONS,
    Abort,
    Control,
    ControlReply,
    GenerationRequest,
    Goodbye,
    IterationStats,
    Obituary,
    RankState,
    SamplingParams,
    StepBatch,
    Stop,
    Stopping,
    Submit,
    TokenIds,
)
from tllm_core.engines.echo import expected_tokens
from tllm_core.errors import ConfigError
from tllm_core.executor import GenerationExecutor
from tllm_core.registry import Registry
from tllm_core.wire.link import FrontendLink
from tllm_core.world.launch import InlineLauncher, InlineSettings, SpawnLauncher, SpawnSettings
from tllm_core.world.process import wait_gone
from tllm_core.world.rows import rows_of

KEY, OWNER = secrets.token_bytes(32), secrets.token_bytes(16)


class Frontend:
    """One session, and all that came over it."""

    def __init__(self, address, transport, owner=OWNER):
        kind = Registry().transport(transport)
        peer = b"\1" + secrets.token_bytes(15)
        self.link = FrontendLink(
            kind(kind.settings_type()).connect(address, peer),
            address,
            peer=peer,
            key=KEY,
            owner=owner,
            by_reference=Capability.CROSS_PROCESS not in kind.capabilities,
            reliable=Capability.RELIABLE in kind.capabilities,
        )
        self.welcome = self.link.open(20)
        self.tokens = defaultdict(list)
        self.finishes = {}
        self.errors = {}
        self.messages = []
        self.batches = 0

    def id(self, number):
        return self.welcome.frontend_id << 48 | number

    def submit(self, number, prompt=(1, 2, 3), timeout_s=None, **sampling):
        request = GenerationRequest(
            prompt_token_ids=TokenIds.of(prompt), sampling=SamplingParams(**sampling), timeout_s=timeout_s
        )
        self.link.send(Submit(self.id(number), request))

    def send(self, message):
        self.link.send(message)

    def until(self, condition, timeout=30.0):
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, (dict(self.tokens), self.finishes, self.errors, self.messages)
            for message in self.link.receive(0.2):
                self._take(message)

    def _take(self, message):
        if not isinstance(message, StepBatch):
            self.messages.append(message)
            return
        self.batches += 1
        for row in rows_of(message):
            key = (row.client_id & 0xFFFFFFFFFFFF, row.index)
            self.tokens[key] += row.token_ids
            if row.finish is not None:
                assert key not in self.finishes
                self.finishes[key] = FINISH_REASONS[row.finish[0]]
            if row.extra is not None and row.extra.error is not None:
                self.errors[key[0]] = row.extra.error.message

    def stats(self):
        (reply,) = self.of(ControlReply)
        return convert(reply.values[0], IterationStats)

    def of(self, kind):
        return [message for message in self.messages if isinstance(message, kind)]


class Running:
    """A ready world with its first frontend."""

    def __init__(self, launcher, transport, wire=None, **engine_options):
        self.transport = transport
        self.events = []
        self.frontends = []
        spec = WorldSpec(
            engine="echo",
            engine_options=engine_options,
            engine_name=f"engine-{secrets.token_hex(4)}",
            transport=transport,
            wire=wire or {},
            key=KEY,
            owner=OWNER,
            generation=secrets.randbits(63),
        )
        self.world = launcher.launch(spec)
        self.until(Ready)
        self.frontend = self.attach()

    def until(self, kind, timeout=30.0, when=lambda event: True):
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            fresh = self.world.events(0.2)
            self.events += fresh
            for event in fresh:
                if isinstance(event, kind) and when(event):
                    return event
        raise AssertionError(self.events)

    def attach(self, owner=OWNER):
        address = next(event.address for event in self.events if isinstance(event, Listening))
        self.frontends.append(Frontend(address, self.transport, owner))
        return self.frontends[-1]

    def seen(self, kind):
        self.events += self.world.events(0)
        return [event for event in self.events if isinstance(event, kind)]

    def close(self):
        for frontend in self.frontends:
            frontend.link.close()
        self.world.kill()


LAUNCHERS = {"inline": lambda: InlineLauncher(InlineSettings()), "spawn": lambda: SpawnLauncher(SpawnSettings())}


def _starter(pairs):
    @pytest.fixture(params=pairs, ids="-".join)
    def start(request):
        running = []

        def run(**engine_options):
            launcher, transport = request.param
            running.append(Running(LAUNCHERS[launcher](), transport, **engine_options))
            return running[-1]

        yield run
        for one in running:
            one.close()

    return start


anywhere = _starter([("inline", "inproc"), ("inline", "zmq"), ("spawn", "zmq")])
spawned = _starter([("spawn", "zmq")])


def test_tokens_arrive_complete_and_in_order(anywhere):
    frontend = anywhere().frontend
    for number in range(1, 41):
        frontend.submit(number, (number, 7), max_tokens=50, n=1 + number % 2)
    frontend.until(lambda: len(frontend.finishes) == 60)
    assert set(frontend.finishes.values()) == {"length"}
    for (number, index), tokens in frontend.tokens.items():
        assert tokens == expected_tokens([number, 7], 50, index)


def test_a_request_error_hits_its_own_request(anywhere):
    faults = [{"at": "submit", "do": "request_error", "token": 666, "message": "poison"}]
    running = anywhere(faults=faults)
    frontend = running.frontend
    frontend.submit(1, max_tokens=3)
    frontend.submit(2, (666,), max_tokens=3)
    frontend.submit(3, max_tokens=3)
    frontend.until(lambda: len(frontend.finishes) == 3)
    assert frontend.errors == {2: "poison"}
    assert frontend.finishes == {(1, 0): "length", (2, 0): "error", (3, 0): "length"}
    assert running.seen(Failed) == []


def test_abort_deadline_and_control_in_one_lane(anywhere):
    frontend = anywhere(step_interval_s=0.01).frontend
    frontend.submit(1)
    frontend.until(lambda: len(frontend.tokens[1, 0]) >= 2)
    frontend.send(Abort(frontend.id(1)))
    frontend.send(Control(1, "stats"))
    frontend.until(lambda: frontend.of(ControlReply))
    stats = frontend.stats()
    assert stats.running == stats.waiting == 0
    frontend.submit(2, timeout_s=0.1)
    frontend.until(lambda: (2, 0) in frontend.finishes)
    assert frontend.finishes == {(2, 0): "timeout"}
    assert frontend.tokens[1, 0] == expected_tokens([1, 2, 3], len(frontend.tokens[1, 0]))


def test_a_frontend_that_leaves_takes_its_own_requests_along(anywhere):
    running = anywhere(step_interval_s=0.01)
    other = running.attach(owner=b"")
    other.submit(1)
    running.frontend.submit(1, max_tokens=30)
    other.until(lambda: other.tokens[1, 0])
    other.send(Goodbye())
    running.frontend.until(lambda: running.frontend.finishes)
    assert running.frontend.tokens[1, 0] == expected_tokens([1, 2, 3], 30)
    running.frontend.send(Control(1, "stats"))
    running.frontend.until(lambda: running.frontend.of(ControlReply))
    assert running.frontend.stats().running == 0


def test_a_frontend_that_does_not_read_holds_nobody_up_and_loses_nothing(anywhere):
    running = anywhere(wire={"window_frames": 4, "backlog_frames": 4})
    slow = running.attach(owner=b"")
    for number in range(1, 5):
        slow.submit(number, (number,), max_tokens=400, n=2)
    running.frontend.submit(1, max_tokens=2000)
    running.frontend.until(lambda: running.frontend.finishes)
    assert slow.finishes == {}
    slow.until(lambda: len(slow.finishes) == 8)
    for (number, index), tokens in slow.tokens.items():
        assert tokens == expected_tokens([number], 400, index)
    assert slow.batches < 200


def test_stop_from_the_owner_ends_the_world_and_tells_all(anywhere):
    running = anywhere()
    other = running.attach(owner=b"")
    other.send(Stop())
    other.send(Control(1, "ping"))
    other.until(lambda: other.of(ControlReply))
    running.frontend.send(Stop())
    for frontend in (other, running.frontend):
        frontend.until(lambda frontend=frontend: frontend.of(Stopping))
    assert running.world.stop(20)
    assert running.until(Exited).clean


def test_an_engine_that_raises_says_so_to_owner_and_frontends(anywhere):
    running = anywhere(faults=[{"at": "step", "do": "raise", "after": 5, "message": "bad knob 17"}])
    other = running.attach(owner=b"")
    running.frontend.submit(1)
    failed = running.until(Failed)
    assert failed.message == "RuntimeError: bad knob 17"
    assert "Traceback" in failed.traceback
    for frontend in (running.frontend, other):
        frontend.until(lambda frontend=frontend: frontend.of(Obituary))
        (obituary,) = frontend.of(Obituary)
        assert "bad knob 17" in obituary.message
        assert obituary.rank == 0
    assert running.frontend.tokens[1, 0] == expected_tokens([1, 2, 3], 5)
    assert not running.until(Exited).clean


def test_inline_runs_one_rank_only():
    spec = WorldSpec(engine="echo", engine_options={"world_size": 2}, transport="inproc")
    with pytest.raises(ConfigError, match="spawn"):
        InlineLauncher(InlineSettings()).launch(spec)


def test_an_inline_engine_that_fails_to_start_says_why():
    faults = [{"at": "start", "do": "raise", "message": "bad knob 17"}]
    spec = WorldSpec(engine="echo", engine_options={"faults": faults}, transport="inproc", engine_name="failing")
    world = InlineLauncher(InlineSettings()).launch(spec)
    events = []
    while not any(isinstance(event, Exited) for event in events):
        events += world.events(20)
    assert [event.message for event in events if isinstance(event, Failed)] == ["RuntimeError: bad knob 17"]
    assert world.stop(20)


# ------------------------------------------------------------------------------------------------- processes


def test_a_kill_in_mid_stream_is_told_after_what_had_arrived(spawned):
    running = spawned(step_interval_s=0.002)
    frontend = running.frontend
    frontend.submit(1)
    frontend.until(lambda: len(frontend.tokens[1, 0]) >= 5)
    frontend.send(Control(1, "pid"))
    frontend.until(lambda: frontend.of(ControlReply))
    os.kill(frontend.of(ControlReply)[0].values[0], signal.SIGKILL)
    failed = running.until(Failed)
    assert (failed.rank, failed.exitcode) == (0, -9)
    assert frontend.tokens[1, 0] == expected_tokens([1, 2, 3], len(frontend.tokens[1, 0]))


def test_beats_count_steps_and_say_whether_work_is_pending(spawned):
    running = spawned(step_interval_s=0.01)
    running.frontend.submit(1, max_tokens=50)
    running.until(Beaten, when=lambda event: event.beat.busy)
    running.frontend.until(lambda: running.frontend.finishes)
    beat = running.until(Beaten, when=lambda event: not event.beat.busy and event.beat.steps >= 50).beat
    assert beat.states == (RankState.RUNNING,)


def test_a_step_that_holds_the_lock_is_busy_but_running_in_its_beats(spawned):
    running = spawned(faults=[{"at": "step", "do": "hold_gil", "seconds": 1.5, "times": 1}])
    running.frontend.submit(1, max_tokens=3)
    running.until(Beaten, when=lambda event: event.beat.busy)
    running.frontend.until(lambda: running.frontend.finishes)
    held = [e.beat for e in running.seen(Beaten) if e.beat.busy]
    assert len(held) >= 8
    assert {beat.states for beat in held} == {(RankState.RUNNING,)}
    assert running.frontend.tokens[1, 0] == expected_tokens([1, 2, 3], 3)


def test_a_step_that_never_returns_is_ended_by_kill(spawned):
    running = spawned(faults=[{"at": "step", "do": "hang"}])
    running.frontend.submit(1)
    running.until(Beaten, when=lambda event: event.beat.busy)
    assert not running.world.stop(0.3)
    running.world.kill()
    assert running.until(Exited).clean
    assert wait_gone(running.world._ranks, 0)


def test_a_transport_that_only_the_owners_own_path_leads_to_is_found_by_all_processes(tmp_path, monkeypatch):
    """Also by the watcher, which has a lane of its own."""
    name = f"third_party_{secrets.token_hex(4)}"
    source = "from tllm_core.transports.zmq import ZmqTransport\n\nclass OwnTransport(ZmqTransport):\n    pass\n"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with GenerationExecutor.create(engine="echo", transport=f"{name}:OwnTransport", launcher="spawn") as executor:
        result = executor.generate_async([1, 2], SamplingParams(max_tokens=3)).result(30)
        assert result.outputs[0].token_ids == expected_tokens([1, 2], 3)
