"""Attach, refuse, expel, expire, replay: an engine's table of sessions and the frontends that talk to it."""

import copy
import itertools
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from tllm_core.contracts.messages import (
    FINISH_REASONS,
    Abort,
    Beat,
    Control,
    ControlReply,
    EngineInfo,
    GenerationRequest,
    Goodbye,
    Hello,
    Refuse,
    StepBatch,
    Stop,
    Stopping,
    Submit,
    TokenIds,
)
from tllm_core.errors import Overloaded, PortFull
from tllm_core.wire.attached import FrontendIds
from tllm_core.wire.codec import decode_special, encode
from tllm_core.wire.header import BEAT, HELLO, LAYOUT, MESSAGE, REFUSE, Header, Seal
from tllm_core.wire.liveness import LivenessSettings
from tllm_core.wire.session import FrontendSession
from tllm_core.wire.sessions import LATE_PER_S, EngineSessions
from tllm_core.wire.settings import WireSettings
from tllm_core.wire.terms import Terms

KEY, GENERATION, OWNER = b"k" * 32, 77, b"o" * 16
SMALL = WireSettings(
    max_half_open=3, half_open_s=10.0, tombstones=4, window_frames=4, backlog_frames=2, max_message_bytes=4096
)
PROMPT = GenerationRequest(prompt_token_ids=TokenIds.of([1, 2, 3]))


NONCES = itertools.count(1)


class World:
    """One engine and the frames between it and its frontends; the network loses nothing unless told to."""

    def __init__(
        self, wire: WireSettings = SMALL, liveness: LivenessSettings | None = None, by_reference=False
    ) -> None:
        self.now = 100.0
        self.counters: Counter[str] = Counter()
        self.key = None if by_reference else KEY
        self.inbox: list = []
        self.outboxes: defaultdict[bytes, list] = defaultdict(list)
        self.forgotten: list[bytes] = []
        self.full = False
        self.numbers = itertools.count(1)
        self.wire = wire
        self.messages: list = []
        self.engine = EngineSessions(
            self.to_frontend,
            self.forgotten.append,
            Terms(key=self.key, generation=GENERATION, settings=wire, counters=self.counters),
            owner=OWNER,
            info=EngineInfo(model="m"),
            liveness=liveness,
            random_bytes=lambda size: next(self.numbers).to_bytes(size, "little"),
        )

    def to_frontend(self, peer: bytes, frame) -> None:
        if self.full:
            raise PortFull("the test says so")
        self.outboxes[peer].append(frame)

    def offer(self, number: int, message) -> bool:
        return self.engine.offer(number, self.engine.terms.snapshot(message))

    def turn(self) -> list:
        """The engine acts upon what it was given and reads what came."""
        self.engine.delivered()
        frames, self.inbox = self.inbox, []
        messages = self.engine.take(frames, self.now) + self.engine.tend(self.now, self.now)
        self.engine.pump(self.now)
        self.messages += messages
        return messages


class Front:
    """One frontend."""

    def __init__(self, world: World, name: int, *, owner: bytes = b"", beat_s: float = 0.0) -> None:
        self.world, self.peer = world, bytes([name + 1]) * 16
        self.counters: Counter[str] = Counter()
        terms = Terms(key=world.key, generation=GENERATION, settings=world.wire, counters=self.counters, beat_s=beat_s)
        self.side = FrontendSession(self.to_engine, terms, peer=self.peer, owner=owner)
        self.sent: list = []

    def to_engine(self, frame) -> None:
        self.world.inbox.append(frame)
        self.sent.append(frame)

    def say_hello(self, anew: bool = True) -> None:
        if anew:
            self.side.begin(next(NONCES).to_bytes(16, "little"))
        self.to_engine(self.side.hello())

    def read(self) -> list:
        frames, self.world.outboxes[self.peer] = self.world.outboxes[self.peer], []
        session = self.side.session
        if session is not None:
            session.lane.receiver.delivered()
        messages = self.side.decode(self.side.admit(self.side.read(frames), self.world.now))
        if self.side.session is not None and self.side.lost is None:
            self.side.session.pump(self.world.now)
        return messages

    def attach(self):
        self.say_hello()
        self.world.turn()
        self.read()
        self.world.turn()
        assert self.side.session is not None
        return self

    def send(self, message) -> None:
        self.side.session.offer(self.side.terms.snapshot(message))
        self.side.session.pump(self.world.now)

    def client_id(self, counter: int = 1) -> int:
        return self.side.welcome.frontend_id << 48 | counter

    @property
    def number(self) -> int:
        return self.side.session.number


