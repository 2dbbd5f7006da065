"""KakeyaLattice by its own code: sizes counted by hand, and what it refuses."""

from __future__ import annotations

import sys
from itertools import pairwise

import pytest
import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout, LayerLayout
from cuvee.eval.baselines.kakeyalattice import KAKEYA_RANGES, KakeyaLattice
from cuvee.eval.report.candidates import peers

pytest.importorskip("kakeyalattice", reason="needs kakeyalattice")


def make(size: int = 16, tokens: int = 20) -> KVChunk:
    layout = KVLayout("synthetic", (LayerLayout(2, size, size, None),) * 2, "bfloat16", None)
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 2, tokens, 2, size, generator=generator).bfloat16()
    return KVChunk(keys, values, layout, start=3)


def error(a: KVChunk, b: KVChunk) -> float:
    return sum(
        float((x.float() - y.float()).square().sum())
        for x, y in zip((*a.keys, *a.values), (*b.keys, *b.values), strict=True)
    )


@pytest.mark.parametrize(("lattice", "dimension"), [("d4", 4), ("e8", 8)])
def test_points_take_a_fixed_number_of_bits(lattice: str, dimension: int) -> None:
    chunk = make()
    errors = []
    for q_range in KAKEYA_RANGES:
        method = KakeyaLattice(lattice, q_range)
        stored, bits = method.encode(chunk)
        back = method.decode(stored)
        assert (back.start, back.tokens, back.layout) == (chunk.start, chunk.tokens, chunk.layout)
        assert all(tensor.dtype == torch.bfloat16 for tensor in (*back.keys, *back.values))
        vectors = 2 * 2 * 20 * 2
        points = bits / vectors - 32
        assert points % (16 / dimension) == 0 and 1 < points / 16 < 8
        errors.append(error(back, chunk))
    assert all(finer < coarser for coarser, finer in pairwise(errors))


def test_a_head_of_zeros_stays_finite() -> None:
    chunk = make()
    chunk.keys[0][3] = 0
    back, _ = KakeyaLattice("e8", 10).encode(chunk)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in (*back.keys, *back.values))


@pytest.mark.parametrize(("lattice", "size"), [("d4", 12), ("e8", 24), ("e8", 4)])
def test_heads_of_other_sizes_are_refused(lattice: str, size: int) -> None:
    with pytest.raises(InputError, match=f"^kakeyalattice: must get heads of a power of two .* got {size}$"):
        KakeyaLattice(lattice, 10).encode(make(size))


@pytest.mark.parametrize(("lattice", "q_range"), [("e7", 10), ("e8", 0), ("e8", 1.5)])
def test_other_lattices_and_ranges_are_refused(lattice: str, q_range: int) -> None:
    with pytest.raises(InputError, match=r"^lattice: must be one of d4, e8 with a q_range of at least 1"):
        KakeyaLattice(lattice, q_range)


def test_without_the_package_the_report_leaves_it_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kakeyalattice", None)
    for candidate in peers():
        with pytest.raises(InputError, match=r"^kakeyalattice: is not installed; pip install cuvee\[peers\]"):
            candidate.make()


def test_the_report_names_every_setting() -> None:
    assert [candidate.key for candidate in peers()][:2] == ["kakeyalattice/d4@4", "kakeyalattice/d4@10"]
    assert {candidate.label for candidate in peers()} == {"KakeyaLattice, D4", "KakeyaLattice, E8"}
    assert all(candidate.kind == "curve" for candidate in peers())
    (method,) = [candidate.make() for candidate in peers() if candidate.key == "kakeyalattice/e8@38"]
    assert method == KakeyaLattice("e8", 38)
