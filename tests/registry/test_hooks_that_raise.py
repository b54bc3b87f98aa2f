"""Hooks of plugins that fail: who watches is detached, who decides refuses the request, and the rest goes on."""

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tllm_core import GenerationExecutor, NotAdmitted, Overloaded, RequestError, SamplingParams
from tllm_core.engines.echo import expected_tokens
from tllm_core.errors import PluginError
from tllm_core.hooks import Observers

Install = Callable[..., Path]
Enable = Callable[..., GenerationExecutor]

HEAD = """
from tllm_core.contracts.hookspecs import hookimpl
from tllm_core.errors import RequestError
seen = []
"""
WATCHER = (
    HEAD
    + """
@hookimpl
def tllm_batch_delivered(batch): seen.append("batch")

@hookimpl
def tllm_request_settled(client_id, outcome): seen.append(outcome)

@hookimpl
def tllm_executor_started(executor): seen.append("started")

@hookimpl
def tllm_executor_stopped(executor): seen.append("stopped")
"""
)


@pytest.fixture
def enable(install: Install, tmp_path: Path) -> Iterator[Enable]:
    """An executor with plugins made of code, in the order of their names; a plugin "x" is the module "hooks_x"."""
    executors = []

    def make(**plugins: str) -> GenerationExecutor:
        for name, code in plugins.items():
            install(f"acme-{name}", f"hooks_{name}", code, {f"plugin {name}": f"hooks_{name}"})
        (tmp_path / "tllm.toml").write_text(f"[plugins]\nenable = {list(plugins)}\n")
        executors.append(GenerationExecutor.create(str(tmp_path / "tllm.toml"), engine="echo", launcher="inline"))
        return executors[-1]

    yield make
    for executor in executors:
        executor.shutdown()


def answer(executor: GenerationExecutor, prompt: tuple[int, ...] = (1, 2, 3)) -> None:
    """One request is answered as without any plugin."""
    result = executor.generate(list(prompt), SamplingParams(max_tokens=4))
    assert list(result.outputs[0].token_ids) == list(expected_tokens(prompt, 4))


def seen(name: str) -> list[str]:
    return __import__(f"hooks_{name}").seen  # type: ignore[no-any-return]


@pytest.mark.parametrize("what", ["1 / 0", "raise SystemExit(3)", "raise BaseException('odd')"])
@pytest.mark.parametrize("hook", ["tllm_batch_delivered", "tllm_request_settled"])
def test_an_observer_that_raises_is_detached_and_logged_once_and_others_go_on(
    enable: Enable, caplog: pytest.LogCaptureFixture, hook: str, what: str
) -> None:
    bad = f"{HEAD}\n@hookimpl\ndef {hook}():\n    seen.append('called')\n    {what}\n"
    executor = enable(bad=bad, watcher=WATCHER)
    for _ in range(3):
        answer(executor)
    executor.shutdown()
    assert seen("bad") == ["called"]
    assert seen("watcher").count("length") == 3
    assert seen("watcher").count("batch") >= 3
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert record.getMessage() == f"an observer raised and was detached: {hook} of plugin 'bad' of acme-bad 1.0"


def test_an_observer_that_two_threads_see_fail_at_once_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    both = threading.Barrier(2)

    def observer(client_id: int, outcome: str) -> None:
        both.wait(30)
        raise ValueError(outcome)

    observers = Observers(settled=[observer])
    raised: list[BaseException] = []

    def settle() -> None:
        try:
            observers.on_settled([(1, "stop")])
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=settle) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert raised == []
    assert observers.settled == []
    assert len(caplog.records) == 1


@pytest.mark.parametrize("what", ["1 / 0", "raise SystemExit(3)"])
@pytest.mark.parametrize("hook", ["tllm_executor_started", "tllm_executor_stopped"])
def test_who_is_told_of_the_start_or_the_end_and_raises_keeps_nobody_from_it(
    enable: Enable, caplog: pytest.LogCaptureFixture, hook: str, what: str
) -> None:
    executor = enable(bad=f"{HEAD}\n@hookimpl\ndef {hook}(executor): {what}\n", watcher=WATCHER)
    answer(executor)
    executor.shutdown()
    assert [word for word in seen("watcher") if word in ("started", "stopped")] == ["started", "stopped"]
    assert [record.getMessage() for record in caplog.records] == [f"{hook} of plugin 'bad' of acme-bad 1.0 raised"]


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        ("tllm_admit(request): 1 / 0", PluginError, "tllm_admit of plugin 'picky' of acme-picky 1.0 raised ZeroDivisionE"),
        ("tllm_admit(request): raise SystemExit(3)", PluginError, "raised SystemExit: 3; the request was not taken"),
        ("tllm_admit(in_flight): return False", PluginError, "returned False, not a reason or None"),
        ("tllm_admit(in_flight): return f'{in_flight} in flight'", Overloaded, "0 in flight"),
        ("tllm_filter_request(info): return 'other'", PluginError, "returned 'other', not a GenerationRequest or None"),
        ("tllm_filter_request(request): raise RequestError('not that')", RequestError, "not that"),
        ("tllm_filter_request(request): return request.nope", PluginError, "raised AttributeError"),
        ("tllm_filter_result(request): return 5", PluginError, "returned 5, not a callable or None"),
    ],
)  # fmt: skip
def test_who_decides_and_fails_refuses_the_request_by_name_and_no_other(
    enable: Enable, code: str, error: type[Exception], message: str
) -> None:
    hook, _, body = code.partition(": ")
    # Only the prompts that begin with 9 meet the fault; hooks that don't see the request are called for each.
    guarded = f"    if request.prompt_token_ids[0] == 9: {body}\n" if "request)" in hook else f"    {body}\n"
    executor = enable(picky=f"{HEAD}\n@hookimpl\ndef {hook}:\n{guarded}", watcher=WATCHER)
    with pytest.raises(error, match=message):
        executor.generate_async([9, 2, 3], SamplingParams(max_tokens=4))
    if "request)" in hook:
        answer(executor)
    executor.shutdown()
    assert seen("watcher")[-1] == "stopped"


