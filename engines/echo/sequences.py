"""One sequence of one request as an endless supply of outputs, one per step."""

from collections.abc import Iterator
from itertools import islice

from msgspec import Struct, ValidationError, convert

from tllm_core.contracts.messages import EngineRequest, FinishReason, Output, Plain, TokenLogprobs
from tllm_core.engines.echo.spec import EchoSettings
from tllm_core.engines.echo.tokens import expected_logprobs, token_rows
from tllm_core.errors import RequestError


class EchoExtra(Struct, frozen=True, forbid_unknown_fields=True):
    """What a request's `extra` may hold. tag: comes back in the `extra` of each sequence's last output.

    pad_bytes: every output carries that many bytes in its `extra`, to fill lanes.
    """

    tag: Plain = None
    pad_bytes: int = 0


class Ending(Struct, frozen=True):
    """How a sequence ends: after `length` tokens, the one that stopped it included."""

    length: int
    finish_reason: FinishReason
    stop_reason: int | None = None


def extra_of(request: EngineRequest) -> EchoExtra:
    """The request's `extra` in its declared type. Raises RequestError."""
    try:
        return convert(request.extra or {}, EchoExtra)
    except ValidationError as error:
        raise RequestError(f"extra: {error}", field="extra") from None


def ending_of(request: EngineRequest, index: int, settings: EchoSettings) -> Ending:
    """Looks ahead: the answer is known, so where it stops is as well."""
    sampling = request.sampling
    length = sampling.max_tokens or settings.max_seq_len - len(request.prompt_token_ids)
    eos = None if sampling.ignore_eos else settings.eos_token_id
    stops = {*sampling.stop_token_ids} if eos is None else {*sampling.stop_token_ids, eos}
    if stops:
        rows = token_rows(request.prompt_token_ids, index, settings.vocab_size)
        for position, (token,) in enumerate(islice(rows, length)):
            if token in stops and position >= sampling.min_tokens:
                return Ending(position + 1, "stop", token if token in sampling.stop_token_ids else None)
    return Ending(length, "length")


def outputs_of(
    request: EngineRequest, extra: EchoExtra, index: int, ending: Ending, settings: EchoSettings
) -> Iterator[Output]:
    """All outputs of one sequence, one per step; the last one has the finish reason."""
    outputs = _plain(request, index, ending, settings)
    sampling = request.sampling
    if sampling.logprobs is None and sampling.prompt_logprobs is None and extra == EchoExtra():
        return outputs
    return _decorated(outputs, request, extra, settings)


def _plain(request: EngineRequest, index: int, ending: Ending, settings: EchoSettings) -> Iterator[Output]:
    rows: Iterator[tuple[int, ...]] = islice(
        token_rows(request.prompt_token_ids, index, settings.vocab_size), ending.length
    )
    if settings.tokens_per_step > 1:
        rows = _joined(rows, settings.tokens_per_step)
    request_id, steps = request.request_id, -(-ending.length // settings.tokens_per_step)
    for row in islice(rows, steps - 1):
        yield Output(request_id=request_id, token_ids=row, index=index)
    yield Output(
        request_id=request_id,
        token_ids=next(rows),
        index=index,
        finish_reason=ending.finish_reason,
        stop_reason=ending.stop_reason,
    )


def _joined(rows: Iterator[tuple[int, ...]], per_step: int) -> Iterator[tuple[int, ...]]:
    while joined := tuple([token for row in islice(rows, per_step) for token in row]):
        yield joined


def _decorated(
    outputs: Iterator[Output], request: EngineRequest, extra: EchoExtra, settings: EchoSettings
) -> Iterator[Output]:
    prompt_top, top = request.sampling.prompt_logprobs, request.sampling.logprobs
    for position, output in enumerate(outputs):
        if prompt_top is not None and position == 0 and output.index == 0:
            output.prompt_logprobs = _of_prompt(request, prompt_top, settings)
        if top is not None:
            output.logprobs = [expected_logprobs(token, top, settings.vocab_size) for token in output.token_ids]
        if extra.pad_bytes:
            output.extra = {"pad": bytes(extra.pad_bytes)}
        if output.finish_reason is not None and extra.tag is not None:
            output.extra = {**(output.extra or {}), "tag": extra.tag}
        yield output


def _of_prompt(request: EngineRequest, top: int, settings: EchoSettings) -> list[TokenLogprobs]:
    rest = request.prompt_token_ids[1:]
    return [[], *(expected_logprobs(token, top, settings.vocab_size) for token in rest)]
