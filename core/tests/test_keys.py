"""Block keys: a chain that is exact, incremental, and equal in every process."""

import itertools
import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


# -- Tails: the block that some first tokens begin and don't fill ------------------------------------------------------


def tail_of(tokens, stop, identity=PLAIN, *, block_size=4, namespace=NAMESPACE):
    chain = KeyChain(namespace, block_size, identity)
    chain.extend(tokens)
    return chain.tail(tokens, stop)


def image(offset, length, identifier=IMAGE):
    return RequestIdentity(features=(MultiModalFeature(offset, length, identifier),))


def test_a_tail_has_a_key_of_the_same_length():
    """Where tokens end within a block there is one more key; where they end with one there is none."""
    tokens = list(range(12))
    for stop in range(13):
        key = tail_of(tokens, stop)
        assert key is None if stop % 4 == 0 else len(key) == KEY_SIZE


def test_a_tail_commits_to_its_tokens_and_to_all_before():
    """A change in any token up to its end makes another tail; one behind it doesn't."""
    tokens = list(range(12))
    key = tail_of(tokens, 7)
    for position in range(12):
        changed = [*tokens[:position], 99, *tokens[position + 1 :]]
        assert (tail_of(changed, 7) == key) == (position >= 7), position


def test_j6_a_tail_is_not_one_of_more_or_fewer_tokens():
    """J6: zeros behind the tokens aren't padding, nor is the tail of fewer tokens that of more."""
    zeros = [0] * 12
    assert len({tail_of(zeros, stop) for stop in (1, 2, 3, 5, 6, 7, 9, 10, 11)}) == 9


def test_a_tail_is_the_same_however_many_tokens_there_are():
    """What comes after its end is neither needed nor looked at: in a longer request the tail is the same."""
    tokens = list(range(30))
    for stop in (1, 3, 6, 7, 13):
        assert {tail_of(tokens[:length], stop) for length in range(stop, 30)} == {tail_of(tokens, stop)}


def test_asking_for_a_tail_changes_nothing():
    """Keys that are made afterwards are those of a chain that wasn't asked, also amid images."""
    tokens = list(range(24))
    identity = RequestIdentity(features=tuple(MultiModalFeature(5 * n, 4, f"image {n}") for n in range(4)))
    chain = KeyChain(NAMESPACE, 4, identity)
    for length in range(1, 25):
        chain.extend(tokens[:length])
        for stop in range(length + 1):
            assert chain.tail(tokens[:length], stop) == tail_of(tokens, stop, identity)
    assert chain.keys == keys_of(tokens, identity)


def test_d1_d4_tails_of_others_differ():
    """D1, D4: another adapter, salt, namespace or block size is another tail, in the first block and later."""
    tokens = [3] * 12
    value = b"v" * 32
    identities = [
        PLAIN,
        RequestIdentity(lora=value),
        RequestIdentity(salt=value),
        RequestIdentity(lora=value, salt=value),
        RequestIdentity(lora=b"w" * 32),
        RequestIdentity(salt=b"w" * 32),
    ]
    for stop in (3, 7):
        keys = {tail_of(tokens, stop, identity) for identity in identities}
        keys |= {tail_of(tokens, stop, namespace=b"m" * 32), tail_of(tokens, stop, block_size=5)}
        assert len(keys) == len(identities) + 2, stop


@pytest.mark.parametrize("stop", [5, 6, 7])
def test_d3_an_image_counts_if_it_reaches_into_the_tail(stop):
    """D3: images before, in and across the start of a tail count, with their whole length; those behind it don't."""
    tokens = [900] * 12
    plain = tail_of(tokens, stop)
    # Behind the tail: in the rest of its block, at once after it, or later.
    for offset in (stop, 7, 8, 10):
        assert tail_of(tokens, stop, image(offset, 12 - offset)) == plain
    inside = [
        image(4, 1),
        image(4, stop - 4),
        image(3, 2),  # from the block before
        image(0, stop),
        image(4, 12 - 4),  # goes on behind the tail
        image(4, 11 - 4),  # and ends elsewhere
        image(stop - 1, 3),
        image(4, 1, "b" + IMAGE[1:]),
    ]
    keys = [tail_of(tokens, stop, identity) for identity in inside]
    distinct = {identity.features for identity in inside}
    assert len({*keys, plain}) == len(distinct) + 1


def test_d3_an_image_before_the_tail_counts_by_its_parent():
    """D3: a tail after an image is another one after another image, though no image overlaps it."""
    tokens = [900] * 12
    keys = [tail_of(tokens, 10, identity) for identity in (PLAIN, image(1, 3), image(1, 3, "other"), image(1, 2))]
    assert len(set(keys)) == 4


