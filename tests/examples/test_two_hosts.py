"""The walk-throughs of examples/two_hosts_*, typed as they stand there, on machines with real servers between them."""

from __future__ import annotations

import pytest

from tests.examples.conftest import WalkThrough
from tests.examples.machines import Network
from tllm_core.attach import read_attach_file
from tllm_core.conformance.broker import BrokerProcess, nats_server, valkey_server
from tllm_core.engines.echo import expected_tokens

CUT_S = 2.0
EXACT = "tokens, exactly what the engine produced"
ASK_HOST = "from tllm_core.attach import read_attach_file; print(read_attach_file('engine.json').is_here)"
ATTACH_LATE = "from tllm_core import GenerationExecutor as E; E.attach(config='tllm.toml', timeout=1.0)"


def answers(walk: WalkThrough) -> bool:
    """Whether the request that the walk-through makes is answered exactly."""
    printed = walk.frontend.run(next(words for words in walk.typed["frontend"] if words.startswith("tllm generate")))
    return " ".join(map(str, expected_tokens([1, 2, 3], 5))) in printed


def test_every_command_does_what_the_page_says(walk: WalkThrough) -> None:
    walk.start_broker()
    printed = "\n".join(walk.start_worker())
    password = (walk.broker.folder / "password").read_text(encoding="ascii").strip()
    assert "***" in printed
    assert password not in printed
    for words in walk.typed["frontend"][:-2]:
        walk.frontend.run(words)
    assert answers(walk)
    assert password not in walk.attach_file.read_text(encoding="utf-8")
    assert walk.worker is not None
    assert walk.worker.popen.poll() is None


def test_the_tls_part_of_the_page_works(walk: WalkThrough) -> None:
    walk.use_tls()
    walk.start()
    assert answers(walk)
    stranger = walk.frontend.start(f"unset TLLM_TRANSPORT__{walk.transport.upper()}__TLS_CA_FILE; tllm check")
    stranger.until("certificate verify failed")
    assert stranger.wait() == 1


def test_a_cut_cable_delays_a_stream_and_changes_nothing_else(network: Network, walk: WalkThrough) -> None:
    walk.start()
    stream = walk.stream()
    for cable in ("frontend", "broker"):
        network.cut(cable)
        assert stream.quiet_for(CUT_S) > CUT_S / 2
        network.mend(cable)
        stream.line()
    assert stream.wait() == 0, stream.lines
    assert stream.lines[-1].endswith(EXACT)


def test_a_patient_engine_may_lose_its_own_cable_for_a_while(network: Network, walk: WalkThrough) -> None:
    walk.engine.run("export TLLM_LIVENESS__DEAD_AFTER_S=10")
    walk.start()
    stream = walk.stream(80)
    network.cut("engine")
    assert stream.quiet_for(CUT_S) > CUT_S / 2
    network.mend("engine")
    assert stream.wait() == 0, stream.lines
    assert stream.lines[-1].endswith(EXACT)


def test_a_broker_that_is_killed_and_started_again_changes_nothing(walk: WalkThrough) -> None:
    walk.start()
    stream = walk.stream(80)
    walk.broker.run("kill -9 $(pgrep -x '(nats|valkey|redis)-server')")
    assert walk.server is not None
    walk.server.wait()
    walk.restart_broker()
    assert stream.wait() == 0, stream.lines
    assert stream.lines[-1].endswith(EXACT)


def test_a_broker_that_stays_away_is_no_death_of_the_engine(network: Network, walk: WalkThrough) -> None:
    walk.start()
    walk.frontend.run("export TLLM_LIVENESS__BROKER_DOWN_AFTER_S=1.5")
    stream = walk.stream(10_000)
    network.cut("broker")
    stream.until("BrokerLost: ")
    assert stream.wait() == 1
    network.mend("broker")
    assert answers(walk)


def test_a_killed_rank_is_told_with_its_cause_across_hosts(walk: WalkThrough) -> None:
    walk.start()
    assert walk.frontend.run(f'python -c "{ASK_HOST}"') == "False"  # so that no process is looked for by its number
    stream = walk.stream(10_000)
    walk.engine.run(f"kill -9 {read_attach_file(walk.attach_file).ranks[0].pid}")
    assert "the engine is gone: engine rank 0 was killed by SIGKILL" in stream.until("the engine is gone")
    assert stream.wait() == 1


def test_a_worker_that_is_stopped_says_so_across_hosts(walk: WalkThrough) -> None:
    walk.start()
    stream = walk.stream(10_000)
    walk.engine.run("kill -INT $(pgrep -f '[b]in/tllm worker')")
    stream.until("the engine is gone: the engine was stopped")
    assert walk.worker is not None
    assert walk.worker.wait() == 0, walk.worker.lines
    assert not (walk.engine.folder / "engine.json").exists()
    late = walk.frontend.start(f'python -c "{ATTACH_LATE}"')
    assert "the engine of the attach file is gone" in late.until("TransportError: ")


def test_a_machine_that_is_switched_off_is_noticed_by_its_silence(network: Network, walk: WalkThrough) -> None:
    walk.start()
    stream = walk.stream(10_000)
    network.power_off("engine")
    assert "has not been heard of for 1 s" in stream.until("the engine is gone", timeout=15)
    assert stream.wait() == 1


def test_the_walk_through_works_on_one_machine(here: WalkThrough, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in here.typed["broker"][:-1]:
        here.broker.run(words)
    with server_of(here, monkeypatch) as server:
        here.engine.run(f"export TLLM_TRANSPORT__{here.transport.upper()}__URL={server.url}")
        here.start_worker()
        here.prepare_frontend()
        assert answers(here)
        stream = here.stream(60)
        server.restart()
        assert stream.wait() == 0, stream.lines
        assert stream.lines[-1].endswith(EXACT)


def server_of(walk: WalkThrough, monkeypatch: pytest.MonkeyPatch) -> BrokerProcess:
    """The example's server on a free port of the loopback."""
    folder = walk.broker.folder
    if walk.transport == "nats":
        monkeypatch.setenv("TLLM_PASSWORD", (folder / "password").read_text(encoding="ascii").strip())
        return nats_server(config=(folder / "nats.conf").read_text(encoding="utf-8"))
    return valkey_server("--aclfile", str(folder / "users.acl"), "--maxmemory-policy", "noeviction")
