"""The engine side: commands in -> engine -> step batches out.

One loop, one thread. It never waits for a lane: rows that a lane has no room for are parked, and a frontend that does not
read is given up. A RequestError ends its request; anything else that the engine raises ends the loop and is its death.
"""

import contextlib
import itertools
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from msgspec import Struct

from tllm_core.contracts.interfaces import Engine
from tllm_core.contracts.messages import (
    Abort,
    Control,
    ControlReply,
    EngineInfo,
    ErrorReport,
    Goodbye,
    Introduce,
    Output,
    Stop,
    Stopping,
    Submit,
    UpMessage,
)
from tllm_core.contracts.values import seconds
from tllm_core.errors import RequestError, TransportError
from tllm_core.wire.link import EngineLink
from tllm_core.world.budget import ErrorBudget
from tllm_core.world.calls import Calls
from tllm_core.world.deadlines import Deadlines
from tllm_core.world.intake import checked
from tllm_core.world.outbox import Outbox
from tllm_core.world.pulse import Pulse
from tllm_core.world.words import obituary_of

log = logging.getLogger(__name__)

RETRY_S = 0.005
"""How often a full lane is tried again while the engine is idle."""


BLAME_S = 0.1
"""How long the word of a rank 0 that failed waits for the watcher's, where there are more ranks."""


class WorkerSettings(Struct, frozen=True, kw_only=True):
    """parked_bytes: of one session at most. stall_after_s: how long its lane may be full. Beyond either it is expelled.

    error_budget: how many requests may fail in steps within `error_budget_window_s` seconds before the engine counts as dead.
    """

    parked_bytes: int = 16 * 2**20
    stall_after_s: float = 10.0
    error_budget: int | None = None
    error_budget_window_s: float = 60.0


DEFAULTS = WorkerSettings()

Watch = Callable[[Introduce, Callable[[], None]], Callable[[], None]]
"""Calls the second back, from any thread, once that process has ended; returns what forgets it."""


def unwatched(who: Introduce, then: Callable[[], None]) -> Callable[[], None]:
    """For frontends whose processes can't be seen from here: their silence tells."""
    return lambda: None


def _stay() -> None:
    """Where nothing reads the link while the engine works."""


class Entry(Struct, gc=False):
    """A request that the engine owes something. `ended`: sequences that have ended, None where there is only one."""

    outbox: Outbox
    client_id: int
    sequences: int = 1
    ended: set[int] | None = None


