"""Guided answers of the whole engine on a tiny random model, which would write anything else by itself."""

import json
import random
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from tests.tp.conftest import EOS, VOCAB
from tllm_core.contracts.interfaces import EngineContext
from tllm_core.contracts.messages import EngineRequest, GuidedDecoding, Output, SamplingParams, TokenIds
from tllm_core.engines.tp import TpSettings
from tllm_core.engines.tp.engine import TpEngine
from tllm_core.engines.tp.guided import compile as compiling
from tllm_core.engines.tp.guided import grammars
from tllm_core.engines.tp.guided.compile import compile_grammar, load_vocabulary
from tllm_core.engines.tp.guided.guide import Guide, Stops
from tllm_core.engines.tp.guided.masks import GuidedRows
from tllm_core.errors import RequestError

CPU = torch.device("cpu")
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "bc", "def"]}, "count": {"enum": [1, 22, 333]}},
    "required": ["ok", "kind", "count"],
    "additionalProperties": False,
}


class Context(EngineContext):
    rank, world_size, rendezvous = 0, 1, None

    def __init__(self) -> None:
        self.rung = threading.Event()

    def wake(self) -> None:
        self.rung.set()

    def phase(self, name: str, done: float | None = None) -> None:
        pass

    def adopt(self, pid: int) -> None:
        raise AssertionError("this engine starts no process")


class Bench:
    """Drives an engine as the worker does: a step that wants no other is followed by one once it is woken."""

    def __init__(self, model_dir: Path, **settings: Any) -> None:
        self.context = Context()
        self.engine = TpEngine(TpSettings(**{"model": str(model_dir), "threads": 1, "num_blocks": 64} | settings))
        self.info = self.engine.start(self.context)
        self.tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        self.ids = 0
        self.open: dict[int, int] = {}
        self.outputs: dict[int, list[Output]] = {}

    def submit(self, prompt: list[int] | None = None, **sampling: Any) -> int:
        self.ids += 1
        params = SamplingParams(**sampling)
        ids = TokenIds.of([1, 5, 9] if prompt is None else prompt)
        self.engine.submit(EngineRequest(request_id=self.ids, prompt_token_ids=ids, sampling=params))
        self.open[self.ids], self.outputs[self.ids] = params.n, []
        return self.ids

    def step(self) -> bool:
        self.context.rung.clear()
        step = self.engine.step()
        for output in step.outputs:
            assert output.request_id in self.open, "an output after the end"
            self.outputs[output.request_id].append(output)
            if output.error is not None:
                del self.open[output.request_id]
            elif output.finish_reason is not None:
                self.open[output.request_id] -= 1
                if not self.open[output.request_id]:
                    del self.open[output.request_id]
        return step.again

    def run(self) -> None:
        while self.open:
            if not self.step() and self.open:
                assert self.context.rung.wait(60), "requests are pending, and nobody wakes the engine"

    def tokens(self, request_id: int, index: int = 0) -> list[int]:
        return [token for o in self.outputs[request_id] if o.index == index for token in o.token_ids]

    def text(self, request_id: int, index: int = 0) -> str:
        return self.tokenizer.decode(self.tokens(request_id, index), skip_special_tokens=False)

    def end(self, request_id: int, index: int = 0) -> str | None:
        return [o.finish_reason for o in self.outputs[request_id] if o.index == index][-1]

    def error(self, request_id: int) -> str:
        error = self.outputs[request_id][-1].error
        assert error is not None, "it did not fail"
        return error.message

    def ask(self, **sampling: Any) -> str:
        request_id = self.submit(**sampling)
        self.run()
        assert self.end(request_id) == "stop"
        return self.text(request_id)

    def check_empty(self) -> None:
        assert not self.engine.live
        assert self.engine.stats().kv_blocks_used == 0


@pytest.fixture(scope="module")
def bench(text_model_dir: Path) -> Iterator[Bench]:
    bench = Bench(text_model_dir)
    yield bench
    bench.check_empty()
    bench.engine.close()


