"""What the NATS transport promises beyond the port contract, on real servers that are killed, frozen and restarted."""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import nats
import pytest

from tllm_core import GenerationExecutor, SamplingParams
from tllm_core.config.shown import masked
from tllm_core.conformance import nats_server
from tllm_core.contracts.interfaces import EngineAddress
from tllm_core.contracts.packing import table_bytes
from tllm_core.engines.echo import expected_tokens
from tllm_core.errors import ConfigError, FrameTooLarge, PortClosed, PortDown, PortFull, TransportError
from tllm_core.transports.nats import NatsSettings, NatsTransport

PATIENCE_S = 20.0
numbers = itertools.count()


def new_peer():
    return b"\x01" + secrets.token_bytes(15)


def until(condition, patience_s=PATIENCE_S):
    """Waits for a condition, which must come true."""
    deadline = time.monotonic() + patience_s
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return value


def received(port, count=1):
    frames = []
    deadline = time.monotonic() + PATIENCE_S
    while len(frames) < count:
        assert time.monotonic() < deadline, f"{len(frames)} of {count} frames came"
        frames += port.receive(0.2)
    return [[bytes(part) for part in frame] for frame in frames]


def send(port_send, frame):
    """Sends as soon as there is room."""
    while True:
        try:
            return port_send(frame)
        except PortFull:
            time.sleep(0.001)


@pytest.fixture(scope="module")
def shared():
    """A server that no test harms."""
    with nats_server() as server:
        yield server


@pytest.fixture
def server():
    """A server for one test."""
    with nats_server() as server:
        yield server


@pytest.fixture
def opened():
    """Has ports closed after the test; afterwards no thread of theirs is left."""
    with contextlib.ExitStack() as stack:
        yield lambda port: stack.enter_context(contextlib.closing(port))
    assert not [thread for thread in threading.enumerate() if thread.name == "tllm-nats"]


@pytest.fixture
def lane(opened):
    """Makes an engine's port and a frontend's that it knows: engine, peer, frontend."""

    def make(url, **settings):
        transport = NatsTransport(NatsSettings(url=url, **settings))
        engine = opened(transport.listen(f"engine-{next(numbers)}", secrets.randbits(64)))
        peer = new_peer()
        frontend = opened(transport.connect(engine.address, peer))
        frontend.send([b"hello"])
        assert received(engine) == [[b"hello"]]
        return engine, peer, frontend

    return make


# ------------------------------------------------------------------------------------------------------- frames


def test_ten_thousand_frames_arrive_in_order_in_both_directions(shared, lane):
    engine, peer, frontend = lane(shared.url)
    expected = [[b"%d" % number] for number in range(10_000)]

    def send_all():
        for frame in expected:
            send(lambda frame: engine.send(peer, frame), frame)
            send(frontend.send, frame)

    thread = threading.Thread(target=send_all)
    thread.start()
    assert received(frontend, len(expected)) == expected
    assert received(engine, len(expected)) == expected
    thread.join()


def test_a_frame_of_the_largest_size_crosses_and_one_byte_more_is_refused_before_sending(shared, lane):
    engine, peer, frontend = lane(shared.url)
    assert frontend.max_frame == engine.max_frame == (1 << 20) - 4096
    largest = [b"x" * (frontend.max_frame - 10), b"y" * 10]
    frontend.send(largest)
    engine.send(peer, largest)
    assert received(engine) == [largest]
    assert received(frontend) == [largest]
    with pytest.raises(FrameTooLarge, match=str(frontend.max_frame)):
        frontend.send([*largest, b"z"])
    many = [b""] * 2000
    with pytest.raises(FrameTooLarge):
        frontend.send([*many, b"x" * (frontend.max_frame - table_bytes(2001) + 4097)])
    frontend.send([*many, b"x" * (frontend.max_frame - table_bytes(2001) + 4096)])
    assert len(received(engine)[0]) == 2001
    assert frontend.state.up


