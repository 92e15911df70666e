"""Small connectors: one that is right, and others that are each wrong in one way."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    SupportsHMA,
)

BLOCK = 16
# What halves of one engine keep, where they are told to mix their ranks up.
SHARED = defaultdict(dict)


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    rank: int


@dataclass
class Metadata(KVConnectorMetadata):
    # Key, group, block id.
    saves: list = field(default_factory=list)
    loads: list = field(default_factory=list)
    async_ids: set = field(default_factory=set)
    extra: object = None


class Honest(KVConnectorBase_V1, SupportsHMA):
    """Keeps full blocks of prompts in memory, and loads them before the step, or asynchronously."""

    def __init__(self, vllm_config, role, kv_cache_config=None):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.options = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.shutdowns = 0
        self.known, self.matches, self.requests = set(), {}, {}
        self.next = Metadata()
        self.groups = [group.layer_names for group in kv_cache_config.kv_cache_groups]
        self.store = SHARED[vllm_config.kv_transfer_config.engine_id] if self.options.get("mix_ranks") else {}
        self.finished, self.rank, self.handshakes = set(), vllm_config.parallel_config.rank, None

    requires_kv_delivery = False

    # Scheduler half.

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self.requests[request.request_id] = request
        end = num_computed_tokens
        while end + BLOCK < request.num_tokens and self.key(request, end + BLOCK) in self.known:
            end += BLOCK
        self.matches[request.request_id] = num_computed_tokens, end
        return end - num_computed_tokens, bool(self.options.get("load_async")) and end > num_computed_tokens

    @staticmethod
    def key(request, end):
        return request.cache_salt, tuple(request.all_token_ids[:end])

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if not num_external_tokens:
            return
        start, end = self.matches[request.request_id]
        assert end - start == num_external_tokens
        for group, ids in enumerate(blocks.blocks):
            for index in range(start // BLOCK, end // BLOCK):
                if not ids[index].is_null:
                    self.next.loads.append((self.key(request, (index + 1) * BLOCK), group, ids[index].block_id))
        if self.options.get("load_async"):
            self.next.async_ids.add(request.request_id)

    def build_connector_meta(self, scheduler_output):
        metadata, self.next = self.next, Metadata()
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            tables = scheduler_output.kv_connector_block_state.get_block_ids(request_id)
            end = min(request.num_computed_tokens + num_tokens, request.num_prompt_tokens)
            for index in range(request.num_computed_tokens // BLOCK, end // BLOCK):
                key = self.key(request, (index + 1) * BLOCK)
                metadata.saves += [(key, group, ids[index]) for group, ids in enumerate(tables)]
                self.known.add(key)
        return metadata

    def request_finished(self, request, block_ids):
        self.requests.pop(request.request_id, None)
        return False, None

    request_finished_all_groups = request_finished

    def set_xfer_handshake_metadata_pp_aware(self, metadata):
        self.handshakes = {place: one.rank for place, one in metadata.items()}

    # Worker half.

    def get_handshake_metadata(self):
        return Handshake(self.rank)

    @property
    def place(self):
        return self.rank, self.tensor_rank

    def register_kv_caches(self, kv_caches):
        from vllm.distributed import get_tensor_model_parallel_rank

        self.caches, self.tensor_rank = kv_caches, get_tensor_model_parallel_rank()

    def _layers(self, group):
        return [name for name in self.groups[group] if name in self.caches]

    def start_load_kv(self, forward_context, **kwargs):
        metadata = self._get_connector_metadata()
        for key, group, block_id in metadata.loads:
            for name in self._layers(group):
                self.caches[name][block_id] = self.store[key, group, name]
        self.finished |= metadata.async_ids

    def wait_for_layer_load(self, layer_name):
        assert layer_name in self.caches

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        assert kv_layer is self.caches[layer_name]

    def wait_for_save(self):
        for key, group, block_id in self._get_connector_metadata().saves:
            for name in self._layers(group):
                self.store[key, group, name] = self.caches[name][block_id].clone()

    def get_finished(self, finished_req_ids):
        finished, self.finished = self.finished, set()
        return None, finished or None

    def shutdown(self):
        self.shutdowns += 1


class Forgetful(Honest):
    """Promises two blocks of every prompt, and loads nothing."""

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self.requests[request.request_id] = request
        if num_computed_tokens or request.num_tokens <= 2 * BLOCK or not self.options.get("promise", True):
            return 0, False
        self.matches[request.request_id] = 0, 2 * BLOCK
        return 2 * BLOCK, bool(self.options.get("load_async"))

    def start_load_kv(self, forward_context, **kwargs):
        self.finished |= self._get_connector_metadata().async_ids


class Corrupting(Honest):
    """Changes one element of the second block that it saves, at its second token."""

    def wait_for_save(self):
        super().wait_for_save()
        for _, _, block_id in self._get_connector_metadata().saves[1:2]:
            self.caches[self.groups[0][0]][block_id, 0, 1, 2] += 1


class Wavering(Honest):
    """Never knows."""

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return None, False


class HoldsBlocks(Honest):
    """Takes a reference to a block and keeps it."""

    def bind_gpu_block_pool(self, gpu_block_pool):
        self.pool = gpu_block_pool

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self.pool.touch(blocks.blocks[0][:1])


class Unpicklable(Honest):
    """Has metadata that only its own process can read."""

    def build_connector_meta(self, scheduler_output):
        metadata = super().build_connector_meta(scheduler_output)
        metadata.extra = lambda: None
        return metadata


class Failing(Honest):
    """Fails every other load, and says so: by block if synchronous, by request if not."""

    loads = 0

    def start_load_kv(self, forward_context, **kwargs):
        metadata = self._get_connector_metadata()
        if metadata.loads:
            self.loads += 1
        self.failed = self.loads % 2 == 1
        if not self.failed:
            super().start_load_kv(forward_context, **kwargs)
        self.finished |= metadata.async_ids
        self.invalid = {block_id for _, _, block_id in metadata.loads} if self.failed else set()

    def get_block_ids_with_load_errors(self):
        return self.invalid