def test_d3_of_two_images_each_counts_in_its_place():
    """D3: swapped, spliced, or one inside the other, images in a tail make another one."""
    tokens = [900] * 8

    def tail(*features):
        return tail_of(tokens, 7, RequestIdentity(features=tuple(MultiModalFeature(*one) for one in features)))

    variants = [
        tail((4, 1, "ab"), (5, 1, "c")),
        tail((4, 1, "a"), (5, 1, "bc")),
        tail((4, 1, "c"), (5, 1, "ab")),
        tail((0, 8, "ab"), (5, 1, "c")),
        tail((0, 8, "ab")),
        tail((4, 1, "ab")),
    ]
    assert len(set(variants)) == len(variants)
    # The second one begins behind the tail.
    assert tail((4, 1, "ab"), (7, 1, "c")) == tail((4, 1, "ab"))


SMALL = st.integers(0, 2)
REQUESTS = st.tuples(
    st.lists(SMALL, min_size=1, max_size=14),
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, 6), st.integers(1, 4), st.sampled_from("ab")), max_size=2),
)


def looked_at(tokens, block_size, features, stop):
    """Say what a tail or a full block that ends at `stop` may depend on: up to where, and which images, from where."""
    seen = [(offset, length, name) for offset, length, name in features if offset < stop]
    return block_size, tuple(tokens[:stop]), tuple(sorted(seen))


@given(requests=st.lists(REQUESTS, min_size=1, max_size=4))
def test_tails_and_blocks_never_share_a_key(requests):
    """Whatever the tokens, block sizes and images: equal keys are equal tokens, of a tail or of a block alike."""
    meanings = {}
    for tokens, block_size, drawn in requests:
        features = sorted(set(drawn))
        identity = RequestIdentity(features=tuple(MultiModalFeature(*one) for one in features))
        chain = KeyChain(NAMESPACE, block_size, identity)
        chain.extend(tokens)
        made = [(key, False, (number + 1) * block_size) for number, key in enumerate(chain.keys)]
        made += [(chain.tail(tokens, stop), True, stop) for stop in range(len(tokens) + 1) if stop % block_size]
        for key, is_tail, stop in made:
            meaning = is_tail, looked_at(tokens, block_size, features, stop)
            assert meanings.setdefault(key, meaning) == meaning
    assert len(set(meanings.values())) == len(meanings)


def test_a_tail_of_a_block_that_is_full_elsewhere_is_not_that_block():
    """Three tokens as a tail of blocks of four, and as a block of three, are two things: so the tag and size say."""
    tokens = [1, 2, 3]
    assert tail_of(tokens, 3) != keys_of(tokens, block_size=3)[0]
    assert tail_of([*tokens, 4], 3) != keys_of([*tokens, 4])[0]


@pytest.mark.parametrize(("known", "given", "stop"), [(0, 8, 6), (4, 12, 10), (8, 9, 11), (3, 3, 5), (8, 8, 9)])
def test_a_tail_without_what_comes_before_it_is_refused(known, given, stop):
    """Blocks before it whose keys aren't made yet, or tokens that aren't there, are an error in the caller."""
    tokens = list(range(12))
    chain = KeyChain(NAMESPACE, 4, PLAIN)
    chain.extend(tokens[:known])
    with pytest.raises(ValueError, match=rf"cover {known // 4 * 4} tokens, but {stop} of {given} are asked for"):
        chain.tail(tokens[:given], stop)


@pytest.mark.parametrize("token", [-1, 2**32, 1.5, None, "1"])
def test_a_tails_token_ids_out_of_range_are_refused(token):
    """As in full blocks; one behind the tail doesn't matter."""
    chain = KeyChain(NAMESPACE, 4, PLAIN)
    with pytest.raises(ValueError, match=r"integers from 0 to 2\*\*32 - 1"):
        chain.tail([1, token], 2)
    assert chain.tail([1, token], 1) == tail_of([1], 1)


TAILS_IN_A_PROCESS = """
import json
from kvplug.identity import MultiModalFeature, RequestIdentity
from kvplug.keys import KeyChain
identity = RequestIdentity(b"l" * 32, (MultiModalFeature(3, 4, "image"), MultiModalFeature(9, 2, "sound")), b"s" * 32)
chain = KeyChain(b"n" * 32, 4, identity)
tokens = list(range(12))
chain.extend(tokens)
print(json.dumps([chain.tail(tokens, stop).hex() for stop in (1, 5, 10, 11)]))
"""


def test_d6_d12_tails_are_equal_in_every_process():
    """D6, D12: whatever PYTHONHASHSEED is."""
    unset, zero, random = run_with_hash_seeds(TAILS_IN_A_PROCESS)
    assert unset == zero == random
    assert len(set(unset)) == 4


def test_tails_do_not_change_between_releases():
    """As with the keys of full blocks: an engine finds what another release of kvplug has stored."""
    identity = RequestIdentity(lora=b"l" * 32, features=(MultiModalFeature(5, 2, "image"),), salt=b"s" * 32)
    tokens = list(range(8))
    pinned = [tail_of(tokens, 7, identity), tail_of(tokens, 3, identity), tail_of(tokens, 7), tail_of(tokens, 3)]
    assert [key.hex()[:16] for key in pinned] == [
        "a4d1fd0318b332d0",
        "2c6766761195e912",
        "9ce2470907d178b8",
        "d4ae794f6ee3dbdc",
    ]