@pytest.fixture(params=[False, True], ids=["sealed", "by reference"])
def world(request) -> World:
    return World(by_reference=request.param)


def test_hello_is_welcomed_and_messages_go_both_ways(world) -> None:
    front = Front(world, 0).attach()
    assert front.side.welcome.info == EngineInfo(model="m")
    messages = [Submit(front.client_id(), PROMPT), Abort(front.client_id()), Abort(None), Control(1, "stats", [])]
    for message in messages:
        front.send(message)
    assert world.turn() == [(front.number, message) for message in messages]
    batch = StepBatch([front.client_id()], [5], finishes=[(0, 1, None)], extras=[])
    assert world.offer(front.number, batch)
    assert world.offer(front.number, ControlReply(1, [{"a": 1}]))
    world.turn()
    assert front.read() == [batch, ControlReply(1, [{"a": 1}])]
    assert not world.counters
    assert not front.counters


def test_each_frontend_has_its_own_id_and_session(world) -> None:
    fronts = [Front(world, n).attach() for n in range(5)]
    assert [front.side.welcome.frontend_id for front in fronts] == [0, 1, 2, 3, 4]
    assert len({front.number for front in fronts}) == 5


def test_a_repeated_hello_gets_the_same_welcome(world) -> None:
    front = Front(world, 0)
    front.say_hello()
    front.say_hello(anew=False)
    world.turn()
    first, second = world.outboxes[front.peer]
    assert first == second or world.key is None
    front.read()
    assert len(world.engine.table) == 1
    assert front.counters == {"late_handshake": 1}


@pytest.mark.parametrize("versions", [(2, 3), (0, 0)])
def test_another_wire_version_is_refused_by_name_of_both(versions) -> None:
    world = World()
    hello = Hello(*versions, b"p" * 16, b"n" * 16)
    frame = Seal(KEY, GENERATION, 0, down=False).frame(*encode(hello))
    # A frontend of that version says so in its header as well, under its own MAC.
    head = LAYOUT.pack(*Header._make(LAYOUT.unpack_from(frame[0]))._replace(version=versions[1]))
    seal = Seal(KEY, GENERATION, 0, down=False)
    world.inbox.append([head + seal._digest(head, frame[1:]), *frame[1:]])
    assert world.turn() == []
    ((answer_head, body),) = world.outboxes[b"p" * 16]
    assert Header._make(LAYOUT.unpack_from(answer_head)).kind == REFUSE
    refuse = decode_special(REFUSE, [body])
    assert isinstance(refuse, Refuse)
    assert (refuse.nonce, refuse.min_version, refuse.max_version) == (b"n" * 16, 1, 1)
    assert "1" in refuse.reason
    assert f"{versions[0]} to {versions[1]}" in refuse.reason
    assert not world.engine.table


def test_a_frontend_hears_why_it_was_refused() -> None:
    world, front = World(), Front(World(), 0)
    front.world = world
    front.say_hello()
    seal = Seal(KEY, GENERATION, 0, down=True)
    for nonce, reason in ((b"x" * 16, "not for you"), (front.side._nonce, "no room")):
        world.outboxes[front.peer].append(seal.frame(*encode(Refuse(nonce, reason, 1, 1))))
    front.read()
    assert front.side.is_answered
    assert front.side.refused_because == "no room"
    assert front.counters == {"replayed": 1}


