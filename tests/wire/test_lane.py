"""Two ends of one session over a channel that loses, doubles, reorders and corrupts, against a model of what must arrive."""

from collections import Counter

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tllm_core.errors import Overloaded, PortFull
from tllm_core.wire.header import MESSAGE
from tllm_core.wire.lane import Lane, Receiver, Sender
from tllm_core.wire.session import Session
from tllm_core.wire.settings import WireSettings
from tllm_core.wire.terms import Terms

SMALL = WireSettings(
    window_frames=4,
    window_bytes=200,
    backlog_frames=6,
    backlog_bytes=300,
    ack_every_frames=3,
    ack_delay_s=0.02,
    resend_after_s=0.2,
    resend_max_s=1.0,
    probe_after_s=1000.0,
)
ENDS = st.sampled_from([0, 1])
PLACES = st.integers(0, 7)


class End:
    """One end: what it was asked to send, what it took in, and the frames that are on their way to the other one."""

    def __init__(self, lane_type: type[Lane], reliable: bool, *, down: bool) -> None:
        self.counters: Counter[str] = Counter()
        terms = Terms(key=b"k" * 32, generation=3, settings=SMALL, counters=self.counters, reliable=reliable)
        self.gate = terms.gate(down=not down)
        self.session = Session(5, self.send, terms, down=down)
        self.session.lane = self.lane = lane_type(SMALL, self.counters, reliable=reliable)
        self.port_full = False
        self.wire: list[list[bytes]] = []
        self.sent: list[list[bytes]] = []
        self.offered: list[bytes] = []
        self.taken: list[bytes] = []
        self.acted = self.acked = 0

    def send(self, frame: list[bytes]) -> None:
        if self.port_full:
            raise PortFull("the test says so")
        self.wire.append(frame)
        self.sent.append(frame)

    def arrive(self, frame: list[bytes], now: float) -> None:
        header = self.gate.read(frame)
        if header is not None and self.session.is_genuine(frame) and self.session.take(header, now):
            whole = self.session.whole(header, frame[1:])
            if whole is not None:
                self.taken.append(bytes(whole[0]))

    def act(self) -> None:
        self.lane.receiver.delivered()
        self.acted = self.lane.receiver.taken


