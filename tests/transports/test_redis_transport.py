"""What is redis's own, against a real server: entries and ids, lost replies, dead and frozen servers, keys, names, secrets."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import redis

from tllm_core import GenerationExecutor, SamplingParams
from tllm_core.config.shown import masked
from tllm_core.conformance.broker import BrokerProcess, valkey_server
from tllm_core.conformance.proxy import CutProxy
from tllm_core.contracts.interfaces import EngineAddress, EnginePort, FrontendPort, PeerId, Port
from tllm_core.engines.echo import expected_tokens
from tllm_core.errors import ConfigError, EngineDeadError, FrameTooLarge, PortClosed, PortDown, PortFull, TransportError
from tllm_core.transports.redis import RedisSettings, RedisTransport
from tllm_core.transports.redis.keys import Keys
from tllm_core.transports.redis.server import check_server

PATIENCE_S = 20.0

MakeServer = Callable[..., AbstractContextManager[BrokerProcess]]


@pytest.fixture(scope="module")
def shared_server(redis_server: MakeServer) -> Iterator[BrokerProcess]:
    with redis_server() as process:
        yield process


@pytest.fixture
def server(shared_server: BrokerProcess) -> Iterator[BrokerProcess]:
    """A server that runs, holds nothing, and may be ill-treated."""
    if not shared_server.pid:
        shared_server.restart()
    with looking_at(shared_server.url) as client:
        client.flushall()
        client.config_resetstat()
        client.config_set("maxmemory", 0)
    yield shared_server
    if shared_server.pid:
        shared_server.thaw()


@pytest.fixture
def client(server: BrokerProcess) -> Iterator[redis.Redis]:
    """Looks into that server from outside."""
    with looking_at(server.url) as client:
        yield client


@contextlib.contextmanager
def looking_at(url: str) -> Iterator[redis.Redis]:
    client = redis.Redis.from_url(url, protocol=2)
    try:
        yield client
    finally:
        client.close()


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("tllm-redis")])


def transport(url: str, **options: Any) -> RedisTransport:
    return RedisTransport(RedisSettings(url=url, **options))


def new_peer() -> PeerId:
    return b"\x01" + secrets.token_bytes(15)


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)
    return value


def received(port: Port, count: int) -> list[bytes]:
    """The first buffers of the next `count` frames."""
    frames: list[bytes] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(frames) < count:
        assert time.monotonic() < deadline, f"{len(frames)} of {count} frames came"
        frames += [bytes(frame[0]) for frame in port.receive(1.0)]
    return frames


class Pair:
    """An engine's port and one frontend's that the engine has heard of."""

    def __init__(self, url: str, frontend_url: str | None = None, engine: str = "model", **options: Any) -> None:
        self.transport = transport(url, **options)
        self.engine: EnginePort = self.transport.listen(engine, secrets.randbits(64))
        self.peer = new_peer()
        address = self.engine.address
        self.keys = Keys(address.endpoints["prefix"], address.engine, address.generation)
        other = transport(frontend_url or url, **options)
        self.frontend: FrontendPort = other.connect(address, self.peer)
        self.frontend.send([b"hello"])
        assert received(self.engine, 1) == [b"hello"]

    @property
    def ports(self) -> tuple[Port, Port]:
        return self.engine, self.frontend

    def ups(self) -> list[float]:
        return [port.state.since for port in self.ports if port.state.up]

    def close(self) -> None:
        self.frontend.close()
        self.engine.close()

    def exchange(self, count: int = 20) -> None:
        """Frames go through both ways, in order; what came before is passed over."""
        mark = secrets.token_hex(4)
        wanted = [f"{mark} {number}".encode() for number in range(count)]
        to_peer: Callable[[list[bytes]], None] = lambda frame: self.engine.send(self.peer, frame)  # noqa: E731
        for send, port in ((self.frontend.send, self.engine), (to_peer, self.frontend)):
            for frame in wanted:
                taken([frame], send)
            got: list[bytes] = []
            while wanted[-1] not in got:
                got += received(port, 1)
            assert [frame for frame in got if frame in wanted] == wanted


def taken(frame: list[bytes], send: Callable[[list[bytes]], None]) -> None:
    """Sends, as soon as there is room and a path."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return send(frame)
        except (PortFull, PortDown):
            assert time.monotonic() < deadline
            time.sleep(0.002)


@pytest.fixture
def pair(server: BrokerProcess) -> Iterator[Pair]:
    with contextlib.closing(Pair(server.url)) as pair:
        yield pair


