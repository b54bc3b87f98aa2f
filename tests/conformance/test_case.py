"""The mechanics of every suite: time limits, claims, and cases that can't be argued away."""

import enum
import os
import threading

import pytest

from tllm_core.conformance.case import Suite, case, case_of, missing

GATE = threading.Event()


class Gift(enum.Flag):
    FLIES = enum.auto()
    SWIMS = enum.auto()


class Bird(Suite):
    subject = "a bird"

    def claimed(self):
        return Gift.FLIES

    @case("I1")
    def test_lives(self) -> None:
        """It lives. If this fails: it is dead."""
        assert threading.current_thread() is not threading.main_thread()

    @case("I2", needs=Gift.FLIES)
    def test_flies(self) -> None:
        """It flies. If this fails: it is a penguin."""
        raise AssertionError("it fell")

    @case("I2", needs=Gift.SWIMS, proves=True)
    def test_swims(self) -> None:
        """It swims. If this fails: it has the wrong feet."""

    @case("I2", needs=Gift.SWIMS)
    def test_dives(self) -> None:
        """It dives. If this fails: it floats."""
        raise AssertionError("never run")

    @case("I7", timeout_s=0.1)
    def test_hangs(self) -> None:
        """It ends. If this fails: it hangs."""
        self.endings.append(GATE.set)
        GATE.wait(60)


def outcome(name: str) -> str:
    with pytest.raises((AssertionError, pytest.skip.Exception, pytest.fail.Exception)) as caught:
        getattr(Bird(), name)()
    return f"{caught.type.__name__}: {caught.value}"


def test_a_case_runs_and_says_what_it_is_about() -> None:
    Bird().test_lives()
    about = case_of(Bird.test_lives)
    assert (about.name, about.invariants, about.promise, about.blame) == (
        "test_lives",
        ("I1",),
        "It lives.",
        "it is dead.",
    )


def test_what_a_case_raises_is_raised() -> None:
    assert outcome("test_flies") == "AssertionError: it fell"


def test_what_is_not_claimed_is_skipped_and_reported_where_it_holds() -> None:
    assert outcome("test_dives") == "Skipped: a bird does not claim SWIMS"
    assert outcome("test_swims") == "Skipped: a bird does not claim SWIMS, though it holds: it may be declared"


def test_a_hang_is_a_failure_that_tells_its_place_and_ends_its_processes() -> None:
    words = outcome("test_hangs")
    assert "not done after 0.1 s" in words
    assert "GATE.wait(60)" in words
    assert GATE.is_set()


def test_a_case_can_not_be_replaced_or_removed() -> None:
    with pytest.raises(TypeError, match="replaces a case"):
        type("Penguin", (Bird,), {"test_flies": lambda self: None})
    with pytest.raises(TypeError, match="replaces a case"):
        type("Penguin", (Bird,), {"test_flies": None})
    with pytest.raises(TypeError, match="replaces a case"):
        type("Penguin", (Bird,), {"test_flies": pytest.mark.xfail(reason="lazy")(lambda self: None)})


def test_a_case_may_be_expected_to_fail_strictly_and_with_a_reason() -> None:
    class Penguin(Bird):
        @pytest.mark.xfail(strict=True, reason="it is a penguin")
        def test_flies(self) -> None:
            super().test_flies()

    with pytest.raises(AssertionError, match="it fell"):
        Penguin().test_flies()


def test_a_case_without_its_words_is_refused() -> None:
    with pytest.raises(TypeError, match="If this fails"):

        @case("I1")
        def test_silent(self) -> None:
            """It is silent."""


def test_what_is_missing_is_a_loud_skip_or_where_strict_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(pytest.skip.Exception, match="NOT CHECKED: no server"):
        missing("no server")
    monkeypatch.setenv("TLLM_CONFORMANCE_STRICT", "1")
    with pytest.raises(pytest.fail.Exception, match="no server"):
        missing("no server")
    assert os.environ["TLLM_CONFORMANCE_STRICT"] == "1"
