"""Engine worlds in real processes: how they start, fail to start, die and stop."""

import os
import signal
import sys
import threading
import time

import pytest

from tllm_core.contracts.interfaces import Beaten, Exited, Failed, Identified, Listening, Phase, Ready, WorldSpec
from tllm_core.contracts.messages import RankState
from tllm_core.errors import ConfigError, EngineStartError, PluginError
from tllm_core.world.launch import SpawnLauncher, SpawnSettings
from tllm_core.world.process import is_alive, wait_gone


def fault(**fields):
    return {"faults": [fields]}


# ---------------------------------------------------------------------------------------------------- starting


def test_identities_come_before_weights_and_ready_comes_last(spawn):
    world = spawn(load_delay_s=0.3)
    identified = world.until(Identified)
    assert [identity.rank for identity in identified.ranks] == [0]
    assert all(is_alive(identity) for identity in world.processes())
    ready = world.until(Ready)
    kinds = [type(event) for event in world.seen]
    assert kinds[:2] == [Identified, Listening]
    assert kinds[-1] is Ready
    assert set(kinds[2:-1]) == {Phase}
    loading = [event for event in world.of(Phase) if event.name == "loading echo weights"]
    assert loading
    assert all(0 <= event.done <= 1 for event in loading)
    assert ready.info.vocab_size == 32000
    assert "stats" in ready.info.controls
    assert "timeout_s" in ready.info.supports


def test_launch_returns_before_anything_is_loaded(spawn):
    world = spawn(load_delay_s=60)
    phase = world.until(Phase, when=lambda event: event.name == "loading echo weights")
    assert phase.done < 0.5


def test_ranks_live_in_groups_of_their_own_in_the_watchers_session(spawn):
    identified = spawn(world_size=2).ready()
    watcher = identified.watcher.pid
    assert os.getsid(watcher) == watcher
    for identity in identified.ranks:
        assert os.getpgid(identity.pid) == identity.pid
        assert os.getsid(identity.pid) == watcher


def test_an_engine_that_only_the_owners_path_knows_is_found(spawn, engine_module):
    spec = engine_module("def start(self, context): return EngineInfo(model='third')")
    world = spawn(spec)
    world.ready()
    assert world.seen[-1].info.model == "third"


def test_no_secret_is_in_argv_or_environment(spawn):
    identified = spawn().ready()
    for identity in (*identified.ranks, identified.watcher):
        for name in ("cmdline", "environ"):
            with open(f"/proc/{identity.pid}/{name}", "rb") as file:
                assert b"kkkkkkkk" not in file.read()


def test_what_an_engine_prints_never_reaches_the_owners_stdout(spawn, engine_module, capfd):
    spec = engine_module("""
        def start(self, context):
            print("loud stdout", flush=True)
            print("loud stderr", file=sys.stderr, flush=True)
            os.system("echo loud child")
            return EngineInfo(model="third")
        """)
    world = spawn(spec)
    world.ready()
    assert world.world.stop(20)
    shown = capfd.readouterr()
    assert shown.out == ""
    assert all(line in shown.err for line in ("loud stdout", "loud stderr", "loud child"))


def test_it_starts_and_stops_in_any_thread_and_leaves_signal_handlers_alone(spawn):
    def handler(number, frame):
        raise AssertionError

    before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)}
    try:
        done = []

        def run():
            world = spawn()
            world.ready()
            done.append(world.world.stop(20))

        signal.signal(signal.SIGCHLD, before[signal.SIGCHLD])
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert done == [True]
        assert signal.getsignal(signal.SIGTERM) is signal.getsignal(signal.SIGINT) is handler
    finally:
        for number, old in before.items():
            signal.signal(number, old)


# ----------------------------------------------------------------------------------------------- failed starts


@pytest.mark.parametrize("at", ["construct", "start", "prepare"])
def test_an_exception_while_starting_reaches_the_owner_with_its_traceback(spawn, at):
    world = spawn(**fault(at=at, do="raise", message="bad knob 17"))
    failed = world.until(Failed)
    assert failed.message == "RuntimeError: bad knob 17"
    assert "Traceback (most recent call last)" in failed.traceback
    assert "faults.py" in failed.traceback
    assert (failed.rank, failed.kind) == (0, "RuntimeError")
    exited = world.until(Exited)
    assert (exited.clean, exited.rank) == (False, 0)


