"""The changes to Triton that let vLLM's second model runner run on a CPU. See the package's docstring."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class _CpuDriver:
    """Stands for the driver of a CPU target: vLLM looks for the backend's name, some kernels for the target."""

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> SimpleNamespace:
        return SimpleNamespace(backend="cpu", arch="cpu", warp_size=1)


def install() -> None:
    """Make Triton interpret its kernels and offer a "cpu" backend. Call it before Triton or vLLM is imported."""
    os.environ["TRITON_INTERPRET"] = "1"  # read while kernels are decorated, so before any is imported

    import triton.backends
    from triton.runtime.interpreter import InterpreterBuilder

    triton.backends.backends["cpu"] = SimpleNamespace(compiler=None, driver=_CpuDriver)
    # Compiled Triton takes integers as masks (vLLM's grammar and n-gram kernels pass them), the interpreter does not.
    InterpreterBuilder.create_masked_load = _with_boolean_mask(InterpreterBuilder.create_masked_load, 1)
    InterpreterBuilder.create_masked_store = _with_boolean_mask(InterpreterBuilder.create_masked_store, 2)


def _with_boolean_mask(method: Callable[..., Any], position: int) -> Callable[..., Any]:
    from triton.language import int1
    from triton.runtime.interpreter import TensorHandle

    def call(self: Any, *args: Any) -> Any:
        changed = list(args)
        changed[position] = TensorHandle(args[position].data.astype(bool), int1)
        return method(self, *changed)

    return call
