"""Hybrid models whose KV-cache pages don't divide: the smaller ones are padded to the largest, as later vLLMs do."""

from __future__ import annotations

import re

from kvplug_hooks.patch import FirstStatement, Patch

__all__ = ["HYBRID_PAGE_SIZE", "PATCHES"]

_FUNCTION = "unify_kv_cache_spec_page_size"


def _upstream_fix(source: str) -> str | None:
    """Say so if the function pads attention pages whatever the backend, which it does from 0.29 on."""
    _, found, rest = source.partition(f"\ndef {_FUNCTION}(")
    body = re.split(r"^(?:@|(?:async )?def |class )", rest, maxsplit=1, flags=re.MULTILINE)[0]
    if found and "page_size_padded=" in body and "indexes_kv_by_block_stride" not in body:
        return f"This vLLM's {_FUNCTION} pads pages that don't divide itself, as vLLM does from 0.29 on."
    return None


HYBRID_PAGE_SIZE = Patch(
    id="hybrid_page_size",
    purpose="Lets models start whose kinds of layers have KV-cache pages that don't divide the largest one.",
    removal_condition=(
        "No vLLM before 0.29 is supported any more: 0.26 pads Mamba pages (vllm-project/vllm#45207), 0.24 those of "
        "some attention backends (vllm-project/vllm#45181) and 0.29 all but MLA's. Reports: vllm-project/vllm#41153, "
        "#41560, #42927, #43626."
    ),
    module="vllm.v1.core.kv_cache_planning",
    former_modules=("vllm.v1.core.kv_cache_utils",),
    function=_FUNCTION,
    anchor=FirstStatement(),
    import_from="kvplug_hooks.pages",
    import_name="pad_page_sizes",
    call="kv_cache_spec = pad_page_sizes(kv_cache_spec)",
    known_releases=(
        "0.19.0",
        "0.19.1",
        "0.20.2",
        "0.21.0",
        "0.22.1",
        "0.23.0",
        "0.24.0",
        "0.25.1",
        "0.26.0",
        "0.27.1",
        "0.28.0",
    ),
    older_releases="Before 0.19 vLLM has none of the models that the patch concerns.",
    # The engine core imports the module at its top, before it loads plugins.
    applied="replace",
    # Qwen3.5 and Qwen3.6, which share them, dense and MoE, and the retriever that is built on them.
    architectures=frozenset(
        {
            "ColQwen3_5",
            "Qwen3_5ForCausalLM",
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForCausalLM",
            "Qwen3_5MoeForConditionalGeneration",
        }
    ),
    not_needed=_upstream_fix,
)

PATCHES = (HYBRID_PAGE_SIZE,)
