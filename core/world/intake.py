"""What of a frontend's request an engine gets to see. Nothing in it is trusted, since it may come from any frontend."""

import logging

from tllm_core.contracts.messages import EngineRequest, GenerationRequest
from tllm_core.contracts.requests import check_request
from tllm_core.errors import RequestError

log = logging.getLogger(__name__)


def checked(request_id: int, request: GenerationRequest) -> EngineRequest:
    """The request under the engine's own id.

    Frontends check too, but what one of them let through must not become the engine's death: raises RequestError for
    whatever is wrong with it.
    """
    try:
        check_request(request)
        request.sampling.check(streaming=request.streaming)
    except RequestError:
        raise
    except Exception as error:  # a value that no check foresaw
        log.exception("a request could not be checked")
        raise RequestError(f"the request can't be used: {type(error).__name__}: {error}") from error
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling=request.sampling,
        priority=request.priority,
        cache_salt=request.cache_salt,
        trace_context=request.trace_context,
        extra=request.extra,
    )