class Worker:
    """Runs one engine for all sessions of one link. `stop` and `wake` may be called from any thread."""

    def __init__(
        self,
        engine: Engine,
        link: EngineLink,
        info: EngineInfo,
        *,
        world_size: int = 1,
        settings: WorkerSettings = DEFAULTS,
        progress: Callable[[int, bool], None] = lambda steps, busy: None,
        excuse: Callable[[float], None] = lambda until: None,
        watch: Watch = unwatched,
        pulse: Pulse | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._receive = link.receive if pulse is None else pulse.receive
        self._set_off = _stay if pulse is None else pulse.busy
        self.counters: Counter[str] = Counter()
        self._watch = watch
        self._forget_process: dict[int, Callable[[], None]] = {}
        self._lost: deque[int] = deque()
        self._engine, self._link, self._settings = engine, link, settings
        self._calls = Calls(engine, info, world_size, self._count)
        self._progress, self._excuse, self._clock = progress, excuse, clock
        self._budget = ErrorBudget(settings.error_budget, settings.error_budget_window_s)
        self._world_size = world_size
        self._ids = itertools.count(1)
        self._entries: dict[int, Entry] = {}
        self._outboxes: dict[int, Outbox] = {}
        self._dirty: dict[int, Outbox] = {}
        self._deadlines = Deadlines(self._entries)
        self._steps = 0
        self._again = self._woken = self._stopping = False

    def run(self) -> None:
        """Until `stop()` or Stop. Whatever the engine raises is raised again, after all sessions were told."""
        try:
            while not self._stopping:
                self._turn()
            self._flush()
            self._link.broadcast(Stopping())
        except BaseException as error:
            if self._world_size > 1:
                # It may only have lost another rank: the watcher, which sees that one's end, speaks first and ends this one.
                time.sleep(BLAME_S)
            with contextlib.suppress(TransportError):
                self._link.broadcast(obituary_of(error))
            raise

    def stop(self) -> None:
        """Ends `run` in an orderly way."""
        self._stopping = True
        self._link.wake()

    def wake(self) -> None:
        """Has the engine's `step` called soon."""
        self._woken = True
        self._link.wake()

    def _turn(self) -> None:
        commands = self._receive(self._patience())
        self._set_off()
        if commands:
            self._progress(self._steps, True)
        for session, command in commands:
            self._take(session, command)
        while self._lost:
            self._lose(self._lost.popleft())
        for request_id in self._deadlines.pop_due(self._clock()):
            self._time_out(request_id)
        if self._again or self._woken or commands:
            self._progress(self._steps, self._is_busy())
            self._step()
        self._flush()
        self._progress(self._steps, self._is_busy())
        self._budget.check()

    def _is_busy(self) -> bool:
        """Whether there is work that the engine should get on with."""
        return bool(self._entries) and not self._engine.paused

    def _patience(self) -> float | None:
        """How long to wait for commands: not at all while there is work, else until something is due."""
        if self._again or self._woken or self._stopping:
            return 0
        retry = RETRY_S if self._dirty else None
        due = self._deadlines.next_at()
        if due is None:
            return retry
        left = max(0.0, due - self._clock())
        return left if retry is None else min(left, retry)

    def _step(self) -> None:
        self._woken = False
        step = self._engine.step()
        if step.outputs or step.again:  # else it was only asked, as after every command, and had nothing to do
            self._steps += 1
        self._again = step.again
        if len(self._outboxes) != 1 or not self._collect_whole(step.outputs):
            self._collect(step.outputs)

    def _collect_whole(self, outputs: Sequence[Output]) -> bool:
        """`_collect` for the usual step of a single session, in half the time; False, and nothing done, for any other."""
        if not outputs:
            return True
        entries = self._entries
        try:
            owners = [entries[output.request_id] for output in outputs]
        except KeyError:
            return False
        outbox = owners[0].outbox
        if not outbox.rows.fill([entry.client_id for entry in owners], outputs):
            return False
        self._dirty[outbox.session] = outbox
        for row, _, _ in outbox.rows.finishes:
            self._end(outputs[row].request_id, owners[row], outputs[row])
        return True

    def _collect(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            entry = self._entries.get(output.request_id)
            if entry is None:
                self.counters["late_rows"] += 1
                continue
            self._dirty[entry.outbox.session] = entry.outbox
            entry.outbox.rows.add(entry.client_id, output)
            if output.finish_reason is not None or output.error is not None:
                self._end(output.request_id, entry, output)

    def _end(self, request_id: int, entry: Entry, output: Output) -> None:
        """One sequence ended; an error, or the last sequence, ends the request."""
        if output.error is not None:
            self._budget.spend(output.error, self._clock())
        elif entry.ended is not None:
            entry.ended.add(output.index)
            if len(entry.ended) < entry.sequences:
                return
        self._forget(request_id, entry)

    def _forget(self, request_id: int, entry: Entry) -> None:
        if self._entries.pop(request_id, None) is not None:
            del entry.outbox.requests[entry.client_id]

    def _flush(self) -> None:
        if not self._dirty:
            return
        now = self._clock()
        for session, outbox in list(self._dirty.items()):
            for client_id in outbox.flush(now):
                self._fail(outbox, client_id, "the output is larger than max_message_bytes")
            if outbox.stalled_since is None and not outbox.rows.client_ids:
                del self._dirty[session]
            elif outbox.stalled_since is not None:
                self._judge(outbox, now - outbox.stalled_since)

    def _judge(self, outbox: Outbox, stalled_s: float) -> None:
        """Gives a frontend up that has not read for too long or is owed too much."""
        if stalled_s > self._settings.stall_after_s:
            reason = f"the frontend took nothing for {stalled_s:.1f} s (stall_after_s)"
        elif outbox.parked_bytes > self._settings.parked_bytes:
            reason = f"the frontend is {outbox.parked_bytes} bytes behind (parked_bytes)"
        else:
            return
        log.warning("session %x is expelled: %s", outbox.session, reason)
        self.counters["expelled"] += 1
        self._leave(outbox.session)
        self._link.end(outbox.session, reason)

    def _take(self, session: int, command: UpMessage) -> None:
        if isinstance(command, Stop):
            self._stopping = True
            return
        outbox = self._outboxes.get(session)
        if outbox is None:
            if session not in self._link.sessions:
                return  # it was given up while the pulse held what it had said
            outbox = self._outboxes[session] = Outbox(session, self._link.send)
        match command:
            case Submit():
                self._submit(outbox, command)
            case Abort():
                self._abort(outbox, command.client_id)
            case Control():
                self._control(outbox, command)
            case Goodbye():
                self._leave(session)
            case Introduce() if session not in self._forget_process:
                self._introduce(session, command)

    def _introduce(self, session: int, who: Introduce) -> None:
        """A number that is no process's is not believed, and no more: the silence of such a frontend tells."""
        try:
            self._forget_process[session] = self._watch(who, partial(self._notice, session))
        except (ValueError, OverflowError, OSError):
            self.counters["odd_introductions"] += 1

    def _notice(self, session: int) -> None:
        """The process behind a session has ended. From any thread."""
        self._lost.append(session)
        self._link.wake()

    def _lose(self, session: int) -> None:
        if session in self._outboxes:
            self.counters["lost_frontends"] += 1
            self._leave(session)
            self._link.end(session, "its process has ended")

    def _submit(self, outbox: Outbox, command: Submit) -> None:
        client_id, request = command.client_id, command.request
        if client_id in outbox.requests:
            self.counters["duplicate_client_ids"] += 1
            return
        request_id = next(self._ids)
        try:
            wanted = checked(request_id, request)
        except RequestError as error:
            self._report(outbox, client_id, ErrorReport(str(error), error.field))
            return
        if request.timeout_s is not None:
            self._deadlines.add(request_id, self._clock() + request.timeout_s)
        n = request.sampling.n
        self._entries[request_id] = Entry(outbox, client_id, n, set() if n > 1 else None)
        outbox.requests[client_id] = request_id
        try:
            self._engine.submit(wanted)
        except RequestError as error:
            self._forget(request_id, self._entries[request_id])
            self._report(outbox, client_id, ErrorReport(str(error), error.field))

    def _report(self, outbox: Outbox, client_id: int, error: ErrorReport) -> None:
        outbox.rows.fail(client_id, error)
        self._dirty[outbox.session] = outbox

    def _fail(self, outbox: Outbox, client_id: int, message: str) -> None:
        """Ends a request whose rows can't be sent; one that has ended meanwhile still hears of it."""
        self._abort(outbox, client_id)
        self._report(outbox, client_id, ErrorReport(message))

    def _abort(self, outbox: Outbox, client_id: int | None) -> None:
        """One request, or all of the session's. The frontend has settled them already, so that nothing is sent; later outputs
        are dropped. Unknown ids are ignored."""
        for victim in list(outbox.requests) if client_id is None else (client_id,):
            request_id = outbox.requests.get(victim)
            if request_id is not None:
                self._forget(request_id, self._entries[request_id])
                self._engine.abort(request_id)

    def _leave(self, session: int) -> None:
        self._forget_process.pop(session, lambda: None)()
        outbox = self._outboxes.pop(session, None)
        if outbox is not None:
            self._abort(outbox, None)
            self._dirty.pop(session, None)

    def _time_out(self, request_id: int) -> None:
        entry = self._entries[request_id]
        self._forget(request_id, entry)
        self._engine.abort(request_id)
        for index in range(entry.sequences):
            if entry.ended is None or index not in entry.ended:
                entry.outbox.rows.end(entry.client_id, index, "timeout")
        self._dirty[entry.outbox.session] = entry.outbox

    def _control(self, outbox: Outbox, command: Control) -> None:
        self._dirty[outbox.session] = outbox
        try:
            wait_s = seconds(command.timeout_s)
        except ValueError as error:
            outbox.reply(ControlReply(command.call_id, error=str(error)))
            return
        # Until the caller gives up, an engine that does what it was asked to is not hung.
        self._excuse(math.inf if wait_s is None else self._clock() + wait_s)
        outbox.reply(self._calls.answer(command))
        self._excuse(0.0)

    def _count(self) -> Mapping[str, int]:
        return {"sessions": len(self._outboxes), "requests": len(self._entries), **self.counters, **self._link.counters}
