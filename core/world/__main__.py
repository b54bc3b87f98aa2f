"""`python -m tllm_core.world watcher|rank FD PARENT`: what a launcher starts. Everything else comes over the inherited socket."""

import signal
import socket
import sys


def main() -> int:
    role, fd, parent = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    # The terminal's Ctrl-C is for the owner, which ends this process in its own way.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # An owner that ignores its children's ends passes that on over exec, and then nobody knows how a rank ended.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sock = socket.socket(fileno=fd)
    if role == "watcher":
        from tllm_core.world.watcher import watch

        return watch(sock)
    from tllm_core.world.bootstrap import run_rank

    return run_rank(sock, parent)


if __name__ == "__main__":
    sys.exit(main())
