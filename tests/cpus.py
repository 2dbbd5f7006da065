"""Other CPUs than the one that runs the tests."""

from __future__ import annotations

import pytest

from cuvee.codec.stages import products
from cuvee.codec.stages.products import Products


def multiply(kind: Products, monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply caches of bfloat16 as CPUs of this kind do."""
    monkeypatch.setattr(products, "MATRIX_INSTRUCTIONS", kind is Products.BFLOAT16)
    monkeypatch.setattr(products, "FAST_BFLOAT16", kind in (Products.MIXED, Products.BFLOAT16))
    monkeypatch.setattr(products, "FAST_INT16", kind is Products.INT16)
