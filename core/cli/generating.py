"""`tllm demo`, `generate` and `chat`: prompts in, text to the terminal as it comes."""

import argparse
import io
import json
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from tllm_core.cli.arguments import add_common, settings_of
from tllm_core.cli.limiting import add_limits, given_limits
from tllm_core.cli.terminal import prompt_text, running
from tllm_core.contracts.messages import SamplingParams
from tllm_core.errors import ConfigError, RequestError
from tllm_core.registry import Registry

if TYPE_CHECKING:
    from tllm_core.executor import GenerationExecutor

DEMO_MODEL = "smollm2-135m"
DEMO_QUESTION = "What is the capital of France, and what is it known for? Answer in two sentences."

SAMPLING: dict[str, tuple[type, str]] = {
    "max_tokens": (int, "new tokens at most"),
    "min_tokens": (int, "no end before so many tokens"),
    "temperature": (float, "0 is greedy"),
    "top_k": (int, "sample from the k most likely tokens; 0 is off"),
    "top_p": (float, "sample from the most likely tokens that have this probability together"),
    "min_p": (float, "drop tokens below this share of the most likely one's probability"),
    "repetition_penalty": (float, "above 1 discourages tokens that were there"),
    "presence_penalty": (float, "discourages tokens that were generated"),
    "frequency_penalty": (float, "discourages tokens by how often they were generated"),
    "seed": (int, "makes sampling repeatable"),
}


class Answer(Struct):
    """One answer, measured where it is read. ttft_s: from the submit to the first token. tokens_per_s: after the first."""

    text: str
    token_ids: list[int]
    finish_reason: str | None
    ttft_s: float | None
    tokens_per_s: float | None


