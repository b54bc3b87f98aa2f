"""Control methods of the tp engine, its KV events and its numbers, driven as the worker drives it."""

import json
import shutil
import weakref
from array import array
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from tests.tp.test_tp_engine import Bench, prompts
from tllm_core.contracts.messages import KvEvent, KvEvents, Plain
from tllm_core.engines.tp.kv_events import MOST_PER_ANSWER, KvEventLog
from tllm_core.engines.tp.kv_hashes import extend, number, root
from tllm_core.errors import ControlError, RequestError


def call(bench: Bench, method: str, *args: Plain) -> Plain:
    assert method in bench.info.controls
    (value,) = bench.engine.control(method, args, None)
    return value


def greedy(bench: Bench, count: int = 12) -> list[list[int]]:
    """Three prompts of different lengths at once."""
    ids = [bench.submit(prompt, max_tokens=count, ignore_eos=True) for prompt in prompts(5, 30, 18, seed=9)]
    bench.drain()
    assert not bench.errors
    return [bench.tokens(request_id) for request_id in ids]


def altered(source: Path, target: Path, change) -> Path:
    shutil.copytree(source, target)
    weights = load_file(target / "model.safetensors")
    change(weights)
    save_file(weights, target / "model.safetensors")
    return target


def break_keys(weights: dict[str, torch.Tensor]) -> None:
    weights["model.layers.0.self_attn.k_proj.weight"].fill_(float("nan"))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


# --------------------------------------------------------------------------------------------- pause and sleep


def test_paused_requests_stay_and_go_on_where_they_were(model_dir: Path) -> None:
    bench = Bench(model_dir)
    expected = greedy(bench)
    ids = [bench.submit(prompt, max_tokens=12, ignore_eos=True) for prompt in prompts(5, 30, seed=9)]
    for _ in range(4):
        bench.step()
    call(bench, "pause")
    assert bench.engine.paused
    late = bench.submit(prompts(5, 30, 18, seed=9)[2], max_tokens=12, ignore_eos=True)
    step = bench.engine.step()
    assert (list(step.outputs), step.again) == ([], False)
    assert bench.engine.stats().extra["paused"] is True
    assert (bench.engine.stats().running, bench.engine.stats().waiting) == (2, 1)
    call(bench, "resume")
    bench.drain()
    assert [bench.tokens(request_id) for request_id in (*ids, late)] == expected


def test_what_is_aborted_while_paused_is_free_at_once(model_dir: Path) -> None:
    bench = Bench(model_dir)
    request_id = bench.submit(prompts(20)[0], max_tokens=12)
    bench.step()
    call(bench, "pause")
    bench.abort(request_id)
    bench.check_empty()


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_memory_back_and_wakeup_answers_as_before(model_dir: Path, level: int) -> None:
    bench = Bench(model_dir, num_blocks=8000)
    expected = greedy(bench)
    cache = bench.engine._runner._attention.cache  # type: ignore[union-attr]
    cache.fill_(1.0)
    size, model = cache.numel() * 4, weakref.ref(bench.engine._runner._model)
    del cache
    before = resident_bytes()
    call(bench, "sleep", level)
    assert before - resident_bytes() > 0.8 * size > 40 << 20
    assert (model() is None) == (level == 2)
    assert bench.engine.stats().extra["asleep"] == level
    with pytest.raises(RequestError, match="sleeps"):
        bench.submit([5, 6, 7])
    assert not bench.engine.step().again
    call(bench, "sleep", 1)
    assert bench.engine.stats().extra["asleep"] == level, "a lighter sleep does not wake"
    call(bench, "wakeup")
    assert greedy(bench) == expected
    call(bench, "wakeup")
    assert bench.engine.stats().extra["asleep"] == 0


def test_sleep_is_refused_while_there_are_requests_and_says_how_many(model_dir: Path) -> None:
    bench = Bench(model_dir)
    ids = [bench.submit(prompt, max_tokens=8) for prompt in prompts(10, 10)]
    bench.step()
    with pytest.raises(ControlError, match=r"sleep is refused: the engine has 2 requests"):
        call(bench, "sleep")
    bench.step()
    bench.abort(ids[0])
    bench.abort(ids[1])
    call(bench, "sleep")


