"""The connector that vLLM creates by name."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

import kvplug
from hostcache.keys import CachedRequest, is_cacheable
from hostcache.metadata import HostCacheMetadata


class HostCacheConnector(KVConnectorBase_V1):
    """Keeps full blocks in the worker's host memory, and loads them when a prompt starts with the same tokens."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Create the scheduler's half or a worker's half."""
        super().__init__(vllm_config, role, kv_cache_config)
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        if len(specs) != 1 or type(specs[0]) not in (FullAttentionSpec, MLAAttentionSpec):
            raise ValueError("HostCacheConnector needs a model with full attention in all layers.")
        if vllm_config.speculative_config is not None:
            raise ValueError("HostCacheConnector can't be used with speculative decoding.")
        self._block_size = specs[0].block_size
        self._num_blocks = kv_cache_config.num_blocks
        # The scheduler's half: requests that have blocks, and what the keys of this engine start from.
        self._requests: dict[str, CachedRequest] = {}
        self._seed = os.urandom(32)
        # A worker's half: the store, by key and with the block used last at its end; the paged cache by layer.
        settings = vllm_config.kv_transfer_config
        self._max_stored_blocks = int(settings.get_from_extra_config("max_stored_blocks", 1000))
        self._stored: OrderedDict[bytes, list[torch.Tensor]] = OrderedDict()
        self._layers: list[torch.Tensor] = []
        # Blocks to save when the step has run, and the full blocks of each running request.
        self._to_save: list[tuple[bytes, int]] = []
        self._full_blocks: dict[str, Sequence[int]] = {}

    @property
    def requires_kv_delivery(self) -> bool:
        """A block that isn't saved is only a miss, so vLLM needs to wait for none."""
        return False

    # -- The scheduler's half ----------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Promise nothing: what is stored is the workers' business."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Remember a request that is about to be scheduled, for the first time or after a preemption."""
        if request.request_id not in self._requests and is_cacheable(request):
            self._requests[request.request_id] = CachedRequest(request)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request. Its blocks can be freed at once."""
        self._requests.pop(request.request_id, None)
        return False, None

    def build_connector_meta(self, scheduler_output: Any) -> HostCacheMetadata:
        """Find the keys of the blocks that this step fills, and of those that preempted requests had."""
        scheduled = scheduler_output.num_scheduled_tokens
        filled = {}
        for request_id, num_tokens in scheduled.items():
            cached = self._requests.get(request_id)
            if cached is None or num_tokens == 1:  # a decode step has nothing to load
                continue
            start = cached.request.num_computed_tokens
            first, end = start // self._block_size, (start + num_tokens) // self._block_size
            if keys := cached.update_keys(self._seed, self._block_size)[first:end]:
                filled[request_id] = keys
        preempted = {
            request_id: list(self._requests[request_id].update_keys(self._seed, self._block_size))
            for request_id in scheduler_output.preempted_req_ids or ()
            # One that is scheduled again at once was preempted by a reset of the caches.
            if request_id in self._requests and request_id not in scheduled
        }
        return HostCacheMetadata(filled, preempted)

    def reset_cache(self) -> bool:
        """Make everything stored unreachable; running requests are neither loaded nor saved from now on."""
        self._seed = os.urandom(32)
        self._requests.clear()
        return True

    # -- A worker's half ---------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the paged cache, one tensor per layer, each with the dimension of blocks in front."""
        for name, cache in kv_caches.items():
            dims = [dim for dim, size in enumerate(cache.shape) if size == self._num_blocks]
            if len(dims) != 1:
                raise ValueError(f"Can't tell which dimension of {name} {list(cache.shape)} is that of blocks.")
            self._layers.append(cache.movedim(dims[0], 0))

    @kvplug.hookimpl
    def before_blocks_reused(self, step: kvplug.Step) -> None:
        """Save what preempted requests have computed, answers included, so that they can go on from there."""
        for request_id in step.preempted:
            block_ids = self._full_blocks.pop(request_id, ())
            self._save(zip(step.metadata.preempted.get(request_id, ()), block_ids, strict=False))

    @kvplug.hookimpl
    def before_update_states(self, step: kvplug.Step) -> dict[str, int]:
        """Load the blocks of this step that are stored; have the others saved when they have been computed."""
        self._to_save = []
        for request_id in step.finished:
            self._full_blocks.pop(request_id, None)
        for request_id, request in step.requests.items():
            num_full = (request.num_computed_tokens + request.num_scheduled_tokens) // self._block_size
            if num_full > request.num_computed_tokens // self._block_size:  # this step fills a block
                self._full_blocks[request_id] = request.block_ids[0][:num_full]
        loaded = {}
        for request_id, keys in step.metadata.filled.items():
            request = step.requests[request_id]
            first = request.num_computed_tokens // self._block_size
            block_ids = request.block_ids[0][first : first + len(keys)]
            num_loaded = self._load(keys, block_ids) if request.num_skippable_tokens else 0
            if num_loaded:
                loaded[request_id] = (first + num_loaded) * self._block_size - request.num_computed_tokens
            self._to_save += zip(keys[num_loaded:], block_ids[num_loaded:], strict=True)
        return loaded

    def wait_for_save(self) -> None:
        """Save the blocks that this step has filled."""
        self._save(self._to_save)
        self._to_save = []

    def _load(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> int:
        """Copy blocks into the paged cache up to the first that isn't stored. Returns how many."""
        for number, (key, block_id) in enumerate(zip(keys, block_ids, strict=True)):
            if key not in self._stored:
                return number
            self._stored.move_to_end(key)
            for layer, block in zip(self._layers, self._stored[key], strict=True):
                layer[block_id].copy_(block)
        return len(keys)

    def _save(self, blocks: Iterable[tuple[bytes, int]]) -> None:
        """Copy blocks out of the paged cache, except those that are stored already."""
        for key, block_id in blocks:
            if key not in self._stored:
                self._stored[key] = [layer[block_id].to("cpu", copy=True) for layer in self._layers]
                if len(self._stored) > self._max_stored_blocks:
                    self._stored.popitem(last=False)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: the hook has loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: the hook has loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: blocks are saved when the step has run."""
