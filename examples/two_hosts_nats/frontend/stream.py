"""Attaches to the echo engine of engine.json, streams one answer, and says how it ended: `stream.py [TOKENS]`."""

import sys

from tllm_core import EngineDeadError, GenerationExecutor, SamplingParams, TllmError
from tllm_core.engines.echo import expected_tokens

PROMPT = [1, 2, 3]


def stream(executor: GenerationExecutor, count: int) -> list[int]:
    """Prints the tokens as they come."""
    result = executor.generate_async(PROMPT, SamplingParams(max_tokens=count))
    for update in result:
        print(*update.outputs[0].token_ids_diff, flush=True)
    return list(result.outputs[0].token_ids)


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    try:
        with GenerationExecutor.attach(config="tllm.toml") as executor:
            tokens = stream(executor, count)
    except EngineDeadError as error:
        print(f"the engine is gone: {error.root_cause.message}")
        return 1
    except (
        TllmError
    ) as error:  # the broker did not come back, the engine gave this frontend up, or a mistake in the settings
        print(f"{type(error).__name__}: {error}")
        return 1
    exact = tokens == expected_tokens(PROMPT, count)
    print(f"{len(tokens)} tokens, {'exactly' if exact else 'NOT'} what the engine produced")
    return 0 if exact else 1


if __name__ == "__main__":
    sys.exit(main())
