"""`tllm bench boundary`: an echo engine in another process, one token per stream and step, as fast as it can.

Every round measures the boundary and its limits one after the other, so that what else the machine does hits all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from msgspec import Struct, to_builtins

from tllm_core.errors import ConfigError
from tllm_core.executor import GenerationExecutor
from tllm_core.plugins.bench.limits import Raw, async_wakes_per_s, raw_zmq, sync_wakes_per_s
from tllm_core.plugins.bench.report import median, percentiles_us, table
from tllm_core.plugins.bench.streams import AsyncConsumers, Consumers, Delivery, SyncConsumers, Workload

LATENCY_REQUESTS = 300
PACED_STEP_S, PACED_TOKENS = 0.002, 4
"""A pace at which each token arrives by itself; an engine without one is many tokens ahead of any consumer."""
RAW_MESSAGES = 10_000
VERSIONS = ("tllm-core", "pyzmq", "msgspec", "uvloop")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--transport", default="zmq", metavar="NAME", help="how frames travel (default: zmq)")
    parser.add_argument("--launcher", default="spawn", metavar="NAME", help="who starts the engine (default: spawn)")
    parser.add_argument("--streams", type=_positive, default=256, metavar="N", help="requests at once (default: 256)")
    parser.add_argument("--steps", type=_positive, default=256, metavar="N", help="tokens of each (default: 256)")
    parser.add_argument(
        "--consumers", choices=("async", "sync"), default="async", help="a task per stream, or one thread"
    )
    parser.add_argument(
        "--loop", choices=("auto", "asyncio", "uvloop"), default="auto", help="auto: uvloop if installed"
    )
    parser.add_argument(
        "--repeat", type=_positive, default=3, metavar="N", help="rounds; medians are shown (default: 3)"
    )
    parser.add_argument("--json", action="store_true", help="print one object with every number")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def run(arguments: argparse.Namespace) -> int:
    """Measures and prints; 1 where a stream did not get exactly its tokens."""
    report = measure(arguments)
    print(json.dumps(report) if arguments.json else "\n".join(table(report)))
    return 0 if report["exact"] else 1


class Round(Struct, frozen=True):
    """One round: the boundary with and without the submit phase, and the limits."""

    whole: Delivery
    after_submit: Delivery
    wakes_per_s: float
    raw: Raw


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The whole report as plain data; rates are medians over the rounds."""
    work = Workload.of(arguments.streams, arguments.steps)
    loop, factory = _loop(arguments.loop)
    with _executor(arguments, work) as executor, asyncio.Runner(loop_factory=factory) as runner:
        consumers = AsyncConsumers(runner) if arguments.consumers == "async" else SyncConsumers()
        consumers.deliver(executor, work, paused=False)
        rounds = [_round(executor, work, consumers, runner) for _ in range(arguments.repeat)]
        first = consumers.latency(executor, LATENCY_REQUESTS, 1)
        executor.shutdown()
        with _executor(arguments, work, PACED_STEP_S) as paced:
            between = consumers.latency(paced, LATENCY_REQUESTS, PACED_TOKENS)
    return {
        **_setup(arguments, None if arguments.consumers == "sync" else loop),
        **_results(rounds, first.first_s, between.between_s),
        "exact": all(delivery.exact for r in rounds for delivery in (r.whole, r.after_submit))
        and first.exact
        and between.exact,
        "rounds": [_shown(r) for r in rounds],
    }


def _round(executor: GenerationExecutor, work: Workload, consumers: Consumers, runner: asyncio.Runner) -> Round:
    streams, steps = len(work.prompts), work.steps
    return Round(
        whole=consumers.deliver(executor, work, paused=False),
        after_submit=consumers.deliver(executor, work, paused=True),
        wakes_per_s=(
            runner.run(async_wakes_per_s(streams, steps))
            if isinstance(consumers, AsyncConsumers)
            else sync_wakes_per_s(streams, steps)
        ),
        raw=raw_zmq(work.frame_bytes(), RAW_MESSAGES),
    )


def _executor(arguments: argparse.Namespace, work: Workload, step_interval_s: float = 0.0) -> GenerationExecutor:
    return GenerationExecutor.create(
        engine="echo",
        engine_options={
            "max_batch_size": len(work.prompts),
            "max_seq_len": work.longest(),
            "vocab_size": work.vocab_size,
            "step_interval_s": step_interval_s,
        },
        transport=arguments.transport,
        launcher=arguments.launcher,
    )


def _loop(choice: str) -> tuple[str, Callable[[], asyncio.AbstractEventLoop]]:
    if choice == "asyncio" or (choice == "auto" and find_spec("uvloop") is None):
        return "asyncio", asyncio.new_event_loop
    try:
        import uvloop
    except ModuleNotFoundError:
        raise ConfigError("uvloop is not installed: pip install 'tllm-core[uvloop]', or use --loop asyncio") from None
    return "uvloop", uvloop.new_event_loop


# ----------------------------------------------------------------------------------------------------- the report


def _setup(arguments: argparse.Namespace, loop: str | None) -> dict[str, Any]:
    return {
        "benchmark": "boundary",
        "transport": arguments.transport,
        "launcher": arguments.launcher,
        "streams": arguments.streams,
        "steps": arguments.steps,
        "consumers": arguments.consumers,
        "loop": loop,
        "repeat": arguments.repeat,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in VERSIONS},
    }


def _shown(measured: Round) -> dict[str, Any]:
    shown: dict[str, Any] = to_builtins(measured)
    shown["raw"]["round_trip_us"] = percentiles_us(shown["raw"].pop("round_trips_s"))
    return shown


def _results(rounds: list[Round], first_s: list[float], between_s: list[float]) -> dict[str, Any]:
    whole = median(r.whole.tokens_per_s for r in rounds)
    after_submit = median(r.after_submit.tokens_per_s for r in rounds)
    wakes = median(r.wakes_per_s for r in rounds)
    raw_tokens = median(r.raw.messages_per_s * r.whole.streams for r in rounds)
    trips = percentiles_us([trip for r in rounds for trip in r.raw.round_trips_s])
    first = percentiles_us(first_s)
    return {
        "boundary": {
            "tokens_per_s": whole,
            "tokens_per_s_after_submit": after_submit,
            "updates_per_s": median(r.whole.updates / r.whole.seconds for r in rounds),
            "tokens_per_update": median(r.whole.tokens / r.whole.updates for r in rounds),
        },
        "single_stream": {
            "first_token_us": first,
            "inter_token_us": percentiles_us(between_s),
            "engine_step_us": PACED_STEP_S * 1e6,
        },
        "limits": {
            "wakes_per_s": wakes,
            "raw_zmq_messages_per_s": median(r.raw.messages_per_s for r in rounds),
            "raw_zmq_tokens_per_s": raw_tokens,
            "raw_zmq_frame_bytes": rounds[0].raw.frame_bytes,
            "raw_zmq_round_trip_us": trips,
        },
        "ratios": {
            "to_wake_limit": whole / wakes,
            "after_submit_to_wake_limit": after_submit / wakes,
            "to_raw_zmq": whole / raw_tokens,
            "first_token_to_round_trip": first["p50"] / trips["p50"],
        },
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {value}")
    return value