@pytest.mark.parametrize("level", [0, 3, True, "1", None])
def test_other_levels_are_refused(model_dir: Path, level: Plain) -> None:
    with pytest.raises(ControlError, match="levels 1"):
        call(Bench(model_dir), "sleep", level)


def test_one_that_was_paused_before_it_slept_is_paused_after(model_dir: Path) -> None:
    bench = Bench(model_dir)
    call(bench, "pause")
    call(bench, "sleep")
    call(bench, "wakeup")
    assert bench.engine.paused
    call(bench, "sleep")
    call(bench, "resume")
    assert bench.engine.paused, "it still sleeps"
    call(bench, "wakeup")
    assert not bench.engine.paused


def test_a_wakeup_that_finds_no_weights_says_so_and_can_be_tried_again(model_dir: Path, tmp_path: Path) -> None:
    home = shutil.copytree(model_dir, tmp_path / "home")
    bench = Bench(home)
    expected = greedy(bench)
    call(bench, "sleep", 2)
    home.rename(tmp_path / "away")
    with pytest.raises(ControlError, match=r"has no weights|can't be read"):
        call(bench, "wakeup")
    with pytest.raises(RequestError, match="sleeps"):
        bench.submit([5, 6])
    (tmp_path / "away").rename(home)
    call(bench, "wakeup")
    assert greedy(bench) == expected


def test_arguments_that_a_method_does_not_take_are_named(model_dir: Path) -> None:
    bench = Bench(model_dir)
    for method, args in (("pause", [1]), ("update_weights", []), ("kv_events", ["x"]), ("kv_events", [True])):
        with pytest.raises(ControlError, match=method):
            call(bench, method, *args)


# ------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("asleep", [False, True])
def test_new_weights_answer_as_an_engine_that_began_with_them(model_dir: Path, tmp_path: Path, asleep: bool) -> None:
    torch.manual_seed(1)
    source = LlamaForCausalLM.from_pretrained(model_dir)
    for parameter in source.parameters():
        parameter.data.normal_(0, 0.2)
    source.save_pretrained(tmp_path / "new")
    expected = greedy(Bench(tmp_path / "new"))
    bench = Bench(model_dir)
    assert greedy(bench) != expected
    if asleep:
        call(bench, "sleep", 2)
    call(bench, "update_weights", str(tmp_path / "new"))
    if asleep:
        assert bench.engine._runner._model is None
        call(bench, "wakeup")
    assert greedy(bench) == expected
    call(bench, "sleep", 2)
    call(bench, "wakeup")
    assert greedy(bench) == expected, "the new ones are what is read after a sleep"


def cut_a_row(weights: dict[str, torch.Tensor]) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    weights[name] = weights[name][1:].clone()


def lose_the_last(weights: dict[str, torch.Tensor]) -> None:
    del weights["model.norm.weight"]


@pytest.mark.parametrize("asleep", [False, True])
@pytest.mark.parametrize(("change", "words"), [(cut_a_row, "is of shape"), (lose_the_last, "lack the tensor")])
def test_wrong_weights_change_nothing(model_dir: Path, tmp_path: Path, change, words: str, asleep: bool) -> None:
    bench = Bench(model_dir)
    expected = greedy(bench)
    if asleep:
        call(bench, "sleep", 2)
    with pytest.raises(ControlError, match=words):
        call(bench, "update_weights", str(altered(model_dir, tmp_path / "wrong", change)))
    call(bench, "wakeup")
    assert greedy(bench) == expected


def test_weights_of_another_model_or_from_nowhere_are_refused(model_dir: Path, tmp_path: Path) -> None:
    bench = Bench(model_dir)
    other = shutil.copytree(model_dir, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    with pytest.raises(ControlError, match=r"another model: its rms_norm_eps is 0\.5"):
        call(bench, "update_weights", str(other))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ControlError, match="has no weights"):
        call(bench, "update_weights", str(tmp_path / "empty"))
    with pytest.raises(ControlError, match="needs a directory"):
        call(bench, "update_weights", str(tmp_path / "nowhere"))