def test_a_server_with_another_payload_limit_sets_max_frame(lane):
    with nats_server(config="max_payload: 65536") as small:
        engine, _, frontend = lane(small.url)
        frontend.send([b"x" * (65536 - 4096)])
        assert frontend.max_frame == 65536 - 4096
        assert len(received(engine)[0][0]) == 65536 - 4096


def test_what_was_sent_before_close_and_exit_arrives(shared, opened):
    transport = NatsTransport(NatsSettings(url=shared.url))
    engine = opened(transport.listen("exit", 1))
    script = f"""
import os
from tllm_core.contracts.interfaces import EngineAddress
from tllm_core.transports.nats import NatsSettings, NatsTransport
address = EngineAddress(transport="nats", engine="exit", generation=1, endpoints={engine.address.endpoints!r})
port = NatsTransport(NatsSettings()).connect(address, {new_peer()!r})
for number in range(1000):
    port.send([b"%d" % number])
port.close()
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert received(engine, 1000) == [[b"%d" % number] for number in range(1000)]


# ------------------------------------------------------------------------------------------ the server's failures


def test_a_server_that_is_killed_and_restarted_three_times_is_found_again_and_frames_flow(server, lane):
    engine, peer, frontend = lane(server.url)
    for round_number in range(3):
        before = engine.state, frontend.state
        server.kill()
        until(lambda: not engine.state.up and not frontend.state.up)
        assert server.url in frontend.state.reason
        with pytest.raises(PortDown):
            frontend.send([b"lost"])
        with pytest.raises(PortDown):
            engine.send(peer, [b"lost"])
        server.restart()
        until(lambda: engine.state.up and frontend.state.up)
        assert engine.state.since > before[0].since
        assert frontend.state.since > before[1].since
        frontend.send([b"up", b"%d" % round_number])
        engine.send(peer, [b"down", b"%d" % round_number])
        assert received(engine) == [[b"up", b"%d" % round_number]]
        assert received(frontend) == [[b"down", b"%d" % round_number]]


def test_a_lost_and_a_regained_server_end_a_blocked_receive(server, lane):
    engine, _, frontend = lane(server.url)
    for change in (server.kill, server.restart):
        states = [port.state for port in (engine, frontend)]
        change()
        for port, before in zip((engine, frontend), states, strict=True):
            until(lambda port=port, before=before: port.receive(PATIENCE_S) == [] and port.state.up != before.up)


def test_a_frozen_server_shows_in_path_ok_at_and_what_was_taken_arrives_afterwards(server, lane):
    engine, peer, frontend = lane(server.url)
    until(lambda: time.monotonic() - frontend.path_ok_at() < 0.2)
    server.freeze()
    frozen_at = time.monotonic()
    frontend.send([b"meanwhile"])
    engine.send(peer, [b"meanwhile"])
    time.sleep(1.0)  # how long it is frozen is what this is about
    assert frontend.state.up
    assert engine.state.up
    for port in (engine, frontend):
        assert port.path_ok_at() <= frozen_at
    server.thaw()
    assert received(engine) == [[b"meanwhile"]]
    assert received(frontend) == [[b"meanwhile"]]
    for port in (engine, frontend):
        until(lambda port=port: port.path_ok_at() > frozen_at + 1.0)


def test_a_server_without_a_sign_of_life_is_left_and_said_to_be_down(server, lane):
    engine, _, frontend = lane(server.url, stale_after_s=0.3, connect_timeout_s=0.3)
    server.freeze()
    until(lambda: not frontend.state.up and not engine.state.up)
    server.thaw()
    until(lambda: frontend.state.up and engine.state.up)
    send(frontend.send, [b"again"])
    assert received(engine)[-1] == [b"again"]


def test_a_queue_that_the_server_does_not_take_is_full_at_once(server, lane):
    _, _, frontend = lane(server.url, send_queue_frames=16)
    server.freeze()

    def send_on():
        for _ in range(10_000):
            frontend.send([b"x" * 65536])

    with pytest.raises(PortFull, match="send_queue"):
        send_on()
    server.thaw()
    send(frontend.send, [b"room again"])


def test_frames_that_were_not_read_in_time_are_dropped_and_since_says_so(shared, lane):
    engine, peer, frontend = lane(shared.url, receive_queue_bytes=1 << 16)
    since = frontend.state.since
    for _ in range(16):
        send(lambda frame: engine.send(peer, frame), [b"x" * 32768])
    engine.send(peer, [b"end"])
    time.sleep(0.2)  # nothing on this side tells that they are all there
    frames = frontend.receive(PATIENCE_S)
    assert 0 < len(frames) < 16
    assert frontend.state.up
    assert frontend.state.since > since
    engine.send(peer, [b"after"])
    assert received(frontend)[-1] == [b"after"]


def test_one_outage_is_two_lines_in_the_log(server, lane, caplog):
    caplog.set_level(logging.INFO)
    _, _, frontend = lane(server.url)
    server.kill()
    until(lambda: not frontend.state.up)
    time.sleep(0.5)  # several attempts
    server.restart()
    until(lambda: frontend.state.up)
    lines = [record for record in caplog.records if record.name.startswith(("tllm_core", "nats"))]
    assert len(lines) <= 4  # of two ports
    assert not [record for record in caplog.records if record.exc_info]


# ------------------------------------------------------------------------------------------------ finding each other


def address_of(url, engine="absent", generation=7):
    return EngineAddress(
        transport="nats", engine=engine, generation=generation, endpoints={"url": url, "prefix": "tllm"}
    )


def test_an_absent_engine_is_told_at_once_and_found_when_it_comes(shared, opened):
    transport = NatsTransport(NatsSettings(url=shared.url, connect_timeout_s=60))
    frontend = opened(transport.connect(address_of(shared.url), new_peer()))
    assert not frontend.state.up
    assert "no engine listens on tllm.absent.0000000000000007" in frontend.state.reason
    with pytest.raises(PortDown, match="no engine listens"):
        frontend.send([b"x"])
    engine = opened(transport.listen("absent", 7))
    until(lambda: frontend.state.up)
    frontend.send([b"x"])
    assert received(engine) == [[b"x"]]


def test_a_frontend_of_another_generation_finds_no_engine(shared, lane, opened):
    engine, _, _ = lane(shared.url)
    other = msgspec.structs.replace(engine.address, generation=engine.address.generation ^ 1)
    frontend = opened(NatsTransport(NatsSettings()).connect(other, new_peer()))
    assert "no engine listens" in frontend.state.reason


def test_of_engines_that_take_one_name_at_the_same_time_one_gets_it(shared, opened):
    transport = NatsTransport(NatsSettings(url=shared.url))
    for generation in range(3):
        outcomes = []
        start = threading.Barrier(3)

        def listen(number, generation=generation, outcomes=outcomes, start=start):
            start.wait()
            try:
                outcomes.append(transport.listen(f"race{generation}", number))
            except TransportError as refusal:
                outcomes.append(refusal)

        threads = [threading.Thread(target=listen, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        errors = [outcome for outcome in outcomes if isinstance(outcome, TransportError)]
        for port in outcomes:
            if port not in errors:
                opened(port)
        assert len(errors) == 2
        assert all(f"race{generation}" in str(error) for error in errors)


def test_who_listens_to_all_subjects_of_the_server_disturbs_nothing(shared, lane):
    heard = []
    ready, done = threading.Event(), threading.Event()

    async def listen():
        client = await nats.connect(shared.url)
        subscription = await client.subscribe(">")
        await client.flush()
        ready.set()
        while not done.is_set():
            with contextlib.suppress(nats.errors.TimeoutError):
                heard.append((await subscription.next_msg(0.05)).subject)
        await client.close()

    thread = threading.Thread(target=lambda: asyncio.run(listen()))
    thread.start()
    assert ready.wait(PATIENCE_S)
    try:
        engine, peer, frontend = lane(shared.url)
        engine.send(peer, [b"x"])
        assert received(frontend) == [[b"x"]]
        path_ok_at = frontend.path_ok_at()
        until(lambda: frontend.path_ok_at() > path_ok_at)
    finally:
        done.set()
        thread.join()
    assert any(".down." in subject for subject in heard)


@pytest.mark.parametrize("name", ["*", ">", "a b", "a\r\nPUB x 0", "..", "a.b", "ä", "", "a" * 129, "a\n"])
def test_names_that_would_mean_something_in_a_subject_are_refused(name):
    transport = NatsTransport(NatsSettings(url="nats://127.0.0.1:1"))
    with pytest.raises(ConfigError, match="engine name"):
        transport.listen(name, 1)
    with pytest.raises(ConfigError, match="engine name"):
        transport.connect(address_of("nats://127.0.0.1:1", name), new_peer())
    if name != "a.b" and name != "a" * 129:
        with pytest.raises(ValueError, match="prefix"):
            NatsSettings(prefix=name)
        hostile = EngineAddress(
            transport="nats", engine="e", generation=1, endpoints={"url": "nats://x:1", "prefix": name}
        )
        with pytest.raises(TransportError, match="no nats address"):
            transport.connect(hostile, new_peer())


def test_a_server_that_is_not_there_is_an_error_that_says_where_and_what_to_do():
    transport = NatsTransport(NatsSettings(url="nats://somebody:hidden@127.0.0.1:1", connect_timeout_s=0.3))
    for opening in (lambda: transport.listen("e", 1), lambda: transport.connect(address_of(""), new_peer())):
        with pytest.raises(TransportError, match=r"nats://127\.0\.0\.1:1.*transport\.nats\.url") as caught:
            opening()
        assert "hidden" not in str(caught.value)


def test_what_strangers_publish_on_the_subjects_harms_nobody(shared, lane):
    engine, peer, frontend = lane(shared.url)
    since = engine.state.since
    base = f"tllm.{engine.address.engine}"
    lane_base = f"{base}.{engine.address.generation:016x}"

    async def publish():
        client = await nats.connect(shared.url)
        for subject in (
            f"{base}.holder",
            f"{lane_base}.up.zz",
            f"{lane_base}.up.{'A' * 32}",
            f"{lane_base}.up.{peer.hex()}",
        ):
            for payload in (b"", b"\xff\xff", b"\5", b"x" * 100):
                await client.publish(subject, payload, reply="tllm.nobody")
                await client.publish(subject, payload)
        await client.flush()  # the server has taken all before the frontend sends
        await client.close()

    asyncio.run(publish())
    frontend.send([b"still", b"here"])
    assert received(engine, 7)[-1] == [b"still", b"here"]
    engine.send(peer, [b"and here"])
    assert received(frontend) == [[b"and here"]]
    assert engine.state.since == since


def test_the_servers_of_a_list_are_tried_in_turn(shared, lane):
    engine, peer, frontend = lane(["nats://127.0.0.1:1", shared.url])
    engine.send(peer, [b"x"])
    assert received(frontend) == [[b"x"]]
    assert engine.address.endpoints["url"] == f"nats://127.0.0.1:1,{shared.url}"


# ------------------------------------------------------------------------------------------------ logins and secrets

USERS = """
authorization {
  users = [
    {user: all, password: "s3cret", permissions: {publish: "tllm.>", subscribe: "tllm.>"}}
    {user: mute, password: "s3cret", permissions: {publish: "other.>", subscribe: ">"}}
    {user: deaf, password: "s3cret", permissions: {publish: ">", subscribe: "other.>"}}
    {user: nodown, password: "s3cret", permissions: {publish: {deny: "tllm.*.*.down.>"}}}
  ]
}
"""


@pytest.fixture(scope="module")
def guarded():
    with nats_server(config=USERS) as server:
        yield server


def test_a_login_that_may_use_the_prefix_alone_is_enough(guarded, lane):
    engine, peer, frontend = lane(guarded.url, user="all", password="s3cret")
    engine.send(peer, [b"x"])
    assert received(frontend) == [[b"x"]]
    assert "s3cret" not in f"{engine.address}{engine!r}{frontend!r}{guarded.output}"


def test_a_server_that_does_not_answer_is_named(server):
    server.freeze()
    transport = NatsTransport(NatsSettings(url=server.url, connect_timeout_s=0.3))
    with pytest.raises(TransportError, match=server.url):
        transport.listen("e", 1)


def test_a_login_in_the_url_is_used_and_not_advertised(guarded, lane):
    engine, _, _ = lane(guarded.url.replace("//", "//all:s3cret@"))
    assert engine.address.endpoints == {"url": guarded.url, "prefix": "tllm"}


def test_a_wrong_password_is_an_error_at_once(guarded):
    transport = NatsTransport(NatsSettings(url=guarded.url, user="all", password="gue55ed", connect_timeout_s=60))
    for opening in (lambda: transport.listen("e", 1), lambda: transport.connect(address_of(guarded.url), new_peer())):
        with pytest.raises(TransportError, match="refuses this login") as caught:
            opening()
        assert "gue55ed" not in str(caught.value)


def test_every_server_of_a_list_is_named_with_its_own_cause(guarded, server):
    server.freeze()
    urls = ["nats://127.0.0.1:1", server.url, guarded.url.replace("//", "//all:gue55ed@")]
    transport = NatsTransport(NatsSettings(url=urls, connect_timeout_s=6))
    for opening in (lambda: transport.listen("e", 1), lambda: transport.connect(address_of(guarded.url), new_peer())):
        with pytest.raises(TransportError) as caught:
            opening()
        words = str(caught.value)
        assert "nothing listens at nats://127.0.0.1:1;" in words
        assert f"{server.url} did not answer within 1.6 s;" in words
        assert f"{guarded.url} refuses this login" in words
        assert "gue55ed" not in words


def test_where_every_server_of_a_list_refuses_the_error_comes_at_once_and_names_them_all(guarded):
    with nats_server(config=USERS) as other:
        urls = [server.url.replace("//", "//all:gue55ed@") for server in (guarded, other)]
        with pytest.raises(TransportError, match=f"{guarded.url} refuses this login.*; {other.url} refuses this login"):
            NatsTransport(NatsSettings(url=urls, connect_timeout_s=60)).listen("e", 1)


def test_a_server_that_refuses_does_not_keep_the_next_one_from_serving(guarded, shared, lane):
    engine, peer, frontend = lane([guarded.url.replace("//", "//all:gue55ed@"), shared.url])
    engine.send(peer, [b"x"])
    assert received(frontend) == [[b"x"]]


def test_a_list_of_servers_that_went_away_is_down_with_the_cause_of_each(server, lane):
    with nats_server() as other:
        engine, _, _ = lane([server.url, other.url])
        server.kill()
        until(lambda: engine.state.up and server.url not in engine.state.reason)
        other.kill()
        for url in (server.url, other.url):
            until(lambda url=url: f"nothing listens at {url}" in engine.state.reason)


@pytest.mark.parametrize("user", ["mute", "deaf", "nodown"])
def test_a_login_that_may_not_use_the_subjects_is_an_error_at_once(guarded, opened, user):
    transport = NatsTransport(NatsSettings(url=guarded.url, user=user, password="s3cret", connect_timeout_s=60))
    with pytest.raises(TransportError, match=r"(?i)permissions violation.*tllm\.>"):
        transport.listen("e", 1)
    if user != "nodown":
        with pytest.raises(TransportError, match=r"(?i)permissions violation"):
            transport.connect(address_of(guarded.url), new_peer())


def test_a_login_that_is_taken_back_is_down_with_the_reason(opened):
    config = 'authorization { users = [{user: a, password: "s3cret"}] }'
    with nats_server(config=config) as server:
        transport = NatsTransport(NatsSettings(url=server.url, user="a", password="s3cret"))
        engine = opened(transport.listen("e", 1))
        path = server.directory / "nats.conf"
        path.write_text(config.replace("s3cret", "other"))
        os.kill(server.pid, signal.SIGHUP)
        until(lambda: "refuses this login" in engine.state.reason)
        path.write_text(config)
        os.kill(server.pid, signal.SIGHUP)
        until(lambda: engine.state.up)


def test_a_secret_is_not_said_to_a_server_without_the_tls_that_was_asked_for():
    heard = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        def record():
            for _ in range(3):
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(b'INFO {"version": "2.15.1", "max_payload": 1048576, "auth_required": true}\r\n')
                    said = b""
                    while more := connection.recv(4096):
                        said += more
                    heard.append(said)

        thread = threading.Thread(target=record)
        thread.start()
        for settings in (
            NatsSettings(url=f"tls://{address}", user="all", password="s3cret"),
            NatsSettings(url=f"tls://all:s3cret@{address}"),
        ):
            with pytest.raises(TransportError, match="TLS"):
                NatsTransport(settings).listen("e", 1)
        advertised = NatsTransport(NatsSettings(token="s3cret"))
        with pytest.raises(TransportError, match="TLS"):
            advertised.connect(address_of(f"tls://{address}"), new_peer())
        thread.join()
    assert len(heard) == 3
    assert not any(b"s3cret" in said for said in heard)


@pytest.fixture
def certificate(tmp_path):
    """A certificate for 127.0.0.1 and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
    ]
    files = ["-keyout", key, "-out", certificate, "-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, *files], check=True, capture_output=True)
    return certificate, key


def test_frames_cross_over_tls_and_an_unknown_authority_is_refused(certificate, lane, opened):
    config = 'tls {{ cert_file: "{}", key_file: "{}" }}'.format(*certificate)
    with nats_server(config=config) as server:
        engine, peer, frontend = lane(server.url, tls_ca_file=str(certificate[0]))
        engine.send(peer, [b"x" * 500_000])
        assert received(frontend) == [[b"x" * 500_000]]
        server.restart()
        until(lambda: frontend.state.up and engine.state.up)
        frontend.send([b"again"])
        assert received(engine) == [[b"again"]]
        with pytest.raises(TransportError, match=r"(?i)certificate"):
            NatsTransport(NatsSettings(url=server.url, connect_timeout_s=60)).listen("e", 1)
        for port in (frontend, engine):
            port.close()


def test_tls_files_that_are_not_there_are_an_error_at_once():
    transport = NatsTransport(NatsSettings(tls_ca_file="/nowhere/ca.pem", connect_timeout_s=60))
    with pytest.raises(TransportError, match="TLS files"):
        transport.listen("e", 1)


def test_secrets_are_masked_where_settings_are_shown():
    settings = NatsSettings(url="nats://u:p4ss@h:1,nats://t0ken@h:2", password="s3cret", token="t0ken")
    for text in (repr(settings), str(settings), str(masked("nats", msgspec.to_builtins(settings)))):
        assert not any(secret in text for secret in ("p4ss", "s3cret", "t0ken"))
    with pytest.raises(ValueError, match="server 2 in url") as caught:
        NatsSettings(url="nats://h:1,u:s3cret@h")
    assert "s3cret" not in str(caught.value)


def test_a_login_by_key_says_what_is_missing(monkeypatch, tmp_path):
    absent, seed = tmp_path / "absent", tmp_path / "seed"
    with pytest.raises(ConfigError, match=f"{absent}.*can't be read"):
        NatsTransport(NatsSettings(nkey_seed_file=str(absent))).listen("e", 1)
    seed.write_text("SUA")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install nkeys"):
        NatsTransport(NatsSettings(nkey_seed_file=str(seed))).listen("e", 1)


# ------------------------------------------------------------------------------------------------------------ ends


@pytest.mark.parametrize("condition", ["up", "killed", "frozen", "frozen and full"])
def test_ports_close_in_any_state_of_the_server(server, lane, condition):
    engine, peer, frontend = lane(server.url)
    if condition == "killed":
        server.kill()
        until(lambda: not engine.state.up and not frontend.state.up)
    elif condition.startswith("frozen"):
        server.freeze()
    if condition == "frozen and full":
        with contextlib.suppress(PortFull):
            while True:
                engine.send(peer, [b"x" * 900_000])
    started = time.monotonic()
    for port in (frontend, engine):
        port.close()
        with pytest.raises(PortClosed):
            port.receive(0)
    assert time.monotonic() - started < 10


def test_a_port_that_waits_for_its_engine_closes(shared):
    frontend = NatsTransport(NatsSettings()).connect(address_of(shared.url), new_peer())
    frontend.close()
    assert frontend.state.closed


def test_nothing_remains_at_the_server_after_100_generations(server):
    transport = NatsTransport(NatsSettings(url=server.url))
    before = server.monitor("subsz")["num_subscriptions"]

    def live(generation):
        engine = transport.listen(f"engine{generation}", generation)
        frontend = transport.connect(engine.address, new_peer())
        frontend.send([b"hello"])
        received(engine)
        frontend.close()
        engine.close()

    with ThreadPoolExecutor(10) as pool:
        list(pool.map(live, range(100)))
    frontend = transport.connect(address_of(server.url), new_peer())
    frontend.close()
    until(lambda: server.monitor("connz")["num_connections"] == 0)
    assert server.monitor("subsz")["num_subscriptions"] == before


def test_a_forked_child_has_a_closed_port_and_does_not_harm_its_parents(shared, lane):
    engine, peer, frontend = lane(shared.url)
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            for call in (lambda: frontend.send([b"x"]), lambda: engine.receive(0), lambda: engine.send(peer, [b"x"])):
                with pytest.raises(PortClosed):
                    call()
            frontend.close()
            engine.close()
            code = 0 if frontend.state.closed else 2
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    frontend.send([b"still"])
    engine.send(peer, [b"here"])
    assert received(engine) == [[b"still"]]
    assert received(frontend) == [[b"here"]]
    path_ok_at = frontend.path_ok_at()
    until(lambda: frontend.path_ok_at() > path_ok_at)


# --------------------------------------------------------------------------------------------------------- the whole


def test_an_executor_and_an_attached_process_answer_exactly(shared, tmp_path):
    script = """
import json, sys
from tllm_core import GenerationExecutor, SamplingParams
with GenerationExecutor.attach(sys.argv[1]) as executor:
    print(json.dumps(list(executor.generate([7, 2, 3], SamplingParams(max_tokens=20)).outputs[0].token_ids)))
"""
    name = "tllm_core.transports.nats:NatsTransport"
    options = {"url": shared.url}
    with GenerationExecutor.create(
        engine="echo", transport=name, transport_options=options, launcher="spawn"
    ) as executor:
        results = [executor.generate_async([first, 2, 3], SamplingParams(max_tokens=50)) for first in range(20)]
        for first, result in enumerate(results):
            assert list(result.result(60).outputs[0].token_ids) == expected_tokens([first, 2, 3], 50)
        path = tmp_path / "engine.json"
        executor.write_attach_file(path)
        attached = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, timeout=60)
    assert attached.returncode == 0, attached.stderr
    assert json.loads(attached.stdout) == expected_tokens([7, 2, 3], 20)