def add_demo(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tllm demo`."""
    parser.add_argument("question", nargs="?", default=DEMO_QUESTION, help="another question")
    parser.add_argument("--max-tokens", type=int, default=128, help="new tokens at most")
    add_common(parser)


def demo(arguments: argparse.Namespace) -> int:
    """Answers a question with a small model behind ZMQ in a process of its own; fetches the model at the first run."""
    choices = {"engine.name": "tp", "transport.name": "zmq", "launcher.name": "spawn"}
    model = {} if arguments.engine else {"engine.options.model": DEMO_MODEL}
    settings = settings_of(arguments, Registry(), defaults=choices | model)
    params = SamplingParams(max_tokens=arguments.max_tokens)
    params.check()  # before anything is loaded
    if not arguments.question.strip():
        raise ConfigError("the question is empty")
    began = time.monotonic()
    with running(settings, lines=True) as executor:
        started_s = time.monotonic() - began
        print(f"{executor.info.model} is ready after {started_s:.1f} s, in a process of its own.\n")
        if executor.info.tokenizer is None:
            _token_ids(arguments.question, executor)  # refused before it is shown as asked
        print(f"> {arguments.question}\n")
        answer = _answer(executor, arguments.question, params, chat=True)
    _tell_if_cut(answer, params)
    rate = f", the rest at {answer.tokens_per_s:.1f} tokens per second" if answer.tokens_per_s else ""
    first_ms = 1000 * (answer.ttft_s or 0)
    print(f"\nThe answer has {len(answer.token_ids)} tokens: the first came after {first_ms:.0f} ms{rate}.")
    return 0


def add_generate(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tllm generate`."""
    parser.add_argument("prompt", metavar="PROMPT", help='the prompt; "-" reads it from standard input')
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--chat", action="store_true", default=None, help="as a message, in the model's chat template")
    kind.add_argument("--raw", dest="chat", action="store_false", help="as it is, to be continued")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    _add_sampling(parser)
    add_common(parser)


def generate(arguments: argparse.Namespace) -> int:
    """Answers one prompt; streams the text, or prints one JSON object."""
    settings = settings_of(arguments, Registry(), needs_engine=True)
    prompt = prompt_text(arguments.prompt)
    SamplingParams(**_given(arguments)).check()  # before anything is loaded
    with running(settings) as executor:
        params = _sampling(arguments, executor)
        answer = _answer(executor, prompt, params, chat=arguments.chat, quiet=arguments.json)
        if arguments.json:
            import msgspec

            print(json.dumps(msgspec.to_builtins(answer), ensure_ascii=False))
        else:
            _tell_if_cut(answer, params)
    return 0


def add_chat(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tllm chat`."""
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    _add_sampling(parser)
    add_common(parser)


def chat(arguments: argparse.Namespace) -> int:
    """Answers line after line, with what was said before, until the input ends."""
    from tllm_core.llm import LLM

    settings = settings_of(arguments, Registry(), needs_engine=True)
    SamplingParams(**_given(arguments)).check()
    if sys.stdin is None:
        raise ConfigError("standard input is closed; there is nobody to chat with")
    with running(settings) as executor:
        if executor.info.tokenizer is None:
            raise ConfigError(f"{executor.info.model} has no tokenizer, and a chat needs text; choose a model")
        llm = LLM(executor=executor)
        params = _sampling(arguments, executor)
        start = [{"role": "system", "content": arguments.system}] if arguments.system else []
        messages = list(start)
        for line in _lines():
            if line == "/clear":
                messages = list(start)
                continue
            messages.append({"role": "user", "content": line})
            answer = _read(llm.chat_async(messages, params), sys.stdout.write)
            _tell_if_cut(answer, params)
            messages.append({"role": "assistant", "content": answer.text})
    return 0


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (the model's own defaults otherwise)")
    for name, (kind, text) in SAMPLING.items():
        metavar = "N" if kind is int else "X"
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=text)
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on where the model would end")
    add_limits(group)


def _sampling(arguments: argparse.Namespace, executor: "GenerationExecutor") -> SamplingParams:
    from tllm_core.checks import default_sampling

    params = default_sampling(executor.info, {**executor.info.sampling_defaults, **_given(arguments)})
    params.check()
    return params


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that stand on the command line."""
    names = [*SAMPLING, "ignore_eos"]
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    return given | ({"stop": tuple(arguments.stop)} if arguments.stop else {}) | given_limits(arguments)


def _lines() -> Iterator[str]:
    terminal = sys.stdin.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding=None if terminal else "utf-8", errors="strict")
    if terminal:
        import readline  # noqa: F401 - gives input() its line editing

        print("Ctrl-D ends, /clear forgets.")
    while True:
        try:
            line = input("> " if terminal else "").strip()
        except EOFError:
            return
        except UnicodeDecodeError:
            raise ConfigError("standard input is not UTF-8 text") from None
        if line:
            yield line


def _tell_if_cut(answer: Answer, params: SamplingParams) -> None:
    """Says on stderr that the answer did not end by itself, so that what is on stdout stays the answer alone."""
    if answer.finish_reason == "length":
        tokens = len(answer.token_ids)
        own = params.max_tokens is not None and tokens >= params.max_tokens
        why = "--max-tokens sets where" if own else "prompt and answer fill all that the engine has room for"
        print(f"[cut after {tokens} {'token' if tokens == 1 else 'tokens'}: {why}]", file=sys.stderr, flush=True)


def _answer(
    executor: "GenerationExecutor", prompt: str, params: SamplingParams, *, chat: bool | None, quiet: bool = False
) -> Answer:
    write = (lambda text: None) if quiet else sys.stdout.write
    if executor.info.tokenizer is None:
        return _read(executor.generate_async(_token_ids(prompt, executor), params), write)
    from tllm_core.llm import LLM

    llm = LLM(executor=executor)
    if chat or (chat is None and llm.tokenizer.chat_template is not None):
        return _read(llm.chat_async([{"role": "user", "content": prompt}], params), write)
    return _read(llm.generate_async(prompt, params), write)


def _token_ids(prompt: str, executor: "GenerationExecutor") -> list[int]:
    try:
        return [int(word) for word in prompt.replace(",", " ").split()]
    except ValueError:
        raise RequestError(f"{executor.info.model!r} has no tokenizer: give token ids, as in '1 2 3'") from None


def _read(result: Iterable[Any], write: Any) -> Answer:
    submitted = time.monotonic()
    first = last = None
    output = None
    for update in result:
        output = update.outputs[0]
        if output.token_ids_diff:
            last = time.monotonic()
            first = first or last
        write(getattr(output, "text_diff", None) or "".join(f"{token} " for token in output.token_ids_diff))
        sys.stdout.flush()
    write("\n")
    assert output is not None
    rest = len(output.token_ids) - 1
    return Answer(
        text=getattr(output, "text", ""),
        token_ids=list(output.token_ids),
        finish_reason=output.finish_reason,
        ttft_s=None if first is None else first - submitted,
        tokens_per_s=rest / (last - first) if first and last and last > first else None,
    )
