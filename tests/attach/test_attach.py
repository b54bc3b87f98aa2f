import json
import os
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tllm_core import ConfigError, EngineDeadError, GenerationExecutor, SamplingParams, TransportError
from tllm_core.contracts.messages import Stop
from tllm_core.engines.echo import expected_tokens
from tllm_core.errors import Refused

PROMPT = [1, 2, 3]


def edited(path, tmp_path, **changes):
    """A copy of an attach file in which something else stands."""
    copy = tmp_path / "edited.json"
    copy.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    copy.chmod(0o600)
    return copy


# ------------------------------------------------------------------------------------------------- attach and use


@pytest.mark.parametrize("protocol", ["ipc", "tcp"])
def test_an_attached_frontend_generates_exactly(own, attach_process, protocol):
    owned = own(protocol=protocol)
    process = attach_process(owned.path, 7, 200)
    assert process.until("done")["done"] == "length"
    assert process.tokens == expected_tokens([7, 2, 3], 200)
    assert process.wait() == 0, process.stderr


def test_the_owner_and_two_frontends_stream_at_once_and_each_exactly(own, attach_process):
    owned = own()
    processes = [attach_process(owned.path, first, 600) for first in (11, 12)]
    ids = {process.until("attached")["attached"] for process in processes}
    result = owned.executor.generate_async(PROMPT, SamplingParams(max_tokens=600)).result()
    assert len(ids) == 2
    assert list(result.outputs[0].token_ids) == expected_tokens(PROMPT, 600)
    for process in processes:
        process.until("done")
        assert process.tokens == expected_tokens([process.first, 2, 3], 600)


def test_twenty_attaches_at_once_get_different_frontend_ids(own):
    owned = own()
    with ThreadPoolExecutor(20) as pool:
        executors = list(pool.map(lambda _: GenerationExecutor.attach(owned.path), range(20)))
    try:
        results = [executor.generate_async(PROMPT, SamplingParams(max_tokens=3)) for executor in executors]
        assert len({result.client_id >> 48 for result in results}) == 20
        assert all(list(result.result().outputs[0].token_ids) == expected_tokens(PROMPT, 3) for result in results)
    finally:
        for executor in executors:
            executor.shutdown()


def test_health_of_an_attached_executor_shows_the_ranks_from_the_beats(own, until):
    owned = own(ranks=2)
    with GenerationExecutor.attach(owned.path) as attached:
        until(lambda: [rank.state for rank in attached.health().ranks] == ["running", "running"])
        assert [rank.pid for rank in attached.health().ranks] == [rank.pid for rank in owned.content.ranks]


def test_the_path_may_come_from_the_settings(own, tmp_path):
    owned = own()
    config = tmp_path / "frontend.toml"
    config.write_text(f'[attach]\nfile = "{owned.path}"\n')
    with GenerationExecutor.attach(config=config) as attached:
        assert attached.info.model == "echo"


# -------------------------------------------------------------------------------------------------- what is refused


def test_without_a_path_the_error_says_how_to_give_one():
    with pytest.raises(ConfigError, match=r"attach\.file"):
        GenerationExecutor.attach()


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no attach file .*nowhere.json"):
        GenerationExecutor.attach(tmp_path / "nowhere.json")


def test_a_file_that_others_can_read_is_refused(own, tmp_path):
    owned = own()
    assert owned.path.stat().st_mode & 0o777 == 0o600
    owned.path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"can be used by others \(mode 0640\)"):
        GenerationExecutor.attach(owned.path)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"wire_versions": [1, 1]}', "\x00\xff"])
def test_a_file_with_something_else_in_it_is_refused(tmp_path, text):
    path = tmp_path / "engine.json"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="is no attach file"):
        GenerationExecutor.attach(path)


def test_another_wire_version_is_refused_and_both_are_named(own, tmp_path):
    path = edited(own().path, tmp_path, wire_versions=[7, 9], a_field_of_the_future=True)
    with pytest.raises(Refused, match=r"speaks wire version 7 to 9, this tllm-core 1"):
        GenerationExecutor.attach(path)


