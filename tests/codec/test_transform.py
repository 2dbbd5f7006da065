"""Sections, blocks, bases: a partition, an isometry in the metric's coordinates, and its inverse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.codec.reference import get_stages, stage_names

from cuvee.codec.chunk import KVChunk
from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout, LayerLayout, Rope
from cuvee.codec.profiles.section_basis import eigenbasis
from cuvee.codec.profiles.sections import partition
from cuvee.codec.profiles.token_prediction import Predictions
from cuvee.codec.stages import transform
from cuvee.codec.stages.compiled import transform as transform_numba
from cuvee.codec.stages.rotation import Rotation
from cuvee.codec.stages.rows import Rows, dense_rows
from cuvee.codec.stages.transform import Centers, gather
from cuvee.codec.support.arrays import F32

CPU = torch.device("cpu")


def test_partition_by_hand() -> None:
    layout = KVLayout("synthetic", (LayerLayout(2, 4, 3, None), LayerLayout(1, 5, 6, None)), "float32", None)
    cut = {group: partition(layout, group) for group in ("head", "unit", "layer", "layers:2", "all")}
    assert [s.blocks for s in cut["head"]] == [(4, 4, 3, 3), (5, 6)]
    assert [s.blocks for s in cut["unit"]] == [(8, 6), (5, 6)]
    assert [s.blocks for s in cut["layer"]] == [(14,), (11,)]
    assert [s.blocks for s in cut["all"]] == [(25,)] == [s.blocks for s in cut["layers:2"]]


def test_heads_of_several_layers_by_hand() -> None:
    """Head, then layer, then K before V."""
    layers = (LayerLayout(2, 4, 3, None), LayerLayout(2, 2, 1, None), LayerLayout(1, 5, 6, None))
    layout = KVLayout("synthetic", layers, "float32", None)
    both, last = partition(layout, "heads:2")
    assert (both.first_layer, both.end_layer, both.blocks) == (0, 2, (10, 10))
    assert (last.first_layer, last.end_layer, last.blocks) == (2, 3, (11,))
    assert [s.blocks for s in partition(layout, "heads:1")] == [(7, 7), (3, 3), (11,)]
    keys = [torch.arange(8.0).view(1, 2, 4), 20 + torch.arange(4.0).view(1, 2, 2), torch.zeros(1, 1, 5)]
    values = [10 + torch.arange(6.0).view(1, 2, 3), 30 + torch.arange(2.0).view(1, 2, 1), torch.zeros(1, 1, 6)]
    x = gather(KVChunk(keys, values, layout), both, None, slice(0, 1))
    heads = [[0, 1, 2, 3, 10, 11, 12, 20, 21, 30], [4, 5, 6, 7, 13, 14, 15, 22, 23, 31]]
    assert x.tolist() == [heads[0] + heads[1]]
    with pytest.raises(
        InputError, match=r"^group: 'heads:3' must span layers with as many heads, got 2 and 1 in layers"
    ):
        partition(layout, "heads:3")


def empty_outputs(layout: KVLayout, tokens: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Poisoned, so that whatever is not written shows."""
    nan = float("nan")
    keys = [torch.full((tokens, x.kv_heads, x.head_dim), nan, dtype=layout.torch_dtype) for x in layout.layers]
    values = [torch.full((tokens, x.kv_heads, x.value_dim), nan, dtype=layout.torch_dtype) for x in layout.layers]
    return keys, values


def rows_of(outputs: tuple[list[torch.Tensor], list[torch.Tensor]]) -> tuple[list[Rows], list[Rows]]:
    return list(map(dense_rows, outputs[0])), list(map(dense_rows, outputs[1]))