def test_half_open_attaches_are_capped_and_expire(world) -> None:
    fronts = [Front(world, n) for n in range(5)]
    for front in fronts:
        front.say_hello()
    world.turn()
    assert len(world.engine.table) == SMALL.max_half_open
    assert world.counters["half_open_full"] == 2
    world.now += SMALL.half_open_s + 1
    world.turn()
    assert not world.engine.table
    for front in fronts[3:]:
        front.say_hello(anew=False)
        world.turn()
        front.read()
        world.turn()
    # What had expired without a word left its ids free, and its own Hello may be tried again.
    fronts[0].side.begin(fronts[0].side._nonce)
    world.outboxes[fronts[0].peer].clear()
    fronts[0].say_hello(anew=False)
    world.turn()
    fronts[0].read()
    world.turn()
    assert fronts[0].side.session is not None
    assert len(world.engine.table) == 3
    assert not world.engine._table.half_open


def test_welcome_that_was_lost_does_not_end_an_earlier_session(world) -> None:
    front = Front(world, 0).attach()
    earlier = front.number
    front.say_hello()
    assert world.turn() == []
    assert earlier in world.engine.table
    front.read()
    assert world.turn() == [(earlier, Goodbye())]
    assert list(world.engine.table) == [front.number]
    assert world.forgotten == []


def test_goodbye_ends_the_session_and_its_late_frames_are_answered_by_gone(world) -> None:
    front = Front(world, 0).attach()
    front.send(Goodbye())
    number = front.number
    assert world.turn() == [(number, Goodbye())]
    assert not world.engine.table
    assert world.forgotten == [front.peer]
    front.send(Submit(front.client_id(), PROMPT))
    assert world.turn() == []
    front.read()
    assert front.side.lost == "the frontend said goodbye"
    assert world.counters == {"late_frames": 1}


def test_an_expelled_frontend_hears_why_and_may_begin_anew(world) -> None:
    front = Front(world, 0).attach()
    batch = StepBatch([front.client_id()], [1])
    world.offer(front.number, batch)
    world.engine.pump(world.now)
    world.engine.end(front.number, "too slow", world.now)
    assert front.read() == [batch]
    assert front.side.lost == "too slow"
    earlier = front.number
    front.attach()
    assert front.number != earlier
    assert front.side.lost is None
    assert world.turn() == []


def forgotten(world: World) -> Front:
    """A frontend with beats whose session ended unheard, and whose tombstone has made room for others."""
    front = Front(world, 0, beat_s=1.0).attach()
    world.engine.end(front.number, "too slow", world.now)
    world.outboxes.clear()
    for name in range(1, SMALL.tombstones + 1):
        other = Front(world, name).attach()
        world.engine.end(other.number, "too slow", world.now)
    assert world.engine._table.tombstone(front.number) is None
    world.outboxes.clear()
    world.counters.clear()
    return front


def test_a_frontend_whose_tombstone_is_gone_still_hears_that_its_session_is(world) -> None:
    front = forgotten(world)
    front.send(Abort(front.client_id()))
    world.turn()
    front.read()
    assert (front.side.lost, world.counters) == (None, {"wrong_session": 1})
    world.now += 1.5
    front.side.session.pump(world.now)
    world.turn()
    front.read()
    assert "so long ago" in front.side.lost
    assert world.counters["late_frames"] == 1


