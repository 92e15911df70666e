"""The disk tier keeps to the contract of all tiers, through the page cache and past it."""

from __future__ import annotations

import mmap

import pytest
from tier_contract import TierContract, pattern

from kvplug.store.l2.disk import DiskTier


class TestDisk(TierContract):
    """Through the page cache."""

    direct = False

    @pytest.fixture
    def new_tier(self, tmp_path):
        settings = DiskTier.Settings(disk_path=tmp_path / "tier", disk_size="64MiB", disk_direct=self.direct)
        return lambda: DiskTier(settings)


class TestDirectDisk(TestDisk):
    """With direct I/O, where memory is aligned, and beside memory that isn't."""

    direct = True

    def test_aligned_values_of_all_lengths(self, tier):
        """Values in aligned memory come back byte for byte, also where they end within a page."""
        memory = memoryview(mmap.mmap(-1, 1 << 17))
        source, target = memory[: 1 << 16], memory[1 << 16 :]
        for length in (1, 511, 512, 4095, 4096, 4097, 8192, 12345, (1 << 16) - 1, 1 << 16):
            key = b"%d" % length
            source[:length] = pattern(length, length)
            assert list(tier.put([key], [source[:length]], self.timeout)) == [True]
            target[:] = b"\xee" * len(target)
            assert list(tier.get([key], [target[:length]], self.timeout)) == [length]
            assert target[:length] == source[:length]
            assert bytes(target[length:]) == b"\xee" * (len(target) - length)
