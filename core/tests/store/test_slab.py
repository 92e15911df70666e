"""The slab: host memory in slots."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import numpy as np
import pytest

from kvplug.errors import KvplugError
from kvplug.store import Slab
from kvplug.store.slab import slot_stride


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("slot_bytes", [1, 63, 64, 100, 4096, 5000, 49152, 1 << 20, (1 << 20) + 1, 147456, 3_000_001])
def test_padding_costs_at_most_one_percent(slot_bytes):
    """Slots are aligned to pages or cache lines where that costs at most 1 %, and not at all otherwise."""
    stride = slot_stride(slot_bytes)
    assert slot_bytes <= stride <= slot_bytes * 1.01
    if slot_bytes >= 100 * 4096:
        assert stride % 4096 == 0
    elif slot_bytes >= 100 * 64:
        assert stride % 64 == 0


def test_slots_are_separate():
    """What is written to one slot is found there and in no other, through array, address and tensor alike."""
    slab = Slab(5, 3000)
    for slot in range(5):
        slab.view(slot)[:] = slot + 1
    for slot in range(5):
        assert slab.view(slot).shape == (3000,)
        assert (slab.view(slot) == slot + 1).all()
        assert slab.address(slot) == slab.view(slot).ctypes.data
        assert (slab.tensor[slot, :3000] == slot + 1).all()
    slab.tensor[2, 7] = 99
    assert slab.view(2)[7] == 99
    assert slab.tensor.data_ptr() == slab.address(0)
    assert slab.nbytes % 4096 == 0
    slab.close()


def test_field_is_the_same_part_of_every_slot():
    """A field is a view, made once, on the same bytes of every slot; it can't leave the slot."""
    slab = Slab(4, 100)
    for slot in range(4):
        slab.view(slot)[:] = np.arange(100) + slot
    field = slab.field(10, (2, 3, 5))
    assert field.shape == (4, 2, 3, 5)
    assert np.shares_memory(field, slab.rows)
    assert (field[3].reshape(-1) == np.arange(10, 40) + 3).all()
    assert slab.field(10, (2, 3, 5)) is field
    with pytest.raises(ValueError, match="not within a slot"):
        slab.field(90, (11,))
    with pytest.raises(ValueError, match="not within a slot"):
        slab.field(-1, (11,))


@pytest.mark.parametrize("slot", [-1, 4])
def test_a_slot_out_of_range_is_refused(slot):
    """Negative numbers don't count from the end."""
    slab = Slab(4, 64)
    with pytest.raises(IndexError, match=r"not in 0\.\.3"):
        slab.address(slot)
    with pytest.raises(IndexError, match=r"not in 0\.\.3"):
        slab.view(slot)


@pytest.mark.parametrize(("num_slots", "slot_bytes"), [(0, 64), (1, 0), (-1, 64)])
def test_a_slab_without_memory_is_refused(num_slots, slot_bytes):
    """A slab has at least one slot of at least one byte."""
    with pytest.raises(ValueError, match="at least one"):
        Slab(num_slots, slot_bytes)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_taken_as_it_is_used():
    """A new slab costs no memory; a slot costs memory when it is written; closing gives it back."""
    before = _resident_bytes()
    slab = Slab(256, 4 << 20)
    assert _resident_bytes() - before < 64 << 20
    for slot in range(32):
        slab.view(slot)[:] = 1
    assert 128 << 20 <= _resident_bytes() - before < 256 << 20
    slab.close()
    assert _resident_bytes() - before < 64 << 20


def test_failed_allocation_says_how_many_bytes():
    """Memory that can't be had is one clear error with the number of bytes."""
    with pytest.raises(KvplugError, match=r"Can't allocate 1099511627776000000 bytes .* set a smaller capacity"):
        Slab(1000, 1099511627776000)


def test_a_closed_slab_is_closed():
    """Closing twice is fine, using a closed slab is an error, and views that are still held stay valid."""
    slab = Slab(2, 64)
    view = slab.view(1)
    tensor = slab.tensor
    view[:] = 7
    slab.close()
    slab.close()
    gc.collect()
    assert (view == 7).all()
    assert (tensor[1, :64] == 7).all()
    for use in (lambda: slab.view(0), lambda: slab.address(0), lambda: slab.rows, lambda: slab.field(0, (1,))):
        with pytest.raises(ValueError, match="closed"):
            use()
    with pytest.raises(ValueError, match="closed"):
        _ = slab.tensor


def test_a_slab_needs_no_torch():
    """Slab and allocator work in a process that never imports torch."""
    import subprocess

    code = (
        "import sys; from kvplug.store import MemoryTier; "
        "tier = MemoryTier.with_capacity(1 << 20, 4096); tier.slab.view(0)[:] = 1; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("header_bytes", [1, 64, 4096])
def test_a_header_stands_in_front_of_each_payload(header_bytes):
    """A value is header and payload in one piece; all else speaks of payloads, which headers don't touch."""
    slab = Slab(5, 3000, header_bytes=header_bytes)
    for slot in range(5):
        slab.view(slot)[:] = slot + 1
    for slot in range(5):
        value = slab.value_view(slot)
        assert (value.format, value.contiguous, value.readonly, len(value)) == ("B", True, False, header_bytes + 3000)
        assert bytes(value[header_bytes:]) == bytes([slot + 1]) * 3000
        value[:header_bytes] = bytes([200]) * header_bytes
    for slot in range(5):
        assert slab.address(slot) == slab.view(slot).ctypes.data
        assert (slab.view(slot) == slot + 1).all()
        assert (slab.rows[slot, :3000] == slot + 1).all()
        assert (slab.tensor[slot, :3000] == slot + 1).all()
        assert (slab.field(10, (2, 5))[slot] == slot + 1).all()
        assert (slab.slots_tensor[slot, :header_bytes] == 200).all()
    assert np.shares_memory(slab.field(10, (2, 5)), slab.rows)
    assert slab.slots_tensor.is_contiguous()
    with pytest.raises(IndexError, match=r"not in 0\.\.4"):
        slab.value_view(5)
    slab.close()


@pytest.mark.parametrize("slot_bytes", [1, 100, 6400, 49152, 409_600, 1 << 20, 3_000_001])
def test_headers_cost_their_size_and_padding_one_percent(slot_bytes):
    """With a header, slots are aligned as they are without: to pages where that costs at most 1 %."""
    stride = slot_stride(slot_bytes, 64)
    assert slot_bytes + 64 <= stride <= slot_bytes * 1.01 + 64
    if slot_bytes >= 100 * 4096:
        assert stride % 4096 == 0
    elif slot_bytes >= 100 * 64:
        assert stride % 64 == 0


def test_all_memory_is_one_memoryview():
    """Tiers that register memory get all of it; a view that is still held doesn't keep a slab from closing."""
    slab = Slab(3, 5000, header_bytes=64)
    memory, value = slab.memory, slab.value_view(2)
    assert (memory.format, memory.contiguous, len(memory)) == ("B", True, slab.nbytes)
    memory[2 * slab.slot_stride] = 7
    slab.close()
    assert value[0] == 7
    for use in (lambda: slab.memory, lambda: slab.value_view(0), lambda: slab.slots_tensor):
        with pytest.raises(ValueError, match="closed"):
            use()