def test_floods_of_beats_of_sessions_that_never_were_cost_little_and_are_answered_to_nobody() -> None:
    world = World()
    front = forgotten(world)
    strange = Seal(b"x" * 32, GENERATION, 999, down=False)
    world.inbox += [strange.frame(BEAT, (front.peer,), sequence=number) for number in range(1, 1001)]
    world.turn()
    assert world.counters == {
        "bad_mac": LATE_PER_S,
        "late_flood": 1000 - LATE_PER_S,
        "wrong_session": 1000 - LATE_PER_S,
    }
    genuine = Seal(KEY, GENERATION, front.number, down=False)
    for payload in ((), (b"short",), (front.peer, b""), (bytes(4096),)):
        world.now += 1.5
        world.inbox.append(genuine.frame(BEAT, payload, sequence=7))
        world.turn()
    assert not any(world.outboxes.values())
    world.now += 1.5
    world.inbox.append(genuine.frame(BEAT, (front.peer,), sequence=7))
    world.turn()
    front.read()
    assert front.side.lost is not None


def test_an_id_is_used_again_only_after_its_requests_are_gone(world) -> None:
    ids = world.engine._table._ids
    front = Front(world, 0).attach()
    front.send(Goodbye())
    world.turn()
    assert ids._used == {0}
    world.turn()
    assert ids._used == set()


def test_ids_are_used_again_as_late_as_possible() -> None:
    ids = FrontendIds()
    assert [ids.draw() for _ in range(32_767)] == list(range(32_767))
    assert ids.draw() is None
    ids.release(5)
    ids.release(3)
    assert [ids.draw(), ids.draw(), ids.draw()] == [3, 5, None]


def test_client_ids_of_another_frontend_are_refused(world) -> None:
    front = Front(world, 0).attach()
    other = Front(world, 1).attach()
    front.send(Submit(other.client_id(), PROMPT))
    front.send(Abort(other.client_id()))
    front.send(Abort(1 << 63))
    front.send(Submit(front.client_id(), PROMPT))
    assert world.turn() == [(front.number, Submit(front.client_id(), PROMPT))]
    assert world.counters == {"foreign_client_id": 3}


def test_only_the_owner_stops_the_engine(world) -> None:
    for name, owner in enumerate((b"", b"wrong" * 4, OWNER[:-1])):
        front = Front(world, name, owner=owner).attach()
        front.send(Stop())
    assert world.turn() == []
    assert world.counters == {"stop_refused": 3}
    front = Front(world, 9, owner=OWNER).attach()
    front.send(Stop())
    assert world.turn() == [(front.number, Stop())]


def test_a_world_without_an_owner_is_stopped_by_nobody(world) -> None:
    world.engine._owner = b""
    front = Front(world, 0, owner=b"").attach()
    front.send(Stop())
    assert world.turn() == []


def test_replayed_frames_change_nothing(world) -> None:
    front = Front(world, 0).attach()
    front.send(Submit(front.client_id(), PROMPT))
    world.turn()
    front.send(Goodbye())
    world.turn()
    again = Front(world, 0).attach()
    table = dict(world.engine.table)
    world.inbox += front.sent * 2
    assert world.turn() == []
    assert world.engine.table == table
    assert again.side.lost is None
    again.send(Submit(again.client_id(), PROMPT))
    assert world.turn() == [(again.number, Submit(again.client_id(), PROMPT))]


def test_a_full_lane_takes_nothing_but_what_ends_things(world) -> None:
    front = Front(world, 0).attach()
    world.full = True
    results = [world.offer(front.number, StepBatch([1], [n])) for n in range(5)]
    assert results == [True, True, False, False, False]
    assert world.offer(front.number, Stopping())
    world.full = False
    world.now += 1
    world.turn()
    assert front.read() == [StepBatch([1], [0]), StepBatch([1], [1]), Stopping()]


def test_a_frontend_that_is_too_fast_is_told(world) -> None:
    front = Front(world, 0).attach()
    for n in range(SMALL.window_frames + SMALL.backlog_frames):
        front.send(Submit(front.client_id(n), PROMPT))
    with pytest.raises(Overloaded, match="try again later"):
        front.send(Submit(front.client_id(99), PROMPT))
    front.send(Abort(front.client_id(0)))
    assert len(world.turn()) == SMALL.window_frames


def test_messages_for_a_session_that_ended_are_counted(world) -> None:
    assert world.offer(12345, Stopping())
    assert world.counters == {"unknown_session": 1}


