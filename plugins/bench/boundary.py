"""`tllm bench boundary`: an echo engine in another process, one token per stream and step, as fast as it can.

Every round measures every transport and its limits one after the other, so that what else the machine does hits all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import platform
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from msgspec import Struct, to_builtins

from tllm_core.errors import ConfigError
from tllm_core.executor import GenerationExecutor
from tllm_core.plugins.bench.contenders import Contender, add_transport_arguments, contenders, names_of, positive
from tllm_core.plugins.bench.limits import Raw, async_wakes_per_s, raw, sync_wakes_per_s
from tllm_core.plugins.bench.report import median, percentiles_us, table, usable_cores
from tllm_core.plugins.bench.streams import AsyncConsumers, Consumers, Delivery, Latency, SyncConsumers, Workload

LATENCY_REQUESTS = 300
LATENCY_ROUND_S = 1.0
"""Of the paced single streams in one round: at a slow pace there are fewer of them."""
PACED_STEP_S, PACED_TOKENS = 0.002, 4
"""A pace at which each token arrives by itself; an engine without one is many tokens ahead of any consumer."""
RAW_MESSAGES = 10_000
YARDSTICK = "zmq"
"""The transport that the others are compared with, where it is in the same run."""
VERSIONS = ("tllm-core", "pyzmq", "nats-py", "redis", "msgspec", "uvloop")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_transport_arguments(parser)
    parser.add_argument("--launcher", metavar="NAME", help="who starts the engine (default: what fits the transport)")
    parser.add_argument("--streams", type=positive, default=256, metavar="N", help="requests at once (default: 256)")
    parser.add_argument("--steps", type=positive, default=256, metavar="N", help="tokens of each (default: 256)")
    parser.add_argument(
        "--step-ms", type=_milliseconds, metavar="MS", help="measure also with a step every MS, as a real model's"
    )
    parser.add_argument(
        "--consumers", choices=("async", "sync"), default="async", help="a task per stream, or one thread"
    )
    parser.add_argument(
        "--loop", choices=("auto", "asyncio", "uvloop"), default="auto", help="auto: uvloop if installed"
    )
    parser.add_argument(
        "--repeat", type=positive, default=3, metavar="N", help="rounds; medians are shown (default: 3)"
    )
    parser.add_argument("--json", action="store_true", help="print one object with every number")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def run(arguments: argparse.Namespace) -> int:
    """Measures and prints; 1 where a stream did not get exactly its tokens."""
    report = measure(arguments)
    print(json.dumps(report) if arguments.json else "\n".join(table(report)))
    return 0 if report["exact"] else 1


class Round(Struct, frozen=True):
    """One round of one transport: the boundary with and without the submit phase and at a pace, and the limits."""

    whole: Delivery
    after_submit: Delivery
    paced: Delivery | None
    first: Latency
    between: Latency
    wakes_per_s: float
    raw: Raw

    @property
    def exact(self) -> bool:
        parts = (self.whole, self.after_submit, self.paced, self.first, self.between)
        return all(part.exact for part in parts if part is not None)


class Engines(Struct, frozen=True):
    """Two engines behind one transport: one steps as fast as it can, one at a pace."""

    contender: Contender
    fast: GenerationExecutor
    paced: GenerationExecutor


class Bench(Struct, frozen=True):
    """What is the same for all transports. step_s: of the paced engines; is_paced: whether their throughput is measured too."""

    work: Workload
    consumers: Consumers
    runner: asyncio.Runner
    step_s: float
    is_paced: bool
    repeat: int

    @contextlib.contextmanager
    def engines(self, contender: Contender) -> Iterator[Engines]:
        with self._engine(contender, 0.0) as fast, self._engine(contender, self.step_s) as paced:
            self.consumers.deliver(fast, self.work, paused=False)
            self.consumers.latency(paced, 2, PACED_TOKENS)
            yield Engines(contender, fast, paced)

    def _engine(self, contender: Contender, step_interval_s: float) -> GenerationExecutor:
        options = {
            "max_batch_size": len(self.work.prompts),
            "max_seq_len": self.work.longest(),
            "vocab_size": self.work.vocab_size,
            "step_interval_s": step_interval_s,
        }
        return GenerationExecutor.create(contender.settings(options))

    def round(self, engines: Engines) -> Round:
        consumers, work, contender = self.consumers, self.work, engines.contender
        paced_requests = min(LATENCY_REQUESTS, LATENCY_ROUND_S / (self.step_s * PACED_TOKENS))
        return Round(
            whole=consumers.deliver(engines.fast, work, paused=False),
            after_submit=consumers.deliver(engines.fast, work, paused=True),
            paced=consumers.deliver(engines.paced, work, paused=False) if self.is_paced else None,
            first=consumers.latency(engines.fast, max(2, LATENCY_REQUESTS // self.repeat), 1),
            between=consumers.latency(engines.paced, max(2, int(paced_requests)), PACED_TOKENS),
            wakes_per_s=self._wakes_per_s(),
            raw=raw(contender.library, contender.options, work.frame_bytes(), RAW_MESSAGES),
        )

    def _wakes_per_s(self) -> float:
        streams, steps = len(self.work.prompts), self.work.steps
        if isinstance(self.consumers, AsyncConsumers):
            return self.runner.run(async_wakes_per_s(streams, steps))
        return sync_wakes_per_s(streams, steps)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The whole report as plain data; rates are medians over the rounds."""
    names = names_of(arguments)
    loop, factory = _loop(arguments.loop)
    step_s = PACED_STEP_S if arguments.step_ms is None else arguments.step_ms / 1000
    with contextlib.ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner(loop_factory=factory))
        consumers = AsyncConsumers(runner) if arguments.consumers == "async" else SyncConsumers()
        work = Workload.of(arguments.streams, arguments.steps)
        bench = Bench(work, consumers, runner, step_s, arguments.step_ms is not None, arguments.repeat)
        chosen = stack.enter_context(contenders(arguments, names))
        running = [stack.enter_context(bench.engines(contender)) for contender in chosen]
        rounds = [[bench.round(engines) for engines in running] for _ in range(arguments.repeat)]
    by_transport = {contender.label: [r[at] for r in rounds] for at, contender in enumerate(chosen)}
    results = {name: _results(of, by_transport.get(YARDSTICK)) for name, of in by_transport.items()}
    for contender in chosen:
        results[contender.label]["broker"] = contender.broker
    return {
        **_setup(arguments, None if arguments.consumers == "sync" else loop),
        "step_us": step_s * 1e6,
        "exact": all(r.exact for of in by_transport.values() for r in of),
        "transports": results,
    }


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
        "launcher": arguments.launcher,
        "streams": arguments.streams,
        "steps": arguments.steps,
        "step_ms": arguments.step_ms,
        "consumers": arguments.consumers,
        "loop": loop,
        "repeat": arguments.repeat,
        "cores": usable_cores(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in VERSIONS},
    }


