"""`rotate` and `unrotate` against the keys that transformers models of every family cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.conftest import tiny_model
from transformers import DynamicCache

from cuvee.codec.layout import KVLayout, Rope
from cuvee.codec.models.forward import cache_argument, layer_units
from cuvee.codec.rope import rotate, unrotate

TOKENS = 9
NEAR, FAR = 3, 1500


def keys(model: Any, layout: KVLayout, offset: int) -> list[torch.Tensor]:
    """Cached keys [T, H, D] per layer of fixed tokens at positions offset, offset + 1, ..."""
    cache: Any = DynamicCache()
    with torch.no_grad():
        ids = torch.arange(TOKENS)[None] % 7 + 1
        model(ids, position_ids=positions(offset)[None], **cache_argument(model, cache))
    return [layer_units(*pair)[0][0].transpose(0, 1) for pair in zip(cache.layers, layout.layers, strict=True)]


def positions(offset: int) -> torch.Tensor:
    return torch.arange(TOKENS) + offset


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest error in units of the largest key."""
    return float((got - expected.float()).abs().max() / expected.float().abs().max())


def test_moves_keys_to_where_the_model_puts_them(family: str) -> None:
    model = tiny_model(family)
    layout = KVLayout.from_config(model.config, dtype=torch.float32)
    far, near = keys(model, layout, FAR), keys(model, layout, NEAR)
    assert len(near) == layout.num_layers
    for index, layer in enumerate(layout.layers):
        assert near[index].shape[1:] == (layer.kv_heads, layer.head_dim)
        free = unrotate(near[index], layer.rope, positions(NEAR))
        if layer.rope is None:
            assert torch.equal(free, near[index])
            continue
        moved = rotate(free, layer.rope, positions(FAR))
        # Later layers see attention over the other positions, equal up to rounding.
        assert relative_error(moved, far[index]) < (1e-6 if index == 0 else 2e-4)


@pytest.mark.parametrize(
    ("interleaved", "tail", "dtype"), [(False, 0, torch.float32), (True, 5, torch.bfloat16), (False, 5, torch.float16)]
)
def test_round_trip(interleaved: bool, tail: int, dtype: torch.dtype) -> None:
    rope = Rope((1.0, 0.1, 0.003), attention_scaling=1.3, interleaved=interleaved)
    keys = torch.randn(63, 2, 6 + tail, generator=torch.Generator().manual_seed(1)).to(dtype)
    where = torch.randperm(63, generator=torch.Generator().manual_seed(2))
    turned = rotate(keys, rope, where)
    assert turned.dtype == torch.float32 and turned.shape == keys.shape
    assert torch.equal(turned[..., 6:], keys[..., 6:].float())
    torch.testing.assert_close(unrotate(turned, rope, where), keys.float(), rtol=0, atol=2e-6)
    torch.testing.assert_close(rotate(unrotate(keys, rope, where), rope, where), keys.float(), rtol=0, atol=2e-6)
    norms = turned[..., :6].norm(dim=-1) / keys[..., :6].float().norm(dim=-1)
    torch.testing.assert_close(norms, torch.full_like(norms, 1.3))
