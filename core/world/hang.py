"""What the watcher does about an engine that hangs: its ranks tell their stacks, once per hang, before anything else happens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tllm_core.wire.liveness import Liveness, Verdict
from tllm_core.world.loop import Loop
from tllm_core.world.stderr import Relay
from tllm_core.world.ward import Ward

KIN_S = 1.0
"""How long a step takes before what the ranks have started themselves is looked at, and how often then."""
APART_S = 0.1
"""How long one rank may take to write before the next is asked, so that their stacks don't mix."""
LAST_S = 0.5
"""How long the last one may take."""


class HangWatch:
    """Told with every beat whether the world hangs. `told` is called once the stacks of a hang are out."""

    def __init__(self, loop: Loop, relay: Relay, told: Callable[[Verdict], None]) -> None:
        self._loop, self._relay, self._told = loop, relay, told
        self._hangs = False
        self._looked_at = 0.0

    def look(self, now: float, liveness: Liveness, wards: Sequence[Ward]) -> None:
        """Before a beat. A rank may wait for a compiler that it has started: that one's work is the rank's."""
        age_s, every_s = liveness.last_step_age_s, min(KIN_S, liveness.settings.hang_after_s / 4)
        if age_s is not None and age_s > every_s and now - self._looked_at > every_s:
            self._looked_at = now
            for ward in wards:
                ward.look_at_kin()

    def note(self, verdict: Verdict | None, wards: Sequence[Ward]) -> None:
        """`verdict`: the hang as it is judged now, None while there is none. `wards`: the ranks that live."""
        if verdict is None:
            if self._hangs:
                self._say("the engine goes on")
        elif not self._hangs:
            self._say(f"{verdict.message}; what its threads are doing:")
            self._ask(verdict, wards)
        self._hangs = verdict is not None

    def _ask(self, verdict: Verdict, wards: Sequence[Ward]) -> None:
        if not wards:
            self._told(verdict)
            return
        ward, others = wards[0], wards[1:]
        self._say(f"the stacks of engine rank {ward.rank} (process {ward.identity.pid}):")
        if not ward.ask_for_stacks():
            self._say(f"engine rank {ward.rank} is stopped or gone, and can't tell them")
        self._loop.later(APART_S if others else LAST_S, lambda: self._ask(verdict, others))

    def _say(self, words: str) -> None:
        self._relay.put(f"tllm: {words}\n".encode())
