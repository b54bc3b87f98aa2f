"""A packed frame comes back as it was, and nothing else is taken for one."""

import secrets

import pytest

from tllm_core.contracts.packing import SHORT_BUFFERS, measure, pack, table_bytes, unpack


def packed(frame):
    return pack(frame, measure(frame))


@pytest.mark.parametrize("count", [0, 1, 2, SHORT_BUFFERS, SHORT_BUFFERS + 1, 1000])
def test_buffers_stay_apart_however_many_there_are(count):
    frame = [secrets.token_bytes(number % 7) for number in range(count)]
    raw = packed(frame)
    assert len(raw) == table_bytes(count) + sum(map(len, frame))
    assert [bytes(part) for part in unpack(raw)] == frame


def test_memoryviews_of_any_item_size_are_packed_as_bytes():
    numbers = memoryview(b"\1\0\0\0\2\0\0\0").cast("i")
    assert [bytes(part) for part in unpack(packed([b"head", numbers]))] == [b"head", numbers.tobytes()]


@pytest.mark.parametrize("raw", [b"", b"\xff", b"\xff\1\0\0\0", b"\5", b"\xff\xff\xff\xff\xff", b"\1\x09\0\0\0ab"])
def test_what_is_no_packed_frame_comes_back_as_one_buffer(raw):
    assert unpack(raw) == [raw]


def test_a_block_with_a_byte_too_many_or_too_few_is_no_packed_frame():
    for count in (2, 300):
        raw = packed([b"x"] * count)
        for other in (raw[:-1], raw + b"x"):
            assert unpack(other) == [other]
