"""Every message survives the way there, and whatever else arrives is one MalformedFrame."""

import pickle
import struct
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tllm_core.contracts.messages import (
    Abort,
    Beat,
    Control,
    ControlReply,
    EngineInfo,
    ErrorReport,
    GenerationRequest,
    Gone,
    Goodbye,
    Hello,
    Logprob,
    Obituary,
    RankState,
    Refuse,
    RequestMetrics,
    RowExtra,
    SamplingParams,
    StepBatch,
    Stop,
    Stopping,
    Submit,
    TokenIds,
    Welcome,
)
from tllm_core.wire.codec import INLINE_BYTES, MalformedFrame, decode_down, decode_special, decode_up, encode
from tllm_core.wire.header import HELLO, MESSAGE, STEP, payload_size

QUICK = settings(max_examples=150, deadline=None, database=None)

tokens = st.integers(0, 2**31 - 1)
texts = st.text(max_size=8)
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | texts
    | st.binary(max_size=400),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(texts, children, max_size=3),
    max_leaves=6,
)
plain_dicts = st.none() | st.dictionaries(texts, plain, max_size=3)
requests = st.builds(
    GenerationRequest,
    prompt_token_ids=st.lists(tokens, max_size=200).map(TokenIds.of),
    sampling=st.builds(
        SamplingParams,
        n=st.integers(1, 8),
        max_tokens=st.none() | st.integers(1, 9),
        temperature=st.floats(0, 2),
        stop=st.lists(texts, max_size=2).map(tuple),
        seed=st.none() | st.integers(0, 2**63 - 1),
    ),
    streaming=st.booleans(),
    timeout_s=st.none() | st.floats(0.1, 1e6),
    priority=st.integers(-5, 5),
    trace_context=st.none() | st.dictionaries(texts, texts, max_size=2),
    extra=plain_dicts,
)
client_ids = st.integers(0, 2**63 - 1)
up_messages = st.one_of(
    st.builds(Submit, client_ids, requests),
    st.builds(Abort, st.none() | client_ids),
    st.builds(Control, st.integers(0, 2**63), texts, st.lists(plain, max_size=3), st.none() | st.just((0, 1))),
    st.just(Goodbye()),
    st.just(Stop()),
)
logprobs = st.lists(st.lists(st.builds(Logprob, tokens, st.floats(-100, 0), st.integers(1, 9)), max_size=3), max_size=2)
extras = st.builds(
    RowExtra,
    logprobs=st.none() | logprobs,
    prompt_logprobs=st.none() | logprobs,
    error=st.none() | st.builds(ErrorReport, texts, st.none() | texts),
    metrics=st.none() | st.builds(RequestMetrics, prompt_tokens=st.integers(0, 99), queued_s=st.floats(0, 9)),
    handoff=plain_dicts,
    extra=plain_dicts,
)


@st.composite
def step_batches(draw: st.DrawFn) -> StepBatch:
    ids = draw(st.lists(st.integers(0, 2**64 - 1), max_size=6))
    rows = len(ids)
    counts = draw(st.none() | st.lists(st.integers(0, 4), min_size=rows, max_size=rows))
    total = rows if counts is None else sum(counts)
    batch = StepBatch(ids, draw(st.lists(tokens, min_size=total, max_size=total)), counts=counts)
    batch.indexes = draw(st.none() | st.lists(st.integers(0, 1023), min_size=rows, max_size=rows))
    if rows:
        places = st.integers(0, rows - 1)
        batch.finishes = draw(st.lists(st.tuples(places, st.integers(1, 5), st.none() | tokens | texts), max_size=3))
        batch.extras = draw(st.lists(st.tuples(places, extras), max_size=2))
    return batch