def test_weights_change_under_running_requests_only_where_that_is_asked_for(model_dir: Path) -> None:
    bench = Bench(model_dir)
    request_id = bench.submit(prompts(10)[0], max_tokens=8, ignore_eos=True)
    bench.step()
    with pytest.raises(ControlError, match="has 1 request,"):
        call(bench, "update_weights", str(model_dir))
    call(bench, "update_weights", str(model_dir), True)
    bench.drain()
    assert len(bench.tokens(request_id)) == 8


# --------------------------------------------------------------------------------------------- broken blocks


def test_what_a_broken_request_left_in_its_blocks_does_not_reach_the_next(model_dir: Path, tmp_path: Path) -> None:
    bench = Bench(model_dir)
    expected = greedy(bench)
    call(bench, "update_weights", str(altered(model_dir, tmp_path / "broken", break_keys)))
    for prompt in prompts(60, 60, 60):
        bench.submit(prompt, max_tokens=4)
    bench.step()
    assert len(bench.errors) == 3
    bench.check_empty()
    bench.errors.clear()
    call(bench, "update_weights", str(model_dir))
    assert greedy(bench) == expected


def test_a_broken_prompt_ends_with_its_first_chunk_and_leaves_nothing_either(model_dir: Path, tmp_path: Path) -> None:
    bench = Bench(model_dir, max_batched_tokens=32, max_num_seqs=8)
    expected = greedy(bench)
    call(bench, "update_weights", str(altered(model_dir, tmp_path / "broken", break_keys)))
    request_id = bench.submit(prompts(200)[0], max_tokens=4)
    bench.step()
    assert list(bench.errors) == [request_id]
    bench.check_empty()
    assert bench.engine.stats().extra["kv_blocks_cached"] == 0
    bench.errors.clear()
    call(bench, "update_weights", str(model_dir))
    assert greedy(bench) == expected


def test_reset_caches_clears_what_nobody_owns_and_keeps_the_rest(model_dir: Path) -> None:
    bench = Bench(model_dir)
    expected = greedy(bench)
    ids = [bench.submit(prompt, max_tokens=12, ignore_eos=True) for prompt in prompts(5, 30, 18, seed=9)]
    bench.step()
    used = bench.engine.stats().kv_blocks_used
    cache = bench.engine._runner._attention.cache  # type: ignore[union-attr]
    cleared = call(bench, "reset_caches")
    assert [bool(cache[:, :, block].any()) for block in range(cleared + used)].count(True) == used
    bench.drain()
    assert [bench.tokens(request_id) for request_id in ids] == expected
    # Six by the first three. Of the five of the second, two were found and two had nothing to be found in them.
    assert call(bench, "reset_caches") == 7
    assert not bench.engine._runner._attention.cache.any()  # type: ignore[union-attr]
    assert call(bench, "reset_caches") == 0
    assert greedy(bench) == expected


# -------------------------------------------------------------------------------------------------- profile


def test_a_profile_is_complete_once_it_is_stopped(model_dir: Path, tmp_path: Path) -> None:
    bench = Bench(model_dir)
    directory = call(bench, "start_profile", str(tmp_path / "traces"))
    with pytest.raises(ControlError, match="runs already"):
        call(bench, "start_profile", str(tmp_path))
    greedy(bench, 3)
    path = Path(call(bench, "stop_profile"))
    assert path.parent == Path(directory) == tmp_path / "traces"
    names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
    assert any("attention" in str(name) for name in names)
    with pytest.raises(ControlError, match="no profile runs"):
        call(bench, "stop_profile")
    call(bench, "start_profile", str(tmp_path / "traces"))
    assert Path(call(bench, "stop_profile")) != path
    assert len(list((tmp_path / "traces").iterdir())) == 2


@pytest.mark.parametrize("directory", ["", None, 3])
def test_a_profile_needs_a_directory(model_dir: Path, directory: Plain) -> None:
    with pytest.raises(ControlError, match="needs a directory"):
        call(Bench(model_dir), "start_profile", directory)


