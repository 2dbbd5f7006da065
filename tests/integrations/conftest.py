"""Fixtures of the tests with engines' classes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.latent_models import Latents


@pytest.fixture(params=["deepseek_v2", "deepseek_v3", "deepseek_v3, halves"])
def latents(request: pytest.FixtureRequest, tiny_model: Callable[..., Any], tmp_path: Path) -> Latents:
    family, _, halves = request.param.partition(", ")
    return Latents(tiny_model(family, **({"rope_interleave": False} if halves else {})), tmp_path)