def test_a_submit_that_can_not_be_read_is_answered() -> None:
    world = World()
    front = Front(world, 0).attach()
    body = encode(Submit(front.client_id(), PROMPT))[1][0].replace(b"\1\0\0\0\2", b"\1\0\0\xff\2")
    front.side.session.offer((MESSAGE, (body,), len(body), False))
    front.side.session.pump(world.now)
    front.side.session.offer((MESSAGE, (b"\xc1",), 1, False))
    front.side.session.pump(world.now)
    front.send(Submit(front.client_id(2), PROMPT))
    assert world.turn() == [(front.number, Submit(front.client_id(2), PROMPT))]
    (batch,) = front.read()
    assert batch.client_ids == [front.client_id()]
    assert FINISH_REASONS[batch.finishes[0][1]] == "error"
    assert "token ids" in batch.extras[0][1].error.message
    assert world.counters == {"malformed": 2}


def test_an_engine_that_makes_no_sense_loses_its_frontend() -> None:
    world = World()
    front = Front(world, 0).attach()
    world.engine.offer(front.number, (MESSAGE, (b"\xc1",), 1, False))
    world.turn()
    assert front.read() == []
    assert "can't be read" in front.side.lost


LIVELY = LivenessSettings(frontend_dead_after_s=4.0, frontend_beat_s=1.0)


def beat_on(world: World, fronts: list[Front], seconds: float) -> list:
    """Lets time pass in small steps, in which the frontends' pumps run."""
    ended: list = []
    until = world.now + seconds
    while world.now < until:
        world.now += 0.25
        for front in fronts:
            front.side.session.pump(world.now)
        ended += world.turn()
    return ended


def test_a_silent_frontend_is_given_up_and_one_that_beats_is_not() -> None:
    world = World(liveness=LIVELY)
    silent, lively = Front(world, 0).attach(), Front(world, 1, beat_s=1.0).attach()
    assert beat_on(world, [lively], 3.5) == []
    assert beat_on(world, [lively], 30.0) == [(silent.number, Goodbye())]
    assert list(world.engine.table) == [lively.number]
    silent.read()
    assert "silent for 4 s" in silent.side.lost


def test_replayed_beats_do_not_keep_a_dead_frontend_alive() -> None:
    world = World(liveness=LIVELY)
    front = Front(world, 0, beat_s=1.0).attach()
    beat_on(world, [front], 3.0)
    old = list(front.sent)
    ended: list = []
    for _ in range(10):
        world.inbox += old
        ended += beat_on(world, [], 1.0)
    assert ended == [(front.number, Goodbye())]
    assert world.counters["stale_beat"]


def test_an_engine_that_was_frozen_itself_gives_nobody_up() -> None:
    world = World(liveness=LIVELY)
    front = Front(world, 0, beat_s=1.0).attach()
    world.now += 60
    assert world.turn() == []
    assert beat_on(world, [front], 5.0) == []
    assert front.number in world.engine.table


def test_beats_of_the_engine_arrive_in_rising_order_only() -> None:
    world = World()
    front = Front(world, 0).attach()
    for number in range(3):
        world.engine.beat(Beat(number, 0, False), world.now)
    frames = list(world.outboxes[front.peer])
    world.outboxes[front.peer] = [frames[0], frames[2], frames[1], frames[2]]
    assert front.read() == []
    assert [beat.number for beat in front.side.beats] == [0, 2]
    assert front.counters == {"stale_beat": 2}


# ---------------------------------------------------------------------------------------------------------- noise


