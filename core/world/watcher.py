"""The small process beside the ranks: starts them, notices every end, beats, and ends them all.

It never loads an engine, so nothing in it holds the interpreter's lock for long. Its own death takes the ranks along (by the
parent-death signal); the owner's death, seen by the end of its channel or of its process, ends the world.
"""

import os
import socket
import sys
import time
from collections.abc import Sequence

from tllm_core.contracts.interfaces import (
    Exited,
    Failed,
    Identified,
    Identity,
    Listening,
    Phase,
    Ready,
)
from tllm_core.contracts.messages import Obituary, RankState, Stopping
from tllm_core.wire.liveness import Liveness, Verdict
from tllm_core.world.channel import (
    Adopted,
    Channel,
    End,
    FromRank,
    Go,
    Kill,
    Launch,
    Leaving,
    Prepared,
    ToWatcher,
)
from tllm_core.world.hang import HangWatch
from tllm_core.world.lane import liveness_of
from tllm_core.world.loop import Loop
from tllm_core.world.news import News
from tllm_core.world.process import (
    POLL_S,
    adopt_orphans,
    identify,
    is_alive,
    kill_process,
    kill_session,
    open_pidfd,
)
from tllm_core.world.progress import Progress, create_shared
from tllm_core.world.startup import StartUp
from tllm_core.world.stderr import Relay
from tllm_core.world.ward import Ward, beat_of, start_wards

LEAVE_S = 5.0
"""How long the world may take to end once a rank is leaving."""
FOLLOWERS_S = 0.3
"""How long ranks above 0 may take to leave by themselves once rank 0 is gone."""
LAST_WORDS_S = 2.0
"""How long a rank that failed may take to tell its frontends."""
ORPHAN_S = 1.0
"""How long a world whose owner died may take to end in an orderly way."""
BLAME_S = 0.05
"""How long the report of a rank that failed waits for news of another one that was killed: then that is the cause."""
OBITUARY_S = 0.05
"""How far the news that the owner died is ahead of the orderly end that follows it."""


def watch(sock: socket.socket) -> int:
    """Runs a watcher on the inherited end of its owner's channel. Returns the exit code."""
    owner: Channel[ToWatcher] = Channel(sock, ToWatcher)
    adopt_orphans()
    messages = owner.wait()
    if not messages or not isinstance(messages[0], Launch):
        return 1
    sys.path[:] = messages[0].sys_path  # a transport may be a module that only the owner's own path leads to
    return Watcher(owner, messages[0]).run(messages[1:])


