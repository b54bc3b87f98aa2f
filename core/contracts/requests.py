"""What every field of a request must be, whatever the engine: checked by the frontend, and by the engine for frontends that
do not."""

from collections.abc import Callable

from tllm_core.contracts.messages import GenerationRequest, SamplingParams, TokenIds
from tllm_core.contracts.plain import objection
from tllm_core.contracts.values import is_unicode, shown
from tllm_core.errors import RequestError

MAX_TIMEOUT_S = 1e9
"""Some thirty years; without a timeout, a request has no end of its own either."""
_INT64 = range(-(2**63), 2**63)


def check_request(request: GenerationRequest) -> None:
    """Raises RequestError, which names the field, for a value of a wrong type or that no message can carry.

    What is in `sampling` and in the prompt is left to their own checks.
    """
    if not isinstance(request.sampling, SamplingParams):
        raise _error("sampling", "SamplingParams", request.sampling)
    if not isinstance(request.prompt_token_ids, TokenIds):
        raise _error("prompt_token_ids", "TokenIds, which TokenIds.of makes", request.prompt_token_ids)
    if type(request.streaming) is not bool:
        raise _error("streaming", "true or false", request.streaming)
    if request.timeout_s is not None:
        _check_timeout(request.timeout_s)
    if type(request.priority) is not int or request.priority not in _INT64:
        raise _error("priority", "an integer of 64 bits", request.priority)
    for name, check in _OPTIONAL:
        if (value := getattr(request, name)) is not None:
            check(value)


def _check_timeout(timeout_s: object) -> None:
    if type(timeout_s) not in (int, float) or not 0 < timeout_s <= MAX_TIMEOUT_S:  # type: ignore[operator]
        raise _error("timeout_s", f"a positive number of seconds, {MAX_TIMEOUT_S:.0e} at most", timeout_s)


def _check_salt(salt: object) -> None:
    if type(salt) is not str or not is_unicode(salt):
        raise _error("cache_salt", "Unicode text", salt)


def _check_trace(context: object) -> None:
    if not isinstance(context, dict) or any(type(each) is not str for pair in context.items() for each in pair):
        raise _error("trace_context", "a dict of strings", context)
    if not all(map(is_unicode, (*context, *context.values()))):
        raise _error("trace_context", "a dict of Unicode strings", context)


def _check_extra(extra: object) -> None:
    if not isinstance(extra, dict):
        raise _error("extra", "a dict of plain data", extra)
    if (problem := objection(extra)) is not None:
        raise RequestError(f"extra {problem}", field="extra")


_OPTIONAL: tuple[tuple[str, Callable[[object], None]], ...] = (
    ("cache_salt", _check_salt),
    ("trace_context", _check_trace),
    ("extra", _check_extra),
)


def _error(field: str, wanted: str, value: object) -> RequestError:
    return RequestError(f"{field} must be {wanted}, not {shown(value)}", field=field)
