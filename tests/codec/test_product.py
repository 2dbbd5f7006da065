"""Products of coefficients with inverse maps: dense ones, and those that skip zeros."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.schemes import transform as scheme
from cuvee.codec.stages.compiled import product as compiled
from cuvee.codec.stages.compiled.arena import Arena
from cuvee.codec.stages.reference import product as reference


def maps(sizes: Sequence[int], components: int, seed: int = 0) -> list[torch.Tensor]:
    """Inverse maps `[n, components]`."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(n, components, generator=draw) for n in sizes]


def sparse(shape: Sequence[int], share: float, seed: int = 1) -> torch.Tensor:
    """Coefficients of which about this share is not zero."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw) * (torch.rand(shape, generator=draw) < share)


def product(stage: ModuleType, y: torch.Tensor, matrices: Sequence[torch.Tensor]) -> torch.Tensor:
    """`synthesize` of one implementation, into memory that holds NaN."""
    inverse = stage.prepare_inverse(matrices, y.shape[1], y.dtype)
    out = torch.full((y.shape[2] * sum(map(len, matrices)),), float("nan"), dtype=y.dtype)
    x: torch.Tensor = stage.synthesize(y, inverse, [(slice(0, y.shape[2]), [y.shape[1]] * len(y))], out)
    assert x.data_ptr() == out.data_ptr()
    return x


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("values", [1, 7, 16, 40, 64, 100, 128, 130, 384])
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


def test_the_operations_that_are_executed() -> None:
    matrices, runs = maps([40, 40], 160), [(slice(0, 200), [160, 160]), (slice(200, 256), [32, 64])]
    inverse = compiled.prepare_inverse(matrices, 160, torch.float32)
    whole = 2 * 2 * 160 * 256 * 40
    assert compiled.executed_operations(torch.ones(2, 160, 256), inverse, runs) == whole
    assert compiled.executed_operations(torch.zeros(2, 160, 256), inverse, runs) == 0
    few = sparse((2, 160, 256), 0.1)
    assert compiled.executed_operations(few, inverse, runs) == 2 * int(few.count_nonzero()) * 40
    few[:, :64] = 1  # a slab that a dense product serves, zeros or not
    few[0, 3, :9] = 0
    own = 2 * 40 * (2 * 64 * 256 + int(few[:, 64:].count_nonzero()))
    assert compiled.executed_operations(few, inverse, runs) == own
    together = compiled.prepare_inverse(matrices, 160, torch.bfloat16)
    assert compiled.executed_operations(few.bfloat16(), together, runs) == whole
    apart = compiled.prepare_inverse(maps([40, 24], 160), 160, torch.bfloat16)
    assert compiled.executed_operations(few.bfloat16(), apart, runs) == (
        2 * (200 * 160 * (40 + 24) + 56 * (32 * 40 + 64 * 24))
    )


def test_a_dense_product_serves_coefficients_that_are_rarely_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    dense = torch.mm

    def counted(*args: Any, **names: Any) -> torch.Tensor:
        calls.append(args)
        return dense(*args, **names)

    monkeypatch.setattr(torch, "mm", counted)
    matrices = maps([200], 64)
    for share, expected in ((0.3, 0), (0.55, 0), (0.75, 2), (1.0, 2)):  # two tiles
        calls.clear()
        product(compiled, sparse((1, 64, 100), share), matrices)
        assert len(calls) == expected


def test_blocks_alike_without_zeros_share_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "mm", None)
    matrices, y = maps([50, 50, 50], 64), sparse((3, 64, 20), 0.9)
    x = product(compiled, y, matrices)
    want = y.double().mT @ torch.stack(matrices).double().mT
    assert x.shape == (3, 20, 50)
    torch.testing.assert_close(x.double(), want, rtol=1e-5, atol=1e-4)


def test_leading_slabs_without_zeros_get_a_dense_product_and_the_others_are_listed() -> None:
    matrices = maps([200], 400)
    for dense, share in ((0, 0.2), (64, 0.2), (128, 0.0), (192, 0.2)):
        y = sparse((1, 400, 40), share)
        y[:, :dense] = sparse((1, 400, 40), 0.95, seed=3)[:, :dense]
        lists = compiled._lists(40, 400)
        assert compiled._list_entries(y[0].numpy(), *lists) == dense
        want = y[0].double().T @ matrices[0].double().T
        torch.testing.assert_close(product(compiled, y, matrices).double(), want, rtol=1e-5, atol=1e-4)


def test_a_column_does_not_depend_on_others() -> None:
    matrices = maps([200], 64)
    y = sparse((1, 64, 50), 0.3)
    whole = product(compiled, y, matrices)
    for at in (slice(0, 1), slice(3, 20), slice(16, 48), slice(49, 50)):
        assert torch.equal(product(compiled, y[:, :, at].contiguous(), matrices), whole[at])
    y[:, :, 7] = float("nan")  # undefined: a column without a token
    kept = [t for t in range(50) if t != 7]
    assert torch.equal(product(compiled, y, matrices)[kept], whole[kept])


def test_coefficients_that_are_listed_are_those_that_are_not_zero() -> None:
    y = sparse((70, 37), 0.4)
    y[3, 5], y[69, 36], y[64, 36] = -0.0, 2.5, float("inf")
    rows, coefficients, begins = compiled._lists(37, 70)
    assert compiled._list_entries(y.numpy(), rows, coefficients, begins) == 0
    pitch = len(rows) // len(begins)
    for t in range(37):
        for slab in range(2):
            at = slice(t * pitch + begins[t, slab], t * pitch + begins[t, slab + 1])
            own = y[slab * compiled.SLAB : (slab + 1) * compiled.SLAB, t].numpy()
            (there,) = np.nonzero(own)
            assert rows[at].tolist() == (there + slab * compiled.SLAB).tolist()
            assert np.array_equal(coefficients[at], own[there])


@pytest.mark.parametrize("stage", [reference, compiled])
def test_the_product_of_nothing_is_zero(stage: ModuleType) -> None:
    assert torch.equal(product(stage, torch.empty(2, 0, 5), maps([3, 4], 0)), torch.zeros(5, 7))


def test_tiles_hold_the_transposed_map() -> None:
    (matrix,) = maps([150], 40)
    inverse = compiled.prepare_inverse([matrix], 33, torch.float32)
    assert isinstance(inverse, compiled.TiledInverse) and inverse.together is None
    (block,) = inverse.blocks
    assert (block.values, block.rows) == (150, 64)
    first = block.tiles[: 64 * compiled.TILE].view(64, compiled.TILE)
    rest = block.tiles[64 * compiled.TILE :].view(64, 32)
    assert torch.equal(first[:40], matrix[:128].T) and torch.equal(rest[:40, :22], matrix[128:].T)
    assert not first[40:].any() and not rest[40:].any() and not rest[:, 22:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_alike_are_multiplied_at_once_in_bfloat16(dtype: torch.dtype) -> None:
    matrices = maps([8, 8, 8], 40)
    y = sparse((3, 40, 20), 1.0).to(dtype)
    x = product(reference, y, matrices)
    assert x.ndim == (3 if dtype == torch.bfloat16 else 2)
    own = x if x.ndim == 3 else x.unflatten(1, (3, 8)).transpose(0, 1)
    want = y.float().mT @ torch.stack(matrices).mT
    torch.testing.assert_close(own.float(), want, rtol=0.02, atol=0.1 if dtype == torch.bfloat16 else 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_runs_of_columns_are_as_deep_as_they_need(dtype: torch.dtype) -> None:
    matrices = maps([8], 64)
    y = sparse((1, 64, 20), 1.0).to(dtype)
    y[:, 32:, 7:] = float("nan") if dtype == torch.float32 else 0  # a product of bfloat16 takes all columns
    runs = [(slice(0, 7), (64,)), (slice(7, 20), (32,))]
    x = reference.synthesize(y, reference.prepare_inverse(matrices, 64, dtype), runs, torch.empty(160).to(dtype))
    want = torch.cat([y[0, :, :7].float().T @ matrices[0].T, y[0, :32, 7:].float().T @ matrices[0][:, :32].T])
    torch.testing.assert_close(x.reshape(20, 8).float(), want, rtol=0.02, atol=0.1)


def test_products_of_bfloat16_are_dense() -> None:
    matrices = maps([40, 40], 32)
    y = sparse((2, 32, 9), 0.5).bfloat16()
    assert torch.equal(product(compiled, y, matrices), product(reference, y, matrices))
    assert product(compiled, y, matrices).shape == (2, 9, 40)  # one product for both blocks


@pytest.mark.parametrize("there", [False, True])
def test_only_cpus_with_matrix_instructions_multiply_bfloat16(
    there: bool, monkeypatch: pytest.MonkeyPatch, make_codec: Callable[..., Codec], make_chunk: Callable[..., KVChunk]
) -> None:
    seen = []

    class Recording(Arena):
        def tensor(self, name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
            seen.append((name, dtype))
            return super().tensor(name, size, dtype)

    codec = make_codec("bfloat16", "layer", step=0.1)
    chunk = make_chunk(codec.profile.layout, 100)
    blob = codec.encode(chunk)
    monkeypatch.setattr(scheme, "MATRIX_INSTRUCTIONS", there)
    monkeypatch.setattr(scheme, "_arena", Recording())
    back = codec.decode(blob)
    assert set(seen) == {("x", torch.bfloat16 if there else torch.float32)}
    for mine, own in zip(back.keys + back.values, chunk.keys + chunk.values, strict=True):
        torch.testing.assert_close(mine.float(), own.float(), rtol=0.02, atol=0.5)
