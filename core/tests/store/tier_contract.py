"""What every L2 tier must do, as tests: derive a class whose name begins with Test, and give it the fixture `new_tier`.

    class TestDisk(TierContract):
        @pytest.fixture
        def new_tier(self, tmp_path):
            return lambda: DiskTier(DiskTier.Settings(disk_path=tmp_path))

`new_tier` makes a tier that isn't open yet. All tiers that one test makes with it are at the same place, which is
empty when the test begins. The attributes of the class say what the tier can't do.
"""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from kvplug.store.l2.tier import Tier, TierError, Usage

#: Bytes around a buffer that must stay as they are.
_MARGIN = 64
_UNTOUCHED = 0xA5

#: Keys that a careless tier mixes up, or can't keep: they are what a file, a line or a path would be broken by.
STRANGE_KEYS = [
    b"\0",
    b"a",
    b"a\0",
    b"A",
    b".",
    b"..",
    b"../a",
    b"/",
    b"a b",
    b"a\r\nb",
    b"{a}b",
    b"{a}c",
    b"%s",
    b"*",
    b"\xff\xfe",
    "ä".encode(),
    b"\xff" * 64,
    b"\xff" * 63,
    bytes(64),
    bytes(63),
    bytes(range(64)),
]


def pattern(seed: int, length: int) -> bytes:
    """Return bytes that differ from those of another seed at almost every position."""
    return bytes((seed * 31 + index * 7 + (index >> 8) * 13) & 0xFF for index in range(length))


