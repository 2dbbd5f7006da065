"""Decoding takes time linear in a blob's bytes: sections are read once, however many tiles they have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.classed import with_classes
from tests.codec.reference import get_stages

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.cpu.backend import CpuBackend
from cuvee.codec.format.container import read_header
from cuvee.codec.layout import KVLayout, LayerLayout, Rope
from cuvee.codec.profiles.profile import Profile
from cuvee.learning.calibrate import fit

LAYOUT = KVLayout("mine", (LayerLayout(1, 8, 8, Rope((1.0,) * 4)),) * 2, "bfloat16", None)
SCHEMES = ("classes", "lossless")


def chunk_of(tokens: int) -> KVChunk:
    """Few values of each window are outliers, which are coded as escapes."""
    noise = torch.Generator().manual_seed(tokens)
    units = [torch.randn(tokens, 1, 8, generator=noise) for _ in range(4)]
    for unit in units:
        unit[::97] *= 200
    return KVChunk([unit.bfloat16() for unit in units[:2]], [unit.bfloat16() for unit in units[2:]], LAYOUT)


@pytest.fixture(scope="module")
def learned() -> Profile:
    noise = torch.Generator().manual_seed(1)
    tensors = [[torch.randn(256, 1, 8, generator=noise).bfloat16() for _ in range(2)] for _ in range(16)]
    return fit(LAYOUT, [KVChunk(tensors[i], tensors[i + 8], LAYOUT) for i in range(8)], "layer")


@pytest.fixture
def coded(learned: Profile) -> Callable[[str, int], tuple[Codec, bytes]]:
    def encode(scheme: str, tokens: int) -> tuple[Codec, bytes]:
        profile = with_classes(learned, torch.arange(1024) % 7 + 1) if scheme == "classes" else learned
        codec = Codec(profile, "lossless", threads=1) if scheme == "lossless" else Codec(profile, step=0.3, threads=1)
        return codec, codec.encode(chunk_of(tokens))

    return encode


@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_section_is_read_once(coded: Any, scheme: str) -> None:
    codec, blob = coded(scheme, 2048)
    header = read_header(blob)
    stages, read, tiles = get_stages("numba"), Counter[int](), Counter[str]()

    def index_sections(coding: Any, parts: Any, count: int) -> Any:
        read.update(len(data) for _, data in parts)
        return stages.index_sections(coding, parts, count)

    def index_layers(sections: Any, *arguments: Any) -> Any:
        read.update(map(len, sections))
        return stages.index_layers(sections, *arguments)

    def tile(kind: str) -> Callable[..., Any]:
        def decode(index: Any, *arguments: Any) -> Any:
            tiles[kind] += 1
            return getattr(stages, kind)(index, *arguments)

        return decode

    watched = {
        "index_sections": index_sections, "index_layers": index_layers, "decode_sections": tile("decode_sections"),
        "decode_layers": tile("decode_layers"),
    }  # fmt: skip
    counted: Any = SimpleNamespace(**vars(stages) | watched)
    codec._backends._instances["cpu"] = CpuBackend(counted, 1)
    codec.decode(blob)
    assert read == Counter(header.section_bytes)
    if scheme == "lossless":
        assert tiles == {"decode_layers": 1}, "its tiles are a loop of compiled code"
    else:
        assert tiles["decode_sections"] > len(header.section_bytes), "several tiles"
