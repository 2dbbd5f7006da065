"""Other CPUs than the one that runs the tests."""

from __future__ import annotations

import llvmlite.binding as llvm
import pytest

from cuvee.codec.stages import products
from cuvee.codec.stages.products import Products

needs_avx2 = pytest.mark.skipif(
    not llvm.get_host_cpu_features().get("avx2"), reason="the compiled loop's products of integers are those of AVX2"
)


def multiply(kind: Products, monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply caches of bfloat16 as CPUs of this kind do."""
    monkeypatch.setattr(products, "MATRIX_INSTRUCTIONS", kind is Products.BFLOAT16)
    monkeypatch.setattr(products, "FAST_BFLOAT16", kind in (Products.MIXED, Products.BFLOAT16))
    monkeypatch.setattr(products, "FAST_INT16", kind is Products.INT16)