class Buffers:
    """Memory to read into, with bytes around each buffer that tell whether the tier wrote beyond it."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = list(lengths)
        self._all = [bytearray([_UNTOUCHED]) * (length + 2 * _MARGIN) for length in lengths]
        self.views = [memoryview(memory)[_MARGIN:-_MARGIN] for memory in self._all]

    def check(self) -> None:
        """Fail if something was written beside a buffer."""
        margin = bytes([_UNTOUCHED]) * _MARGIN
        for memory in self._all:
            assert bytes(memory[:_MARGIN]) == margin, "the tier wrote before a buffer"
            assert bytes(memory[-_MARGIN:]) == margin, "the tier wrote past a buffer"


class TierContract:
    """Tests that a tier passes whatever it is made of. Derive; see the module."""

    #: Longest value in the tests, in bytes: what `open` is told.
    max_value_bytes = 1 << 16
    #: Seconds that a call may take.
    timeout = 10.0
    #: Whether another tier at the same place finds what this one has put.
    shared = True
    #: Whether what was put is still there when every tier at the place has been closed.
    lasting = True
    #: Whether `delete` has removed a key when it returns, also one that was read or looked up a moment ago.
    deletes_at_once = True
    #: Whether the tier keeps descriptors or threads of its client library for good after its first use.
    library_keeps_resources = False

    @pytest.fixture
    def new_tier(self) -> Callable[[], Tier]:
        raise NotImplementedError("give the class a fixture new_tier")

    @contextmanager
    def opened(self, tier: Tier) -> Iterator[Tier]:
        """Open a tier for a while."""
        tier.open(max_value_bytes=self.max_value_bytes, timeout=self.timeout)
        try:
            yield tier
        finally:
            tier.close()

    @pytest.fixture
    def tier(self, new_tier: Callable[[], Tier]) -> Iterator[Tier]:
        """Return an open tier at an empty place."""
        with self.opened(new_tier()) as tier:
            yield tier

    # -- Calls, checked ------------------------------------------------------------------------------------------

    def put(self, tier: Tier, values: dict[bytes, bytes]) -> None:
        """Put values, all of which must be kept."""
        views = [memoryview(bytearray(value)) for value in values.values()]
        assert [bool(kept) for kept in tier.put(list(values), views, self.timeout)] == [True] * len(values)

    def get(self, tier: Tier, keys: Sequence[bytes], length: int | None = None) -> list[bytes | None]:
        """Read values into buffers of `length` bytes, `max_value_bytes` by default."""
        buffers = Buffers([self.max_value_bytes if length is None else length] * len(keys))
        lengths = tier.get(keys, buffers.views, self.timeout)
        buffers.check()
        assert len(lengths) == len(keys)
        return [
            None if found is None else bytes(view[:found]) for found, view in zip(lengths, buffers.views, strict=True)
        ]

    def exists(self, tier: Tier, keys: Sequence[bytes]) -> list[bool]:
        """Look keys up."""
        found = [bool(there) for there in tier.exists(keys, self.timeout)]
        assert len(found) == len(keys)
        return found

    # -- What it is ----------------------------------------------------------------------------------------------

    def test_it_has_a_name_and_a_place(self, new_tier):
        """A tier's name can be a setting and a metric's label, its settings begin with it, and its place is known."""
        tier = new_tier()
        assert re.fullmatch(r"[a-z][a-z0-9_]*", tier.name)
        assert tier.max_calls >= 1
        if tier.Settings is not None:
            assert all(field.startswith(f"{tier.name}_") for field in tier.Settings.model_fields)
        assert tier.place
        assert "\n" not in tier.place
        with self.opened(tier):
            assert tier.place

    # -- Put and get ---------------------------------------------------------------------------------------------

    def test_what_was_put_is_read(self, tier):
        """Values of all lengths up to the longest come back byte for byte, with their lengths."""
        lengths = [1, 63, 64, 65, 511, 512, 4095, 4096, 4097, self.max_value_bytes - 1, self.max_value_bytes]
        values = {b"key %d" % length: pattern(length, length) for length in lengths}
        self.put(tier, values)
        assert self.exists(tier, list(values)) == [True] * len(values)
        assert self.get(tier, list(values)) == list(values.values())

    def test_a_key_that_was_never_put_is_a_miss(self, tier):
        """A missing key is None or False, and no error; also in a tier that holds nothing."""
        assert self.get(tier, [b"missing"]) == [None]
        assert self.exists(tier, [b"missing"]) == [False]
        tier.delete([b"missing"], self.timeout)

    def test_no_keys_are_no_error(self, tier):
        """A batch of nothing is answered with nothing."""
        assert list(tier.exists([], self.timeout)) == []
        assert list(tier.get([], [], self.timeout)) == []
        assert list(tier.put([], [], self.timeout)) == []
        tier.delete([], self.timeout)

    def test_a_batch_with_gaps_finds_what_is_there(self, tier):
        """`get` reads what is behind a gap, and `exists` finds it."""
        self.put(tier, {b"0": b"zero", b"1": b"one", b"3": b"three"})
        keys = [b"0", b"1", b"2", b"3", b"4"]
        assert self.get(tier, keys) == [b"zero", b"one", None, b"three", None]
        assert self.exists(tier, keys) == [True, True, False, True, False]
        assert self.get(tier, [b"4", b"3"]) == [None, b"three"]

    def test_keys_are_any_bytes(self, tier):
        """Keys that look like paths, patterns, lines or each other's beginnings are kept apart."""
        values = {key: b"value of " + key.hex().encode() for key in STRANGE_KEYS}
        for key, value in values.items():
            self.put(tier, {key: value})
        assert self.get(tier, STRANGE_KEYS) == list(values.values())
        tier.delete(STRANGE_KEYS[1:2], self.timeout)
        if self.deletes_at_once:
            del values[STRANGE_KEYS[1]]
        assert self.get(tier, list(values)) == list(values.values())

    def test_values_are_any_bytes(self, tier):
        """Zeros, line ends and a protocol's own words are only bytes of a value."""
        values = {
            b"zeros": bytes(4096),
            b"lines": b"\r\n" * 2048,
            b"reply": b"$-1\r\n+OK\r\n-ERR no\r\n",
            b"high": b"\xff" * 777,
        }
        self.put(tier, values)
        assert self.get(tier, list(values)) == list(values.values())

    def test_a_value_too_long_for_its_buffer_is_not_there(self, tier):
        """A value that doesn't fit is a miss; nothing is written past the buffer, and the others are read."""
        self.put(tier, {b"long": pattern(1, 1000), b"short": pattern(2, 500)})
        assert self.get(tier, [b"long", b"short"], length=999) == [None, pattern(2, 500)]
        assert self.get(tier, [b"short", b"long", b"short"], length=500) == [pattern(2, 500), None, pattern(2, 500)]
        assert self.get(tier, [b"long"], length=1000) == [pattern(1, 1000)]

    def test_buffers_of_one_call_may_differ_in_length(self, tier):
        """Each value is measured by its own buffer."""
        self.put(tier, {b"a": pattern(1, 100), b"b": pattern(2, 100), b"c": pattern(3, 100)})
        buffers = Buffers([100, 99, 4096])
        assert list(tier.get([b"a", b"b", b"c"], buffers.views, self.timeout)) == [100, None, 100]
        buffers.check()
        assert bytes(buffers.views[0]) == pattern(1, 100)
        assert bytes(buffers.views[2][:100]) == pattern(3, 100)

    def test_a_key_may_be_put_again(self, tier):
        """Putting a key that is there is no error, and leaves one whole value."""
        self.put(tier, {b"a": pattern(1, 2000)})
        self.put(tier, {b"a": pattern(1, 2000), b"b": pattern(2, 2000)})
        assert self.get(tier, [b"a", b"b"]) == [pattern(1, 2000), pattern(2, 2000)]

    def test_a_key_may_come_twice_in_a_batch(self, tier):
        """Each place of a batch is answered, whatever the others are."""
        views = [memoryview(bytearray(pattern(1, 300))) for _ in range(2)]
        assert any(tier.put([b"a", b"a"], views, self.timeout))
        assert self.get(tier, [b"a", b"x", b"a"]) == [pattern(1, 300), None, pattern(1, 300)]
        assert self.exists(tier, [b"a", b"a"]) == [True, True]
        tier.delete([b"a", b"a"], self.timeout)

    def test_values_are_copied(self, tier):
        """What is put is what the memory held during the call: the caller may write to it afterwards."""
        memory = bytearray(pattern(1, 5000))
        assert list(tier.put([b"a"], [memoryview(memory)], self.timeout)) == [True]
        memory[:] = bytes(5000)
        assert self.get(tier, [b"a"]) == [pattern(1, 5000)]

    def test_large_batches(self, tier):
        """A batch of a few hundred keys is one call."""
        values = {b"%04d" % number: pattern(number, 700) for number in range(300)}
        self.put(tier, values)
        assert self.get(tier, list(values), length=1024) == list(values.values())
        assert self.exists(tier, [*values, b"last"]) == [True] * 300 + [False]

    def test_registered_memory(self, new_tier):
        """Values in memory that the tier was told of are put from there and read into it, one beside another."""
        value_bytes, slots = 4096, 8
        memory = bytearray(value_bytes * slots)
        tier = new_tier()
        tier.open(max_value_bytes=value_bytes, timeout=self.timeout)
        try:
            tier.register(memoryview(memory))
            views = [memoryview(memory)[i * value_bytes : (i + 1) * value_bytes] for i in range(slots)]
            for number, view in enumerate(views):
                view[:] = pattern(number, value_bytes)
            keys = [b"%d" % number for number in range(slots)]
            assert all(tier.put(keys, views, self.timeout))
            memory[:] = bytes(len(memory))
            assert list(tier.get(keys[::2], views[::2], self.timeout)) == [value_bytes] * 4
            for number, view in enumerate(views):
                assert bytes(view) == (bytes(value_bytes) if number % 2 else pattern(number, value_bytes))
        finally:
            tier.close()

    # -- Delete and usage ----------------------------------------------------------------------------------------

    def test_what_was_deleted_is_gone(self, tier):
        """Deleted keys are misses, the others stay, and the key can be put again."""
        self.put(tier, {b"a": pattern(1, 100), b"b": pattern(2, 100)})
        tier.delete([b"a", b"never there"], self.timeout)
        if self.deletes_at_once:
            assert self.exists(tier, [b"b", b"a"]) == [True, False]
            assert self.get(tier, [b"a", b"b"]) == [None, pattern(2, 100)]
        self.put(tier, {b"a": pattern(1, 100)})
        assert self.get(tier, [b"a", b"b"]) == [pattern(1, 100), pattern(2, 100)]

    def test_usage_grows_with_what_is_put(self, tier):
        """Usage counts at least the values' bytes, and never more than the capacity; None where it isn't known."""
        before = tier.usage(self.timeout)
        self.put(tier, {b"%d" % number: pattern(number, 10_000) for number in range(8)})
        after = tier.usage(self.timeout)
        assert isinstance(after, Usage)
        if after.used_bytes is not None:
            assert before.used_bytes is not None
            assert after.used_bytes - before.used_bytes >= 80_000
            assert after.capacity_bytes is None or after.used_bytes <= after.capacity_bytes
        if after.entries is not None:
            assert before.entries is not None
            assert after.entries - before.entries == 8

    # -- Several at once -----------------------------------------------------------------------------------------

    def test_calls_from_several_threads(self, tier):
        """`max_calls` threads put, look up, read and delete at once, and each gets what is its own."""

        def work(worker: int) -> None:
            for turn in range(8):
                values = {b"%d %d %d" % (worker, turn, n): pattern(worker * 8 + turn + n, 3000) for n in range(4)}
                self.put(tier, values)
                assert self.exists(tier, list(values)) == [True] * 4
                assert self.get(tier, [*values, b"missing"], length=4096) == [*values.values(), None]
                tier.delete(list(values)[:2], self.timeout)
                if self.deletes_at_once:
                    assert self.get(tier, list(values)[1:], length=4096) == [None, *list(values.values())[2:]]

        with ThreadPoolExecutor(tier.max_calls) as threads:
            for done in [threads.submit(work, worker) for worker in range(tier.max_calls)]:
                done.result()

    def test_two_writers_of_one_key_never_mix(self, new_tier):
        """While several put different values under one key, a reader finds one of them whole, or none."""
        size = self.max_value_bytes
        choices = [pattern(seed, size) for seed in range(3)]
        stop = threading.Event()

        def write(tier: Tier, value: bytes) -> None:
            view = memoryview(bytearray(value))
            while not stop.is_set():
                tier.put([b"contended"], [view], self.timeout)
                tier.delete([b"contended"], self.timeout)

        with ExitStack() as tiers, ThreadPoolExecutor(3) as threads:
            first = tiers.enter_context(self.opened(new_tier()))
            second = tiers.enter_context(self.opened(new_tier())) if self.shared else first
            writers = [threads.submit(write, *pair) for pair in zip([first, first, second], choices, strict=True)]
            try:
                for _ in range(60):
                    (found,) = self.get(second, [b"contended"])
                    assert found is None or found in choices
            finally:
                stop.set()
                for writer in writers:
                    writer.result()

    def test_another_tier_at_the_place_sees_it(self, new_tier):
        """Two engines that share a place find each other's values, and deletions."""
        if not self.shared:
            return
        with self.opened(new_tier()) as one, self.opened(new_tier()) as other:
            self.put(one, {b"a": pattern(1, 1234)})
            assert self.exists(other, [b"a", b"b"]) == [True, False]
            assert self.get(other, [b"a"]) == [pattern(1, 1234)]
            self.put(other, {b"b": pattern(2, 99)})
            assert self.get(one, [b"a", b"b"]) == [pattern(1, 1234), pattern(2, 99)]
            other.delete([b"a"], self.timeout)
            if self.deletes_at_once:
                assert self.get(one, [b"a", b"b"]) == [None, pattern(2, 99)]

    def test_it_is_there_after_a_restart(self, new_tier):
        """What was put is there for the next tier at the place, when the first has been closed."""
        if not self.lasting:
            return
        values = {b"%d" % number: pattern(number, 5000) for number in range(5)}
        with self.opened(new_tier()) as tier:
            self.put(tier, values)
        with self.opened(new_tier()) as tier:
            assert self.exists(tier, list(values)) == [True] * 5
            assert self.get(tier, list(values)) == list(values.values())

    # -- The end -------------------------------------------------------------------------------------------------

    def test_closing_again_does_nothing(self, new_tier):
        """A tier may be closed twice, also one that was never opened."""
        never = new_tier()
        never.close()
        tier = new_tier()
        tier.open(max_value_bytes=self.max_value_bytes, timeout=self.timeout)
        tier.close()
        tier.close()

    def test_calls_end_when_the_tier_is_closed(self, new_tier):
        """Calls under way when the tier is closed, and later ones, end: with a result, a miss or a TierError."""
        tier = new_tier()
        tier.open(max_value_bytes=self.max_value_bytes, timeout=self.timeout)
        started = threading.Barrier(3)

        def work() -> None:
            value = memoryview(bytearray(pattern(1, self.max_value_bytes)))
            buffer = memoryview(bytearray(self.max_value_bytes))
            started.wait()
            with suppress(TierError):
                for _ in range(50):
                    tier.put([b"a"], [value], self.timeout)
                    tier.get([b"a"], [buffer], self.timeout)
                    tier.exists([b"a"], self.timeout)

        with ThreadPoolExecutor(2) as threads:
            calls = [threads.submit(work) for _ in range(2)]
            started.wait()
            tier.close()
            for call in calls:
                call.result(timeout=60)

    def test_nothing_is_left_when_it_is_closed(self, new_tier):
        """Opening, using and closing a tier again and again leaves no descriptors and no threads."""
        if self.library_keeps_resources:
            return

        def use() -> None:
            with self.opened(new_tier()) as tier:
                self.put(tier, {b"a": pattern(1, 100)})
                with ThreadPoolExecutor(2) as threads:
                    list(threads.map(lambda _: self.get(tier, [b"a"]), range(4)))

        use()  # what a library sets up once
        gc.collect()
        before = _descriptors(), threading.active_count()
        for _ in range(5):
            use()
        gc.collect()
        assert (_descriptors(), threading.active_count()) == before


def _descriptors() -> int:
    """Count this process's open descriptors."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
