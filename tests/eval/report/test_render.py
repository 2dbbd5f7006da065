"""The document of a report: one report as it was committed, and what another lacks leaves no hole in it.

`pytest tests/eval/report/test_render.py --regenerate-golden` writes `golden.md` anew: read what changed.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from rich.console import Console
from tests.eval.report.world import entry, markdown, print_summary, write_report

from cuvee.eval.documents import escape

pytest.importorskip("matplotlib")

GOLDEN = Path(__file__).with_name("golden.md")
EVIL = "<b>&amp;&lt; a|b *c* _d_ `e` $f$ [g](http://h) ~~i~~ \\| {{ j }}"


@pytest.fixture
def report() -> dict[str, Any]:
    """A report of made-up figures: baselines, three curves at the same KLs, and something of all else."""
    points = (
        ("bf16", "16-bit cache", 16.0, 2e-5), ("fp8-e4m3", "FP8 e4m3", 8.0, 5e-3), ("kivi4", "KIVI int4", 5.0, 0.017),
        ("cachegen", "CacheGen as shipped", 6.0, 0.048), ("destroyed", "destroyed cache", 0.0, 0.8),
    )  # fmt: skip
    quality = [entry(key, bits, kl) | {"label": label} for key, label, bits, kl in points]
    settings = (
        ("high", 3.1, 1e-3), ("balanced", 1.2, 5e-3), ("small", 0.6, 0.02), ("2^-5", 5.3, 2e-5), ("2^0", 0.4, 0.1),
    )  # fmt: skip
    curves = ("cuvee/layer", "cuvee", 1.0), ("cuvee/all", "cuvee joint", 0.6), ("pca/all", "PCA", 1.5)
    for family, name, factor in curves:
        more: dict[str, Any] = {"counts": "ideal entropy"} if family == "pca/all" else {}
        for setting, bits, kl in settings:
            kind = "curve" if family == "pca/all" or setting.startswith("2^") else "preset"
            made = entry(f"{family}@{setting}", factor * bits, kl, kind, **more)
            quality.append(made | {"label": f"{name}, {setting}"})
    for made in quality:
        made["per_sequence"]["delta_nll"] = [made["delta_nll"] * share for share in (1.7, 0.2, 1.9, 0.2)]
        made["per_sequence"]["kl"] = [made["kl"]] * 4
    exact = quality[0]["nll"] - quality[0]["delta_nll"]
    tasks = [
        {"name": "recall", "metric": "acc", "higher_is_better": True, "docs": 200, "chance": 0.125,
         "description": "one of eight values, by its key"},
        {"name": "book", "metric": "word_perplexity", "higher_is_better": False, "docs": 9, "chance": None,
         "description": ""},
    ]  # fmt: skip
    scores = []
    for task, base in (("recall", 0.91), ("book", 20.0)):
        for rank, e in enumerate(e for e in quality if e["kind"] != "curve"):
            first = e["key"] == "bf16"
            by_doc = [20.0, 1.0] if task == "book" else [1.0, 1.0, 0.0] if first else [0.0, 0.0, 1.0]
            scores.append(
                {"key": e["key"], "task": task, "score": base - 0.005 * rank, "stderr": 0.02,
                 "difference": None if first else -0.005 * rank, "difference_stderr": None if first else 0.012,
                 "per_doc": by_doc, "bits_per_value": e["bits_per_value"], "docs": 200}
            )  # fmt: skip
    change = {"key": "kivi4", "metric": "kl", "before": 0.2, "after": 0.3, "stderr": 0.01, "more_is_better": False}
    return {
        "format": "cuvee-report",
        "version": 6,
        "complete": True,
        "digest": "d1" * 16,
        "command": "cuvee report --out a_folder",
        "configuration": {"cache_dtype": "bfloat16", "chunk_tokens": 256, "limit": None, "seed": 7},
        "environment": {
            "cuvee": "0.1.0", "cpu": "A CPU", "cores": 2, "gpu": None, "torch": "2.13.0", "triton": None,
            "date": "2026-11-20T10:00:00+00:00",
        },
        "model": {
            "name": "books-3m", "fingerprint": "f0" * 16, "model_type": "llama", "parameters": 3443136,
            "dtype": "float32", "layers": 6, "values_per_token": 1536, "positions": 512,
        },
        "text": {
            "evaluation": [{"name": "orchard", "sha256": "bb" * 32, "tokens": 9000}],
            "sequences": 4, "length": 256, "prefix": 192,
            "tokens_sha256": "cc" * 32,
            "kinds": [
                {"text": "orchard", "reread": True, "rows": [0, 2]},
                {"text": "orchard", "reread": False, "rows": [1, 3]},
            ],
        },
        "profiles": {
            "layer": {"id": "1d" * 16, "group": "layer", "source": "calibrated", "bytes": 1234567,
                      "bits_per_value_over_1m_tokens": 0.0064},
        },
        "exact": {"per_sequence": [exact + away for away in (-2.0, 2.0, -1.9, 1.9)]},
        "quality": quality,
        "tasks": tasks,
        "scores": scores,
        "against": {
            "name": "old.json", "unchanged": 7, "missing": ["kivi4 recall"], "worse": 2,
            "changes": [
                {**change, "metric": "top1", "more_is_better": True, "worse": False}, {**change, "worse": True},
            ],
        },
        "skipped": [{"key": "turboquant@2", "reason": "too few sequences"}],
        "comparison": [
            {
                "anchor": "fp8-e4m3", "kl": 0.0047, "bits_per_value": 8.0,
                "families": [
                    {"family": "cuvee/layer", "bits_per_value": 1.27, "low": 1.2, "high": 1.35},
                    {"family": "cuvee/all", "bits_per_value": None, "reason": "its curve ends at 0.02"},
                    {"family": "pca/all", "bits_per_value": 1.9, "low": 1.8, "high": 2.0},
                ],
                "ratios": [
                    {"of": "cuvee/layer", "against": "fp8-e4m3", "ratio": 6.34, "low": 6.01, "high": 6.72},
                    {"of": "cuvee/layer", "against": "pca/all", "ratio": 1.5, "low": 1.2, "high": None},
                    {"of": "cuvee/all", "against": "fp8-e4m3", "ratio": None, "low": None, "high": None},
                ],
            }
        ],
        "by_kind": [
            {
                "text": name, "reread": again, "sequences": 5,
                "comparison": [
                    {
                        "anchor": "fp8-e4m3", "kl": 0.004, "bits_per_value": 8.0, "families": [],
                        "ratios": [
                            {"of": "cuvee/layer", "against": "fp8-e4m3", "ratio": ratio, "low": low, "high": 9.5},
                            {"of": "cuvee/layer", "against": "pca/layer", "ratio": None, "low": None, "high": None},
                            {"of": "cuvee/layer", "against": "pca/all", "ratio": 1.4, "low": 1.3, "high": 1.5},
                        ],
                    }
                ],
            }
            for name, again, ratio, low in (
                ("orchard", False, 6.5, 5.5), ("orchard", True, 5.5, 4.5), ("lantern", False, 7.5, None)
            )
        ],
        "sizes": [
            {"family": "cuvee/layer", "kl": 0.005, "bits_per_value": 1.25},
            {"family": "cuvee/layer", "kl": 0.02, "bits_per_value": 0.5},
            {"family": "pca/all", "kl": 0.005, "bits_per_value": None},
            {"family": "pca/all", "kl": 0.02, "bits_per_value": 2.0},
            {"family": "cuvee/all", "kl": 0.02, "bits_per_value": None},
        ],
        "seconds": 312.4,
    }  # fmt: skip


def sections(text: str) -> set[str]:
    return set(re.findall(r"^## (.*)$", text, re.MULTILINE))


def test_the_document_is_the_committed_one(report: dict[str, Any], tmp_path: Path, request: Any) -> None:
    write_report(report, tmp_path / "new" / "out")
    names = sorted(str(path.relative_to(tmp_path / "new/out")) for path in tmp_path.rglob("*") if path.is_file())
    assert names == ["plots/size_kl.svg", "report.md"]
    text = (tmp_path / "new/out/report.md").read_text()
    if request.config.getoption("--regenerate-golden"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()
    assert "![" in text and "(plots/size_kl.svg)" in text and "GB/s" not in text  # a report measures no speed


def no_tasks(report: dict[str, Any]) -> None:
    report["tasks"], report["scores"] = [], []


def one_sequence(report: dict[str, Any]) -> None:
    report["text"]["sequences"] = 1
    for e in report["quality"]:
        e |= {"kl_stderr": None, "delta_nll_stderr": None, "top1_stderr": None}


def unpaired(report: dict[str, Any]) -> None:
    for s in report["scores"]:
        s |= {"stderr": None, "difference_stderr": None, "per_doc": None}


def nothing_measured(report: dict[str, Any]) -> None:
    report |= {"quality": [], "tasks": [], "scores": [], "comparison": [], "profiles": {}, "exact": None, "skipped": []}
    report |= {"complete": False, "command": "", "by_kind": [], "sizes": [], "against": None}


def only_baselines(report: dict[str, Any]) -> None:
    no_tasks(report)
    report["quality"] = [e for e in report["quality"] if not e["family"].startswith(("cuvee", "pca"))]
    report |= {"comparison": [], "profiles": {}, "by_kind": [], "sizes": []}


@pytest.mark.parametrize(
    ("change", "absent"),
    [
        (no_tasks, {"Scores of tasks"}),
        (one_sequence, set()),
        (unpaired, set()),
        (
            nothing_measured,
            {
                "What changed", "Quality by size", "Ratios at equal KL", "Ratios at equal KL, by kind of text",
                "Size by KL", "Every method", "Scores of tasks", "Profiles",
            },
        ),
        (
            only_baselines,
            {
                "Quality by size", "Ratios at equal KL", "Ratios at equal KL, by kind of text", "Size by KL",
                "Scores of tasks", "Profiles",
            },
        ),
    ],
)  # fmt: skip
def test_what_is_missing_leaves_no_hole(
    report: dict[str, Any], change: Callable[[dict[str, Any]], None], absent: set[str]
) -> None:
    change(report)
    text = markdown(report)
    assert sections(GOLDEN.read_text()) - sections(text) == absent
    assert not re.search(r"\b(None|nan|inf|null|undefined)\b", text)
    assert ("not complete" in text) == (not report["complete"])
    methods = text.partition("## Every method")[2].partition("\n## ")[0]
    if change is one_sequence:
        assert "There is a single sequence" in text and not re.search(r"^\|.*±", methods, re.MULTILINE)
    if change is unpaired:
        assert "| worse |" not in text.partition("## Scores of tasks")[2]
    if change is no_tasks:
        assert "Documents of a task" not in text


def test_a_curve_that_is_too_short_says_so(report: dict[str, Any]) -> None:
    report["quality"] = [e for e in report["quality"] if e["setting"] in ("", "small")]
    assert "| 32x |  | cuvee, a basis per layer | not measured beyond 26.7x |" in markdown(report)
    for e in report["quality"]:
        e["bits_per_value"] += 4 if e["setting"] else 0
    assert "No curve reaches 8x." in markdown(report)


@pytest.mark.parametrize(
    ("copied", "new", "where"),
    [(4e-3, 4e-3, None), (8e-3, 1e-3, " on copied text"), (1e-3, 8e-3, " on new text"), (17e-3, 1e-3, "")],
)
def test_a_promise_that_is_missed_on_one_kind_of_text_is_pointed_out(
    report: dict[str, Any], copied: float, new: float, where: str | None
) -> None:
    """Presets promise their KL on the worst kind, and a mean over all sequences hides what that loses."""
    preset = next(e for e in report["quality"] if e["key"] == "cuvee/layer@balanced")
    per_sequence = {**preset["per_sequence"], "kl": [copied, new, copied, new]}
    preset.update(kl=(copied + new) / 2, kl_stderr=0.0, per_sequence=per_sequence)
    found = re.findall(r"cuvee, balanced misses its promise(.*): KL .* against 0.005", markdown(report))
    assert found == ([] if where is None else [where])


@pytest.mark.parametrize(("longest", "warns"), [(None, False), (256, False), (255, True)])
def test_sequences_longer_than_those_of_a_profile_are_pointed_out(
    report: dict[str, Any], longest: int | None, warns: bool
) -> None:
    report["profiles"]["layer"]["longest"] = longest
    sentence = f"The KL of layer was measured on up to {longest} tokens: its presets promise none at the 256"
    assert (sentence in markdown(report)) == warns


def test_names_are_taken_literally(report: dict[str, Any]) -> None:
    report["model"]["name"] = EVIL
    report["command"] = f"cuvee report --out '{EVIL}'"
    report["tasks"][0] |= {"description": EVIL}
    for e in report["quality"]:
        if e["key"] == "kivi4":
            e |= {"label": EVIL, "counts": EVIL}
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(markdown(report))
    inline = [token.children or [] for token in tokens if token.type == "inline"]
    assert {c.type for children in inline for c in children} <= {"text", "strong_open", "strong_close"}
    shown = ["".join(c.content for c in children) for children in inline]
    assert shown[0] == f"Compressing the KV cache of {EVIL}" and any(f"{EVIL}." in text for text in shown)
    place = shown.index(EVIL, shown.index("Every method"))
    assert shown[place + 9] == EVIL  # the last of the ten cells of its row
    assert [token.content for token in tokens if token.type == "fence"] == [report["command"] + "\n"]
    for line in ("# a", "1. b", "- c", "+ d"):
        assert MarkdownIt().parse(escape(line))[0].type == "paragraph_open"
    assert MarkdownIt().render(escape("a\n\nb_c _d_")) == "<p>a b_c _d_</p>\n"


def test_a_summary_on_the_terminal(report: dict[str, Any]) -> None:
    report["model"]["name"] = "[red]model"
    report["comparison"][0]["ratios"][2]["of"] = "cuvee/layers:[b]2"
    console = Console(width=200, record=True, file=io.StringIO())
    print_summary(report, console)
    shown = console.export_text()
    assert "[red]model" in shown and "[b]2" in shown and "6.34x (6.01x to 6.72x)" in shown and "not reached" in shown
    assert "2 figures worse or missing" in shown
