"""A whole executor, attached over tcp through a proxy: cuts, freezes and slow paths change nothing that a caller receives."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from tllm_core import EngineDeadError, GenerationExecutor, GenerationResult, SamplingParams
from tllm_core.attach import AttachFile, write_attach_file
from tllm_core.conformance.proxy import CutProxy
from tllm_core.contracts.interfaces import EngineAddress
from tllm_core.engines.echo import expected_tokens

PATIENCE_S = 60.0
TOKENS = 600
PATIENT = {"dead_after_s": 20.0, "frontend_dead_after_s": 30.0}
"""For faults that are no death: a machine that is busy must not make them one."""


class Remote:
    """An executor whose lanes, the engine's and its watcher's, go through a proxy each."""

    def __init__(self, executor: GenerationExecutor, proxies: list[CutProxy]) -> None:
        self.executor, self.proxies = executor, proxies

    def every(self, order: Callable[[CutProxy], None]) -> None:
        for proxy in self.proxies:
            order(proxy)

    def stream(self, first: int, tokens: int = TOKENS) -> GenerationResult:
        return self.executor.generate_async([first, 2, 3], SamplingParams(max_tokens=tokens))


@pytest.fixture
def remote(request: pytest.FixtureRequest) -> Iterator[Remote]:
    liveness = getattr(request, "param", PATIENT)
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tllm")))
        owner = stack.enter_context(
            GenerationExecutor.create(
                engine="echo",
                engine_options={"step_interval_s": 0.003, "max_seq_len": 100_000},
                transport="zmq",
                transport_options={"protocol": "tcp", "directory": str(directory)},
                launcher="spawn",
                config=_config(directory, liveness),
            )
        )
        content = owner.write_attach_file(directory / "own.json")
        content, proxies = _proxied(content, stack)
        write_attach_file(directory / "remote.json", content)
        executor = stack.enter_context(GenerationExecutor.attach(directory / "remote.json"))
        yield Remote(executor, proxies)


def _config(directory: Path, liveness: dict[str, float]) -> Path:
    path = directory / "tllm.toml"
    path.write_text("[liveness]\n" + "".join(f"{key} = {value}\n" for key, value in liveness.items()))
    return path


def _proxied(content: AttachFile, stack: contextlib.ExitStack) -> tuple[AttachFile, list[CutProxy]]:
    proxies = []

    def through_a_proxy(address: EngineAddress) -> EngineAddress:
        port = int(address.endpoints["zmq"].rpartition(":")[2])
        proxies.append(stack.enter_context(CutProxy("127.0.0.1", port)))
        return msgspec.structs.replace(address, endpoints={"zmq": f"tcp://127.0.0.1:{proxies[-1].port}"})

    assert content.watcher_address is not None
    watcher = through_a_proxy(content.watcher_address)
    # Without processes that can be looked at, as if the engine were on another host.
    content = msgspec.structs.replace(
        content, watcher_address=watcher, address=through_a_proxy(content.address), host="x"
    )
    return content, proxies


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def assert_exact(results: list[GenerationResult]) -> None:
    for first, result in enumerate(results, 1):
        output = result.result(timeout=PATIENCE_S).outputs[0]
        assert list(output.token_ids) == expected_tokens([first, 2, 3], TOKENS)
        assert output.finish_reason == "length"


def moved_on(remote: Remote, count: int = 2000) -> None:
    """Tokens go through the engine's proxy."""
    before = remote.proxies[-1].moved
    until(lambda: remote.proxies[-1].moved >= before + count)


def test_streams_go_on_exactly_over_connections_that_are_cut_and_healed(remote: Remote) -> None:
    results = [remote.stream(first) for first in range(1, 9)]
    for _ in range(3):
        moved_on(remote)
        remote.every(CutProxy.cut)
        remote.every(CutProxy.heal)
    assert_exact(results)
    assert min(proxy.accepted for proxy in remote.proxies) >= 2
    assert_exact([remote.stream(1)])


def test_a_connection_that_stays_cut_for_a_while_loses_nothing_and_requests_made_meanwhile_are_served(
    remote: Remote,
) -> None:
    results = [remote.stream(first) for first in range(1, 5)]
    moved_on(remote)
    remote.every(CutProxy.cut)
    results += [remote.stream(first) for first in range(5, 9)]
    time.sleep(0.5)  # the outage itself
    remote.every(CutProxy.heal)
    assert_exact(results)


def test_a_half_open_connection_that_comes_back_loses_nothing(remote: Remote) -> None:
    results = [remote.stream(first) for first in range(1, 5)]
    moved_on(remote)
    remote.every(CutProxy.freeze)
    results += [remote.stream(first) for first in range(5, 9)]
    time.sleep(0.5)  # the outage itself: nobody is told
    remote.every(CutProxy.thaw)
    assert_exact(results)


@pytest.mark.parametrize("remote", [{"dead_after_s": 1.0}], indirect=True)
def test_a_half_open_connection_that_stays_so_is_noticed_without_any_fin(remote: Remote) -> None:
    result = remote.stream(1, tokens=90_000)
    moved_on(remote)
    remote.every(CutProxy.freeze)
    with pytest.raises(EngineDeadError):
        result.result(timeout=PATIENCE_S)
    tokens = list(result.outputs[0].token_ids)
    assert tokens == expected_tokens([1, 2, 3], len(tokens))


def test_a_slow_and_distant_path_changes_nothing(remote: Remote) -> None:
    for proxy in remote.proxies:
        proxy.delay_s, proxy.bytes_per_s = 0.02, 200_000
    assert_exact([remote.stream(first) for first in range(1, 5)])


def test_one_connection_that_goes_silent_beside_a_good_one_is_given_up_and_made_anew(remote: Remote) -> None:
    results = [remote.stream(first) for first in range(1, 5)]
    moved_on(remote)
    remote.proxies[-1].freeze()
    until(lambda: remote.proxies[-1].accepted == 2)  # a second connection
    remote.proxies[-1].thaw()
    assert_exact(results)


@pytest.mark.parametrize("count", [1, 40])
@pytest.mark.parametrize("lane", ["watcher", "engine"])
def test_bytes_that_the_network_spoiled_never_reach_a_caller_and_hold_nobody_up(
    remote: Remote, lane: str, count: int
) -> None:
    proxy = remote.proxies[["watcher", "engine"].index(lane)]
    results = [remote.stream(first) for first in range(1, 5)]
    for _ in range(3):
        enough = proxy.moved + 500
        until(lambda enough=enough: proxy.moved >= enough)
        proxy.corrupt(count)
    assert_exact(results)
