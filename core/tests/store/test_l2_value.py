"""Values: what a tier gives back is the block that was asked for, or a miss."""

from __future__ import annotations

import pytest

from kvplug.store.l2.value import HEADER_BYTES, Header, Problem, check, key_digest, layout_digest, seal

LAYOUT, KEY = layout_digest("shard", "layout"), key_digest(b"key")
PAYLOAD = bytes(range(256)) * 16


def sealed(payload=PAYLOAD, **changes):
    value = bytearray(HEADER_BYTES + len(payload))
    value[HEADER_BYTES:] = payload
    fields = {"layout": LAYOUT, "key": KEY, "payload_bytes": len(payload), "stored_bytes": len(payload)} | changes
    assert seal(memoryview(value), Header(**fields)) == len(value)
    return value


def checked(value, length=None, **expected):
    fields = {"layout": LAYOUT, "key": KEY, "payload_bytes": len(PAYLOAD), "codecs": frozenset({0})} | expected
    return check(memoryview(value), len(value) if length is None else length, **fields)


def test_a_sealed_value_is_accepted():
    """What was sealed is accepted, and the block's bytes are as they were; the buffer may be longer."""
    value = sealed()
    header = checked(value)
    assert (header.payload_bytes, header.stored_bytes, header.codec) == (len(PAYLOAD), len(PAYLOAD), 0)
    assert bytes(value[HEADER_BYTES:]) == PAYLOAD
    assert isinstance(checked(value + bytes(100), length=len(value)), Header)
    assert value[:4] == b"KVPB"


def test_every_flipped_bit_is_noticed():
    """A bit flipped anywhere, in the header, its checksum or the block, makes the value a miss."""
    value = sealed()
    for position in [*range(HEADER_BYTES), HEADER_BYTES, len(value) // 2, len(value) - 1]:
        for bit in range(8):
            damaged = bytearray(value)
            damaged[position] ^= 1 << bit
            assert isinstance(checked(damaged), Problem), (position, bit)


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, HEADER_BYTES + 4095])
def test_every_truncation_is_noticed(length):
    """A value that was cut off anywhere is a miss, also where the rest of the buffer has the old bytes."""
    assert checked(sealed(), length=length) is Problem.TRUNCATED


def test_what_is_longer_than_it_says_is_a_miss():
    """Two values one after the other are neither."""
    assert checked(sealed() + sealed()) is Problem.LENGTH


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (bytearray(b"\x80\x04" * 3000), Problem.FOREIGN),
        (bytearray(5000), Problem.FOREIGN),
        (sealed(layout=layout_digest("shard", "another layout")), Problem.LAYOUT),
        (sealed(key=key_digest(b"another key")), Problem.KEY),
        (sealed(payload_bytes=4095), Problem.LENGTH),
        (sealed(PAYLOAD[:2048]), Problem.LENGTH),
        (sealed(codec=1), Problem.CODEC),
        (sealed(codec=77), Problem.CODEC),
    ],
)
def test_what_is_something_else_is_a_miss(value, problem):
    """Foreign bytes, another layout, another block, another size, a codec that isn't there: each is told apart."""
    assert checked(value) is problem


def test_another_version_is_a_miss():
    """A value of an older or newer format is a miss, whatever else is in it."""
    value = sealed()
    for version in (0, 2, 0xFFFF):
        value[4:6] = version.to_bytes(2, "little")
        assert checked(value) is Problem.FORMAT


def test_digests_tell_fields_apart():
    """Where one text ends and the next begins matters."""
    assert layout_digest("ab", "c") != layout_digest("a", "bc")
    assert len(layout_digest("a")) == 16
    assert len(key_digest(b"a")) == 8


def test_sealing_more_than_there_is_fails():
    """A length that the memory doesn't have is the caller's error, and nothing is written."""
    value = bytearray(100)
    with pytest.raises(ValueError, match="don't fit"):
        seal(memoryview(value), Header(LAYOUT, KEY, 4096, 4096))
    assert value == bytes(100)