# --------------------------------------------------------------------------------------------------------- kinds


@pytest.mark.parametrize("seed", range(5))
def test_a_schema_is_matched_whole(bench: Bench, seed: int) -> None:
    answer = json.loads(bench.ask(guided={"json": SCHEMA, "whitespace": False}, temperature=1.5, seed=seed))
    assert set(answer) == {"ok", "kind", "count"}
    assert answer["ok"] in (True, False)
    assert answer["kind"] in ("a", "bc", "def")
    assert answer["count"] in (1, 22, 333)


@pytest.mark.parametrize("seed", range(5))
def test_an_expression_is_matched_whole(bench: Bench, seed: int) -> None:
    text = bench.ask(guided={"regex": r"[a-f]{3,9}-(yes|no)é?"}, temperature=1.5, seed=seed)
    assert re.fullmatch(r"[a-f]{3,9}-(yes|no)é?", text)


def test_choices_may_be_many_and_come_again(bench: Bench) -> None:
    many = tuple(f"{number}" for number in range(10_000))
    answer = bench.ask(guided={"choice": many}, max_tokens=10)
    assert answer in many
    assert bench.ask(guided={"choice": ("yes",) * 10_000}) == "yes"


def test_choices_and_grammars_of_both_notations(bench: Bench) -> None:
    for seed in range(4):
        fields: dict[str, Any] = {"temperature": 2.0, "seed": seed}
        assert bench.ask(guided={"choice": ["yes", 'n"o\n', "maybe ü"]}, **fields) in ("yes", 'n"o\n', "maybe ü")
        assert set(bench.ask(guided={"grammar": 'start: ("a" | "bb")~3..6'}, **fields)) <= {"a", "b"}
        assert bench.ask(guided={"grammar": 'root ::= "x" ("y" | "z") "x"'}, **fields) in ("xyx", "xzx")
    assert isinstance(json.loads(bench.ask(guided={"json_object": True, "whitespace": False}, **_short(bench))), dict)


def _short(bench: Bench) -> dict[str, Any]:
    """A strong wish for the end."""
    close = bench.tokenizer.token_to_id("}")
    return {"logit_bias": {close: 100.0, EOS: 100.0}}


