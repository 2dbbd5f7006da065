"""Files that the commands read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.package.cli.running import Files, save_cache

from cuvee.codec.chunk import KVChunk
from cuvee.codec.layout import KVLayout
from cuvee.codec.profiles.profile import Profile


@pytest.fixture
def files(
    tmp_path: Path,
    fitted: Callable[[str, str], Profile],
    make_chunk: Callable[..., KVChunk],
    layouts: dict[str, KVLayout],
) -> Files:
    """Make a cache of 150 tokens from position 20, and a fitted profile without a curve."""
    chunk = make_chunk(layouts["bfloat16"], 150, start=20)
    fitted("bfloat16", "layer").save(tmp_path / "p")
    return Files(tmp_path, tmp_path / "p", save_cache(chunk, tmp_path / "cache.safetensors"), chunk)
