"""What is larger than a broker takes in one piece crosses in several, or is refused in words before anything was sent."""

import pytest

from tests.brokers.conftest import Setup
from tllm_core import SamplingParams
from tllm_core.engines.echo import expected_tokens

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize("size", [200 * KIB, MIB + 4, 65_000_000], ids=["200KiB", "1MiB+", "65MB"])
def test_a_large_prompt_arrives_whole(broker: Setup, size: int) -> None:
    executor = broker.own(max_seq_len=size // 4 + 100)
    prompt = list(range(1, 30_000)) * (size // 4 // 29_999 + 1)
    prompt = prompt[: size // 4]
    result = executor.generate(prompt, SamplingParams(max_tokens=5))
    assert result.outputs[0].token_ids == expected_tokens(prompt, 5)


def test_steps_with_twenty_logprobs_for_256_streams_arrive_whole(broker: Setup) -> None:
    executor = broker.own(max_batch_size=256, step_interval_s=0.01)
    params = SamplingParams(max_tokens=8, logprobs=20)
    results = [executor.generate_async([number + 1, 7], params) for number in range(256)]
    for number, result in enumerate(results):
        output = result.result(60).outputs[0]
        assert output.token_ids == expected_tokens([number + 1, 7], 8)
        assert [len(entry) >= 20 for entry in output.logprobs] == [True] * 8
