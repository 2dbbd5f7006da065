"""Compiled conversion between float32 and the bits of bfloat16."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba.core import types
from numba.extending import overload

LARGEST_BFLOAT16, LARGEST_FLOAT32 = float(torch.finfo(torch.bfloat16).max), float(np.finfo(np.float32).max)


def to_float(value: Any) -> Any:
    """Return a float32, or the float32 that the uint16 bits of a bfloat16 stand for."""


def rounded(value: Any, out: Any) -> Any:
    """Return a float32 as the array `out` holds it: unchanged, or rounded to the bits of a bfloat16, ties to even."""


def saturated(value: Any, out: Any) -> Any:
    """Do what `rounded` does, within the range of `out`: instead of infinite, a number is the largest of its range."""


@overload(to_float)
def _to_float(value):  # type: ignore[no-untyped-def]
    if isinstance(value, types.Integer):
        return lambda value: np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)
    return lambda value: value


@overload(rounded)
def _rounded(value, out):  # type: ignore[no-untyped-def]
    if not isinstance(out.dtype, types.Integer):
        return lambda value, out: value

    def to_nearest(value, out):  # type: ignore[no-untyped-def]
        # Values are finite or infinite: there is no NaN whose payload could carry.
        v = np.float32(value).view(np.uint32)
        return np.uint16((v + np.uint32(0x7FFF) + ((v >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))

    return to_nearest


@overload(saturated)
def _saturated(value, out):  # type: ignore[no-untyped-def]
    limit = np.float32(LARGEST_BFLOAT16 if isinstance(out.dtype, types.Integer) else LARGEST_FLOAT32)

    def within(value, out):  # type: ignore[no-untyped-def]
        v = np.float32(value)
        v = limit if v > limit else v
        return rounded(-limit if v < -limit else v, out)

    return within