def test_a_directory_that_cant_be_written_is_refused_before_anything_starts(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    bench = Bench(model_dir)
    with pytest.raises(ControlError, match="no trace can be written"):
        call(bench, "start_profile", str(tmp_path / "file" / "traces"))
    with pytest.raises(ControlError, match="no profile runs"):
        call(bench, "stop_profile")


# ---------------------------------------------------------------------------------------- KV events and numbers


def test_events_tell_routers_what_can_be_found(model_dir: Path) -> None:
    bench = Bench(model_dir, num_blocks=9, block_size=8)
    asked = prompts(20, 30, 10, seed=2)
    for prompt in asked:
        bench.submit(prompt, max_tokens=20, ignore_eos=True)
    bench.drain()
    assert bench.engine.stats().preemptions > 0
    told = events(bench)
    known, seen = {}, set()
    for event in told.events:
        assert len(set(event.blocks)) == len(event.blocks) == len(event.hashes) > 0
        if event.kind == "stored":
            assert event.tokens == 8 * len(event.blocks)
            assert event.parent is None or event.parent in seen
            assert not set(event.hashes) & set(known.values())
            assert not set(event.blocks) & set(known)
            known.update(zip(event.blocks, event.hashes, strict=True))
            seen |= set(event.hashes)
        else:
            assert event.kind == "removed"
            assert [known.pop(block) for block in event.blocks] == list(event.hashes)
    assert (told.dropped, told.more, told.next) == (0, False, len(told.events))
    assert len(known) == bench.engine.stats().extra["kv_blocks_cached"]
    chain: list[bytes] = []
    extend(chain, root(), array("i", asked[1]), 8, 3)
    assert {number(content) for content in chain} <= seen, "a router computes the same hashes"
    assert events(bench, told.next).events == ()
    call(bench, "sleep")
    assert events(bench, told.next).events == (KvEvent("cleared"),)


def events(bench: Bench, since: int = 0) -> KvEvents:
    import msgspec

    return msgspec.convert(msgspec.msgpack.decode(msgspec.msgpack.encode(call(bench, "kv_events", since))), KvEvents)


def test_a_bounded_log_counts_what_it_dropped_for_each_reader() -> None:
    log = KvEventLog(3)
    for block in range(5):
        log.removed([block], [7])
    late = log.since(0)
    assert ([event.blocks for event in late.events], late.next, late.dropped) == ([(2,), (3,), (4,)], 5, 2)
    assert log.since(4) == KvEvents((KvEvent("removed", (4,), 0, (7,)),), 5)
    assert log.since(99) == log.since(5) == KvEvents((), 5)
    assert log.since(-7).dropped == 2


def test_a_long_log_comes_in_pieces() -> None:
    log = KvEventLog(10_000)
    for block in range(MOST_PER_ANSWER + 5):
        log.removed([block], [7])
    first = log.since(0)
    assert (len(first.events), first.next, first.more) == (MOST_PER_ANSWER, MOST_PER_ANSWER, True)
    rest = log.since(first.next)
    assert (len(rest.events), rest.more, rest.dropped) == (5, False, 0)


def test_numbers_add_up(model_dir: Path) -> None:
    bench = Bench(model_dir, num_blocks=9, block_size=8)
    lengths = (20, 30, 10)
    for prompt in prompts(*lengths, seed=2):
        bench.submit(prompt, max_tokens=20, ignore_eos=True)
    bench.step()
    stats = bench.engine.stats()
    assert stats.running + stats.waiting == 3
    assert 0 < stats.kv_blocks_used <= stats.kv_blocks_total == 9
    assert stats.last_step_s > 0
    bench.drain()
    stats = bench.engine.stats()
    assert stats.preemptions > 0
    assert stats.prompt_tokens == sum(lengths)
    assert stats.generated_tokens == 60
    assert stats.extra["prefill_tokens"] > sum(lengths), "what was preempted was computed again"
    # The first token of each comes with its prompt, and so does the next one of what was preempted.
    assert stats.extra["decode_tokens"] <= 57
    assert stats.extra["prefill_tokens"] + stats.extra["decode_tokens"] >= sum(lengths) + 57