@pytest.mark.parametrize(
    ("do", "exitcode", "words"),
    [
        ({"do": "exit"}, 3, "engine rank 0 exited with code 3"),
        ({"do": "exit", "exitcode": 0}, 0, "engine rank 0 exited with code 0"),
        ({"do": "kill"}, -9, "engine rank 0 was killed by SIGKILL"),
        ({"do": "kill", "signal": 11}, -11, "engine rank 0 was killed by SIGSEGV"),
    ],
)
def test_a_hard_end_while_loading_names_exit_code_or_signal(spawn, do, exitcode, words):
    world = spawn(**fault(at="start", **do))
    failed = world.until(Failed)
    assert (failed.message, failed.exitcode, failed.rank) == (words, exitcode, 0)
    if exitcode == -11:
        assert "Segmentation fault" in failed.stderr_tail
    assert not world.until(Exited).clean


def test_the_end_of_stderr_is_kept_and_bounded(spawn, engine_module, capfd):
    spec = engine_module("""
        def start(self, context):
            for number in range(4000):
                os.write(2, b"line %d\\n" % number)
            os._exit(9)
        """)
    failed = spawn(spec).until(Failed)
    assert failed.exitcode == 9
    assert failed.stderr_tail.endswith("line 3999\n")
    assert len(failed.stderr_tail) == 8192
    assert "line 3999" in str(failed.cause())
    capfd.readouterr()


def test_an_engine_class_that_cant_be_imported_says_so(spawn, engine_module):
    spec = engine_module("def start(self, context): pass", imports="import module_that_is_not_there")
    failed = spawn(spec).until(Failed)
    assert "module_that_is_not_there" in failed.message


def test_an_unknown_engine_and_a_wrong_option_fail_before_any_process(spawn):
    with pytest.raises(PluginError):
        spawn("module_that_is_not_there:SPEC")
    with pytest.raises(ConfigError, match=r"vocab_sise.*vocab_size"):
        spawn(vocab_sise=3)


def test_options_that_cant_cross_processes_are_named():
    spec = WorldSpec(engine="echo", engine_options={"faults": ()}, key=b"k", transport_options={"x": object()})
    with pytest.raises(ConfigError, match="plain data"):
        SpawnLauncher(SpawnSettings()).launch(spec)


@pytest.mark.parametrize("python", ["/nowhere/python", "/etc/passwd"])
def test_an_interpreter_that_cant_be_executed_is_named(spawn, python):
    with pytest.raises(EngineStartError, match=python):
        spawn(settings={"python": python})


def test_a_program_that_is_no_interpreter_ends_the_start(spawn):
    world = spawn(settings={"python": "/bin/false"})
    assert "exited with code 1" in world.until(Failed).message
    assert not world.until(Exited).clean


def test_a_world_that_never_gets_ready_is_given_up_and_the_phase_is_named(spawn, capfd):
    world = spawn(settings={"ready_timeout_s": 2, "stall_report_s": 0.3}, load_delay_s=600)
    failed = world.until(Failed)
    last = world.of(Phase)[-1].name if world.of(Phase) else "starting"
    assert "not ready within 2 s (ready_timeout_s)" in failed.message
    assert f"rank 0 has been {last!r}" in failed.message
    world.until(Exited)
    assert "still starting: rank 0" in capfd.readouterr().err


@pytest.mark.parametrize("late", [False, True])
def test_any_rank_that_fails_to_start_is_named_and_ends_the_others(spawn, late):
    patient = {"dead_after_s": 600}
    world = spawn(world_size=3, liveness=patient, **fault(at="start", do="raise", rank=2, message="no card"))
    if late:
        last = world.until(Identified).ranks[2].pid
        os.kill(last, signal.SIGSTOP)
        world.until(Listening)
        for _ in range(3):
            world.until(Beaten)
        assert world.of(Ready) == []
        os.kill(last, signal.SIGCONT)
    failed = world.until(Failed)
    assert (failed.rank, failed.message) == (2, "RuntimeError: no card")
    world.until(Exited)
    assert wait_gone(world.identified().ranks, 0)


