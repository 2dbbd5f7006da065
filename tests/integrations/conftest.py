"""Fixtures of the tests with engines' classes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.conftest import tiny_model
from tests.integrations.latent_models import Latents
from tests.waiting import PATIENCE


@pytest.fixture(autouse=True)
def engines_wait_for_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a start for the name of the weights, at the end for the record of the identity, which a thread of the lowest
    priority writes: the seconds after which engines go on without are too few on a busy machine.
    """
    monkeypatch.setattr("cuvee.integrations.identity.weights_name.START_SECONDS", PATIENCE)
    monkeypatch.setattr("cuvee.integrations.identity.identity_records._CLOSE_SECONDS", PATIENCE)


@pytest.fixture(params=["deepseek_v2", "deepseek_v3", "deepseek_v3, halves"])
def latents(request: pytest.FixtureRequest, tmp_path: Path) -> Latents:
    family, _, halves = request.param.partition(", ")
    return Latents(tiny_model(family, rope_interleave=False) if halves else tiny_model(family), tmp_path)
