"""Block keys: a chain that is exact, incremental, and equal in every process."""

import itertools
import json
import os
import subprocess
import sys

import pytest

from kvplug.identity import MultiModalFeature, RequestIdentity
from kvplug.keys import KEY_SIZE, KeyChain

NAMESPACE = b"n" * 32
PLAIN = RequestIdentity()
IMAGE = "a" * 64


def keys_of(tokens, identity=PLAIN, *, block_size=4, namespace=NAMESPACE):
    chain = KeyChain(namespace, block_size, identity)
    chain.extend(tokens)
    return chain.keys


def test_a_key_per_full_block():
    """A chain has one key of 32 bytes per full block, and none for the rest."""
    chain = KeyChain(NAMESPACE, 4, PLAIN)
    assert chain.extend([1, 2, 3]) == 0
    assert chain.extend([1, 2, 3, 4]) == 1
    assert chain.extend(list(range(1, 12))) == 2
    assert [len(key) for key in chain.keys] == [KEY_SIZE, KEY_SIZE]
    assert chain.num_tokens == 8


def test_the_chain_is_the_same_however_the_tokens_come():
    """Tokens one by one, in uneven chunks or all at once make the same keys, with images and without."""
    tokens = [7 * i % 1000 for i in range(97)]
    identities = (
        PLAIN,
        RequestIdentity(features=tuple(MultiModalFeature(9 * i, 7, f"image {i}") for i in range(8))),
    )
    for identity in identities:
        at_once = keys_of(tokens, identity)
        for chunk in (1, 3, 4, 5, 50):
            chain = KeyChain(NAMESPACE, 4, identity)
            for stop in range(chunk, len(tokens) + chunk, chunk):
                chain.extend(tokens[:stop])
            assert chain.keys == at_once


def test_only_new_tokens_are_read():
    """A call reads the tokens that no key covers yet, and no others: a lookup costs what is new."""

    class Watched(list):
        read = 0

        def __getitem__(self, item):
            values = super().__getitem__(item)
            Watched.read += len(values)
            return values

        def __iter__(self):
            raise AssertionError("the whole list was read")

    tokens = Watched(range(4000))
    chain = KeyChain(NAMESPACE, 4, PLAIN)
    chain.extend(tokens)
    assert Watched.read == 4000
    tokens.append(1)
    chain.extend(tokens)
    tokens.extend([2, 3, 4])
    chain.extend(tokens)
    assert Watched.read == 4004


def test_a_key_commits_to_everything_before_it():
    """A change in one token changes its block's key and all that follow, and none before."""
    tokens = list(range(16))
    changed = [*tokens[:6], 99, *tokens[7:]]
    before, after = keys_of(tokens), keys_of(changed)
    assert before[0] == after[0]
    assert all(a != b for a, b in zip(before[1:], after[1:], strict=True))


def test_equal_blocks_at_different_places_differ():
    """A block's key is not the key of the same tokens elsewhere."""
    assert len(set(keys_of([5, 6, 7, 8] * 6))) == 6


def test_namespaces_and_block_sizes_never_share():
    """Another namespace or block size changes every key, the size also where the tokens are the same."""
    tokens = [3] * 32
    sets = [
        set(keys_of(tokens)),
        set(keys_of(tokens, namespace=b"m" * 32)),
        set(keys_of(tokens, block_size=8)),
        set(keys_of(tokens, block_size=16)),
    ]
    assert all(a.isdisjoint(b) for a, b in itertools.combinations(sets, 2))


def test_d1_adapters_have_keys_of_their_own():
    """D1: the same tokens under adapter A, adapter B and none have disjoint keys, from the first block on."""
    tokens = list(range(16))
    sets = [set(keys_of(tokens, RequestIdentity(lora=lora))) for lora in (None, b"a" * 32, b"b" * 32)]
    assert all(a.isdisjoint(b) for a, b in itertools.combinations(sets, 2))
    assert keys_of(tokens, RequestIdentity(lora=b"a" * 32)) == keys_of(tokens, RequestIdentity(lora=b"a" * 32))


