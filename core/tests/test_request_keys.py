"""Keys of requests in every KV-cache group."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvplug.identity import RequestIdentity
from kvplug.keys import KeyChain
from kvplug.kv_groups import KVGroup
from kvplug.request_keys import KeyMaker, RequestKeys, Tail

NAMESPACE = b"n" * 32


def groups(*sizes):
    return tuple(KVGroup(index, "full", size, 0, False, {}) for index, size in enumerate(sizes))


def request(tokens, **fields):
    defaults = {"lora_request": None, "mm_features": [], "cache_salt": None, "prompt_embeds": None}
    return SimpleNamespace(request_id="a", all_token_ids=list(tokens), **(defaults | fields))


def keys_of(sizes, tokens, **fields):
    maker = KeyMaker(NAMESPACE, groups(*sizes))
    one = request(tokens, **fields)
    keys = maker.start(one)
    assert maker.extend(keys, one)
    return keys.by_group


def test_one_groups_keys_are_the_chains():
    """With one group a key is what `KeyChain` makes: 32 bytes, equal for every connector."""
    chain = KeyChain(NAMESPACE, 4, RequestIdentity())
    chain.extend(list(range(10)))
    assert keys_of([4], range(10)) == (chain.keys,)


def test_several_groups_keys_end_with_their_number():
    """Equal blocks of different groups have different keys, and those of one block size differ in nothing else."""
    one, two, other = keys_of([4, 4, 8], range(16))
    assert [key[:-1] for key in one] == [key[:-1] for key in two]
    assert {key[-1] for key in one} == {0}
    assert {key[-1] for key in two} == {1}
    assert (len(one), len(two), len(other)) == (4, 4, 2)
    assert not {key[:-1] for key in other} & {key[:-1] for key in one}
    assert len({*one, *two, *other}) == 10


@pytest.mark.parametrize("sizes", [[4], [4, 4], [4, 8, 16]])
@pytest.mark.parametrize("chunk", [1, 3, 5, 40])
def test_keys_grow_with_the_tokens(sizes, chunk):
    """However the tokens come, the keys are those of all at once, and lists that were handed out grow."""
    tokens = list(range(40))
    keys = RequestKeys(NAMESPACE, groups(*sizes), RequestIdentity())
    handed_out = keys.by_group
    for stop in range(chunk, 40 + chunk, chunk):
        keys.extend(tokens[:stop])
        assert [len(of_group) for of_group in handed_out] == [min(stop, 40) // size for size in sizes]
    assert handed_out == keys_of(sizes, tokens)


def test_c5_keys_of_a_resumed_request_are_a_fresh_ones():
    """C5: prompt and generated tokens make the keys of a prompt of the same tokens."""
    resumed = request(range(6))
    maker = KeyMaker(NAMESPACE, groups(4, 8))
    keys = maker.start(resumed)
    maker.extend(keys, resumed)
    resumed.all_token_ids += range(6, 20)
    maker.extend(keys, resumed)
    assert keys.by_group == keys_of([4, 8], range(20))


def test_d4_salts_make_other_keys_in_every_group():
    """D4: no key of one salt is one of another, or of none."""
    found = [keys_of([4, 8], range(16), cache_salt=salt) for salt in (None, "x", "y")]
    assert len({key for by_group in found for keys in by_group for key in keys}) == 3 * 6


def test_requests_that_cant_be_told_apart_have_no_keys():
    """Prompt embeddings aren't tokens."""
    assert KeyMaker(NAMESPACE, groups(4)).start(request(range(8), prompt_embeds=object())) is None


def test_tokens_that_are_none_end_it(caplog):
    """A token id that no key can have makes the request neither stored nor reused, with a warning and no error."""
    maker = KeyMaker(NAMESPACE, groups(4))
    odd = request([1, 2, 3, -1])
    assert not maker.extend(maker.start(odd), odd)


# -- Tails -------------------------------------------------------------------------------------------------------------


def tails_of(sizes, tokens, stop, **fields):
    maker = KeyMaker(NAMESPACE, groups(*sizes))
    one = request(tokens, **fields)
    keys = maker.start(one)
    assert maker.extend(keys, one)
    return keys.tail(one.all_token_ids, stop)


def test_one_groups_tail_is_the_chains():
    """With one group the key is what `KeyChain` makes, without a suffix; None where a block ends."""
    tokens = list(range(10))
    chain = KeyChain(NAMESPACE, 4, RequestIdentity())
    chain.extend(tokens)
    assert tails_of([4], tokens, 10) == Tail(10, (chain.tail(tokens, 10),))
    assert tails_of([4], tokens, 8) == Tail(8, (None,))


def test_several_groups_tails_end_with_their_number():
    """A group whose block is full at that place has no key there; equal blocks of two groups have two keys."""
    tokens = list(range(20))
    tail = tails_of([4, 4, 8, 16], tokens, 12)
    assert tail.tokens == 12
    one, two, third, fourth = tail.keys
    assert (one, two) == (None, None)
    assert (third[-1], fourth[-1]) == (2, 3)
    assert (len(third), len(fourth)) == (33, 33)
    one, two, third, fourth = tails_of([4, 4, 8, 16], tokens, 14).keys
    assert one[:-1] == two[:-1]
    assert (one[-1], two[-1]) == (0, 1)
    assert len({key[:-1] for key in (one, third, fourth)}) == 3


@pytest.mark.parametrize("sizes", [[4], [4, 4], [4, 8, 16]])
def test_a_tail_is_no_block_of_any_group(sizes):
    """No tail of a request is a key of one of its blocks, or another tail."""
    tokens = [7] * 40
    blocks = {key for of_group in keys_of(sizes, tokens) for key in of_group}
    tails = [key for stop in range(41) for key in tails_of(sizes, tokens, stop).keys if key is not None]
    assert len(set(tails)) == len(tails)
    assert not blocks & set(tails)


@pytest.mark.parametrize("sizes", [[4], [4, 8]])
def test_a_tail_is_a_later_requests_too(sizes):
    """A prompt's end is that of the same tokens in a longer one; with a salt it's another."""
    assert tails_of(sizes, range(10), 10) == tails_of(sizes, range(31), 10)
    assert not set(tails_of(sizes, range(10), 10).keys) & set(tails_of(sizes, range(10), 10, cache_salt="x").keys)


def test_a_tail_beyond_the_keys_is_refused():
    """Keys must have been extended as far, in every group."""
    keys = RequestKeys(NAMESPACE, groups(4, 8), RequestIdentity())
    keys.extend(list(range(6)))
    with pytest.raises(ValueError, match="are asked for"):
        keys.tail(list(range(20)), 19)
