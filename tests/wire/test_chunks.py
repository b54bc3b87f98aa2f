"""Messages larger than a frame: cut, put together, bounded, and nothing else than what was sent."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tllm_core.wire.chunks import Assembly, chunks
from tllm_core.wire.codec import MalformedFrame
from tllm_core.wire.header import CUT, MESSAGE, MORE, STEP

QUICK = settings(max_examples=200, deadline=None, database=None)
LIMIT = 1000

payloads = st.lists(st.binary(max_size=60), min_size=1, max_size=5)


@QUICK
@given(payload=payloads, size=st.integers(1, 50))
def test_a_payload_survives_being_cut_to_any_size(payload, size) -> None:
    pieces = list(chunks(payload, size))
    assert all(piece.nbytes <= size for piece, _ in pieces)
    assembly = Assembly(LIMIT)
    for piece, flags in pieces[:-1]:
        assert assembly.add(MESSAGE, flags, [piece]) is None
        assert assembly.is_begun
    piece, flags = pieces[-1]
    assert [bytes(buffer) for buffer in assembly.add(MESSAGE, flags, [piece])] == payload
    assert not assembly.is_begun


def test_chunks_of_a_large_buffer_are_not_copies() -> None:
    body = os.urandom(1 << 16)
    assert all(piece.obj is body for piece, _ in chunks([body], 1000))


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([(MESSAGE, MORE, [b"a"]), (STEP, 0, [b"b"])], "no message"),
        ([(MESSAGE, CUT, [b"a"])], "no message"),
        ([(MESSAGE, MORE, [b"a", b"b"])], "no message"),
        ([(MESSAGE, MORE, [])], "no message"),
        ([(MESSAGE, MORE | CUT, [bytes(600)]), (MESSAGE, MORE | CUT, [bytes(600)])], "max_message_bytes"),
        ([(MESSAGE, MORE, [b""])] * 1025, "max_message_bytes"),
    ],
)
def test_what_no_sender_makes_is_refused_and_forgotten(frames, reason) -> None:
    assembly = Assembly(LIMIT)
    *begun, last = frames
    for kind, flags, payload in begun:
        assert assembly.add(kind, flags, payload) is None
    with pytest.raises(MalformedFrame, match=reason):
        assembly.add(*last)
    assert not assembly.is_begun
    assert assembly.add(STEP, 0, [b"whole"]) == [b"whole"]