def test_256_streams_are_exact_through_three_kills_and_a_freeze_of_the_server(server):
    name, options = "tllm_core.transports.nats:NatsTransport", {"url": server.url}
    engine_options = {"step_interval_s": 0.02}
    with GenerationExecutor.create(
        engine="echo", engine_options=engine_options, transport=name, transport_options=options, launcher="spawn"
    ) as executor:
        results = [executor.generate_async([first, 2, 3], SamplingParams(max_tokens=256)) for first in range(256)]

        updates = iter(results[0])

        def until_tokens(count):
            while len(results[0].outputs[0].token_ids) < count:
                next(updates)

        for tokens in (20, 70, 120):
            until_tokens(tokens)
            server.kill()
            until(lambda: not executor.health().path.up)
            server.restart()
        until_tokens(170)
        server.freeze()
        until(lambda: not executor.health().path.up)
        assert executor.health().state == "ready"
        server.thaw()
        for first, result in enumerate(results):
            assert list(result.result(60).outputs[0].token_ids) == expected_tokens([first, 2, 3], 256)
        until(lambda: executor.health().path.up)


def test_a_server_with_too_small_a_max_payload_is_refused_with_both_numbers() -> None:
    refused = pytest.raises(TransportError, match=r"4096 bytes at most \(its max_payload\); tllm needs 8192")
    with nats_server(config="max_payload: 4096") as small, refused:
        NatsTransport(NatsSettings(url=small.url)).listen("model", 1)
