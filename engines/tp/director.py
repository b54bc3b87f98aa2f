"""Several ranks as one runner: rank 0 tells the others what it is about to do, and they do the same."""

import logging
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from tllm_core.contracts.interfaces import EngineContext
from tllm_core.engines.tp.batch import ScheduledBatch
from tllm_core.engines.tp.comm.agree import REFUSALS, meeting
from tllm_core.engines.tp.comm.connect import connect
from tllm_core.engines.tp.devices import device_of
from tllm_core.engines.tp.orders import Order, batch_of, order_of, order_to_execute, order_with_text, text_of
from tllm_core.engines.tp.runner import Phase, Runner
from tllm_core.engines.tp.spec import TpSettings

log = logging.getLogger(__name__)


def runner_of(context: EngineContext, settings: TpSettings) -> Runner:
    """This rank's runner, once all ranks have met. Raises ConfigError for a world that does not fit the settings."""
    device = device_of(settings.device, context.rank, context.world_size)
    if context.world_size > 1:
        context.phase("meeting the other ranks", None)
    group = connect(context, settings, device)
    return Director(settings, group) if group.size > 1 and group.rank == 0 else Runner(settings, group)


class Director(Runner):
    """Rank 0 of several. What it raises beyond REFUSALS leaves the ranks at different places: `parted`, and all that is asked
    of it from then on raises RuntimeError."""

    _in_order = False
    """Whether the others wait for an order, and nothing else."""

    def load(self, phase: Phase) -> None:
        super().load(phase)
        self._in_order = True

    def execute(self, batch: ScheduledBatch) -> torch.Tensor | None:
        with self._told(order_to_execute(batch)), meeting(self.group):
            return super().execute(batch)

    def clear(self, blocks: Sequence[int]) -> None:
        with self._told(order_of(Order.CLEAR, blocks)):
            super().clear(blocks)

    def renew_cache(self) -> None:
        with self._told(order_of(Order.RENEW_CACHE)):
            super().renew_cache()

    def sleep(self, level: int) -> None:
        with self._told(order_of(Order.SLEEP, [level])):
            super().sleep(level)

    def wakeup(self) -> None:
        with self._told(order_of(Order.WAKEUP)):
            super().wakeup()

    def update(self, directory: Path) -> None:
        with self._told(order_with_text(Order.UPDATE, str(directory))):
            super().update(directory)

    def start_profile(self, directory: str) -> list[str]:
        with self._told(order_with_text(Order.START_PROFILE, directory)):
            return super().start_profile(directory)

    def stop_profile(self) -> list[str]:
        with self._told(order_of(Order.STOP_PROFILE)):
            return super().stop_profile()

    def close(self) -> None:
        """Dismisses the others, where they wait for it: in the middle of a call they would not understand."""
        if self._in_order:
            self._in_order = False
            try:
                self.group.broadcast(order_of(Order.END))
            except RuntimeError as error:
                log.warning("the other ranks could not be dismissed: %s", error)
        super().close()

    @contextmanager
    def _told(self, order: "array[int]") -> Iterator[None]:
        """Around what all ranks do now."""
        if self.parted is not None:
            raise RuntimeError(f"the ranks have parted: {self.parted}") from self.parted
        self._in_order = False
        try:
            self.group.broadcast(order)
            yield
        except REFUSALS:
            self._in_order = True
            raise
        except Exception as error:
            self.parted = error
            raise
        self._in_order = True


def follow(runner: Runner) -> None:
    """Ranks above 0: does as rank 0 says, until it says that this ends."""
    while (order := runner.group.broadcast(None))[0] != Order.END:
        if order[0] == Order.EXECUTE:
            runner.execute(batch_of(order))
        else:
            with suppress(*REFUSALS):  # rank 0 raises it too, and answers for all
                _obey(runner, order)


def _obey(runner: Runner, order: "array[int]") -> None:
    match order[0]:
        case Order.CLEAR:
            runner.clear(order[1:])
        case Order.RENEW_CACHE:
            runner.renew_cache()
        case Order.SLEEP:
            runner.sleep(order[1])
        case Order.WAKEUP:
            runner.wakeup()
        case Order.UPDATE:
            runner.update(Path(text_of(order)))
        case Order.START_PROFILE:
            runner.start_profile(text_of(order))
        case Order.STOP_PROFILE:
            runner.stop_profile()
        case kind:
            raise ValueError(f"rank 0 gave an order {kind} that this rank does not know")
