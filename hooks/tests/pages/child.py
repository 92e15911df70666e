"""Runs vLLM releases' own page-size function, with their own spec classes, on specs that are made up here.

`python child.py FOLDER RELEASE...` prints a line of JSON for each release in FOLDER: for each case what became of each
layer, or the error, without the patch and with it. The release's modules that are needed are executed as they are;
everything else of vLLM's is a stand-in, so that no extension of torch and no configuration is needed. kvplug's finder
is installed before vLLM's module is imported. The attention backends' layouts come from the release's source too.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.machinery
import importlib.util
import json
import logging
import os
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

import kvplug_hooks

QWEN = "Qwen3_5MoeForConditionalGeneration"
#: What is executed as it is.
REAL = {
    "vllm.v1.core.kv_cache_planning",
    "vllm.v1.core.kv_cache_utils",
    "vllm.v1.kv_cache_interface",
    "vllm.v1.kv_cache_spec_registry",
    "vllm.v1.kv_cache_layout",
    "vllm.v1.attention.backends.registry",
    "vllm.utils.math_utils",
    "vllm.utils.import_utils",
    "vllm.model_executor.layers.quantization.turboquant.config",
}
#: What stands in for attributes of other modules.
GIVEN: dict[str, dict[str, Any]] = {
    "vllm.logger": {"init_logger": logging.getLogger},
    "vllm.utils.torch_utils": {"get_dtype_size": lambda dtype: dtype.itemsize},
    "vllm.config": {"set_current_vllm_config": contextlib.nullcontext},
    "vllm.v1.attention.selector": {"get_attn_backend": lambda *_, **__: chosen[0]},
}
chosen: list[Any] = [None]
messages: list[str] = []


class StandIn:
    """Loads an empty package, or a module that has any name that is asked for."""

    def __init__(self, file: Path | None) -> None:
        self.file = file

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(GIVEN.get(module.__name__, {}))
        module.__getattr__ = stand_in  # type: ignore[attr-defined]

    def get_source(self, name: str) -> str | None:
        return self.file.read_text() if self.file is not None else None


def stand_in(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


class Release:
    """Finds vLLM's modules in a release's folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] != "vllm":
            return None
        file = self.root / f"{name.replace('.', '/')}.py"
        if file.with_suffix("").is_dir():
            spec = importlib.machinery.ModuleSpec(name, StandIn(None), is_package=True)
            spec.submodule_search_locations = [str(file.with_suffix(""))]
            return spec
        if name in REAL and file.exists():
            return importlib.util.spec_from_file_location(name, file)
        return importlib.machinery.ModuleSpec(name, StandIn(file)) if file.exists() else None


@dataclass
class MultipleOf:
    base: int


def backend(root: Path, file: str, name: str) -> Any:
    """Return an attention backend that has nothing but the layout, from the release's source."""
    wanted = ("get_name", "get_kv_cache_shape", "get_kv_cache_stride_order", "get_supported_kernel_block_sizes")
    tree = ast.parse((root / "vllm/v1/attention/backends" / file).read_text())
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    found.bases = []
    found.body = [node for node in found.body if isinstance(node, ast.FunctionDef) and node.name in wanted]
    future = ast.parse("from __future__ import annotations").body
    config = SimpleNamespace(
        model_config=SimpleNamespace(is_hybrid=True),
        cache_config=SimpleNamespace(mamba_ssm_cache_dtype="auto", mamba_cache_dtype="auto"),
    )
    namespace: dict[str, Any] = {
        "MultipleOf": MultipleOf,
        "get_kv_cache_layout": lambda: "NHD",
        "get_current_vllm_config": lambda: config,
        "get_current_vllm_config_or_none": lambda: None,
        "kv_cache_uses_per_token_head_scales": lambda _: False,
        "current_platform": SimpleNamespace(is_device_capability_family=lambda _: False),
    }
    exec(compile(ast.Module([*future, found], []), file, "exec"), namespace)
    return namespace[name]


def make(cls: Any, **values: Any) -> Any:
    """Make a spec with those of `values` that the release's class has."""
    return cls(**{field.name: values[field.name] for field in fields(cls) if field.name in values})


class Specs:
    """Makes specs of a release's classes."""

    def __init__(self, interface: Any) -> None:
        self.interface = interface

    def attention(self, block_size: int = 16, kind: str = "FullAttentionSpec", **values: Any) -> Any:
        """2,048 bytes per token, but for MLA."""
        values = {"num_kv_heads": 2, "head_size": 256, "dtype": torch.bfloat16} | values
        return make(getattr(self.interface, kind), block_size=block_size, **values)

    def window(self) -> Any:
        return self.attention(kind="SlidingWindowSpec", sliding_window=64)

    def turboquant(self, block_size: int) -> Any:
        """256 bytes per token."""
        if hasattr(self.interface, "TQFullAttentionSpec"):
            return self.attention(block_size, "TQFullAttentionSpec", tq_slot_size=128)
        mode = self.interface.KVQuantMode.TURBOQUANT_4BIT_NC
        return self.attention(block_size, kv_quant_mode=mode, num_head_slots=2, state_content_bytes=128)

    def mamba(self, page: int) -> Any:
        return make(self.interface.MambaSpec, block_size=1024, shapes=((page,),), dtypes=(torch.int8,))


