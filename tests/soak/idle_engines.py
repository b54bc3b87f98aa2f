"""Engines that idle: `idle_engines.py SECONDS`. Starts one over each transport, waits, asks each, prints what it saw as JSON.

It ends early, with nothing said, when its stdin closes: whoever started it is gone or has lost interest.
"""

import contextlib
import json
import logging
import select
import sys
import time

import redis

from tllm_core import GenerationExecutor, SamplingParams
from tllm_core.conformance.broker import nats_server, valkey_server

TRANSPORTS = {
    "zmq": "zmq",
    "nats": "tllm_core.transports.nats:NatsTransport",
    "redis": "tllm_core.transports.redis:RedisTransport",
}
PROMPT, TOKENS = [3, 1, 4, 1, 5], 20


class Warnings(logging.Handler):
    """Keeps what is logged as a warning or worse."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.name}: {record.getMessage()}")


def ask(executor: GenerationExecutor) -> tuple[list[int], float]:
    """Its tokens, and the seconds until the last one."""
    started = time.monotonic()
    result = executor.generate_async(PROMPT, SamplingParams(max_tokens=TOKENS)).result(60)
    return list(result.outputs[0].token_ids), time.monotonic() - started


def main(seconds: float) -> None:
    warned = Warnings()
    logging.getLogger().addHandler(warned)
    with contextlib.ExitStack() as stack:
        nats, valkey = stack.enter_context(nats_server()), stack.enter_context(valkey_server())
        urls = {"nats": nats.url, "redis": valkey.url}
        looker = stack.enter_context(contextlib.closing(redis.Redis.from_url(valkey.url, socket_timeout=None)))
        executors = {
            name: stack.enter_context(
                GenerationExecutor.create(
                    engine="echo", transport=transport, transport_options={"url": urls[name]} if name in urls else {}
                )
            )
            for name, transport in TRANSPORTS.items()
        }

        def connections() -> dict[str, int]:
            """How many connections the brokers have ever had."""
            return {
                "nats": int(nats.monitor("varz")["total_connections"]),
                "redis": int(looker.info("stats")["total_connections_received"]),
            }

        for executor in executors.values():
            ask(executor)
        before = connections()
        if select.select([sys.stdin], [], [], seconds)[0]:
            return
        healthy = {name: executor.check_health() for name, executor in executors.items()}
        answers = {name: ask(executor) for name, executor in executors.items()}
        told = {
            "idle_s": seconds,
            "healthy": healthy,
            "tokens": {name: tokens for name, (tokens, _) in answers.items()},
            "took_s": {name: took for name, (_, took) in answers.items()},
            "connections": [before, connections()],
            "warnings": warned.lines,
            "broker_errors": [line for line in nats.output.splitlines() if "[ERR]" in line or "[WRN]" in line],
        }
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
