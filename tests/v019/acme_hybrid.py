"""A model that mixes attention with a running state, which no accelerator is needed for: Llama, with a state per layer.

It stands in for Qwen3.5, whose recurrent layers have no kernels for a CPU in old releases. To vLLM it is a hybrid: its
states live in pages of the KV cache. Their pages are as large as its configuration says.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from vllm.v1.kv_cache_interface import MambaSpec

ARCHITECTURE = "AcmeHybridForCausalLM"


def register():
    """Tell vLLM of the model: an entry point of the group `vllm.general_plugins`."""
    from vllm import ModelRegistry

    ModelRegistry.register_model(ARCHITECTURE, f"acme_hybrid:{ARCHITECTURE}")


class State(nn.Module, MambaBase):
    """Adds a decaying sum of all earlier hidden states."""

    def __init__(self, config, prefix):
        super().__init__()
        self.floats, self.width, self.prefix = config.acme_state_floats, config.hidden_size, prefix
        self.kv_cache = (torch.tensor([]),)
        get_current_vllm_config().compilation_config.static_forward_context[prefix] = self

    mamba_type = "linear_attention"

    def get_state_shape(self):
        return ((self.floats,),)

    def get_state_dtype(self):
        return (torch.float32,)

    def get_kv_cache_spec(self, vllm_config):
        """Return the spec without what vLLM may have thought of padding: as for a model that it doesn't know to pad."""
        return MambaSpec(
            block_size=vllm_config.cache_config.mamba_block_size,
            shapes=self.get_state_shape(),
            dtypes=self.get_state_dtype(),
            mamba_type=self.mamba_type,
        )

    def forward(self, hidden):
        metadata = get_forward_context().attn_metadata
        if metadata is None:  # while vLLM warms up
            return hidden
        metadata = metadata[self.prefix]
        states, result = self.kv_cache[0], hidden.clone()
        starts = metadata.query_start_loc.tolist()
        for index, (start, end) in enumerate(pairwise(starts)):
            state = states[int(metadata.state_indices_tensor[index]), : self.width]
            if int(metadata.seq_lens[index]) == end - start:
                state.zero_()
            for token in range(start, end):
                state.mul_(0.9).add_(hidden[token])
                result[token] += 0.3 * state
        return result


class Layer(LlamaDecoderLayer):
    """Llama's, and the state after it."""

    def __init__(self, vllm_config, prefix="", **options):
        super().__init__(vllm_config, prefix, **options)
        self.state = State(vllm_config.model_config.hf_config, f"{prefix}.state")

    def forward(self, positions, hidden_states, residual):
        hidden_states, residual = super().forward(positions, hidden_states, residual)
        return self.state(hidden_states), residual


class AcmeHybridForCausalLM(LlamaForCausalLM):
    """The model."""

    is_hybrid = True

    def __init__(self, *, vllm_config, prefix=""):
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=Layer)

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config):
        return ((vllm_config.model_config.hf_config.acme_state_floats,),)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config):
        return (torch.float32,)
