"""Fixtures of the tests with engines' classes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.conftest import tiny_model
from tests.integrations.latent_models import Latents
from tests.waiting import PATIENCE


@pytest.fixture(autouse=True)
def starts_wait_for_the_name_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seconds, after which an engine starts without it, may be too few on a busy machine."""
    monkeypatch.setattr("cuvee.integrations.identity.weights_name.START_SECONDS", PATIENCE)


@pytest.fixture(params=["deepseek_v2", "deepseek_v3", "deepseek_v3, halves"])
def latents(request: pytest.FixtureRequest, tmp_path: Path) -> Latents:
    family, _, halves = request.param.partition(", ")
    return Latents(tiny_model(family, rope_interleave=False) if halves else tiny_model(family), tmp_path)
