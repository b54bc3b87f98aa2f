"""What this engine promises beyond what every engine does."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.generation.continuous_batching import FIFOScheduler
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor

from tllm_core import LLM, EngineDeadError, GenerationExecutor, RequestError, SamplingParams
from tllm_core.contracts.interfaces import EngineContext
from tllm_core.contracts.messages import EngineRequest, Output, TokenIds
from tllm_core.errors import ConfigError
from tllm_engine_transformers import TransformersSettings
from tllm_engine_transformers.engine import TransformersEngine

WAIT_S = 30.0
PROMPTS = [[7, 9, 300], [11], [5, 6, 7, 8, 9, 10, 11, 12], [319, 1, 319], list(range(20, 120)), [3, 3, 3, 3]]
WHOLE = SamplingParams(max_tokens=24, include_stop_str_in_output=True)


class Context(EngineContext):
    """Stands where the world does."""

    rank, world_size, rendezvous = 0, 1, None

    def __init__(self) -> None:
        self.woken = threading.Event()

    def wake(self) -> None:
        self.woken.set()

    def phase(self, name: str, done: float | None = None) -> None:
        pass

    def adopt(self, pid: int) -> None:
        pass


class Driven:
    """A started engine, driven from this thread."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.engine, self.context = TransformersEngine(TransformersSettings(**settings)), Context()
        self.info = self.engine.start(self.context)
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, Output] = {}

    def submit(self, request_id: int, prompt: list[int], sampling: SamplingParams = WHOLE) -> None:
        self.engine.submit(
            EngineRequest(request_id=request_id, prompt_token_ids=TokenIds.of(prompt), sampling=sampling)
        )

    def run(self, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not until():
            assert self.context.woken.wait(deadline - time.monotonic()), "the engine never called wake"
            self.context.woken.clear()
            for output in self.engine.step().outputs:
                self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
                if output.finish_reason is not None:
                    self.ends[output.request_id] = output

    @property
    def passes(self) -> int:
        """How many forward passes there were."""
        return int(self.engine._manager.current_batch)

    def holds_requests(self) -> bool:
        """Whether transformers still does."""
        return bool(self.engine._manager.batch_processor.has_pending_requests())


@contextmanager
def driven(settings: dict[str, Any]) -> Iterator[Driven]:
    subject = Driven(settings)
    try:
        yield subject
    finally:
        subject.engine.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture(scope="module")
def reference(settings: dict[str, Any]) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(settings["model"], dtype="float32")


def generated(reference: PreTrainedModel, prompt: list[int], max_tokens: int = WHOLE.max_tokens or 0) -> list[int]:
    """What `model.generate` answers, its end included."""
    ids = torch.tensor([prompt])
    whole = reference.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
    )
    return whole[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


@contextmanager
def inline(settings: dict[str, Any]) -> Iterator[GenerationExecutor]:
    with GenerationExecutor.create(
        engine="transformers", engine_options=settings, transport="inproc", launcher="inline"
    ) as executor:
        yield executor


# ------------------------------------------------------------------------------------------------------- tokens


def test_tokens_and_ends_are_those_of_generate(settings: dict[str, Any], reference: PreTrainedModel) -> None:
    with driven(settings) as subject:
        for number, prompt in enumerate(PROMPTS):
            subject.submit(number, prompt)
        subject.run(lambda: len(subject.ends) == len(PROMPTS))
    expected = [generated(reference, prompt) for prompt in PROMPTS]
    assert [subject.tokens[number] for number in range(len(PROMPTS))] == expected
    reasons = [subject.ends[number].finish_reason for number in range(len(PROMPTS))]
    assert reasons == ["stop" if tokens[-1] in subject.info.eos_token_ids else "length" for tokens in expected]
    assert set(reasons) == {"stop", "length"}, "these prompts no longer show both"


def test_the_token_that_ends_a_sequence_is_kept_back_unless_asked_for(
    settings: dict[str, Any], reference: PreTrainedModel
) -> None:
    free = generated(reference, PROMPTS[0])
    stop, place = free[2], free.index(free[2])
    sampling = SamplingParams(max_tokens=24, stop_token_ids=(stop,))
    with driven(settings) as subject:
        subject.submit(1, PROMPTS[0], sampling)
        subject.submit(2, PROMPTS[0], replace(sampling, include_stop_str_in_output=True))
        subject.run(lambda: len(subject.ends) == 2)
    assert (subject.tokens[1], subject.tokens[2]) == (free[:place], free[: place + 1])
    for end in subject.ends.values():
        assert (end.finish_reason, end.stop_reason) == ("stop", stop)
        assert end.metrics is not None
        assert end.metrics.generated_tokens == place + 1


def test_requests_that_the_kv_cache_has_no_room_for_wait_and_get_the_same(
    settings: dict[str, Any], reference: PreTrainedModel
) -> None:
    """Of the two pages each needs one at first: then one is put back, and computed again from its beginning."""
    prompts = [[number, *range(240)] for number in range(3)]
    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    with driven({**settings, "kv_tokens": 512}) as subject:
        for number, prompt in enumerate(prompts):
            subject.submit(number, prompt, sampling)
        subject.run(lambda: len(subject.ends) == len(prompts))
    reference.generation_config.eos_token_id, eos = None, reference.generation_config.eos_token_id
    try:
        expected = [generated(reference, prompt, 40) for prompt in prompts]
    finally:
        reference.generation_config.eos_token_id = eos
    assert [subject.tokens[number] for number in range(len(prompts))] == expected


def test_a_model_in_a_process_of_its_own_answers_text(settings: dict[str, Any], reference: PreTrainedModel) -> None:
    with LLM(engine="transformers", transport="zmq", launcher="spawn", **settings) as llm:
        outputs = llm.generate([" ".join(f"w{token}" for token in prompt) for prompt in PROMPTS], WHOLE)
        stats = llm.executor.stats()
    expected = [generated(reference, prompt) for prompt in PROMPTS]
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    assert [output.outputs[0].text for output in outputs] == [" ".join(f"w{t}" for t in e) for e in expected]
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.prompt_tokens == sum(map(len, PROMPTS))


# ------------------------------------------------------------------------------------------------------- aborts


def test_an_abort_frees_after_the_forward_pass_that_is_under_way(settings: dict[str, Any]) -> None:
    with driven(settings) as subject:
        subject.submit(1, PROMPTS[0], SamplingParams(max_tokens=300, ignore_eos=True))
        subject.run(lambda: bool(subject.tokens))
        subject.engine.abort(1)
        passes = subject.passes
        until(lambda: not subject.holds_requests())
        assert subject.passes <= passes + 1
        assert subject.engine.stats().running == 0


def test_a_cancellation_that_transformers_missed_is_asked_for_again(settings: dict[str, Any]) -> None:
    asked: list[str] = []
    with driven(settings) as subject:
        subject.submit(1, PROMPTS[0], SamplingParams(max_tokens=300, ignore_eos=True))
        subject.run(lambda: bool(subject.tokens))
        cancel = subject.engine._manager.cancel_request

        def lose_the_first(request_id: str) -> None:
            asked.append(request_id)
            if len(asked) > 1:
                cancel(request_id)

        subject.engine._manager.cancel_request = lose_the_first
        before = list(subject.tokens[1])
        subject.engine.abort(1)
        subject.run(lambda: len(asked) > 1)
        until(lambda: not subject.holds_requests())
        assert subject.passes < 300
        assert subject.tokens[1] == before


# ------------------------------------------------------------------------------------------------------- errors


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("error", "words"), [(RuntimeError("no memory left"), "no memory left"), (SystemExit(3), "told no reason")]
)
def test_what_ends_the_thread_ends_the_engine_after_what_it_had_produced(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, error: BaseException, words: str
) -> None:
    passes, update = count(1), ContinuousBatchProcessor.update_batch

    def update_or_fail(self: ContinuousBatchProcessor) -> None:
        if next(passes) > 3:
            raise error
        update(self)

    monkeypatch.setattr(ContinuousBatchProcessor, "update_batch", update_or_fail)
    with inline(settings) as executor:
        result = executor.generate_async(PROMPTS[0], SamplingParams(max_tokens=24, ignore_eos=True))
        with pytest.raises(EngineDeadError, match=words):
            result.result(WAIT_S)
        assert len(result.outputs[0].token_ids) == 3
        with pytest.raises(EngineDeadError, match=words):
            executor.generate_async(PROMPTS[1])


