"""A redis server that is there and answers, and refuses to write: that is this side's own path, and says why it is down."""

from __future__ import annotations

import contextlib
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.brokers.conftest import LONG, SERVERS, Setup, until
from tllm_core import BrokerLost, SamplingParams
from tllm_core.engines.echo import expected_tokens

DOWN_S = 8.0
"""Long enough to be looked at meanwhile on a busy machine."""


@pytest.fixture
def broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setup]:
    (tmp_path / "saved").mkdir()
    server = SERVERS["redis"]
    monkeypatch.setitem(SERVERS, "redis", lambda: server("--dir", str(tmp_path / "saved")))
    setup = Setup("redis", tmp_path)
    try:
        yield setup
    finally:
        setup.close()


def without_memory(client: redis.Redis, directory: Path) -> Callable[[], Any]:
    client.config_set("maxmemory", 1)
    return lambda: client.config_set("maxmemory", 0)


def made_a_replica(client: redis.Redis, directory: Path) -> Callable[[], Any]:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        client.replicaof("127.0.0.1", nobody.getsockname()[1])
    return lambda: client.replicaof("NO", "ONE")


def without_a_disk(client: redis.Redis, directory: Path) -> Callable[[], Any]:
    """It can't save what it holds, and writes nothing more until it can."""
    shutil.rmtree(directory / "saved")
    client.config_set("save", "3600 1")
    with contextlib.suppress(redis.ResponseError):
        client.bgsave()
    until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err", "the server has failed to save")
    return lambda: client.config_set("stop-writes-on-bgsave-error", "no")


REFUSALS = pytest.mark.parametrize(
    ("refuse", "word"),
    [(without_memory, "OOM"), (made_a_replica, "READONLY"), (without_a_disk, "MISCONF")],
    ids=["OOM", "READONLY", "MISCONF"],
)
Refuse = Callable[[redis.Redis, Path], Callable[[], Any]]


@REFUSALS
def test_a_server_that_refuses_writes_for_good_is_told_as_the_path_s_end_with_the_server_s_words(
    broker: Setup, refuse: Refuse, word: str
) -> None:
    settings = {"liveness.broker_down_after_s": DOWN_S}
    owned = broker.shared(settings=settings, step_interval_s=0.02)
    attached = broker.attach(owned, settings=settings)
    idle = broker.attach(owned, settings=settings)
    pending = [
        executor.generate_async([1, 2], SamplingParams(max_tokens=LONG)) for executor in (owned.executor, attached)
    ]
    for result in pending:
        next(result)
    with redis.Redis.from_url(broker.server.url) as client:
        refuse(client, broker.directory)
        for executor in (owned.executor, attached, idle):
            until(lambda executor=executor: word in executor.health().path.reason, f"health says {word}")
            assert executor.health().state == "ready"
        for result in pending:
            with pytest.raises(BrokerLost, match=rf"no path to the engine for \d.*{word}"):
                result.result(30)
        until(lambda: idle.health().state == "dead", "who waits for nothing hears of it too")
        assert word in str(idle.health().cause)


@REFUSALS
def test_writes_that_are_refused_for_a_while_cost_time_and_no_token(broker: Setup, refuse: Refuse, word: str) -> None:
    owned = broker.shared(step_interval_s=0.002)
    attached = broker.attach(owned)
    count = 2000
    pending = [attached.generate_async([number, 2], SamplingParams(max_tokens=count)) for number in range(1, 5)]
    for result in pending:
        next(result)
    with redis.Redis.from_url(broker.server.url) as client:
        allow = refuse(client, broker.directory)
        until(lambda: word in attached.health().path.reason, f"health says {word}")
        allow()
        for number, result in enumerate(pending, 1):
            assert result.result(60).outputs[0].token_ids == expected_tokens([number, 2], count)
    until(lambda: attached.health().ok, "the path is well again")