def test_d4_salts_have_keys_of_their_own():
    """D4: salts x, y and none share nothing; the same salt shares everything (the control)."""
    tokens = list(range(16))
    sets = [set(keys_of(tokens, RequestIdentity(salt=salt))) for salt in (None, b"x" * 32, b"y" * 32)]
    assert all(a.isdisjoint(b) for a, b in itertools.combinations(sets, 2))
    assert keys_of(tokens, RequestIdentity(salt=b"x" * 32)) == keys_of(tokens, RequestIdentity(salt=b"x" * 32))


def test_a_lora_is_not_a_salt():
    """The same digest as adapter, as salt, and as both are three identities."""
    value = b"v" * 32
    identities = [RequestIdentity(lora=value), RequestIdentity(salt=value), RequestIdentity(lora=value, salt=value)]
    assert len({keys_of([1, 2, 3, 4], identity)[0] for identity in identities}) == 3


def test_d3_text_before_an_image_is_shared_and_nothing_after():
    """D3: images whose hashes differ, in one character at either end too, share the text before and no block after."""
    tokens = [*range(8), *[900] * 6, *range(10)]
    variants = [IMAGE, "b" + IMAGE[1:], IMAGE[:-1] + "b", IMAGE + "a"]
    chains = [keys_of(tokens, RequestIdentity(features=(MultiModalFeature(8, 6, hash_),))) for hash_ in variants]
    chains.append(keys_of(tokens))
    assert len({tuple(chain[:2]) for chain in chains}) == 1
    for a, b in itertools.combinations(chains, 2):
        assert set(a[2:]).isdisjoint(b[2:])


def test_d3_the_same_image_elsewhere_in_a_block():
    """D3: an image that starts or ends at another token of equal placeholders has other keys."""
    tokens = [900] * 16
    places = [(0, 4), (1, 4), (0, 5), (4, 4), (1, 3)]
    firsts = [
        tuple(keys_of(tokens, RequestIdentity(features=(MultiModalFeature(offset, length, IMAGE),))))
        for offset, length in places
    ]
    assert len(set(firsts)) == len(places)
    # From where the chains have diverged, they never meet again.
    assert len({chain[-1] for chain in firsts}) == len(places)


def test_d3_two_images_swapped_or_spliced():
    """D3: two images in one block, swapped, or cut at another place of the same concatenated text, differ."""
    tokens = [900] * 8

    def chain(*hashes):
        features = (MultiModalFeature(0, 2, hashes[0]), MultiModalFeature(2, 2, hashes[1]))
        return tuple(keys_of(tokens, RequestIdentity(features=features)))

    assert len({chain("ab", "c"), chain("a", "bc"), chain("c", "ab"), chain("abc", ""), chain("", "abc")}) == 5


def test_features_inside_one_another():
    """A sound within a video counts in exactly the blocks that it overlaps, though the video goes on."""
    tokens = [900] * 24
    video = MultiModalFeature(0, 20, "video")

    def chain(sound):
        return keys_of(tokens, RequestIdentity(features=(video, MultiModalFeature(5, 2, sound))))

    one, two = chain("one"), chain("two")
    assert one[0] == two[0]
    assert one[1] != two[1]
    # The video alone: same first block, since the sound isn't in it; the last has neither.
    assert keys_of(tokens, RequestIdentity(features=(video,)))[0] == one[0]


def test_features_come_in_any_order():
    """Features are put in order of their position."""
    features = (MultiModalFeature(6, 2, "second"), MultiModalFeature(1, 2, "first"))
    assert RequestIdentity(features=features) == RequestIdentity(features=features[::-1])


