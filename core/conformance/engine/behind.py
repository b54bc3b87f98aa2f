"""Cases: the same engine behind an executor, in a thread of this process and, where it has ranks, in processes of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from tllm_core.conformance.case import case
from tllm_core.conformance.engine.limits import CHANGED
from tllm_core.conformance.engine.subject import SHUTDOWN_S, EngineSuite, check_words, need
from tllm_core.contracts.interfaces import Engine, EngineCapability
from tllm_core.contracts.messages import EngineInfo, SamplingParams
from tllm_core.errors import ControlError, ExecutorClosedError, RequestError, TllmError
from tllm_core.executor import GenerationExecutor
from tllm_core.ledger.result import GenerationResult
from tllm_core.world.calls import STATS

ANSWER_S = 30.0
IDLE_S = 20.0
CROWD = 24
FOREVER = 10_000
"""Tokens of a request that is ended before it gets them all."""


class ExecutorCases(EngineSuite):
    """What callers see."""

    @case("I1", "I2", timeout_s=60)
    def test_streams_of_an_executor_get_what_the_engine_produces(self) -> None:
        """Many streams at once over an executor get, in pieces, what the engine produces when it is driven directly,
        and end as there.

        If this fails: the engine relies on how it is called: from one thread, a step after every command, `again` and
        `wake` in between.
        """
        driven, executor = self.driven(), self.executor()
        prompts, sampling = self.prompts_for(driven.info), driven.sampling(self.max_tokens)
        direct = [answer.tokens() for answer in driven.ask((prompt, sampling) for prompt in prompts)]
        results = [executor.generate_async(prompts[n % len(prompts)], sampling) for n in range(CROWD)]
        for number, result in enumerate(results):
            pieces = [token for update in result for token in update.outputs[0].token_ids_diff]
            (output,) = result.outputs
            assert pieces == list(output.token_ids), "the pieces of a stream are not its whole"
            assert output.finish_reason in ("length", "stop")
            if EngineCapability.DETERMINISTIC in self.claimed():
                assert pieces == direct[number % len(prompts)], (
                    f"stream {number} got other tokens than the engine's own"
                )

    @case("I5", timeout_s=60)
    def test_bad_requests_are_refused_before_they_are_sent(self) -> None:
        """What EngineInfo rules out is refused with RequestError by the executor, and requests beside it are unharmed.

        If this fails: EngineInfo says less than the engine checks, or what it says is no plain data.
        """
        executor = self.executor()
        prompt, info = self.prompts_for(executor.info)[0], executor.info
        good = executor.generate_async(prompt, self._sampling(info))
        wrong = [SamplingParams(**{"max_tokens": 2, name: CHANGED[name]}) for name in CHANGED.keys() - info.supports]
        asked = [(prompt, sampling) for sampling in wrong] + [([], SamplingParams(max_tokens=1))]
        if info.vocab_size is not None:
            asked.append(([info.vocab_size], SamplingParams(max_tokens=1)))
        for bad, sampling in asked:
            try:
                result = executor.generate_async(bad, sampling).result(ANSWER_S)
            except RequestError:
                continue
            raise AssertionError(f"the executor took {bad} with {sampling}, and returned {result}")
        assert good.result(ANSWER_S).outputs[0].finish_reason in ("length", "stop")

    @case("I1", "I3", "I8", timeout_s=90)
    def test_aborts_and_deadlines_free_the_engine(self) -> None:
        """Requests that are aborted by their caller or pass their deadline end as such, and the engine then says that
        it is idle.

        If this fails: Engine.abort does not end what waits, or stats() goes on counting it.
        """
        executor = self.executor()
        prompts, sampling = self.prompts_for(executor.info), self._sampling(executor.info, self._endless(executor.info))
        aborted = [executor.generate_async(prompt, sampling) for prompt in prompts]
        late = [executor.generate_async(prompt, sampling, timeout_s=0.001) for prompt in prompts]
        for result in aborted:
            result.abort()
            assert result.result(ANSWER_S).outputs[0].finish_reason in ("abort", "length", "stop")
        for result in late:
            assert result.result(ANSWER_S).outputs[0].finish_reason in ("timeout", "length", "stop")
        if self.engine_class().stats is not Engine.stats:
            self._wait_idle(executor)
        assert self._finished(executor.generate_async(prompts[0], self._sampling(executor.info)))

    def _wait_idle(self, executor: GenerationExecutor) -> None:
        def idle() -> bool:
            stats = executor.stats()
            return stats.running == stats.waiting == 0

        _until(idle, lambda: f"the engine still counts {executor.stats()}")

    @case("I5", timeout_s=60)
    def test_control_calls_are_answered_only_where_declared(self) -> None:
        """`stats` answers for every engine, and what is not declared raises ControlError, with requests running beside
        it.

        If this fails: stats() raises, or returns what is no plain data.
        """
        executor = self.executor()
        running = executor.generate_async(self.prompts_for(executor.info)[0], self._sampling(executor.info))
        assert executor.stats().running >= 0
        try:
            executor.control("tllm_conformance_no_such_method")
        except ControlError:
            assert self._finished(running)
            return
        raise AssertionError("a control method that is not declared was called")

    @case("I1", "I7", timeout_s=90)
    def test_shutdown_ends_an_engine_that_is_busy(self) -> None:
        """An executor that is shut down with requests running returns, every request has an end, and the engine's
        threads are gone.

        If this fails: step or close does not come back while there is work.
        """
        before = {thread.ident for thread in threading.enumerate()}
        executor = self.new_executor()
        sampling = self._sampling(executor.info, self._endless(executor.info))
        results = [executor.generate_async(prompt, sampling) for prompt in self.prompts_for(executor.info)]
        executor.shutdown(SHUTDOWN_S)
        for result in results:
            try:
                self._finished(result)
            except ExecutorClosedError:
                continue

        def left() -> list[str]:
            return [thread.name for thread in threading.enumerate() if thread.ident not in before]

        _until(lambda: "tllm-engine" not in left(), lambda: f"threads {left()} outlive the shutdown")

    @case("I5", "I7", timeout_s=120)
    def test_a_failed_start_reaches_the_caller_with_its_words(self) -> None:
        """With `bad_settings`, making an executor raises the engine's own words, and no executor is left waiting.

        If this fails: the failure is swallowed, or turned into something without a message.
        """
        need(self.bad_settings is not None, "the suite names no `bad_settings` with which it can't start")
        try:
            executor = self.new_executor(self.bad_settings)
        except TllmError as error:
            check_words(error, "a failed start")
            return
        executor.shutdown(SHUTDOWN_S)
        raise AssertionError(f"it started with {self.bad_settings}")

    @case("I2", "I7", needs=EngineCapability.MANY_RANKS, timeout_s=180)
    def test_many_ranks_work_as_one_and_end_together(self) -> None:
        """With `many_ranks` the engine starts in several processes, answers as with one rank, answers control calls
        once per rank, and all of them end with the executor.

        If this fails: `follow` does not work or does not end, or only rank 0 is told to close.
        """
        assert self.many_ranks is not None, "MANY_RANKS is claimed: set `many_ranks` to settings for several ranks"
        need(isinstance(self.engine, str), "only an engine with a name can start in processes of its own")
        settings = {**self.settings, **self.many_ranks}
        size = self.parts(settings).world_size
        assert size > 1, f"many_ranks {self.many_ranks} gives a world of {size}"
        executor = self.new_executor(settings, transport="zmq", launcher="spawn")
        self.endings.append(lambda: executor.shutdown(0.0))
        self.open.callback(executor.shutdown, SHUTDOWN_S)
        pids = [rank.pid for rank in executor.health().ranks]
        assert len(pids) == len(set(pids)) == size, f"{size} ranks in the processes {pids}"
        self._compare(executor)
        self._ask_all_ranks(executor, size)
        executor.shutdown(SHUTDOWN_S)
        _until(lambda: not any(map(_is_alive, pids)), lambda: f"of the ranks {pids} some are left")

    def _compare(self, executor: GenerationExecutor) -> None:
        prompts, sampling = self.prompts_for(executor.info), self._sampling(executor.info)
        answers = [executor.generate_async(prompt, sampling).result(ANSWER_S) for prompt in prompts]
        if EngineCapability.DETERMINISTIC in self.claimed():
            driven = self.driven()
            alone = [answer.tokens() for answer in driven.ask((prompt, sampling) for prompt in prompts)]
            assert [list(answer.outputs[0].token_ids) for answer in answers] == alone, (
                "with one rank it answers otherwise"
            )
        assert executor.stats().running == 0

    def _ask_all_ranks(self, executor: GenerationExecutor, size: int) -> None:
        for method in set(executor.info.controls) - {STATS}:
            try:
                values = executor.control(method, timeout=ANSWER_S)
            except ControlError as error:  # it may need arguments
                check_words(error, f"control({method!r})")
            else:
                assert len(values) == size, f"control({method!r}) of {size} ranks returned {values!r}"

    def _sampling(self, info: EngineInfo, max_tokens: int | None = None) -> SamplingParams:
        return SamplingParams(max_tokens=max_tokens or self.max_tokens, ignore_eos="ignore_eos" in info.supports)

    def _endless(self, info: EngineInfo) -> int:
        longest = max(map(len, self.prompts_for(info)))
        return FOREVER if info.max_seq_len is None else max(1, info.max_seq_len - longest)

    @staticmethod
    def _finished(result: GenerationResult) -> bool:
        return result.result(ANSWER_S).outputs[0].finish_reason in ("length", "stop")


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def _until(condition: Callable[[], bool], otherwise: Callable[[], str]) -> None:
    deadline = time.monotonic() + IDLE_S
    while not condition():
        assert time.monotonic() < deadline, otherwise()
        time.sleep(0.01)


__all__: Sequence[str] = ["ExecutorCases"]