class Channel(RuleBasedStateMachine):
    """What any channel does. `lane_type` may be a broken one."""

    lane_type: type[Lane] = Lane
    reliable = False

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.ends = [End(self.lane_type, self.reliable, down=False), End(self.lane_type, self.reliable, down=True)]

    @rule(which=ENDS, size=st.integers(4, 120), urgent=st.sampled_from([False, False, False, True]))
    def offer(self, which: int, size: int, urgent: bool) -> None:
        end = self.ends[which]
        body = b"%03d" % len(end.offered) + bytes(size)
        sender = end.lane.sender
        try:
            end.session.offer((MESSAGE, (body,), len(body), urgent))
            end.offered.append(body)
        except Overloaded:
            waiting = [frame.size for sequence, frame in sender._frames.items() if sequence > sender.sent]
            assert not urgent
            assert len(waiting) >= SMALL.backlog_frames or sum(waiting) + len(body) > SMALL.backlog_bytes

    @rule(seconds=st.sampled_from([0.001, 0.015, 0.05, 0.3, 1.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(which=ENDS)
    def pump(self, which: int) -> None:
        self.ends[which].session.pump(self.now)

    @rule(which=ENDS, full=st.booleans())
    def fill_port(self, which: int, full: bool) -> None:
        self.ends[which].port_full = full

    @rule(which=ENDS)
    def act(self, which: int) -> None:
        self.ends[which].act()

    @rule(which=ENDS)
    def arrive_in_order(self, which: int) -> None:
        if self.ends[which].wire:
            self.ends[1 - which].arrive(self.ends[which].wire.pop(0), self.now)

    @rule(which=ENDS, place=st.integers(0, 100))
    def replay(self, which: int, place: int) -> None:
        sent = self.ends[which].sent
        if sent:
            self.ends[1 - which].arrive(sent[place % len(sent)], self.now)

    @rule(which=ENDS, times=st.integers(1, 3), answered=st.booleans())
    def talk(self, which: int, times: int, answered: bool) -> None:
        """Some messages arrive without a fault, so that runs get somewhere between their faults."""
        for _ in range(times):
            self.offer(which, 8, False)
            self.pump(which)
            while self.ends[which].wire:
                self.arrive_in_order(which)
            self.act(1 - which)
            self.now += 0.03
            self.pump(1 - which)
            while answered and self.ends[1 - which].wire:
                self.arrive_in_order(1 - which)

    @invariant()
    def delivered_is_a_prefix(self) -> None:
        for here, there in (self.ends, self.ends[::-1]):
            assert there.taken == here.offered[: len(there.taken)]

    @invariant()
    def nothing_is_acknowledged_before_it_was_acted_upon(self) -> None:
        for here, there in (self.ends, self.ends[::-1]):
            assert here.lane.sender.acked <= there.acted

    @invariant()
    def acknowledgements_only_move_forward(self) -> None:
        for end in self.ends:
            assert end.acked <= end.lane.sender.acked
            end.acked = end.lane.sender.acked

    @invariant()
    def windows_are_bounded(self) -> None:
        for end in self.ends:
            sender = end.lane.sender
            flight = [sender._frames[sequence].size for sequence in range(sender.acked + 1, sender.cursor)]
            assert len(flight) <= SMALL.window_frames
            assert len(flight) <= 1 or sum(flight) <= SMALL.window_bytes
            assert all(frame.size <= SMALL.window_bytes // 4 for frame in sender._frames.values())
            assert sender.acked <= sender.sent <= sender.last

    def teardown(self) -> None:
        """The channel heals: everything arrives, and every table is empty, within a bounded time."""
        for end in self.ends:
            end.port_full = False
        for _ in range(300):
            self.now += 0.1
            for which in (0, 1):
                self.ends[which].session.pump(self.now)
                while self.ends[which].wire:
                    self.arrive_in_order(which)
                self.ends[1 - which].act()
            if all(end.lane.is_quiet for end in self.ends):
                break
        for here, there in (self.ends, self.ends[::-1]):
            assert there.taken == here.offered
            assert here.lane.is_quiet
            assert not here.lane.sender._frames
            assert here.lane.sender._flight_bytes == here.lane.sender._backlog_bytes == 0
            assert here.lane.next_at() is None
        self.delivered_is_a_prefix()


class LossyChannel(Channel):
    """Frames may be lost, doubled, overtaken and corrupted at any time."""

    @rule(which=ENDS, place=PLACES)
    def arrive_out_of_order(self, which: int, place: int) -> None:
        wire = self.ends[which].wire
        if wire:
            self.ends[1 - which].arrive(wire.pop(place % len(wire)), self.now)

    @rule(which=ENDS, place=PLACES)
    def lose(self, which: int, place: int) -> None:
        wire = self.ends[which].wire
        if wire:
            wire.pop(place % len(wire))

    @rule(which=ENDS, place=PLACES)
    def double(self, which: int, place: int) -> None:
        wire = self.ends[which].wire
        if wire:
            wire.insert(0, wire[place % len(wire)])

    @rule(which=ENDS, place=PLACES, at=st.integers(0, 500), bit=st.integers(0, 7))
    def corrupt(self, which: int, place: int, at: int, bit: int) -> None:
        wire = self.ends[which].wire
        if wire:
            frame = [bytearray(buffer) for buffer in wire[place % len(wire)]]
            buffer = frame[at % len(frame)]
            buffer[at % len(buffer)] ^= 1 << bit
            wire[place % len(wire)] = [bytes(buffer) for buffer in frame]


class ReliableChannel(Channel):
    """Frames are lost only by a reconnect, which both ports report."""

    reliable = True

    @rule(keep=PLACES)
    def reconnect(self, keep: int) -> None:
        for end in self.ends:
            del end.wire[keep:]
            end.lane.path_changed()

    @invariant()
    def nothing_is_sent_again_without_a_reason(self) -> None:
        for end in self.ends:
            if not end.lane.sender._recover_until:
                assert end.counters["resent"] == 0


class StaleGapChannel(ReliableChannel):
    """A reliable channel on which only one side notices the reconnect."""

    @rule(keep=PLACES, which=ENDS)
    def half_reconnect(self, keep: int, which: int) -> None:
        del self.ends[which].wire[keep:]
        self.ends[which].lane.path_changed()


FAST = settings(max_examples=60, stateful_step_count=40, deadline=None, database=None)
for machine in (LossyChannel, ReliableChannel, StaleGapChannel):
    machine.TestCase.settings = FAST

TestLossyChannel = LossyChannel.TestCase
TestReliableChannel = ReliableChannel.TestCase
TestStaleGapChannel = StaleGapChannel.TestCase


def test_a_reliable_port_that_lost_the_last_frame_is_found_out() -> None:
    settings = WireSettings(probe_after_s=5.0)
    sender = Sender(settings, Counter(), reliable=True)
    receiver = Receiver(settings, Counter())
    sender.offer(MESSAGE, (b"last",), 4)
    lost = sender.due(0.0)
    assert lost is not None
    sender.handed(lost, 0.0)
    assert sender.due(4.9) is None
    assert sender.next_at() == 5.0
    again = sender.due(5.0)
    assert again is lost
    sender.handed(again, 5.0)
    assert sender.due(14.9) is None
    assert receiver.take(again.sequence, 5.1)
    receiver.delivered()
    sender.acknowledge(receiver.ack, False, 5.2)
    assert sender.is_idle
    assert sender.next_at() is None


def test_acknowledgements_that_come_slowly_are_no_silence() -> None:
    sender = Sender(WireSettings(probe_after_s=5.0), Counter(), reliable=True)
    for _ in range(3):
        sender.offer(MESSAGE, (b"x",), 1)
        frame = sender.due(0.0)
        assert frame is not None
        sender.handed(frame, 0.0)
    for ack, now in ((1, 4.0), (2, 8.0)):
        sender.acknowledge(ack, False, now)
        assert sender.due(now + 4.9) is None
    assert sender.due(13.0) is not None


# ---------------------------------------------------------------------------------------------------- mutations


class AcksBeforeDelivery(Receiver):
    def take(self, sequence: int, now: float) -> bool:
        taken = super().take(sequence, now)
        self.delivered()
        return taken


class TakesDuplicates(Receiver):
    def take(self, sequence: int, now: float) -> bool:
        return super().take(sequence, now) or sequence == self.taken


class TakesWhatComes(Receiver):
    def take(self, sequence: int, now: float) -> bool:
        if sequence > self.taken:
            self.taken = sequence - 1
        return super().take(sequence, now)


class ForgetsOrder(Sender):
    """The backlog puts the latest frame first."""

    def offer(self, kind, payload, size, urgent=False):
        sequence = super().offer(kind, payload, size, urgent)
        before = sequence - 1
        if before > self.sent:
            self._frames[before], self._frames[sequence] = (
                self._swap(self._frames[sequence], before),
                self._swap(self._frames[before], sequence),
            )
        return sequence

    @staticmethod
    def _swap(frame, sequence):
        return type(frame)(sequence, frame.kind, frame.payload, frame.size)


class ForgetsWhatWasSent(Sender):
    """Never sends anything a second time."""

    def path_changed(self):
        pass

    def _fill_gap(self, ack, now):
        pass

    def _patience_s(self):
        return 1e9


class BelievesAnyAck(Sender):
    """An old acknowledgement moves the window back."""

    def acknowledge(self, ack, gap, now):
        super().acknowledge(ack, gap, now)
        if ack < self.acked:
            self.cursor = min(self.cursor, self.acked + 1)
            self.acked = ack


class NoWindow(Sender):
    def _has_window(self):
        return self.cursor <= self.last


def broken(sender: type[Sender] = Sender, receiver: type[Receiver] = Receiver) -> type[Lane]:
    return type("BrokenLane", (Lane,), {"sender_type": sender, "receiver_type": receiver})


@pytest.mark.parametrize(
    ("channel", "lane_type"),
    [
        (LossyChannel, broken(receiver=AcksBeforeDelivery)),
        (ReliableChannel, broken(receiver=AcksBeforeDelivery)),
        (LossyChannel, broken(receiver=TakesDuplicates)),
        (LossyChannel, broken(receiver=TakesWhatComes)),
        (LossyChannel, broken(sender=ForgetsOrder)),
        (ReliableChannel, broken(sender=ForgetsOrder)),
        (LossyChannel, broken(sender=ForgetsWhatWasSent)),
        (ReliableChannel, broken(sender=ForgetsWhatWasSent)),
        (LossyChannel, broken(sender=BelievesAnyAck)),
        (ReliableChannel, broken(sender=NoWindow)),
    ],
    ids=lambda value: getattr(value, "__name__", "") if value.__name__ != "BrokenLane" else broken_name(value),
)
def test_the_machine_catches_a_broken_lane(channel, lane_type) -> None:
    machine = type("Broken" + channel.__name__, (channel,), {"lane_type": lane_type})
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(
            machine,
            settings=settings(FAST, max_examples=400, phases=[Phase.generate], derandomize=True, print_blob=False),
        )


def broken_name(lane_type: type[Lane]) -> str:
    changed = {lane_type.sender_type, lane_type.receiver_type} - {Sender, Receiver}
    return changed.pop().__name__
