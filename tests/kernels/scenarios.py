"""Whole chunks coded by the kernels and compared with the CPU, to test compiled code."""

from __future__ import annotations

from functools import cache

from tests.kernels.coding import apart, chunk_of, codecs, tensors

from cuvee.codec.chunk import KVChunk

SCHEMES = ("layer", "layer classes", "layer tokens", "lossless")
TOKENS = 70  # neither a multiple nor a power of anything: partial tiles everywhere
LAYOUT = "bfloat16"
CLOSE = 2.0**-6  # of the largest value: products are taken in bfloat16


@cache
def example(scheme: str, layout: str = LAYOUT, tokens: int = TOKENS) -> tuple[KVChunk, bytes, KVChunk]:
    """A chunk, the CPU's blob of it, and what the CPU reads there, moved unless it is lossless."""
    chunk = chunk_of(layout, scheme, tokens, tokens, 1)
    cpu, _ = codecs(layout, scheme)
    blob = cpu.encode(chunk)
    return chunk, blob, cpu.decode(blob, None if scheme == "lossless" else 1000)


def decodes(scheme: str, layout: str = LAYOUT, tokens: int = TOKENS) -> None:
    """Fail unless the kernels read the CPU's blob as the CPU does."""
    _, blob, want = example(scheme, layout, tokens)
    got = codecs(layout, scheme)[1].decode(blob, want.start)
    assert apart(tensors(got), tensors(want)) <= (0 if scheme == "lossless" else CLOSE)


def encodes(scheme: str, layout: str = LAYOUT, tokens: int = TOKENS) -> bytes:
    """Fail unless the CPU reads the kernels' blob, finds in it what it finds in its own, and it is no larger.

    Lossless blobs are the same bytes; in others a level here and there is the neighbor, as sums are in another order.
    """
    chunk, blob, want = example(scheme, layout, tokens)
    cpu, gpu = codecs(layout, scheme)
    mine = gpu.encode(chunk)
    if scheme == "lossless":
        assert mine == blob
        return mine
    assert abs(len(mine) - len(blob)) <= 0.002 * len(blob) + 8
    got = cpu.decode(mine, 1000)
    for a, b in zip(tensors(got), tensors(want), strict=True):
        assert float((a != b).double().mean()) < 0.05
    assert apart(tensors(got), tensors(want)) < 0.05
    return mine
