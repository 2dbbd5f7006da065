"""Products of coefficients with inverse maps: dense ones, and those that skip zeros."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tests.codec.reference import product as reference
from tests.conftest import fitted_profile, synthetic_chunk
from tests.cpus import needs_avx2
from tests.predicting import VOCABULARY, predicting

from cuvee.codec.codec import Codec
from cuvee.codec.profiles.block_map import BlockMap
from cuvee.codec.profiles.section_basis import InverseMaps, SectionBasis
from cuvee.codec.schemes import transform as transform_scheme
from cuvee.codec.stages.columns import padded
from cuvee.codec.stages.compiled import integer_product
from cuvee.codec.stages.compiled import product as compiled
from cuvee.codec.stages.products import DENSE_BFLOAT16, DENSE_INT16, SLAB, Products
from cuvee.codec.support.arrays import F32
from cuvee.codec.support.integer_maps import IntegerMaps

INTEGER_ERROR = 3e-4  # of a value, of the norms of a column and of the value's map


def maps(sizes: Sequence[int], components: int, seed: int = 0) -> list[torch.Tensor]:
    """Inverse maps `[n, components]`."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(n, components, generator=draw) for n in sizes]


def sparse(shape: Sequence[int], share: float, seed: int = 1) -> torch.Tensor:
    """Coefficients of which about this share is not zero."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw) * (torch.rand(shape, generator=draw) < share)


def shares(matrices: Sequence[torch.Tensor], of_slabs: Sequence[float] = ()) -> list[F32]:
    """Expected shares of coefficients other than zero: of one block by slab, or 0."""
    if of_slabs:
        return [np.repeat(np.array(of_slabs, np.float32), SLAB)[: matrices[0].shape[1]]]
    return [np.zeros(matrix.shape[1], np.float32) for matrix in matrices]


@dataclass
class Block:
    """A block's map, as it is."""

    inverse: torch.Tensor


def kept(matrices: Sequence[torch.Tensor]) -> InverseMaps:
    return InverseMaps([Block(matrix) for matrix in matrices])


def kind_of(y: torch.Tensor) -> Products:
    """How coefficients of this dtype are multiplied, other than mixed."""
    return Products.BFLOAT16 if y.dtype == torch.bfloat16 else Products.FLOAT32


def product(stage: ModuleType, y: torch.Tensor, matrices: Sequence[torch.Tensor]) -> torch.Tensor:
    """`synthesize` of one implementation, into memory that holds NaN."""
    inverse = stage.prepare_inverse(kept(matrices), y.shape[1], kind_of(y), shares(matrices))
    out = torch.full((y.shape[2] * sum(map(len, matrices)),), float("nan"), dtype=y.dtype)
    x: torch.Tensor = stage.synthesize(y, inverse, [(slice(0, y.shape[2]), [y.shape[1]] * len(y))], out)
    assert x.data_ptr() == out.data_ptr()
    return x


@pytest.mark.parametrize(
    ("values", "share"), [(1, 0.3), (7, 1.0), (16, 0.0), (40, 0.02), (64, 0.9), (100, 0.3), (130, 0.02), (384, 0.9)]
)
def test_both_products_are_the_exact_one(values: int, share: float) -> None:
    for width, components, rows in ((1, 5, 32), (17, 96, 96), (256, 130, 160)):
        matrices = maps([values, values], components)
        y = torch.zeros(2, rows, width)
        y[:, :components] = sparse((2, components, width), share)
        want = torch.cat([own[:components].double().T @ m.double().T for own, m in zip(y, matrices, strict=True)], 1)
        for stage in (reference, compiled):
            x = product(stage, y, matrices)
            joined = torch.cat(list(x), 1) if x.ndim == 3 else x
            torch.testing.assert_close(joined.double(), want, rtol=1e-5, atol=1e-4)


