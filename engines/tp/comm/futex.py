"""Waiting for a number in shared memory to change, as the system offers it: the futex of Linux, on 64-bit x86."""

import ctypes
import errno
import os
import platform
import sys

_SYS_FUTEX = 202
_WAIT, _WAKE = 0, 1
_ALL = 2**31 - 1

USABLE = sys.platform == "linux" and platform.machine() == "x86_64"
"""Also whether stores are seen by other cores in the order they were made, which shared memory without fences relies on."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


if USABLE:
    _syscall = ctypes.CDLL(None, use_errno=True).syscall
    _syscall.argtypes = (
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint32,
    )
    _syscall.restype = ctypes.c_long


def wait(word: ctypes.c_uint32, seen: int, timeout_s: float) -> None:
    """Returns at once where `word` is no longer `seen`; else sleeps until a `wake`, a signal or the timeout.

    The interpreter's lock is free meanwhile. Raises OSError where the system refuses.
    """
    whole = int(timeout_s)
    limit = _Timespec(whole, int((timeout_s - whole) * 1e9))
    if _syscall(_SYS_FUTEX, ctypes.addressof(word), _WAIT, seen, ctypes.addressof(limit), None, 0) < 0:
        code = ctypes.get_errno()
        if code not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
            raise OSError(code, f"futex: {os.strerror(code)}")


def wake(word: ctypes.c_uint32) -> None:
    """Wakes all that wait for `word`, in any process that maps it."""
    _syscall(_SYS_FUTEX, ctypes.addressof(word), _WAKE, _ALL, None, None, 0)
