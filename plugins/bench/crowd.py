"""Streams on threads and on an event loop, and when each of them hears that its engine is gone.

As a process, `python -m tllm_core.plugins.bench.crowd`, it is a frontend that attaches: its stdin says to what, and it prints
"begun", then its times. These are of the monotonic clock, which all processes of a host share.
"""

from __future__ import annotations

import asyncio
import functools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from tllm_core.contracts.messages import Plain, SamplingParams
from tllm_core.errors import EngineDeadError, TllmError
from tllm_core.executor import GenerationExecutor
from tllm_core.ledger.result import GenerationResult

SYNC_PART = 3 / 16
"""Of the streams that are read by a thread each; the others are tasks of one loop."""
PATIENCE_S = 60.0
ENDLESS = 1_000_000
MAX_SEQ_LEN = ENDLESS + 100


class Told(Protocol):
    """Some streams whose engine is about to end."""

    def wait_begun(self) -> None:
        """Returns once each of them has received something."""

    def wait_told(self) -> list[float]:
        """When each was told, in monotonic seconds; one that ended in another way, or not at all, is missing."""

    def close(self) -> None:
        """Leaves the engine alone."""


class Crowd:
    """The streams of one executor."""

    def __init__(self, executor: GenerationExecutor, streams: int, max_tokens: int = ENDLESS) -> None:
        self._begun = threading.Semaphore(0)
        self._told: list[float] = []
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self._results = [executor.generate_async([stream + 1, 7], params) for stream in range(streams)]
        sync = round(streams * SYNC_PART)
        work = [functools.partial(self._read, result) for result in self._results[:sync]]
        work.append(functools.partial(self._run, self._results[sync:]))
        self._threads = [threading.Thread(target=part, name="bench-stream", daemon=True) for part in work]
        for thread in self._threads:
            thread.start()

    def wait_begun(self) -> None:
        for _ in self._results:
            if not self._begun.acquire(timeout=PATIENCE_S):
                raise TllmError(f"a stream received nothing within {PATIENCE_S:.0f} s")

    def wait_told(self) -> list[float]:
        deadline = time.monotonic() + PATIENCE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return list(self._told)

    def close(self) -> None:
        for result in self._results:
            result.abort()

    def _read(self, result: GenerationResult) -> None:
        try:
            next(result)
            self._begun.release()
            for _ in result:
                pass
        except TllmError as error:
            self._note(error)

    async def _read_async(self, result: GenerationResult) -> None:
        try:
            await anext(result)
            self._begun.release()
            async for _ in result:
                pass
        except TllmError as error:
            self._note(error)

    def _note(self, error: TllmError) -> None:
        if isinstance(error, EngineDeadError):
            self._told.append(time.monotonic())

    def _run(self, results: list[GenerationResult]) -> None:
        asyncio.run(self._read_all(results))

    async def _read_all(self, results: list[GenerationResult]) -> None:
        await asyncio.gather(*map(self._read_async, results))


class CrowdProcess:
    """A crowd in a process of its own, which attaches to the engine."""

    def __init__(self, attach_file: Path, streams: int, transport_options: Mapping[str, Plain]) -> None:
        command = [sys.executable, "-m", __name__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None
        words = {"attach_file": str(attach_file), "streams": streams, "transport_options": dict(transport_options)}
        self._process.stdin.write(json.dumps(words))
        self._process.stdin.close()

    def wait_begun(self) -> None:
        if self._line() != "begun\n":
            raise TllmError("the attached frontend did not start; see its error above")

    def wait_told(self) -> list[float]:
        line = self._line()
        return [float(at) for at in json.loads(line)] if line else []

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()  # it ends by its own patience


def main() -> None:
    """The process."""
    words = json.load(sys.stdin)
    with GenerationExecutor.attach(words["attach_file"], transport_options=words["transport_options"]) as executor:
        crowd = Crowd(executor, words["streams"])
        crowd.wait_begun()
        print("begun", flush=True)
        print(json.dumps(crowd.wait_told()), flush=True)


if __name__ == "__main__":
    main()
