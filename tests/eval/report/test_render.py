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
from tests.eval.report.world import filled, markdown, print_summary, write_report

from cuvee.eval.documents import escape
from cuvee.eval.report.families import beyond_error
from cuvee.eval.stats import paired_difference

pytest.importorskip("matplotlib")

GOLDEN = Path(__file__).with_name("golden.md")
EVIL = "<b>&amp;&lt; a|b *c* _d_ `e` $f$ [g](http://h) ~~i~~ \\| {{ j }}"


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


def one_sequence(report: dict[str, Any]) -> None:
    report["text"]["sequences"] = 1
    for e in report["quality"]:
        e |= {"kl_stderr": None, "delta_nll_stderr": None, "top1_stderr": None}
    for s in report["scores"]:
        s |= {"stderr": None, "difference_stderr": None, "per_doc": None}


def nothing_measured(report: dict[str, Any]) -> None:
    report |= {"quality": [], "tasks": [], "scores": [], "comparison": [], "profiles": {}, "exact": None, "skipped": []}
    report |= {"complete": False, "command": "", "by_kind": [], "sizes": [], "against": None}


def only_baselines(report: dict[str, Any]) -> None:
    report["tasks"], report["scores"] = [], []
    report["quality"] = [e for e in report["quality"] if not e["family"].startswith(("cuvee", "pca"))]
    report |= {"comparison": [], "profiles": {}, "by_kind": [], "sizes": []}


@pytest.mark.parametrize(
    ("change", "absent"),
    [
        (one_sequence, set()),
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
        assert "| worse |" not in text.partition("## Scores of tasks")[2]
    if change is only_baselines:
        assert "Documents of a task" not in text


def test_one_changed_document_is_not_beyond_one_error(report: dict[str, Any]) -> None:
    """Its difference is one standard error, and rounding must not make it more."""
    changed = next(s for s in report["scores"] if s["difference"] is not None)
    larger = 0
    for documents in range(2, 40):
        lost = [1 / 9, *[0.0] * (documents - 1)]
        changed["difference"], changed["difference_stderr"] = paired_difference([0.0] * documents, lost)
        larger += abs(changed["difference"]) > changed["difference_stderr"]
        whole = filled(report)
        assert not beyond_error(whole, next(s for s in whole.scores if s.difference == changed["difference"]))
    assert larger  # as rounded
    changed["difference"] = -1.01 * changed["difference_stderr"]
    whole = filled(report)
    assert beyond_error(whole, next(s for s in whole.scores if s.difference == changed["difference"])) == "worse"


def test_a_curve_that_is_too_short_says_so(report: dict[str, Any]) -> None:
    report["quality"] = [e for e in report["quality"] if e["setting"] in ("", "small")]
    assert "| 32x |  | cuvee, a basis per layer | not measured beyond 26.7x |" in markdown(report)
    for e in report["quality"]:
        e["bits_per_value"] += 4 if e["setting"] else 0
    assert "No curve reaches 8x." in markdown(report)


@pytest.mark.parametrize(
    ("copied", "new", "says"),
    [
        (4e-3, 4e-3, None),
        (8e-3, 1e-3, " on copied text: KL 0.0090 ± 0.0010 against 0.005 (4.0 standard errors above it, sequences: 2)"),
        (1e-3, 8e-3, " on new text: KL 0.00800 against 0.005 (sequences: 2)"),
        (17e-3, 1e-3, ": KL 0.00900 against 0.005 (sequences: 4)"),
    ],
)
def test_a_promise_that_is_missed_on_one_kind_of_text_is_told_first(
    report: dict[str, Any], copied: float, new: float, says: str | None
) -> None:
    """Presets promise their KL on the worst kind, and a mean over all sequences hides what that loses."""
    preset = next(e for e in report["quality"] if e["key"] == "cuvee/layer@balanced")
    later = copied + 2e-3 if says and "±" in says else copied
    per_sequence = {**preset["per_sequence"], "kl": [copied, new, later, new]}
    preset.update(kl=(copied + new) / 2, kl_stderr=0.0, per_sequence=per_sequence)
    print_summary(report, console := Console(width=300, record=True, file=io.StringIO()))
    shown = console.export_text()
    for text in (markdown(report).partition("| size |")[0], shown.partition(" size ")[0]):
        missed = [f"cuvee, balanced misses its promise{says}."] if says else []
        assert re.findall(r"^.* misses its promise.*$", text.replace("± 0 ", ""), re.MULTILINE) == missed
        kept = "Every preset keeps its promise: no KL is more than one standard error above it (sequences: 2 of new"
        assert (kept in text) == (says is None)


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
    assert "4 figures worse or missing" in shown and re.search(r"lost +│? *all .*missing", shown)
