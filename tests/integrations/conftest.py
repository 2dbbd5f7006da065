"""Fixtures of the tests with engines' classes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.conftest import tiny_model
from tests.integrations.latent_models import Latents


@pytest.fixture(params=["deepseek_v2", "deepseek_v3", "deepseek_v3, halves"])
def latents(request: pytest.FixtureRequest, tmp_path: Path) -> Latents:
    family, _, halves = request.param.partition(", ")
    return Latents(tiny_model(family, rope_interleave=False) if halves else tiny_model(family), tmp_path)