def config_for(architecture: str, cache_dtype: str) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(architectures=[architecture], architecture=architecture, dtype=torch.bfloat16),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
    )


def get_groups(function: Any, vllm_config: Any, specs: dict[str, Any]) -> Any:
    """Call the function as vLLM's `get_kv_cache_groups` does: with the configuration in a variable."""
    return function(specs)


def outcome(function: Any, specs: dict[str, Any], uses: Any, architecture: str, cache_dtype: str) -> dict[str, Any]:
    chosen[0] = uses
    messages.clear()
    try:
        result = get_groups(function, config_for(architecture, cache_dtype), specs)
    except Exception as error:  # noqa: BLE001 - whatever it is
        return {"error": type(error).__name__, "log": list(messages)}
    layers = {
        name: [spec.block_size, spec.page_size_bytes, getattr(spec, "page_size_padded", None)]
        for name, spec in result.items()
    }
    return {"layers": layers, "same": result is specs, "log": list(messages)}


def unpatched(module: Any) -> Any:
    """Return the module's function as the file has it."""
    tree = ast.parse(Path(module.__file__).read_text())
    name = "unify_kv_cache_spec_page_size"
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    namespace = dict(vars(module))
    exec(compile(ast.Module(found, []), module.__file__, "exec"), namespace)
    return namespace[name]


def results(root: Path) -> dict[str, Any]:
    import vllm.v1.kv_cache_interface as interface

    if (root / "vllm/v1/core/kv_cache_planning.py").exists():
        import vllm.v1.core.kv_cache_planning as module
    else:
        import vllm.v1.core.kv_cache_utils as module
    flash = backend(root, "flash_attn.py", "FlashAttentionBackend")
    triton = backend(root, "triton_attn.py", "TritonAttentionBackend")
    flashinfer = backend(root, "flashinfer.py", "FlashInferBackend")
    specs, page = Specs(interface), 131 * 8192
    attention, window, state = specs.attention, specs.window, specs.mamba(page)
    aligned, strided = attention(528), attention(indexes_kv_by_block_stride=True)
    cases: dict[str, tuple[Any, ...]] = {
        "equal pages": ({"a": attention(), "b": window()},),
        "window divides": ({"a": attention(32), "b": window()},),
        "Mamba smaller": ({"a": aligned, "m": state},),
        "Mamba smaller, divides": ({"a": aligned, "m": specs.mamba(528 * 1024)},),
        "Mamba smaller, another model": ({"a": aligned, "m": state}, None, "LlamaForCausalLM"),
        "Mamba and attention smaller": ({"a": aligned, "b": attention(), "m": state},),
        "attention smaller, FlashAttention": ({"a": attention(), "m": state}, flash),
        "attention smaller, Triton": ({"a": attention(), "m": state}, triton),
        "attention smaller, FlashInfer": ({"a": attention(), "m": state}, flashinfer),
        "attention smaller, FlashInfer splits": ({"a": attention(48), "m": state}, flashinfer),
        "attention smaller, backend unknown": ({"a": attention(), "m": state},),
        "attention smaller, by block stride": ({"a": strided, "m": state},),
        "window smaller, Triton": ({"b": window(), "m": state}, triton),
        "MLA smaller": ({"a": attention(kind="MLAAttentionSpec"), "m": state}, triton),
    }
    if (root / "vllm/v1/attention/backends/turboquant_attn.py").exists():
        quantized = backend(root, "turboquant_attn.py", "TurboQuantAttentionBackend")
        cache = "turboquant_4bit_nc"
        cases["TurboQuant smaller"] = ({"a": specs.turboquant(128), "m": state}, quantized, QWEN, cache)
        cases["TurboQuant smaller, splits"] = ({"a": specs.turboquant(528), "m": state}, quantized, QWEN, cache)
    found: dict[str, Any] = {"plain": {}, "patched": {}, "notes": {}}
    for name, (layers, *rest) in cases.items():
        arguments = [*rest, *(None, QWEN, "auto")[len(rest) :]]
        found["plain"][name] = outcome(unpatched(module), layers, *arguments)
        found["patched"][name] = outcome(module.unify_kv_cache_spec_page_size, layers, *arguments)
        entry = kvplug_hooks.status()["hybrid_page_size"]
        found["notes"][name] = [entry.state, entry.reason, entry.module]
    return found


def main() -> None:
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    logging.getLogger("vllm").addHandler(handler)
    logging.getLogger("vllm").setLevel(logging.INFO)
    for release in sys.argv[2:]:
        # A process for each, for the price of one import of torch.
        if (child := os.fork()) == 0:
            root = Path(sys.argv[1]) / release
            sys.meta_path.insert(0, Release(root))
            kvplug_hooks.install()
            print(json.dumps({"release": release, **results(root)}), flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{release} failed")


if __name__ == "__main__":
    main()