down_messages = st.one_of(
    st.builds(ControlReply, st.integers(0, 2**63), st.lists(plain, max_size=3), st.none() | texts),
    st.just(Stopping()),
    st.builds(Obituary, texts, st.none() | st.integers(0, 8), st.none() | st.integers(-64, 255), st.none() | texts),
)
special_messages = st.one_of(
    st.builds(
        Hello,
        st.just(1),
        st.just(1),
        st.binary(min_size=16, max_size=16),
        st.binary(max_size=16),
        st.binary(max_size=32),
    ),
    st.builds(
        Welcome,
        nonce=st.binary(max_size=16),
        session=st.integers(0, 2**64 - 1),
        frontend_id=st.integers(0, 32766),
        version=st.just(1),
        window_frames=st.integers(1, 9),
        window_bytes=st.integers(1, 9),
        max_message_bytes=st.integers(1, 9),
        info=st.builds(
            EngineInfo, model=texts, supports=st.frozensets(texts, max_size=2), sampling_defaults=st.just({"n": 1})
        ),
    ),
    st.builds(Refuse, st.binary(max_size=16), texts, st.just(1), st.just(2)),
    st.builds(Gone, texts),
    st.builds(
        Beat, st.integers(0, 9), st.integers(0, 9), st.booleans(), st.just((RankState.STOPPED,)), st.just((0.5,))
    ),
)


def as_views(payload: Sequence[bytes]) -> list[memoryview]:
    """As zmq hands them out: read-only views at odd offsets."""
    return [memoryview(b"x" + bytes(buffer))[1:] for buffer in payload]


@QUICK
@given(up_messages)
def test_up_messages_survive(message) -> None:
    kind, payload = encode(message)
    assert kind == MESSAGE
    assert decode_up(kind, payload) == message
    assert decode_up(kind, as_views(payload)) == message


@QUICK
@given(down_messages)
def test_down_messages_survive(message) -> None:
    assert decode_down(*encode(message)) == message


@QUICK
@given(special_messages)
def test_handshakes_and_beats_survive(message) -> None:
    assert decode_special(*encode(message)) == message


@QUICK
@given(step_batches())
def test_step_batches_survive(batch) -> None:
    kind, payload = encode(batch)
    assert kind == STEP
    for buffers in (payload, as_views(payload)):
        decoded = decode_down(kind, buffers)
        assert all(type(column) is list for column in (decoded.client_ids, decoded.token_ids))
        rows = len(batch.client_ids)
        assert (decoded.counts or [1] * rows) == (batch.counts or [1] * rows)
        assert (decoded.indexes or [0] * rows) == (batch.indexes or [0] * rows)
        for column in ("client_ids", "token_ids", "finishes", "extras"):
            assert list(getattr(decoded, column)) == list(getattr(batch, column))


def test_columns_that_say_nothing_are_not_sent() -> None:
    plain_batch, padded = StepBatch([7, 8], [1, 2]), StepBatch([7, 8], [1, 2], counts=[1, 1], indexes=[0, 0])
    assert encode(plain_batch) == encode(padded)
    assert payload_size(encode(plain_batch)[1]) == 12 + 2 * (8 + 4)


def test_a_long_prompt_crosses_without_a_copy() -> None:
    ids = TokenIds.of(range(INLINE_BYTES))
    _, payload = encode(Submit(1, GenerationRequest(prompt_token_ids=ids)))
    assert payload[1].obj is ids.view.obj
    buffer = bytes(payload[1])
    decoded = decode_up(MESSAGE, [payload[0], memoryview(buffer)])
    assert isinstance(decoded, Submit)
    assert decoded.request.prompt_token_ids.view.obj is buffer


