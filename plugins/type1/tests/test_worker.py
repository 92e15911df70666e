"""Worker half of type1, on CPU tensors: loads, saves, and what happens when they fail."""

from __future__ import annotations

import pytest
import torch

from kvplug.paged import Transfer
from kvplug.store.settings import StoreSettings
from kvplug_type1.metadata import LoadRequest, SaveRequest, Type1Metadata
from kvplug_type1.worker import Type1Worker
from support.type1_steps import BLOCK, full

BLOCKS, LAYERS = 12, 2
KEYS = tuple(bytes([n]) * 32 for n in range(10))


def caches():
    generator = torch.Generator().manual_seed(0)
    return {f"layer.{n}": torch.randn(BLOCKS, 2, BLOCK, 64, generator=generator) for n in range(LAYERS)}


def make(kv_caches, *, num_blocks=8, **settings):
    store = StoreSettings(l1_size_per_rank=int(num_blocks * 4096))
    group = full(pages=dict.fromkeys(kv_caches, 2 * BLOCK * 64 * 4))
    worker = Type1Worker(store, groups=[group], num_blocks=BLOCKS, shard="all", **settings)
    worker.register_kv_caches(kv_caches)
    return worker


def save(keys, block_ids):
    return Type1Metadata(saves=(SaveRequest("a", tuple(keys), tuple(block_ids)),))


def load(keys, block_ids, *, computed=0, **metadata):
    request = LoadRequest("a", computed, tuple(keys), tuple(block_ids))
    return Type1Metadata(candidates=("a",), loads=(request,), **metadata)


@pytest.fixture
def kv_caches():
    return caches()


@pytest.fixture
def worker(kv_caches):
    return make(kv_caches, drop_last_hit=False)


def test_what_was_saved_is_loaded_elsewhere(worker, kv_caches):
    """Blocks come back byte for byte in other blocks of every layer; no other block changes."""
    before = {name: tensor.clone() for name, tensor in kv_caches.items()}
    worker.save(save(KEYS[:2], [3, 5]))
    assert worker.load(load(KEYS[:2], [7, 8])) == {"a": 8}
    for name, tensor in kv_caches.items():
        assert torch.equal(tensor[7], before[name][3])
        assert torch.equal(tensor[8], before[name][5])
        rest = [n for n in range(BLOCKS) if n not in (7, 8)]
        assert torch.equal(tensor[rest], before[name][rest])


def test_the_hit_ends_at_the_first_gap(worker, kv_caches):
    """Only an unbroken run from the start counts, and nothing behind a gap is written."""
    worker.save(save([KEYS[0], KEYS[2]], [1, 3]))
    before = kv_caches["layer.0"].clone()
    assert worker.load(load(KEYS[:3], [7, 8, 9])) == {"a": 4}
    assert torch.equal(kv_caches["layer.0"][[8, 9]], before[[8, 9]])
    assert worker.load(load(KEYS[1:3], [7, 8])) == {"a": 0}


def test_a_load_that_starts_inside_a_block(worker):
    """The block is loaded whole; only the tokens that weren't computed count."""
    worker.save(save(KEYS[:2], [3, 5]))
    assert worker.load(load(KEYS[:2], [7, 8], computed=6)) == {"a": 6}


def test_the_last_block_of_a_hit_is_not_used_for_draft_layers(kv_caches):
    """A draft layer's KV at a block's end depends on a token that the block's key doesn't cover."""
    worker = make(kv_caches, drop_last_hit=True)
    worker.save(save(KEYS[:3], [1, 2, 3]))
    before = kv_caches["layer.0"].clone()
    assert worker.load(load(KEYS[:3], [7, 8, 9])) == {"a": 8}
    assert torch.equal(kv_caches["layer.0"][9], before[9])
    assert worker.load(load(KEYS[:1], [7])) == {"a": 0}


