"""Servers that are set up oddly: what can't work is refused in words at once, the rest works."""

import os
import signal
import time

import pytest
import redis

from tests.brokers.conftest import LONG, Setup, until
from tllm_core import EngineDeadError, GenerationExecutor, SamplingParams, TllmError
from tllm_core.conformance.broker import nats_server
from tllm_core.engines.echo import expected_tokens

PATIENT_S = 15.0
"""Half of what `create` waits for an engine that does not answer."""


@pytest.mark.parametrize("max_payload", [1024, 4096])
def test_a_server_that_takes_small_payloads_only_is_refused_by_name_of_its_limit(max_payload: int) -> None:
    began = time.monotonic()
    with (
        nats_server(config=f"max_payload: {max_payload}") as server,
        pytest.raises(TllmError, match="max_payload"),
    ):
        GenerationExecutor.create(engine="echo", transport="nats", transport_options={"url": server.url}).shutdown()
    assert time.monotonic() - began < PATIENT_S


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_connections_that_the_server_ends_again_and_again_lose_nothing(broker: Setup) -> None:
    executor = broker.own(step_interval_s=0.01)
    results = [executor.generate_async([number + 1], SamplingParams(max_tokens=200)) for number in range(5)]
    stream = iter(results[0])
    with redis.Redis(port=broker.server.port) as admin:
        for round_number in range(3):
            while len(results[0].outputs[0].token_ids) <= 40 * round_number:
                next(stream)
            admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    for number, result in enumerate(results):
        assert list(result.result(60).outputs[0].token_ids) == expected_tokens([number + 1], 200)


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_thousands_of_other_keys_that_expire_do_not_delay_the_news_of_a_death(broker: Setup) -> None:
    executor = broker.own(world_size=2)
    result = executor.generate_async([1], SamplingParams(max_tokens=LONG))
    next(iter(result))
    with redis.Redis(port=broker.server.port) as admin, admin.pipeline(transaction=False) as pipeline:
        for number in range(20_000):
            pipeline.set(f"other:{number}", b"x", px=1000 + number % 500)
        pipeline.execute()
    os.kill(next(rank.pid for rank in executor.health().ranks if rank.rank == 1), signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="rank 1"):
        result.result(10)


def test_an_abort_that_follows_its_submit_while_the_broker_is_away_stays_behind_it(broker: Setup) -> None:
    executor = broker.own()
    first = executor.generate_async([9], SamplingParams(max_tokens=LONG))
    next(iter(first))
    broker.server.kill()
    results = [executor.generate_async([number + 1], SamplingParams(max_tokens=LONG)) for number in range(50)]
    for result in results:
        result.abort()
    broker.server.restart()
    last = executor.generate_async([7], SamplingParams(max_tokens=5)).result(30)
    assert list(last.outputs[0].token_ids) == expected_tokens([7], 5)
    assert {result.outputs[0].finish_reason for result in results} == {"abort"}
    until(lambda: executor.stats().running == 1, "only the first one runs in the engine", 10)


def test_a_server_with_the_least_payload_carries_what_is_large_in_pieces() -> None:
    prompt = [5] * 50_000
    with (
        nats_server(config="max_payload: 8192") as server,
        GenerationExecutor.create(
            engine="echo",
            engine_options={"max_seq_len": 2 * LONG},
            transport="nats",
            transport_options={"url": server.url},
        ) as executor,
    ):
        result = executor.generate_async(prompt, SamplingParams(max_tokens=5)).result(PATIENT_S)
    assert list(result.outputs[0].token_ids) == expected_tokens(prompt, 5)
