"""The end of a script whose threads or pools still use its engine: Python waits for them, and so does the engine."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.conftest import Trace
from tllm_core.engines.echo import expected_tokens

START = {
    "thread": "threading.Thread(target={work}).start()",
    "pool": "ThreadPoolExecutor(1).submit({work})",
}
HEAD = "from concurrent.futures import ThreadPoolExecutor\n"


def body(text: str, how: str, work: str) -> str:
    lines = text.replace("START", START[how].format(work=work)).splitlines()
    return HEAD + "\n".join(line.removeprefix("        ") for line in lines)


@pytest.mark.parametrize("how", START)
def test_threads_and_pools_that_outlive_the_main_thread_keep_their_engine(
    script: Callable[[str], Any], trace: Trace, how: str
) -> None:
    text = """
        executor = create(**SLOW)
        main_ends = threading.Event()
        def work():
            main_ends.wait()
            answers = [executor.generate([n], SamplingParams(max_tokens=25)) for n in (1, 2)]
            say(tokens=[answer.outputs[0].token_ids for answer in answers], alive=executor.check_health())
        START
        main_ends.set()
        """
    run = script(body(text, how, "work"))
    assert run.wait() == 0, run.stderr()
    assert run.said["tokens"] == [expected_tokens([n], 25) for n in (1, 2)], run.stderr()
    assert run.said["alive"]
    assert trace.processes() == {}


@pytest.mark.parametrize(
    "end", ["executor.shutdown()", "executor.__exit__(None, None, None)"], ids=["shutdown", "with"]
)
@pytest.mark.parametrize("how", START)
def test_a_shutdown_at_the_scripts_end_frees_threads_and_pools_that_wait_without_end(
    script: Callable[[str], Any], trace: Trace, how: str, end: str
) -> None:
    text = f"""
        executor = create()
        executor.control("pause")
        result = executor.generate_async([1], LONG)
        def wait():
            try:
                result.result()
            except ExecutorClosedError as error:
                say(heard=str(error))
        START
        while not result.mailbox.final_waiters:
            time.sleep(0.01)
        {end}
        """
    run = script(body(text, how, "wait"))
    assert run.wait() == 0, run.stderr()
    assert run.said["heard"] == "the executor was shut down"
    assert trace.processes() == {}


def test_daemon_threads_that_wait_without_end_do_not_hold_up_the_scripts_end(
    script: Callable[[str], Any], trace: Trace
) -> None:
    run = script("""
        executor = create()
        executor.control("pause")
        result = executor.generate_async([1], LONG)
        threading.Thread(target=result.result, daemon=True).start()
        while not result.mailbox.final_waiters:
            time.sleep(0.01)
        """)
    assert run.wait() == 0, run.stderr()
    assert trace.processes() == {}