def test_a_wrong_key_gets_no_answer_and_one_clear_error(own, tmp_path):
    owned = own()
    with pytest.raises(TransportError, match="has another key"):
        GenerationExecutor.attach(edited(owned.path, tmp_path, key="0" * 64), timeout=0.5)
    assert owned.executor.check_health()


def test_the_file_of_an_engine_that_is_gone_is_told_at_once(own, until):
    owned = own()
    for process in owned.processes():
        os.kill(process.pid, signal.SIGKILL)
    until(lambda: owned.executor.health().state == "dead")
    owned.executor.shutdown()
    with pytest.raises(EngineDeadError, match=r"the attach file names is gone \(process \d+\)"):
        GenerationExecutor.attach(owned.path, timeout=60)


def test_the_file_of_an_engine_that_its_owner_has_stopped_says_so(own):
    owned = own()
    owned.executor.shutdown()
    with pytest.raises(EngineDeadError, match="was stopped by its owner"):
        GenerationExecutor.attach(owned.path, timeout=60)


def test_an_attach_file_does_not_show_its_key(own):
    owned = own()
    assert owned.content.key not in repr(owned.content)


# ------------------------------------------------------------------------------------------------ several frontends


def test_a_killed_frontend_frees_the_engine_at_once_and_leaves_the_others_alone(own, attach_process, until):
    owned = own()  # with the default of 10 s after which silence alone would end it
    victim, other = attach_process(owned.path, 21), attach_process(owned.path, 22, 1500)
    victim.until("tokens"), other.until("tokens")
    until(lambda: owned.requests() == 2)
    began = time.monotonic()
    os.kill(victim.pid, signal.SIGKILL)
    until(lambda: owned.requests() == 1)
    assert time.monotonic() - began < 5.0
    assert owned.worker_counts()["lost_frontends"] == 1
    until(lambda: owned.sessions() == 2)
    other.until("done")
    assert other.tokens == expected_tokens([22, 2, 3], 1500)
    assert victim.is_exact()


def test_a_frozen_frontend_is_given_up_for_its_silence_and_may_begin_anew(own, attach_process, until):
    owned = own(liveness="frontend_dead_after_s = 1.0\nfrontend_beat_s = 0.1")
    frozen, other = attach_process(owned.path, 31, 100_000, "again"), attach_process(owned.path, 32)
    frozen.until("tokens"), other.until("tokens")
    os.kill(frozen.pid, signal.SIGSTOP)
    until(lambda: owned.requests() == 1)
    os.kill(frozen.pid, signal.SIGCONT)
    assert frozen.until("error")["error"] == "Expelled"
    assert frozen.is_exact()
    frozen.tokens.clear()
    assert frozen.until("attached")["attached"] not in (0, 1)  # and a new beginning
    assert frozen.until("done")["done"] == "length"
    assert frozen.is_exact()
    other.until("tokens")
    assert other.is_exact()


def test_abort_all_and_shutdown_of_one_frontend_touch_nobody_elses_requests(own, attach_process, until):
    owned = own()
    other = attach_process(owned.path, 41, 1500)
    other.until("tokens")
    with GenerationExecutor.attach(owned.path) as attached:
        results = [attached.generate_async([n, 2, 3], SamplingParams(max_tokens=50_000)) for n in range(1, 9)]
        until(lambda: owned.requests() == 9)
        attached.abort_all()
        assert {result.result().outputs[0].finish_reason for result in results} == {"abort"}
        until(lambda: owned.requests() == 1)
        attached.generate_async(PROMPT, SamplingParams(max_tokens=50_000))
    until(lambda: owned.requests() == 1 and owned.sessions() == 2)
    assert owned.executor.check_health()
    other.until("done")
    assert other.tokens == expected_tokens([41, 2, 3], 1500)


