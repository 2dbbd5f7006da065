"""The learned baselines: groups, maps, costs by hand, KVTC's allocation against brute force and its bytes."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout, LayerLayout
from cuvee.codec.models.rope import unrotate
from cuvee.eval.baselines import basis as basis_module
from cuvee.eval.baselines import kvtc as kvtc_module
from cuvee.eval.baselines import pca
from cuvee.eval.baselines.basis import GROUPINGS, columns, leading_directions
from cuvee.eval.baselines.kvtc import KVTC_BUDGETS, Kvtc, allocate
from cuvee.eval.baselines.pca import PCA_STEPS, PcaTransform

Make = Callable[..., KVChunk]
SCALAR = KVLayout("synthetic", (LayerLayout(1, 1, 1, None),), "float32", None)  # one key, one value a token
NAMES = ["gqa", "narrow-values", "no-rope", "partial", "interleaved", "yarn", "irregular"]


def scalars(keys: list[float], values: list[float]) -> KVChunk:
    return KVChunk([torch.tensor(keys)[:, None, None]], [torch.tensor(values)[:, None, None]], SCALAR)


def caches(make_chunk: Make, layout: KVLayout, tokens: int = 100) -> list[KVChunk]:
    return [make_chunk(layout, tokens, seed, 7 * seed) for seed in range(4)]


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


def test_groups_of_an_irregular_layout(layouts: dict[str, KVLayout]) -> None:
    # Layers of 2 x (12, 20), 1 x (30, 7) and 3 x (5, 9) values: units begin at 0, 24, 64, 94, 101, 116 and end at 143.
    spans = {
        "head": [12, 12, 20, 20, 30, 7, 5, 5, 5, 9, 9, 9],
        "unit": [24, 40, 30, 7, 15, 27],
        "layer": [64, 37, 42],
        "all": [143],
    }
    for grouping, sizes in spans.items():
        edges = np.cumsum([0, *sizes])
        expected = [list(range(a, b)) for a, b in pairwise(edges)]
        assert [group.tolist() for group in columns(layouts["irregular"], grouping)] == expected
    assert [len(group) for group in columns(layouts["irregular"], "layers:2")] == [101, 42]
    assert columns(layouts["irregular"], "layers:2")[1].tolist() == list(range(101, 143))
    keys, values = columns(layouts["irregular"], "kv")
    assert keys.tolist() == [*range(24), *range(64, 94), *range(101, 116)]
    assert values.tolist() == [*range(24, 64), *range(94, 101), *range(116, 143)]
    assert set(GROUPINGS) == {*spans, "kv"}


def test_an_unknown_grouping_is_named(layouts: dict[str, KVLayout]) -> None:
    for grouping in ("layers:0", "layers:n", "layers:2x", "heads"):
        message = rf"^grouping: must be one of head, unit, layer, kv, all, layers:n, heads:n, got '{grouping}'"
        with pytest.raises(InputError, match=message):
            columns(layouts["gqa"], grouping)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("grouping", [*GROUPINGS, "layers:2", "heads:2"])
def test_maps_are_orthonormal_and_invertible(
    layouts: dict[str, KVLayout], make_chunk: Make, name: str, grouping: str
) -> None:
    layout = layouts[name]
    basis = PcaTransform.fit(layout, caches(make_chunk, layout), grouping).basis
    for matrix in basis.matrices:
        assert torch.allclose(matrix @ matrix.T, torch.eye(len(matrix)), atol=1e-5)
    chunk = make_chunk(layout, 33, seed=9, start=40)
    y = basis.analyze(chunk)
    assert same(basis.synthesize(y, chunk.start, chunk.device), chunk, 1e-4)
    noise = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    off = free(basis.synthesize(y + noise, chunk.start, chunk.device)) - free(chunk)
    assert float(off.square().sum()) == pytest.approx(basis.rms**2 * float(noise.square().sum()), rel=1e-3)


@pytest.mark.parametrize("grouping", [*GROUPINGS, "layers:2", "heads:2"])
def test_components_are_uncorrelated_and_in_order_within_their_group(
    layouts: dict[str, KVLayout], make_chunk: Make, grouping: str
) -> None:
    layout = layouts["gqa"]
    transform = PcaTransform.fit(layout, caches(make_chunk, layout), grouping)
    y = transform.coefficients.double()
    assert torch.allclose(y.mean(0), torch.zeros(y.shape[1], dtype=y.dtype), atol=1e-3)
    assert float(y.square().mean()) == pytest.approx(1, rel=1e-3)  # in units of the root mean variance
    for part in y.split(transform.basis.sizes, 1):
        covariance = part.T @ part / len(part)
        variance = covariance.diagonal()
        assert bool((variance.diff() < 1e-4).all())
        assert torch.allclose(covariance, variance.diag(), atol=1e-3 * float(variance.max()))


@pytest.mark.parametrize("name", NAMES)
def test_position_changes_no_coefficient(layouts: dict[str, KVLayout], make_chunk: Make, name: str) -> None:
    layout = layouts[name]
    transform = PcaTransform.fit(layout, caches(make_chunk, layout), "all")
    here, there = (make_chunk(layout, 20, seed=5, start=start) for start in (0, 1000))
    assert torch.allclose(transform.basis.analyze(here), transform.basis.analyze(there), atol=2e-3)
    # Float noise of the rotation may push a coefficient over the edge of a level, but only rarely.
    bits = [transform.method(0.3).encode(chunk)[1] for chunk in (here, there)]
    assert bits[0] == pytest.approx(bits[1], rel=1e-2)


def test_a_wider_group_finds_what_layers_share() -> None:
    layout = KVLayout("synthetic", (LayerLayout(1, 8, 8, None),) * 2, "float32", None)

    def twice(seed: int) -> KVChunk:
        x, y = torch.randn(2, 400, 1, 8, generator=torch.Generator().manual_seed(seed))
        return KVChunk([x, x], [y, y], layout)

    def bits(grouping: str) -> float:
        return PcaTransform.fit(layout, [twice(0)], grouping).method(0.5).encode(twice(1))[1] / 400 / 32

    wide = [bits(grouping) for grouping in ("all", "kv")]
    narrow = [bits(grouping) for grouping in ("head", "unit", "layer")]
    # One basis for two copies: half as many components, each of twice the variance.
    assert max(narrow) - min(narrow) < 0.05 and abs(wide[0] - wide[1]) < 0.05
    assert wide[0] == pytest.approx((narrow[0] + 0.5) / 2, abs=0.06)


def test_calibration_tokens_are_kept_evenly(
    layouts: dict[str, KVLayout], make_chunk: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = layouts["gqa"]
    chunks = [make_chunk(layout, tokens, tokens, 3) for tokens in (200, 1, 2, 61)]
    every = PcaTransform.fit(layout, chunks, "layer").coefficients
    assert len(every) == 264
    monkeypatch.setattr(pca, "KEPT_VALUES", 60 * layout.values_per_token)
    kept = PcaTransform.fit(layout, chunks, "layer").coefficients
    assert torch.allclose(kept, every[::5], atol=1e-5)
    basis = PcaTransform.fit(layout, chunks, "layer").basis
    runs = basis.sample(chunks, 16, 5)
    first = basis.analyze(chunks[0])[:192].unflatten(0, (12, 16))[::3]  # 12 runs, none, none and 3: every third
    last = basis.analyze(chunks[3])[:16]
    assert torch.allclose(runs, torch.cat([first, last[None]]), atol=1e-5)


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


@pytest.mark.parametrize("step", [0.1, 0.6])
def test_errors_are_bounded_by_the_step(layouts: dict[str, KVLayout], make_chunk: Make, step: float) -> None:
    layout = layouts["gqa"]
    transform = PcaTransform.fit(layout, caches(make_chunk, layout), "layer")
    method, chunk = transform.method(step), make_chunk(layout, 50, seed=8, start=9)
    chunk.keys[0][3] = 1000.0  # far beyond anything that calibration saw
    back = method.decode(method.encode(chunk)[0])
    assert (back.start, back.tokens, back.layout) == (chunk.start, chunk.tokens, chunk.layout)
    off = (transform.basis.analyze(chunk) - transform.basis.analyze(back))[torch.arange(50) != 3].abs() / step
    assert float(off.max()) <= 1.01
    assert float(off.square().mean().sqrt()) < 1.1 / math.sqrt(12)
    assert float((chunk.keys[0][3] - back.keys[0][3]).abs().max()) < 10 * step * transform.basis.rms


def test_tables_reach_the_entropy_of_their_source() -> None:
    layout = KVLayout("synthetic", (LayerLayout(1, 4, 4, None),), "float32", None)
    wide, step = torch.tensor([8.0, 4.0, 2.0, 1.0]), 0.25

    def draw(seed: int) -> KVChunk:
        uniform = torch.rand(2, 20000, 1, 4, generator=torch.Generator().manual_seed(seed)) - 0.5
        x = -wide * uniform.sign() * (1 - 2 * uniform.abs()).clamp_min(1e-7).log()  # Laplace, mean |x| = wide
        return KVChunk([x[0]], [x[1]], layout)

    transform = PcaTransform.fit(layout, [draw(0)], "head")
    bits = transform.method(step).encode(draw(1))[1] / 20000 / 8
    entropy = 0.0
    for scale in wide.tolist():
        tail = [math.exp(-(n + 0.6) * step * transform.basis.rms / scale) for n in range(2000)]  # P(|level| > n)
        p = [1 - tail[0], *((a - b) / 2 for a, b in pairwise(tail) for _ in range(2))]
        entropy -= sum(q * math.log2(q) for q in p if q) / 4
    assert bits == pytest.approx(entropy, rel=0.01)


def test_bits_fall_and_errors_grow_over_the_steps(layouts: dict[str, KVLayout], make_chunk: Make) -> None:
    layout = layouts["gqa"]
    transform = PcaTransform.fit(layout, caches(make_chunk, layout), "layer")
    chunk = make_chunk(layout, 60, seed=8)
    found = [transform.method(step).encode(chunk) for step in PCA_STEPS]
    errors = [float((free(back) - free(chunk)).square().sum()) for back, _ in found]
    assert all(a > b for (_, a), (_, b) in pairwise(found)) and all(a < b for a, b in pairwise(errors))


@pytest.mark.parametrize("step", [0.0, -1.0, 0.0009, math.nan, math.inf])
def test_a_step_must_be_finite_and_not_too_small(layouts: dict[str, KVLayout], make_chunk: Make, step: float) -> None:
    transform = PcaTransform.fit(layouts["mqa"], caches(make_chunk, layouts["mqa"]), "head")
    with pytest.raises(InputError, match=r"^step: must be finite and at least 0.0009765625"):
        transform.method(step)


# KVTC --------------------------------------------------------------------------------------------------------------


def cheapest(errors: kvtc_module.GroupErrors, budget: int, p: int = 0) -> float:
    """The least error from position p on, by trying everything."""
    if p == len(errors):
        return 0.0
    found = float(errors[p, 0, 0]) + cheapest(errors, budget, p + 1)
    for k, positions in enumerate((1, 4)):
        for bits in range(1, errors.shape[2]):
            left = budget - (1 + 2 * positions * bits)  # 32 bits, and 4 components x 16 tokens x bits per position
            if left >= 0 and np.isfinite(errors[p, k, bits]):
                found = min(found, float(errors[p, k, bits]) + cheapest(errors, left, p + positions))
    return found


@pytest.mark.parametrize("seed", range(4))
def test_allocation_is_the_best_there_is(seed: int) -> None:
    generator = np.random.default_rng(seed)
    errors = np.full((6, 2, 4), np.inf)
    errors[:, 0] = generator.random((6, 4)).cumsum(1)[:, ::-1]
    errors[:3, 1, 1:] = 2 * generator.random((3, 3)).cumsum(1)[:, ::-1]
    sizes = set()
    for budget in range(0, 40, 3):
        groups = allocate(errors, budget)
        coded = {position for p, k, _ in groups for position in range(p, p + 4**k)}
        assert len(coded) == sum(4**k for _, k, _ in groups) and coded <= set(range(6))
        assert sum(1 + 2 * 4**k * bits for _, k, bits in groups) <= budget
        error = sum(errors[p, k, bits] for p, k, bits in groups)
        error += sum(errors[p, 0, 0] for p in range(6) if p not in coded)
        assert error == pytest.approx(cheapest(errors, budget))
        sizes |= {k for _, k, _ in groups}
    assert sizes == {0, 1}


@pytest.fixture(scope="module")
def kvtc(layouts: dict[str, KVLayout], make_chunk: Make) -> Kvtc:
    return Kvtc.fit(layouts["irregular"], caches(make_chunk, layouts["irregular"]))


def test_group_errors_are_those_of_its_quantizer(kvtc: Kvtc) -> None:
    y = torch.randn(5, 16, 20, generator=torch.Generator().manual_seed(3)) * torch.arange(20, 0, -1)
    errors = kvtc_module._group_errors(y)
    assert errors.shape == (5, 4, 9)
    assert np.isfinite(errors[:, 0]).all() and np.isinf(errors[:, 1, 0]).all() and np.isinf(errors[:, 2:]).all()
    assert np.isfinite(errors[:2, 1, 1:]).all() and np.isinf(errors[2:, 1]).all()  # 16 components, from 0 or from 4
    assert errors[1, 0, 0] == pytest.approx(float(y[..., 4:8].square().sum()) / 5)
    for bits in (1, 3, 8):
        low, high = y[..., 4:20].amin((1, 2), keepdim=True), y[..., 4:20].amax((1, 2), keepdim=True)
        scale = (high - low) / (2**bits - 1)
        back = ((y[..., 4:20] - low) / scale).round() * scale + low
        expected = float((back - y[..., 4:20]).square().sum()) / 5
        assert errors[1, 1, bits] == pytest.approx(expected, rel=0.02)  # but for scales in float16


@pytest.mark.parametrize("bits", range(1, 9))
def test_levels_fit_their_bits_whatever_float16_does_to_the_scale(bits: int) -> None:
    rows = 50 + torch.randn(200, 64, generator=torch.Generator().manual_seed(bits))
    rows[0] = 0.25  # a run that never varies has no scale
    level, scale, low = kvtc_module._quantize(rows, bits)
    assert bool((level == level.round()).all()) and level.min() == 0 and level.max() == 2**bits - 1
    assert torch.equal(scale, scale.half().float()) and torch.equal(low, low.half().float())
    bound = scale / 2 + (rows.amax(1, keepdim=True) + rows.amin(1, keepdim=True).abs()) * 2**-11
    assert bool(((level * scale + low - rows).abs() <= bound).all())


@pytest.mark.parametrize("bits", range(1, 9))
def test_levels_survive_packing(bits: int) -> None:
    level = torch.randint(0, 2**bits, (7, 3), generator=torch.Generator().manual_seed(bits)).float()
    data = kvtc_module._pack(level, bits)
    assert len(data) == math.ceil(21 * bits / 8)
    assert torch.equal(kvtc_module._unpack(data, bits, 21).view(7, 3), level)


def test_levels_are_packed_most_significant_first() -> None:
    assert kvtc_module._pack(torch.tensor([[5.0, 1.0, 6.0]]), 3) == bytes([0b10100111, 0b00000000])


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 50])
@pytest.mark.parametrize("budget", [0.5, 3.0, 8.0])
def test_a_chunk_decodes_from_the_bytes_that_are_counted(
    kvtc: Kvtc, make_chunk: Make, budget: float, tokens: int
) -> None:
    method, chunk = kvtc.method(budget), make_chunk(kvtc.basis.layout, tokens, seed=9, start=77)
    stored, bits = method.encode(chunk)
    assert bits == 8 * len(stored.data)
    runs = math.ceil(tokens / 16)
    groups = [group for part in method.parts for group in part]
    levels = sum(math.ceil(group.size * tokens * group.bits / 8) for group in groups)
    assert len(zlib.decompress(stored.data, -15)) == 4 * runs * len(groups) + levels
    back = method.decode(kvtc_module._Stored(bytes(bytearray(stored.data)), chunk.start, tokens, chunk.device))
    assert (back.start, back.tokens, back.layout) == (chunk.start, chunk.tokens, chunk.layout)
    exact, other = kvtc.basis.analyze(chunk), kvtc.basis.analyze(back)
    for part, coded, groups_ in zip(
        exact.split(kvtc.basis.sizes, 1), other.split(kvtc.basis.sizes, 1), method.parts, strict=True
    ):
        left = torch.ones(part.shape[1], dtype=torch.bool)
        for group in groups_:
            here = slice(group.first, group.first + group.size)
            left[here] = False
            for first in range(0, tokens, 16):
                run = part[first : first + 16, here]
                high, low = float(run.max()), float(run.min())
                if here.stop > part.shape[1]:  # the components of its padding are 0
                    high, low = max(high, 0), min(low, 0)
                # And what float16 rounds off a scale and a minimum, and off the scale times the largest level.
                bound = (high - low) / (2**group.bits - 1) / 2 + (high - low + abs(low)) * 2**-11 + 1e-4
                assert float((run - coded[first : first + 16, here]).abs().max()) <= bound
        assert not groups_ or not bool(left.all())
        assert torch.allclose(coded[:, left], torch.zeros(1), atol=1e-4)


def test_the_last_run_has_the_scale_of_its_own_tokens(layouts: dict[str, KVLayout], make_chunk: Make) -> None:
    layout = layouts["no-rope"]
    method = Kvtc.fit(layout, caches(make_chunk, layout)).method(2.0)
    short = make_chunk(layout, 17, seed=9)
    again = KVChunk.concat([short, *(replace_start(short.slice(16, 17), start) for start in range(17, 32))])
    alone, repeated = (method.decode(method.encode(chunk)[0]) for chunk in (short, again))
    assert same(alone, repeated.slice(0, 17), 1e-5)


def replace_start(chunk: KVChunk, start: int) -> KVChunk:
    return KVChunk(chunk.keys, chunk.values, chunk.layout, start)


def test_truncated_bytes_do_not_decode(kvtc: Kvtc, make_chunk: Make) -> None:
    method = kvtc.method(2.0)
    stored, _ = method.encode(make_chunk(kvtc.basis.layout, 40))
    with pytest.raises(zlib.error):
        method.decode(stored._replace(data=stored.data[:-1]))


def test_the_budget_bounds_levels_and_scales(kvtc: Kvtc, make_chunk: Make) -> None:
    chunk = make_chunk(kvtc.basis.layout, 160, seed=9)
    errors = []
    for budget in KVTC_BUDGETS:
        method = kvtc.method(budget)
        for groups, size in zip(method.parts, kvtc.basis.sizes, strict=True):
            spent = sum(group.size * group.bits + 32 / 16 for group in groups)
            assert spent <= budget * size
            assert spent > 0.8 * min(budget, 4.0) * size or budget > 2  # small components may not be worth more
            ends = [0, *(group.first + group.size for group in groups)]
            assert all(group.first >= end for group, end in zip(groups, ends, strict=False))
        errors.append(float((free(method.decode(method.encode(chunk)[0])) - free(chunk)).square().sum()))
    assert all(a >= b for a, b in pairwise(errors)) and errors[0] > 20 * errors[-1]


def test_a_tiny_budget_leaves_the_means(kvtc: Kvtc, make_chunk: Make) -> None:
    method = kvtc.method(1e-6)
    chunk = make_chunk(kvtc.basis.layout, 20)
    stored, bits = method.encode(chunk)
    assert method.parts == ((), ()) and bits <= 16
    assert torch.allclose(free(method.decode(stored)), kvtc.basis.mean.expand(20, -1), atol=1e-4)


@pytest.mark.parametrize("budget", [0.0, -1.0, 8.5, math.nan])
def test_a_budget_must_be_one_that_can_be_spent(kvtc: Kvtc, budget: float) -> None:
    with pytest.raises(InputError, match=r"^budget: must lie above 0 and be at most 8"):
        kvtc.method(budget)


def test_values_beyond_the_scales_are_refused(kvtc: Kvtc, make_chunk: Make) -> None:
    chunk = make_chunk(kvtc.basis.layout, 20)
    chunk.values[0][3] = 1e7
    with pytest.raises(InputError, match=r"^chunk: holds values that lie beyond float16 scales"):
        kvtc.method(3.0).encode(chunk)


def test_scales_need_a_run_of_tokens(layouts: dict[str, KVLayout], make_chunk: Make) -> None:
    chunks = [make_chunk(layouts["mqa"], 15, seed) for seed in range(14)]
    with pytest.raises(InputError, match=r"^chunks: none holds 16 tokens"):
        Kvtc.fit(layouts["mqa"], chunks)


# Both --------------------------------------------------------------------------------------------------------------


def both(layout: KVLayout, chunks: list[KVChunk]) -> list[pca.PcaMethod | kvtc_module.KvtcMethod]:
    return [PcaTransform.fit(layout, chunks, "kv").method(0.3), Kvtc.fit(layout, chunks).method(2.0)]


def test_methods_say_what_they_are(layouts: dict[str, KVLayout], make_chunk: Make) -> None:
    layout = layouts["gqa"]
    chunks = caches(make_chunk, layout)
    for method, again, elsewhere, kind in zip(
        both(layout, chunks), both(layout, chunks), both(layout, chunks[1:]), ("pca", "kvtc"), strict=True
    ):
        assert method.counts and not method.timed and method.layer_bits(method.encode(chunks[0])[0]) is None
        assert method.identity["kind"] == kind and method.identity["grouping"] == "kv"
        assert json.loads(json.dumps(method.identity)) == method.identity == again.identity
        assert method.identity["basis"] != elsewhere.identity["basis"]
    transform, kvtc = PcaTransform.fit(layout, chunks, "layer"), Kvtc.fit(layout, chunks)
    assert transform.method(0.1).identity["step"] == 0.1 and kvtc.method(1.5).identity["budget"] == 1.5
    basis = transform.basis
    others = [replace(basis, mean=basis.mean + 1), replace(basis, matrices=basis.matrices[::-1])]
    assert len({basis.digest, *(other.digest for other in others), replace(basis, rms=2.0).digest}) == 4
    assert transform.method(0.1).identity["basis"] != both(layout, chunks)[0].identity["basis"]


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_narrow_caches_come_back_in_their_dtype(layouts: dict[str, KVLayout], make_chunk: Make, name: str) -> None:
    layout = layouts[name]
    chunks, chunk = caches(make_chunk, layout), make_chunk(layout, 30, seed=6)
    for method in (PcaTransform.fit(layout, chunks, "kv").method(0.02), Kvtc.fit(layout, chunks).method(8.0)):
        back = method.decode(method.encode(chunk)[0])
        assert back.keys[0].dtype == layout.torch_dtype and back.values[0].dtype == layout.torch_dtype
        assert same(back, chunk, 0.25)


def test_one_token_and_channels_that_never_vary() -> None:
    layout = KVLayout("synthetic", (LayerLayout(1, 6, 6, None),) * 2, "float32", None)

    def draw(tokens: int, seed: int, dead: float) -> KVChunk:
        x = torch.randn(4, tokens, 1, 6, generator=torch.Generator().manual_seed(seed))
        x[0, ..., 2], x[1] = dead, dead
        return KVChunk(list(x[:2]), list(x[2:]), layout)

    for method in both(layout, [draw(64, 0, 3.0)]):
        chunk = draw(1, 1, 3.0)
        stored, bits = method.encode(chunk)
        back = method.decode(stored)
        assert 0 < bits < 1000 and torch.allclose(back.keys[1], chunk.keys[1], atol=1e-3)
        other = draw(40, 2, 3.5)  # not so constant after all
        stored, bits = method.encode(other)
        assert math.isfinite(bits) and bool(torch.isfinite(free(method.decode(stored))).all())


def test_a_cache_that_never_varies_costs_next_to_nothing() -> None:
    layout = KVLayout("synthetic", (LayerLayout(1, 6, 6, None),), "float32", None)
    chunk = KVChunk([torch.full((64, 1, 6), 2.5)], [torch.full((64, 1, 6), -1.0)], layout)
    for method in both(layout, [chunk]):
        stored, bits = method.encode(chunk)
        assert same(method.decode(stored), chunk, 1e-6) and bits < 0.2 * 64 * 12


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_is_refused(layouts: dict[str, KVLayout], make_chunk: Make, bad: float) -> None:
    layout = layouts["gqa"]
    chunks = caches(make_chunk, layout)
    methods = both(layout, chunks)
    broken = make_chunk(layout, 20)
    broken.values[1][3, 0, 2] = bad
    for method in methods:
        with pytest.raises(InputError, match=r"^chunk: holds NaN or infinite values"):
            method.encode(broken)
    with pytest.raises(InputError, match=r"^chunk: holds NaN or infinite values"):
        PcaTransform.fit(layout, [*chunks, broken], "head")


def test_levels_beyond_integers_are_refused(layouts: dict[str, KVLayout], make_chunk: Make) -> None:
    layout = layouts["gqa"]
    method = PcaTransform.fit(layout, caches(make_chunk, layout), "kv").method(0.01)
    chunk = make_chunk(layout, 20)
    chunk.values[1][3] = 1e38
    with pytest.raises(InputError, match=r"^chunk: holds values of 2\*\*31 steps"):
        method.encode(chunk)


def test_another_layout_is_refused(layouts: dict[str, KVLayout], make_chunk: Make) -> None:
    layout = layouts["gqa"]
    chunks = caches(make_chunk, layout)
    narrow = make_chunk(replace(layout, dtype="bfloat16"), 20)
    for method in both(layout, chunks):
        with pytest.raises(InputError, match=r"^chunk: has another layout"):
            method.encode(narrow)
    with pytest.raises(InputError, match=r"^chunks: one has another layout"):
        PcaTransform.fit(layout, [*chunks, narrow], "head")


def test_too_few_tokens_are_refused(layouts: dict[str, KVLayout], make_chunk: Make) -> None:
    layout = layouts["gqa"]  # 192 values per token, 96 of them keys, 16 per head
    chunks = [make_chunk(layout, 100, 0), make_chunk(layout, 91, 1)]
    with pytest.raises(InputError, match=r"^chunks: hold 191 tokens, and a basis of 96 values needs 192"):
        Kvtc.fit(layout, chunks)
    PcaTransform.fit(layout, chunks, "head")
    PcaTransform.fit(layout, [*chunks, make_chunk(layout, 1)], "kv")
    with pytest.raises(InputError, match=r"^chunks: hold 0 tokens"):
        PcaTransform.fit(layout, [], "head")


def test_a_group_too_large_is_refused() -> None:
    layout = KVLayout("synthetic", (LayerLayout(32, 256, 256, None),) * 8, "float32", None)
    with pytest.raises(
        InputError, match=r"^grouping: 'all' needs the principal components of 131,072 values .* choose a narrower"
    ):
        PcaTransform.fit(layout, [], "all")
    with pytest.raises(InputError, match=r"^chunks: hold 0 tokens"):
        PcaTransform.fit(layout, [], "kv")  # 65,536 are allowed
    wide = KVLayout("synthetic", (LayerLayout(32, 257, 257, None),) * 8, "float32", None)
    with pytest.raises(InputError, match=r"^grouping: 'kv' needs the principal components of 65,792 values"):
        Kvtc.fit(wide, [])


# Wide groups -------------------------------------------------------------------------------------------------------


def correlated(seed: int, tokens: int, width: int) -> torch.Tensor:
    """Rows whose standard deviation falls off like that of a cache: a few directions hold most of it."""
    generator = torch.Generator().manual_seed(5)
    directions = torch.linalg.qr(torch.randn(width, width, generator=generator))[0]
    spread = 4.0 * torch.arange(1, width + 1) ** -0.8
    drawn = torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed))
    rows: torch.Tensor = drawn * spread @ directions.T
    return rows


def test_leading_directions_are_those_of_the_whole_decomposition() -> None:
    rows = correlated(0, 4000, 300)
    rows -= rows.mean(0)
    exact = torch.linalg.eigh((rows.T @ rows).double())[1].flip(1).T.float()
    found = leading_directions(rows, 100)
    assert found.shape == (100, 300)
    assert torch.allclose(found @ found.T, torch.eye(100), atol=1e-5)
    energy = (rows @ found.T).square().sum(0)
    assert bool((energy.diff() <= 1e-3 * energy[0]).all())
    # The same directions up to their sign while their variances differ, and the same subspace throughout.
    assert float((found[:10] * exact[:10]).sum(1).abs().min()) > 0.999
    kept = [float((rows @ basis.T).square().sum()) for basis in (found, exact[:100])]
    assert 0 <= 1 - kept[0] / kept[1] < 1e-3
    assert torch.equal(found, leading_directions(rows, 100))


def test_all_directions_are_found_if_all_are_wanted() -> None:
    rows = correlated(1, 200, 24)
    found = leading_directions(rows, 24)
    assert torch.allclose(found @ found.T, torch.eye(24), atol=1e-5)
    exact = torch.linalg.eigvalsh((rows.T @ rows).double()).flip(0)
    assert torch.allclose((rows @ found.T).square().sum(0).double(), exact, rtol=1e-3)


def wide_caches(seeds: range) -> tuple[KVLayout, list[KVChunk]]:
    layout = KVLayout("synthetic", (LayerLayout(2, 20, 20, None),) * 3, "float32", None)  # 120 keys, 120 values
    chunks = []
    for seed in seeds:
        x = correlated(seed, 300, 240).view(300, 6, 2, 20)
        chunks.append(KVChunk(list(x[:, ::2].unbind(1)), list(x[:, 1::2].unbind(1)), layout))
    return layout, chunks


def narrow_limits(monkeypatch: pytest.MonkeyPatch, rank: int, complete: int) -> None:
    """Limits that make groups of 120 and 240 values wide."""
    monkeypatch.setattr(basis_module, "EXACT_VALUES", 64)
    monkeypatch.setattr(basis_module, "MOST_RANK", rank)
    monkeypatch.setattr(basis_module, "COMPLETE_VALUES", complete)
    monkeypatch.setattr(basis_module, "_EXTRA", 6)
    monkeypatch.setattr(basis_module, "_SAMPLE_TOKENS", 1200)


def figures(transform: PcaTransform, test: KVChunk, steps: tuple[float, ...]) -> list[tuple[float, float]]:
    """Bits and squared error at each step."""
    found = [transform.method(step).encode(test) for step in steps]
    return [(bits, float((free(back) - free(test)).square().sum())) for back, bits in found]


@pytest.mark.parametrize("grouping", ["kv", "all"])
def test_a_wide_group_costs_what_its_exact_components_cost(grouping: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 3% of the bits, and of the error, of the whole decomposition, at fine steps as well."""
    layout, chunks = wide_caches(range(8))
    (test,) = wide_caches(range(9, 10))[1]
    steps = (0.08, 0.3, 1.3)
    exact = figures(PcaTransform.fit(layout, chunks, grouping), test, steps)
    narrow_limits(monkeypatch, rank=40, complete=240)
    transform = PcaTransform.fit(layout, chunks, grouping)
    assert transform.basis.sizes == ([120, 120] if grouping == "kv" else [240])
    for matrix in transform.basis.matrices:
        assert torch.allclose(matrix @ matrix.T, torch.eye(len(matrix)), atol=1e-4)
    for one, other in zip(figures(transform, test, steps), exact, strict=True):
        assert one == pytest.approx(other, rel=0.03)