def test_a_world_is_ready_when_its_last_rank_is(spawn):
    world = spawn(world_size=2, settings={"ready_timeout_s": 3}, **fault(at="start", do="hang", rank=1))
    failed = world.until(Failed)
    assert "ready_timeout_s" in failed.message
    assert world.of(Ready) == []


# ------------------------------------------------------------------------------------------------------ dying


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_world_and_is_named(spawn, rank):
    world = spawn(world_size=2)
    identified = world.ready()
    os.kill(identified.ranks[rank].pid, signal.SIGKILL)
    failed = world.until(Failed)
    assert (failed.rank, failed.exitcode) == (rank, -9)
    exited = world.until(Exited)
    assert (exited.clean, exited.rank, exited.exitcode) == (False, rank, -9)
    assert wait_gone(identified.ranks, 0)
    assert world.world.events(None) == []


def test_a_killed_watcher_takes_the_ranks_along(spawn, engine_module, tmp_path):
    spec = engine_module("""
        def start(self, context):
            with open(self.settings.path, "w") as file:
                file.write(str(subprocess.Popen(["sleep", "600"]).pid))
            return EngineInfo(model="third")
        """)
    world = spawn(spec, path=str(tmp_path / "pid"))
    identified = world.ready()
    grandchild = int((tmp_path / "pid").read_text())
    os.kill(identified.watcher.pid, signal.SIGKILL)
    failed = world.until(Failed)
    assert "watcher was killed by SIGKILL" in failed.message
    world.until(Exited)
    assert wait_gone(world.processes(), 0)
    assert wait_gone_pid(grandchild)


def test_a_watcher_that_dies_while_its_world_is_killed_blocks_neither_killer_nor_reader(spawn):
    world = spawn()
    identified = world.ready()
    reader = threading.Thread(target=world.until, args=(Exited,))
    reader.start()
    killer = threading.Thread(target=world.world.kill)
    os.kill(identified.watcher.pid, signal.SIGKILL)
    killer.start()
    for thread in (killer, reader):
        thread.join(20)
        assert not thread.is_alive()
    world.world.wake()


def test_a_killed_watcher_takes_along_even_a_rank_that_holds_its_lock(spawn, engine_module, tmp_path):
    spec = engine_module(
        """
        def start(self, context):
            sleep = ctypes.PyDLL(None).sleep
            with open(self.settings.path, "w") as file:
                file.write("held")
            sleep(600)
        """,
        imports="import ctypes",
    )
    path = tmp_path / "held"
    world = spawn(spec, path=str(path))
    world.until(Beaten, when=lambda event: path.exists() and path.read_text() == "held")
    os.kill(world.identified().watcher.pid, signal.SIGKILL)
    assert wait_gone(world.processes(), 5)


def wait_gone_pid(pid):
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("how", ["stop", "kill", "rank dies"])
def test_what_the_engine_started_is_ended_too(spawn, engine_module, tmp_path, how):
    spec = engine_module("""
        def start(self, context):
            child = subprocess.Popen(["sleep", "600"], process_group=0)
            with open(self.settings.path, "w") as file:
                file.write(str(child.pid))
            return EngineInfo(model="third")
        """)
    world = spawn(spec, path=str(tmp_path / "pid"))
    identified = world.ready()
    if how == "stop":
        assert world.world.stop(20)
    elif how == "kill":
        world.world.kill()
    else:
        os.kill(identified.ranks[0].pid, signal.SIGKILL)
        world.until(Exited)
    assert wait_gone_pid(int((tmp_path / "pid").read_text()))


def test_the_death_of_an_adopted_process_is_the_engines(spawn, engine_module, tmp_path):
    spec = engine_module("""
        def start(self, context):
            child = subprocess.Popen(["sleep", "600"], start_new_session=True)
            context.adopt(child.pid)
            with open(self.settings.path, "w") as file:
                file.write(str(child.pid))
            return EngineInfo(model="third")
        """)
    world = spawn(spec, path=str(tmp_path / "pid"))
    world.ready()
    pid = int((tmp_path / "pid").read_text())
    os.kill(pid, signal.SIGKILL)
    assert str(pid) in world.until(Failed).message