def test_a_column_does_not_depend_on_others() -> None:
    matrices = maps([200], 64)
    y = sparse((1, 64, 50), 0.3)
    whole = product(compiled, y, matrices)
    for at in (slice(0, 1), slice(3, 20), slice(16, 48), slice(49, 50)):
        assert torch.equal(product(compiled, y[:, :, at].contiguous(), matrices), whole[at])
    y[:, :, 7] = float("nan")  # undefined: a column without a token
    kept = [t for t in range(50) if t != 7]
    assert torch.equal(product(compiled, y, matrices)[kept], whole[kept])


@pytest.mark.parametrize("stage", [reference, compiled])
@pytest.mark.parametrize(
    ("of_slabs", "rows"),
    [((0.9, 0.9, 0.1, 0.1), 256), ((0.9, 0.1, 0.9, 0.9), 160), ((0.3,) * 4, 100), ((0.3,) * 4, 1), ((0.1,) * 4, 64)],
)
def test_slabs_with_few_zeros_are_multiplied_in_bfloat16(
    of_slabs: tuple[float, ...], rows: int, stage: ModuleType
) -> None:
    matrices = maps([200], rows)
    expected = shares(matrices, of_slabs)
    inverse = stage.prepare_inverse(kept(matrices), rows, Products.MIXED, expected)
    y = torch.zeros(1, padded(rows), 40)
    y[:, :rows] = sparse((1, rows, 40), 1.0) * (torch.rand(rows, 40) < torch.from_numpy(expected[0])[:, None])
    leading = 64 * next((slab for slab, share in enumerate(of_slabs) if share < DENSE_BFLOAT16), 4)
    narrow, rest = y[0].clone(), y[0].clone()
    rest[:leading] = narrow[leading:] = 0
    m = torch.zeros(200, padded(rows))
    m[:, :rows] = matrices[0]
    dense = narrow.T.bfloat16().double() @ m.T.bfloat16().double()
    out = torch.full((40 * 200,), float("nan"))
    x = stage.synthesize(y, inverse, [(slice(0, 40), [padded(rows)])], out)
    assert x.data_ptr() == out.data_ptr()
    assert x.dtype == (torch.bfloat16 if leading >= rows else torch.float32)
    x = x.reshape(40, 200).double()
    if leading == 0:
        torch.testing.assert_close(x, rest.T.double() @ m.T.double(), rtol=1e-5, atol=1e-4)
    # A CPU without instructions for bfloat16 may round sums of a few products, too.
    assert ((x - dense - rest.T.double() @ m.T.double()).abs() <= dense.abs() / 128 + 0.1).all()


@needs_avx2
@pytest.mark.parametrize(
    ("of_slabs", "sizes", "width"),
    [
        ((0.9, 0.9, 0.9), (1,), 1), ((0.9, 0.9, 0.9), (40, 200, 7), 35), ((0.9, 0.1, 0.1), (16, 16), 64),
        ((0.9, DENSE_INT16 - 0.01, 0.9), (40, 200, 7), 6),
    ],
)  # fmt: skip
def test_slabs_with_few_zeros_are_multiplied_as_integers(
    of_slabs: tuple[float, ...], sizes: tuple[int, ...], width: int
) -> None:
    matrices = [2.0**-i * one for i, one in enumerate(maps(sizes, 133))]
    expected = [np.repeat(np.array(of_slabs, np.float32), SLAB)[:133] for _ in sizes]
    inverse = compiled.prepare_inverse(kept(matrices), 133, Products.INT16, expected)
    for depth in (32, 64, 160):
        there = min(depth, 133)
        y = torch.zeros(len(sizes), depth, width)
        y[:, :there] = sparse((len(sizes), there, width), 0.7) * torch.logspace(-6, 6, width)
        out = torch.full((width * sum(sizes),), float("nan"))
        x = compiled.synthesize(y, inverse, [], out)
        assert x.data_ptr() == out.data_ptr() and x.dtype == torch.float32
        parts = x.double().split(sizes, 1)
        for own, matrix, part in zip(y.double(), matrices, parts, strict=True):
            m = matrix[:, :there].double()
            bound = INTEGER_ERROR * own.norm(dim=0)[:, None] * matrix.double().norm(dim=1)
            assert ((part - own[:there].T @ m.T).abs() <= bound).all()
        # The integer products of a column are the same ones beside other columns.
        if of_slabs[1] > DENSE_INT16:
            for t in (0, width - 1):
                alone = compiled.synthesize(y[:, :, t : t + 1].contiguous(), inverse, [], torch.empty(sum(sizes)))
                assert torch.equal(alone[0], x[t])


