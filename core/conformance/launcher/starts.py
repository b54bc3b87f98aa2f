"""A start that goes well: what is told of it, in which order, and that the world then serves."""

from __future__ import annotations

import pytest

from tllm_core.conformance.case import case
from tllm_core.conformance.launcher.subject import LauncherSuite
from tllm_core.contracts.interfaces import Capability, Failed, Identified, Listening, Phase, Ready
from tllm_core.contracts.messages import SamplingParams
from tllm_core.errors import ConfigError
from tllm_core.executor import GenerationExecutor
from tllm_core.world.process import is_alive

LOAD_S = 1.0
AFTER_S = 0.3
"""How long a world that is ready is listened to."""


class StartCases(LauncherSuite):
    """Identities first, then the address, then phases, then Ready."""

    @case("I12", timeout_s=60.0)
    def test_identities_come_first_and_before_the_weights(self) -> None:
        """`launch` returns before weights are loaded; the first event names every process of the world, and they live.

        If this fails: a death during loading can't be noticed, since nobody knows whose it would be.
        """
        world = self.launch(load_delay_s=LOAD_S)
        identified = world.identified()
        assert world.seen[0] is identified, f"the first event was {world.seen[0]}"
        assert not world.of(Ready), "Ready came before the weights could be loaded"
        assert [rank.rank for rank in identified.ranks] == [0]
        told = [*identified.ranks, *([identified.watcher] if identified.watcher else [])]
        assert all(is_alive(process) for process in told), f"not all are alive, or they are other processes: {told}"

    @case("I12", timeout_s=60.0)
    def test_a_start_is_told_in_order(self) -> None:
        """Identified, Listening, phases with what is loaded, then Ready; each but the phases once.

        If this fails: an owner connects too early or never, or can't show what start-up is doing.
        """
        world = self.launch(load_delay_s=LOAD_S, vocab_size=77)
        world.ready()
        world.watch(AFTER_S)
        kinds = [type(event) for event in world.seen]
        assert kinds.count(Identified) == kinds.count(Listening) == kinds.count(Ready) == 1, kinds
        assert kinds.index(Identified) < kinds.index(Listening) < kinds.index(Ready), kinds
        phases = world.of(Phase)
        assert "loading echo weights" in [phase.name for phase in phases], phases
        done = [phase.done for phase in phases if phase.name == "loading echo weights" and phase.done is not None]
        assert done == sorted(done), f"phases out of order: {done}"
        assert world.of(Ready)[0].info.vocab_size == 77, "Ready tells of another engine"
        assert world.of(Listening)[0].address.transport == self.transport_name

    @case("I12", timeout_s=60.0)
    def test_every_rank_is_named_and_ready_waits_for_the_last(self) -> None:
        """A world of several ranks names each of them once, by a process of its own; it is not ready while one still loads.

        If this fails: a rank is not waited for, or not watched.
        """
        count = self.need_ranks()
        hang = [{"at": "start", "do": "hang", "rank": count - 1}]
        world = self.launch(world_size=count, faults=hang, load_delay_s=LOAD_S / 4)
        ranks = world.identified().ranks
        assert [rank.rank for rank in ranks] == list(range(count))
        assert len({rank.pid for rank in ranks}) == count
        world.until(Phase, lambda phase: phase.rank == 0)
        world.watch(LOAD_S)
        assert not world.of(Ready), "it is ready, and its last rank is not"
        other = self.launch(world_size=count)
        assert len(other.ready().ranks) == count

    @case("I1", "I2", timeout_s=60.0)
    def test_a_world_that_it_starts_serves(self) -> None:
        """An executor over the launcher answers requests, and after its shutdown no process of the world is there.

        If this fails: the world listens elsewhere than it says, or does not take the key that it was given.
        """
        executor = self.executor()
        prompts = [[number + 1, number + 2, number + 3] for number in range(8)]
        results = [executor.generate_async(prompt, SamplingParams(max_tokens=5)) for prompt in prompts]
        assert [len(result.result(30).outputs[0].token_ids) for result in results] == [5] * 8
        assert executor.check_health()
        executor.shutdown(20.0)

    @case("I5", timeout_s=60.0)
    def test_a_wrong_engine_option_is_told_by_name(self) -> None:
        """An option that the engine does not have is a ConfigError of `launch`, or the start fails with it; it names the option.

        If this fails: a typing mistake starts another engine than was meant.
        """
        try:
            words = self.launch(vocab_sise=3).until(Failed).message
        except ConfigError as error:
            words = str(error)
        assert "vocab_sise" in words

    @case()
    def test_it_says_what_it_needs_of_a_transport(self) -> None:
        """A launcher whose worlds are other processes needs CROSS_PROCESS; a transport without it is refused at once.

        If this fails: `needs` is not declared, and a pair that can't work hangs instead of being refused.
        """
        needs = self.launcher_class.needs
        assert isinstance(needs, Capability)
        if self.in_process():
            return
        assert Capability.CROSS_PROCESS in needs, f"{self.subject} starts processes, and needs is {needs!r}"
        with pytest.raises(ConfigError, match="inproc"):
            GenerationExecutor.create(
                engine="echo", transport="inproc", launcher=self.reference, launcher_options=dict(self.settings)
            )
