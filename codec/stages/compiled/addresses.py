"""Arrays at an address: so one compiled loop serves the tensors of many layers, however many there are.

Numba compiles a function anew for each number of arrays that it takes. Instead, loops take a table of addresses. The
caller holds the tensors until the loop returns.
"""

from __future__ import annotations

from typing import Any

from numba import carray  # type: ignore[attr-defined, unused-ignore]  # not exported in the stubs of numba 0.68
from numba.core import cgutils, types

from cuvee.codec.stages.compiled.compiler import inner
from cuvee.codec.stages.compiled.simd import spelled_out


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
