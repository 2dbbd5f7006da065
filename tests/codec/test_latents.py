"""Multi-head latent attention: its latents and rotated parts of keys through profile, codec, files and pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import tiny_model
from transformers import DynamicCache

import cuvee
from cuvee.codec.layout import KVLayout
from cuvee.codec.models.forward import cache_argument, layer_units, prefill, score
from cuvee.codec.paged import PagedCache
from cuvee.codec.paged_chunks import PagedChunks
from cuvee.integrations.pages.recognition import Recognizer
from cuvee.integrations.transformers.caches import chunks_from_cache

FAMILIES = ("deepseek_v2", "deepseek_v3")
LATENT, ROTATED = 12, 8


def text(sequences: int, length: int, seed: int) -> torch.Tensor:
    return torch.randint(61, (sequences, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param)


def cached(model: Any, ids: torch.Tensor) -> Any:
    cache: Any = DynamicCache()
    with torch.no_grad():
        model(ids, **cache_argument(model, cache))
    return cache


def layers(cache: Any) -> list[torch.Tensor]:
    return [unit for layer in cache.layers for unit in (layer.keys, layer.values)]


def test_a_token_is_one_latent_and_one_rotated_part(model: Any) -> None:
    layout = KVLayout.from_config(model.config)
    assert all((own.kv_heads, own.head_dim, own.value_dim) == (1, ROTATED, LATENT) for own in layout.layers)
    assert layout.relocatable and layout.values_per_token == 2 * (ROTATED + LATENT)
    cache = cached(model, text(1, 40, 0))
    (chunk,) = chunks_from_cache(cache, KVLayout.from_config(model.config, "float32"))
    assert torch.equal(chunk.values[1], cache.layers[1].keys[0].transpose(0, 1)), "transformers has them as keys"


def test_a_cache_comes_back_bit_for_bit(model: Any) -> None:
    codec = cuvee.Codec.without_profile(model.config)
    ids = text(2, 40, 0)
    cache = cached(model, ids)
    back = cuvee.decode_cache(codec, cuvee.encode_cache(codec, cache, ids), model)
    assert all(map(torch.equal, layers(back), layers(cache)))
    with torch.no_grad():
        again, exact = (model(ids[:, -1:], **cache_argument(model, own)).logits for own in (back, cached(model, ids)))
    assert torch.equal(again, exact)


def test_a_file_holds_a_cache_of_a_named_model(model: Any, tmp_path: Path) -> None:
    cache = cached(model, text(1, 40, 0))
    cuvee.save_cache(cache, tmp_path / "c", model=model)
    assert all(map(torch.equal, layers(cuvee.load_cache(tmp_path / "c", model)), layers(cache)))
    cuvee.save_cache(cache, tmp_path / "unnamed")
    with pytest.raises(cuvee.InputError, match="keys"):
        cuvee.load_cache(tmp_path / "unnamed", model)


def test_profiles_learn_latents_and_recognize_their_tokens(model: Any) -> None:
    profile = cuvee.calibrate(model, text(24, 48, 1), "layer", more_text=text(48, 48, 2), progress=False)
    layout = KVLayout.from_config(model.config, "float32")
    ids, after = text(1, 48, 3), text(1, 12, 4)
    with torch.no_grad():
        (chunk,) = prefill(model, ids, layout)
        exact = score(model, [chunk], after)
    losses, sizes = [], []
    for step in (8.0, 1.0, 0.125):
        codec = cuvee.Codec(profile, step=step)
        blob = codec.encode(chunk)
        with torch.no_grad():
            decoded = score(model, [codec.decode(blob)], after)
        losses.append(float((exact - decoded).square().mean()))
        sizes.append(len(blob))
    assert losses[2] < losses[1] / 4 < losses[0] / 16 and sizes[0] < sizes[1] < sizes[2] < chunk.nbytes / 2
    found = Recognizer(profile).recognize(PagedCache.of_chunk(chunk.slice(16, 48)), torch.arange(32))
    assert found.start == 16
    assert found.token_ids is not None and found.token_ids.tolist() == ids[0, 16:].tolist()


def test_latents_move_to_another_position(model: Any) -> None:
    layout = KVLayout.from_config(model.config, "float32")
    ids = text(1, 20, 0)
    with torch.no_grad():
        (near,) = prefill(model, ids, layout)
        far: Any = DynamicCache()
        model(ids, position_ids=torch.arange(1000, 1020)[None], **cache_argument(model, far))
    codec = cuvee.Codec.without_profile(layout)
    moved = codec.decode(codec.encode(near), start=1000)
    for index, layer in enumerate(far.layers):
        keys, values = layer_units(layer, layout.layers[index])
        assert torch.allclose(moved.keys[index], keys[0].transpose(0, 1), atol=1e-4)
        assert torch.allclose(moved.values[index], values[0].transpose(0, 1), atol=1e-4)
    assert not torch.allclose(moved.keys[0], near.keys[0], atol=2e-2)


def test_an_engine_keeps_both_in_one_tensor(model: Any) -> None:
    """vLLM's and SGLang's memory: a token's latent, then its rotated part."""
    layout = KVLayout.from_config(model.config, "bfloat16")
    memory = [torch.randn(10, 16, 1, LATENT + ROTATED).bfloat16() for _ in layout.layers]
    cache = PagedCache(layout, [own[..., LATENT:] for own in memory], [own[..., :LATENT] for own in memory])
    codec = cuvee.Codec.without_profile(layout)
    (blob,) = codec.encode(PagedChunks(cache, [torch.arange(32)], [0]))
    codec.decode_paged([blob], cache, [torch.arange(64, 96)]).check()
    assert all(torch.equal(own[4:6], own[:2]) for own in memory)