def test_c5_a_resumed_request_has_the_keys_of_a_fresh_one():
    """C5: after a preemption with 20 tokens decoded, keys equal those of a new request with the same tokens."""
    prompt, output = list(range(30)), list(range(500, 520))
    resumed = KeyChain(NAMESPACE, 4, PLAIN)
    resumed.extend(prompt)
    tokens = list(prompt)
    for token in output:
        tokens.append(token)
        resumed.extend(tokens)
    # Scheduled again, the request has its prompt and all of its output.
    resumed.extend(prompt + output)
    assert resumed.keys == keys_of(prompt + output)


def test_c15_only_tokens_that_exist_have_keys():
    """C15: with scheduling ahead of sampling, a block has no key until its tokens are all known."""
    chain = KeyChain(NAMESPACE, 4, PLAIN)
    assert chain.extend([1, 2, 3, 4, 5, 6, 7]) == 1
    assert chain.extend([1, 2, 3, 4, 5, 6, 7, 8]) == 2
    assert chain.keys == keys_of([1, 2, 3, 4, 5, 6, 7, 8])


def test_fewer_tokens_than_keys_are_refused():
    """A token list that has been cut is another request's, and an error."""
    chain = KeyChain(NAMESPACE, 4, PLAIN)
    chain.extend(list(range(8)))
    with pytest.raises(ValueError, match="cover 8 tokens, but the request has 7"):
        chain.extend(list(range(7)))


@pytest.mark.parametrize("token", [-1, 2**32, 2**70, 1.5, None, "1"])
def test_token_ids_out_of_range_are_refused(token):
    """What isn't an integer of 32 bits is an error, and the chain stays as it was."""
    chain = KeyChain(NAMESPACE, 2, PLAIN)
    chain.extend([1, 2])
    with pytest.raises(ValueError, match=r"integers from 0 to 2\*\*32 - 1"):
        chain.extend([1, 2, 3, token])
    assert chain.extend([1, 2, 3, 4]) == 2
    assert chain.keys == keys_of([1, 2, 3, 4], block_size=2)


def test_large_token_ids_are_told_apart():
    """Ids that agree in their low bytes differ."""
    assert keys_of([2**32 - 1] * 4) != keys_of([2**16 - 1] * 4) != keys_of([255] * 4)


def test_a_block_size_of_zero_is_refused():
    """A block has tokens."""
    with pytest.raises(ValueError, match="at least one token"):
        KeyChain(NAMESPACE, 0, PLAIN)


KEYS_IN_A_PROCESS = """
import json
from kvplug.identity import MultiModalFeature, RequestIdentity
from kvplug.keys import KeyChain
identity = RequestIdentity(b"l" * 32, (MultiModalFeature(3, 4, "image"), MultiModalFeature(9, 2, "sound")), b"s" * 32)
chain = KeyChain(b"n" * 32, 4, identity)
chain.extend(list(range(40)))
print(json.dumps([key.hex() for key in chain.keys]))
"""


def run_with_hash_seeds(code):
    """Run code in three processes, with PYTHONHASHSEED unset, 0 and random, and return what they print."""
    outputs = []
    for seed in (None, "0", "random"):
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
        if seed is not None:
            environment["PYTHONHASHSEED"] = seed
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        outputs.append(json.loads(done.stdout))
    return outputs


def test_d6_d12_keys_are_equal_in_every_process():
    """D6, D12: a request with images, adapter and salt has the same keys whatever PYTHONHASHSEED is."""
    unset, zero, random = run_with_hash_seeds(KEYS_IN_A_PROCESS)
    assert unset == zero == random
    assert len(unset) == 10


def test_keys_do_not_change_between_releases():
    """The keys of a fixed request are these. If they must change, FORMAT_VERSION of the namespace goes up with them."""
    identity = RequestIdentity(lora=b"l" * 32, features=(MultiModalFeature(5, 2, "image"),), salt=b"s" * 32)
    assert [key.hex()[:16] for key in keys_of(list(range(8)), identity)] == ["852b059fc1071852", "875c56f338264e3c"]
    assert [key.hex()[:16] for key in keys_of(list(range(8)))] == ["0ab1caa52fd0c067", "c73069ec7022a943"]