def test_nothing_is_stored_twice(worker):
    """A block that is there is found, not written again; a key that comes twice in a step is written once."""
    worker.save(save(KEYS[:2], [3, 5]))
    worker.save(save(KEYS[:3], [3, 5, 6]))
    worker.save(save([KEYS[4], KEYS[4]], [3, 5]))
    assert worker.stats.get("blocks_saved") == 4
    assert worker.tier.allocator.used == 4


def test_c13_a_full_tier_makes_room_or_refuses(kv_caches):
    """Old blocks make room for new ones; a request longer than the tier keeps what fits; nothing fails."""
    worker = make(kv_caches, num_blocks=4, drop_last_hit=False)
    for start in range(0, 8, 2):
        worker.save(save(KEYS[start : start + 2], [1, 2]))
    assert worker.stats.get("blocks_evicted") > 0
    worker.save(save(KEYS[:8], range(1, 9)))
    assert worker.stats.get("saves_refused") > 0
    assert worker.tier.allocator.used == worker.tier.allocator.capacity
    assert worker.stats.get("save_errors") == 0


@pytest.mark.parametrize("error", [OSError(28, "No space left"), ConnectionError("gone"), MemoryError(), KeyError("x")])
def test_a7_a_failing_save_is_a_later_miss(worker, caplog, monkeypatch, error):
    """Whatever a save raises is counted and logged once; serving goes on and the blocks aren't found."""
    with monkeypatch.context() as patch:
        patch.setattr(worker.paged, "gather", raising(error))
        for _ in range(3):
            worker.save(save(KEYS[:2], [3, 5]))
    assert worker.stats.get("save_errors") == 3
    assert caplog.text.count("A save failed") == 1
    assert worker.load(load(KEYS[:2], [7, 8])) == {"a": 0}
    worker.save(save(KEYS[:2], [3, 5]))
    assert worker.load(load(KEYS[:2], [7, 8])) == {"a": 8}


def test_a7_a_failing_load_is_a_miss(worker, caplog, monkeypatch):
    """Whatever a load raises is counted, and that request computes; another's load in the same step still counts."""
    worker.save(save(KEYS[:2], [3, 5]))
    inner = worker.paged.scatter

    def scatter(slab, slots, block_ids):
        if list(block_ids) == [7, 8]:
            raise RuntimeError("lost")
        return inner(slab, slots, block_ids)

    monkeypatch.setattr(worker.paged, "scatter", scatter)
    other = LoadRequest("b", 0, KEYS[:1], (9,))
    metadata = Type1Metadata(candidates=("a", "b"), loads=(*load(KEYS[:2], [7, 8]).loads, other))
    assert worker.load(metadata) == {"a": 0, "b": 4}
    assert worker.stats.get("load_errors") == 1
    assert (worker.stats.get("blocks_hit"), worker.stats.get("blocks_loaded")) == (3, 1)
    assert "A load failed" in caplog.text
    assert sum(worker.tier.allocator._pins) == 0


def raising(error):
    def raise_it(*_args):
        raise error

    return raise_it


class Event:
    """Stands in for a CUDA event: a copy that ends when the test says so."""

    def __init__(self):
        self.ended, self.error = False, None

    def query(self):
        if self.error:
            raise self.error
        return self.ended

    def synchronize(self):
        self.ended = True
        self.query()


def later(worker, monkeypatch, what):
    """Let copies of one kind end when the returned event says so."""
    event = Event()
    inner = getattr(worker.paged, what)

    def copy(*args):
        inner(*args)
        return Transfer(event)

    monkeypatch.setattr(worker.paged, what, copy)
    return event


def test_a_save_is_found_once_it_has_been_copied(worker, monkeypatch):
    """On a GPU the host doesn't wait for copies: a block can't be found, nor its slot reused, before it is there."""
    event = later(worker, monkeypatch, "gather")
    worker.save(save(KEYS[:2], [3, 5]))
    assert worker.load(load(KEYS[:2], [7, 8])) == {"a": 0}
    worker.save(save(KEYS[:2], [3, 5]))
    assert worker.tier.allocator.used == 2
    event.ended = True
    assert worker.load(load(KEYS[:2], [7, 8])) == {"a": 8}
    assert worker.stats.get("blocks_saved") == 2


