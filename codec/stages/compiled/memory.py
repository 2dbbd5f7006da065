"""Memory in compiled loops: arrays at an address, and bytes that are asked for before they are read.

Numba compiles a function anew for each number of arrays that it takes. Loops that serve the tensors of many layers,
however many there are, take a table of addresses instead. The caller holds the tensors until the loop returns.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import carray  # type: ignore[attr-defined, unused-ignore]  # not exported in the stubs of numba 0.68
from numba.core import cgutils, types

from cuvee.codec.stages.compiled.compiler import inner
from cuvee.codec.stages.compiled.simd import INT32, Code, spelled_out

_LINE = 64  # bytes


@spelled_out
def _pointer(typing: Any, address):  # type: ignore[no-untyped-def]
    """Return an integer as a pointer."""

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


@inner
def array_at(address, size, alike):  # type: ignore[no-untyped-def]
    """Return the `size` entries at an address as an array, of the dtype of the array `alike`."""
    return carray(_pointer(address), (size,), alike.dtype)


@spelled_out
def _fetch_line(typing: Any, array, at):  # type: ignore[no-untyped-def]
    """Ask for the cache line of byte `at` of a uint8 array."""
    signature = types.void(array, at)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        code = Code(context, builder, sig.args, values)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, INT32, INT32, INT32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        read, keep, of_data = INT32(0), INT32(3), INT32(1)
        builder.call(function, [code.pointer(0, 1, 1), read, keep, of_data])
        return context.get_dummy_value()

    return signature, generate


@inner
def fetch(array, begin, end):  # type: ignore[no-untyped-def]
    """Ask for the bytes `begin … end - 1` of a uint8 array, where the CPU cannot foresee that they are read."""
    for at in range(begin, end, _LINE):
        _fetch_line(array, at)
    if begin < end:
        _fetch_line(array, end - 1)
