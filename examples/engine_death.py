"""The engine's process is killed while three callers wait: all of them hear why, at once, and nobody hangs."""

import os
import signal
from collections.abc import Iterator

from tllm_core import EngineDeadError, GenerationExecutor, GenerationResult, SamplingParams

PACE = {"step_interval_s": 0.05, "max_seq_len": 100_000}


def outcomes(results: list[GenerationResult]) -> Iterator[str]:
    for result in results:
        try:
            result.result(timeout=10)
        except EngineDeadError as error:
            yield f"{len(result.outputs[0].token_ids)} tokens, then: {error.root_cause.message}"


def main() -> None:
    with GenerationExecutor.create(engine="echo", engine_options=PACE, launcher="spawn") as executor:
        results = [executor.generate_async([number], SamplingParams(max_tokens=50_000)) for number in (1, 2, 3)]
        next(iter(results[0]))  # it is running
        os.kill(executor.health().ranks[0].pid, signal.SIGKILL)
        print(*outcomes(results), sep="\n")
        print(f"healthy: {executor.check_health()}")


if __name__ == "__main__":
    main()