def test_a_block_stays_pinned_until_it_has_been_copied(worker, monkeypatch):
    """B5: while a copy out of the slab runs, its slots aren't evicted."""
    worker.save(save(KEYS[:2], [3, 5]))
    event = later(worker, monkeypatch, "scatter")
    assert worker.load(load(KEYS[:2], [7, 8])) == {"a": 8}
    assert sum(worker.tier.allocator._pins) == 2
    worker.save(save(KEYS[2:10], range(1, 9)))
    assert worker.tier.allocator.prefix_length(KEYS[:2]) == 2
    event.ended = True
    worker.load(Type1Metadata())
    assert sum(worker.tier.allocator._pins) == 0


def test_a_copy_that_fails_later_is_a_miss(worker, monkeypatch, caplog):
    """A7: the device may report a failed copy when it is asked for: the block isn't stored, and serving goes on."""
    event = later(worker, monkeypatch, "gather")
    worker.save(save(KEYS[:2], [3, 5]))
    event.error = RuntimeError("illegal memory access")
    assert worker.load(load(KEYS[:2], [7, 8])) == {"a": 0}
    assert worker.stats.get("save_errors") == 1
    assert worker.tier.allocator.used == 0
    assert "illegal memory access" in caplog.text


def test_a_reset_while_a_save_is_under_way(worker, monkeypatch):
    """D9: what was being copied when the cache was reset isn't found afterwards."""
    event = later(worker, monkeypatch, "gather")
    worker.save(save(KEYS[:2], [3, 5]))
    assert worker.load(load(KEYS[:2], [7, 8], reset_count=1)) == {"a": 0}
    event.ended = True
    assert worker.load(load(KEYS[:2], [7, 8], reset_count=1)) == {"a": 0}
    assert worker.tier.allocator.used == 0


def test_closing_waits_for_copies(worker, monkeypatch):
    """Memory that a copy still writes to isn't given back."""
    event = later(worker, monkeypatch, "gather")
    worker.save(save(KEYS[:2], [3, 5]))
    worker.close()
    assert event.ended


def test_d9_a_reset_forgets_everything_before_the_next_load(worker):
    """A count that has risen empties the store; the same count again doesn't."""
    worker.save(save(KEYS[:2], [3, 5]))
    assert worker.load(load(KEYS[:2], [7, 8], reset_count=1)) == {"a": 0}
    worker.save(save(KEYS[:2], [3, 5]))
    assert worker.load(load(KEYS[:2], [7, 8], reset_count=1)) == {"a": 8}


def test_a_hook_that_is_not_called_is_noticed(worker, caplog):
    """Never silently inert: a step with loads that the hook didn't see is counted and logged."""
    metadata = load(KEYS[:1], [7])
    worker.load(metadata)
    worker.save(metadata)
    assert worker.stats.get("hook_missed") == 0
    worker.save(load(KEYS[:2], [7, 8]))
    assert worker.stats.get("hook_missed") == 1
    assert "kvplug doctor" in caplog.text


def test_a_size_below_one_block_is_refused(kv_caches):
    """A store that could hold nothing is an error at start that says how much is needed."""
    from kvplug.errors import ConfigError

    with pytest.raises(ConfigError, match=r"holds no block"):
        make(kv_caches, num_blocks=0.5, drop_last_hit=False)


def test_a_second_paged_cache_is_refused(worker, kv_caches):
    """Two engines in one process share vLLM's connector: the second one's blocks would get the first one's KV."""
    from kvplug.errors import UnsupportedError

    with pytest.raises(UnsupportedError, match="VLLM_ENABLE_V1_MULTIPROCESSING=1"):
        worker.register_kv_caches(kv_caches)
    worker.close()


def test_close_gives_the_memory_back(worker):
    """Closing twice is fine, and the slab is gone."""
    worker.close()
    worker.close()
    with pytest.raises(AssertionError):
        _ = worker.tier
