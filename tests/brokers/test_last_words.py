"""What an engine or a frontend does last, and what it does not do at all for a while, over a broker."""

import itertools
import time

from tests.brokers.conftest import Setup, until
from tllm_core import SamplingParams
from tllm_core.engines.echo import expected_tokens

HELD_S = 2.5
"""More than twice `dead_after_s`."""


def test_an_engine_that_is_stopped_right_after_the_last_result_has_told_it(broker: Setup) -> None:
    owned = broker.shared(step_interval_s=0.0)
    attached = broker.attach(owned)
    prompts = [[number, 7] for number in range(1, 65)]
    count = 400
    results = [attached.generate_async(prompt, SamplingParams(max_tokens=count)) for prompt in prompts]
    until(
        lambda: owned.requests() == 0 and owned.executor.stats().generated_tokens >= count * len(prompts), "all ended"
    )
    owned.executor.shutdown()
    for prompt, result in zip(prompts, results, strict=True):
        output = result.result(30).outputs[0]
        assert (output.token_ids, output.finish_reason) == (expected_tokens(prompt, count), "length")


def test_beats_go_on_while_the_engine_holds_its_interpreters_lock(broker: Setup) -> None:
    held = {"at": "step", "do": "hold_gil", "seconds": HELD_S, "after": 20, "times": 1}
    owned = broker.shared(step_interval_s=0.01, faults=[held])
    attached = broker.attach(owned)
    tokens, seen = [], []
    for update in attached.generate_async([5, 6], SamplingParams(max_tokens=200)):
        tokens += update.outputs[0].token_ids_diff
        beat = attached._frontend.last_beat
        seen.append((time.monotonic(), 0 if beat is None else beat.number))
    assert tokens == expected_tokens([5, 6], 200)
    gap_s, beats = max((after[0] - before[0], after[1] - before[1]) for before, after in itertools.pairwise(seen))
    assert gap_s > HELD_S / 2
    assert beats >= 5  # of the 25 that fall into the pause
    assert attached.health().ok
    assert owned.executor.health().ok
