"""The echo engine on its own: what it answers, and when."""

import threading
import time

import pytest
from msgspec import convert

from tllm_core.contracts.interfaces import EngineContext
from tllm_core.contracts.messages import EngineRequest, Output, SamplingParams, TokenIds
from tllm_core.engines.echo import EchoSettings, expected_tokens
from tllm_core.engines.echo.engine import EchoEngine, prepare
from tllm_core.errors import ControlError, RequestError


class Context(EngineContext):
    rank = 0
    world_size = 1
    rendezvous = None

    def __init__(self):
        self.woken = threading.Event()
        self.phases = []

    def wake(self):
        self.woken.set()

    def phase(self, name, done=None):
        self.phases.append((name, done))

    def adopt(self, pid):
        raise AssertionError("echo starts no process")


@pytest.fixture
def started():
    engines = []

    def start(**settings):
        engine = EchoEngine(convert(settings, EchoSettings))
        context = Context()
        engine.start(context)
        engines.append(engine)
        return engine, context

    yield start
    for engine in engines:
        engine.close()


def request(request_id=1, prompt=(1, 2, 3), extra=None, **sampling):
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=TokenIds.of(prompt),
        sampling=SamplingParams(**sampling),
        extra=extra,
    )


def run(engine) -> list[Output]:
    outputs = []
    while True:
        step = engine.step()
        outputs += step.outputs
        if not step.again:
            return outputs


def tokens_of(outputs, request_id=1, index=0):
    mine = [output for output in outputs if (output.request_id, output.index) == (request_id, index)]
    return [token for output in mine for token in output.token_ids]


def test_answers_with_the_expected_tokens_and_then_owes_nothing(started):
    engine, _ = started()
    engine.submit(request(max_tokens=600))
    outputs = run(engine)
    assert tokens_of(outputs) == expected_tokens([1, 2, 3], 600)
    assert [output.finish_reason for output in outputs] == [None] * 599 + ["length"]
    assert (outputs[-1].metrics.prompt_tokens, outputs[-1].metrics.generated_tokens) == (3, 600)
    assert engine.stats().running == 0
    assert engine.stats().generated_tokens == 600
    assert engine.step().again is False


def test_the_documented_formula_holds():
    from zlib import crc32

    prompt = [5, 6]
    salt = crc32(b"\5\0\0\0\6\0\0\0")
    assert expected_tokens(prompt, 3, 2, vocab_size=1000) == [
        (prompt[i % 2] + 7919 * i + 104729 * 2 + salt) % 1000 for i in range(3)
    ]
    assert expected_tokens([1, 2, 3, 4], 4) != expected_tokens([1, 2, 3, 5], 4)


def test_sequences_of_one_request_differ_and_each_ends_once(started):
    engine, _ = started()
    engine.submit(request(max_tokens=4, n=3))
    outputs = run(engine)
    for index in range(3):
        assert tokens_of(outputs, index=index) == expected_tokens([1, 2, 3], 4, index)
    assert sorted(output.index for output in outputs if output.finish_reason) == [0, 1, 2]
    assert [bool(output.metrics) for output in outputs if output.finish_reason] == [False, False, True]


def test_stop_tokens_end_a_sequence_but_not_before_min_tokens(started):
    engine, _ = started(vocab_size=5)
    answer = expected_tokens([1, 2, 3], 50, vocab_size=5)
    stop = answer[2]
    first = answer.index(stop)
    engine.submit(request(1, max_tokens=50, stop_token_ids=(stop,)))
    engine.submit(request(2, max_tokens=50, min_tokens=first + 1, stop_token_ids=(stop,)))
    outputs = run(engine)
    later = answer.index(stop, first + 1)
    assert tokens_of(outputs, 1) == answer[: first + 1]
    assert tokens_of(outputs, 2) == answer[: later + 1]
    assert {(o.finish_reason, o.stop_reason) for o in outputs if o.finish_reason} == {("stop", stop)}


