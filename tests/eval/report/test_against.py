"""A report beside an earlier one: what changed, what is worse, and what cannot be compared."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from tests.eval.report.world import damaged, filled

from cuvee.codec.errors import FormatError, InputError, VersionError
from cuvee.eval.report.against import (
    Figure,
    Figures,
    changes_since,
    check_comparable,
    check_profile_names,
    clear_change,
)
from cuvee.eval.stats import paired_difference

Report = dict[str, Any]


def entry(key: str, kl: list[float], bits: float = 4.0) -> Report:
    parts = {"bits_per_value": [bits] * 4, "kl": kl, "delta_nll": kl, "top1": [1 - k for k in kl]}
    return {"key": key, **{name: sum(own) / 4 for name, own in parts.items()}, "per_sequence": parts}


@pytest.fixture
def report() -> Report:
    scores = [
        {"key": key, "task": "t", "score": sum(docs) / 4, "per_doc": docs}
        for key, docs in (("bf16", [1.0, 1.0, 0.0, 1.0]), ("kivi2", [1.0, 0.0, 0.0, 1.0]))
    ]
    made = {
        "complete": True,
        "environment": {"date": "2026-01-01", "commit": "abc"},
        "configuration": {
            "model": "m", "model_fingerprint": "f" * 64, "dtype": "float32", "cache_dtype": "bfloat16",
            "chunk_tokens": 256, "seed": 7,
        },
        "text": {
            "evaluation": [{"name": "a.txt", "sha256": "1"}, {"name": "b.txt", "sha256": "2"}], "sequences": 32,
            "length": 512, "tokens_sha256": "c" * 64, "prefix": 384,
        },
        "quality": [entry("bf16", [0.0] * 4, 16.0), entry("kivi2", [0.1, 0.2, 0.3, 0.4])],
        "tasks": [{"name": "t", "docs": 4, "docs_sha256": "d" * 64, "higher_is_better": True}],
        "scores": scores,
    }  # fmt: skip
    return filled(made).to_dict()


def since(old: Figures, now: Report) -> Report:
    """What changed, as plain data."""
    return asdict(changes_since(old, filled(now)))


def figures(report: Report, tmp_path: Path) -> Figures:
    path = tmp_path / "old.json"
    path.write_text(json.dumps(report))
    return Figures.load(path)


def test_a_report_against_itself(report: Report, tmp_path: Path) -> None:
    assert since(figures(report, tmp_path), report) == {
        "name": "old.json of 2026-01-01, commit abc", "changes": [], "unchanged": 10, "missing": [], "worse": 0,
    }  # fmt: skip


def test_changes_have_the_errors_of_their_pairs(report: Report, tmp_path: Path) -> None:
    now = copy.deepcopy(report)
    kl = [0.11, 0.213, 0.31, 0.412]
    now["quality"][1] = entry("kivi2", kl, 3.0)
    found = since(figures(report, tmp_path), now)
    changes = {change["metric"]: change for change in found["changes"]}
    assert list(changes) == ["bits_per_value", "kl", "delta_nll", "top1"] and found["unchanged"] == 6
    assert changes["kl"]["stderr"] == pytest.approx(paired_difference(kl, [0.1, 0.2, 0.3, 0.4])[1])
    assert {name: change["worse"] for name, change in changes.items()} == {
        "bits_per_value": False, "kl": True, "delta_nll": True, "top1": True,
    }  # fmt: skip
    assert found["worse"] == 3


def test_what_is_within_two_errors_is_no_change(report: Report, tmp_path: Path) -> None:
    now = copy.deepcopy(report)
    now["quality"][1] = entry("kivi2", [0.2, 0.1, 0.4, 0.35])
    now["scores"][1] |= {"score": 0.75, "per_doc": [1.0, 1.0, 0.0, 1.0]}
    assert since(figures(report, tmp_path), now)["changes"] == []


def test_what_is_missing_is_worse_and_what_is_new_does_no_harm(report: Report, tmp_path: Path) -> None:
    now = copy.deepcopy(report)
    now["quality"].append(entry("new", [0.1] * 4))
    now["scores"].pop()
    found = since(figures(report, tmp_path), now)
    assert found["missing"] == ["kivi2 t"] and found["worse"] == 1
    now["quality"].pop(1)
    assert since(figures(report, tmp_path), now)["worse"] == 5


def test_a_score_that_is_no_mean_is_not_compared(report: Report, tmp_path: Path) -> None:
    report["scores"][0] |= {"score": 7.0}
    report["scores"][1] |= {"per_doc": None}
    assert since(figures(report, tmp_path), report)["unchanged"] == 8


def change(before: float, after: float, error: float | None, more_is_better: bool = False) -> Any:
    """The change of a figure over two pairs whose difference has this standard error; None: over a single pair."""
    parts = (after,) if error is None else (after - error, after + error)
    was = Figure(before, (before,) * len(parts), more_is_better)
    return clear_change("k", "kl", was, Figure(after, parts, more_is_better))


def test_rounding_and_less_than_two_errors_are_no_change() -> None:
    assert change(0.1 + 0.2, 0.3, None) is None
    assert change(0.3, 0.4, 0.05) is None  # two errors, as rounded more
    assert change(0.3, 0.4, 0.06) is None and change(0.3, 0.4, 0.04).stderr == pytest.approx(0.04)
    assert change(0.3, 0.4, None).worse and not change(0.3, 0.4, None, more_is_better=True).worse


OTHER = {"tokens_sha256": "b" * 64}


@pytest.mark.parametrize(
    ("block", "change", "words"),
    [
        ("configuration", {"model_fingerprint": "e" * 64, "model": "n"}, "other weights, f+… of m, not e+… of n .--m"),
        ("configuration", {"dtype": "bfloat16"}, "a model in float32, not bfloat16 .--dtype"),
        ("configuration", {"cache_dtype": "float16"}, "caches in bfloat16, not float16"),
        ("configuration", {"chunk_tokens": 64}, "chunks of 256 tokens, not 64"),
        ("text", OTHER | {"evaluation": [{"name": "c.txt"}]}, "the texts a.txt, b.txt, not c.txt .--text"),
        (
            "text", OTHER | {"evaluation": [{"name": "a.txt", "sha256": "1"}, {"name": "b.txt", "sha256": "3"}]},
            "other tokens of the text b.txt: the file or the model's tokenizer changed",
        ),
        ("text", OTHER | {"sequences": 12}, "32 sequences .--sequences.*, not 12"),
        ("text", OTHER | {"length": 128}, "512 tokens per sequence .--length., not 128"),
        ("text", OTHER, "other repeats of the cached text: seed 7, not 7"),
        ("text", {"prefix": 128}, "384 cached tokens per sequence, not 128"),
        ("tasks", {"docs_sha256": "a" * 64}, "other documents of t: its data or lm-eval changed"),
        ("tasks", {"docs": 2, "docs_sha256": "a" * 64}, "4 documents of t, not 2 .--limit"),
    ],
)  # fmt: skip
def test_reports_of_other_things_are_refused_in_words(
    report: Report, tmp_path: Path, block: str, change: Report, words: str
) -> None:
    now = copy.deepcopy(report)
    (now["tasks"][0] if block == "tasks" else now[block]).update(change)
    with pytest.raises(InputError, match=rf"^against: .* but old.json of 2026-01-01, commit abc measured {words}"):
        since(figures(report, tmp_path), now)


def test_profiles_of_other_names_are_refused_before_anything_is_measured(report: Report, tmp_path: Path) -> None:
    check_profile_names(figures(report, tmp_path), ["new/b.safetensors"], "m")  # the old report has baselines alone
    report["quality"] += [{**report["quality"][1], "key": key} for key in ("cuvee/a@small", "cuvee/lossless")]
    old = figures(report, tmp_path)
    check_profile_names(old, [], "m")
    check_profile_names(old, ["new/a.safetensors", "new/b.safetensors"], "m")
    message = (
        r"^against: must have .*profiles, cuvee/b, got cuvee/a in old.json of .*: methods are named after the files"
    )
    with pytest.raises(InputError, match=message):
        check_profile_names(old, ["new/b.safetensors"], "m")
    with pytest.raises(InputError, match=r"^against: must be of the model n, not m, and have methods"):
        check_profile_names(old, ["new/b.safetensors"], "n")


def test_another_model_is_named_before_its_weights_are_known(report: Report, tmp_path: Path) -> None:
    old = figures(report, tmp_path)
    new = {name: value for name, value in old.measured.items() if name != "model_fingerprint"} | {"model": "n"}
    check_comparable(old, new)  # the same weights in another folder
    with pytest.raises(InputError, match=r"commit abc measured the model m, not n .--model.; a model in float32, not"):
        check_comparable(old, new | {"dtype": "bfloat16"})


@pytest.mark.parametrize("text", ["", "{", "[1]", '"report"', "{}", '{"format": "cuvee"}'])
def test_another_file_is_not_a_report(text: str, tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text(text)
    with pytest.raises(FormatError, match=r"old.json is not"):
        Figures.load(path)


@pytest.mark.parametrize("version", [1, 2, "3", None])
def test_other_versions(report: Report, tmp_path: Path, version: Any) -> None:
    old = {**report, "version": version}
    with pytest.raises(VersionError, match="check out commit abc, which wrote it, or make it again"):
        figures(old, tmp_path)
    with pytest.raises(VersionError, match=rf"of version {version!r}, not \d+: make it again"):
        figures(old | {"environment": {}}, tmp_path)


def test_an_unfinished_run(report: Report, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has not finished"):
        figures({**report, "complete": False}, tmp_path)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("environment", "date"), ...), (("quality",), 3), (("quality", 0, "kl"), "much"),
        (("quality", 0, "per_sequence", "kl"), []), (("quality", 0, "per_sequence", "top1"), ["x"]),
        (("scores", 0, "task"), "another"), (("tasks", 0, "docs_sha256"), ...), (("text", "prefix"), ...),
    ],
)  # fmt: skip
def test_damage_is_found(report: Report, tmp_path: Path, path: tuple[Any, ...], value: Any) -> None:
    with pytest.raises(FormatError, match="is damaged"):
        figures(damaged(report, path, value), tmp_path)
