"""`cuvee warmup`: compile the codec before it is needed."""

from __future__ import annotations

import typer

DTYPES = ("bfloat16", "float32")
_TOKENS, _HEAD = 64, 48  # vectors of 16 values, and some more
_MOVED = 5


def warmup() -> None:
    """Compile the codec's loops into the cache that later processes read, so that no request waits for it.

    Without it, the first chunks that are coded on a machine wait up to twenty seconds. The cache is `NUMBA_CACHE_DIR`,
    or beside the installed package, or in the user's cache folder. It serves CPUs of the kind that it is made on.

    Example: cuvee warmup
    """
    import time

    from cuvee.codec.stages.compiled.compiler import cache_folder
    from cuvee.codec.stages.compiled.token_order import sort_columns

    folder = cache_folder(sort_columns)
    for dtype in DTYPES:
        typer.echo(f"{dtype} ... ", nl=False)
        began = time.perf_counter()
        code(dtype)
        typer.echo(f"{time.perf_counter() - began:.1f} s")
    typer.echo(f"compiled code: {folder}")


def code(dtype: str) -> None:
    """Code noise in every way that a CPU does: losslessly, and with a profile whose tokens have several classes."""
    from dataclasses import replace

    import numpy as np
    import torch

    from cuvee.codec.chunk import KVChunk
    from cuvee.codec.codec import Codec
    from cuvee.codec.layout import KVLayout, LayerLayout, Rope
    from cuvee.codec.profiles.class_predictor import Predictor
    from cuvee.codec.profiles.profile import Profile
    from cuvee.learning.calibrate import fit

    rope = Rope(tuple(1e4 ** (-2 * i / _HEAD) for i in range(_HEAD // 2)))
    layout = KVLayout("warmup", (LayerLayout(1, _HEAD, _HEAD, rope),), dtype, None)
    noise = torch.Generator().manual_seed(0)

    def chunk(tokens: int) -> KVChunk:
        keys, values = (torch.randn(1, tokens, 1, _HEAD, generator=noise).to(layout.torch_dtype) for _ in range(2))
        return KVChunk(keys, values, layout)

    made = fit(layout, [chunk(8 * _HEAD) for _ in range(4)], "layer")
    one = np.ones(1, np.float32)
    predictor = Predictor(np.zeros(1, np.int32), one, one, one, 0.0, 0.0, one[:0], np.ones(2, np.float32), one[:0])
    learned = tuple(replace(section, predictor=predictor) for section in made.learned)
    profile = Profile(made.layout, made.group, made.source, made.family, learned)
    # With a small step nearly all coefficients are coded, with a large one nearly none, which other loops multiply.
    lossy = (Codec(profile, step=step, threads=1) for step in (0.05, 2.0))
    for codec in (Codec.without_profile(layout, threads=1), *lossy):
        codec.decode(codec.encode(chunk(_TOKENS)), _MOVED)