def test_what_may_come_is_what_a_plain_search_finds(text_model_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(text_model_dir / "tokenizer.json"))
    vocabulary = load_vocabulary(str(text_model_dir), VOCAB, (EOS,))
    texts = {token: tokenizer.decode([token], skip_special_tokens=False) for token in range(3, VOCAB)}
    plain = {token: text for token, text in texts.items() if text and "\ufffd" not in text}
    pick = random.Random(4)
    choices = ["yes", "yes, no", "no", "maybe: true", "mayb", "false 12"]
    grammar = compile_grammar(vocabulary, GuidedDecoding(choice=tuple(choices)))
    for _ in range(30):
        guide, so_far = grammar.start(grammar.stops(frozenset({EOS, 77}))), ""
        while True:
            mask = np.zeros(VOCAB // 32, dtype=np.uint32)
            guide.fill(mask)
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            allowed = {int(token) for token in bits.nonzero()[0]}
            expected = {t for t, text in plain.items() if any(c.startswith(so_far + text) for c in choices)}
            expected |= {EOS, 77} if so_far in choices else set()
            following = {c[len(so_far) :][:1] for c in choices if c.startswith(so_far)}
            if len(following) == 1 and following != {""}:  # what must come is written in the tokenizer's own tokens
                assert allowed
                assert allowed <= expected
            else:
                assert allowed == expected
            token = pick.choice(sorted(allowed))
            guide.follow(token)
            if token in (EOS, 77):
                break
            so_far += texts[token]
        assert so_far in choices


# ------------------------------------------------------------------------------------------------------ together


def test_each_sequence_follows_the_grammar_by_itself(bench: Bench) -> None:
    request_id = bench.submit(guided={"regex": "[a-z]{4,12}"}, n=4, temperature=2.0, seed=3)
    bench.run()
    texts = [bench.text(request_id, index) for index in range(4)]
    assert all(re.fullmatch("[a-z]{4,12}", text) for text in texts)
    assert len(set(texts)) > 1


def test_neither_batch_nor_preemption_changes_a_guided_answer(text_model_dir: Path, bench: Bench) -> None:
    kinds: list[dict[str, Any]] = [
        {"guided": {"json": SCHEMA, "whitespace": False}},
        {"guided": {"regex": "[a-z ]{60,90}"}, "logit_bias": {100: 3.0}},
        {"guided": {"choice": ["yes and no", "no"]}, "n": 2},
        {"bad_token_sequences": [[5], [6, 7]], "max_tokens": 70},
        {"allowed_token_ids": list(range(40, 90)), "max_tokens": 70, "repetition_penalty": 1.2},
    ]
    wanted = [kind | {"temperature": 1.3, "seed": 100 + at} for at, kind in enumerate(kinds * 3)]
    alone = []
    for fields in wanted:
        request_id = bench.submit(**fields)
        bench.run()
        alone.append([bench.tokens(request_id, index) for index in range(fields.get("n", 1))])
    crowded = Bench(text_model_dir, num_blocks=8, max_num_seqs=8)
    request_ids = [crowded.submit(**fields) for fields in wanted]
    crowded.run()
    assert crowded.engine.stats().preemptions > 0
    for request_id, expected in zip(request_ids, alone, strict=True):
        assert [crowded.tokens(request_id, index) for index in range(len(expected))] == expected
    crowded.check_empty()


def test_an_answer_ends_where_its_grammar_does_even_with_ignore_eos(bench: Bench) -> None:
    assert bench.ask(guided={"choice": ["yes"]}, ignore_eos=True) == "yes"


def test_own_stop_ids_may_come_where_the_answer_is_complete(bench: Bench) -> None:
    request_id = bench.submit(guided={"regex": "(ab){1,50}"}, stop_token_ids=[77], logit_bias={77: 100.0, EOS: -100.0})
    bench.run()
    assert bench.outputs[request_id][-1].stop_reason == 77
    assert bench.text(request_id) == "ab"


def test_min_tokens_holds_the_end_back_as_long_as_the_grammar_can_go_on(bench: Bench) -> None:
    fields: dict[str, Any] = {"logit_bias": {EOS: 100.0}, "min_tokens": 7}
    request_id = bench.submit(guided={"regex": "[ab]{1,50}"}, **fields)
    bench.run()
    assert len(bench.tokens(request_id)) == 7
    request_id = bench.submit(guided={"choice": ["a"]}, **fields)
    bench.run()
    assert bench.error(request_id) == (
        "no token may come as number 2 of the output: guided and min_tokens exclude all of them"
    )


def test_rules_that_exclude_each_other_fail_their_request_alone(bench: Bench) -> None:
    other = bench.submit(max_tokens=6, ignore_eos=True)
    request_id = bench.submit(guided={"choice": ["yes"]}, allowed_token_ids=[3])
    bench.run()
    assert bench.error(request_id) == (
        "no token may come as number 1 of the output: guided and allowed_token_ids exclude all of them"
    )
    assert bench.outputs[request_id][-1].error.field == "guided"  # type: ignore[union-attr]
    assert len(bench.tokens(other)) == 6


def test_broken_logits_are_told_as_such_behind_a_mask(text_model_dir: Path) -> None:
    grammar = compile_grammar(load_vocabulary(str(text_model_dir), VOCAB, (EOS,)), GuidedDecoding(choice=("yes",)))
    logits = torch.zeros(3, VOCAB)
    logits[1, 200] = torch.nan
    stops = grammar.stops(frozenset())
    GuidedRows([(1, grammar.start(stops)), (2, grammar.start(stops))], VOCAB, CPU).add_to(logits)
    assert logits[0].tolist() == [0.0] * VOCAB
    assert logits[1].isnan().nonzero().flatten().tolist() == [200]
    assert torch.equal(logits[1].isneginf() | logits[1].isnan(), logits[2].isneginf())


# ----------------------------------------------------------------------------------------------------- compiling


def test_what_is_no_grammar_fails_its_request_alone(bench: Bench) -> None:
    other = bench.submit(max_tokens=6, ignore_eos=True)
    bad: list[dict[str, Any]] = [
        {"regex": "a(?=b)"},
        {"regex": "["},
        {"grammar": "start: nowhere"},
        {"grammar": "what is ((("},
        {"json": {"type": "nonsense"}},
        {"json": {"$ref": "https://example.org/schema"}},
        {"json": {"not": {}}},
    ]
    request_ids = [bench.submit(guided=guided) for guided in bad]
    bench.run()
    for request_id in request_ids:
        assert bench.error(request_id).startswith("the grammar can't be used: ")
        assert bench.outputs[request_id][-1].error.field == "guided"  # type: ignore[union-attr]
    assert len(bench.tokens(other)) == 6


@pytest.mark.parametrize(
    "guided",
    [
        {"regex": r"[^\s\S]"},
        {"regex": r"a[^\s\S]"},
        {"grammar": "start: start"},
        {"grammar": "root ::= root"},
        {"json": {"$ref": "#"}},
        {"json": False},
        {"json": " false "},
    ],
)
def test_what_no_text_can_match_is_an_error_and_no_empty_answer(bench: Bench, guided: dict[str, Any]) -> None:
    for _ in range(2):  # it is not kept as if it were one
        request_id = bench.submit(guided=guided)
        bench.run()
        assert bench.error(request_id) == "the grammar can't be used: no text can match it"
        assert bench.outputs[request_id][-1].error.field == "guided"  # type: ignore[union-attr]


def test_a_dead_end_after_some_tokens_is_an_error(bench: Bench) -> None:
    request_id = bench.submit(guided={"grammar": 'start: "a" x\nx: x'}, max_tokens=20)
    bench.run()
    assert "no text can match it" in bench.error(request_id)


@pytest.mark.parametrize("guided", [{"regex": "()"}, {"grammar": 'root ::= ""'}, {"grammar": 'start: ""'}])
def test_a_grammar_of_the_empty_text_alone_ends_at_once(bench: Bench, guided: dict[str, Any]) -> None:
    assert bench.ask(guided=guided) == ""


def test_true_is_the_schema_of_any_json(bench: Bench) -> None:
    for schema in (True, "true"):
        request_id = bench.submit(guided={"json": schema, "whitespace": False}, max_tokens=40, logit_bias={EOS: 50})
        bench.run()
        if bench.end(request_id) == "stop":
            json.loads(bench.text(request_id).removesuffix("</s>"))
        else:
            assert bench.text(request_id)[0] in '{["-0123456789tfn'


def test_steps_go_on_while_a_grammar_is_compiled(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(*args: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        return compile_grammar(*args)

    monkeypatch.setattr(grammars, "compile_grammar", slow)
    waiting = bench.submit(guided={"choice": ["never seen before"]})
    twin = bench.submit(guided={"choice": ["never seen before"]})
    aborted = bench.submit(guided={"choice": ["never seen before"]})
    other = bench.submit(max_tokens=9, ignore_eos=True)
    assert begun.wait(60)
    while other in bench.open:
        assert bench.step() or other not in bench.open
    assert not bench.step(), "it waits for a grammar, and wants steps meanwhile"
    assert not bench.outputs[waiting]
    bench.engine.abort(aborted)
    del bench.open[aborted]
    go_on.set()
    bench.run()
    assert bench.text(waiting) == bench.text(twin) == "never seen before"
    assert not bench.outputs[aborted]


def test_a_grammar_is_compiled_once_and_later_requests_begin_at_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[GuidedDecoding] = []

    def counting(vocabulary: Any, guided: GuidedDecoding) -> Any:
        counted.append(guided)
        return compile_grammar(vocabulary, guided)

    monkeypatch.setattr(grammars, "compile_grammar", counting)
    for seed in range(3):
        assert bench.ask(guided={"choice": ["once", "twice"]}, seed=seed) in ("once", "twice")
    assert len(counted) == 1
    request_id = bench.submit(guided={"choice": ["once", "twice"]})
    assert bench.step()
    assert bench.outputs[request_id]
    bench.run()


def test_kept_grammars_are_bounded(text_model_dir: Path) -> None:
    vocabulary, woken = load_vocabulary(str(text_model_dir), VOCAB, (EOS,)), threading.Semaphore(0)
    some = grammars.Grammars(vocabulary, woken.release)
    specs = [GuidedDecoding(choice=(f"c{number}",)) for number in range(40)]
    for number, spec in enumerate(specs):
        assert some.find(spec, number) is None
    for _ in specs:
        assert woken.acquire(timeout=60)
    assert sorted(request_id for compiled in some.ready() for request_id in compiled.request_ids) == list(range(40))
    assert [some.find(spec, 99) is not None for spec in specs] == [False] * 8 + [True] * 32
    some.close()


class _Slow:
    """A matcher whose masks cost CPU time."""

    def unsafe_compute_mask_ptr(self, pointer: int, size: int) -> None:
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass

    def consume_token(self, token: int) -> bool:
        return True

    def is_error(self) -> bool:
        return False


def test_a_grammar_that_is_slow_for_long_fails_its_request() -> None:
    mask = np.ones(10, dtype=np.uint32)
    guide = Guide(_Slow(), mask.copy(), 0, Stops.of(frozenset(), len(mask)))  # type: ignore[arg-type]
    filled = 0
    while guide.error is None and filled < 50:
        guide.fill(mask)
        guide.follow(5)
        filled += 1
    assert 5 <= filled <= 10  # 0.25 s at 0.04 s more than its share each
    assert "more than 10 ms each" in (guide.error or "")
    assert not mask.any()


# ------------------------------------------------------------------------------------------------------- refused


def test_without_the_package_it_is_refused_with_what_to_install(
    text_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "find_spec", lambda name: None)
    bench = Bench(text_model_dir)
    assert "guided" not in bench.info.supports
    with pytest.raises(RequestError, match=re.escape("pip install 'tllm-core[guided]'")) as caught:
        bench.submit(guided={"choice": ["a"]})
    assert caught.value.field == "guided"
    bench.check_empty()


def test_without_a_tokenizer_or_with_the_setting_off_it_is_refused(model_dir: Path, text_model_dir: Path) -> None:
    for directory, settings, reason in (
        (model_dir, {}, "has no tokenizer"),
        (text_model_dir, {"guided": False}, "setting `guided` is false"),
    ):
        engine = TpEngine(TpSettings(model=str(directory), threads=1, num_blocks=8, **settings))
        assert "guided" not in engine.start(Context()).supports
        request = EngineRequest(
            request_id=1, prompt_token_ids=TokenIds.of([1]), sampling=SamplingParams(guided={"choice": ["a"]})
        )
        with pytest.raises(RequestError, match=reason):
            engine.submit(request)
        assert not engine.live


def test_however_many_tokens_end_an_answer_a_mask_takes_no_code_for_each() -> None:
    words = 100_000 // 32
    mask, first = np.zeros(words, dtype=np.uint32), np.zeros(words, dtype=np.uint32)
    first[0] = 1
    stops = Stops.of(frozenset(range(40, 32 * words)), words)
    guides = [Guide(_Slow(), first, 0, stops) for _ in range(16)]  # type: ignore[arg-type]
    began = time.thread_time()
    for guide in guides:
        guide.fill(mask)
    assert time.thread_time() - began < 0.2
    assert np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist() == [0, *range(40, 32 * words)]
