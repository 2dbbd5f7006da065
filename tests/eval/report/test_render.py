"""The document of a report says what its figures are."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from markdown_it import MarkdownIt
from rich.console import Console
from tests.eval.report.world import entry, markdown, print_summary, write_report

from cuvee.codec.profiles.quality import PRESET_KL
from cuvee.eval.documents import escape
from cuvee.eval.formatting import format_interval, format_ratio, with_error
from cuvee.eval.methods import family_label
from cuvee.eval.quality import LayerCost
from cuvee.eval.report.schema import Ratio

pytest.importorskip("matplotlib")

SECTIONS = [
    "Quality by size", "Ratios at equal KL", "Ratios at equal KL, by kind of text", "Size by KL",
    "Every method", "Scores of tasks", "Layers", "Profiles",
    "Other points of the curves", "How it was measured", "Limits",
]  # fmt: skip
EVIL = "<b>&amp;&lt; a|b *c* _d_ `e` $f$ [g](http://h) ~~i~~ \\| {{ j }}"
MINUS = "\N{MINUS SIGN}"


@pytest.fixture(scope="session")
def made_up() -> dict[str, Any]:
    """A report of made-up figures: baselines, and three curves at the same KLs."""
    timed: dict[str, Any] = {"encode_gb_per_s": 0.45, "decode_gb_per_s": 1.3}

    def layers(bits: float | None) -> list[LayerCost]:
        return [LayerCost(0.011 * n, 0.023 * n, bits and bits * (0.8 + n / 20)) for n in range(1, 7)]

    points = (
        ("bf16", "16-bit cache", 16.0, 2e-5), ("fp8-e4m3", "FP8 e4m3", 8.0, 5e-3), ("kivi4", "KIVI int4", 5.0, 0.017),
        ("cachegen", "CacheGen as shipped", 6.0, 0.048), ("destroyed", "destroyed cache", 0.0, 0.8),
    )  # fmt: skip
    quality = [entry(key, bits, kl, layers=layers(None), **timed) | {"label": label} for key, label, bits, kl in points]
    settings = (
        ("high", 3.1, 1e-3), ("balanced", 1.2, 5e-3), ("small", 0.6, 0.02), ("2^-5", 5.3, 2e-5), ("2^0", 0.4, 0.1),
    )  # fmt: skip
    curves = ("cuvee/layer", "cuvee", 1.0), ("cuvee/all", "cuvee joint", 0.6), ("pca/all", "PCA", 1.5)
    for family, name, factor in curves:
        more: dict[str, Any] = {"counts": "ideal entropy"} if family == "pca/all" else timed
        for setting, bits, kl in settings:
            kind = "curve" if family == "pca/all" or setting.startswith("2^") else "preset"
            made = entry(f"{family}@{setting}", factor * bits, kl, kind, layers=layers(factor * bits), **more)
            quality.append(made | {"label": f"{name}, {setting}"})
    for made in quality:
        made["per_sequence"]["delta_nll"] = [made["delta_nll"] * share for share in (1.7, 0.2, 1.9, 0.2)]
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
            scores.append(
                {"key": e["key"], "task": task, "score": base - 0.005 * rank, "stderr": 0.02,
                 "difference": None if first else -0.005 * rank, "difference_stderr": None if first else 0.012,
                 "per_doc": [1.0], "bits_per_value": e["bits_per_value"], "docs": 200}
            )  # fmt: skip
    return {
        "format": "cuvee-report",
        "version": 4,
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
            "calibration": [{"name": "harbour", "sha256": "aa" * 32, "tokens": 6444}],
            "evaluation": [{"name": "orchard", "sha256": "bb" * 32, "tokens": 9000}],
            "calibration_sequences": 25, "sequences": 4, "length": 256, "prefix": 192,
            "tokens_sha256": "cc" * 32,
            "kinds": [
                {"text": "orchard", "reread": True, "rows": [0, 2]},
                {"text": "orchard", "reread": False, "rows": [1, 3]},
            ],
        },
        "profiles": {
            "layer": {"id": "1d" * 16, "group": "layer", "source": "calibrated", "bytes": 1234567, "seconds": 12.3,
                      "bits_per_value_over_1m_tokens": 0.0064},
        },
        "exact": {"per_sequence": [exact + away for away in (-2.0, 2.0, -1.9, 1.9)]},
        "quality": quality,
        "tasks": tasks,
        "scores": scores,
        "against": None,
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
                    {"of": "cuvee/layer", "against": "pca/all", "ratio": 1.5, "low": None, "high": None},
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
                            {"of": "cuvee/layer", "against": "fp8-e4m3", "ratio": ratio, "low": ratio - 1, "high": 9.5},
                            {"of": "cuvee/layer", "against": "pca/layer", "ratio": None, "low": None, "high": None},
                            {"of": "cuvee/layer", "against": "pca/all", "ratio": 1.4, "low": 1.3, "high": 1.5},
                        ],
                    }
                ],
            }
            for name, again, ratio in (("orchard", False, 6.5), ("orchard", True, 5.5), ("lantern", False, 7.5))
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


@pytest.fixture
def report(made_up: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(made_up, allow_nan=False))  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def folder(made_up: dict[str, Any], tmp_path_factory: Any) -> Path:
    """The documents of the report, written."""
    path = Path(tmp_path_factory.mktemp("report")) / "new" / "out"
    write_report(made_up, path)
    return path


Parsed = dict[str, list[tuple[list[str], list[list[str]]]]]


def read_markdown(text: str) -> tuple[Parsed, str]:
    """Tables by section, each as headings and rows of text, and all text, as a reader would see them."""
    found: Parsed = {}
    section, inside = "", False
    row: list[str] = []
    seen: list[str] = []
    for token in MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text):
        if token.type == "table_open":
            found[section].append(([], []))
            head, rows = found[section][-1]
        elif token.type == "tr_open":
            row, inside = [], True
        elif token.type == "tr_close":
            if head:
                rows.append(row)
            else:
                head += row
            inside = False
        elif token.type == "inline":
            assert {c.type for c in token.children or []} <= {"text", "strong_open", "strong_close", "image"}
            shown = "".join(c.content for c in token.children or [] if c.type == "text")
            seen.append(shown)
            if inside:
                row.append(shown)
            elif token.level == 1 and token.map and text.splitlines()[token.map[0]].startswith("## "):
                section = shown
                found[section] = []
        elif token.type == "fence":
            seen.append(token.content)
    return found, "\n".join(seen)


def agrees(text: str, value: float) -> bool:
    """Whether a number as printed is the value, rounded where it is cut; never zero for something else."""
    plain = text.strip().rstrip("x% ").replace(",", "").replace(MINUS, "-")
    shown = float(plain)
    if (shown == 0) != (value == 0):
        return False
    if "e" in plain:
        return abs(shown / value - 1) < 0.06
    decimals = len(plain.partition(".")[2])
    return bool(abs(shown - value) <= 0.5000001 * 10.0**-decimals)


def both(cell: str, value: float, error: float | None) -> bool:
    """Whether a cell is a value and its standard error."""
    if error is None:
        return "±" not in cell and agrees(cell, value)
    shown, _, bar = cell.partition(" ± ")
    return agrees(shown, value) and agrees(bar, error)


def perplexity(report: dict[str, Any], e: dict[str, Any], *rows: int) -> float:
    """Of these sequences, after the cache that a method gives back."""
    return math.exp(np.mean([report["exact"]["per_sequence"][r] + e["per_sequence"]["delta_nll"][r] for r in rows]))


def by_first(table: tuple[list[str], list[list[str]]]) -> dict[str, list[str]]:
    return {row[0]: row for row in table[1]}


def test_every_section_is_there(folder: Path) -> None:
    tables, text = read_markdown((folder / "report.md").read_text())
    assert list(tables) == SECTIONS
    assert "cuvee report --out a_folder" in text and "d1" * 16 in text
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert names == [
        "plots/size_kl.svg", "report.md",
    ]  # fmt: skip
    shown = re.findall(r"!\[[^\]]*\]\(([^)]*)\)", (folder / "report.md").read_text())
    assert len(shown) == 1 and all((folder / path).is_file() for path in shown)


def test_methods_are_those_of_the_report(folder: Path, report: dict[str, Any]) -> None:
    tables, _ = read_markdown((folder / "report.md").read_text())
    for section, wanted in (("Every method", False), ("Other points of the curves", True)):
        rows = by_first(tables[section][0])
        entries = [e for e in report["quality"] if (e["kind"] == "curve") is wanted]
        assert len(rows) == len(entries)
        for e in entries:
            _, bits, ratio, kl, promised, loss, new, copied, top1, counts = rows[e["label"]]
            assert agrees(bits, e["bits_per_value"])
            assert ratio == "" if e["ratio"] is None else agrees(ratio, e["ratio"])
            assert both(kl, e["kl"], e["kl_stderr"]) and both(loss, e["delta_nll"], e["delta_nll_stderr"])
            limit = PRESET_KL.get(e["setting"]) if e["kind"] == "preset" and "lossless" not in e["family"] else None
            assert promised == "" if limit is None else agrees(promised, limit)
            assert agrees(new, perplexity(report, e, 1, 3)) and agrees(copied, perplexity(report, e, 0, 2))
            assert counts == e["counts"]
            assert both(top1.removesuffix("%"), 100 * e["top1"], 100 * e["top1_stderr"])
    text = (folder / "report.md").read_text()
    assert "GB/s" not in text and "peed" not in text  # a report times one pass under whatever else runs
    for e in report["quality"]:
        missed = e["kind"] == "preset" and e["kl"] - (e["kl_stderr"] or 0.0) > PRESET_KL.get(e["setting"], math.inf)
        assert (f"{e['label']} misses its promise: KL" in text) == missed
    methods = [row[0] for row in tables["Every method"][0][1]]
    assert methods == [
        "16-bit cache", "cuvee, small", "cuvee, balanced", "cuvee, high", "cuvee joint, small", "cuvee joint, balanced",
        "cuvee joint, high", "FP8 e4m3", "KIVI int4", "CacheGen as shipped", "destroyed cache",
    ]  # fmt: skip
    assert tables["Every method"][1] == (["left out", "why"], [["turboquant@2", "too few sequences"]])


def test_the_headline_is_read_off_the_curves(folder: Path, report: dict[str, Any]) -> None:
    tables, text = read_markdown((folder / "report.md").read_text())
    rows = iter(tables["Quality by size"][0][1])
    interpolated = 0
    for ratio in (4, 8, 16, 32):
        for family in ("cuvee/layer", "cuvee/all"):
            size, bits, label, kl, top1, new, copied, _ = next(rows)
            points = sorted((e for e in report["quality"] if e["family"] == family), key=lambda e: e["bits_per_value"])
            x = np.log([e["bits_per_value"] for e in points])
            wanted = min(math.log(16 / ratio), x[-1])
            assert (size, label) == (f"{ratio}x", family_label(family))
            if wanted < x[0]:
                assert (bits, top1) == ("", "") and kl == f"not measured beyond {16 / math.exp(x[0]):.1f}x"
                continue
            interpolated += wanted < x[-1]

            def at(
                field: str, change: Callable[..., Any] = float, wanted: float = wanted, x: Any = x, points: Any = points
            ) -> float:
                return float(np.interp(wanted, x, [change(e[field]) for e in points]))

            assert agrees(bits, math.exp(wanted))
            assert both(kl, math.exp(at("kl", math.log)), at("kl_stderr"))
            assert both(top1.removesuffix("%"), 100 * at("top1"), 100 * at("top1_stderr"))
            for cell, chosen in ((new, (1, 3)), (copied, (0, 2))):
                losses = [[e["per_sequence"]["delta_nll"][row] for row in chosen] for e in points]
                growth = math.exp(np.interp(wanted, x, [np.mean(one) for one in losses]))
                error = np.interp(wanted, x, [np.std(one, ddof=1) / math.sqrt(2) for one in losses])
                assert both(cell.removesuffix("%"), 100 * (growth - 1), 100 * growth * error)
            if (ratio, family) == (8, "cuvee/layer"):
                assert (
                    kl in text
                    and f"perplexity changes by {new} on new text and {copied} on copied text" in text
                    and top1 in text
                )
    assert interpolated >= 4 and next(rows, None) is None
    destroyed = next(e for e in report["quality"] if e["key"] == "destroyed")
    (shown,) = re.findall(r"with a destroyed cache the KL is ([\d.]*\d)", text)
    assert agrees(shown, destroyed["kl"])


def test_tasks_of_the_headline_fit_in_the_size(report: dict[str, Any]) -> None:
    rows = read_markdown(markdown(report, {}))[0]["Quality by size"][0][1]
    sizes = {e["setting"]: e["bits_per_value"] for e in report["quality"] if e["family"] == "cuvee/layer"}
    ranks = {"high": 5, "balanced": 6, "small": 7}  # of the made-up scores: 0.005 each, the error is 0.012
    seen = 0
    for row in rows[::2]:
        fitting = [name for name in ranks if sizes[name] <= 16 / int(row[0][:-1])]
        if not fitting:
            assert row[7] in ("no scored setting is this small", "")
            continue
        seen += 1
        best = max(fitting, key=lambda name: sizes[name])
        change = f"{MINUS}{0.005 * ranks[best]:.4f}"
        assert row[7] == f"{best} ({format_ratio(16 / sizes[best])}): recall {change}, book {change}"
    assert seen >= 2
    for score in report["scores"]:
        score["difference_stderr"] = 1.0
    rows = read_markdown(markdown(report, {}))[0]["Quality by size"][0][1]
    assert sum(row[7].endswith("x): none beyond one standard error") for row in rows[::2]) == seen


def test_ratios_at_equal_kl(folder: Path) -> None:
    tables, text = read_markdown((folder / "report.md").read_text())
    head, rows = tables["Ratios at equal KL"][0]
    assert head[4:] == [f"smaller by: {family_label(f'cuvee/{group}')}" for group in ("layer", "all")]
    pca = family_label("pca/all")
    assert rows == [
        ["FP8 e4m3", "0.00470", "FP8 e4m3", "8.00", "6.34x (6.01x to 6.72x)", "not reached"],
        ["FP8 e4m3", "0.00470", pca, "1.90", "1.50x", "not reached"],
    ]
    assert "at the KL of FP8 e4m3: its curve ends at 0.02" in text


def test_ratios_by_kind_of_text(folder: Path, report: dict[str, Any]) -> None:
    tables, _ = read_markdown((folder / "report.md").read_text())
    ((head, rows),) = tables["Ratios at equal KL, by kind of text"]  # of the one profile that was compared
    # PCA of the profile's own grouping has a column, though it was not reached; PCA of another has none.
    same = f"{family_label('pca/layer')}, at the KL of FP8 e4m3"
    assert head == ["text", "sequences are", "of them", "FP8 e4m3", same]
    assert rows == [
        ["orchard", "plain", "5", "6.50x (5.50x to 9.50x)", "not reached"],
        ["orchard", "repeats its cache", "5", "5.50x (4.50x to 9.50x)", "not reached"],
        ["lantern", "plain", "5", "7.50x (6.50x to 9.50x)", "not reached"],
    ]
    for kind in report["by_kind"]:
        kind["comparison"][0]["ratios"].pop(1)
    shown = read_markdown(markdown(report, {}))[0]["Ratios at equal KL, by kind of text"][0]
    assert shown[0] == head[:-1] and shown[1] == [row[:-1] for row in rows]


def test_sizes_at_round_kls(folder: Path) -> None:
    tables, _ = read_markdown((folder / "report.md").read_text())
    ((head, rows),) = tables["Size by KL"]
    assert head == ["curve", "KL 0.005", "KL 0.02"]
    assert rows == [  # a curve that reaches none of them is left out
        [family_label("cuvee/layer"), "1.25 (12.8x)", "0.50 (32.0x)"],
        [family_label("pca/all"), "", "2.00 (8.00x)"],
    ]


@pytest.mark.parametrize(
    ("low", "high", "shown"),
    [
        (6.01, 6.72, " (6.01x to 6.72x)"),
        (6.01, None, " (above 6.01x)"),
        (None, 12.72, " (below 12.7x)"),
        (None, None, ""),
    ],
)
def test_an_interval_may_have_one_end(low: float | None, high: float | None, shown: str) -> None:
    assert format_interval(Ratio("ours", "theirs", 6.34, low, high)) == f"6.34x{shown}"


def test_scores_are_those_of_the_report(folder: Path, report: dict[str, Any]) -> None:
    tables, text = read_markdown((folder / "report.md").read_text())
    labels = {e["key"]: e["label"] for e in report["quality"]}
    for task, (head, rows) in zip(report["tasks"], tables["Scores of tasks"], strict=True):
        found = {row[0]: row for row in rows}
        assert head[2] == task["metric"] and f"{task['docs']} documents" in text and task["name"] in text
        assert rows[0][0] == "16-bit cache"
        scores = [s for s in report["scores"] if s["task"] == task["name"]]
        assert len(rows) == len(scores) + (task["chance"] is not None)
        for s in scores:
            _, bits, score, difference, mark = found[labels[s["key"]]]
            assert agrees(bits, s["bits_per_value"]) and both(score, s["score"], s["stderr"])
            if s["difference"] is None:
                assert difference == mark == ""
            else:
                assert both(difference, s["difference"], s["difference_stderr"])
                beyond = "worse" if task["higher_is_better"] else "better"
                assert mark == (beyond if abs(s["difference"]) > s["difference_stderr"] else "")
        assert ("chance" in found) == (task["chance"] is not None)
    assert tables["Scores of tasks"][0][1][-1] == ["chance", "", "0.125", "", ""]


def test_layers_profiles_and_protocol(folder: Path, report: dict[str, Any]) -> None:
    tables, text = read_markdown((folder / "report.md").read_text())
    head, rows = tables["Layers"][0]
    labels = {e["label"]: e for e in report["quality"]}
    assert len(rows) == 6 and len(head) == 1 + 3 + 6
    for number, row in enumerate(rows):
        assert row[0] == str(number)
        for name, cell in zip(head[1:], row[1:], strict=True):
            what, _, label = name.partition(": ")
            layer = labels[label]["layers"][number]
            if what == "bits":
                assert agrees(cell, layer["bits_per_value"])
            else:
                key, value = cell.split(" / ")
                assert agrees(key, layer["key_error"]) and agrees(value, layer["value_error"])
    profile = ["layer", "layer", "calibrated", "1,234,567", "0.00640", "12.3", "1d" * 16]
    assert tables["Profiles"][0][1] == [profile]
    facts, texts, software = (by_first(table) for table in tables["How it was measured"])
    assert facts["model"][1] == "books-3m (llama, 3,443,136 parameters, float32)"
    assert facts["model fingerprint"][1] == "f0" * 16 and facts["SHA-256 of the tokens"][1] == "cc" * 32
    assert facts["sequences"][1] == "4 of 256 tokens, the first 192 cached" and facts["seed"][1] == "7"
    new, copied = (facts[f"perplexity of {kind} text, exact cache"][1] for kind in ("new", "copied"))
    logs = np.log([float(new), float(copied)])
    assert logs == pytest.approx([np.mean(report["exact"]["per_sequence"][at::2]) for at in (1, 0)], abs=1e-3)
    assert texts["calibration"] == ["calibration", "harbour", "6,444", "aa" * 32]
    assert texts["evaluation"] == ["evaluation", "orchard", "9,000", "bb" * 32]
    assert {name: row[1] for name, row in software.items()} == {
        name: str(value) for name, value in report["environment"].items() if value is not None
    }
    assert "3.44 million parameters" in text and "2026-11-20 on A CPU, 2 cores" in text


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
    report |= {"complete": False, "command": "", "by_kind": [], "sizes": []}
    report["text"]["calibration_sequences"] = None


def only_baselines(report: dict[str, Any]) -> None:
    no_tasks(report)
    report["quality"] = [e for e in report["quality"] if not e["family"].startswith(("cuvee", "pca"))]
    report |= {"comparison": [], "profiles": {}, "by_kind": [], "sizes": []}
    report["text"] |= {"calibration": [], "calibration_sequences": None}


def a_given_profile(report: dict[str, Any]) -> None:
    report["profiles"]["layer"] |= {"seconds": None}
    report["quality"] = [e for e in report["quality"] if e["setting"] in ("", "balanced")]
    report["text"] |= {"calibration": [], "calibration_sequences": None}


MISSING = [no_tasks, one_sequence, unpaired, nothing_measured, only_baselines, a_given_profile]
ABSENT: dict[str, set[str]] = {
    "no_tasks": {"Scores of tasks"},
    "nothing_measured": set(SECTIONS[:9]),
    "only_baselines": {*SECTIONS[:4], "Scores of tasks", "Profiles", "Other points of the curves"},
    "a_given_profile": {"Other points of the curves"},
}


@pytest.mark.parametrize("change", MISSING, ids=lambda change: change.__name__)
def test_what_is_missing_leaves_no_hole(report: dict[str, Any], tmp_path: Path, change: Callable[..., None]) -> None:
    change(report)
    if change is a_given_profile:  # one setting of each family of the codec: a curve of no length
        report["quality"] = [e for e in report["quality"] if e["family"] != "pca/all"]
    write_report(report, tmp_path)
    tables, text = read_markdown((tmp_path / "report.md").read_text())
    assert set(SECTIONS) - set(tables) == ABSENT.get(change.__name__, set())
    assert not re.search(r"\b(None|nan|inf|null|undefined)\b", text)
    assert ("not complete" in text) == (not report["complete"])
    if change is one_sequence:
        assert "±" not in tables["Quality by size"][0][1][2][3] and "single sequence" in text
        assert all("±" not in cell for _, rows in tables["Every method"] for row in rows for cell in row)
    if change is unpaired:
        assert all(row[4] == "" for _, rows in tables["Scores of tasks"] for row in rows)
    if change is no_tasks:
        assert "tasks" not in tables["Quality by size"][0][0] and "Documents of a task" not in text


def test_a_curve_that_is_too_short_says_so(report: dict[str, Any]) -> None:
    every = report["quality"]
    report["quality"] = [e for e in every if e["setting"] not in ("2^0", "small")]
    rows = read_markdown(markdown(report, {}))[0]["Quality by size"][0][1]
    least: dict[str, float] = {}  # bits per value of each curve
    for e in report["quality"]:
        name = family_label(e["family"])
        least[name] = min(e["bits_per_value"], least.get(name, math.inf))
    short = [row for row in rows if row[3].startswith("not measured")]
    assert short and not any("".join((row[1], *row[4:])) for row in short)
    assert all(row[3] == f"not measured beyond {format_ratio(16 / least[row[2]])}" for row in short)
    report["quality"] = [e for e in every if e["setting"] in ("", "small")]
    for e in report["quality"]:
        e["bits_per_value"] += 4 if e["setting"] else 0
    assert "No curve reaches 8x." in markdown(report, {})


@pytest.mark.parametrize(("longest", "warns"), [(None, False), (256, False), (255, True)])
def test_sequences_longer_than_those_of_a_profile_are_told(
    report: dict[str, Any], longest: int | None, warns: bool
) -> None:
    report["profiles"]["layer"]["longest"] = longest
    sentence = f"The KL of layer was measured on up to {longest} tokens: its presets promise none at the 256"
    assert (sentence in markdown(report, {})) == warns


def test_every_setting_of_a_dial_is_told_apart(report: dict[str, Any]) -> None:
    curve = next(e for e in report["quality"] if e["kind"] == "curve")
    for setting in ("0.4", "1.3"):
        report["quality"].append(
            {**curve, "key": f"pca/all@{setting}", "family": "pca/all", "label": "PCA", "setting": setting}
        )
    text = markdown(report, {})
    assert "| PCA @0.4 |" in text and "| PCA @1.3 |" in text
    for e in report["quality"]:  # the codec's own labels say it already
        if e["kind"] == "preset":
            assert f"{e['label']} @" not in text


@pytest.mark.parametrize(
    ("value", "error", "shown"),
    [
        (0.0, None, "0"), (0.0, 0.0, "0 ± 0"), (1234.5, None, "1,234"), (0.0046931, None, "0.00469"),
        (-0.0046931, 0.00031, f"{MINUS}0.00469 ± 0.00031"), (0.8, 0.16, "0.80 ± 0.16"),
        (2e-9, 1e-10, "2.0e-09 ± 1.0e-10"), (5.0, 0.0, "5.00 ± 0.00"), (12.0, 30.0, "12 ± 30"),
    ],
)  # fmt: skip
def test_numbers_have_the_digits_their_errors_allow(value: float, error: float | None, shown: str) -> None:
    assert with_error(value, error) == shown


def test_names_are_taken_literally(report: dict[str, Any], tmp_path: Path) -> None:
    report["model"]["name"] = EVIL
    report["command"] = f"cuvee report --out '{EVIL}'"
    report["tasks"][0] |= {"name": EVIL, "description": EVIL}
    for e in (*report["quality"], *report["scores"]):
        if e.get("task") == "recall":
            e["task"] = EVIL
        if e["key"] == "kivi4" and "label" in e:
            e |= {"label": EVIL, "counts": EVIL}
    write_report(report, tmp_path)
    tables, text = read_markdown((tmp_path / "report.md").read_text())
    row = by_first(tables["Every method"][0])[EVIL]
    assert len(row) == 10 and row[-1] == EVIL
    assert f"Compressing the KV cache of {EVIL}" in text
    assert EVIL in text.split("documents, higher is better. ")[1]
    assert report["command"] in text
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
    rows = read_markdown(markdown(report, {}))[0]["Quality by size"][0][1]
    assert all(row[3] in shown for row in rows)


def test_what_blends_recover_is_shown(report: dict[str, Any]) -> None:
    floor = {"kv": "exact", "selector": "nothing", "label": "floor", "cost": None, "bits_per_value": 16.0, "kl": 0.2}
    blend = {"kv": "exact", "selector": "default", "label": "ours", "cost": 0.15, "share": 0.625, "share_stderr": 0.041}
    report["blends"] = {"prompts": 8, "entries": [floor, blend]}
    ((head, rows),) = read_markdown(markdown(report, {}))[0]["Prompts of cached chunks"]
    assert head[-2:] == ["0%", "15%"] and rows == [
        ["floor", "exact", "16.00", "0.200", "", ""], ["ours", "exact", "", "", "", "62.5 ± 4.1%"]
    ]  # fmt: skip


def test_what_changed_since_another_report_is_shown(report: dict[str, Any]) -> None:
    change = {"key": "kivi4", "metric": "kl", "before": 0.2, "after": 0.3, "stderr": 0.01, "more_is_better": False}
    better = {**change, "metric": "top1", "more_is_better": True, "worse": False}
    report["against"] = {
        "name": "old.json", "changes": [better, {**change, "worse": True}], "unchanged": 7,
        "missing": ["kivi4 recall"], "worse": 2,
    }  # fmt: skip
    tables, text = read_markdown(markdown(report, {}))
    rows = tables["What changed"][0][1]
    assert [row[1:3] + row[-1:] for row in rows] == [
        ["kl", "0.2000", "worse"], ["top1", "0.2000", "better"], ["recall", "", "missing"],
    ]  # fmt: skip
    assert rows[0][4] == "+0.100 ± 0.010" and "2 figures worse or missing, 7 unchanged" in text