ADMISSION = (
    HEAD
    + """
from tllm_core.errors import Overloaded
@hookimpl
def tllm_admit(request, in_flight):
    seen.append(in_flight)
"""
)


@pytest.mark.parametrize("refusal", ["return 'never'", "raise Overloaded('never')"])
def test_generate_gives_up_where_room_is_refused_and_nothing_runs_that_could_make_some(
    enable: Enable, refusal: str
) -> None:
    executor = enable(closed=f"{ADMISSION}    {refusal}\n")
    for prompts in ([1, 2, 3], [[1, 2, 3], [4, 5]]):
        with pytest.raises(NotAdmitted, match=r"^never$"):
            executor.generate(prompts, SamplingParams(max_tokens=4))
    assert seen("closed") == [0, 0]


def test_generate_waits_for_room_that_own_requests_make_and_gives_up_once_none_is_left(enable: Enable) -> None:
    """Two at a time; a prompt that begins with 9 finds room never."""
    rule = "    return 'full' if in_flight >= 2 or request.prompt_token_ids[0] == 9 else None\n"
    executor = enable(narrow=ADMISSION + rule)
    many = [[number, 2] for number in range(1, 9)]
    for prompt, result in zip(many, executor.generate(many, SamplingParams(max_tokens=50)), strict=True):
        assert list(result.outputs[0].token_ids) == list(expected_tokens(prompt, 50))
    assert max(seen("narrow")) == 2
    with pytest.raises(NotAdmitted, match="full"):
        executor.generate([*many[:2], [9, 9]], SamplingParams(max_tokens=50))
    assert seen("narrow")[-1] == 0


def test_a_refusal_that_is_not_about_room_is_raised_by_generate_whatever_runs(enable: Enable) -> None:
    executor = enable(strict=ADMISSION + "    if request.prompt_token_ids[0] == 9: raise RequestError('not you')\n")
    with executor.generate_async([1, 2], SamplingParams(max_tokens=4000)), pytest.raises(RequestError, match="not you"):
        executor.generate([[3, 4], [9, 9]], SamplingParams(max_tokens=4))


def test_a_result_filter_that_raises_is_dropped_and_the_result_goes_on(enable: Enable) -> None:
    code = "\n@hookimpl\ndef tllm_filter_result(request):\n    return lambda result: seen.append(1) or 1 / 0\n"
    executor = enable(bad=HEAD + code)
    answer(executor)
    assert seen("bad") == [1]


@pytest.mark.timeout(60)
def test_a_result_filter_that_aborts_ends_its_request_and_no_other(enable: Enable) -> None:
    code = (
        "\n@hookimpl\ndef tllm_filter_result(request):\n"
        "    return (lambda result: result.abort()) if request.prompt_token_ids[0] == 9 else None\n"
    )
    executor = enable(stopper=HEAD + code)
    result = executor.generate_async([9, 9], SamplingParams(max_tokens=4000))
    assert [update.outputs[0].finish_reason for update in result] == ["abort"]
    assert result.outputs[0].token_ids == expected_tokens([9, 9], 4000)[: result.outputs[0].length]
    answer(executor)


def test_the_first_reason_and_the_first_replacement_count(enable: Enable) -> None:
    replace = (
        "import msgspec\n@hookimpl(tryfirst={first})\ndef tllm_filter_request(request, info):\n"
        "    seen.append(1)\n    return msgspec.structs.replace(request, priority={priority})\n"
    )
    executor = enable(
        late=HEAD + replace.format(first=False, priority=1), early=HEAD + replace.format(first=True, priority=2)
    )
    result = executor.generate_async([1, 2, 3], SamplingParams(max_tokens=4))
    result.result(30)
    assert result.request.priority == 2
    assert (seen("early"), seen("late")) == ([1], [])
