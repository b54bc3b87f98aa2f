"""One frontend of one engine generation: the receive thread, the watch over the world, the verdict and the end.

Threads: `tllm-receive` alone reads the link and sweeps; `tllm-world` reads the world's events and only posts verdicts, so
that a final frame that is still in the socket is never overtaken by the news of the death.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Sequence

from tllm_core.contracts.interfaces import Beaten, Exited, Failed, Identified, Identity, World, WorldEvent
from tllm_core.contracts.messages import (
    Abort,
    Beat,
    Control,
    ControlReply,
    DownMessage,
    GenerationRequest,
    Goodbye,
    Obituary,
    Plain,
    StepBatch,
    Stop,
    Submit,
)
from tllm_core.errors import (
    BrokerLost,
    Cause,
    ControlError,
    EngineDeadError,
    ExecutorClosedError,
    PortClosed,
    RequestError,
    TllmError,
    TransportError,
)
from tllm_core.hooks import Observers
from tllm_core.ledger.ids import ClientIds
from tllm_core.ledger.ledger import ABORTED, Call, Effects, Ledger, Mailbox
from tllm_core.ledger.waiting import Deadline, ThreadWaiter, wake_all
from tllm_core.wire.link import FrontendLink
from tllm_core.wire.liveness import DEFAULT_LIVENESS, Liveness
from tllm_core.wire.path import PathWatch

log = logging.getLogger("tllm_core")

TICK_S = 0.1
"""How long the receive thread sleeps at most: results that were garbage collected are aborted within it."""
UNSENDABLE = (TypeError, ValueError, OverflowError, RecursionError)
"""What a value makes the codec raise that no check foresaw."""
DRAIN_S = 0.05
QUIET_S = 0.005
DEAD_SHUTDOWN_S = 5.0
DEAD_STOP_S = 2.0
"""How long a world that is known dead may take to end by itself; killing it takes the rest of DEAD_SHUTDOWN_S at most."""


class Frontend:
    """Submits, aborts and calls over a link, and delivers what comes back to the ledger."""

    def __init__(
        self,
        link: FrontendLink,
        frontend_id: int,
        world: World | None = None,
        *,
        liveness: Liveness | None = None,
        observers: Observers | None = None,
        mailbox_bytes: int = 64 << 20,
    ) -> None:
        self.ledger = Ledger(mailbox_bytes)
        self.link = link
        self.world = world
        self.observers = observers or Observers()
        self.ranks: tuple[Identity, ...] = ()
        self.last_beat: Beat | None = None
        self.last_batch_at: float | None = None
        self._ids = ClientIds(frontend_id)
        self._call_ids = ClientIds(frontend_id)
        self._liveness = liveness
        settings = DEFAULT_LIVENESS if liveness is None else liveness.settings
        self._path = PathWatch(settings.broker_down_after_s)
        self._verdict: TllmError | None = None
        self.pid = os.getpid()
        self._room_waiters: list[ThreadWaiter] = []
        self._close_requested = self._leaving = False
        self._closing = threading.Event()
        self._close_lock = threading.Lock()
        self._closed = threading.Event()
        self.ended = threading.Event()
        self.world_ended = self.ended if world is None else threading.Event()
        self.world_error: EngineDeadError | None = None
        self._threads = [threading.Thread(target=self._receive_loop, name="tllm-receive", daemon=True)]
        if world is not None:
            self._threads.append(threading.Thread(target=self._watch_loop, name="tllm-world", daemon=True))
        _HERE.add(self)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    # ---------------------------------------------------------------------------------------------- callers' side

    def submit(self, request: GenerationRequest) -> Mailbox:
        """Registers, then sends; a send that fails takes the registration back. Never blocks."""
        if self._leaving:
            self._raise_closed()
            raise ExecutorClosedError("the executor is shutting down: it takes no new requests")
        client_id = self._ids.draw()
        box = self.ledger.register(client_id, request.sampling.n)
        try:
            self.link.send(Submit(client_id, request))
        except BaseException as error:
            if not self.ledger.withdraw(client_id):
                self._raise_closed()
            if isinstance(error, UNSENDABLE):
                raise RequestError(f"the request can't cross a process boundary: {error}") from error
            raise
        return box

    def abort(self, client_id: int) -> None:
        """Settles here at once, then tells the engine; a quiet no-op for an id that has ended or is unknown."""
        effects = self.ledger.settle(client_id, ABORTED)
        if effects is not None:
            self._apply(effects)
            self._tell_abort(client_id)

    def call(
        self, method: str, args: Sequence[Plain], ranks: tuple[int, ...] | None, timeout_s: float | None = None
    ) -> Call:
        """`timeout_s`: how long the caller means to wait, as the engine is told; None = without end."""
        call = self.ledger.register_call(self._call_ids.draw())
        try:
            self.link.send(Control(call.call_id, method, args, ranks, timeout_s))
        except BaseException as error:
            self.ledger.withdraw_call(call.call_id)
            if isinstance(error, UNSENDABLE):
                raise ControlError(f"the call of {method!r} can't cross a process boundary: {error}") from error
            raise
        return call

    def wait_for_room(self) -> None:
        """Returns once something came back from the engine, or after a tick: worth another try at a full backlog."""
        waiter = ThreadWaiter()
        self._room_waiters.append(waiter)
        waiter.wait(TICK_S)

    def last_batch_age_s(self) -> float | None:
        return None if self.last_batch_at is None else time.monotonic() - self.last_batch_at

    def rank_state(self, rank: int) -> str:
        """ "running", "stopped" or "gone" as of the last beat; "unknown" where nothing beats."""
        if self._closed.is_set() and self.world is not None and self.world.owned:
            return "gone"
        beat = self.last_beat
        return "unknown" if beat is None or rank >= len(beat.states) else beat.states[rank].name.lower()

    def _tell_abort(self, client_id: int) -> None:
        with contextlib.suppress(TransportError):  # a lane that is lost has no requests in the engine
            self.link.send(Abort(client_id))

    def _raise_closed(self) -> None:
        closed = self.ledger.closed
        error = None if closed is None else closed.fresh_error()
        if error is not None:
            raise error

    # --------------------------------------------------------------------------------------------- receive thread

    def _receive_loop(self) -> None:
        """Lives until the port is closed, also after a death: somebody must do the chores."""
        while True:
            try:
                if self._verdict is None:
                    self._pump(TICK_S)
                    self._judge_path()
                else:
                    self._bury(self._verdict)
                    # What a dead lane is still given would hold up the port's end.
                    if self._closed.wait(TICK_S):
                        return
                self._do_chores()
            except PortClosed:
                return
            except TransportError as error:
                self.post(error)
                self._closed.wait(TICK_S)  # a lane that is lost raises each time
            except Exception as error:
                log.exception("the receive thread failed; every pending request ends")
                self.post(TransportError(f"the receive thread failed: {error!r}"))

    def _pump(self, timeout: float) -> bool:
        messages = self.link.receive(timeout)
        for message in messages:
            self._take(message)
        return bool(messages)

    def _judge_path(self) -> None:
        """A path that is down for long is this side's loss and says nothing about the engine."""
        down_s = self._path.lost_for_s(time.monotonic(), self.link.path()[1])
        if down_s is not None:
            words = f"there has been no path to the engine for {down_s:.1f} s (broker_down_after_s)"
            self.post(BrokerLost(words + self._why_down()))

    def _why_down(self) -> str:
        state = self.link.path()[0]
        return "" if state.up else f": {state.reason}"

    def _do_chores(self) -> None:
        for client_id in self.ledger.take_dropped():
            self.abort(client_id)
        if self._room_waiters:
            waiters, self._room_waiters = self._room_waiters, []
            wake_all(waiters)
        if self._close_requested and not self._closing.is_set():
            self._closing.set()
            threading.Thread(target=self.close, args=(DEAD_SHUTDOWN_S,), name="tllm-close", daemon=True).start()

    def _take(self, message: DownMessage) -> None:
        if isinstance(message, StepBatch):
            effects = self.ledger.deliver(message)
            self.last_batch_at = time.monotonic()
            wake_all(effects.woken)
            for client_id in effects.aborts:
                self._tell_abort(client_id)
            if self.observers.batch:
                self.observers.on_batch(message)
            if self.observers.settled:
                self.observers.on_settled(effects.settled)
        elif isinstance(message, ControlReply):
            wake_all(self.ledger.reply(message))
        elif isinstance(message, Obituary):
            self.post(EngineDeadError(message.cause()))
        elif not self._closing.is_set():  # Stopping, and not by this side
            self.post(EngineDeadError(Cause("the engine was stopped")))

    def _apply(self, effects: Effects) -> None:
        wake_all(effects.woken)
        if self.observers.settled:
            self.observers.on_settled(effects.settled)

    def post(self, error: TllmError) -> None:
        """Posts a verdict; the first one stays. From any thread; never blocks."""
        if self._verdict is None:
            self._verdict = error
        self.ended.set()
        self.link.wake()

    def _bury(self, error: TllmError) -> None:
        """Delivers what had already arrived, then ends everything that is open. Once."""
        if self.ledger.closed is not None:
            return
        until = time.monotonic() + DRAIN_S
        with contextlib.suppress(TransportError):
            while time.monotonic() < until and self._pump(QUIET_S):
                pass
        self._apply(self.ledger.sweep(error))

    # ----------------------------------------------------------------------------------------------- world thread

    def _watch_loop(self) -> None:
        try:
            while not self._closed.is_set() and self._watch() and self._judge():
                pass
        except Exception as error:
            log.exception("the watch over the engine world failed; it counts as dead")
            self._lose_world(Cause(f"the watch over the engine world failed: {error!r}"))
        finally:
            self.world_ended.set()

    def _watch(self) -> bool:
        """Takes what the world says; False once it is gone."""
        for event in self._next_events():
            if isinstance(event, Identified):
                self.ranks = event.ranks
            elif isinstance(event, Beaten):
                self.last_beat = event.beat
                if self._liveness is not None:
                    self._liveness.beat(event.beat, time.monotonic())
            elif isinstance(event, Failed):
                self._lose_world(event.cause())
            elif isinstance(event, Exited):
                if not self._closing.is_set():
                    self._lose_world(event.cause())
                return False
        return True

    def _lose_world(self, cause: Cause) -> None:
        """The first cause stays, also where the lane to the world had been lost before."""
        error = EngineDeadError(cause)
        self.world_error = self.world_error or error
        self.post(error)

    def _next_events(self) -> Sequence[WorldEvent]:
        assert self.world is not None
        # A judge that looks at most twice within a deadline would take itself for frozen.
        tick_s = TICK_S if self._liveness is None else min(TICK_S, self._liveness.settings.dead_after_s / 8)
        try:
            return self.world.events(tick_s)
        except TransportError as error:  # its lane is lost, which is no death
            if not self._closing.is_set():
                self.post(error)
            return [Exited(clean=True)]

    def _judge(self) -> bool:
        """False once the world counts as dead; a path that is lost says nothing of it."""
        if self._liveness is None or self.world is None or self._closing.is_set():
            return True
        verdict = self._liveness.poll(time.monotonic(), self.world.path_ok_at())
        if verdict is None:
            return True
        if verdict.kind == "broker_down":
            self.post(BrokerLost(verdict.message + self._why_down()))
            return True
        self._lose_world(verdict.cause())
        return False

    # ---------------------------------------------------------------------------------------------------- the end

    def close(self, timeout: float) -> bool:
        """Tells, waits, abandons. Idempotent, from any thread; a second caller waits for the first. True for the first."""
        self._closing.set()
        if self._liveness is not None:
            self._liveness.disarm()
        # A death that was noticed before is what everybody hears, also where its sweep had not begun.
        self._apply(self.ledger.sweep(self._verdict or ExecutorClosedError("the executor was shut down")))
        with self._close_lock:
            if self._closed.is_set():
                return False
            self._end_world(Deadline(timeout))
            self._closed.set()
            self.ended.set()
            self.link.close()
            for thread in self._threads:
                if thread is not threading.current_thread() and thread.is_alive():
                    thread.join(DEAD_SHUTDOWN_S)
        return True

    def _end_world(self, deadline: Deadline) -> None:
        owned = self.world is not None and self.world.owned
        if self._verdict is None:
            with contextlib.suppress(TllmError):
                self.link.send(Stop() if owned else Goodbye())
        if self.world is None:
            return
        budget = deadline.left() or 0.0
        is_dead = isinstance(self._verdict, EngineDeadError)
        if is_dead:
            budget = min(budget, DEAD_STOP_S)
        ended = self.world.stop(max(budget, 0.0))
        if not ended and not is_dead and budget > 0:  # else its end is known, or it was to be killed
            log.warning("the engine did not end in the time that it was given for that, and is killed")
        self.world.kill()

    def leave(self) -> None:
        """From now on new requests are refused. Only sets a flag: signal handlers and finalizers run inside any lock."""
        self._leaving = True

    def close_soon(self) -> None:
        """Has the receive thread begin the end within a tick; only sets a flag, since finalizers run inside any lock."""
        self._close_requested = True

    @property
    def liveness(self) -> Liveness | None:
        """What is known of the world from its beats; None where nothing beats."""
        return self._liveness

    @property
    def verdict(self) -> TllmError | None:
        return self._verdict


def foreign() -> ExecutorClosedError:
    """What everything of an executor raises in a process that its own was forked to."""
    return ExecutorClosedError("this executor belongs to the process that this one was forked from; create one here")


_HERE: weakref.WeakSet[Frontend] = weakref.WeakSet()


def _disown_all() -> None:
    """Results that a child inherits would else wait for a thread that is not there."""
    for frontend in list(_HERE):
        frontend.ledger.disown(foreign())


os.register_at_fork(after_in_child=_disown_all)
