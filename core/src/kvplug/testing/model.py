"""The simulated model: what it computes is a hash of the prefix, so anyone can tell whether it is right."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["VOCABULARY", "LayerValues", "TokenSequence", "generate", "identity"]

#: Token ids are below this.
VOCABULARY = 1000

_WORD = (1 << 64) - 1
# splitmix64's constants.
_STEP, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

Words = npt.NDArray[np.uint64]
Patterns = npt.NDArray[Any]


def _mix(value: int) -> int:
    value = (value + _STEP) & _WORD
    value = ((value ^ (value >> 30)) * _MIX1) & _WORD
    value = ((value ^ (value >> 27)) * _MIX2) & _WORD
    return value ^ (value >> 31)


def _mix_words(words: Words) -> Words:
    words = words + np.uint64(_STEP)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(_MIX1)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(_MIX2)
    mixed: Words = words ^ (words >> np.uint64(31))
    return mixed


class LayerValues:
    """What one layer of one rank keeps per token, or per state.

    Args:
        salt: What tells this layer's values from any other's.
        num_bytes: Bytes per token, or per state.
        itemsize: Bytes of one element; the elements are finite numbers in every floating-point type of that size.
            0 for opaque bytes.
    """

    def __init__(self, salt: str, num_bytes: int, itemsize: int) -> None:
        digest = hashlib.sha256(salt.encode()).digest()
        self._num_words = -(-num_bytes // 8)
        base = np.uint64(int.from_bytes(digest[:8], "little"))
        self._salts: Words = _mix_words(base + np.arange(self._num_words, dtype=np.uint64))
        self._num_bytes = num_bytes
        #: Unsigned integers of the size of an element.
        self.dtype: np.dtype[Any] = np.dtype(f"u{itemsize or 1}")
        # Without its highest bit no exponent is all ones, so no element is an infinity or a NaN.
        self._mask = np.array(~(1 << (8 * itemsize - 2)) & ((1 << 8 * itemsize) - 1) if itemsize else 255, self.dtype)

    def of(self, hashes: Words) -> Patterns:
        """Return the values for prefixes, as bit patterns of shape [prefixes, elements]."""
        words = _mix_words(hashes[:, None] ^ self._salts[None, :])
        patterns: Patterns = words.view(np.uint8)[:, : self._num_bytes].copy().view(self.dtype)
        patterns &= self._mask
        return patterns


class TokenSequence:
    """A prompt and everything the model would generate after it, with the hash of each prefix.

    What comes next depends on the prefix alone, so the sequence is known before anything of it is computed.

    Args:
        prompt: The prompt's token ids.
        identity: What makes equal tokens mean different KV, a cache salt for instance.
    """

    def __init__(self, prompt: Sequence[int], identity: str = "") -> None:
        self.tokens: list[int] = []
        self.num_prompt_tokens = len(prompt)
        self._last = int.from_bytes(hashlib.sha256(identity.encode()).digest()[:8], "little")
        self._hashes: Words = np.zeros(max(64, 2 * len(prompt)), np.uint64)
        self._values: dict[LayerValues, tuple[int, Patterns]] = {}
        for token in prompt:
            self._append(token)

    def _append(self, token: int) -> None:
        size = len(self.tokens)
        if size == len(self._hashes):
            self._hashes = np.concatenate([self._hashes, np.zeros_like(self._hashes)])
        self._last = _mix(self._last ^ _mix(token))
        self._hashes[size] = self._last
        self.tokens.append(token)

    def extend(self, size: int) -> None:
        """Generate until there are `size` tokens."""
        while len(self.tokens) < size:
            self._append(self._last % VOCABULARY)

    def token(self, position: int) -> int:
        """Return the token at a position; beyond the prompt, what the model generates there."""
        self.extend(position + 1)
        return self.tokens[position]

    def hashes(self, start: int, end: int) -> Words:
        """Return the hashes of the prefixes that end at the positions from `start` to `end` - 1."""
        self.extend(end)
        return self._hashes[start:end]

    def values(self, layer: LayerValues, end: int) -> Patterns:
        """Return what a layer keeps for the positions before `end`, as shape [end, elements]."""
        have, values = self._values.get(layer, (0, None))
        if have < end or values is None:
            self.extend(end)
            # Some more than asked for, so that decoding doesn't come here for every token.
            target = max(end, self.num_prompt_tokens, have + 16)
            self.extend(target)
            new = layer.of(self._hashes[have:target])
            values = new if values is None else np.concatenate([values, new])
            self._values[layer] = (target, values)
        return values[:end]


def identity(cache_salt: str | None, lora_request: Any) -> str:
    """Return what a cache salt and a LoRA adapter make of equal tokens."""
    lora = "" if lora_request is None else f"{lora_request.lora_name}\0{lora_request.lora_path}"
    return f"{cache_salt or ''}\0{lora}"


def generate(
    prompt: Sequence[int], max_tokens: int, *, cache_salt: str | None = None, lora_request: Any = None
) -> list[int]:
    """Return what the simulated model generates, computed without any engine.

    Args:
        prompt: The prompt's token ids.
        max_tokens: How many tokens to generate.
        cache_salt: The request's cache salt, if it has one.
        lora_request: The request's `LoRARequest`, if it has one.
    """
    sequence = TokenSequence(prompt, identity(cache_salt, lora_request))
    sequence.extend(len(prompt) + max_tokens)
    return sequence.tokens[len(prompt) :]