@pytest.mark.parametrize("grouping", ["kv", "all"])
def test_a_very_wide_group_keeps_its_leading_components(grouping: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At coarse steps, where what is left out would not be coded anyway, within 3% as well."""
    layout, chunks = wide_caches(range(8))
    (test,) = wide_caches(range(9, 10))[1]
    exact = figures(PcaTransform.fit(layout, chunks, grouping), test, (1.3, 2.5))
    narrow_limits(monkeypatch, rank=90 if grouping == "kv" else 180, complete=64)
    transform = PcaTransform.fit(layout, chunks, grouping)
    assert transform.basis.sizes == ([90, 90] if grouping == "kv" else [180])
    assert transform.coefficients.shape[1] == 180
    for one, other in zip(figures(transform, test, (1.3, 2.5)), exact, strict=True):
        assert one == pytest.approx(other, rel=0.03)


@pytest.mark.parametrize("complete", [64, 240])
def test_kvtc_with_a_wide_group_codes_its_components(complete: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, chunks = wide_caches(range(8))
    (test,) = wide_caches(range(9, 10))[1]
    exact = Kvtc.fit(layout, chunks).method(1.0)
    narrow_limits(monkeypatch, rank=90, complete=complete)
    transform = PcaTransform.fit(layout, chunks, "kv")
    method = Kvtc.fit(layout, chunks, transform.basis).method(1.0)
    assert method.basis is transform.basis
    found = []
    for one in (method, exact):
        stored, bits = one.encode(test)
        found.append((bits, float((free(one.decode(stored)) - free(test)).square().sum())))
    assert found[0] == pytest.approx(found[1], rel=0.03)


def test_a_very_wide_group_needs_tokens_for_its_components_only(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, (chunk,) = wide_caches(range(1))
    narrow_limits(monkeypatch, rank=44, complete=64)
    assert PcaTransform.fit(layout, [chunk.slice(0, 100)], "kv").basis.sizes == [44, 44]
    with pytest.raises(InputError, match="99 tokens, and a basis of 120 values needs 100"):
        PcaTransform.fit(layout, [chunk.slice(0, 99)], "kv")


def test_all_arithmetic_stays_on_the_device_of_the_chunks(layouts: dict[str, KVLayout], make_chunk: Make) -> None:
    layout = layouts["gqa"]
    chunks = caches(make_chunk, layout)
    with torch.device("meta"):  # what is created without a device would end up there, apart from the chunks
        for method in both(layout, chunks):
            stored, bits = method.encode(chunks[0])
            assert math.isfinite(bits) and method.decode(stored).device == chunks[0].device
