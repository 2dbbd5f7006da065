"""`rotate` and `unrotate` against the keys that transformers models of every family cache."""

from __future__ import annotations

import sys
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


class Recorder:
    """Runs a model and keeps, for every layer, its keys before RoPE and in the cache."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = model
        self.before: list[torch.Tensor] = []
        module = sys.modules[type(model).__module__]
        names = (
            "apply_rotary_pos_emb_interleave",
            "apply_rotary_pos_emb",
            "apply_rotary_emb",
        )  # the first is DeepSeek's
        name = next((name for name in names if hasattr(module, name)), None)
        if name is not None:
            original = getattr(module, name)

            def record(q: torch.Tensor, k: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                own = k[0].transpose(0, 1)
                sorts = name == "apply_rotary_pos_emb_interleave"
                self.before.append(torch.cat([own[..., 0::2], own[..., 1::2]], -1) if sorts else own)
                return original(q, k, *args, **kwargs)

            monkeypatch.setattr(module, name, record)

    def keys(self, offset: int) -> list[torch.Tensor]:
        """Cached keys [T, H, D] per layer of fixed tokens at positions offset, offset + 1, ..."""
        layers = KVLayout.from_config(self.model.config, "float32").layers
        self.before.clear()
        ids = torch.arange(TOKENS)[None] % 7 + 1
        cache: Any = DynamicCache()
        with torch.no_grad():
            self.model(ids, position_ids=positions(offset)[None], **cache_argument(self.model, cache))
        return [layer_units(*pair)[0][0].transpose(0, 1) for pair in zip(cache.layers, layers, strict=True)]


def positions(offset: int) -> torch.Tensor:
    return torch.arange(TOKENS) + offset


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest error in units of the largest key."""
    return float((got - expected.float()).abs().max() / expected.float().abs().max())


def test_moves_keys_to_where_the_model_puts_them(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(family)
    layout = KVLayout.from_config(model.config, dtype=torch.float32)
    recorder = Recorder(model, monkeypatch)
    far = recorder.keys(FAR)
    near = recorder.keys(NEAR)
    assert len(near) == layout.num_layers
    recorded = iter(recorder.before)
    for index, layer in enumerate(layout.layers):
        assert near[index].shape[1:] == (layer.kv_heads, layer.head_dim)
        free = unrotate(near[index], layer.rope, positions(NEAR))
        if layer.rope is None:
            assert torch.equal(free, near[index])
            continue
        before = next(recorded)
        turned = before.shape[-1]  # some models give their rotation nothing else
        assert relative_error(free[..., :turned], before) < 1e-6
        again = rotate(before, layer.rope, positions(NEAR))
        if family == "deepseek_v2":  # which rotates complex numbers, and rounds them otherwise
            assert relative_error(again, near[index]) < 1e-6
        else:
            assert torch.equal(again, near[index][..., :turned])
        moved = rotate(free, layer.rope, positions(FAR))
        # Later layers see attention over the other positions, equal up to rounding.
        assert relative_error(moved, far[index]) < (1e-6 if index == 0 else 2e-4)
    assert next(recorded, None) is None


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tail", [0, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
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


def test_no_rope_only_converts() -> None:
    keys = torch.randn(4, 2, 6)
    assert rotate(keys, None, torch.arange(4)) is keys
    assert unrotate(keys.bfloat16(), None, torch.arange(4)).dtype == torch.float32


def test_no_tokens() -> None:
    assert rotate(torch.empty(0, 2, 6), Rope((1.0,)), torch.empty(0, dtype=torch.int64)).shape == (0, 2, 6)
