"""The proxy that tests cut connections with does what it says, over real sockets."""

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tllm_core.conformance.proxy import CutProxy


@pytest.fixture
def server() -> Iterator[int]:
    """Sends back what it gets, on every connection; the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ends: list[socket.socket] = []

        def echo(end: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while data := end.recv(1 << 16):
                    end.sendall(data)
            end.close()

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    end, _ = listener.accept()
                    ends.append(end)
                    threads.append(threading.Thread(target=echo, args=(end,)))
                    threads[-1].start()

        threads = [threading.Thread(target=serve)]
        threads[0].start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()


@pytest.fixture
def proxy(server: int) -> Iterator[CutProxy]:
    with CutProxy("127.0.0.1", server) as proxy:
        yield proxy


def joined(proxy: CutProxy, timeout: float = 20) -> socket.socket:
    return socket.create_connection((proxy.host, proxy.port), timeout)


def read(end: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = end.recv(count - len(data))
        if not piece:
            break
        data += piece
    return data


def first_byte(proxy: CutProxy) -> bytes:
    with joined(proxy) as end:  # a reset may come within the connect
        return end.recv(1)


def test_what_is_sent_arrives_and_ends_are_passed_on(proxy: CutProxy) -> None:
    sent = bytes(range(256)) * 4000
    with joined(proxy) as end:
        writer = threading.Thread(target=lambda: (end.sendall(sent), end.shutdown(socket.SHUT_WR)))
        writer.start()
        assert read(end, len(sent) + 1) == sent
        writer.join()
    assert (proxy.accepted, proxy.moved) == (1, 2 * len(sent))


def test_a_cut_resets_what_is_open_and_refuses_until_it_is_healed_on_the_same_port(proxy: CutProxy) -> None:
    with joined(proxy) as end:
        end.sendall(b"x")
        assert read(end, 1) == b"x"
        for _ in range(3):
            proxy.cut()
            with pytest.raises(ConnectionRefusedError):
                joined(proxy)
            proxy.heal()
        with pytest.raises(ConnectionResetError):
            end.recv(1)
    with joined(proxy) as end:
        end.sendall(b"y")
        assert read(end, 1) == b"y"


def test_a_frozen_proxy_accepts_and_moves_nothing_and_loses_nothing(proxy: CutProxy) -> None:
    with joined(proxy) as old:
        proxy.freeze()
        old.sendall(b"before")
        with joined(proxy) as new:
            new.sendall(b"new")
            for end in (old, new):
                end.settimeout(0.05)
                with pytest.raises(TimeoutError):
                    end.recv(1)
                end.settimeout(20)
            proxy.thaw()
            assert (read(old, 6), read(new, 3)) == (b"before", b"new")


def test_a_delay_and_a_rate_hold_at_least(proxy: CutProxy) -> None:
    with joined(proxy) as end:
        proxy.delay_s = 0.1
        began = time.monotonic()
        end.sendall(b"x")
        assert read(end, 1) == b"x"
        assert time.monotonic() - began >= 0.2
        proxy.delay_s, proxy.bytes_per_s = 0.0, 100_000
        began = time.monotonic()
        end.sendall(bytes(20_000))
        assert read(end, 20_000) == bytes(20_000)
        assert time.monotonic() - began >= 0.15


def test_the_next_bytes_can_be_corrupted(proxy: CutProxy) -> None:
    with joined(proxy) as end:
        proxy.corrupt(2)
        end.sendall(b"\x00\x01\x02")
        assert read(end, 3) == b"\xff\xfe\x02"


def test_a_target_that_is_not_there_is_a_reset() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with CutProxy("127.0.0.1", taken.getsockname()[1]) as proxy, pytest.raises(ConnectionResetError):
            first_byte(proxy)


def test_closing_leaves_no_thread_and_is_idempotent(server: int) -> None:
    proxy = CutProxy("127.0.0.1", server)
    end = joined(proxy)
    proxy.close()
    proxy.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("cut-proxy")]
    with end, pytest.raises(ConnectionResetError):
        end.recv(1)


@pytest.fixture
def rapid_switches() -> Iterator[None]:
    """Threads take turns after every few instructions, so that a window between two of them is met."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.usefixtures("rapid_switches")
def test_orders_and_closing_from_several_threads_under_traffic_raise_nothing_but_that_it_is_closed(server: int) -> None:
    for _ in range(300):
        proxy = CutProxy("127.0.0.1", server)
        with joined(proxy) as end:
            end.sendall(bytes(4096))
            raised = all_at_once(proxy.close, proxy.close, proxy.freeze, proxy.thaw, proxy.heal)
        assert not [error for error in raised if str(error) != "the proxy is closed"]
        assert not [thread for thread in threading.enumerate() if thread.name == f"cut-proxy-{proxy.port}"]


@pytest.mark.usefixtures("rapid_switches")
def test_closing_while_traffic_wakes_the_proxys_thread_raises_nothing(server: int) -> None:
    for _ in range(300):
        proxy = CutProxy("127.0.0.1", server)
        with joined(proxy) as end:
            writer = threading.Thread(target=write_until_reset, args=(end,))
            writer.start()
            proxy.close()
            writer.join()


def write_until_reset(end: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):
        while True:
            end.sendall(b"x")


def all_at_once(*calls: Callable[[], None]) -> list[Exception]:
    """Calls each on a thread of its own, and returns what they raised."""
    raised: list[Exception] = []

    def run(call: Callable[[], None]) -> None:
        together.wait()
        try:
            call()
        except Exception as error:
            raised.append(error)

    together = threading.Barrier(len(calls))
    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised
