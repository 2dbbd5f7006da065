"""The golden vectors: where they lie, what they hold and who reads them. `test_golden.py` checks and writes them."""

from __future__ import annotations

from pathlib import Path

import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.layout import KVLayout, LayerLayout, Rope
from cuvee.codec.profiles.profile import Profile

FOLDER = Path(__file__).parent / "golden"
PROFILE, MANIFEST, EXPECTED = FOLDER / "profile.safetensors", FOLDER / "manifest.json", FOLDER / "expected.safetensors"
DTYPES = ("bfloat16", "float16", "float32")
# "classes": learned, with a class for each token that depends on its position. "tokens": learned, with token ids.
SCHEMES = ("lossless", "transform", "classes", "tokens")
NAMES = tuple(f"{scheme}-{dtype}" for scheme in SCHEMES for dtype in DTYPES)
# Of the chunks, kept over versions of the format, though a scheme went.
SEEDS = {name: 100 + number + (3 if name.startswith(("classes", "tokens")) else 0) for number, name in enumerate(NAMES)}
# A base and its refinement, of many classes and with token ids.
PARTS = tuple(FOLDER / f"{part}-float32.bin" for part in ("base", "refinement"))
LOSSY = tuple(name for name in NAMES if not name.startswith("lossless"))

ROPE = Rope((1.0, 0.1, 0.01, 0.001))
LAYOUT = KVLayout("golden", (LayerLayout(1, 8, 8, ROPE), LayerLayout(2, 8, 8, ROPE)), "float32", 4096)
STEP = 2.0**-5
KEY = b"golden vectors' key"  # of the vectors in float16


def golden_chunk(seed: int, tokens: int, start: int, outlier: float = 0.0) -> KVChunk:
    """Correlated channels, tokens that resemble the one before, a sink at position 0, and one value that escapes."""
    noise, fixed = (torch.Generator().manual_seed(s) for s in (seed, 4711))
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    for layer in LAYOUT.layers:
        for out in (keys, values):
            width = layer.kv_heads * 8
            mixing = torch.randn(width, width, generator=fixed) * torch.logspace(0.5, -2.5, width)[:, None]
            x = torch.randn(tokens, width, generator=noise)
            for t in range(1, tokens):
                x[t] = 0.95 * x[t - 1] + 0.31 * x[t]
            x = x @ mixing
            x[tokens // 2, 1] += outlier
            if start == 0:
                x[0] = 40.0
            out.append(x.unflatten(1, (layer.kv_heads, 8)))
    return KVChunk(keys, values, LAYOUT, start)


def golden_codec(name: str, profile: Profile, backend: str = "auto") -> Codec:
    """Who wrote the vector of this name, and reads it."""
    key = KEY if name.endswith("-float16") else None
    if name.startswith("lossless"):
        return Codec(profile, "lossless", backend=backend, threads=1, key=key)
    return Codec(profile, step=STEP, backend=backend, threads=1, key=key)