@pytest.mark.parametrize(
    ("dtype", "x_dtype", "means", "size", "rotary"),
    [
        ("bfloat16", torch.bfloat16, 1, 33, 0), ("bfloat16", torch.float32, 4, 64, 64),
        ("bfloat16", torch.float32, 1, 100, 44), ("float16", torch.float32, 63, 16, 4),
        ("float16", torch.bfloat16, 4, 16, 16), ("float32", torch.float32, 1, 100, 64),
        ("float32", torch.bfloat16, 63, 16, 0), ("float32", torch.float32, 4, 80, 80),
    ],
)  # fmt: skip
def test_both_places_write_the_same_bits(dtype: str, x_dtype: torch.dtype, means: int, size: int, rotary: int) -> None:
    """The compiled loops take sixteen values at a time, and the rest one by one."""
    rope = Rope(tuple(0.3**i for i in range(rotary // 2)), 1.3) if rotary else None
    layout = KVLayout("synthetic", (LayerLayout(2, size, 5, rope),) * 2, dtype, None)
    (section,) = partition(layout, "all")
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(63, section.values, generator=generator) * 10 ** torch.linspace(-30, 30, section.values)).to(
        x_dtype
    )
    # Beyond the range of float16, of bfloat16, and, where they are rotated, of float32.
    x[5, 3], x[6, 30], x[7, 40] = 3.401e38, -3.401e38, 3.401e38
    x.clamp_(-torch.finfo(x_dtype).max, torch.finfo(x_dtype).max)
    mean = torch.randn(means, section.values, generator=generator)
    # Half-way between two bfloat16, above an even one and above an odd one: the values of the last layer.
    x[:, -10:], mean[:, -10:-5], mean[:, -5:] = 0, 1 + 2**-8, 1 + 3 * 2**-8
    rotation = Rotation(1000, 100, CPU)
    outputs = [empty_outputs(layout, 100) for _ in range(2)]
    for implementation, out in zip((transform.scatter, transform_numba.scatter), outputs, strict=True):
        implementation(x, Centers(mean), section, layout, rotation, slice(37, 100), *rows_of(out))
    for one, other in zip(*outputs, strict=True):
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            assert bool(a[:37].isnan().all()) and bool(a[37:].isfinite().all())
    if dtype == "bfloat16":
        ties = torch.tensor([[1.0] * 5, [1 + 2**-6] * 5]).bfloat16()
        assert torch.equal(outputs[0][1][1][37:], ties.expand(63, 2, 5))
    # The last mean serves all further tokens: the same as if it was repeated.
    repeated = empty_outputs(layout, 100)
    whole = torch.cat([mean, mean[-1:].expand(63 - means, -1)])
    transform.scatter(x, Centers(whole), section, layout, rotation, slice(37, 100), *rows_of(repeated))
    for one, other in zip(repeated, outputs[0], strict=True):
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize(
    ("dtype", "rotary", "strided", "special"),
    [
        (torch.bfloat16, 16, False, (7, 1, 15)), (torch.bfloat16, 4, True, None), (torch.float16, 0, False, None),
        (torch.float16, 16, True, (40, 0, 1)), (torch.float32, 4, False, (7, 1, 15)), (torch.float32, 16, True, None),
    ],
)  # fmt: skip
def test_both_moves_write_the_same_bits(
    dtype: torch.dtype, rotary: int, strided: bool, special: tuple[int, int, int] | None
) -> None:
    """Infinite keys included, in rows that lie in any order, some of which are left out."""
    rope = Rope(tuple(0.3**i for i in range(rotary // 2)), 1.3) if rotary else None
    layer = LayerLayout(2, 16, 5, rope)
    generator = torch.Generator().manual_seed(0)
    stored = torch.randn(60, 2, 16, generator=generator).to(dtype)
    stored[3] = torch.finfo(dtype).max
    if special is not None:
        stored[special] = torch.inf
        if dtype == torch.bfloat16:
            stored.view(torch.int16)[9, 1, 15] = 0x7F81  # a NaN whose payload a conversion does not keep
    unrotation = Rotation(5, 100, CPU, inverse=True)
    rotation = Rotation(3000, 100, CPU)
    begins = 40 * torch.randperm(100, generator=generator).numpy()
    begins[[40, 55]] = -1
    strides = {"head_stride": 1, "dim_stride": 2} if strided else {"head_stride": 16}
    written = []
    for implementation in (transform.move_keys, transform_numba.move_keys):
        memory = torch.full((4040,), 5.0, dtype=dtype)
        rows = Rows(memory, begins, heads=2, size=16, **strides)
        implementation(stored, layer, unrotation, rotation, slice(37, 97), rows)
        written.append(memory)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(written[0].view(bits), written[1].view(bits))
    assert int((written[0] != 5).sum()) == 58 * 32
    assert special is not None or bool(written[0].isfinite().all())  # also where a rotation leaves the dtype's range
    if rotary == 0 and not strided and special is None:
        at = int(begins[37])
        assert torch.equal(written[0][at : at + 32], stored[0].flatten())


@pytest.mark.parametrize("rank", [0, 1, 5])
def test_eigenbasis_of_singular_matrices(rank: int) -> None:
    covariance, metric = random_covariance(12, 0), random_covariance(12, 1)
    flat = torch.linalg.eigh(metric)[1][:, :rank]
    for c, m in ((covariance, flat @ flat.T), (flat @ flat.T, metric)):
        inverse, deviation = eigenbasis(c, m)
        assert bool(torch.isfinite(inverse).all() and torch.isfinite(deviation).all())
        assert int(torch.linalg.matrix_rank(inverse)) == 12


class Fresh(Rotation):
    """Keeps no tables, as if another thread replaced them at once: they last as long as their caller holds them."""

    def tables(self, rope: Rope, at: slice) -> tuple[F32, F32]:
        cos, sin = Rotation(self._run.start, len(self._run), CPU, self._inverse).tables(rope, at)
        return cos.copy(), sin.copy()


def test_rotation_tables_are_held_while_values_are_gathered() -> None:
    """The loop gets addresses. Tables are large, so that freed ones go back to the system or serve the next unit."""
    ropes = [Rope(tuple((0.2 + 0.1 * layer) ** i for i in range(32))) for layer in range(6)]
    layout = KVLayout("mine", tuple(LayerLayout(1, 64, 64, rope) for rope in ropes), "float32", None)
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(6, 5000, 1, 64, generator=generator).unbind() for _ in range(2))
    chunk = KVChunk(list(keys), list(values), layout)
    (section,) = partition(layout, "layers:6")
    mean, at = torch.zeros(1, section.values), slice(0, 5000)
    expected = transform.gather_centered(chunk, section, Rotation(0, 5000, CPU, inverse=True), at, Centers(mean))
    fresh = transform_numba.gather_centered(chunk, section, Fresh(0, 5000, CPU, inverse=True), at, Centers(mean))
    torch.testing.assert_close(fresh, expected)


@pytest.mark.parametrize(
    ("dtype", "bad", "unit", "size", "rotary"),
    [
        (torch.bfloat16, float("nan"), "keys", 10, 8), (torch.float16, -float("inf"), "values", 64, 64),
        (torch.float32, float("inf"), "keys", 100, 44), (torch.float32, float("nan"), "values", 80, 80),
        (torch.bfloat16, float("inf"), "values", 33, 0), (torch.bfloat16, float("nan"), "keys", 100, 64),
    ],
)  # fmt: skip
def test_what_is_gathered_is_finite(dtype: torch.dtype, bad: float, unit: str, size: int, rotary: int) -> None:
    """Both implementations gather the same values, and refuse one that is not finite wherever it stands."""
    name = str(dtype).removeprefix("torch.")
    rope = Rope(tuple(1e4 ** (-2 * i / rotary) for i in range(rotary // 2)), 1.1) if rotary else None
    layout = KVLayout("mine", (LayerLayout(2, size, 6, rope),) * 2, name, max_positions=None)
    section = partition(layout, "all")[0]
    means = torch.randn(3, section.values, generator=torch.Generator().manual_seed(1))
    for tokens, at in ((1, slice(0, 1)), (63, slice(0, 63)), (63, slice(20, 63))):
        mean, generator = means[: at.stop - at.start], torch.Generator().manual_seed(tokens)
        tensors = {
            "keys": torch.randn(2, tokens, 2, size, generator=generator).to(dtype),
            "values": torch.randn(2, tokens, 2, 6, generator=generator).to(dtype),
        }
        chunk = KVChunk(tensors["keys"], tensors["values"], layout, 5)
        rotation = Rotation(5, tokens, CPU, inverse=True)
        guess = Predictions(
            torch.randn(4, section.values, generator=generator).bfloat16(), np.arange(at.stop - at.start) % 4
        )
        for predictions in (None, guess):
            one, other = (
                module.gather_centered(chunk, section, rotation, at, Centers(mean, predictions)).clone()
                for module in (transform, transform_numba)
            )
            assert torch.equal(one, other)
        for where in ((0, at.start, 0, 0), (1, at.stop - 1, 1, 5), (1, at.start, 1, 4)):
            kept = tensors[unit][where].clone()
            tensors[unit][where] = bad
            for module in (transform, transform_numba):
                with pytest.raises(InputError, match="NaN or infinite values in layers 0 … 1"):
                    module.gather_centered(chunk, section, rotation, at, Centers(mean))
            tensors[unit][where] = kept


def random_covariance(size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(size, size, generator=generator, dtype=torch.float64)
    mix *= 0.8 ** torch.arange(size)
    return mix @ mix.T


def test_eigenbasis() -> None:
    size = 24
    covariance, metric = random_covariance(size, 0), random_covariance(size, 1)
    metric += 1e-3 * metric.diagonal().mean() * torch.eye(size, dtype=torch.float64)
    inverse, deviation = eigenbasis(covariance, metric)
    forward = torch.linalg.inv(inverse)
    identity = torch.eye(size, dtype=torch.float64)
    torch.testing.assert_close(inverse @ forward, identity, rtol=0, atol=1e-9)
    # Decorrelated, in order of falling energy, and `deviation` is that energy.
    energy = forward @ covariance @ forward.T
    torch.testing.assert_close(energy, deviation.square().diag(), rtol=1e-9, atol=1e-9 * float(energy.max()))
    assert bool((deviation.diff() <= 0).all())
    # The squared error in y is the metric's: dx^T M dx.
    dx = torch.randn(100, size, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close((dx @ forward.T).square().sum(1), ((dx @ metric) * dx).sum(1), rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", stage_names())
def test_a_product_ends_where_columns_need_less(name: str) -> None:
    product_runs = get_stages(name).product_runs
    ranks = tuple((100 - 6 * k,) for k in range(16))
    falling = np.repeat(np.arange(16, dtype=np.uint8), 10)
    runs = list(product_runs(falling, ranks))
    # Column 50 is the first to need less than 75 of 100 rows, and a run has a multiple of 32 columns.
    assert runs == [(slice(0, 64), (100,)), (slice(64, 96), (64,)), (slice(96, 128), (46,)), (slice(128, 160), (28,))]
    short = np.repeat(np.arange(16, dtype=np.uint8), 2)  # fewer columns than a product is worth
    assert list(product_runs(short, ranks)) == [(slice(0, 32), (100,))]


@pytest.mark.parametrize("name", stage_names())
def test_a_product_is_as_deep_as_its_deepest_column(name: str) -> None:
    product_runs = get_stages(name).product_runs
    ranks = tuple((100 - k,) for k in range(16))
    windows = np.array([8] * 40 + [2] * 40, np.uint8)  # the next window begins with finer columns again
    assert list(product_runs(windows, ranks)) == [(slice(0, 64), (98,)), (slice(64, 80), (98,))]
    late = np.array([8] * 64 + [2] * 40, np.uint8)
    assert list(product_runs(late, ranks)) == [(slice(0, 64), (92,)), (slice(64, 104), (98,))]
    early = np.array([8] * 10 + [2] * 40, np.uint8)
    assert list(product_runs(early, ranks)) == [(slice(0, 32), (98,)), (slice(32, 50), (98,))]
    blocks = ((9, 4),) * 4 + ((5, 4),) * 12
    assert list(product_runs(np.array([3, 3, 5], np.uint8), blocks)) == [(slice(0, 2), (9, 4)), (slice(2, 3), (5, 4))]