@needs_avx2
@pytest.mark.parametrize(
    ("sizes", "known", "run"),
    [((7,), 0, slice(0, 1)), ((33, 5, 16), 6, slice(3, 38)), ((16, 130), 1, slice(7, 71)), ((40, 9), 45, slice(3, 38))],
)
def test_an_encoder_multiplies_integers_exactly(sizes: tuple[int, ...], known: int, run: slice) -> None:
    draw = torch.Generator().manual_seed(2)
    blocks = [BlockMap.of(torch.randn(n, n, generator=draw), np.zeros(n, np.int16)) for n in sizes]
    basis = SectionBasis(torch.zeros(sum(sizes)), torch.zeros(0, sum(sizes)), tuple(blocks))
    x = torch.randn(75, sum(sizes), generator=draw) * torch.logspace(-15, 15, 75)[:, None]
    x[20], ranks = 0, [n - i for i, n in enumerate(sizes)]
    found = [torch.full((sum(sizes), 75), -1.0) for _ in range(2)]
    for stage, y in zip((reference.analyze, integer_product.analyze), found, strict=True):
        stage(x, basis, run, ranks, Products.INT16, known, y)
    assert torch.equal(*found)
    row = 0
    for own, matrix, rank in zip(x.split(sizes, 1), basis.forward, ranks, strict=True):
        left = min(known if row == 0 else 0, rank)  # as it is
        bound = INTEGER_ERROR * own[run].norm(dim=1) * matrix[:rank, None].double().norm(dim=2)
        error = (found[0][row : row + rank, run] - matrix[:rank].double() @ own[run].double().T).abs()
        assert (error <= bound)[left:].all()
        found[0][row + left : row + rank, run] = -1
        row += rank
    assert (found[0] == -1).all()


@needs_avx2
def test_the_largest_sums_of_integers_fit() -> None:
    """Columns and maps that point the same way, with one entry or with many of a size."""
    for rows in (1, 2, 96, 1024):
        y = torch.zeros(1, padded(rows), 20)
        y[:, :rows] = torch.ones(rows, 1) * torch.logspace(-3, 15, 20)
        matrix = torch.cat(
            [torch.ones(8, rows), -torch.ones(8, rows), 1e-9 * torch.ones(2, rows), torch.zeros(2, rows)]
        )
        inverse = compiled.prepare_inverse(kept([matrix]), rows, Products.INT16, [np.ones(rows, np.float32)])
        x = compiled.synthesize(y, inverse, [], torch.empty(400))
        torch.testing.assert_close(x.double(), y[0, :rows].T.double() @ matrix.T.double(), rtol=INTEGER_ERROR, atol=0)


@needs_avx2
def test_a_block_may_have_nothing_that_is_dense() -> None:
    """Integers serve the block before it, and none of its own."""
    blocks = maps([40, 24], 64)
    expected = [np.ones(64, np.float32), np.zeros(64, np.float32)]
    y = torch.cat([sparse((1, 64, 20), 0.9), sparse((1, 64, 20), 0.1)])
    mixed, exact = (
        compiled.synthesize(
            y, compiled.prepare_inverse(kept(blocks), 64, kind, expected), [], torch.empty(20 * 64)
        ).clone()
        for kind in (Products.INT16, Products.FLOAT32)
    )
    assert torch.equal(mixed[:, 40:], exact[:, 40:])
    assert 0 < float((mixed[:, :40] - exact[:, :40]).abs().max()) <= INTEGER_ERROR * float(y.norm(dim=1).max())


