"""Files that the commands read."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.conftest import LAYOUTS, fitted_profile, synthetic_chunk
from tests.package.cli.running import Files, save_cache


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """Make a cache of 150 tokens from position 20, and a fitted profile without a curve."""
    chunk = synthetic_chunk(LAYOUTS["bfloat16"], 150, start=20)
    fitted_profile("bfloat16", "layer").save(tmp_path / "p")
    return Files(tmp_path, tmp_path / "p", save_cache(chunk, tmp_path / "cache.safetensors"), chunk)