def state_of(world: World, front: Front) -> list:
    engine = world.engine
    session = front.side.session
    lanes = [session.lane, *(attached.session.lane for attached in engine.table.values())]
    numbers = [
        (
            lane.sender.acked,
            lane.sender.cursor,
            lane.sender.sent,
            lane.sender.last,
            lane.receiver.taken,
            lane.receiver.ack,
        )
        for lane in lanes
    ]
    beats = [(attached.last_beat, attached.confirmed) for attached in engine.table.values()]
    tables = [
        engine._table._by_hello,
        engine._table._by_peer,
        engine._table.half_open,
        engine._table._tombstones,
        engine._table._ids._used,
    ]
    return [numbers, beats, *map(copy.copy, tables), front.side.lost, front.side.welcome, list(front.side.beats)]


def talked() -> tuple[World, Front]:
    """A world in which some messages went both ways and everything is acknowledged."""
    world = World()
    front = Front(world, 0, beat_s=1.0).attach()
    for n in range(3):
        front.send(Submit(front.client_id(n), PROMPT))
        world.turn()
        world.offer(front.number, StepBatch([front.client_id(n)], [n]))
        for _ in range(3):
            world.now += 0.05
            world.turn()
            front.read()
    return world, front


WORLD, FRONT = talked()
RECORDED = [*FRONT.sent, FRONT.side.hello()]
FOREIGN = Seal(b"x" * 32, GENERATION, FRONT.number, down=False)


@st.composite
def noise(draw: st.DrawFn) -> list:
    """A frame that this session's peer did not send, or sent before."""
    kind = draw(st.sampled_from(["random", "magic", "replay", "flip", "cut", "extend", "foreign", "swap"]))
    if kind == "random":
        return draw(st.lists(st.binary(max_size=100), max_size=3))
    if kind == "magic":
        head = b"TLLM\1\0" + draw(st.binary(min_size=2, max_size=2)) + GENERATION.to_bytes(8, "little")
        return [head + draw(st.binary(min_size=56, max_size=56)), draw(st.binary(max_size=50))]
    if kind == "foreign":
        return FOREIGN.frame(draw(st.integers(0, 9)), [draw(st.binary(max_size=50))], sequence=draw(st.integers(0, 99)))
    frame = [bytearray(buffer) for buffer in draw(st.sampled_from(RECORDED))]
    place = draw(st.integers(0, 10_000))
    buffer = frame[place % len(frame)]
    if kind == "flip":
        buffer[place % len(buffer)] ^= 1 << draw(st.integers(0, 7))
    elif kind == "cut":
        del buffer[place % len(buffer) :]
    elif kind == "extend":
        buffer.extend(draw(st.binary(min_size=1, max_size=9)))
    elif kind == "swap":
        frame.append(bytearray(draw(st.binary(max_size=9))))
    return [bytes(buffer) for buffer in frame]


@settings(max_examples=500, deadline=None, database=None)
@given(st.lists(noise(), min_size=1, max_size=8))
def test_noise_and_replays_change_nothing_but_counters(frames) -> None:
    before = state_of(WORLD, FRONT)
    WORLD.inbox += frames
    WORLD.outboxes[FRONT.peer] += frames
    counted = WORLD.counters.total() + FRONT.counters.total()
    assert WORLD.turn() == []
    assert FRONT.read() == []
    WORLD.inbox.clear()
    WORLD.outboxes.clear()
    assert state_of(WORLD, FRONT) == before
    assert WORLD.counters.total() + FRONT.counters.total() >= counted + len(frames)


# -------------------------------------------------------------------------------------------------- state machine

PLACES = st.integers(0, 50)


class AttachStorm(RuleBasedStateMachine):
    """Frontends come, talk, leave, begin anew and are expelled over a network that loses, doubles and replays."""

    fronts = Bundle("fronts")

    def __init__(self) -> None:
        super().__init__()
        self.world = World(LOSSY, LIVELY)
        self.all: list[Front] = []
        self.said: defaultdict[int, list[int]] = defaultdict(list)
        self.heard: defaultdict[int, list[int]] = defaultdict(list)
        self.over: set[int] = set()
        self.owners: dict[int, Front] = {}

    @rule(target=fronts)
    def come(self):
        if len(self.all) >= 6:
            return multiple()
        front = Front(self.world, len(self.all), beat_s=1.0)
        front.side.terms.reliable = False
        self.all.append(front)
        return front

    @rule(front=fronts, anew=st.booleans())
    def hello(self, front: Front, anew: bool) -> None:
        if front.side.session is None or front.side.lost or anew:
            front.say_hello(anew=anew or not front.side._nonce)

    @rule(front=fronts)
    def read(self, front: Front) -> None:
        front.read()
        if front.side.session is not None:
            self.owners.setdefault(front.number, front)

    @rule(front=fronts)
    def submit(self, front: Front) -> None:
        if front.side.session is None or front.side.lost:
            return
        said = self.said[front.number]
        try:
            front.send(Submit(front.client_id(len(said)), PROMPT))
            said.append(len(said))
        except Overloaded:
            pass

    @rule()
    def turn(self) -> None:
        for number, message in self.world.turn():
            assert number not in self.over
            if isinstance(message, Goodbye):
                self.over.add(number)
            else:
                assert message.client_id >> 48 == self.owners[number].side.welcome.frontend_id or number in self.over
                self.heard[number].append(message.client_id & 0xFFFF)

    @rule(place=PLACES)
    def expel(self, place: int) -> None:
        if self.world.engine.table:
            number = list(self.world.engine.table)[place % len(self.world.engine.table)]
            self.world.engine.end(number, "expelled", self.world.now)
            self.over.add(number)

    @rule(front=consumes(fronts))
    def die(self, front: Front) -> None:
        self.world.outboxes.pop(front.peer, None)

    @rule(place=PLACES)
    def lose(self, place: int) -> None:
        if self.world.inbox:
            self.world.inbox.pop(place % len(self.world.inbox))

    @rule(front=fronts, place=PLACES)
    def lose_answer(self, front: Front, place: int) -> None:
        box = self.world.outboxes[front.peer]
        if box:
            box.pop(place % len(box))

    @rule(front=fronts, place=PLACES)
    def replay(self, front: Front, place: int) -> None:
        if front.sent:
            self.world.inbox.append(front.sent[place % len(front.sent)])

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.0, 3.0]))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds

    @invariant()
    def what_is_heard_is_a_prefix_of_what_was_said(self) -> None:
        for number, heard in self.heard.items():
            assert heard == self.said[number][: len(heard)]

    @invariant()
    def tables_agree_and_are_bounded(self) -> None:
        engine = self.world.engine
        ids = [attached.frontend_id for attached in engine.table.values()]
        assert len(set(ids)) == len(ids)
        assert set(ids) <= engine._table._ids._used
        assert len(engine._table.half_open) <= LOSSY.max_half_open
        assert len(engine._table._tombstones) <= LOSSY.tombstones
        assert len(engine._table._by_hello) <= len(engine.table) + len(engine._table._tombstones)
        confirmed = {number for number, attached in engine.table.items() if attached.confirmed}
        assert set(engine._table._by_peer.values()) == confirmed
        assert set(engine.table) - confirmed == set(engine._table.half_open)

    def teardown(self) -> None:
        """Everybody falls silent: every session ends by itself, and only tombstones remain."""
        self.world.inbox.clear()
        for _ in range(80):
            self.world.now += 0.25
            self.turn()
        engine = self.world.engine
        for table in (
            engine.table,
            engine._active,
            engine._table.half_open,
            engine._table._by_peer,
            engine._leaving,
            engine._table._ids._used,
        ):
            assert not table
        assert engine.next_at() is None
        self.tables_agree_and_are_bounded()


LOSSY = WireSettings(max_half_open=2, half_open_s=5.0, tombstones=4, window_frames=4, backlog_frames=3)
AttachStorm.TestCase.settings = settings(max_examples=80, stateful_step_count=50, deadline=None, database=None)
TestAttachStorm = AttachStorm.TestCase


def test_the_kind_of_hello_never_changes() -> None:
    assert HELLO == 1
    assert REFUSE == 3
