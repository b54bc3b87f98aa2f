"""What the owner's own end, script and terminal mean for its engine world."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from tllm_core.contracts.interfaces import Identity
from tllm_core.world.process import is_alive, wait_gone

PRELUDE = """
import json, os, secrets, signal, sys, time
from tllm_core.contracts.interfaces import *
from tllm_core.world.launch import SpawnLauncher, SpawnSettings

def say(**words):
    print(json.dumps(words), flush=True)

say(running=os.getpid())

def start(engine="echo", until=Ready, **options):
    spec = WorldSpec(
        engine=engine,
        engine_options=options,
        engine_name="engine-" + secrets.token_hex(4),
        transport="TRANSPORT",
        key=b"k" * 32,
        generation=secrets.randbits(63),
    )
    world = SpawnLauncher(SpawnSettings()).launch(spec)
    while True:
        for event in world.events(None):
            if isinstance(event, Identified):
                say(processes=[[i.pid, i.start_time] for i in (*event.ranks, event.watcher)])
            if isinstance(event, (until, Failed)):
                say(event=type(event).__name__)
                return world
"""


class Script:
    """A user's script, without a main guard, in a process group of its own."""

    def __init__(self, path, body, transport, **options):
        path.write_text(PRELUDE.replace("TRANSPORT", transport) + textwrap.dedent(body))
        options.setdefault("stderr", None)
        self.popen = subprocess.Popen(
            [sys.executable, str(path)], stdout=subprocess.PIPE, text=True, process_group=0, **options
        )
        self.said = {}
        self.processes = []

    def until(self, key):
        while key not in self.said:
            line = self.popen.stdout.readline()
            assert line, f"the script ended after {self.said}"
            words = json.loads(line)
            assert "running" not in words or "running" not in self.said, "the script ran twice"
            self.said.update(words)
            self.processes += [Identity(-1, *pair) for pair in words.get("processes", ())]
        return self.said[key]

    def rest(self):
        return self.popen.stdout.read()


@pytest.fixture
def script(tmp_path, transport):
    scripts = []

    def run(body, **options):
        scripts.append(Script(tmp_path / "user_script.py", body, transport, **options))
        return scripts[-1]

    yield run
    for started in scripts:
        started.popen.kill()
        started.popen.wait()
        started.popen.stdout.close()
        if started.popen.stderr:
            started.popen.stderr.close()
        assert wait_gone(started.processes, 10), "something survived the script"


@pytest.mark.parametrize(
    "until", ["Identified", "Phase", "Ready"], ids=["before it is known", "while loading", "when ready"]
)
def test_a_killed_owner_takes_its_world_along(script, until):
    load = 0 if until == "Ready" else 600
    owner = script(f"start(until={until}, load_delay_s={load}); time.sleep(600)")
    owner.until("event")
    assert len(owner.processes) == 2
    assert all(is_alive(identity) for identity in owner.processes)
    os.kill(owner.popen.pid, signal.SIGKILL)
    assert wait_gone(owner.processes, 5)


def test_a_fork_that_outlives_the_owner_does_not_keep_its_world(script):
    owner = script("""
        world = start()
        if os.fork() == 0:
            say(forked=os.getpid())
            time.sleep(600)
        time.sleep(600)
        """)
    fork = owner.until("forked")
    os.kill(owner.popen.pid, signal.SIGKILL)
    gone = wait_gone(owner.processes, 5)
    os.kill(fork, signal.SIGKILL)
    assert gone


def test_an_owner_that_is_killed_while_its_world_does_not_end_as_told_takes_it_along(script):
    owner = script(
        """
        world = start()
        rank, *_ = json.loads(sys.stdin.readline())
        os.kill(rank, signal.SIGSTOP)
        say(stopped=world.stop(0.3))
        time.sleep(600)
        """,
        stdin=subprocess.PIPE,
    )
    owner.until("event")
    owner.popen.stdin.write(json.dumps([owner.processes[0].pid]) + "\n")
    owner.popen.stdin.close()
    assert owner.until("stopped") is False
    os.kill(owner.popen.pid, signal.SIGKILL)
    assert wait_gone(owner.processes, 20)


def test_a_script_needs_no_main_guard_and_runs_once(script):
    owner = script("world = start(); say(stopped=world.stop(20))")
    assert owner.until("stopped") is True
    assert owner.rest() == ""
    assert owner.popen.wait(20) == 0


def test_a_script_that_just_ends_leaves_nothing(script):
    owner = script("start()")
    owner.until("event")
    assert owner.popen.wait(20) == 0
    assert wait_gone(owner.processes, 5)


def test_a_terminals_interrupt_reaches_the_owner_alone(script):
    owner = script("""
        world = start()
        try:
            say(waiting=True)
            time.sleep(600)
        except KeyboardInterrupt:
            stopped = world.stop(20)
            say(stopped=stopped, clean=[event.clean for event in world.events(0) if isinstance(event, Exited)])
        """)
    owner.until("waiting")
    os.killpg(owner.popen.pid, signal.SIGINT)
    assert owner.until("stopped") is True
    assert owner.said["clean"] == [True]


def test_an_interrupt_sent_to_the_processes_themselves_is_ignored(script):
    owner = script("world = start(); sys.stdin.read(); say(stopped=world.stop(20))", stdin=subprocess.PIPE)
    owner.until("event")
    for identity in owner.processes:
        os.kill(identity.pid, signal.SIGINT)
    owner.popen.stdin.close()
    assert owner.until("stopped") is True


def test_it_stops_where_the_owner_ignores_its_childrens_ends(script):
    owner = script("signal.signal(signal.SIGCHLD, signal.SIG_IGN); say(stopped=start().stop(20))")
    assert owner.until("stopped") is True
    assert owner.popen.wait(20) == 0


@pytest.mark.parametrize("victim", ["rank", "watcher"])
def test_how_it_died_is_told_truly_where_the_owner_ignores_its_childrens_ends(script, victim):
    owner = script(
        """
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        world = start()
        sys.stdin.read()
        while True:
            for event in world.events(None):
                if isinstance(event, Exited):
                    say(exited=event.message)
                    world.kill()
                    sys.exit()
        """,
        stdin=subprocess.PIPE,
    )
    owner.until("event")
    rank, watcher = owner.processes
    os.kill((rank if victim == "rank" else watcher).pid, signal.SIGKILL)
    owner.popen.stdin.close()
    words = {"rank": "engine rank 0 was killed by SIGKILL", "watcher": "the engine's watcher is gone"}
    assert owner.until("exited") == words[victim]


def test_an_owner_whose_stderr_nobody_reads_holds_no_rank_up(script, engine_module):
    spec = engine_module("""
        def start(self, context):
            for _ in range(5000):
                os.write(2, b"x" * 999 + b"\\n")
            return EngineInfo(model="third")
        """)
    # The module lies beside the script, so that the script's own path has it.
    owner = script(f"say(stopped=start({spec!r}).stop(20))", stderr=subprocess.PIPE)
    assert owner.until("event") == "Ready"
    assert owner.until("stopped") is True


def test_a_module_in_the_current_directory_hides_nothing(script, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("msgspec", "selectors", "tllm_core"):
        (elsewhere / f"{name}.py").write_text("raise SystemExit('hidden')")
    owner = script("say(stopped=start().stop(20))", cwd=elsewhere)
    assert owner.until("event") == "Ready"
    assert owner.until("stopped") is True
