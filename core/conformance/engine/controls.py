"""Cases: control calls."""

from __future__ import annotations

from tllm_core.conformance.case import case
from tllm_core.conformance.engine.subject import EngineSuite, check_words
from tllm_core.errors import ControlError, RequestError

UNDECLARED = (
    "tllm_conformance_no_such_method",
    "__class__",
    "__init__",
    "close",
    "submit",
    "step",
    "start",
    "control",
    "",
)


class ControlCases(EngineSuite):
    """Only what is declared can be called, and an error is an answer."""

    @case("I5", timeout_s=60)
    def test_what_is_not_declared_is_refused(self) -> None:
        """Control calls of names that are not in EngineInfo.controls raise ControlError, whatever attribute of the
        engine they name, and change nothing.

        If this fails: control() looks methods up on the engine by name; keep a table of those that may be called.
        """
        driven = self.driven()
        for method in UNDECLARED:
            if method in driven.info.controls:
                continue
            try:
                values = driven.control(method)
            except ControlError as error:
                check_words(error, f"control({method!r})")
            else:
                raise AssertionError(f"control({method!r}) is not declared, and returned {values!r}")
        driven.ask([(self.prompts_for(driven.info)[0], driven.sampling(self.max_tokens))])

    @case("I5", timeout_s=90)
    def test_what_is_declared_answers_once_per_rank_or_says_why_not(self) -> None:
        """Each of EngineInfo.controls, called without arguments and with too many, returns one plain value per rank or
        raises ControlError.

        If this fails: a declared method is missing, returns objects, or wrong arguments reach it as a TypeError.
        """
        driven = self.fresh()
        for method in driven.info.controls:
            for args in ((), tuple(range(9))):
                try:
                    values = driven.control(method, *args)
                except (ControlError, RequestError) as error:
                    check_words(error, f"control({method!r})")
                else:
                    assert len(values) == driven.parts.world_size, f"control({method!r}) returned {values!r}"
