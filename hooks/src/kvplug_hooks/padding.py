"""Which KV-cache pages a vLLM release can read padded, found out from what it contains.

A padded page is one whose block is followed by unused bytes. vLLM's runners make a strided view of such a cache, and
the attention kernels must go from block to block by that stride.

- Mamba layers: all releases that have these models do.
- Attention layers from 0.24 on: the layer's spec says whether its backend does, and vLLM pads those by itself. The
  TurboQuant backend says no, since it has no layout for several layers, but its kernels take the block stride.
- Attention layers from 0.20 to 0.23: the runners do, and the backend does if the block is the outermost dimension of
  its cache. FlashAttention's cache has all keys before all values up to 0.22: padded blocks would overlap there.
- Attention layers in 0.19, and MLA: no.
"""

from __future__ import annotations

import importlib.util
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from importlib.abc import InspectLoader
    from types import CodeType

__all__ = ["Padding"]

#: Where the second runner makes the views, and from 0.24 on both do. Both learned of padding in the same release.
_VIEWS = "vllm.v1.worker.gpu.attn_utils"
#: Any number of blocks that is no other dimension's size.
_BLOCKS = 1_000_003


class Padding:
    """What can be padded for the model of a configuration, beyond what vLLM's own function does."""

    def __init__(self, vllm_config: Any, function: CodeType) -> None:
        self._config = vllm_config
        self._function = function

    def is_needed(self, spec: Any, largest: int) -> bool:
        """Return whether vLLM's function can't make a smaller page as large as `largest` by itself."""
        if _is(spec, "MambaSpec"):
            return "MambaSpec" not in self._function.co_names  # 0.26 on it knows them, and pads their pages
        if getattr(spec, "indexes_kv_by_block_stride", False):
            return False
        return bool(largest % spec.page_size_bytes)

    def obstacle(self, spec: Any) -> str | None:
        """Return why a layer's page can't be padded, as a sentence with a remedy, or None."""
        if _is(spec, "MambaSpec"):
            return None
        if not _is(spec, "AttentionSpec") or any("MLA" in cls.__name__ for cls in type(spec).__mro__):
            return f"no vLLM pads a {type(spec).__name__}; use another block size (--block-size)."
        if hasattr(spec, "indexes_kv_by_block_stride") and not _is_turboquant(spec):
            return "its attention backend doesn't read padded pages; use another (--attention-backend), or vLLM 0.29."
        if not self._runners_read_padding:
            return "this release reads padded pages of Mamba layers only; use vLLM 0.29."
        return self._obstacle_of_backend(spec)

    @cached_property
    def _runners_read_padding(self) -> bool:
        """Whether the model runners look at an attention page's padding."""
        return "page_size_padded" in _source(_VIEWS)

    def _obstacle_of_backend(self, spec: Any) -> str | None:
        """Return what the attention backend that vLLM chooses for a layer has against a padded page."""
        from vllm.config import set_current_vllm_config

        try:
            with set_current_vllm_config(self._config):
                backend = self._backend(spec)
                walks, whole = self._walks_by_block(backend, spec), _takes_whole_blocks(backend, spec)
                name = f"the attention backend {backend.get_name()}"
        except Exception as error:  # noqa: BLE001 - vLLM's, for any reason: the page isn't padded then
            walks, whole, name = False, False, f"its attention backend can't be told ({error!r}), which"
        if not walks:
            return (
                f"{name} isn't known to read padded pages in this release; use another one "
                "(--attention-backend TRITON_ATTN or FLASHINFER), or vLLM 0.29."
            )
        if not whole:  # vllm-project/vllm#54877
            return (
                f"{name} splits blocks of {spec.block_size} tokens, which doesn't go with padded pages; "
                "use a --block-size that it takes whole."
            )
        return None

    def _backend(self, spec: Any) -> Any:
        from vllm.v1.attention.selector import get_attn_backend

        model = self._config.model_config
        prefix = bool(getattr(model, "is_mm_prefix_lm", False))
        return get_attn_backend(spec.head_size, model.dtype, self._cache_dtype(spec), use_mm_prefix=prefix)

    def _cache_dtype(self, spec: Any) -> str:
        """Return the KV-cache type of a layer: layers that TurboQuant skips have the model's."""
        dtype = str(self._config.cache_config.cache_dtype)
        return "auto" if dtype.startswith("turboquant_") and not _is_turboquant(spec) else dtype

    def _walks_by_block(self, backend: Any, spec: Any) -> bool:
        """Return whether a backend goes from block to block by the stride of its outermost dimension."""
        shape = backend.get_kv_cache_shape(
            _BLOCKS, spec.block_size, spec.num_kv_heads, spec.head_size, cache_dtype_str=self._cache_dtype(spec)
        )
        if shape[0] != _BLOCKS:
            return False
        if _is_turboquant(spec):
            return True
        # What vLLM's indexes_kv_by_block_stride, of 0.24, goes by: a backend whose layout has a place for several
        # layers has a stride between blocks.
        try:
            order = backend.get_kv_cache_stride_order(include_num_layers_dimension=False)
            layered = backend.get_kv_cache_stride_order(include_num_layers_dimension=True)
        except (AttributeError, NotImplementedError):
            return False
        return len(layered) == len(order) + 1 and layered[0] != 0


def _takes_whole_blocks(backend: Any, spec: Any) -> bool:
    """Return whether a backend's kernels take the layer's blocks as they are."""
    return any(
        spec.block_size == size if isinstance(size, int) else spec.block_size % size.base == 0
        for size in backend.get_supported_kernel_block_sizes()
    )


def _is(spec: Any, name: str) -> bool:
    """Return whether a spec is of one of vLLM's kinds, which aren't in the same module in all releases."""
    return any(cls.__name__ == name for cls in type(spec).__mro__)


def _is_turboquant(spec: Any) -> bool:
    return _is(spec, "TQFullAttentionSpec") or bool(
        getattr(getattr(spec, "kv_quant_mode", None), "is_turboquant", False)
    )


def _source(name: str) -> str:
    """Return a module's source without importing it; nothing if it can't be had."""
    spec = importlib.util.find_spec(name)
    loader = None if spec is None else spec.loader
    return (cast("InspectLoader", loader).get_source(name) or "") if hasattr(loader, "get_source") else ""
