"""Codecs by the code of others, KakeyaLattice and TurboQuant: sizes counted by hand, and what they refuse."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from tests.chunks import error

from cuvee.codec.chunk import KVChunk
from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout, LayerLayout
from cuvee.eval.baselines.kakeyalattice import KAKEYA_RANGES, KakeyaLattice
from cuvee.eval.baselines.turboquant import TurboQuant
from cuvee.eval.report.candidates import peers

pytest.importorskip("kakeyalattice", reason="needs kakeyalattice")
pytest.importorskip("fused_turboquant", reason="needs fused-turboquant")


def make(size: int = 16, tokens: int = 20) -> KVChunk:
    layout = KVLayout("synthetic", (LayerLayout(2, size, size, None),) * 2, "bfloat16", None)
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 2, tokens, 2, size, generator=generator).bfloat16()
    return KVChunk(keys, values, layout, start=3)


def coded(method: KakeyaLattice | TurboQuant, chunk: KVChunk) -> tuple[float, float]:
    """Bits per vector, and the squared error."""
    stored, bits = method.encode(chunk)
    back = method.decode(stored)
    assert (back.start, back.tokens, back.layout) == (chunk.start, chunk.tokens, chunk.layout)
    assert all(tensor.dtype == torch.bfloat16 for tensor in (*back.keys, *back.values))
    return bits / (2 * 2 * 20 * 2), error(back, chunk)


@pytest.mark.parametrize(("lattice", "dimension"), [("d4", 4), ("e8", 8)])
def test_points_of_a_lattice_take_a_fixed_number_of_bits(lattice: str, dimension: int) -> None:
    chunk, errors = make(), []
    for q_range in KAKEYA_RANGES:
        bits, lost = coded(KakeyaLattice(lattice, q_range), chunk)
        assert (bits - 32) % (16 / dimension) == 0 and 1 < (bits - 32) / 16 < 8
        errors.append(lost)
    assert all(finer < coarser for coarser, finer in pairwise(errors))


@pytest.mark.parametrize(("bits", "lost"), [(2, 0.117), (3, 0.034), (4, 0.0095)])
def test_turboquant_takes_its_bits_and_loses_what_its_paper_says(bits: int, lost: float) -> None:
    """The errors of unit vectors in theorem 1 of the paper, of which real quantizers with 64 dimensions stay short."""
    chunk = make(64)
    spent, total = coded(TurboQuant(bits), chunk)
    assert spent == 64 * bits + 32
    energy = sum(float(tensor.float().square().sum()) for tensor in (*chunk.keys, *chunk.values))
    assert 0.85 * lost < total / energy < 1.02 * lost


@pytest.mark.parametrize("method", [KakeyaLattice("e8", 10), TurboQuant(4)])
def test_a_head_of_zeros_stays_finite(method: KakeyaLattice | TurboQuant) -> None:
    chunk = make()
    chunk.keys[0][3] = 0
    back, _ = method.encode(chunk)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in (*back.keys, *back.values))
    assert not back.keys[0][3].any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: KakeyaLattice("e8", 10).encode(make(24)),
            "kakeyalattice: must get heads of a power of two .* got 24$",
        ),
        (lambda: KakeyaLattice("e8", 10).encode(make(4)), "kakeyalattice: must get heads of a power of two .* got 4$"),
        (lambda: TurboQuant(4).encode(make(12)), "turboquant: must get heads of a power of two of values, got 12$"),
        (lambda: KakeyaLattice("e7", 10), "lattice: must be one of d4, e8 with a q_range of at least 1"),
        (lambda: KakeyaLattice("e8", 0), "lattice: must be one of d4, e8 with a q_range of at least 1"),
        (lambda: TurboQuant(5), "bits: must be one of 2, 3, 4, got 5$"),
    ],
)
def test_what_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        call()


@pytest.mark.parametrize(("name", "package"), [("kakeyalattice", "kakeyalattice"), ("turboquant", "fused_turboquant")])
def test_without_its_package_the_report_leaves_a_method_out_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    mine = [candidate for candidate in peers() if candidate.key.startswith(name)]
    assert mine
    for candidate in mine:
        with pytest.raises(InputError, match=rf"^{name}: is not installed; pip install 'cuvee\[peers\]'"):
            candidate.make()


def test_the_report_makes_what_it_names() -> None:
    made = {candidate.key: candidate.make() for candidate in peers()}
    assert made["kakeyalattice/e8@38"] == KakeyaLattice("e8", 38) and made["turboquant@3"] == TurboQuant(3)