@pytest.mark.parametrize("per_step", [1, 3, 8])
def test_tokens_per_step_changes_the_number_of_steps_only(started, per_step):
    engine, _ = started(tokens_per_step=per_step)
    engine.submit(request(max_tokens=8, logprobs=2))
    outputs = run(engine)
    assert tokens_of(outputs) == expected_tokens([1, 2, 3], 8)
    assert len(outputs) == -(-8 // per_step)
    for output in outputs:
        assert [position[0].token_id for position in output.logprobs] == list(output.token_ids)
        assert all(len(position) == 3 for position in output.logprobs)


def test_extra_is_validated_and_comes_back(started):
    engine, _ = started()
    engine.submit(request(max_tokens=2, extra={"tag": {"a": [1]}, "pad_bytes": 4}))
    assert [output.extra for output in run(engine)] == [{"pad": bytes(4)}, {"pad": bytes(4), "tag": {"a": [1]}}]
    with pytest.raises(RequestError, match="tga"):
        engine.submit(request(2, extra={"tga": 1}))


def test_what_is_above_the_batch_size_waits_in_order(started):
    engine, _ = started(max_batch_size=2)
    for request_id in range(1, 5):
        engine.submit(request(request_id, max_tokens=2))
    assert [output.request_id for output in run(engine)] == [1, 2, 1, 2, 3, 4, 3, 4]


@pytest.mark.parametrize("steps", [0, 1])
def test_an_aborted_request_gives_nothing_more_and_frees_its_place(started, steps):
    engine, _ = started(max_batch_size=2)
    engine.submit(request(1, max_tokens=9, n=2))
    engine.submit(request(2, max_tokens=2))
    for _ in range(steps):
        engine.step()
    engine.abort(1)
    engine.abort(1)
    engine.abort(77)
    assert [output.request_id for output in run(engine)] == [2, 2]
    assert engine.stats().running == engine.stats().waiting == 0


@pytest.mark.parametrize(
    ("sampling", "prompt", "field"),
    [({"max_tokens": 8}, (1, 2, 3), "max_tokens"), ({}, (), "prompt_token_ids"), ({"n": 300}, (1,), "n")],
)
def test_what_can_never_run_is_refused_alone(started, sampling, prompt, field):
    engine, _ = started(max_seq_len=10)
    with pytest.raises(RequestError) as refused:
        engine.submit(request(1, prompt, **sampling))
    assert refused.value.field == field
    engine.submit(request(2, max_tokens=1))
    assert len(run(engine)) == 1


def test_a_paced_step_does_not_block_and_wakes_when_due(started):
    began, outputs = time.monotonic(), []
    engine, context = started(step_interval_s=0.02)  # the pace is kept from here on
    engine.submit(request(max_tokens=3))
    while len(outputs) < 3:
        context.woken.clear()
        step = engine.step()
        outputs += step.outputs
        assert step.again is False
        assert len(outputs) == 3 or context.woken.wait(10)
    assert time.monotonic() - began >= 0.035
    assert tokens_of(outputs) == expected_tokens([1, 2, 3], 3)


def test_loading_takes_its_time_and_reports_it(started):
    _, context = started(load_delay_s=0.05)
    assert context.phases[0] == ("loading echo weights", pytest.approx(0, abs=0.5))


def test_controls_answer_per_rank(started):
    engine, _ = started(world_size=2)
    assert engine.control("ping", [1, "a"], None) == [[1, "a"], [1, "a"]]
    assert engine.control("ping", [], [1]) == [[]]
    with pytest.raises(ControlError, match="no way"):
        engine.control("fail", ["no way"], None)


def test_a_paused_engine_steps_only_after_resume(started):
    engine, _ = started()
    engine.submit(request(max_tokens=1))
    engine.control("pause", [], None)
    assert run(engine) == []
    engine.control("resume", [], None)
    assert len(run(engine)) == 1


# ------------------------------------------------------------------------------------------------------ faults


def fault(**fields):
    return {"faults": [fields]}


@pytest.mark.parametrize("at", ["construct", "start", "prepare"])
def test_a_start_up_fault_raises_where_it_is_told_to(started, at):
    settings = fault(at=at, do="raise", message="bad knob 17")

    def prepare_and_start():
        prepare(convert(settings, EchoSettings), lambda name, done: None)
        started(**settings)

    with pytest.raises(RuntimeError, match="bad knob 17") as raised:
        prepare_and_start()
    assert any(entry.name in ("prepare", "__init__", "start") for entry in raised.traceback)


def test_a_submit_fault_with_a_token_hits_that_request_alone(started):
    engine, _ = started(**fault(at="submit", do="request_error", token=666, message="poison"))
    engine.submit(request(1, max_tokens=1))
    with pytest.raises(RequestError, match="poison"):
        engine.submit(request(2, (5, 666)))
    assert [output.request_id for output in run(engine)] == [1]


def test_a_step_fault_ends_one_request_after_the_given_number_of_steps(started):
    engine, _ = started(**fault(at="step", do="request_error", token=666, after=2))
    engine.submit(request(1, max_tokens=4))
    engine.submit(request(2, (666,), max_tokens=4, n=2))
    outputs = run(engine)
    assert len(tokens_of(outputs, 1)) == 4
    assert len(tokens_of(outputs, 2)) == 2
    assert [output.request_id for output in outputs if output.error] == [2]


def test_after_and_times_bound_a_fault(started):
    engine, _ = started(**fault(at="submit", do="request_error", after=1, times=1))
    engine.submit(request(1, max_tokens=1))
    with pytest.raises(RequestError):
        engine.submit(request(2))
    engine.submit(request(3, max_tokens=1))
    assert [output.request_id for output in run(engine)] == [1, 3]


def test_a_fault_of_another_rank_does_not_happen_here(started):
    engine, _ = started(**fault(at="submit", do="raise", rank=1))
    engine.submit(request(1, max_tokens=1))
    assert len(run(engine)) == 1


def test_holding_the_lock_stops_every_other_thread(started):
    engine, _ = started(**fault(at="step", do="hold_gil", seconds=0.3))
    ticks, done = [], threading.Event()

    def tick():
        while not done.wait(0.005):
            ticks.append(time.monotonic())

    engine.submit(request(max_tokens=1))
    thread = threading.Thread(target=tick)
    thread.start()
    began = time.monotonic()
    engine.step()
    ended = time.monotonic()
    done.set()
    thread.join()
    assert ended - began >= 0.25
    assert len([tick for tick in ticks if began + 0.05 < tick < ended - 0.05]) == 0
