"""In which dtypes a CPU multiplies: what its instructions make fast."""

from __future__ import annotations

import os
import re
from enum import Enum

import llvmlite.binding as llvm
import torch

from cuvee.codec.layout import KVLayout
from cuvee.codec.support.arrays import F32

SLAB = 64  # rows of a map that share a decision: 32 KiB of a tile of `compiled/product.py`
# Share of coefficients other than zero from which on a dense product of bfloat16, or of integers, is faster.
DENSE_BFLOAT16, DENSE_INT16 = 0.25, 0.4
# A product is as deep as its finest column. Every 32 columns it ends if the next one needs less than this
# share of its depth: shallower products have fewer operations, but more calls, and more shapes, cost time, too.
PRODUCT_DEPTH, PRODUCT_COLUMNS = 0.75, 32


def _may_use_avx512() -> bool:
    """Return whether torch uses AVX-512 or more: `ATEN_CPU_CAPABILITY=avx2` forbids it."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


MATRIX_INSTRUCTIONS = _may_use_avx512() and bool(torch.cpu._is_amx_tile_supported())


def _is_bfloat16_fast() -> bool:
    """Return whether products of bfloat16 take half the time of those of float32.

    Instructions for them are not enough. One core of a Xeon virtual machine without AMX reaches 85 GFLOP/s in bfloat16
    and 160 in float32; one of an EPYC (Zen 4) reaches 212 and 98.
    """
    generation = re.fullmatch(r"znver(\d+)", llvm.get_host_cpu_name())
    instructions = llvm.get_host_cpu_features().get("avx512bf16", False)
    zen4 = generation is not None and int(generation[1]) >= 4 and instructions
    return zen4 and _may_use_avx512() and torch.backends.mkldnn.is_available()


FAST_BFLOAT16 = _is_bfloat16_fast()


def _numba_has_avx2() -> bool:
    """Return whether Numba compiles for a CPU with AVX2: `NUMBA_CPU_NAME` and `NUMBA_CPU_FEATURES` may name another."""
    name, features = os.environ.get("NUMBA_CPU_NAME"), os.environ.get("NUMBA_CPU_FEATURES")
    if switched := re.findall(r"([+-])avx2\b", features or ""):
        return bool(switched[-1] == "+")
    if name not in (None, "host"):
        return re.match(r"haswell|broadwell|skylake|icelake|\w+lake|znver|core-avx2|x86-64-v[34]", name) is not None
    return not features and bool(llvm.get_host_cpu_features().get("avx2", False))


# With AVX2 alone, sums of products of 16-bit integers take half the time of those of float32.
FAST_INT16 = torch.backends.cpu.get_cpu_capability() == "AVX2" and _numba_has_avx2()


class Products(Enum):
    """How a CPU multiplies coefficients to values, and values to coefficients.

    A bfloat16 cache is no finer than a bfloat16 product. An encoder computes the largest coefficients in float32 all
    the same.
    """

    FLOAT32 = "float32"
    INT16 = "int16"  # dense products of 16-bit integers; those to values in compiled loops alone; others of float32
    MIXED = "mixed"  # dense products of bfloat16, sparse ones of float32
    BFLOAT16 = "bfloat16"  # with matrix instructions, which make a dense product faster than one that skips zeros

    @property
    def coefficients(self) -> torch.dtype:
        """The dtype of the coefficients that a decoder multiplies."""
        return torch.bfloat16 if self is Products.BFLOAT16 else torch.float32

    @property
    def dense(self) -> torch.dtype:
        """The dtype of dense products."""
        return torch.bfloat16 if self in (Products.MIXED, Products.BFLOAT16) else torch.float32

    def leading_rows(self, share: F32, rows: int) -> int:
        """Return how many of a block's rows a dense product in fewer bits serves beside products of float32.

        Those are the leading slabs in which few coefficients are expected to be zero, whatever they are. So the values
        of a token do not depend on the other tokens that are decoded.

        Args:
            share: of each component the expected share of coefficients that are not zero.
        """
        dense = {Products.MIXED: DENSE_BFLOAT16, Products.INT16: DENSE_INT16}.get(self)
        if dense is None:
            return 0
        for first in range(0, min(len(share), rows), SLAB):
            if share[first : first + SLAB].mean() < dense:
                return first
        return rows


def products_for(layout: KVLayout) -> Products:
    """Return how this CPU multiplies for caches of a layout."""
    if layout.torch_dtype != torch.bfloat16:
        return Products.FLOAT32
    if MATRIX_INSTRUCTIONS:
        return Products.BFLOAT16
    if FAST_BFLOAT16:
        return Products.MIXED
    return Products.INT16 if FAST_INT16 else Products.FLOAT32