def test_only_the_owner_can_stop_the_engine(own):
    owned = own()
    with GenerationExecutor.attach(owned.path) as attached:
        attached._frontend.link.send(Stop())
        result = attached.generate(PROMPT, SamplingParams(max_tokens=20))
        assert list(result.outputs[0].token_ids) == expected_tokens(PROMPT, 20)
    assert owned.executor.check_health()
    assert owned.worker_counts()["stop_refused"] == 1


def test_a_frontend_that_does_not_read_slows_nobody_else_and_is_expelled(own, attach_process, until):
    owned = own(wire="window_frames = 8\nbacklog_frames = 8\nstall_after_s = 1.0", step_interval_s=0.001)
    stuck, other = attach_process(owned.path, 51), attach_process(owned.path, 52, 1500)
    stuck.until("tokens"), other.until("tokens")
    os.kill(stuck.pid, signal.SIGSTOP)
    other.until("done")
    assert other.tokens == expected_tokens([52, 2, 3], 1500)
    until(lambda: owned.worker_counts().get("expelled") == 1)  # for stall_after_s, long before its silence counts
    os.kill(stuck.pid, signal.SIGCONT)
    assert "stall_after_s" in stuck.until("error")["message"]
    assert stuck.is_exact()


# --------------------------------------------------------------------------------------------------- orderly ends


def test_the_owners_shutdown_tells_attached_frontends_that_the_engine_was_stopped(own):
    owned = own()
    with GenerationExecutor.attach(owned.path) as attached:
        result = attached.generate_async(PROMPT, SamplingParams(max_tokens=50_000))
        next(iter(result))
        stopper = threading.Thread(target=owned.executor.shutdown)
        stopper.start()
        with pytest.raises(EngineDeadError, match="the engine was stopped"):
            result.result(20)
        stopper.join()
        assert attached.health().state == "dead"
        with pytest.raises(EngineDeadError):
            attached.generate_async(PROMPT)


def test_an_attach_while_the_engine_is_being_stopped_hears_so_from_its_watcher(own, until, tmp_path):
    owned = own(faults='[{at = "close", do = "hang", seconds = 3}]')
    # The file as it was read before: what the owner says in it since then is not seen.
    early = shutil.copy(owned.path, tmp_path / "early.json")
    with GenerationExecutor.attach(early) as attached:
        stopper = threading.Thread(target=owned.executor.shutdown)
        stopper.start()
        until(lambda: attached.health().state == "dead")
        assert "the engine was stopped" in told_at_last(early, until)
        stopper.join()


def told_at_last(path, until):
    """What ends an attach, or the executor that it came to."""
    try:
        late = GenerationExecutor.attach(path, timeout=60)
    except EngineDeadError as error:
        return str(error)
    with late:
        until(lambda: late.health().state == "dead")
        return late.health().cause


def test_every_attach_that_overlaps_the_owners_shutdown_works_or_hears_that_it_was_stopped(own):
    owned = own()
    told = []

    def attach_until_told():
        while True:
            try:
                GenerationExecutor.attach(owned.path, timeout=60).shutdown()
            except Exception as error:
                told.append(error)
                return

    threads = [threading.Thread(target=attach_until_told) for _ in range(6)]
    for thread in threads:
        thread.start()
    owned.executor.shutdown()
    for thread in threads:
        thread.join()
    assert {type(error) for error in told} == {EngineDeadError}
    assert all("was stopped" in str(error) for error in told), told


def test_a_frontend_attaches_and_leaves_again_and_again_without_a_trace(own, until):
    owned = own()
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    rank = owned.rank0.pid
    ranks_descriptors = len(os.listdir(f"/proc/{rank}/fd"))
    for _ in range(5):
        with GenerationExecutor.attach(owned.path) as attached:
            attached.generate(PROMPT, SamplingParams(max_tokens=3))
    until(lambda: owned.sessions() == 1)
    until(lambda: threading.active_count() == threads)
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    until(lambda: len(os.listdir(f"/proc/{rank}/fd")) <= ranks_descriptors + 2)  # the vigil's own two