class Watcher:
    """One engine world on one host, from its first process to its last."""

    def __init__(self, owner: Channel[ToWatcher], launch: Launch) -> None:
        self._owner, self._launch = owner, launch
        self._loop, self._relay = Loop(), Relay(2)
        self._shared = create_shared()
        self._progress = Progress(self._shared)
        self._wards: list[Ward] = []
        self._adopted: list[Identity] = []
        self._verdict: Failed | None = None
        self._suspected: Ward | None = None
        self._ready = self._leaving = self._killed = False
        self._start_up = StartUp()
        self._liveness = Liveness(liveness_of(launch.spec))
        self._hangs = HangWatch(self._loop, self._relay, self._judge_hang)
        self._beats = 0
        self._news = News(owner, launch.spec, self._fail)

    def run(self, more: Sequence[ToWatcher] = ()) -> int:
        """Until every process of the world is gone and its owner was told. `more`: what came with the order to launch."""
        self._watch_owner()
        self._obey(more)
        if not self._leaving:
            self._start()
        while self._alive():
            self._loop.turn()
            self._flush()
        self._blame()
        self._sweep()
        self._owner.send(self._exited())
        self._owner.drain(1.0)
        self._relay.close(1.0)
        self._news.close()
        return 0 if self._verdict is None else 1

    def _start(self) -> None:
        try:
            self._start_ranks()
        except OSError as error:
            python = self._launch.python
            self._fail(Failed(f"the engine can't be started with {python}: {error.strerror or error}"))
        self._news.open(self._loop)
        self._set_timers()

    def _alive(self) -> list[Ward]:
        return [ward for ward in self._wards if ward.exitcode is None]

    def _flush(self) -> None:
        self._owner.flush()
        for ward in self._alive():
            ward.channel.flush()

    # -------------------------------------------------------------------------------------------------- owner

    def _watch_owner(self) -> None:
        self._loop.watch(self._owner, self._hear_owner)
        owner = Identity(0, self._launch.owner_pid, self._launch.owner_start)
        pidfd = open_pidfd(owner.pid)
        if pidfd is not None:
            self._loop.once(pidfd, self._lose_owner)
        if not is_alive(owner):
            self._lose_owner()

    def _hear_owner(self) -> None:
        self._obey(self._owner.receive())
        if self._owner.eof:
            self._loop.forget(self._owner)
            self._lose_owner()

    def _obey(self, messages: Sequence[ToWatcher]) -> None:
        for message in messages:
            if isinstance(message, Kill):
                self._leaving = True
                self._news.announce(Stopping())
                self._kill()
            elif isinstance(message, End):
                self._end()

    def _lose_owner(self) -> None:
        if not self._leaving:
            self._leaving = True
            self._news.announce(Obituary("the engine's owner is gone, and the engine ends"))
            self._loop.later(OBITUARY_S, self._end)
        self._loop.later(ORPHAN_S, self._kill)  # also where an end that the owner had asked for does not come

    def _end(self) -> None:
        """An orderly end, where there is something to put in order. How long it may take is the owner's to say."""
        self._leaving = True
        if self._ready:
            self._wards[0].channel.send(End())
        else:
            self._kill()

    def _exited(self) -> Exited:
        words = self._verdict
        if words is None:
            return Exited(clean=True)
        return Exited(False, words.message, words.rank, words.exitcode, words.stderr_tail)

    # --------------------------------------------------------------------------------------------------- time

    def _set_timers(self) -> None:
        self._beat()
        if any(ward.pidfd is None for ward in self._wards):
            self._poll()
        limit_s = self._launch.ready_timeout_s
        if limit_s is not None:
            self._loop.later(limit_s, lambda: self._give_start_up(limit_s))

    def _beat(self) -> None:
        self._loop.later(self._launch.beat_interval_s, self._beat)
        self._beats += 1
        now = time.monotonic()
        self._hangs.look(now, self._liveness, self._alive())
        beat = beat_of(self._beats, self._wards, self._progress, now)
        if RankState.GONE in beat.states:  # how it ended is worth more than that it did
            for ward in self._wards:
                self._look_after(ward)
            if self._suspected is not None and self._verdict is None:
                return  # whose end it was is about to be told
        self._start_up.note_states(beat.states)
        self._news.beat(beat)
        self._liveness.beat(beat, now)
        self._judge(self._liveness.poll(now, path_ok_at=now))

    def _judge(self, verdict: Verdict | None) -> None:
        if self._leaving:
            return
        if self._ready:
            self._hangs.note(self._liveness.hung, self._alive())
        if verdict is not None:
            self._fail(Failed(verdict.message, verdict.rank))

    def _judge_hang(self, verdict: Verdict) -> None:
        """The stacks of a hang are out. Where that is configured, it ends the world, unless it was over in the meantime."""
        if self._liveness.settings.end_hung and self._liveness.hung is not None and not self._leaving:
            tail = self._wards[verdict.rank or 0].tail.text()
            self._fail(Failed(verdict.message, verdict.rank, stderr_tail=tail))

    def _poll(self) -> None:
        for ward in self._wards:
            self._look_after(ward)
        self._loop.later(POLL_S, self._poll)

    def _give_start_up(self, limit_s: float) -> None:
        if not self._ready:
            self._fail(Failed(self._start_up.given_up(limit_s)))

    # -------------------------------------------------------------------------------------------------- ranks

    def _start_ranks(self) -> None:
        for ward in start_wards(self._launch, self._shared, self._relay):
            self._wards.append(ward)
            self._watch_ward(ward)
        self._owner.send(Identified(tuple(ward.identity for ward in self._wards), identify(-1, os.getpid())))

    def _watch_ward(self, ward: Ward) -> None:
        self._loop.watch(ward.channel, lambda: self._hear(ward))
        self._loop.watch(ward.tail.fd, lambda: self._read_tail(ward))
        if ward.pidfd is not None:
            self._loop.watch(ward.pidfd, lambda: self._look_after(ward))

    def _read_tail(self, ward: Ward) -> None:
        ward.tail.read()
        if ward.tail.eof:
            self._loop.forget(ward.tail.fd)

    def _hear(self, ward: Ward) -> None:
        for message in ward.channel.receive():
            self._take(ward, message)
        if ward.channel.eof:
            self._loop.forget(ward.channel)

    def _take(self, ward: Ward, message: FromRank) -> None:
        match message:
            case Listening():
                self._news.listening(message.address)
            case Phase():
                self._start_up.note(message)
                self._owner.send(message)
            case Ready():
                ward.ready = message
                self._judge_ready()
            case Prepared():
                for other in self._wards[1:]:
                    other.channel.send(Go())
            case Adopted():
                self._adopt(ward, message.pid)
            case Leaving() if ward.rank and not self._is_leaving():
                self._blame()  # a rank 0 that failed has dismissed the others too
                self._fail(Failed(f"engine rank {ward.rank} ended by itself", ward.rank))
            case Leaving():
                self._leaving = True
                self._news.announce(Stopping())
                self._loop.later(LEAVE_S, self._kill)
            case Failed():
                ward.failed = message
                self._suspect(ward)

    def _is_leaving(self) -> bool:
        """Rank 0 says that it leaves before it dismisses the others; it may just not have been heard yet."""
        first = self._wards[0]
        if not self._leaving and first.exitcode is None and not first.channel.eof:
            self._hear(first)
        return self._leaving

    def _judge_ready(self) -> None:
        """The world is ready when all ranks are; what it says of itself is rank 0's."""
        first = self._wards[0].ready
        if first is not None and all(ward.ready is not None for ward in self._wards):
            self._ready = True
            self._news.ready(first)

    def _adopt(self, ward: Ward, pid: int) -> None:
        self._adopted.append(identify(ward.rank, pid))
        pidfd = open_pidfd(pid)
        if pidfd is not None:
            self._loop.once(pidfd, lambda: self._lose_adopted(ward.rank, pid))

    def _lose_adopted(self, rank: int, pid: int) -> None:
        if not self._leaving:
            self._fail(Failed(f"process {pid}, which the engine of rank {rank} had started, is gone", rank))

    def _look_after(self, ward: Ward) -> None:
        """If the rank has ended: what it had still said comes first, then what its end means."""
        if ward.exitcode is not None or not ward.poll():
            return
        self._forget(ward)
        if ward.failed is not None:
            self._suspect(ward)
        elif not self._leaving:
            self._fail(ward.last_words())
        elif ward.rank == 0:
            self._loop.later(FOLLOWERS_S, self._dismiss)

    def _forget(self, ward: Ward) -> None:
        if not ward.tail.eof:
            self._loop.forget(ward.tail.fd)
            ward.tail.read()
        if not ward.channel.eof:
            self._hear(ward)
        if not ward.channel.eof:
            self._loop.forget(ward.channel)
        if ward.pidfd is not None:
            self._loop.forget(ward.pidfd)
        ward.close()

    # ---------------------------------------------------------------------------------------------------- end

    def _suspect(self, ward: Ward) -> None:
        """A rank that says that it failed may only have lost another, whose own end is seen a little later."""
        if len(self._wards) == 1:
            self._fail(ward.last_words())
        elif self._suspected is None:
            self._suspected = ward
            self._loop.later(BLAME_S, self._blame)

    def _blame(self) -> None:
        if self._suspected is not None:
            self._fail(self._suspected.last_words())

    def _fail(self, words: Failed) -> None:
        """The first failure is told at once and ends the world; a rank that reported its own may still tell its frontends."""
        if self._verdict is not None:
            return
        self._verdict = words
        self._news.fail(words)
        self._leaving = True
        self._loop.later(LAST_WORDS_S, self._kill)
        for ward in self._alive():
            if ward.failed is None:
                ward.kill()

    def _dismiss(self) -> None:
        """Rank 0 has ended as it was told to; the others have nothing to follow any more."""
        for ward in self._alive():
            ward.ask_to_end()
        self._loop.later(LEAVE_S, self._kill)

    def _kill(self) -> None:
        for ward in self._alive():
            ward.kill()

    def _sweep(self) -> None:
        """Ends what the ranks have left behind."""
        for identity in filter(is_alive, self._adopted):
            kill_process(identity.pid)
        kill_session(os.getpid())