def _results(rounds: Sequence[Round], yardstick: Sequence[Round] | None) -> dict[str, Any]:
    first = percentiles_us([s for r in rounds for s in r.first.first_s])
    trips = percentiles_us([trip for r in rounds for trip in r.raw.round_trips_s])
    return {
        "exact": all(r.exact for r in rounds),
        "boundary": {
            "tokens_per_s": median(r.whole.tokens_per_s for r in rounds),
            "tokens_per_s_after_submit": median(r.after_submit.tokens_per_s for r in rounds),
            **({"tokens_per_s_paced": median(paced)} if (paced := _paced(rounds)) else {}),
            "updates_per_s": median(r.whole.updates / r.whole.seconds for r in rounds),
            "tokens_per_update": median(r.whole.tokens / r.whole.updates for r in rounds),
        },
        "single_stream": {
            "first_token_us": first,
            "inter_token_us": percentiles_us([s for r in rounds for s in r.between.between_s]),
        },
        "limits": {
            "wakes_per_s": median(r.wakes_per_s for r in rounds),
            "raw_library": rounds[0].raw.library,
            "raw_messages_per_s": median(r.raw.messages_per_s for r in rounds),
            "raw_tokens_per_s": median(r.raw.messages_per_s * r.whole.streams for r in rounds),
            "raw_frame_bytes": rounds[0].raw.frame_bytes,
            "raw_round_trip_us": trips,
        },
        "ratios": {**_ratios(rounds, yardstick), "first_token_to_round_trip": first["p50"] / trips["p50"]},
        "rounds": [_shown(r) for r in rounds],
    }


def _ratios(rounds: Sequence[Round], yardstick: Sequence[Round] | None) -> dict[str, float]:
    """Each is the median of the rounds' own ratios: what disturbs a round hits both sides of it."""
    ratios = {
        "to_wake_limit": median(r.whole.tokens_per_s / r.wakes_per_s for r in rounds),
        "after_submit_to_wake_limit": median(r.after_submit.tokens_per_s / r.wakes_per_s for r in rounds),
        "to_raw": median(r.whole.tokens_per_s / (r.raw.messages_per_s * r.whole.streams) for r in rounds),
    }
    if yardstick is not None:
        pairs = list(zip(rounds, yardstick, strict=True))
        ratios["to_zmq"] = median(r.whole.tokens_per_s / other.whole.tokens_per_s for r, other in pairs)
        if _paced(rounds):
            ratios["paced_to_zmq"] = median(a / b for a, b in zip(_paced(rounds), _paced(yardstick), strict=True))
    return ratios


def _paced(rounds: Sequence[Round]) -> list[float]:
    return [r.paced.tokens_per_s for r in rounds if r.paced is not None]


def _shown(measured: Round) -> dict[str, Any]:
    shown: dict[str, Any] = to_builtins(measured)
    shown["raw"]["round_trip_us"] = percentiles_us(shown["raw"].pop("round_trips_s"))
    shown["first_token_us"] = percentiles_us(shown.pop("first")["first_s"])
    shown["inter_token_us"] = percentiles_us(shown.pop("between")["between_s"])
    return shown


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _milliseconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        value = float(text)
        if 0 < value <= 10_000:
            return value
    raise argparse.ArgumentTypeError(f"must be a number of more than 0 and at most 10000, not {text!r}")