# --------------------------------------------------------------------------------------------- entries, order, trimming


def test_ten_thousand_frames_cross_both_ways_in_order(pair: Pair) -> None:
    count = 10_000

    def send(put: Callable[[list[bytes]], None]) -> None:
        for number in range(count):
            taken([b"%d" % number, b"x" * 50], put)

    threads = [
        threading.Thread(target=send, args=(put,))
        for put in (pair.frontend.send, lambda frame: pair.engine.send(pair.peer, frame))
    ]
    for thread in threads:
        thread.start()
    for port in pair.ports:
        assert [int(frame) for frame in received(port, count)] == list(range(count))
    for thread in threads:
        thread.join()


def test_what_was_read_is_removed_so_that_a_stream_stays_short(pair: Pair, client: redis.Redis) -> None:
    for number in range(1000):
        taken([b"%d" % number], pair.frontend.send)
        if number % 100 == 99:
            assert len(received(pair.engine, 100)) == 100
            until(lambda: client.xlen(pair.keys.up(pair.peer)) == 0)


def test_frames_that_were_written_before_the_reader_started_are_read(pair: Pair, client: redis.Redis) -> None:
    peer = new_peer()
    for number in range(3):
        client.xadd(pair.keys.down(peer), {"f": b"%d" % number}, id=f"{number + 1}-1")
    with contextlib.closing(pair.transport.connect(pair.engine.address, peer)) as frontend:
        assert received(frontend, 3) == [b"0", b"1", b"2"]


def test_a_frame_beyond_the_limit_is_refused_before_it_is_taken(pair: Pair) -> None:
    limit = pair.frontend.max_frame
    assert limit is not None
    pair.frontend.send([b"x" * limit])
    with pytest.raises(FrameTooLarge, match="max_frame_bytes"):
        pair.frontend.send([b"x" * limit, b"y"])
    assert len(received(pair.engine, 1)[0]) == limit


def test_entries_that_are_none_of_ours_are_passed_over(pair: Pair, client: redis.Redis) -> None:
    client.xadd(pair.keys.hello, {"h": "not a peer", "life": "x"})
    client.xadd(pair.keys.hello, {"z": ""})
    client.xadd(pair.keys.up(pair.peer), {"z": "unknown"}, id="18446744073709551000-1")
    pair.exchange()


# --------------------------------------------------------------------------------------------------- faults of the server


def test_an_entry_whose_reply_was_lost_is_written_once(server: BrokerProcess, client: redis.Redis) -> None:
    keys = Keys("tllm", "model", 7)
    client.xadd(keys.hello, {"h": ""})  # an engine that reads nothing
    peer = new_peer()
    with CutProxy("127.0.0.1", server.port) as proxy:
        address = EngineAddress(
            transport="redis", engine="model", generation=7, endpoints={"redis": server.url, "prefix": "tllm"}
        )
        port = transport(f"redis://127.0.0.1:{proxy.port}").connect(address, peer)
        since = port.state.since
        proxy.delay_s = 0.5
        port.send([b"once"])
        written = lambda: [fields for _, fields in client.xrange(keys.up(peer)) if b"f" in fields]  # noqa: E731
        until(written)
        proxy.cut()  # the reply is on its way
        proxy.delay_s = 0.0
        until(lambda: not port.state.up)
        proxy.heal()
        until(lambda: port.state.up and port.state.since > since)
        port.send([b"next"])
        until(lambda: len(written()) > 1)
        assert written() == [{b"f": b"once"}, {b"f": b"next"}]
        assert client.info("commandstats")["cmdstat_xadd"]["failed_calls"] == 1  # it was tried again
        port.close()


def test_three_kills_of_a_server_that_keeps_nothing(pair: Pair, server: BrokerProcess, client: redis.Redis) -> None:
    last = 0
    for _ in range(3):
        pair.exchange(200)
        number = int(client.xinfo_stream(pair.keys.up(pair.peer))["last-generated-id"].partition(b"-")[0])
        assert number > last
        last, before = number, pair.ups()
        server.kill()
        until(lambda: not pair.ups())
        with pytest.raises(PortDown):
            pair.frontend.send([b"x"])
        server.restart()
        until(lambda before=before: len(pair.ups()) == 2 and min(pair.ups()) > max(before))  # type: ignore[misc]
    pair.exchange(200)


