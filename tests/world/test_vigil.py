import os
import subprocess
import sys
import threading

import pytest

from tllm_core.contracts.interfaces import Identity
from tllm_core.world.process import LINUX, identify
from tllm_core.world.vigil import Vigil

pytestmark = pytest.mark.skipif(not LINUX, reason="pidfds are Linux's")


@pytest.fixture
def sleeper():
    started = []

    def start():
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdin.close()


@pytest.fixture
def vigil():
    vigil = Vigil()
    yield vigil
    vigil.close()


def test_the_end_of_a_process_is_told_once_and_before_it_is_reaped(vigil, sleeper):
    process, told = sleeper(), threading.Semaphore(0)
    vigil.watch(identify(0, process.pid), told.release)
    process.kill()
    assert told.acquire(timeout=20)
    assert process.returncode is None
    process.wait()
    assert not told.acquire(timeout=0.1)


def test_a_process_that_is_gone_is_told_at_once(vigil, sleeper):
    process, told = sleeper(), threading.Event()
    identity = identify(0, process.pid)
    process.kill()
    process.wait()
    vigil.watch(identity, told.set)
    assert told.is_set()


def test_another_process_under_the_same_pid_is_not_taken_for_it(vigil, sleeper):
    process, told = sleeper(), threading.Event()
    vigil.watch(Identity(0, process.pid, identify(0, process.pid).start_time - 1), told.set)
    assert told.is_set()


def test_what_is_forgotten_is_not_told_and_holds_no_descriptor(vigil, sleeper):
    one, other, told = sleeper(), sleeper(), threading.Event()
    vigil.watch(identify(0, other.pid), told.set)
    descriptors = len(os.listdir("/proc/self/fd"))
    forget = vigil.watch(identify(0, one.pid), lambda: pytest.fail("it was forgotten"))
    forget()
    forget()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    one.kill()
    one.wait()
    other.kill()
    assert told.wait(20)


def test_close_ends_the_thread_and_frees_everything(sleeper):
    process = sleeper()
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    vigil = Vigil()
    vigil.watch(identify(0, process.pid), lambda: None)
    assert threading.active_count() == threads + 1
    vigil.close()
    vigil.close()
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors
    vigil.watch(identify(0, process.pid), lambda: None)()