def test_an_adopted_process_that_left_the_session_is_ended_with_the_world(spawn, engine_module, tmp_path):
    spec = engine_module("""
        def start(self, context):
            child = subprocess.Popen(["sleep", "600"], start_new_session=True)
            context.adopt(child.pid)
            with open(self.settings.path, "w") as file:
                file.write(str(child.pid))
            return EngineInfo(model="third")
        """)
    world = spawn(spec, path=str(tmp_path / "pid"))
    world.ready()
    assert world.world.stop(20)
    assert wait_gone_pid(int((tmp_path / "pid").read_text()))


# ------------------------------------------------------------------------------------------------------ beats


def test_beats_rise_strictly_and_show_a_stopped_rank_by_number(spawn):
    world = spawn(world_size=2)
    identified = world.ready()
    os.kill(identified.ranks[1].pid, signal.SIGSTOP)
    frozen = world.until(Beaten, when=lambda event: RankState.STOPPED in event.beat.states).beat
    assert frozen.states == (RankState.RUNNING, RankState.STOPPED)
    os.kill(identified.ranks[1].pid, signal.SIGCONT)
    world.until(Beaten, when=lambda event: event.beat.states == (RankState.RUNNING, RankState.RUNNING))
    numbers = [event.beat.number for event in world.beats]
    assert numbers == sorted(set(numbers))
    assert world.beats[-1].beat.cpu_s[0] > 0


def test_a_process_that_holds_its_lock_while_loading_still_beats(spawn):
    world = spawn(**fault(at="start", do="hold_gil", seconds=1.0))
    world.until(Listening)
    world.until(Ready)
    running = [event for event in world.beats if event.beat.states == (RankState.RUNNING,)]
    assert len(running) >= 5


# --------------------------------------------------------------------------------------------------- stopping


def test_an_orderly_stop_is_clean_and_repeatable(spawn):
    world = spawn(world_size=2)
    world.ready()
    assert world.world.stop(20)
    assert world.world.stop(20)
    world.world.kill()
    assert world.until(Exited).clean
    assert world.world.events(None) == []


def test_a_stop_while_loading_does_not_wait_for_the_weights(spawn):
    world = spawn(load_delay_s=600)
    world.until(Phase)
    assert world.world.stop(20)
    assert world.until(Exited).clean


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_an_end_right_after_the_launch_is_clean(spawn, how):
    world = spawn(world_size=2)
    if how == "stop":
        assert world.world.stop(20)
    world.world.kill()
    assert world.until(Exited).clean
    assert world.of(Failed) == []


@pytest.mark.parametrize("who", ["rank", "watcher", "both"])
def test_a_frozen_world_does_not_stop_but_can_be_killed(spawn, who):
    world = spawn()
    identified = world.ready()
    for identity in {"rank": identified.ranks, "watcher": [identified.watcher]}.get(who, world.processes()):
        os.kill(identity.pid, signal.SIGSTOP)
    assert not world.world.stop(0.3)
    world.world.kill()
    assert wait_gone(world.processes(), 0)


def test_kill_from_many_threads_ends_a_blocked_reader_and_leaves_no_descriptor(spawn):
    before = set(os.listdir("/proc/self/fd"))
    world = spawn()
    world.ready()
    reader = threading.Thread(target=world.until, args=(Exited,))
    reader.start()
    killers = [threading.Thread(target=world.world.kill) for _ in range(4)]
    for thread in killers:
        thread.start()
    for thread in (*killers, reader):
        thread.join(20)
        assert not thread.is_alive()
    assert set(os.listdir("/proc/self/fd")) <= before


def test_wake_ends_a_wait_for_events(spawn):
    world = spawn(load_delay_s=600)
    world.until(Phase, when=lambda event: event.name == "loading echo weights")
    results = []
    thread = threading.Thread(target=lambda: results.append(world.world.events(None)))
    thread.start()
    world.world.wake()
    thread.join(20)
    assert not thread.is_alive()
    assert len(results) == 1


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="forking a threaded process warns from 3.12 on")
def test_a_fork_of_the_owner_cant_touch_the_world(spawn):
    world = spawn()
    identified = world.ready()
    pid = os.fork()
    if pid == 0:
        world.world.kill()
        os._exit(0 if world.world.events(None) == [] else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert all(is_alive(identity) for identity in identified.ranks)
    assert world.world.stop(20)
