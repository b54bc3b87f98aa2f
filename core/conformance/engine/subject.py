"""Which engine is tested, and the one that a suite's cases share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from msgspec import structs

from tllm_core.conformance.case import Suite
from tllm_core.conformance.engine.driven import Driven
from tllm_core.contracts.interfaces import Engine, EngineCapability, EngineSpec, WorldSpec
from tllm_core.contracts.messages import EngineInfo, ErrorReport, SamplingParams
from tllm_core.errors import RequestError
from tllm_core.executor import GenerationExecutor
from tllm_core.registry import load_object
from tllm_core.world.rank import Parts, resolve

GIVEN = SimpleNamespace()
"""Specs that were given as objects, under the names by which the registry can find them in this process."""
SHUTDOWN_S = 20.0
USUAL_VOCABULARY = 128
"""Of prompts for an engine that does not tell its own."""


class EngineSuite(Suite):
    """What all engine cases use. See EngineConformance for what may be set."""

    engine: ClassVar[str | EngineSpec]
    settings: Mapping[str, Any] = {}
    bad_settings: Mapping[str, Any] | None = None
    many_ranks: Mapping[str, Any] | None = None
    prompts: Sequence[Sequence[int]] = ()
    max_tokens: int = 8

    _kept: ClassVar[dict[type, Driven]] = {}
    _executors: ClassVar[dict[type, GenerationExecutor]] = {}

    @property
    def subject(self) -> str:
        return f"engine {self.engine if isinstance(self.engine, str) else self.engine.name!r}"

    def claimed(self) -> EngineCapability:
        capabilities = self.engine_class().capabilities
        assert isinstance(capabilities, EngineCapability), (
            f"capabilities must be EngineCapability, not {capabilities!r}"
        )
        return capabilities

    def engine_class(self) -> type[Engine]:
        return load_object(self.parts().engine.load)  # type: ignore[no-any-return]

    @property
    def reference(self) -> str:
        """The engine as the registry finds it."""
        if isinstance(self.engine, str):
            return self.engine
        name = f"spec_{id(self.engine):x}"
        setattr(GIVEN, name, self.engine)
        return f"{__name__}:GIVEN.{name}"

    def parts(self, settings: Mapping[str, Any] | None = None) -> Parts:
        options = dict(self.settings if settings is None else settings)
        return resolve(WorldSpec(engine=self.reference, engine_options=options))

    # ------------------------------------------------------------------------------------------ driven directly

    def fresh(self, settings: Mapping[str, Any] | None = None) -> Driven:
        """A started engine of this case's own, closed at its end."""
        driven = Driven(self.parts(settings))
        self.open.callback(driven.leave)
        driven.start()
        return driven

    def driven(self) -> Driven:
        """The started engine that cases share. A case must leave it idle."""
        return self.open.enter_context(self._lent())

    @contextmanager
    def _lent(self) -> Iterator[Driven]:
        driven = self._kept.pop(type(self), None)
        if driven is None:
            driven = Driven(self.parts())
            self._start(driven)
        try:
            yield driven
            driven.settle()
        except BaseException:
            driven.give_up()
            raise
        driven.forget()
        self._kept[type(self)] = driven

    @staticmethod
    def _start(driven: Driven) -> None:
        try:
            driven.start()
        except BaseException:
            driven.give_up()
            raise

    # -------------------------------------------------------------------------------------- behind an executor

    def executor(self) -> GenerationExecutor:
        """The executor with this engine in a thread of this process that cases share."""
        return self.open.enter_context(self._lent_executor())

    @contextmanager
    def _lent_executor(self) -> Iterator[GenerationExecutor]:
        executor = self._executors.pop(type(self), None) or self.new_executor()
        self.endings.append(lambda: executor.shutdown(0.0))
        try:
            yield executor
        except BaseException:
            executor.shutdown(SHUTDOWN_S)
            raise
        self._executors[type(self)] = executor

    def new_executor(
        self, settings: Mapping[str, Any] | None = None, transport: str = "inproc", launcher: str = "inline"
    ) -> GenerationExecutor:
        return GenerationExecutor.create(
            engine=self.reference,
            engine_options=dict(self.settings if settings is None else settings),
            transport=transport,
            launcher=launcher,
        )

    @classmethod
    def teardown_class(cls) -> None:
        """Ends what the cases shared."""
        executor = cls._executors.pop(cls, None)
        if executor is not None:
            executor.shutdown(SHUTDOWN_S)
        driven = cls._kept.pop(cls, None)
        if driven is not None:
            driven.leave()

    # ------------------------------------------------------------------------------------------------- requests

    def prompts_for(self, info: EngineInfo) -> list[list[int]]:
        """`prompts`, or made-up ones of several lengths, without the model's own end."""
        if self.prompts:
            return [list(prompt) for prompt in self.prompts]
        vocab = min(info.vocab_size or USUAL_VOCABULARY, 1 << 16)
        fitting = [token for token in range(vocab) if token not in info.eos_token_ids]
        longest = max(1, (info.max_seq_len or 64) - self.max_tokens)
        lengths = [min(length, longest) for length in (3, 5, 1, 17, 8, 2, 12, 6)]
        return [
            [fitting[(37 * number + 11 * place * place + 5) % len(fitting)] for place in range(length)]
            for number, length in enumerate(lengths)
        ]

    def long_prompt(self, info: EngineInfo, length: int) -> list[int]:
        pattern = [token for prompt in self.prompts_for(info) for token in prompt]
        return [pattern[place % len(pattern)] for place in range(length)]

    def refusal(self, driven: Driven, prompt: Sequence[int], sampling: SamplingParams, **fields: Any) -> ErrorReport:
        """How the engine refuses a request, by RequestError or by an error output; AssertionError where it takes it."""
        try:
            answer = driven.submit(prompt, sampling, **fields)
        except RequestError as error:
            return ErrorReport(str(error), error.field)
        driven.run(lambda: answer.over)
        assert answer.error is not None, (
            f"the engine took a request that it can't serve as asked, and answered {answer.all_tokens()}: "
            f"{_changed(sampling)} {fields}, prompt of {len(prompt)} tokens"
        )
        return answer.error


def need(condition: bool, reason: str) -> None:
    """Skips the case where the engine does not have what it is about."""
    if not condition:
        pytest.skip(reason)


def check_words(error: Exception, where: str) -> None:
    """AssertionError where an error says nothing."""
    assert str(error).strip(), f"{where}: {type(error).__name__} without a word"


def _changed(sampling: SamplingParams) -> str:
    fields = [
        f"{info.name}={getattr(sampling, info.name)!r}"
        for info in structs.fields(SamplingParams)
        if getattr(sampling, info.name) != info.default
    ]
    return ", ".join(fields)
