"""`cuvee bench refinements` on the bundled model: what it reports, and what it refuses."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cuvee.codec.errors import InputError
from cuvee.eval.bench.refinements.refinements_bench import run_refinements_bench
from cuvee.eval.bench.refinements.refinements_tables import refinements_markdown


@pytest.fixture(scope="module")
def profile(books: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("refinements") / "books.safetensors"
    books.profile.save(path)
    return path


def test_the_report(profile: Path) -> None:
    report = run_refinements_bench("books-3m", profile, quick=True)
    prefixes = report["prefixes"]
    assert [prefix["parts"] for prefix in prefixes] == [1, 2, 3]
    for coarser, finer in pairwise(prefixes):
        assert finer["kl"] < coarser["kl"] / 2
        assert finer["bits_per_value"] > coarser["bits_per_value"]
    for prefix in prefixes:
        # Two sequences say little about a KL, and a lot about sizes at one error.
        single = prefix["singles"][1]["bits_per_value"]
        assert prefix["bits_per_value"] == pytest.approx(single, rel=0.06)
        assert prefix["single_bits_per_value"] > 0 and prefix["decode_over_single"]["median"] > 0
    table = refinements_markdown(report)
    assert "| 3 |" in table and "2 sequences of a held-out text" in table


def test_a_profile_of_another_model(profile: Path, fitted: Any, tmp_path: Path) -> None:
    fitted("gqa", "layer").save(tmp_path / "other.safetensors")
    with pytest.raises(InputError, match="a profile of another model"):
        run_refinements_bench("books-3m", tmp_path / "other.safetensors", quick=True)
    with pytest.raises(InputError, match="lossless"):
        run_refinements_bench("books-3m", profile, "lossless", quick=True)
