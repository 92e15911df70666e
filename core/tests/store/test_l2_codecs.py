"""Codecs: smaller, and byte for byte the same again."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from tiers import DictTier, make_client

from kvplug.errors import ConfigError
from kvplug.stats import Stats
from kvplug.store import Slab
from kvplug.store.l2.codecs import decodable, decode, make_codec


def block(length, dtype=np.float32):
    """Return numbers as KV has them: alike in size, unlike in the last bits."""
    numbers = np.random.default_rng(0).normal(size=length // np.dtype(dtype).itemsize + 1).astype(dtype)
    return memoryview(bytearray(numbers.tobytes()[:length]))


@pytest.mark.parametrize("length", [1, 3, 4, 4095, 65536, 100_001])
@pytest.mark.parametrize("name", ["zstd", "shuffle-zstd"])
@pytest.mark.parametrize("item_bytes", [1, 2, 4])
def test_decoding_gives_the_block_back(name, length, item_bytes):
    """Blocks of any length come back byte for byte, whole elements or not."""
    pytest.importorskip("zstandard")
    codec = make_codec(name, item_bytes)
    payload = block(length)
    stored = codec.encode(payload)
    found = memoryview(bytearray(length))
    assert decode(codec.number, stored, found, codec.parameter)
    assert bytes(found) == bytes(payload)


@pytest.mark.parametrize("name", ["zstd", "shuffle-zstd"])
def test_what_cant_be_decoded_is_no_error(name):
    """Bytes that no encoder made, or that decode to another length, are refused."""
    pytest.importorskip("zstandard")
    codec = make_codec(name, 4)
    stored = codec.encode(block(4096))
    for bad, length in [(b"", 4096), (b"nonsense" * 100, 4096), (stored[:-5], 4096), (stored, 4095), (stored, 4097)]:
        assert not decode(codec.number, bad, memoryview(bytearray(length)), codec.parameter)


@pytest.mark.parametrize("name", ["zstd", "shuffle-zstd"])
def test_engines_with_different_codecs_read_each_other(name):
    """What was written with a codec is read without the setting, and the other way round."""
    pytest.importorskip("zstandard")
    slab, tier, stats = Slab(4, 65536, header_bytes=64), DictTier(), Stats()
    slab.view(0)[:] = np.frombuffer(block(65536), np.uint8)
    encoding, plain = make_client(tier, slab, stats, codec=make_codec(name, 4)), make_client(tier, slab, stats)
    for client in (encoding, plain):
        client.start()
    for number, (writer, reader) in enumerate([(encoding, plain), (plain, encoding), (encoding, encoding)]):
        key = bytes([number]) * 32
        writing = writer.put([key], [0])
        assert writing.wait()
        assert writing.result == [True]
        slab.view(1)[:] = 0
        reading = reader.get([key], [1])
        assert reading.wait()
        assert reading.result == [True]
        assert (slab.view(1) == slab.view(0)).all()
    sizes = [len(value) for value in tier.values.values()]
    assert sizes[0] < sizes[1] == 65536 + 64
    for client in (encoding, plain):
        client.close()


def test_what_gets_no_smaller_is_stored_as_it_is():
    """Bytes without any pattern are stored without the codec, in their own length."""
    pytest.importorskip("zstandard")
    slab, tier = Slab(2, 65536, header_bytes=64), DictTier()
    slab.view(0)[:] = np.random.default_rng(0).integers(0, 256, 65536, np.uint8)
    client = make_client(tier, slab, codec=make_codec("zstd", 4))
    client.start()
    assert client.put([bytes(32)], [0]).wait()
    (value,) = tier.values.values()
    assert len(value) == 65536 + 64
    assert value[6] == 0
    client.close()


def test_none_is_no_codec():
    """Without the setting nothing is encoded; a name that doesn't exist is an error that names those that do."""
    assert make_codec("none", 2) is None
    with pytest.raises(ConfigError, match="set l2_codec to one of none, zstd, shuffle-zstd"):
        make_codec("lz5", 2)


def test_a_missing_library_is_one_sentence(monkeypatch):
    """Without zstandard the codecs can't be made, and their values can't be decoded: a miss."""
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvplug\[zstd\]'"):
        make_codec("zstd", 2)
    assert decodable() == frozenset({0})
