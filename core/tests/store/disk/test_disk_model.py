"""The disk tier against a model: an ordered dict with a cap."""

from __future__ import annotations

import shutil
import tempfile
from collections import OrderedDict
from pathlib import Path

import disk_support as disk
import hypothesis.strategies as st
from disk_support import BLOCK, put, size_for
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvplug.store.l2.disk import DiskTier, reading, space, writing
from kvplug.store.l2.disk.layout import charge, overhead, reserved
from kvplug.store.l2.disk.ledger import ledger_bytes

_KEYS = st.integers(0, 11).map(lambda number: b"key %d" % number)
#: All of less than 32 values: so few are evicted one by one, and in exact order.
_LENGTHS = st.sampled_from([1, 4096, 4097, BLOCK - 1, BLOCK])
_ENGINES = st.integers(0, 1)
_CAPS = st.sampled_from([1, 3, 6])


class DiskAgainstModel(RuleBasedStateMachine):
    """Two engines share a directory, are restarted, and are robbed; the model says what must be there."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="kvplug-disk-model-"))
        self.mark_ns, reading._MARK_NS = reading._MARK_NS, 0
        # Whether files are written over doesn't change what is there.
        self.idle_ns, writing.IDLE_NS, space.IDLE_NS = writing.IDLE_NS, 0, 0
        #: Values from the one that was used longest ago.
        self.values: OrderedDict[bytes, int] = OrderedDict()
        self.tiers: list[DiskTier] = []

    @initialize(cap=_CAPS)
    def start(self, cap):
        self.limit = size_for(cap) - overhead(1, ledger_bytes(1))
        self.size = size_for(cap)
        self.tiers = [self.open(), self.open()]

    def open(self) -> DiskTier:
        tier = DiskTier(DiskTier.Settings(disk_path=self.root, disk_size=self.size))
        tier.open(max_value_bytes=BLOCK, timeout=disk.TIMEOUT)
        return tier

    def used(self) -> int:
        return sum(charge(length) for length in self.values.values())

    @rule(engine=_ENGINES, key=_KEYS, length=_LENGTHS)
    def put(self, engine, key, length):
        assert put(self.tiers[engine], key, length=length) == [True]
        if self.values.get(key) != length:
            # The old value goes when the new one is there.
            while self.used() + reserved(length) > self.limit:
                self.values.popitem(last=False)
        self.values[key] = length
        self.values.move_to_end(key)

    @rule(engine=_ENGINES, keys=st.lists(_KEYS, max_size=4), room=st.sampled_from([BLOCK, 4096]))
    def get(self, engine, keys, room):
        buffers = [memoryview(bytearray(room)) for _ in keys]
        lengths = self.tiers[engine].get(keys, buffers, disk.TIMEOUT)
        for key, buffer, found in zip(keys, buffers, lengths, strict=True):
            length = self.values.get(key)
            if length is None or length > room:
                assert found is None
            else:
                assert found == length
                assert buffer[:found] == disk.content(key, length)
                self.values.move_to_end(key)

    @rule(engine=_ENGINES, keys=st.lists(_KEYS, max_size=4))
    def exists(self, engine, keys):
        assert self.tiers[engine].exists(keys, disk.TIMEOUT) == [key in self.values for key in keys]

    @rule(engine=_ENGINES, keys=st.lists(_KEYS, max_size=4))
    def delete(self, engine, keys):
        self.tiers[engine].delete(keys, disk.TIMEOUT)
        for key in keys:
            self.values.pop(key, None)

    @rule(engine=_ENGINES)
    def restart(self, engine):
        self.tiers[engine].close()
        self.tiers[engine] = self.open()

    @precondition(lambda self: self.values)
    @rule(key=_KEYS, index=st.integers(0, 11))
    def delete_from_outside(self, key, index):
        key = list(self.values)[index % len(self.values)]
        disk.value_file(self.root, key).unlink()
        del self.values[key]

    @rule()
    def lose_the_ledger(self):
        (self.root / "kvplug-disk-1" / "ledger").unlink()

    @rule()
    def leave_a_temporary_file(self):
        (self.root / "kvplug-disk-1" / "temporary" / f"{reserved(BLOCK)}-{'0' * 16}").write_bytes(bytes(BLOCK))
        # Its writer is dead, and had set room aside.
        self.tiers[0]._space.look_soon()
        self.tiers[1]._space.look_soon()

    @invariant()
    def the_directory_has_what_the_model_has(self):
        found = {bytes.fromhex(path.name): path.stat().st_size for path in disk.value_files(self.root)}
        assert found == dict(self.values)

    @invariant()
    def the_cap_holds(self):
        torn = sum(path.stat().st_blocks * 512 for path in disk.temporary_files(self.root))
        assert disk.on_disk(self.root) - torn <= self.size
        for tier in self.tiers:
            usage = tier.usage(disk.TIMEOUT)
            assert usage.used_bytes is None or usage.used_bytes <= self.size

    def teardown(self):
        for tier in self.tiers:
            tier.close()
        reading._MARK_NS, writing.IDLE_NS, space.IDLE_NS = self.mark_ns, self.idle_ns, self.idle_ns
        shutil.rmtree(self.root)


DiskAgainstModel.TestCase.settings = settings(
    max_examples=30, stateful_step_count=70, deadline=None, suppress_health_check=list(HealthCheck)
)
TestDiskAgainstModel = DiskAgainstModel.TestCase
TestDiskAgainstModel.__doc__ = "Whatever two engines do, the directory has what the model has, in the order of use."
