"""Blobs with right checksums and wrong contents: what tests of hostile input and the fuzzer forge them with."""

from __future__ import annotations

import struct
from functools import cache
from itertools import pairwise

import torch
from tests.classed import with_classes
from xxhash import xxh3_64_intdigest

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.format.container import read_header
from cuvee.codec.layout import KVLayout, LayerLayout, Rope
from cuvee.codec.profiles.profile import Profile
from cuvee.learning.calibrate import fit

HEADER = 88  # bytes before the table of contents
ENTRY = 13  # bytes for each section there
OFFSETS = {"version": 4, "kind": 5, "dtype": 6, "tokens": 8, "start": 12, "values": 16, "step": 20, "count": 24}

ROPE = Rope((1.0, 0.1, 0.01, 0.001))
LAYOUT = KVLayout("tiny", (LayerLayout(1, 8, 8, ROPE), LayerLayout(2, 8, 8, ROPE)), "bfloat16", 4096)


def sections_of(blob: bytes) -> list[bytes]:
    """The sections, without what lies before them and the tag after them."""
    header = read_header(blob)
    starts = [header.section_offset(index) for index in range(len(header.section_bytes) + 1)]
    return [blob[a:b] for a, b in pairwise(starts)]


def reseal(blob: bytes, sections: list[bytes] | None = None, scheme: int | None = None, **fields: int) -> bytes:
    """The blob with other header fields (`OFFSETS`), sections or scheme; checksums and lengths are made right again."""
    parts = sections_of(blob) if sections is None else sections
    head = bytearray(blob[:HEADER])
    for name, value in fields.items():
        width = 4 if name in ("tokens", "start", "values", "step", "count") else 1
        head[OFFSETS[name] : OFFSETS[name] + width] = (value & 0xFFFFFFFF).to_bytes(width, "little")
    head[80:88] = (HEADER + ENTRY * len(parts) + 8 + sum(map(len, parts))).to_bytes(8, "little")
    for part in parts:
        head += struct.pack("<IBQ", len(part), blob[HEADER + 4] if scheme is None else scheme, xxh3_64_intdigest(part))
    return bytes(head) + struct.pack("<Q", xxh3_64_intdigest(bytes(head))) + b"".join(parts)


def with_section(blob: bytes, section: bytes, index: int = 0) -> bytes:
    """The blob with another section in the place of one, resealed."""
    sections = sections_of(blob)
    sections[index] = section
    return reseal(blob, sections)


def reseal_header(blob: bytes, count: int) -> bytes:
    """The blob with the checksum of its header made right, whatever else that says; `count` sections are listed."""
    end = HEADER + ENTRY * count
    return blob[:end] + struct.pack("<Q", xxh3_64_intdigest(blob[:end])) + blob[end + 8 :]


TOKENS, START = 20, 3
WEIGHTS = [2.0 ** (11 * t % 20 - 10) for t in range(TOKENS - 1)] + [2.0**60]  # the last token is of the finest class


def correlated_chunk(seed: int, tokens: int, start: int, layout: KVLayout = LAYOUT, outlier: float = 0.0) -> KVChunk:
    """Channels that go together and tokens that resemble the one before; the same mixing for every seed."""
    noise, fixed = (torch.Generator().manual_seed(s) for s in (seed, 999))
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    for layer in layout.layers:
        for out, size in ((keys, layer.head_dim), (values, layer.value_dim)):
            width = layer.kv_heads * size
            mixing = torch.randn(width, width, generator=fixed) * torch.logspace(0.5, -2, width)[:, None]
            x = torch.randn(tokens, width, generator=noise)
            for t in range(1, tokens):
                x[t] = 0.9 * x[t - 1] + 0.44 * x[t]
            x = x @ mixing
            x[tokens // 2, 1] += outlier
            out.append(x.unflatten(1, (layer.kv_heads, size)).to(layout.torch_dtype))
    return KVChunk(keys, values, layout, start)


@cache
def learned(layout: KVLayout = LAYOUT) -> Profile:
    """Fitted to correlated chunks."""
    tokens = max(64, 2 * layout.values_per_token // layout.num_layers)
    return fit(layout, [correlated_chunk(seed, tokens, 7 * seed, layout) for seed in range(7)], "layer")


@cache
def codec_of(scheme: str, backend: str = "auto", step: float = 0.04, layout: KVLayout = LAYOUT) -> Codec:
    """Of "lossless", "classes", or anything else that is learned; one thread."""
    if scheme == "lossless":
        return Codec(Profile.unlearned(layout), "lossless", backend=backend, threads=1)
    profile = with_classes(learned(layout), WEIGHTS, START) if scheme == "classes" else learned(layout)
    return Codec(profile, step=step, backend=backend, threads=1)
