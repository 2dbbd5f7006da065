"""Fixtures of the tests that compare whole chunks of compiled kernels with the CPU's."""

from __future__ import annotations

import pytest
from tests.cpus import multiply

from cuvee.codec.stages.products import Products


@pytest.fixture
def products_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every CPU round what it multiplies to bfloat16, as kernels do, so that only the order of sums differs."""
    multiply(Products.BFLOAT16, monkeypatch)
