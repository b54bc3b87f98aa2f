"""A hundred async callers share one engine in a process of its own; each gets its own tokens as they come."""

import asyncio

from tllm_core import GenerationExecutor, SamplingParams


async def caller(executor: GenerationExecutor, number: int) -> int:
    received = 0
    async for update in executor.generate_async([number, number + 1], SamplingParams(max_tokens=32)):
        received += len(update.outputs[0].token_ids_diff)
    return received


async def main() -> None:
    with GenerationExecutor.create(engine="echo", transport="zmq", launcher="spawn") as executor:
        counts = await asyncio.gather(*(caller(executor, number) for number in range(1, 101)))
    print(f"{len(counts)} callers received {sum(counts)} tokens")


if __name__ == "__main__":
    asyncio.run(main())
