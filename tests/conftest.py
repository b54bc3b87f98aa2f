"""What holds for all tests."""

import signal
from collections.abc import Iterator

import pytest

LONGEST = (
    "tests/simulation/test_simulation.py",
    "tests/tp/test_tp_equality.py",
    "tests/packaging/",
    "tests/mutants/",
    "tests/soak/",
)
"""What takes minutes begins first, so that nothing waits for it at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Else in the order of the files."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


@pytest.fixture(scope="session", autouse=True)
def _interrupts_reach_children() -> Iterator[None]:
    """A shell that runs this in the background has SIGINT ignored, and so would every process that a test starts."""
    before = signal.getsignal(signal.SIGINT)
    if before == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    if before == signal.SIG_IGN:
        signal.signal(signal.SIGINT, before)
