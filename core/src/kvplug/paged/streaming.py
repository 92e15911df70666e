"""A memcpy for many runs of bytes that goes around the CPU's caches.

A plain store first reads the cache line that it overwrites, so a copy that doesn't fit into the cache moves each byte
three times over the memory bus instead of twice. libc's `memcpy` avoids that for copies of tens of megabytes only; a
block of KV comes in pieces of tens of kilobytes. So here is a loop with non-temporal stores, compiled by llvmlite, the
compiler that comes with numba and so with vLLM.
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from kvplug.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

__all__ = ["LINE", "StreamingCopy", "streaming_copy"]

logger = get_logger(__name__)

#: Bytes of a cache line. Only whole lines can be streamed, so addresses and lengths must be multiples of it.
LINE = 64


class StreamingCopy:
    """Copies runs of bytes from address to address, without the interpreter's lock."""

    def __init__(self, function: Callable[[int, int, int, int], object], owner: object) -> None:
        """Wrap the compiled function, whose code is there as long as its owner. Use `streaming_copy`."""
        self._function = function
        self._owner = owner

    def __call__(self, targets: NDArray[np.uintp], sources: NDArray[np.uintp], sizes: NDArray[np.uintp]) -> None:
        """Copy. Nothing is checked: a wrong address ends the process.

        Args:
            targets: Addresses to write to.
            sources: As many addresses to read from.
            sizes: As many lengths in bytes, all at least `LINE`.

        """
        self._function(targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data, targets.size)


@cache
def streaming_copy() -> StreamingCopy | None:
    """Compile the loop for this machine, in some 20 ms. None, with a line in the log, where that can't be done."""
    try:
        return _compile()
    except ImportError:
        logger.info("kvplug: blocks are copied by numpy; with llvmlite, a part of numba, copies would be faster")
    except Exception as error:  # noqa: BLE001 - LLVM may not know this CPU, and numpy does the same
        logger.warning("kvplug: blocks are copied by numpy, since LLVM can't compile a faster way: %s", error)
    return None


def _compile() -> StreamingCopy:
    from llvmlite import binding, ir

    _let_be_inspected(binding)
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), opt=2
    )
    compiler = binding.create_mcjit_compiler(binding.parse_assembly(str(_module(ir))), machine)
    compiler.finalize_object()
    word = ctypes.c_void_p
    function = ctypes.CFUNCTYPE(None, word, word, word, ctypes.c_size_t)(compiler.get_function_address("copy"))
    return StreamingCopy(function, compiler)


def _let_be_inspected(binding: Any) -> None:
    """Give llvmlite's wrapper of its library an empty ``__dict__``.

    The wrapper makes a function of every name it is asked for, also of this one. vLLM 0.32 reads the ``__dict__`` of
    everything in every module whenever a CPU engine starts: after a plain import of llvmlite, by us or by numba, no
    further engine would start in this process.
    """
    with suppress(AttributeError, TypeError):  # a release of llvmlite without such a wrapper
        wrapper = binding.ffi.lib
        if not isinstance(vars(wrapper), dict):
            wrapper._fntab["__dict__"] = {}  # noqa: SLF001 - there is no public way


def _module(ir: Any) -> Any:
    """Return `void copy(size_t *targets, size_t *sources, size_t *sizes, size_t count)`, as LLVM takes it."""
    size_t = ir.IntType(64)
    line = ir.VectorType(size_t, LINE // 8)  # LLVM splits it into what the CPU has
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [size_t] * 4), "copy")
    builder = ir.IRBuilder(function.append_basic_block())
    targets, sources, sizes, count = function.args

    def item(array: Any, index: Any) -> Any:
        address = builder.add(array, builder.mul(index, size_t(8)))
        return builder.load(builder.inttoptr(address, size_t.as_pointer()))

    def line_at(address: Any, offset: Any) -> Any:
        return builder.inttoptr(builder.add(address, offset), line.as_pointer())

    with _loop(builder, count, 1) as run:
        target, source = item(targets, run), item(sources, run)
        with _loop(builder, item(sizes, run), LINE) as offset:
            content = builder.load(line_at(source, offset), align=LINE)
            store = builder.store(content, line_at(target, offset), align=LINE)
            store.set_metadata("nontemporal", module.add_metadata([ir.IntType(32)(1)]))
    builder.fence("seq_cst")  # such stores are not ordered against others
    builder.ret_void()
    return module


@contextmanager
def _loop(builder: Any, end: Any, step: int) -> Iterator[Any]:
    """Emit `for (i = 0; i < end; i += step)` around what is emitted inside; gives `i`."""
    before = builder.block
    head, body, after = (builder.append_basic_block() for _ in range(3))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(end.type)
    index.add_incoming(end.type(0), before)
    builder.cbranch(builder.icmp_unsigned("<", index, end), body, after)
    builder.position_at_end(body)
    yield index
    index.add_incoming(builder.add(index, end.type(step)), builder.block)
    builder.branch(head)
    builder.position_at_end(after)
