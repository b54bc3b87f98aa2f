"""A rank's process: from its inherited socket to its exit code."""

import faulthandler
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence

from tllm_core.contracts.interfaces import Ready
from tllm_core.world.channel import Begin, Channel, End, FromRank, Go, ToRank
from tllm_core.world.process import die_with_parent
from tllm_core.world.progress import UNREAD, Progress, Unread
from tllm_core.world.rank import RankContext, follow, lead, resolve
from tllm_core.world.stacks import answer_with_stacks
from tllm_core.world.words import failed_of

DRAIN_S = 5.0
"""How long a rank waits for its watcher to take a message. The watcher always reads; beyond this it is as good as gone."""


def run_rank(sock: socket.socket, parent: int) -> int:
    """Exit code 0 after an orderly end, 1 after a failure, which was reported."""
    die_with_parent(parent)
    faulthandler.enable()
    answer_with_stacks()
    channel: Channel[ToRank] = Channel(sock, ToRank)
    messages = channel.wait()
    if not messages or not isinstance(messages[0], Begin):
        return 1
    sys.path[:] = messages[0].sys_path
    return RankProcess(channel, messages[0], messages[1:]).run()


class RankProcess:
    """Runs a rank in this process's main thread, while another obeys the watcher."""

    def __init__(self, channel: Channel[ToRank], begin: Begin, more: Sequence[ToRank]) -> None:
        self._channel, self._begin = channel, begin
        self._go = threading.Event()
        self._context = RankContext(self._report, begin.rank, begin.world_size, begin.rendezvous, begin.rendezvous_fd)
        self._obey(more)

    def run(self) -> int:
        threading.Thread(target=self._listen, name="tllm-obey", daemon=True).start()
        try:
            parts = resolve(self._begin.spec)
        except Exception as error:
            self._report(failed_of(error, self._begin.rank))
            return 1
        try:
            if self._begin.rank == 0:
                lead(parts, self._context, self._report, self._progress())
            else:
                # A follower may sit in a collective call that never returns; rank 0 has ended by then.
                signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
                self._go.wait()
                follow(parts, self._context, self._report)
        except BaseException:
            return 1  # it was reported
        return 0

    def _progress(self) -> Unread:
        fd = self._begin.progress_fd
        return UNREAD if fd is None else Progress(fd)

    def _report(self, message: FromRank) -> None:
        self._channel.send(message)
        self._channel.drain(DRAIN_S)
        if isinstance(message, Ready):
            # What loading made lives as long as the engine: full collections need not walk it again.
            gc.collect()
            gc.freeze()

    def _listen(self) -> None:
        while messages := self._channel.wait():
            self._obey(messages)
        os._exit(1)  # the watcher is gone

    def _obey(self, messages: Sequence[ToRank]) -> None:
        for message in messages:
            if isinstance(message, Go):
                self._go.set()
            elif isinstance(message, End):
                self._context.end()
