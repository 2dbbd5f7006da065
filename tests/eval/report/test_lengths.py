"""Size and KL over cache lengths: which sequences, which methods, what the documents show, what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tests.eval.report.world import filled, report_sections, run_report

import cuvee
from cuvee.calibration.corpus import Corpus
from cuvee.codec.errors import InputError
from cuvee.eval.documents import ReportTable
from cuvee.eval.quality import Quality, QualityBench
from cuvee.eval.report.candidates import Candidate
from cuvee.eval.report.lengths import length_candidates, length_tokens
from cuvee.eval.report.report_config import ReportConfig, quick_config

CONFIG = replace(
    quick_config(ReportConfig()),
    length=96,
    sequences=2,
    tasks=(),
    methods=("fp8-e4m3", "kivi4", "cuvee/lossless", "destroyed"),
    cache_lengths=(256, 40, 100),
    length_sequences=3,
)


@pytest.fixture(scope="module")
def console() -> Iterator[Console]:
    with open("/dev/null", "w", encoding="utf-8") as file:
        yield Console(file=file)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, console: Console) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("lengths") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuvee, "calibrate", lambda *a, **k: pytest.fail("nothing that was asked for needs a profile"))
        return out, run_report(CONFIG, out, console)


def corpus(tokens: int, leading: tuple[int, ...] = ()) -> Corpus:
    return Corpus("text", "", (torch.arange(tokens),), leading)


# --- sequences


def test_all_lengths_end_in_the_same_tokens_and_hold_what_comes_before_them() -> None:
    found = length_tokens([corpus(1000)], (200, 50, 100), 16, 4, None, repeated=False, seed=7)
    assert list(found) == [50, 100, 200]
    for length, rows in found.items():
        assert rows.shape == (4, length + 16)
        assert torch.equal(rows, found[200][:, -(length + 16) :])
    assert found[200][1].tolist() == list(range(216, 432))


def test_repeats_are_of_what_every_length_has_cached() -> None:
    plain = length_tokens([corpus(1000)], (200, 50), 16, 4, None, repeated=False, seed=7)
    found = length_tokens([corpus(1000)], (200, 50), 16, 4, None, repeated=True, seed=7)
    assert torch.equal(found[50], found[200][:, -66:]) and torch.equal(found[200][1::2], plain[200][1::2])
    for row in found[50][::2].tolist():
        start = row.index(row[50])
        assert start < 34 and row[50:] == row[start : start + 16]


def test_every_sequence_begins_as_a_text_does() -> None:
    found = length_tokens([corpus(1000, leading=(7777,))], (200, 50), 16, 4, None, repeated=True, seed=7)
    for length, rows in found.items():
        assert rows.shape == (4, length + 16) and rows[:, 0].tolist() == [7777] * 4
        assert torch.equal(rows[:, -16:], found[200][:, -16:])


@pytest.mark.parametrize(
    ("lengths", "repeated", "message"),
    [
        (
            (64, 240),
            False,
            "^cache_lengths: 240 cached tokens and 16 scored .* 255 positions: .* at most 239",
        ),
        ((17, 64), True, "^cache_lengths: must be at least 18 with 16 scored tokens, got 17: .*leave the repeats out"),
        (
            (150,),
            False,
            "^cache_lengths: no text holds 166 tokens in a row .150 cached, 16 scored.: give",
        ),
    ],
)
def test_lengths_that_cannot_be_measured(lengths: tuple[int, ...], repeated: bool, message: str) -> None:
    with pytest.raises(InputError, match=message):
        length_tokens([corpus(160)], lengths, 16, 4, 255, repeated=repeated, seed=7)


@pytest.mark.parametrize("change", [{"cache_lengths": (0, 5)}, {"length_sequences": 0}])
def test_a_configuration_checks_its_lengths(change: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"^{next(iter(change))}: must be at least 1"):
        ReportConfig(**change)


def test_lengths_are_checked_before_anything_is_measured(tmp_path: Path, console: Console) -> None:
    with pytest.raises(InputError, match=r"^cache_lengths: 2048 cached .* model has 2048 positions: give at most 2024"):
        run_report(replace(CONFIG, cache_lengths=(256, 2048)), tmp_path / "run", console)
    assert not (tmp_path / "run").exists()


# --- methods


def candidate(key: str, kind: str) -> Candidate:
    return Candidate(key, key, kind, lambda: pytest.fail("not made"))


def test_of_a_dial_one_setting_is_measured() -> None:
    listed = [
        candidate("bf16", "point"),
        candidate("kivi4", "point"),
        candidate("broken", "point"),
        *(candidate(f"pca/all@{step}", "curve") for step in (1, 2, 3)),
        candidate("cuvee/layer@balanced", "preset"),
        candidate("cuvee/layer@2^-1", "curve"),
    ]
    kl = {"pca/all@1": 0.001, "pca/all@2": 0.004, "pca/all@3": 0.9}
    quality = [{"key": c.key, "kl": kl.get(c.key, 0.1)} for c in listed if c.key != "broken"]
    entries = filled({"quality": quality}).quality
    chosen = [c.key for c in length_candidates(listed, (), entries)]
    assert chosen == ["kivi4", "pca/all@2", "cuvee/layer@balanced"]
    named = length_candidates(listed, ("pca/all@1", "pca/all@3", "cuvee/layer@2^-1"), entries)
    assert [c.key for c in named] == ["kivi4", "pca/all@1", "pca/all@3", "cuvee/layer@balanced", "cuvee/layer@2^-1"]


# --- a report


def test_every_method_is_measured_at_every_length(done: tuple[Path, dict[str, Any]]) -> None:
    out, data = done
    assert json.loads((out / "report.json").read_text()) == data and not data["profiles"]
    assert [t["cached"] for t in data["text"]["lengths"]] == [40, 100, 256]
    keys = ["fp8-e4m3", "kivi4", "destroyed", "cuvee/lossless"]
    assert [(e["length"], e["key"]) for e in data["lengths"]] == [(n, k) for n in (40, 100, 256) for k in keys]
    for entry in data["lengths"]:
        assert entry["sequences"] == 3 and len(entry["per_sequence"]["kl"]) == 3
    sizes = {(e["key"], e["length"]): e["bits_per_value"] for e in data["lengths"]}
    assert sizes["fp8-e4m3", 40] == sizes["fp8-e4m3", 256] == 8
    assert sizes["cuvee/lossless", 40] > sizes["cuvee/lossless", 256]  # tables in the blob


def test_figures_are_those_of_a_bench_on_these_sequences(done: tuple[Path, dict[str, Any]]) -> None:
    from cuvee.calibration.bundled import EVALUATION_TEXTS, load_bundled_model
    from cuvee.calibration.corpus import read_corpus
    from cuvee.eval.methods import baseline

    texts = [read_corpus(name, "books-3m") for name in EVALUATION_TEXTS]
    rows = length_tokens(texts, CONFIG.cache_lengths, 24, 3, None, repeated=True, seed=7)[100]
    alone = QualityBench(load_bundled_model()[0], rows, 100, dtype="bfloat16").run("", baseline("kivi4"))
    (entry,) = (e for e in done[1]["lengths"] if (e["key"], e["length"]) == ("kivi4", 100))
    assert entry["kl"] == pytest.approx(alone.kl, rel=1e-3) and entry["bits_per_value"] == alone.bits_per_value


def test_an_interrupted_run_goes_on_at_the_length_where_it_stopped(
    done: tuple[Path, dict[str, Any]], tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, left = QualityBench.run, [8]

    def stopping(bench: QualityBench, *args: Any, **more: Any) -> Quality:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return run(bench, *args, **more)

    monkeypatch.setattr(QualityBench, "run", stopping)
    with pytest.raises(KeyboardInterrupt):
        run_report(CONFIG, tmp_path / "run", console)
    half = json.loads((tmp_path / "run" / "report.json").read_text())
    assert len(half["quality"]) == 5 and len(half["lengths"]) == 3 and not half["complete"]
    left[0] = 9
    data = run_report(CONFIG, tmp_path / "run", console)
    assert left[0] == 0 and data["lengths"][:3] == half["lengths"]
    assert [e["kl"] for e in data["lengths"]] == pytest.approx([e["kl"] for e in done[1]["lengths"]])


def test_a_method_that_fails_at_a_length_is_left_out_there_alone(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = QualityBench.run

    def failing(bench: QualityBench, name: str, *args: Any, **more: Any) -> Quality:
        if name == "KIVI int4" and bench.prefix == 100:
            raise InputError("chunk: holds values that cannot be stored")
        return run(bench, name, *args, **more)

    monkeypatch.setattr(QualityBench, "run", failing)
    data = run_report(replace(CONFIG, methods=("kivi4", "fp8-e4m3")), tmp_path / "run", console)
    assert [entry["key"] for entry in data["skipped"]] == ["kivi4 at 100 tokens"]
    found = [(e["length"], e["key"]) for e in data["lengths"]]
    assert found == [(40, "fp8-e4m3"), (40, "kivi4"), (100, "fp8-e4m3"), (256, "fp8-e4m3"), (256, "kivi4")]
    (section,) = (s for s in report_sections(data) if s.id == "lengths")
    table = next(block for block in section.blocks if isinstance(block, ReportTable))
    assert next(row for row in table.rows if row[0] == "KIVI int4")[3:5] == ["", ""]


def test_the_documents_show_a_table(done: tuple[Path, dict[str, Any]]) -> None:
    out, data = done
    text = (out / "report.md").read_text()
    assert "## Cache lengths" in text
    assert 'id="lengths"' in (out / "report.html").read_text()
    (section,) = (s for s in report_sections(data) if s.id == "lengths")
    table = next(block for block in section.blocks if isinstance(block, ReportTable))
    assert table.columns[0] == "method " and table.columns[1:] == [
        f"{n}: {what}" for n in (40, 100, 256) for what in ("bits", "KL")
    ]
    rows = {row[0]: row for row in table.rows}
    assert rows["FP8 e4m3"][1::2] == ["8.00"] * 3 and rows["KIVI int4"][5] == "5.00"


def test_without_lengths_there_is_no_section(done: tuple[Path, dict[str, Any]]) -> None:
    _, data = done
    short = {**data, "lengths": [e for e in data["lengths"] if e["length"] == 100]}
    assert any(s.id == "lengths" for s in report_sections(short))
    assert all(s.id != "lengths" for s in report_sections({**data, "lengths": []}))
