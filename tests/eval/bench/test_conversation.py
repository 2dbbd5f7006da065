"""Conversations that are stored after every turn: what each way keeps, and that coding again in place adds little."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from tests.conftest import Books, fitted_profile

import cuvee
from cuvee.codec.models.forward import prefill
from cuvee.eval.bench import conversation
from cuvee.eval.bench.conversation import WAYS, converse
from cuvee.eval.bench.frame import run_bench


def test_a_chunk_that_is_coded_again_and_again_in_its_place_loses_little_more(books: Books) -> None:
    """Its steps follow from its values, so some symbols differ. Independent errors would make 2.4 times the first."""
    codec = cuvee.Codec(books.profile, "balanced")
    with torch.no_grad():
        (chunk,) = prefill(books.model, books.orchard[:1], books.layout)

    def error(other: cuvee.KVChunk) -> float:
        pairs = zip((*other.keys, *other.values), (*chunk.keys, *chunk.values), strict=True)
        return math.sqrt(sum(float((a.float() - b.float()).square().sum()) for a, b in pairs))

    first = coded = codec.decode(codec.encode(chunk))
    for _ in range(5):
        coded = codec.decode(codec.encode(coded))
    assert 0 < error(first) <= error(coded) < 1.2 * error(first)


def test_what_each_way_stores(books: Books) -> None:
    ids = books.orchard[1:2]
    lossless = converse(books.model, cuvee.Codec.without_profile(books.model), ids, 128, 40)
    for way in WAYS:
        assert lossless[way]["kl"] == pytest.approx([0, 0, 0], abs=1e-6)
    found = converse(books.model, cuvee.Codec(books.profile, "small"), ids, 128, 40)
    assert len({(own["kl"][0], own["bytes"][0]) for own in found.values()}) == 1  # nothing has been stored twice yet
    once, again, anew = (found[way] for way in ("once", "again", "anew"))
    assert min(once["kl"]) > 1e-4 and again["kl"] != once["kl"] != anew["kl"]
    added = [after - before for own in (once, again) for before, after in itertools.pairwise(own["bytes"])]
    assert min(added) > 0 and once["bytes"][2] == pytest.approx(again["bytes"][2], rel=0.05)
    assert anew["bytes"][2] < once["bytes"][2]  # whose slices all have an end, which is coded finer


def test_the_command(
    books: Books, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    books.profile.save(tmp_path / "books.safetensors")
    sizes = ["--conversations", "2", "--prompt", "64", "--turn", "16", "--turns", "2", "-o", str(tmp_path / "out")]
    words = ["--profile", str(tmp_path / "books.safetensors"), *sizes]
    parts = conversation._options, conversation._measure, conversation._show
    assert run_bench("conversation", "", *parts, words) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["data.json"]
    data = json.loads((tmp_path / "out" / "data.json").read_text())
    assert [len(one["once"]["kl"]) for one in data["conversations"]] == [2, 2]
    printed = capsys.readouterr().out
    monkeypatch.setattr("cuvee.eval.runs.load_model", lambda *_: pytest.fail("the model was loaded"))
    fitted_profile("gqa", "layer").save(tmp_path / "other")
    for wrong, message in (
        (["--turns", "0"], "turns: must be at least 1"),
        (["--profile", str(tmp_path / "other")], "layout"),
    ):
        assert run_bench("conversation", "", *parts, [*words[:-2], *wrong]) == 1
        assert message in capsys.readouterr().err
    assert "books-3m, quality=balanced: step=" in printed
