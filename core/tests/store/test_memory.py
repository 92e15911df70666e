"""The memory tier: slab and allocator in one worker."""

from __future__ import annotations

import mmap

import pytest

from kvplug.errors import ConfigError
from kvplug.store import Allocator, MemoryTier, Slab


def _save(tier, keys, value):
    with tier.writing(keys) as slots:
        for slot in slots:
            if slot is not None:
                tier.slab.view(slot)[:] = value
    return slots


def test_what_was_written_is_read():
    """Blocks are read back by key, as far as the leading keys are there."""
    tier = MemoryTier.with_capacity(1 << 20, 1 << 16)
    _save(tier, [b"a", b"b"], 1)
    _save(tier, [b"b", b"d"], 2)
    with tier.reading([b"a", b"b", b"c", b"d"]) as slots:
        assert len(slots) == 2
        assert all((tier.slab.view(slot) == 1).all() for slot in slots)
    assert tier.used_bytes == 3 << 16
    assert tier.capacity_bytes == 1 << 20


@pytest.mark.parametrize("header", [0, 64])
@pytest.mark.parametrize("block", [4097, 65_536, 100_000, 1 << 20, (1 << 20) + 4096, 4_718_592])
def test_i2_a_tier_takes_what_it_was_given(block, header):
    """I2: not a byte more is mapped than was asked for, and no more is left unused than a block and 1 % per block."""
    asked = 300 * block + 12_345
    tier = MemoryTier.with_capacity(asked, block, header_bytes=header)
    usable = tier.slab.num_slots * block
    assert tier.slab.nbytes == tier.capacity_bytes <= asked
    assert asked - usable <= block + mmap.PAGESIZE + tier.slab.num_slots * (header + block // 100)
    tier.close()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MemoryError(), KeyboardInterrupt()])
def test_a7_a_failed_write_leaves_nothing(error):
    """If a copy fails, none of its keys can be found, its slots are free again, and the tier goes on."""
    tier = MemoryTier.with_capacity(1 << 20, 1 << 16)

    def fail():
        with tier.writing([b"a", b"b"]) as slots:
            tier.slab.view(slots[0])[:] = 1
            raise error

    with pytest.raises(type(error)):
        fail()
    assert tier.allocator.prefix_length([b"a"]) == 0
    assert tier.used_bytes == 0
    _save(tier, [b"a"], 2)
    with tier.reading([b"a"]) as slots:
        assert (tier.slab.view(slots[0]) == 2).all()


def test_a_failed_read_unpins():
    """If the copy out of the slab fails, the blocks can be evicted again."""
    tier = MemoryTier(Slab(1, 64), Allocator(1))
    _save(tier, [b"a"], 1)

    def fail():
        with tier.reading([b"a"]):
            raise RuntimeError("copy failed")

    with pytest.raises(RuntimeError, match="copy failed"):
        fail()
    assert _save(tier, [b"b"], 2) == [0]


def test_b5_blocks_stay_while_they_are_read():
    """While blocks are read, nothing takes their slots."""
    tier = MemoryTier(Slab(2, 64), Allocator(2))
    _save(tier, [b"a", b"b"], 1)
    with tier.reading([b"a"]) as slots:
        for number in range(10):
            _save(tier, [b"%d" % number, b"x%d" % number], 2)
        assert (tier.slab.view(slots[0]) == 1).all()


def test_c13_slots_stay_aligned_with_keys_when_some_are_refused():
    """A tier of 4 blocks takes what it can of 64 and says so key by key."""
    tier = MemoryTier(Slab(4, 64), Allocator(4))
    slots = _save(tier, [b"%d" % number for number in range(64)], 1)
    assert len(slots) == 64
    assert sorted(slot for slot in slots if slot is not None) == [0, 1, 2, 3]
    assert slots[4:] == [None] * 60
    assert tier.allocator.prefix_length([b"%d" % number for number in range(64)]) == 4


def test_blocks_written_across_a_clear_are_not_found():
    """A clear in the middle of a write makes the written blocks unreachable."""
    tier = MemoryTier(Slab(4, 64), Allocator(4))
    with tier.writing([b"a"]) as slots:
        assert slots == [0]
        assert tier.clear() is False
    assert tier.allocator.prefix_length([b"a"]) == 0
    assert tier.clear() is True


def test_capacity_is_never_exceeded():
    """The slab takes at most what was asked for; a capacity below one block is refused with the size of one."""
    tier = MemoryTier.with_capacity(1_000_000, 100_000)
    assert tier.capacity_bytes <= 1_000_000
    assert tier.slab.num_slots == 9
    assert MemoryTier.with_capacity(409_600 + 100, 100).capacity_bytes == 409_600
    with pytest.raises(ConfigError, match="holds no block of this model, which takes 100032 bytes"):
        MemoryTier.with_capacity(99_999, 100_000)
    with pytest.raises(ConfigError, match="no eviction policy"):
        MemoryTier.with_capacity(1_000_000, 100_000, policy="best")


def test_slab_and_allocator_must_fit():
    """A tier refuses a slab and an allocator of different sizes."""
    with pytest.raises(ValueError, match="3 slots, the allocator 4"):
        MemoryTier(Slab(3, 64), Allocator(4))


def test_closing_gives_the_memory_back():
    """A closed tier has nothing and can't be written."""
    tier = MemoryTier(Slab(4, 64), Allocator(4))
    _save(tier, [b"a"], 1)
    tier.close()
    assert tier.allocator.prefix_length([b"a"]) == 0
    with pytest.raises(ValueError, match="closed"):
        tier.slab.view(0)


@pytest.mark.parametrize("policy", ["fifo", "lru", "s3fifo"])
def test_i5_a_tier_full_of_blocks_that_are_read_refuses_and_serves(policy):
    """While every block is being read, nothing is stored, nothing is lost, and reading goes on."""
    tier = MemoryTier.with_capacity(4 << 16, 1 << 16, policy=policy)
    keys = [b"a", b"b", b"c", b"d"]
    _save(tier, keys, 1)
    with tier.reading(keys) as slots:
        assert _save(tier, [b"e", b"f"], 2) == [None, None]
        with tier.reading(keys) as again:
            assert again == slots
        assert all((tier.slab.view(slot) == 1).all() for slot in slots)
    assert None not in _save(tier, [b"e", b"f"], 2)
    tier.close()


def test_headers_are_part_of_the_capacity():
    """A tier whose slots have headers takes no more memory than it was given."""
    tier = MemoryTier.with_capacity(1_000_000, 100_000, header_bytes=64)
    assert tier.slab.header_bytes == 64
    assert tier.capacity_bytes <= 1_000_000
    assert len(tier.slab.value_view(0)) == 100_064
    with pytest.raises(ConfigError, match="which takes 100096 bytes"):
        MemoryTier.with_capacity(99_999, 100_000, header_bytes=64)
