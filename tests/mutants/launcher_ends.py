"""Launchers whose worlds die, end or outlive their owner wrongly; one fault each."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from msgspec import structs

from tests.mutants import caught_by
from tests.mutants.altered_launchers import Altered, UnderAnotherWatcher
from tllm_core.contracts.interfaces import Exited, Failed, Identified, Phase
from tllm_core.world.launch import InlineLauncher, SpawnLauncher
from tllm_core.world.process import identify

# --------------------------------------------------------------------------------------------------------------- deaths


@caught_by("TestSpawn", "test_the_death_of_any_rank_is_the_worlds", "the world ended before Failed")
class TakesADeathForAWish(Altered, SpawnLauncher):
    """The death of a rank is told as a clean end."""

    def change(self, event):
        if isinstance(event, Failed):
            return []
        return [Exited(clean=True)] if isinstance(event, Exited) else [event]


@caught_by("TestSpawn", "test_the_death_of_any_rank_is_the_worlds", "engine rank 1 is gone")
class WatchesOnlyTheFirst(UnderAnotherWatcher):
    """The death of a rank above 0 shows only in the beats, which don't know how it ended."""

    watcher = "WatchesOnlyTheFirst"


@caught_by("TestSpawn", "test_the_death_of_any_rank_is_the_worlds", r"Failed\(.*rank=0")
class BlamesTheFirst(Altered, SpawnLauncher):
    """Whichever rank died, it is told of rank 0."""

    def change(self, event):
        return [structs.replace(event, rank=0)] if isinstance(event, Failed) else [event]


@caught_by("TestSpawn", "test_beats_rise_and_tell_of_a_rank_that_stands_still", "no Beaten within")
class BeatsWithoutLooking(UnderAnotherWatcher):
    """Beats say that all ranks run, whether they do or not."""

    watcher = "BeatsWithoutLooking"


@caught_by(
    "TestSpawn",
    "test_the_death_of_any_rank_reaches_those_that_attached",
    "engine rank 0 is gone|the engine was stopped",
)
class TellsNobodyElse(UnderAnotherWatcher):
    """Attached frontends are not told how the world ended."""

    watcher = "TellsNobodyElse"


# ----------------------------------------------------------------------------------------------------------------- ends


@caught_by("TestSpawn", "test_a_stop_is_clean_whole_and_repeatable", "a process outlived its world")
class StopsInWordsOnly(Altered, SpawnLauncher):
    """`stop` says that the world is gone, and leaves it."""

    def alter(self, world):
        world.stop = lambda timeout: True


@caught_by("TestInline", "test_a_stop_is_clean_whole_and_repeatable", "a stop is no death")
class TakesAStopForADeath(Altered, InlineLauncher):
    """An end that was wanted is told as a failure."""

    def change(self, event):
        return [Exited(False, "the engine ended")] if isinstance(event, Exited) else [event]


@caught_by("TestInline", "test_a_stop_is_clean_whole_and_repeatable", "something came after Exited")
class GoesOnAfterExited(Altered, InlineLauncher):
    """Something is told after the end."""

    def alter(self, world):
        events, seen = world.events, []

        def more(timeout):
            told = [Phase(0, "is over")] if seen else events(timeout)
            seen.extend(event for event in told if isinstance(event, Exited))
            return told

        world.events = more


@caught_by("TestSpawn", "test_a_stop_is_clean_whole_and_repeatable", "a process outlived its world")
class StartsAProcessOfItsOwn(Altered, SpawnLauncher):
    """One process of the world is nobody's to end."""

    def change(self, event):
        if not isinstance(event, Identified):
            return [event]
        child = subprocess.Popen(["sleep", "60"], start_new_session=True)
        return [structs.replace(event, ranks=(*event.ranks, identify(1, child.pid)))]


@caught_by("TestSpawn", "test_a_frozen_world_does_not_stop_but_can_be_killed", "stop took .* s, and its bound was")
class StopsWithoutABound(Altered, SpawnLauncher):
    """`stop` waits as long as it thinks right."""

    def alter(self, world):
        stop = world.stop
        world.stop = lambda timeout: stop(max(timeout, 8.0))


@caught_by("TestSpawn", "test_a_frozen_world_does_not_stop_but_can_be_killed", "a world that stands still is gone")
class BelievesThatItStopped(Altered, SpawnLauncher):
    """`stop` returns True when its time is over."""

    def alter(self, world):
        stop = world.stop
        world.stop = lambda timeout: stop(timeout) or True


@caught_by("TestInline", "test_wake_ends_a_wait_for_events", "did not return after wake")
class LosesWake(Altered, InlineLauncher):
    """`wake` does nothing."""

    def alter(self, world):
        world.wake = lambda: None


@caught_by("TestInline", "test_no_descriptor_is_left", "open after its worlds are gone")
class LeavesADescriptor(Altered, InlineLauncher):
    """Each world opens a pipe that nobody closes."""

    def alter(self, world):
        os.pipe()


# --------------------------------------------------------------------------------------------------------------- owners


@caught_by("TestSpawn", "test_a_killed_owner_takes_its_world_along", "processes outlive their owner")
class LeavesOrphans(UnderAnotherWatcher):
    """The death of the owner is not noticed."""

    watcher = "WatchesItsOwnerBadly"


@caught_by("TestSpawn", "test_an_owner_killed_during_a_stop_takes_its_world_along", "processes outlive their owner")
class TrustsAnEndThatWasAskedFor(UnderAnotherWatcher):
    """An owner that dies while it stops its world leaves what had not ended by then."""

    watcher = "TrustsAnEndThatWasAskedFor"


@caught_by("TestSpawn", "test_no_process_shows_the_key", "the key is in /proc/[0-9]+/environ")
class ShowsTheKey(SpawnLauncher):
    """The key goes by the environment."""

    def launch(self, spec):
        os.environ["ENGINE_KEY"] = spec.key.hex()
        try:
            return super().launch(spec)
        finally:
            del os.environ["ENGINE_KEY"]


@caught_by("TestInline", "test_a_script_needs_no_main_guard", "the script ran twice")
class RunsTheScriptAgain(InlineLauncher):
    """The user's script is imported anew by a process of its own, as multiprocessing does."""

    def launch(self, spec):
        main = sys.modules["__main__"]
        if hasattr(main, "told") and "AGAIN" not in os.environ:
            again = {**os.environ, "TOLD": json.dumps(main.told), "AGAIN": "1"}
            subprocess.Popen([sys.executable, main.__file__], env=again, stdin=subprocess.DEVNULL)
        return super().launch(spec)
