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
from cuvee.codec.models.forward import cache_argument
from cuvee.integrations.transformers.caches import chunks_from_cache

FAMILIES = ("deepseek_v2", "deepseek_v3")
LATENT, ROTATED = 12, 8


def text(sequences: int, length: int, seed: int) -> torch.Tensor:
    return torch.randint(61, (sequences, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param)


def layers(cache: Any) -> list[torch.Tensor]:
    return [unit for layer in cache.layers for unit in (layer.keys, layer.values)]


@pytest.fixture
def cache(model: Any) -> Any:
    made: Any = DynamicCache()
    with torch.no_grad():
        model(torch.arange(40)[None], **cache_argument(model, made))
    return made


def test_a_token_is_one_latent_and_one_rotated_part(model: Any, cache: Any) -> None:
    layout = KVLayout.from_config(model.config)
    assert all((own.kv_heads, own.head_dim, own.value_dim) == (1, ROTATED, LATENT) for own in layout.layers)
    assert layout.relocatable and layout.values_per_token == 2 * (ROTATED + LATENT)
    (chunk,) = chunks_from_cache(cache, KVLayout.from_config(model.config, "float32"))
    assert torch.equal(chunk.values[1], cache.layers[1].keys[0].transpose(0, 1)), "transformers has them as keys"


def test_a_file_holds_a_cache_of_a_named_model(model: Any, cache: Any, tmp_path: Path) -> None:
    cuvee.save_cache(cache, tmp_path / "c", model=model)
    assert all(map(torch.equal, layers(cuvee.load_cache(tmp_path / "c", model)), layers(cache)))
    cuvee.save_cache(cache, tmp_path / "unnamed")
    with pytest.raises(cuvee.InputError, match="keys"):
        cuvee.load_cache(tmp_path / "unnamed", model)