def test_a_change_of_state_ends_a_blocked_receive(pair: Pair, server: BrokerProcess) -> None:
    outcome: list[Any] = []
    thread = threading.Thread(target=lambda: outcome.append(list(pair.frontend.receive(None))))
    thread.start()
    server.kill()
    thread.join(PATIENCE_S)
    assert outcome == [[]]


def test_a_frozen_server_makes_the_proof_stale_and_nothing_is_lost(pair: Pair, server: BrokerProcess) -> None:
    server.freeze()
    frozen_at = time.monotonic()
    time.sleep(1.0)  # the silence itself is what is tested
    for port in pair.ports:
        assert port.path_ok_at() <= frozen_at + 0.01
    pair.frontend.send([b"meanwhile"])
    server.thaw()
    assert received(pair.engine, 1) == [b"meanwhile"]
    until(lambda: all(port.path_ok_at() > frozen_at + 1.0 for port in pair.ports))


def test_the_proof_is_fresh_while_nothing_happens(pair: Pair) -> None:
    for _ in range(3):
        at = time.monotonic()
        until(lambda at=at: all(port.path_ok_at() > at for port in pair.ports))  # type: ignore[misc]


def test_a_server_that_never_answers_again_is_a_lost_path(server: BrokerProcess) -> None:
    with contextlib.closing(Pair(server.url, answer_timeout_s=0.3)) as pair:
        server.freeze()
        until(lambda: not pair.engine.state.up and not pair.frontend.state.up)
        server.thaw()
        until(lambda: len(pair.ups()) == 2)
        pair.exchange()


def test_a_longer_idle_time_than_any_timeout_is_no_error(server: BrokerProcess) -> None:
    with contextlib.closing(Pair(server.url, answer_timeout_s=0.3, block_s=0.1)) as pair:
        before = pair.ups()
        time.sleep(1.5)  # idle time is what is tested
        assert pair.ups() == before
        pair.exchange()


@pytest.mark.parametrize("side", ["engine", "frontend"])
def test_a_cut_connection_is_told_and_comes_back(server: BrokerProcess, side: str) -> None:
    with CutProxy("127.0.0.1", server.port) as proxy:
        through = f"redis://127.0.0.1:{proxy.port}"
        urls = (through, server.url) if side == "engine" else (server.url, through)
        with contextlib.closing(Pair(*urls)) as pair:
            port: Port = getattr(pair, side)
            since = port.state.since
            proxy.cut()
            until(lambda: not port.state.up)
            assert port.state.reason
            proxy.heal()
            until(lambda: port.state.up and port.state.since > since)
            pair.exchange()


def test_streams_that_vanish_without_a_disconnect_move_since(pair: Pair, client: redis.Redis) -> None:
    pair.exchange()
    before = max(pair.ups())
    client.flushall()
    pair_sends_until(pair, lambda: len(pair.ups()) == 2 and min(pair.ups()) > before)
    pair.exchange()


