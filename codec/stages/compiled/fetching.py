"""Ask for bytes before they are read, where the CPU cannot foresee the order in which they are."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from cuvee.codec.stages.compiled.compiler import inner
from cuvee.codec.stages.compiled.simd import INT32, Code, spelled_out

_LINE = 64  # bytes


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
    """Ask for the bytes `begin … end - 1` of a uint8 array."""
    for at in range(begin, end, _LINE):
        _fetch_line(array, at)
    if begin < end:
        _fetch_line(array, end - 1)
