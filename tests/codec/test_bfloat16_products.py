"""Caches of bfloat16 on CPUs that multiply bfloat16 fast: what is rounded, and what that costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import llvmlite.binding as llvm
import pytest
import torch
from tests.conftest import Books
from tests.cpus import multiply, needs_avx2

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.models.forward import prefill
from cuvee.codec.profiles.section_basis import SectionBasis
from cuvee.codec.stages import products
from cuvee.codec.stages.products import Products, products_for


@pytest.fixture
def chunk(books: Books) -> KVChunk:
    """The cache of 192 tokens in bfloat16."""
    (wide,) = prefill(books.model, books.orchard[:1, : books.prefix], books.layout)
    layout = replace(books.layout, dtype="bfloat16")
    keys, values = ([own.bfloat16() for own in kind] for kind in (wide.keys, wide.values))
    return KVChunk(keys, values, layout, 0, books.orchard[0, : books.prefix])


@pytest.mark.parametrize("kind", Products)
def test_only_caches_of_bfloat16_are_rounded(kind: Products, books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    multiply(kind, monkeypatch)
    assert products_for(replace(books.layout, dtype="bfloat16")) is kind
    for dtype in ("float32", "float16"):
        assert products_for(replace(books.layout, dtype=dtype)) is Products.FLOAT32


@pytest.mark.parametrize(
    ("name", "instructions", "expected"),
    [
        ("znver4", True, True), ("znver10", True, True), ("znver4", False, False), ("sapphirerapids", True, False),
        ("", False, False),
    ],
)  # fmt: skip
def test_cpus_with_fast_products_are_known_by_name(
    name: str, instructions: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llvm, "get_host_cpu_name", lambda: name)
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: {"avx512bf16": instructions})
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert products._is_bfloat16_fast() is expected
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
        assert not products._is_bfloat16_fast()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert not products._is_bfloat16_fast()


def coded(books: Books, chunk: KVChunk, step: float) -> tuple[bytes, list[Any]]:
    """A blob, and the arguments and results of its encoder's products."""
    calls: list[Any] = []
    multiplied = SectionBasis.coefficients

    def recorded(basis: SectionBasis, x: torch.Tensor, ranks: Any, out: Any, known: int, dtype: torch.dtype) -> Any:
        y = multiplied(basis, x, ranks, out, known, dtype)
        calls.append((known, dtype, y.clone(), multiplied(basis, x, ranks)))
        return y

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SectionBasis, "coefficients", recorded)
        return Codec(books.profile, step=step).encode(chunk), calls


@pytest.mark.parametrize("kind", [Products.MIXED, Products.BFLOAT16])
def test_an_encoder_computes_the_largest_coefficients_in_float32(
    kind: Products, books: Books, chunk: KVChunk, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply(kind, monkeypatch)
    _, calls = coded(books, chunk, 0.1)
    assert any(known < len(y) for known, _, y, _ in calls)
    for known, dtype, y, exact in calls:
        assert known > 0 and dtype == torch.bfloat16
        torch.testing.assert_close(y[:known], exact[:known], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(y, exact, rtol=0.02, atol=0.02 * float(exact.abs().max()))
        assert known >= len(y) or not torch.equal(y[known:], exact[known:])


@needs_avx2
@pytest.mark.parametrize("step", [0.05, 0.5])
def test_rounding_costs_neither_bytes_nor_error(
    step: float, books: Books, chunk: KVChunk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def error(blob: bytes, codec: Codec) -> float:
        back = codec.decode(blob)
        pairs = zip(back.keys + back.values, chunk.keys + chunk.values, strict=True)
        return float(sum(((a.float() - b.float()) ** 2).mean() / b.float().var() for a, b in pairs))

    codec = Codec(books.profile, step=step)
    multiply(Products.FLOAT32, monkeypatch)
    exact, _ = coded(books, chunk, step)
    lost = error(exact, codec)
    for kind in (Products.INT16, Products.MIXED, Products.BFLOAT16):
        multiply(kind, monkeypatch)
        rounded, _ = coded(books, chunk, step)
        # Otherwise nothing was rounded; to a coarse step, integers make no difference.
        assert rounded != exact or (kind is Products.INT16 and step > 0.1)
        assert len(rounded) == pytest.approx(len(exact), rel=2e-3)
        for blob in (exact, rounded):
            assert error(blob, codec) == pytest.approx(lost, rel=0.01, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "features", "there"),
    [
        ("generic", None, False), ("generic", "+avx2,+fma", True), ("x86-64-v3", None, True),
        ("haswell", "+fma,-avx2", False), (None, "+sse2", False),
    ],
)  # fmt: skip
def test_the_cpu_that_numba_compiles_for_decides_on_integers(
    name: str | None, features: str | None, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LLVM ends the process where it is asked for an instruction that the named CPU lacks."""
    for variable, value in (("NUMBA_CPU_NAME", name), ("NUMBA_CPU_FEATURES", features)):
        if value is None:
            monkeypatch.delenv(variable, raising=False)
        else:
            monkeypatch.setenv(variable, value)
    assert products._numba_has_avx2() is there
