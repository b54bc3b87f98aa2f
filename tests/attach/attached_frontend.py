"""A frontend in a process of its own: `attached_frontend.py ATTACH_FILE FIRST MAX_TOKENS [again]`.

Attaches, streams one request whose prompt is [FIRST, 2, 3], and prints what happens, one JSON object a line. With `again` it
attaches once more after the lane was lost. Times are of the monotonic clock, which all processes of a host share.
"""

import json
import sys
import time

from tllm_core import EngineDeadError, GenerationExecutor, SamplingParams, TransportError


def say(**words):
    print(json.dumps({**words, "at": time.monotonic()}), flush=True)


def stream(path, first, max_tokens):
    with GenerationExecutor.attach(path) as executor:
        result = executor.generate_async([first, 2, 3], SamplingParams(max_tokens=max_tokens))
        say(attached=result.client_id >> 48)
        for update in result:
            say(tokens=list(update.outputs[0].token_ids_diff))
        say(done=result.outputs[0].finish_reason)


def main():
    path, first, max_tokens, *rest = sys.argv[1:]
    try:
        stream(path, int(first), int(max_tokens))
    except (EngineDeadError, TransportError) as error:
        say(error=type(error).__name__, message=str(error))
        if rest:
            stream(path, int(first), 10)


if __name__ == "__main__":
    main()
