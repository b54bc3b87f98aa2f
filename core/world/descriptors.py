"""Descriptors that can be passed to children, also by a process whose standard streams are closed."""

import fcntl
import os
import socket

FIRST = 3
"""Below it are the standard streams: a child is given others there, which would go over what it was to inherit."""


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """As `socket.socketpair`, with both ends above the standard streams."""
    first, second = socket.socketpair()
    return lifted_socket(first), lifted_socket(second)


def pipe_pair() -> tuple[int, int]:
    """As `os.pipe`, with both ends above the standard streams."""
    reader, writer = os.pipe()
    return lifted(reader), lifted(writer)


def lifted(fd: int) -> int:
    """The descriptor, or a copy of it in its place where it has the number of a standard stream."""
    if fd >= FIRST:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST)
    finally:
        os.close(fd)


def lifted_socket(sock: socket.socket) -> socket.socket:
    """As `lifted`, which takes the socket over."""
    return sock if sock.fileno() >= FIRST else socket.socket(fileno=lifted(sock.detach()))


def is_inheritable(fd: int) -> bool:
    """Whether it is open and meant for children, as standard streams are; what else may have got a closed one's number is not."""
    try:
        return os.get_inheritable(fd)
    except OSError:
        return False
