"""The frozen bytes, and what a seal and a gate let through."""

import hashlib
import hmac
import struct
from collections import Counter

import pytest

from tllm_core.contracts.messages import Hello, Refuse
from tllm_core.wire.codec import encode
from tllm_core.wire.header import ACK, DOWN, GAP, MESSAGE, SEALED_SIZE, Gate, Seal, derive_key

KEY = bytes(range(32))


def seal(key: bytes | None = KEY, generation: int = 9, session: int = 4, *, down: bool = True) -> Seal:
    return Seal(key, generation, session, down=down)


def gate(counters: Counter[str], *, generation: int = 9, down: bool = True, sealed: bool = True) -> Gate:
    return Gate(generation, down=down, sealed=sealed, max_bytes=1000, counters=counters)


def test_the_first_bytes_are_frozen() -> None:
    frame = seal(session=5).frame(MESSAGE, [b"body"], sequence=6, ack=7, flags=GAP)
    assert frame[0][:40].hex() == (
        "544c4c4d"  # TLLM
        "0100"  # wire version 1
        "06"  # kind
        "03"  # down, gap
        "0900000000000000"  # generation
        "0500000000000000"  # session
        "0600000000000000"  # sequence
        "0700000000000000"  # acknowledged
    )
    assert len(frame[0]) == SEALED_SIZE


def test_hello_and_refuse_are_frozen_to_the_last_byte() -> None:
    hello = Seal(KEY, 9, 0, down=False).frame(*encode(Hello(1, 2, b"p" * 16, b"n" * 16, b"own")))
    assert b"".join(hello[1:]).hex() == "96a568656c6c6f0102c410" + "70" * 16 + "c410" + "6e" * 16 + "c4036f776e"
    refuse = Seal(KEY, 9, 0, down=True).frame(*encode(Refuse(b"n" * 16, "no", 1, 2)))
    assert b"".join(refuse[1:]).hex() == "95a6726566757365c410" + "6e" * 16 + "a26e6f0102"
    for frame, direction in ((hello, 0), (refuse, 1)):
        key = hmac.new(KEY, b"tllm-core lane key" + struct.pack("<QQB", 9, 0, direction), hashlib.sha256).digest()
        covered = frame[0][:40] + struct.pack("<QQ", 1, len(frame[1])) + frame[1]
        assert frame[0][40:] == hmac.new(key, covered, hashlib.sha256).digest()


@pytest.mark.parametrize(
    "payload", [[], [b""], [b"abc"], [b"a" * 70_000], [b"a", b"bc"], [b"a", b"b" * 70_000, memoryview(b"c")]]
)
def test_what_was_sealed_is_genuine_and_nothing_else(payload) -> None:
    frame = seal().frame(MESSAGE, payload, sequence=1)
    assert seal().is_genuine(frame)
    assert seal().is_genuine([memoryview(bytes(buffer)) for buffer in frame])
    for other in (seal(b"x" * 32), seal(generation=8), seal(session=3), seal(down=False)):
        assert not other.is_genuine(frame)


def test_boundaries_between_buffers_can_not_be_moved() -> None:
    head, *_ = seal().frame(MESSAGE, [b"ab", b"c"])
    assert seal().is_genuine([head, b"ab", b"c"])
    for moved in ([b"a", b"bc"], [b"abc"], [b"ab", b"c", b""], [b"", b"ab", b"c"], [b"c", b"ab"]):
        assert not seal().is_genuine([head, *moved])


def test_every_flipped_bit_is_noticed() -> None:
    frame = seal().frame(MESSAGE, [b"body"], sequence=1)
    for at in range(len(frame[0]) * 8):
        head = bytearray(frame[0])
        head[at // 8] ^= 1 << at % 8
        assert not seal().is_genuine([bytes(head), frame[1]])


def test_keys_differ_by_everything_they_are_for() -> None:
    keys = {derive_key(KEY, *what) for what in ((1, 2, 0), (1, 2, 1), (2, 1, 0), (1, 3, 0))}
    assert len(keys) == 4
    assert all(len(key) == 32 for key in keys)


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        ([], "truncated"),
        ([b""], "truncated"),
        ([seal().frame(ACK)[0][:-1]], "truncated"),
        ([seal().frame(ACK)[0] + b"x"], "truncated"),
        ([b"HTTP" + seal().frame(ACK)[0][4:]], "wrong_magic"),
        ([b"TLLM\2\0" + seal().frame(ACK)[0][6:]], "wrong_version"),
        (seal(generation=8).frame(ACK), "wrong_generation"),
        (seal(down=False).frame(ACK), "wrong_direction"),
        (seal().frame(99), "unknown_kind"),
        (seal().frame(0), "unknown_kind"),
        (seal().frame(MESSAGE, flags=0x80), "unknown_kind"),
        (seal().frame(MESSAGE, [b"x" * 600, b"x" * 600]), "oversized"),
        (seal().frame(MESSAGE, [b""] * 2000), "oversized"),
    ],
)
def test_the_gate_counts_what_it_turns_away(frame, reason) -> None:
    counters: Counter[str] = Counter()
    assert gate(counters).read(frame) is None
    assert counters == {reason: 1}


def test_the_gate_reads_what_is_meant_for_it() -> None:
    counters: Counter[str] = Counter()
    header = gate(counters).read(seal(session=5).frame(MESSAGE, [b"x"], sequence=3, ack=2))
    assert header is not None
    assert (header.kind, header.flags, header.session, header.sequence, header.ack) == (MESSAGE, DOWN, 5, 3, 2)
    assert not counters


def test_frames_by_reference_carry_no_mac() -> None:
    counters: Counter[str] = Counter()
    frame = seal(None).frame(MESSAGE, [object()], sequence=1)
    assert len(frame[0]) == 40
    assert gate(counters, sealed=False).read(frame) is not None
    assert gate(counters).read(frame) is None
