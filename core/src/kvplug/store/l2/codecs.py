"""Ways to make stored blocks smaller, without loss. None by default: see docs/l2.md for what they gain and cost.

A codec's number is in every value, so that engines with different settings can read each other's values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib import import_module
from typing import Any, ClassVar, Literal, cast, get_args

import numpy as np

from kvplug.errors import ConfigError

__all__ = ["Codec", "CodecName", "decodable", "decode", "make_codec"]

#: What the setting `l2_codec` can be.
CodecName = Literal["none", "zstd", "shuffle-zstd"]

#: The fastest level that still finds repetitions; higher ones gained under 1 % on KV.
_LEVEL = 1


class Codec(ABC):
    """Encodes blocks. Safe to use from several threads at once."""

    #: The number in a value's header. 0 is for blocks as they are.
    number: ClassVar[int]
    #: Goes into the header too, for `decode`.
    parameter: int = 0

    @abstractmethod
    def encode(self, payload: memoryview) -> bytes:
        """Return a block's bytes, encoded."""

    @classmethod
    @abstractmethod
    def decode(cls, stored: bytes, payload: memoryview, parameter: int) -> bool:
        """Decode into a block's memory, and return whether that gave exactly as many bytes as it has."""


class Zstd(Codec):
    """Zstandard."""

    number = 1

    def __init__(self) -> None:
        self._zstd = _zstandard()

    def encode(self, payload: memoryview) -> bytes:
        """Compress. A compressor isn't safe between threads, and costs little against a block."""
        return cast("bytes", self._zstd.ZstdCompressor(level=_LEVEL).compress(payload))

    @classmethod
    def decode(cls, stored: bytes, payload: memoryview, parameter: int) -> bool:  # noqa: ARG003 - it has none
        """Decompress."""
        found = _decompressed(stored, len(payload))
        if found is None:
            return False
        payload[:] = found
        return True


class ShuffledZstd(Codec):
    """Zstandard over the block's bytes in another order: all elements' first bytes, then all second ones, and so on.

    The bytes with sign and exponent are much alike from element to element, and find each other that way.

    Args:
        item_bytes: Bytes of an element of the KV cache.

    """

    number = 2

    def __init__(self, item_bytes: int) -> None:
        self._zstd = _zstandard()
        self.parameter = item_bytes

    def encode(self, payload: memoryview) -> bytes:
        """Shuffle and compress."""
        whole = len(payload) // self.parameter * self.parameter
        items = np.frombuffer(payload, np.uint8, whole).reshape(-1, self.parameter)
        shuffled = np.empty(len(payload), np.uint8)
        shuffled[:whole].reshape(self.parameter, -1)[:] = items.T
        shuffled[whole:] = np.frombuffer(payload, np.uint8)[whole:]
        return cast("bytes", self._zstd.ZstdCompressor(level=_LEVEL).compress(shuffled.data))

    @classmethod
    def decode(cls, stored: bytes, payload: memoryview, parameter: int) -> bool:
        """Decompress and put the bytes back in order."""
        found = _decompressed(stored, len(payload))
        if found is None or parameter < 1:
            return False
        whole = len(payload) // parameter * parameter
        shuffled = np.frombuffer(found, np.uint8)
        target = np.frombuffer(payload, np.uint8)
        target[:whole].reshape(-1, parameter)[:] = shuffled[:whole].reshape(parameter, -1).T
        target[whole:] = shuffled[whole:]
        return True


_CODECS: dict[int, type[Codec]] = {codec.number: codec for codec in (Zstd, ShuffledZstd)}


def make_codec(name: CodecName, item_bytes: int) -> Codec | None:
    """Return a codec by the name that the setting has; None for blocks as they are.

    Args:
        name: `none`, `zstd` or `shuffle-zstd`.
        item_bytes: Bytes of an element of the KV cache.

    Raises:
        ConfigError: There is no such codec, or its library is missing.

    """
    if name == "none":
        return None
    if name == "zstd":
        return Zstd()
    if name == "shuffle-zstd":
        return ShuffledZstd(item_bytes)
    msg = f"There is no codec {name!r}: set l2_codec to one of {', '.join(get_args(CodecName))}."
    raise ConfigError(msg)


def decodable() -> frozenset[int]:
    """Return the numbers of the codecs whose values can be decoded in this process."""
    try:
        _zstandard()
    except ConfigError:
        return frozenset({0})
    return frozenset({0, *_CODECS})


def decode(number: int, stored: bytes, payload: memoryview, parameter: int) -> bool:
    """Decode a value into a block's memory.

    Args:
        number: The codec's number.
        stored: What followed the header.
        payload: The block's memory.
        parameter: The codec's parameter.

    Returns:
        Whether all of the block is there. Never raises for what is in `stored`.

    """
    return _CODECS[number].decode(stored, payload, parameter)


def _zstandard() -> Any:
    try:
        return import_module("zstandard")
    except ImportError:
        raise ConfigError(
            "The setting l2_codec needs the library zstandard, which isn't installed: pip install 'kvplug[zstd]', or "
            "leave the setting out."
        ) from None


def _decompressed(stored: bytes, length: int) -> bytes | None:
    """Return what was compressed, if it has that length."""
    zstandard = _zstandard()
    try:
        found = zstandard.ZstdDecompressor().decompress(stored, max_output_size=length)
    except zstandard.ZstdError:
        return None
    return cast("bytes", found) if len(found) == length else None