def pair_sends_until(pair: Pair, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        with contextlib.suppress(PortDown, PortFull):
            pair.frontend.send([b"x"])
        with contextlib.suppress(PortDown, PortFull):
            pair.engine.send(pair.peer, [b"x"])
        time.sleep(0.005)


def test_vanished_keys_come_back_by_themselves_where_nothing_is_sent(
    server: BrokerProcess, client: redis.Redis
) -> None:
    with contextlib.closing(Pair(server.url, ttl_s=1.0)) as pair:
        before = max(pair.ups())
        client.flushall()
        until(lambda: len(pair.ups()) == 2 and min(pair.ups()) > before)
        pair.exchange()


def test_a_server_without_memory_is_back_pressure_and_nothing_is_lost(
    server: BrokerProcess, client: redis.Redis
) -> None:
    options = {"queue_bytes": 1 << 20, "queue_frames": 64}
    with contextlib.closing(Pair(server.url, **options)) as pair:
        filling = b"x" * (64 << 10)
        client.config_set("maxmemory", int(client.info("memory")["used_memory"]) + (1 << 20))
        sent = 0
        full_since = None
        while full_since is None or time.monotonic() - full_since < 0.3:
            try:
                pair.frontend.send([b"%d" % sent, filling])
                sent, full_since = sent + 1, None
            except PortFull:
                full_since = full_since or time.monotonic()
                time.sleep(0.01)
        assert client.info("errorstats")["errorstat_OOM"]["count"] > 0
        assert pair.frontend.state.up
        assert [int(frame) for frame in received(pair.engine, sent)] == list(range(sent))
        taken([b"again"], pair.frontend.send)
        assert received(pair.engine, 1) == [b"again"]


# --------------------------------------------------------------------------------------------------- which server, who


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_a_server_that_drops_keys_is_refused(redis_server: MakeServer, policy: str) -> None:
    with (
        redis_server("--maxmemory-policy", policy) as server,
        pytest.raises(TransportError, match=f"{policy}.*noeviction"),
    ):
        transport(server.url).listen("model", 1)


def test_an_old_server_is_refused_with_its_version() -> None:
    class Old:
        def call(self, *command: str) -> bytes:
            assert command == ("INFO",)
            return b"# Server\r\nredis_version:5.0.7\r\n"

    with pytest.raises(TransportError, match=r"version 5\.0\.7.*6\.2"):
        check_server(Old(), "redis://somewhere", 1 << 20)  # type: ignore[arg-type]


def test_an_unreachable_server_is_an_error_that_names_it_once_the_connect_timeout_is_over() -> None:
    address = EngineAddress(
        transport="redis", engine="model", generation=1, endpoints={"redis": "redis://127.0.0.1:1/0"}
    )
    started = time.monotonic()
    with pytest.raises(TransportError, match=r"redis://127\.0\.0\.1:1/0.*is it running"):
        transport("redis://127.0.0.1:1", connect_timeout_s=0.5).listen("model", 1)
    with pytest.raises(TransportError, match="is it running"):
        RedisTransport(RedisSettings(connect_timeout_s=0.5)).connect(address, new_peer())
    assert time.monotonic() - started >= 0.5
    RedisTransport(RedisSettings()).discard(address)
    assert time.monotonic() - started < 5.0


def test_a_server_that_still_loads_what_it_saved_is_waited_for(redis_server: MakeServer, tmp_path: Path) -> None:
    # Loading takes 2 s: each key 40 ms, and commands are answered between any two of them.
    slow = ("--key-load-delay", "40000", "--loading-process-events-interval-bytes", "1024", "--dir", str(tmp_path))
    with redis_server(*slow) as server, looking_at(server.url) as client:
        port = transport(server.url).listen("model", 1)
        for number in range(50):
            client.set(f"key-{number}", secrets.token_bytes(2048))
        client.save()
        server.kill()
        with ThreadPoolExecutor(2) as pool:
            restarting = pool.submit(server.restart)
            until(lambda: is_loading(server.url))
            frontend = transport(server.url, connect_timeout_s=PATIENCE_S).connect(port.address, new_peer())
            restarting.result()
        frontend.send([b"in"])
        assert received(port, 1) == [b"in"]
        frontend.close()
        port.close()


def is_loading(url: str) -> bool:
    try:
        with looking_at(url) as client:
            client.execute_command("PING")
    except redis.exceptions.BusyLoadingError:
        return True
    except redis.ConnectionError:  # it does not listen yet
        return False
    raise AssertionError("it has loaded before anybody looked")


def test_a_frozen_server_is_an_error_within_the_connect_timeout(server: BrokerProcess) -> None:
    server.freeze()
    started = time.monotonic()
    with pytest.raises(TransportError, match="can't be used"):
        transport(server.url, connect_timeout_s=0.3).listen("model", 1)
    assert time.monotonic() - started < 3.0
    server.thaw()


def test_a_wrong_password_is_an_error_at_once_and_no_secret_is_shown(redis_server: MakeServer) -> None:
    with redis_server("--requirepass", "right-secret") as server:
        port = transport(server.url, password="right-secret").listen("model", 1)
        wrong = server.url.replace("://", "://default:wrong-secret@")
        for use in (
            lambda: transport(wrong).listen("other", 1),
            lambda: transport(server.url, password="wrong-secret").connect(port.address, new_peer()),
            lambda: transport(server.url).connect(port.address, new_peer()),
        ):
            with pytest.raises(TransportError, match="password") as caught:
                use()
            assert "secret" not in str(caught.value)
            assert caught.value.__cause__ is None
        port.close()
        port = transport(server.url.replace("://", "://:right-secret@")).listen("model", 1)
        assert "secret" not in str(port.address)
        frontend = transport(server.url, password="right-secret").connect(port.address, new_peer())
        frontend.send([b"in"])
        assert received(port, 1) == [b"in"]
        frontend.close()
        port.close()


def test_a_server_without_tls_is_told_to_be_one_perhaps(server: BrokerProcess) -> None:
    url = server.url.replace("redis://", "rediss://")
    with pytest.raises(TransportError, match=r"within 0\.5 s: does it speak TLS there\? redis:// is without"):
        transport(url, connect_timeout_s=0.5).listen("model", 1)


@pytest.mark.parametrize("name", ["tls_ca_file", "tls_cert_file", "tls_key_file"])
def test_a_file_that_can_t_be_read_is_named_with_its_setting(name: str, tmp_path: Path) -> None:
    missing = tmp_path / "missing.pem"
    words = f"transport.redis.{name}: {missing} can't be read: No such file or directory"
    with pytest.raises(ConfigError, match=re.escape(words)):
        transport("rediss://127.0.0.1:1", **{name: str(missing)}).listen("model", 1)


def test_what_is_said_ends_in_one_mark() -> None:
    with pytest.raises(TransportError, match="Connection refused; is it running") as caught:
        transport("redis://127.0.0.1:1", connect_timeout_s=0.1).listen("model", 1)
    assert not re.search(r"[.;][.;]", str(caught.value).replace("127.0.0.1", ""))


def test_secrets_are_in_no_representation() -> None:
    settings = RedisSettings(url="redis://user:secret@host:1/2", username="user", password="secret")
    assert "secret" not in repr(settings)
    assert "secret" not in masked("url", settings.url)
    assert "secret" not in masked("password", settings.password)
    with pytest.raises(ConfigError, match="url is none") as caught:
        transport("redis://user:sec/ret@host:1").listen("model", 1)
    assert "sec" not in str(caught.value)
    with pytest.raises(ConfigError, match="must start with redis://"):
        transport("http://host").listen("model", 1)


def test_a_user_who_may_not_use_the_prefix_is_refused_at_once(server: BrokerProcess, client: redis.Redis) -> None:
    client.execute_command("ACL", "SETUSER", "other", "on", ">word", "~elsewhere:*", "+@all")
    started = time.monotonic()
    with pytest.raises(TransportError, match=r"tllm:\*"):
        transport(server.url, username="other", password="word").listen("model", 1)
    with contextlib.closing(Pair(server.url)) as pair, pytest.raises(TransportError, match=r"tllm:\*"):
        transport(server.url, username="other", password="word").connect(pair.engine.address, new_peer())
    assert time.monotonic() - started < 5.0


def test_a_user_with_its_own_keys_and_few_commands_is_enough(
    server: BrokerProcess, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    rights = ["~tllm:*", "+@stream", "+@string", "+@keyspace", "+@transaction", "+@connection", "-client"]
    client.execute_command("ACL", "SETUSER", "small", "on", ">word", *rights)
    with contextlib.closing(Pair(server.url, username="small", password="word")) as pair:
        pair.exchange()
        with pytest.raises(TransportError, match="already running"):
            pair.transport.listen("model", 1)
    assert "does not tell its maxmemory-policy" in caplog.text
    assert client.dbsize() == 0


# --------------------------------------------------------------------------------------------------------- names, keys


@pytest.mark.parametrize(
    "name", ["", "*", "a b", "a\r\nb", "..", "mödel", "[a-z]", "a:b", "a?", "a\\", "x" * 129, "a\0"]
)
def test_names_that_could_mean_something_in_a_key_are_refused(redis_url: str, name: str) -> None:
    with pytest.raises(ConfigError, match="engine name"):
        transport(redis_url).listen(name, 1)
    with pytest.raises(ConfigError, match="prefix"):
        transport(redis_url, prefix=name).listen("model", 1)
    address = EngineAddress(transport="redis", engine=name, generation=1, endpoints={"redis": redis_url})
    with pytest.raises(ConfigError, match="engine name"):
        transport(redis_url).connect(address, new_peer())
    transport(redis_url).discard(address)


HOLDER = """
import sys
from tllm_core.contracts.interfaces import EngineAddress
from tllm_core.transports.redis import RedisSettings, RedisTransport
url, role, generation, ttl_s = sys.argv[1:]
transport = RedisTransport(RedisSettings(url=url, ttl_s=float(ttl_s)))
if role == "engine":
    port = transport.listen("model", int(generation))
else:
    endpoints = {"redis": url, "prefix": "tllm"}
    address = EngineAddress(transport="redis", engine="model", generation=int(generation), endpoints=endpoints)
    port = transport.connect(address, b"\\x01" * 16)
    port.send([b"from afar"])
print("there", flush=True)
sys.stdin.read()
port.close()
"""


@contextlib.contextmanager
def holder(url: str, role: str, generation: int, ttl_s: float = 30.0) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLDER, url, role, str(generation), str(ttl_s)]
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stdin=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "there\n"
            yield child
        finally:
            child.kill()


def test_a_live_name_is_refused_and_a_dead_one_is_free_soon(server: BrokerProcess, client: redis.Redis) -> None:
    with holder(server.url, "engine", 7) as child:
        with pytest.raises(TransportError, match=r"'model' is already running"):
            transport(server.url).listen("model", 8)
        child.send_signal(signal.SIGKILL)
        child.wait(PATIENCE_S)
    with contextlib.closing(transport(server.url).listen("model", 8)):
        assert str(client.get("tllm:model:name"), "ascii").startswith(f"{8:016x} ")


def test_an_engine_that_lost_its_name_says_so_and_leaves_it_alone(
    server: BrokerProcess, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.closing(Pair(server.url, ttl_s=0.5)) as pair:
        client.set("tllm:model:name", "another")
        until(lambda: "another engine has taken the name 'model'" in caplog.text)
        pair.exchange()
    assert client.get("tllm:model:name") == b"another"


def test_discard_removes_what_a_killed_engine_left_and_nothing_else(server: BrokerProcess, client: redis.Redis) -> None:
    with client.pipeline(transaction=False) as pipeline:
        for number in range(20_000):
            pipeline.set(f"other:{number}", "", ex=1000)
        pipeline.execute()
    endpoints = {"redis": server.url, "prefix": "tllm"}
    address = EngineAddress(transport="redis", engine="model", generation=7, endpoints=endpoints)
    with holder(server.url, "engine", 7) as engine, holder(server.url, "frontend", 7) as frontend:
        transport(server.url).discard(address)
        assert client.dbsize() > 20_000, "a live one keeps its keys"
        for child in (engine, frontend):
            child.send_signal(signal.SIGKILL)
            child.wait(PATIENCE_S)
    transport(server.url).discard(address)
    assert client.dbsize() == 20_000


def test_keys_of_a_killed_world_expire(server: BrokerProcess, client: redis.Redis) -> None:
    with holder(server.url, "engine", 7, 0.5) as engine, holder(server.url, "frontend", 7, 0.5) as frontend:
        for child in (engine, frontend):
            child.send_signal(signal.SIGKILL)
            child.wait(PATIENCE_S)
    assert client.dbsize() > 0
    until(lambda: client.dbsize() == 0)


def test_a_killed_frontend_is_forgotten_when_its_keys_have_expired(server: BrokerProcess, client: redis.Redis) -> None:
    with contextlib.closing(transport(server.url, ttl_s=0.5).listen("model", 7)) as port:
        peer = b"\x01" * 16
        with holder(server.url, "frontend", 7, 0.5) as child:
            assert received(port, 1) == [b"from afar"]
            port.send(peer, [b"answer"])
            until(lambda: client.dbsize() == 4)
            time.sleep(1.2)  # longer than its time to live, to show that a live one stays
            port.send(peer, [b"still there"])
            child.send_signal(signal.SIGKILL)
            child.wait(PATIENCE_S)
        until(lambda: client.dbsize() == 2)
        with pytest.raises(PortDown):
            port.send(peer, [b"x"])


def test_a_hundred_generations_leave_no_key(server: BrokerProcess, client: redis.Redis) -> None:
    for number in range(100):
        pair = Pair(server.url)
        pair.engine.send(pair.peer, [b"answer"])
        assert received(pair.frontend, 1) == [b"answer"]
        first, second = (pair.engine, pair.frontend) if number % 2 else (pair.frontend, pair.engine)
        first.close()
        second.close()
    assert client.keys() == []


def test_a_port_whose_streams_were_replaced_ends_in_order_and_frees_its_name(
    server: BrokerProcess, client: redis.Redis
) -> None:
    """An error inside a transaction's replies is one of the server's, like any other; nothing of it reaches a thread's hook."""
    pair = Pair(server.url)
    for key in (pair.keys.hello, pair.keys.up(pair.peer), pair.keys.down(pair.peer)):
        client.set(key, "no stream")
    pair.close()
    Pair(server.url).close()


def test_two_engines_of_different_names_keep_apart(server: BrokerProcess) -> None:
    with (
        contextlib.closing(Pair(server.url, engine="one")) as one,
        contextlib.closing(Pair(server.url, engine="two")) as two,
    ):
        for pair in (one, two):
            pair.exchange()


def test_a_second_port_of_the_same_peer_goes_on(pair: Pair) -> None:
    for _ in range(3):
        pair.frontend.close()
        pair.frontend = pair.transport.connect(pair.engine.address, pair.peer)
        pair.frontend.send([b"back"])
        assert received(pair.engine, 1) == [b"back"]
        pair.exchange()


# ---------------------------------------------------------------------------------------------------------- the end


SENDER = """
import os, sys
from tllm_core.contracts.interfaces import EngineAddress
from tllm_core.errors import PortFull
from tllm_core.transports.redis import RedisSettings, RedisTransport

def send_all(send):
    for number in range(1000):
        while True:
            try:
                send([b"%d" % number])
                break
            except PortFull:
                continue

transport = RedisTransport(RedisSettings(url=sys.argv[1], linger_s=30.0))
"""
AS_FRONTEND = """
address = EngineAddress(transport="redis", engine="exit", generation=1, endpoints={"redis": sys.argv[1]})
port = transport.connect(address, bytes.fromhex(sys.argv[2]))
send_all(port.send)
"""
AS_ENGINE = """
port = transport.listen("exit", 1)
print("listens", flush=True)
assert port.receive(60)
send_all(lambda frame: port.send(bytes.fromhex(sys.argv[2]), frame))
"""
CLOSED = "port.close()\nos._exit(0)\n"


def test_what_a_frontend_sent_before_close_and_exit_arrives(server: BrokerProcess) -> None:
    with contextlib.closing(transport(server.url).listen("exit", 1)) as engine:
        script = SENDER + AS_FRONTEND + CLOSED
        subprocess.run([sys.executable, "-c", script, server.url, new_peer().hex()], check=True, timeout=60)
        assert received(engine, 1000) == [b"%d" % number for number in range(1000)]


def test_what_an_engine_sent_before_close_and_exit_arrives(server: BrokerProcess) -> None:
    peer = new_peer()
    command = [sys.executable, "-c", SENDER + AS_ENGINE + CLOSED, server.url, peer.hex()]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"listens\n"
        address = EngineAddress(transport="redis", engine="exit", generation=1, endpoints={"redis": server.url})
        with contextlib.closing(transport(server.url).connect(address, peer)) as frontend:
            frontend.send([b"hello"])
            assert child.wait(60) == 0  # nothing is read before the engine has gone
            assert received(frontend, 1000) == [b"%d" % number for number in range(1000)]


@pytest.mark.parametrize("state", ["up", "down", "frozen", "engine gone"])
def test_close_ends_in_every_state(server: BrokerProcess, state: str) -> None:
    pair = Pair(server.url)
    if state == "down":
        server.kill()
        until(lambda: not pair.ups())
    elif state == "frozen":
        server.freeze()
        pair.frontend.send([b"stuck"])
    elif state == "engine gone":
        pair.engine.close()
        until(lambda: not pair.frontend.state.up)
        with pytest.raises(PortDown, match=r"closed its end|is not at"):
            pair.frontend.send([b"x"])
    started = time.monotonic()
    pair.close()
    pair.close()
    assert time.monotonic() - started < 8.0
    assert pair.frontend.state.closed
    if state == "frozen":
        server.thaw()


def test_a_forked_child_can_do_nothing_and_its_parent_goes_on(pair: Pair) -> None:
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            for use in (lambda: pair.frontend.send([b"x"]), lambda: pair.engine.receive(0)):
                try:
                    use()
                except PortClosed:
                    code = 0
                else:
                    os._exit(2)
            pair.close()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    pair.exchange()


def test_unix_sockets_work(redis_server: MakeServer, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("r") / "s"
    with redis_server("--unixsocket", str(path)), contextlib.closing(Pair(f"unix://{path}?db=3")) as pair:
        assert pair.engine.address.endpoints["redis"] == f"unix://{path}?db=3"
        pair.exchange()


def test_a_database_of_ones_own_is_used(server: BrokerProcess) -> None:
    with contextlib.closing(Pair(server.url, db=5)) as pair, looking_at(f"{server.url}/5") as client:
        assert pair.engine.address.endpoints["redis"] == f"{server.url}/5"
        assert client.dbsize() > 0
        pair.exchange()


def test_a_reader_that_does_not_read_slows_nobody_and_fills_only_its_own_stream(
    server: BrokerProcess, client: redis.Redis
) -> None:
    with contextlib.closing(Pair(server.url, queue_frames=64)) as pair:
        slow = new_peer()
        with contextlib.closing(pair.transport.connect(pair.engine.address, slow)) as reader:
            reader.send([b"hello"])
            assert received(pair.engine, 1) == [b"hello"]
            full_since = None
            while full_since is None or time.monotonic() - full_since < 0.3:
                try:
                    pair.engine.send(slow, [b"x"])
                    full_since = None
                except PortFull:
                    full_since = full_since or time.monotonic()
                    time.sleep(0.01)
            assert 64 <= client.xlen(pair.keys.down(slow)) <= 128
            for _ in range(20):
                pair.exchange(50)
            assert client.xlen(pair.keys.down(slow)) <= 128


def test_many_frontends_share_one_engine(pair: Pair) -> None:
    peers = [new_peer() for _ in range(20)]
    ports = {peer: pair.transport.connect(pair.engine.address, peer) for peer in peers}
    for peer, port in ports.items():
        port.send([peer])
    assert sorted(received(pair.engine, 20)) == sorted(peers)
    for number, peer in itertools.product(range(20), peers):
        pair.engine.send(peer, [peer, b"%d" % number])
    for peer, port in ports.items():
        assert received(port, 20) == [peer] * 20
        port.close()


# ------------------------------------------------------------------------------------------------------- a whole round

ATTACHED = Path(__file__).parents[1] / "attach" / "attached_frontend.py"


def test_an_engine_behind_redis_answers_its_owner_and_one_that_attached(
    server: BrokerProcess, client: redis.Redis, tmp_path: Path
) -> None:
    with echo_engine(server) as executor:
        results = [executor.generate_async([first, 2, 3], SamplingParams(max_tokens=30)) for first in range(1, 21)]
        for first, result in enumerate(results, 1):
            assert list(result.result(PATIENCE_S).outputs[0].token_ids) == expected_tokens([first, 2, 3], 30)
        path = tmp_path / "engine.json"
        executor.write_attach_file(path)
        command = [sys.executable, str(ATTACHED), str(path), "7", "100"]
        lines = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
        words = [json.loads(line) for line in lines]
        assert words[-1]["done"] == "length"
        tokens = [token for word in words for token in word.get("tokens", [])]
        assert tokens == expected_tokens([7, 2, 3], 100)
    assert client.keys() == []


def test_streams_are_exact_although_the_server_is_killed_three_times(server: BrokerProcess) -> None:
    with echo_engine(server, step_interval_s=0.005) as executor:
        results = [executor.generate_async([first, 2, 3], SamplingParams(max_tokens=200)) for first in range(1, 33)]
        for _ in range(3):
            next(results[0])
            server.kill()
            server.restart()
        for first, result in enumerate(results, 1):
            assert list(result.result(PATIENCE_S).outputs[0].token_ids) == expected_tokens([first, 2, 3], 200)


def test_a_killed_engine_leaves_no_key(server: BrokerProcess, client: redis.Redis) -> None:
    with echo_engine(server) as executor:
        executor.generate([1, 2, 3], SamplingParams(max_tokens=3))
        (rank,) = [rank.pid for rank in executor.health().ranks]
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            executor.generate([1, 2, 3], SamplingParams(max_tokens=3))
    until(lambda: client.keys() == [])


def echo_engine(server: BrokerProcess, **engine_options: Any) -> GenerationExecutor:
    return GenerationExecutor.create(
        engine="echo",
        engine_options=engine_options,
        transport="tllm_core.transports.redis:RedisTransport",
        transport_options={"url": server.url},
        launcher="spawn",
    )


def test_a_server_that_takes_no_frame_of_that_size_is_refused_with_both_sizes() -> None:
    with valkey_server("--proto-max-bulk-len", str(1 << 20)) as small:
        with pytest.raises(TransportError, match=r"1048576 bytes at most \(proto-max-bulk-len\).*2097152"):
            transport(small.url).listen("model", 1)
        transport(small.url, max_frame_bytes=1 << 20).listen("model", 1).close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prefix": "a..b"}, "prefix may hold"),
        ({"prefix": "a."}, "prefix may hold"),
        ({"url": "redis://h/x"}, "number of a database"),
        ({"url": "redis://a,redis://b"}, "several servers"),
        ({"url": "127.0.0.1:6379"}, "must start with redis://"),
        ({"url": "redis://:secret@"}, "redis://host:port/db"),
    ],
)
def test_settings_that_can_not_be_meant_are_refused_before_anything_is_tried(options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        RedisSettings(**options)
    assert "secret" not in str(caught.value)