@needs_avx2
def test_integers_of_a_column_without_a_token_do_not_matter() -> None:
    matrices = maps([40], 64)
    inverse = compiled.prepare_inverse(kept(matrices), 64, Products.INT16, [np.ones(64, np.float32)])
    y = sparse((1, 64, 20), 0.9)
    y[:, :, 3] = 0
    want = compiled.synthesize(y, inverse, [], torch.empty(800)).clone()
    assert not want[3].any()
    for undefined in (float("nan"), float("inf"), 3e38):
        y[:, :, 7] = undefined
        found = compiled.synthesize(y, inverse, [], torch.empty(800))
        assert torch.equal(found[:7], want[:7]) and torch.equal(found[8:], want[8:])


@pytest.mark.parametrize("stage", [reference, compiled])
@pytest.mark.parametrize("sizes", [(40,), (40, 40), (40, 200)])
def test_a_tile_may_have_fewer_rows_than_are_dense(sizes: tuple[int, ...], stage: ModuleType) -> None:
    matrices = maps(sizes, 160)
    expected = [shares(matrices[:1], [0.9, 0.9, 0.0])[0], *shares(matrices[1:])]
    inverse = stage.prepare_inverse(kept(matrices), 160, Products.MIXED, expected)
    for depth in (0, 32, 128, 160):
        y = sparse((len(sizes), depth, 9), 0.5)
        out = torch.full((9 * sum(sizes),), float("nan"))
        x = stage.synthesize(y, inverse, [(slice(0, 9), [depth] * len(sizes))], out)
        assert x.data_ptr() == out.data_ptr() and x.dtype == torch.float32
        want = torch.cat([own.double().T @ m[:, :depth].double().T for own, m in zip(y, matrices, strict=True)], 1)
        torch.testing.assert_close(x.double(), want, rtol=0.02, atol=0.1)


@pytest.mark.parametrize("backend", ["numba", "reference"])
@pytest.mark.parametrize("products", Products)
def test_maps_are_kept_once_whatever_is_decoded(
    backend: str, products: Products, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At three steps, with and without token ids: a profile's maps are larger than all else that a codec holds."""
    profile = predicting(fitted_profile("gqa", "layer"))
    monkeypatch.setattr(transform_scheme, "products_for", lambda layout: products)
    chunk = synthetic_chunk(profile.layout, 70, 99)
    with_ids = replace(chunk, token_ids=np.arange(chunk.tokens) % VOCABULARY)
    held = []
    for step in (0.02, 0.2, 1.0):
        codec = Codec(profile, step=step, backend=backend)
        for own in (chunk, with_ids):
            codec.decode(codec.encode(own))
        schemes = codec._backends.of("cpu")._schemes.values()  # type: ignore[attr-defined]
        held += [inverse for scheme in schemes for inverse in scheme._inverses.values()]
    assert len(held) == 6 * len(profile.sections)
    storages = {tensor.untyped_storage().data_ptr() for inverse in held for tensor in tensors_of(inverse)} - {0}
    forms = 2 if products in (Products.MIXED, Products.INT16) else 1  # float32, and one with fewer bits
    assert len(profile.sections) <= len(storages) <= forms * len(profile.sections)


def tensors_of(inverse: Any) -> list[torch.Tensor]:
    """The tensors that a prepared inverse holds."""
    if isinstance(inverse, torch.Tensor):
        return [inverse] if inverse.numel() else []
    if isinstance(inverse, IntegerMaps):
        return [torch.from_numpy(inverse.matrix)]
    if isinstance(inverse, tuple):
        return [tensor for each in inverse for tensor in tensors_of(each)]
    if is_dataclass(inverse):
        return tensors_of(tuple(getattr(inverse, field.name) for field in fields(inverse)))
    return []
