"""Compile all that coding on a CPU needs before it is needed, into the cache that later processes read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.layout import KVLayout, LayerLayout, Rope
from cuvee.codec.learning.calibrate import fit
from cuvee.codec.profiles.class_predictor import Predictor
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.stages.compiled import compiler
from cuvee.codec.stages.compiled.token_order import sort_columns

DTYPES = ("bfloat16", "float32")
_TOKENS, _HEAD = 64, 48  # vectors of 16 values, and some more
_MOVED = 5


def cache_folder() -> Path:
    """Return the folder that receives the compiled code.

    Raises:
        OSError: there is none that this process can write.
    """
    return compiler.cache_folder(sort_columns)


def steps() -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the name of each step, and what does it."""
    for dtype in DTYPES:
        yield f"lossless, {dtype}", partial(_lossless, dtype)
        yield f"with a profile, {dtype}", partial(_with_profile, dtype)


def _layout(dtype: str) -> KVLayout:
    rope = Rope(tuple(1e4 ** (-2 * i / _HEAD) for i in range(_HEAD // 2)))
    return KVLayout("warmup", (LayerLayout(1, _HEAD, _HEAD, rope),), dtype, None)


def _chunk(dtype: str, tokens: int, seed: int) -> KVChunk:
    layout, noise = _layout(dtype), torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(1, tokens, 1, _HEAD, generator=noise).to(layout.torch_dtype) for _ in range(2))
    return KVChunk(keys, values, layout)


def _lossless(dtype: str) -> None:
    chunk = _chunk(dtype, _TOKENS, 0)
    codec = Codec.without_profile(chunk.layout, threads=1)
    codec.decode(codec.encode(chunk), _MOVED)


def _with_profile(dtype: str) -> None:
    chunk, profile = _chunk(dtype, _TOKENS, 0), _profile(dtype)
    for step in (0.05, 2.0):  # nearly all coefficients are coded, or nearly none, which other loops multiply
        codec = Codec(profile, step=step, threads=1)
        codec.decode(codec.encode(chunk), _MOVED)


def _profile(dtype: str) -> Profile:
    """Return a profile whose tokens have several classes."""
    made = fit(_layout(dtype), [_chunk(dtype, 8 * _HEAD, seed) for seed in range(1, 5)], "layer")
    one = np.ones(1, np.float32)
    predictor = Predictor(np.zeros(1, np.int32), one, one, one, 0.0, 0.0, one[:0], np.ones(2, np.float32), one[:0])
    learned = tuple(replace(section, predictor=predictor) for section in made.learned)
    return Profile(made.layout, made.group, made.source, made.family, learned)
