"""The small parts of the processes: channels, timers, stderr, deadlines, identities."""

import math
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from tllm_core.contracts.interfaces import Failed, Phase, WorldEvent
from tllm_core.contracts.messages import RankState
from tllm_core.world.channel import Channel
from tllm_core.world.deadlines import Deadlines
from tllm_core.world.loop import Loop
from tllm_core.world.process import ends, identify, is_alive, kin_cpu_s, read_stat, wait_gone
from tllm_core.world.progress import Progress, create_shared
from tllm_core.world.stderr import BACKLOG_BYTES, Relay, Tail


@pytest.fixture
def channels():
    pair = [Channel(end, WorldEvent) for end in socket.socketpair()]
    yield pair
    for channel in pair:
        channel.close()


def test_messages_of_any_size_arrive_whole_and_in_order(channels):
    ours, theirs = channels
    sent = [Phase(0, "one"), Failed("x" * 3_000_000), Phase(1, "two", 0.5)]
    for message in sent:
        ours.send(message)
    assert ours.pending
    received = []
    while len(received) < 3:
        ours.flush()
        received += theirs.receive()
    assert received == sent
    assert not ours.pending


def test_sending_never_blocks_and_drain_is_bounded(channels):
    ours, _ = channels
    ours.send(Failed("x" * 3_000_000))
    ours.drain(0.05)
    assert ours.pending


def test_the_end_of_the_peer_is_an_end_and_no_error(channels):
    ours, theirs = channels
    theirs.send(Phase(0, "last"))
    theirs.close()
    assert ours.wait() == [Phase(0, "last")]
    assert ours.wait() == []
    assert ours.eof
    ours.send(Phase(0, "into the void"))
    assert not ours.pending


def test_the_loop_calls_back_for_times_in_order_and_for_descriptors():
    loop, calls = Loop(), []
    reader, writer = os.pipe()
    loop.later(0.02, lambda: calls.append("second"))
    loop.later(0.0, lambda: calls.append("first"))
    loop.once(reader, lambda: calls.append("readable"))
    loop.turn()
    os.write(writer, b"x")
    while len(calls) < 3:
        loop.turn()
    assert calls[0] == "first"
    assert set(calls) == {"first", "second", "readable"}
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reader)
    os.close(writer)


def test_the_step_counter_is_one_memory_for_both_sides():
    fd = create_shared()
    ours, theirs = Progress(fd), Progress(fd)
    ours.note(2**40, True)
    assert theirs.read(5.0) == (2**40, True)
    ours.close()
    theirs.close()
    os.close(fd)


def test_work_that_is_excused_is_not_pending_until_then():
    fd = create_shared()
    ours, theirs = Progress(fd), Progress(fd)
    ours.note(7, True)
    for until, now, busy in [(100.5, 100.4, False), (100.5, 100.5, True), (math.inf, 1e7, False), (0.0, 1e7, True)]:
        ours.excuse(until)
        assert theirs.read(now) == (7, busy)
    ours.excuse(math.inf)
    ours.note(8, False)
    assert theirs.read(1.0) == (8, False)
    ours.close()
    theirs.close()
    os.close(fd)


def test_a_reader_that_sleeps_costs_stderr_its_oldest_bytes_only():
    reader, writer = os.pipe()
    relay = Relay(writer)
    for _ in range(4 * BACKLOG_BYTES // 4096):
        relay.put(b"x" * 4096)
    relay.put(b"the end")
    received = bytearray()
    thread = threading.Thread(target=lambda: received.extend(iter_all(reader)))
    thread.start()
    relay.close(20)
    os.close(writer)
    thread.join()
    os.close(reader)
    assert received.endswith(b"the end")
    assert len(received) < 2 * BACKLOG_BYTES


def iter_all(fd):
    while chunk := os.read(fd, 65536):
        yield from chunk


def test_the_tail_keeps_the_end_and_notices_the_last_writer_go():
    reader, writer = os.pipe()
    sink = os.open(os.devnull, os.O_WRONLY)
    relay = Relay(sink)
    tail = Tail(reader, relay)
    os.write(writer, b"a" * 10_000 + "ünd Schluß".encode())
    tail.read()
    assert not tail.eof
    os.close(writer)
    tail.read()
    assert tail.eof
    assert tail.text().endswith("ünd Schluß")
    assert len(tail.text().encode()) == 8192
    tail.close()
    relay.close(20)
    os.close(sink)


def test_deadlines_come_earliest_first_and_forget_what_ended():
    live = {1, 2, 3}
    deadlines = Deadlines(live)
    for request_id, at in ((1, 3.0), (2, 1.0), (3, 2.0)):
        deadlines.add(request_id, at)
    live.discard(2)
    assert deadlines.next_at() == 2.0
    assert deadlines.pop_due(2.5) == [3]
    assert deadlines.pop_due(9.0) == [1]
    assert deadlines.next_at() is None


def test_deadlines_of_ended_requests_do_not_pile_up():
    live = set()
    deadlines = Deadlines(live)
    for request_id in range(100_000):
        deadlines.add(request_id, 1e9)
    assert len(deadlines._heap) <= 65


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_is_told_from_a_later_one_of_the_same_pid_and_a_zombie_is_gone():
    child = subprocess.Popen(["sleep", "600"])
    identity = identify(0, child.pid)
    assert is_alive(identity)
    assert not is_alive(type(identity)(0, child.pid, identity.start_time + 1))
    assert read_stat(child.pid).state is RankState.RUNNING
    assert not ends(identity)
    assert not wait_gone([identity], 0.01)
    child.kill()
    assert wait_gone([identity], 20)
    assert read_stat(child.pid).state is RankState.GONE
    assert ends(identity)
    child.wait()
    assert read_stat(child.pid) is None
    assert ends(identity)


def test_what_children_and_their_children_compute_is_counted():
    """While they run by `kin_cpu_s`, afterwards by the parent's own figures."""
    burn = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"
    grandchild = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn + 'input()'!r}])"
    before, kin_before = read_stat(os.getpid()).cpu_s, kin_cpu_s(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", grandchild], stdin=subprocess.PIPE)
    deadline = time.monotonic() + 30
    while kin_cpu_s(os.getpid()) - kin_before < 0.3:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    child.communicate(b"\n")
    assert kin_cpu_s(os.getpid()) - kin_before < 0.3
    assert read_stat(os.getpid()).cpu_s - before >= 0.3
