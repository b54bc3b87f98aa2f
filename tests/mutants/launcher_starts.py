"""Launchers that tell of a start, or of its failure, wrongly; one fault each."""

from __future__ import annotations

from msgspec import structs

from tests.mutants import caught_by
from tests.mutants.altered_launchers import Altered, UnderAnotherWatcher
from tllm_core.contracts.interfaces import Capability, Exited, Failed, Identified, Listening, Phase, Ready
from tllm_core.contracts.messages import EngineInfo
from tllm_core.world.launch import InlineLauncher, SpawnLauncher

# --------------------------------------------------------------------------------------------------------------- starts


@caught_by("TestSpawn", "test_identities_come_first_and_before_the_weights", "the first event was Listening")
class IdentifiesAfterTheAddress(Altered, SpawnLauncher):
    """Identities come once the world listens."""

    def alter(self, world):
        world.held = []

    def change(self, event):
        if isinstance(event, Identified):
            self.held = [event]
            return []
        return [event, *self.__dict__.pop("held", ())] if isinstance(event, Listening) else [event]


@caught_by(
    "TestInline",
    "test_identities_come_first_and_before_the_weights",
    "Ready came before the weights|the first event was",
)
class IdentifiesAfterTheLoad(Altered, InlineLauncher):
    """Identities come once the engine is ready."""

    def change(self, event):
        self.held = [*getattr(self, "held", ()), event]
        if not isinstance(event, Ready | Failed | Exited):
            return []
        held, self.held = self.held, []
        return held[1:] + held[:1]


@caught_by(
    "TestSpawn", "test_identities_come_first_and_before_the_weights", "not all are alive, or they are other processes"
)
class ReusesIdentities(Altered, SpawnLauncher):
    """A rank is named by a process of another world."""

    def change(self, event):
        if not isinstance(event, Identified):
            return [event]
        return [structs.replace(event, ranks=tuple(structs.replace(rank, start_time=1) for rank in event.ranks))]


@caught_by("TestSpawn", "test_every_rank_is_named_and_ready_waits_for_the_last", r"1 == 2|1 == count")
class NamesOneProcessForAll(Altered, SpawnLauncher):
    """All ranks are named by the process of the first."""

    def change(self, event):
        if not isinstance(event, Identified):
            return [event]
        pid = event.ranks[0].pid
        return [structs.replace(event, ranks=tuple(structs.replace(rank, pid=pid) for rank in event.ranks))]


@caught_by(
    "TestSpawn", "test_every_rank_is_named_and_ready_waits_for_the_last", "it is ready, and its last rank is not"
)
class IsReadyTooEarly(UnderAnotherWatcher):
    """A world is ready when its first rank is."""

    watcher = "IsReadyTooEarly"


@caught_by("TestInline", "test_a_start_is_told_in_order", r"\[<class '.*Identified'>")
class TellsReadyTwice(Altered, InlineLauncher):
    """Ready comes again."""

    def change(self, event):
        return [event, event] if isinstance(event, Ready) else [event]


@caught_by("TestInline", "test_a_start_is_told_in_order", "Ready tells of another engine")
class StartsAnotherEngine(InlineLauncher):
    """The engine's options are lost on the way."""

    def launch(self, spec):
        return super().launch(structs.replace(spec, engine_options={"load_delay_s": 1.0}))


@caught_by("TestInline", "test_a_start_is_told_in_order", "loading echo weights")
class LoadsInSilence(Altered, InlineLauncher):
    """What start-up is doing is not told."""

    def change(self, event):
        return [] if isinstance(event, Phase) else [event]


@caught_by("TestSpawn", "test_it_says_what_it_needs_of_a_transport", "starts processes, and needs is")
class NeedsNothing(SpawnLauncher):
    """Starts processes, and lets itself be combined with any transport."""

    needs = Capability.CROSS_HOST


# ------------------------------------------------------------------------------------------------------------- failures


@caught_by("TestInline", "test_what_is_raised_while_starting_is_told_with_its_traceback", "no card for construct")
class LosesTheWords(Altered, InlineLauncher):
    """A failure is told without what was raised."""

    def change(self, event):
        return [Failed("the engine failed", rank=0)] if isinstance(event, Failed) else [event]


@caught_by("TestInline", "test_what_is_raised_while_starting_is_told_with_its_traceback", "Ready, and then")
class IsReadyAfterAFailure(Altered, InlineLauncher):
    """A start that fails is told as Ready first."""

    def change(self, event):
        return [Ready(EngineInfo(model="echo")), event] if isinstance(event, Failed) else [event]


@caught_by(
    "TestInline", "test_what_is_raised_while_starting_is_told_with_its_traceback", "the world ended before Failed"
)
class ForgetsTheFailure(Altered, InlineLauncher):
    """A world that fails says only that it is over."""

    def change(self, event):
        return [] if isinstance(event, Failed) else [event]


@caught_by("TestSpawn", "test_a_signal_while_loading_is_told_with_its_name_and_last_words", "its stderr is lost")
class LosesTheLastWords(Altered, SpawnLauncher):
    """What a rank wrote to stderr last is not kept."""

    def change(self, event):
        return [structs.replace(event, stderr_tail=None)] if isinstance(event, Failed) else [event]


@caught_by("TestSpawn", "test_any_rank_that_fails_ends_the_others", "no Exited within")
class LeavesTheOthers(UnderAnotherWatcher):
    """Where one of several ranks fails, the others go on."""

    watcher = "EndsNobody"


@caught_by("TestSpawn", "test_a_start_that_takes_too_long_is_given_up", "no Failed within")
class NeverGivesUp(UnderAnotherWatcher):
    """`ready_timeout_s` is not looked at."""

    watcher = "NeverGivesUp"
