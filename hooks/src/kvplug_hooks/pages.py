"""The other end of the patch `hybrid_page_size`: pads KV-cache pages that vLLM can't make equal.

vLLM's allocator has pages of one size. To make them equal, it gives layers with smaller pages larger blocks, and up to
0.23 that's all. It fails for attention layers whose pages don't divide the largest one, and for Mamba layers, whose
pages hold a state of fixed size. vLLM from 0.29 on pads such pages instead; so does this, where the release can read
padded pages (`kvplug_hooks.padding`).
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvplug.log import get_logger
from kvplug_hooks.padding import Padding
from kvplug_hooks.patches.hybrid_page_size import HYBRID_PAGE_SIZE
from kvplug_hooks.running import concerns_model, running_config

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["pad_page_sizes"]

logger = get_logger(__name__)


def pad_page_sizes(kv_cache_spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """Pad the pages that the function which called this can't make as large as the largest one.

    Args:
        kv_cache_spec: vLLM's `KVCacheSpec` of each layer, by the layer's name.

    Returns:
        The argument, if all pages are equal, if the function copes by itself, if the model isn't one that the
        patch concerns, or if some page can't be padded in this release: the function then raises as it ever did. Else
        a mapping with padded specs. Those whose pages divide the largest one are left to the function.

    """
    largest = max((spec.page_size_bytes for spec in kv_cache_spec.values()), default=0)
    padding = Padding(running_config(), sys._getframe(1).f_code)  # noqa: SLF001 - of vLLM's function
    short = {
        name: spec
        for name, spec in kv_cache_spec.items()
        if spec.page_size_bytes < largest and padding.is_needed(spec, largest)
    }
    if not short or not concerns_model(HYBRID_PAGE_SIZE):
        return kv_cache_spec
    for name, spec in short.items():
        if (obstacle := padding.obstacle(spec)) is not None:
            logger.warning(
                "The KV-cache page of layer %s, of %d bytes, can't be padded to the largest one's %d bytes: %s",
                name,
                spec.page_size_bytes,
                largest,
                obstacle,
            )
            return kv_cache_spec
    sizes = Counter((type(spec).__name__, spec.page_size_bytes) for spec in short.values())
    for (kind, size), count in sorted(sizes.items()):
        logger.info(
            "Hybrid KV cache: padding the pages of %d layers (%s) from %d to %d bytes.", count, kind, size, largest
        )
    padded = {name: replace(spec, page_size_padded=largest) for name, spec in short.items()}
    return {name: padded.get(name, spec) for name, spec in kv_cache_spec.items()}