def test_what_was_produced_before_the_thread_failed_is_fetched_before_the_failure_is_raised(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nobody fetched anything meanwhile."""
    passes, update = count(1), ContinuousBatchProcessor.update_batch

    def update_or_fail(self: ContinuousBatchProcessor) -> None:
        if next(passes) > 3:
            raise RuntimeError("no memory left")
        update(self)

    monkeypatch.setattr(ContinuousBatchProcessor, "update_batch", update_or_fail)
    with driven(settings) as subject:
        subject.submit(1, PROMPTS[0], SamplingParams(max_tokens=24, ignore_eos=True))
        until(lambda: subject.engine._failure is not None)
        step = subject.engine.step()
        assert [len(output.token_ids) for output in step.outputs] == [3]
        assert step.again
        with pytest.raises(RuntimeError, match="no memory left"):
            subject.engine.step()


def test_a_request_that_transformers_fails_ends_alone(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, reference: PreTrainedModel
) -> None:
    take = FIFOScheduler.add_waiting_request

    def take_or_fail(self: FIFOScheduler, state: Any) -> None:
        if state.initial_tokens == PROMPTS[1]:
            raise ValueError("not this one")
        take(self, state)

    monkeypatch.setattr(FIFOScheduler, "add_waiting_request", take_or_fail)
    with inline(settings) as executor:
        beside = executor.generate_async(PROMPTS[0], WHOLE)
        with pytest.raises(RequestError, match="not this one"):
            executor.generate_async(PROMPTS[1], WHOLE).result(WAIT_S)
        assert list(beside.result(WAIT_S).outputs[0].token_ids) == generated(reference, PROMPTS[0])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"max_seq_len": 385}, "the model's own limit is 384"),
        ({"max_seq_len": 300, "kv_tokens": 256}, "kv_tokens 256"),
        ({"device": "nowhere"}, "device 'nowhere'"),
        ({"model": "/nowhere/at/all"}, "model '/nowhere/at/all' can't be loaded"),
        ({"kv_tokens": 0}, "kv_tokens must be at least 1"),
    ],
)
def test_settings_that_can_not_work_are_told(settings: dict[str, Any], changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Driven({**settings, **changed})


# ------------------------------------------------------------------------------------------------------ control


def test_the_prefix_cache_is_reset_while_requests_run(settings: dict[str, Any]) -> None:
    """A prompt of more than one page leaves it for others."""
    long = list(range(300))
    with inline(settings) as executor:
        assert executor.control("reset_prefix_cache") == [False]
        executor.generate(long, SamplingParams(max_tokens=2, ignore_eos=True))
        running = executor.generate_async(PROMPTS[0], SamplingParams(max_tokens=100, ignore_eos=True))
        assert executor.control("reset_prefix_cache") == [True]
        assert len(running.result(WAIT_S).outputs[0].token_ids) == 100
        assert executor.control("reset_prefix_cache") == [False]
