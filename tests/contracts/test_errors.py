"""What every error owes its catchers: the same words and fields after a copy, and in the process of whoever waits for a pool."""

import copy
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from tllm_core import errors
from tllm_core.claim import Held
from tllm_core.contracts.interfaces import Identity
from tllm_core.errors import Cause, EngineDeadError, EngineStartError, NotAdmitted, RequestError, TllmError
from tllm_core.registry.loading import Broken, MissingExtra
from tllm_core.world.budget import BudgetExhausted

CAUSE = Cause("rank 1 raised", rank=1, exitcode=-9, traceback="Traceback\n", stderr_tail="out\n", kind="ModelError")
MAKE: dict[type[TllmError], Callable[[], TllmError]] = {
    RequestError: lambda: RequestError("too long", field="max_tokens", client_id=7),
    NotAdmitted: lambda: NotAdmitted("no room", 3),
    EngineDeadError: lambda: EngineDeadError(CAUSE),
    EngineStartError: lambda: EngineStartError(CAUSE),
    Held: lambda: Held("/run/engine.json", Identity(41, 5)),
    Broken: lambda: Broken("plugin x", "it is empty"),
    MissingExtra: lambda: MissingExtra("plugin x", "no module y"),
}
WAYS: dict[str, Callable[[TllmError], TllmError]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    **{
        f"pickle-{protocol}": lambda error, protocol=protocol: pickle.loads(pickle.dumps(error, protocol))  # type: ignore[misc]
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)
    },
}


def below(kind: type[TllmError]) -> Iterator[type[TllmError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from below(child)


KINDS = sorted(
    {kind for kind in below(TllmError) if kind.__module__.startswith("tllm_core.")}, key=lambda k: k.__name__
)


def made(kind: type[TllmError]) -> TllmError:
    error = MAKE.get(kind, lambda: kind("what was wrong"))()
    error.add_note("said later")
    return error


def fields(error: TllmError) -> dict[str, object]:
    """With a Cause as what it holds, for it has no equality of its own."""
    return {
        name: {slot: getattr(value, slot) for slot in Cause.__slots__} if isinstance(value, Cause) else value
        for name, value in vars(error).items()
    }


def raise_it(kind: type[TllmError]) -> None:
    raise made(kind)


def test_every_error_of_the_tree_is_tried() -> None:
    tree = {each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, TllmError)}
    assert tree | {Held, Broken, MissingExtra, BudgetExhausted} <= set(KINDS)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_keeps_its_words_and_fields(kind: type[TllmError], way: str) -> None:
    error = made(kind)
    other = WAYS[way](error)
    assert type(other) is kind
    assert other is not error
    assert (str(other), other.args, fields(other)) == (str(error), error.args, fields(error))
    assert "__notes__" in vars(other)


def test_errors_come_out_of_a_process_pool_as_they_were_raised() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        raised = {kind: pool.submit(raise_it, kind).exception(60) for kind in MAKE}
    for kind, error in raised.items():
        assert type(error) is kind
        assert fields(error) == fields(made(kind))
