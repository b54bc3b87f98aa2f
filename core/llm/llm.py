"""LLM: a model by name, text in, text out."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, overload

import msgspec

from tllm_core.checks import default_sampling
from tllm_core.config import Settings, load_settings
from tllm_core.contracts.messages import GenerationRequest, SamplingParams, TokenIds
from tllm_core.errors import ConfigError, ExecutorClosedError, Overloaded, RequestError
from tllm_core.executor import GenerationExecutor
from tllm_core.llm.crowd import Crowd
from tllm_core.llm.output import RequestOutput
from tllm_core.llm.prompts import (
    Conversation,
    Prompt,
    check_options,
    encode,
    is_one_conversation,
)
from tllm_core.prompts import Params, is_one_prompt, many_prompts, per_prompt
from tllm_core.text import Tokenizer, Vocabulary, as_tokenizer, render_chat, sequences_of, token_sequences
from tllm_core.world.ready import OnPhase

DEFAULT_ENGINE = "tp"


class LLM:
    """A model that takes prompts as text or token ids and answers with text.

    model: a path, else a name of the catalogue, else a hub id; the engine resolves it. engine: "tp" where neither this nor
    the config chooses one; `engine_options` are its options. tokenizer: a path, hub id or tokenizer to use instead of the
    engine's own. executor: one that runs already, and is not shut down with this; nothing that starts one may be given
    besides. Where the config sets `[attach] file`, this is a frontend of that engine, which outlives it, and nothing that
    starts one may be given either. Raises what GenerationExecutor.create or attach raises, and ModelError for a tokenizer
    that can't be loaded.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        engine: str | None = None,
        tokenizer: str | os.PathLike[str] | Tokenizer | Any = None,
        executor: GenerationExecutor | None = None,
        config: str | os.PathLike[str] | Settings | None = None,
        transport: str | None = None,
        launcher: str | None = None,
        transport_options: Mapping[str, Any] | None = None,
        launcher_options: Mapping[str, Any] | None = None,
        on_phase: OnPhase | None = None,
        **engine_options: Any,
    ) -> None:
        if model is not None:
            engine_options = {"model": os.fspath(model), **engine_options}
        start = {
            "config": config,
            "engine": engine,
            "engine_options": engine_options or None,
            "transport": transport,
            "transport_options": transport_options,
            "launcher": launcher,
            "launcher_options": launcher_options,
            "on_phase": on_phase,
        }
        self._owned, self._leaving = executor is None, False
        self.executor = _start(start) if executor is None else _borrow(executor, start)
        try:
            source = self.executor.info.tokenizer if tokenizer is None else tokenizer
            self._vocabulary = None if source is None else Vocabulary(as_tokenizer(source))
        except BaseException:
            self.shutdown()
            raise

    # ------------------------------------------------------------------------------------------------- properties

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises RequestError where the engine has none and none was given."""
        if self._vocabulary is None:
            raise RequestError(
                f"the engine of {self.executor.info.model!r} has no tokenizer: give token ids, or LLM(tokenizer=...)",
                field="prompt",
            )
        return self._vocabulary.tokenizer

    @property
    def model_dir(self) -> str | None:
        """The directory that `model` was resolved to; None for an engine without one."""
        return self.executor.info.model_dir

    # ------------------------------------------------------------------------------------------------------ submit

    def generate_async(
        self, prompt: Prompt, sampling_params: Params = None, *, streaming: bool = True, **options: Any
    ) -> RequestOutput:
        """Submits one prompt; iterate over the output, or wait for it. Never blocks but for the encoding of the text.

        `options`: timeout_s, priority, cache_salt, trace_context, extra, as in GenerationRequest. Raises RequestError
        (names the field), Overloaded (submit again later), and what GenerationExecutor.submit raises; nothing was taken then.
        """
        return self._submit(*self._encode(prompt), sampling_params, streaming, options)

    def chat_async(
        self,
        messages: Conversation,
        sampling_params: Params = None,
        *,
        streaming: bool = True,
        add_generation_prompt: bool = True,
        template_variables: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> RequestOutput:
        """As `generate_async`, for one conversation, which the model's chat template makes into the prompt.

        add_generation_prompt: the prompt ends with the beginning of the assistant's turn. template_variables: further
        names that the template knows.
        """
        rendered = self._render(messages, add_generation_prompt, template_variables)
        return self._submit(*rendered, sampling_params, streaming, options)

    def _encode(self, prompt: Prompt) -> tuple[str | None, TokenIds]:
        if isinstance(prompt, str):
            return prompt, encode(self.tokenizer, prompt)
        return None, TokenIds.of(prompt)

    def _render(
        self, messages: Conversation, add_generation_prompt: bool, variables: Mapping[str, Any] | None
    ) -> tuple[str, TokenIds]:
        tokenizer = self.tokenizer
        prompt = render_chat(tokenizer, messages, add_generation_prompt=add_generation_prompt, **(variables or {}))
        return prompt, encode(tokenizer, prompt, add_special_tokens=False)  # the template has written them out

    def _submit(
        self, prompt: str | None, ids: TokenIds, sampling_params: Params, streaming: bool, options: Mapping[str, Any]
    ) -> RequestOutput:
        if self._leaving and not self._owned:
            raise ExecutorClosedError("this LLM is shutting down: it takes no new requests")
        params = default_sampling(self.executor.info, sampling_params)
        params.check()
        check_options(options)
        sequences = sequences_of(self._vocabulary, params)
        request = GenerationRequest(
            prompt_token_ids=ids, sampling=self._for_engine(params), streaming=streaming, **options
        )
        return RequestOutput(self.executor.submit(request), prompt, sequences, has_stops=bool(params.stop))

    def _for_engine(self, params: SamplingParams) -> SamplingParams:
        """Without what is text: stop strings are found here, and bad words are given as their tokens."""
        if params.stop and params.sequences > params.n:
            raise RequestError(
                "best_of chooses before stop strings are found in the text; use stop_token_ids with it, or none",
                field="best_of",
            )
        runs = params.bad_token_sequences
        if params.bad_words:
            runs += token_sequences(self.tokenizer, params.bad_words)
        # An engine that knows nothing of it need not, where it is about nothing but strings.
        ignorant = "include_stop_str_in_output" not in self.executor.info.supports
        included = params.include_stop_str_in_output
        if ignorant and params.stop and not params.stop_token_ids:
            included = False
        return msgspec.structs.replace(
            params, stop=(), include_stop_str_in_output=included, bad_words=(), bad_token_sequences=runs
        )

    # ---------------------------------------------------------------------------------------------------- generate

    @overload
    def generate(self, prompts: str | TokenIds, sampling_params: Params = None, **options: Any) -> RequestOutput: ...
    @overload
    def generate(
        self,
        prompts: Sequence[int] | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] = None,
        **options: Any,
    ) -> Any: ...
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] = None,
        **options: Any,
    ) -> RequestOutput | list[RequestOutput]:
        """Submits all, as room appears, and waits. One prompt gives one output, a list gives a list, `[]` gives `[]`.

        The first error is raised, and what is still running is then aborted. `options` are those of `generate_async`.
        """
        many: list[Any] = [prompts] if (one := is_one_prompt(prompts)) else many_prompts(prompts)
        outputs = self._all(many, self._encode, sampling_params, options)
        return outputs[0] if one else outputs

    @overload
    def chat(self, messages: Conversation, sampling_params: Params = None, **options: Any) -> RequestOutput: ...
    @overload
    def chat(
        self,
        messages: Sequence[Conversation],
        sampling_params: Params | Sequence[Params] = None,
        **options: Any,
    ) -> list[RequestOutput]: ...
    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params | Sequence[Params] = None,
        *,
        add_generation_prompt: bool = True,
        template_variables: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> RequestOutput | list[RequestOutput]:
        """As `generate`, for one conversation or a list of them; `options` are those of `chat_async`."""
        many: list[Any] = [messages] if (one := is_one_conversation(messages)) else list(messages)
        render = partial(self._render, add_generation_prompt=add_generation_prompt, variables=template_variables)
        outputs = self._all(many, render, sampling_params, options)
        return outputs[0] if one else outputs

    def _all(
        self,
        prompts: list[Any],
        encoded: Callable[[Any], tuple[str | None, TokenIds]],
        params: Params | Sequence[Params],
        options: Mapping[str, Any],
    ) -> list[RequestOutput]:
        crowd, outputs = Crowd(), list[RequestOutput]()
        try:
            for prompt, param in zip(prompts, per_prompt(params, len(prompts)), strict=True):
                outputs.append(self._submit_patiently(*encoded(prompt), param, options, crowd))
                crowd.add(outputs[-1])
            crowd.wait()
        except BaseException:
            for output in outputs:
                output.abort()
            raise
        return [output.result(0) for output in outputs]

    def _submit_patiently(
        self, prompt: str | None, ids: TokenIds, params: Params, options: Mapping[str, Any], crowd: Crowd
    ) -> RequestOutput:
        while True:
            try:
                return self._submit(prompt, ids, params, False, options)
            except Overloaded as error:
                if not error.may_pass:
                    raise
                self._wait_for_room(crowd)

    def _wait_for_room(self, crowd: Crowd) -> None:
        """An own request that ends makes room; where others fill the backlog, whatever comes back."""
        if crowd.running:
            crowd.wait(at_most=crowd.running - 1)
        else:
            self.executor.wait_for_room()

    # ----------------------------------------------------------------------------------------------------- the end

    def pre_shutdown(self) -> None:
        """From now on this LLM takes no new requests; what runs goes on. Never blocks or raises, also in a signal handler.

        An executor that was given goes on for others.
        """
        self._leaving = True
        if self._owned:
            self.executor.pre_shutdown()

    def shutdown(self, timeout: float | None = None) -> None:
        """Shuts the executor down, within `timeout` seconds, unless it was given. Idempotent, from any thread."""
        if self._owned:
            self.executor.shutdown(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        return f"LLM({self.executor.info.model!r}, {self.executor!r})"


def _start(options: Mapping[str, Any]) -> GenerationExecutor:
    settings = load_settings(options["config"])
    if settings.attach.file is not None:
        return _attach(settings.attach.file, options)
    engine = options["engine"]
    if engine is None and settings.engine.name is None:
        engine = DEFAULT_ENGINE
    return GenerationExecutor.create(**{**options, "engine": engine})


def _attach(file: str, options: Mapping[str, Any]) -> GenerationExecutor:
    """The engine runs already; only how its frames get here can still be chosen."""
    own = ("config", "transport_options", "on_phase")
    given = sorted(name for name, value in options.items() if value is not None and name not in own)
    if given:
        raise ConfigError(
            f"attach.file is set ({file}), so {', '.join(given)} can't be chosen: that engine runs already"
        )
    return GenerationExecutor.attach(config=options["config"], transport_options=options["transport_options"])


def _borrow(executor: GenerationExecutor, options: Mapping[str, Any]) -> GenerationExecutor:
    given = sorted(name for name, value in options.items() if value is not None)
    if given:
        raise ConfigError(f"executor runs already, so {', '.join(given)} can't be chosen besides it")
    return executor
