"""PCA, the baseline that learns: maps, costs by hand, and what it refuses."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from tests.conftest import LAYOUTS, synthetic_chunk

from cuvee.codec.chunk import KVChunk
from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout, LayerLayout
from cuvee.codec.rope import unrotate
from cuvee.eval.baselines import pca
from cuvee.eval.baselines.pca import MOST_VALUES, PcaTransform, pca_columns
from cuvee.eval.report.candidates import pca_candidates

Make = Callable[..., KVChunk]
SCALAR = KVLayout("synthetic", (LayerLayout(1, 1, 1, None),), "float32", None)  # one key, one value a token


def scalars(keys: list[float], values: list[float]) -> KVChunk:
    return KVChunk([torch.tensor(keys)[:, None, None]], [torch.tensor(values)[:, None, None]], SCALAR)


def caches(layout: KVLayout, tokens: int = 100) -> list[KVChunk]:
    return [synthetic_chunk(layout, tokens, seed, 7 * seed) for seed in range(4)]


def free(chunk: KVChunk) -> torch.Tensor:
    """Position-free values `[T, N]`: layer, K before V, head, dimension."""
    positions = torch.arange(chunk.start, chunk.start + chunk.tokens)
    units = []
    for layer, keys, values in zip(chunk.layout.layers, chunk.keys, chunk.values, strict=True):
        units += [unrotate(keys, layer.rope, positions).flatten(1), values.float().flatten(1)]
    return torch.cat(units, 1)


def same(a: KVChunk, b: KVChunk, tolerance: float) -> bool:
    pairs = zip(a.keys + a.values, b.keys + b.values, strict=True)
    return a.start == b.start and all(torch.allclose(x, y, atol=tolerance, rtol=0) for x, y in pairs)


# Groups and maps ---------------------------------------------------------------------------------------------------


def test_groups_of_an_irregular_layout() -> None:
    # Layers of 2 x (12, 20), 1 x (30, 7) and 3 x (5, 9) values: units begin at 0, 24, 64, 94, 101, 116 and end at 143.
    spans = {
        "head": [12, 12, 20, 20, 30, 7, 5, 5, 5, 9, 9, 9],
        "unit": [24, 40, 30, 7, 15, 27],
        "layers:2": [101, 42],
        "all": [143],
    }
    for group, sizes in spans.items():
        expected = [list(range(a, b)) for a, b in pairwise(np.cumsum([0, *sizes]))]
        assert [columns.tolist() for columns in pca_columns(LAYOUTS["irregular"], group)] == expected
    first, *_ = pca_columns(LAYOUTS["gqa"], "heads:2")  # head 0 of the keys and values of two layers
    assert first.tolist() == [*range(16), *range(32, 48), *range(64, 80), *range(96, 112)]


@pytest.mark.parametrize(
    ("name", "group"),
    [("gqa", "head"), ("irregular", "unit"), ("yarn", "layer"), ("partial", "all"), ("interleaved", "layers:2")],
)
def test_maps_are_orthonormal_and_invertible(name: str, group: str) -> None:
    layout = LAYOUTS[name]
    basis = PcaTransform.fit(layout, caches(layout), group).basis
    for matrix in basis.matrices:
        assert torch.allclose(matrix @ matrix.T, torch.eye(len(matrix)), atol=1e-5)
    chunk = synthetic_chunk(layout, 33, seed=9, start=40)
    y = basis.analyze(chunk)
    assert same(basis.synthesize(y, chunk.start, chunk.device), chunk, 1e-4)
    noise = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    off = free(basis.synthesize(y + noise, chunk.start, chunk.device)) - free(chunk)
    assert float(off.square().sum()) == pytest.approx(basis.rms**2 * float(noise.square().sum()), rel=1e-3)


@pytest.mark.parametrize("group", ["head", "layers:2"])
def test_components_are_uncorrelated_and_in_order_within_their_group(group: str) -> None:
    layout = LAYOUTS["gqa"]
    transform = PcaTransform.fit(layout, caches(layout), group)
    y = transform.coefficients.double()
    assert torch.allclose(y.mean(0), torch.zeros(y.shape[1], dtype=y.dtype), atol=1e-3)
    assert float(y.square().mean()) == pytest.approx(1, rel=1e-3)  # in units of the root mean variance
    for part in y.split([len(columns) for columns in transform.basis.columns], 1):
        covariance = part.T @ part / len(part)
        variance = covariance.diagonal()
        assert bool((variance.diff() < 1e-4).all())
        assert torch.allclose(covariance, variance.diag(), atol=1e-3 * float(variance.max()))


@pytest.mark.parametrize("name", ["interleaved", "irregular"])
def test_position_changes_no_coefficient(name: str) -> None:
    layout = LAYOUTS[name]
    transform = PcaTransform.fit(layout, caches(layout), "all")
    here, there = (synthetic_chunk(layout, 20, seed=5, start=start) for start in (0, 1000))
    assert torch.allclose(transform.basis.analyze(here), transform.basis.analyze(there), atol=2e-3)
    # Float noise of the rotation may push a coefficient over the edge of a level, but only rarely.
    bits = [transform.method(0.3).encode(chunk)[1] for chunk in (here, there)]
    assert bits[0] == pytest.approx(bits[1], rel=1e-2)


def test_calibration_tokens_are_kept_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = LAYOUTS["gqa"]
    chunks = [synthetic_chunk(layout, tokens, tokens, 3) for tokens in (200, 1, 2, 61)]
    every = PcaTransform.fit(layout, chunks, "layer").coefficients
    assert len(every) == 264
    monkeypatch.setattr(pca, "KEPT_VALUES", 60 * layout.values_per_token)
    kept = PcaTransform.fit(layout, chunks, "layer").coefficients
    assert torch.allclose(kept, every[::5], atol=1e-5)


# One step ----------------------------------------------------------------------------------------------------------


def test_the_cost_by_hand() -> None:
    # Keys of mean 0 and variance 2, values constant: a root mean variance of 1, over both.
    keys = [2.0, -2.0, 0.0, 0.0] * 2 + [2.0, -2.0] * 2 + [0.0] * 4
    method = PcaTransform.fit(SCALAR, [scalars(keys, [3.0] * 16)], "head").method(1.0)
    # Of 16 keys 4 have level 2, 4 level -2 and 8 level 0; levels 1 and -1 and the escape were never seen.
    total = 16 + 6 * 0.5
    cost = {0: 8.5, 2: 4.5, 1: 0.5}
    constant = -math.log2(16.5 / 17)

    def bits(key: float) -> float:
        return method.encode(scalars([key], [3.0]))[1] - constant

    for key, level in ((0.59, 0), (-0.59, 0), (0.61, 1), (-1.59, 1), (1.61, 2), (-2.59, 2)):
        assert bits(key) == pytest.approx(-math.log2(cost[level] / total)), key
    # Beyond: the escape, a sign, and the distance from level 2 in a gamma code of 1, 3, 3, 5 … bits.
    escape = -math.log2(0.5 / total) + 1
    for key, gamma in ((3.0, 1), (-4.0, 3), (5.0, 3), (6.0, 5), (-1000.0, 19)):
        assert bits(key) == pytest.approx(escape + gamma), key
    back = method.decode(method.encode(scalars([-1000.0, 1.0], [3.0, 3.0]))[0])
    assert back.keys[0].flatten().tolist() == pytest.approx([-1000.0, 1.0], abs=1e-3)
    assert back.values[0].flatten().tolist() == [3.0, 3.0]


def test_levels_come_back_at_their_centroid() -> None:
    keys = [0.0, 0.0, 1.3, -1.3, 1.3, -1.3, 0.0, 0.0] * 8  # level 1, 0.3 steps off; the mean is 0
    rms = math.sqrt(1.3**2 / 4)
    method = PcaTransform.fit(SCALAR, [scalars(keys, [0.0] * 64)], "head").method(1 / rms)
    back = method.decode(method.encode(scalars([0.8, -1.5, 0.5, 2.0], [0.0] * 4))[0])
    centroid = 0.3 * 32 / 33  # a sum over 32 coefficients, and one more that lies on its level
    assert back.keys[0].flatten().tolist() == pytest.approx([1 + centroid, -1 - centroid, 0, 2 + centroid], abs=1e-4)


def test_errors_are_bounded_by_the_step() -> None:
    layout, step = LAYOUTS["gqa"], 0.6
    transform = PcaTransform.fit(layout, caches(layout), "layer")
    method, chunk = transform.method(step), synthetic_chunk(layout, 50, seed=8, start=9)
    chunk.keys[0][3] = 1000.0  # far beyond anything that calibration saw
    back = method.decode(method.encode(chunk)[0])
    assert (back.start, back.tokens, back.layout) == (chunk.start, chunk.tokens, chunk.layout)
    off = (transform.basis.analyze(chunk) - transform.basis.analyze(back))[torch.arange(50) != 3].abs() / step
    assert float(off.max()) <= 1.01
    assert float(off.square().mean().sqrt()) < 1.1 / math.sqrt(12)
    assert float((chunk.keys[0][3] - back.keys[0][3]).abs().max()) < 10 * step * transform.basis.rms


@pytest.mark.parametrize("step", [0.0009, math.nan, math.inf])
def test_a_step_must_be_finite_and_not_too_small(step: float) -> None:
    transform = PcaTransform.fit(LAYOUTS["mqa"], caches(LAYOUTS["mqa"]), "head")
    with pytest.raises(InputError, match=r"^step: must be finite and at least 0.0009765625"):
        transform.method(step)


# What it says and refuses -------------------------------------------------------------------------------------------


def test_methods_say_what_they_are() -> None:
    layout = LAYOUTS["gqa"]
    chunks = caches(layout)
    method, again, elsewhere = (
        PcaTransform.fit(layout, own, "layer").method(0.1) for own in (chunks, chunks, chunks[1:])
    )
    assert method.counts
    assert json.loads(json.dumps(method.identity)) == method.identity == again.identity
    assert method.identity == {"kind": "pca", "group": "layer", "step": 0.1, "basis": method.basis.digest}
    basis = method.basis
    others = [replace(basis, mean=basis.mean + 1), replace(basis, matrices=basis.matrices[::-1])]
    others += [replace(basis, rms=2.0), replace(basis, group="all"), elsewhere.basis]
    assert len({basis.digest, *(other.digest for other in others)}) == 6


def test_narrow_caches_come_back_in_their_dtype() -> None:
    layout = LAYOUTS["bfloat16"]
    chunks, chunk = caches(layout), synthetic_chunk(layout, 30, seed=6)
    method = PcaTransform.fit(layout, chunks, "all").method(0.02)
    back = method.decode(method.encode(chunk)[0])
    assert back.keys[0].dtype == layout.torch_dtype and back.values[0].dtype == layout.torch_dtype
    assert same(back, chunk, 0.25)


def test_chunks_that_do_not_fit_are_refused() -> None:
    layout = LAYOUTS["gqa"]  # 64 values in a layer, 16 in a head
    chunks = caches(layout)
    method = PcaTransform.fit(layout, chunks, "layer").method(0.3)
    broken, large, narrow = synthetic_chunk(layout, 20), synthetic_chunk(layout, 20), replace(layout, dtype="bfloat16")
    broken.values[1][3, 0, 2], large.values[1][3] = math.inf, 1e38
    refused: list[tuple[str, Callable[[], object]]] = [
        ("chunk: holds NaN or infinite values", lambda: method.encode(broken)),
        ("chunk: holds NaN or infinite values", lambda: PcaTransform.fit(layout, [*chunks, broken], "head")),
        (r"chunk: holds values of 2\*\*31 steps", lambda: method.encode(large)),
        ("chunk: has another layout", lambda: method.encode(synthetic_chunk(narrow, 20))),
        ("chunks: one has another", lambda: PcaTransform.fit(layout, [*chunks, synthetic_chunk(narrow, 20)], "head")),
        (
            "chunks: hold 127 tokens, and a basis of 64 values needs 128: .* narrower",
            lambda: PcaTransform.fit(layout, [synthetic_chunk(layout, 100), synthetic_chunk(layout, 27)], "layer"),
        ),
        ("chunks: hold 0 tokens", lambda: PcaTransform.fit(layout, [], "head")),
    ]
    for message, call in refused:
        with pytest.raises(InputError, match=f"^{message}"):
            call()


def test_a_group_too_wide_is_refused_and_left_out_of_reports() -> None:
    layout = KVLayout("synthetic", (LayerLayout(8, 128, 128, None),) * 4, "float32", None)
    with pytest.raises(InputError, match=r"^group: 'all' needs the principal components of 8,192 values .* narrower"):
        PcaTransform.fit(layout, [], "all")
    with pytest.raises(InputError, match=r"^chunks: hold 0 tokens"):
        PcaTransform.fit(layout, [], "layers:2")
    assert MOST_VALUES == 4096  # which is allowed
    found = pca_candidates(layout, list, ("layers:2", "layers:3", "all"), quick=False)
    assert list(dict.fromkeys(one.family for one in found)) == ["pca/layers:2", "pca/layer"]


def test_all_arithmetic_stays_on_the_device_of_the_chunks() -> None:
    layout = LAYOUTS["gqa"]
    chunks = caches(layout)
    with torch.device("meta"):  # what is created without a device would end up there, apart from the chunks
        method = PcaTransform.fit(layout, chunks, "all").method(0.3)
        stored, bits = method.encode(chunks[0])
        assert math.isfinite(bits) and method.decode(stored).device == chunks[0].device