@pytest.mark.parametrize("size", [INLINE_BYTES // 4 - 1, INLINE_BYTES // 4, INLINE_BYTES // 4 + 1])
def test_prompts_around_the_inline_limit_survive(size) -> None:
    message = Submit(1, GenerationRequest(prompt_token_ids=TokenIds.of(range(size))))
    kind, payload = encode(message)
    assert len(payload) == (2 if size * 4 > INLINE_BYTES else 1)
    assert decode_up(kind, payload) == message


def test_what_is_no_plain_data_is_named() -> None:
    with pytest.raises(TypeError, match="object can't cross a process boundary"):
        encode(Control(1, "x", (object(),)))


# -------------------------------------------------------------------------------------------------------- hostile


def step(rows: int, tokens: int, sections: int, *columns: bytes) -> bytes:
    return struct.pack("<III", rows, tokens, sections) + b"".join(columns)


ONE_ROW = bytes(8) + bytes(4)


@pytest.mark.parametrize(
    "payload",
    [
        [],
        [b""],
        [b"\0" * 11],
        [step(2**32 - 1, 2**32 - 1, 0)],
        [step(1, 1, 0)],
        [step(1, 1, 0, ONE_ROW, b"\0")],
        [step(1, 1, 8, ONE_ROW)],
        [step(1, 2, 0, ONE_ROW, bytes(4))],
        [step(1, 1, 0, bytes(8), b"\xff\xff\xff\xff")],
        [step(1, 1, 1, ONE_ROW, struct.pack("<I", 2))],
        [step(1, 1, 0, ONE_ROW), b""],
        [step(1, 1, 4, ONE_ROW)],
        [step(1, 1, 4, ONE_ROW), msgspec.msgpack.encode(([(1, 1, None)], []))],
        [step(1, 1, 4, ONE_ROW), msgspec.msgpack.encode(([(-1, 1, None)], []))],
        [step(1, 1, 4, ONE_ROW), msgspec.msgpack.encode(([(0, 0, None)], []))],
        [step(1, 1, 4, ONE_ROW), msgspec.msgpack.encode(([(0, 6, None)], []))],
        [step(1, 1, 4, ONE_ROW), msgspec.msgpack.encode(([], [(1, [])]))],
        [step(1, 1, 4, ONE_ROW), msgspec.msgpack.encode(([], [(0, [[["x"]]])]))],
        [step(1, 1, 4, ONE_ROW), pickle.dumps({})],
    ],
)
def test_step_batches_that_contradict_themselves_are_malformed(payload) -> None:
    with pytest.raises(MalformedFrame):
        decode_down(STEP, payload)


REQUEST = [b"\1\0\0\0"]


@pytest.mark.parametrize(
    "content",
    [
        ["submit", 5, [b"\1\0\0"]],
        ["submit", 5, [b"\xff\xff\xff\xff"]],
        ["submit", 5, ["text"]],
        ["submit", 5, [None]],
        ["submit", 5, [b"\1\0\0\0", ["many"]]],
        ["submit", 5],
    ],
)
def test_a_submit_that_can_not_be_read_still_says_whose_it_is(content) -> None:
    with pytest.raises(MalformedFrame) as caught:
        decode_up(MESSAGE, [msgspec.msgpack.encode(content)])
    assert caught.value.client_id == 5


@pytest.mark.parametrize(
    "payload",
    [
        [],
        [b""],
        [b"\xc1"],
        [b"\x91" * 100_000],
        [b"\x93\xa6submit\x05\x91\xa1\xff"],
        [msgspec.msgpack.encode(["nothing"])],
        [msgspec.msgpack.encode(["reply", 1])],
        [msgspec.msgpack.encode(["abort", 1]), b"more"],
        [msgspec.msgpack.encode(["abort", "text"])],
        [msgspec.msgpack.encode(["submit", 5, REQUEST]), b"\0" * 4],
        [pickle.dumps(Stop)],
    ],
)
def test_messages_that_make_no_sense_are_malformed(payload) -> None:
    with pytest.raises(MalformedFrame):
        decode_up(MESSAGE, payload)
    with pytest.raises(MalformedFrame):
        decode_special(HELLO, payload)


@settings(max_examples=300, deadline=None, database=None)
@given(
    st.lists(st.binary(max_size=64), max_size=3),
    st.integers(0, 9),
    st.none() | st.builds(encode, up_messages | down_messages | step_batches() | special_messages),
    st.integers(0, 10_000),
    st.integers(0, 7),
    st.booleans(),
)
@example([b"\xdd\xff\xff\xff\xff"], 6, None, 0, 0, False)
def test_noise_and_flipped_bits_are_malformed_or_a_message(noise, kind, valid, at, bit, cut) -> None:
    payload: list[bytes] = noise
    if valid is not None:
        kind, buffers = valid
        payload = [bytes(buffer) for buffer in buffers]
        body = bytearray(payload[at % len(payload)])
        if body:
            body[at % len(body)] ^= 1 << bit
        payload[at % len(payload)] = bytes(body[: at % (len(body) + 1)]) if cut else bytes(body)
    for decode in (decode_up, decode_down, decode_special):
        try:
            message = decode(kind, payload)
        except MalformedFrame:
            continue
        assert isinstance(message, msgspec.Struct)
