"""Every paragraph of README and docs with a measured figure links to its run, or has a row in docs/claims.md."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "claims.md"
FIGURE = re.compile(
    r"\d ?(?:%|times\b|x\b|ms\b|s\b|seconds\b|minutes\b|GB/s|MB/s|MB\b|bits per value)|factor of \d|KL of \d"
)
SOURCES = ("definition", "arithmetic")


def paragraphs(text: str) -> list[str]:
    """Return the paragraphs, items and rows with a figure, outside of code and of tables that tests write."""
    text = re.sub(r"^```.*?^```$|<!-- table: .*?<!-- end of table -->", "", text, flags=re.DOTALL | re.MULTILINE)
    parts = (" ".join(part.split()) for part in re.split(r"\n\n|\n(?=[-|#*])", text))
    return [part for part in parts if FIGURE.search(part)]


def uncovered(text: str, figures: list[str]) -> list[str]:
    """Return the paragraphs that neither link to a run nor hold the words of a row."""
    found = [part for part in paragraphs(text) if not re.search(r"\]\([^)]*results/[^)]+\)", part)]
    return [part for part in found if not any(words in part for words in figures)]


def rows() -> list[list[str]]:
    lines = PAGE.read_text(encoding="utf-8").split("|---|---|---|\n")[1].splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def documents() -> list[str]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page.read_text(encoding="utf-8") for page in pages if page != PAGE]


def test_every_figure_has_a_source() -> None:
    figures = [words for _, words, _ in rows()]
    missing = [part for text in documents() for part in uncovered(text, figures)]
    assert not missing, "link to the run in eval/results, or add a row to docs/claims.md: " + "; ".join(missing)
    assert uncovered("It is 7 times faster.", figures) == ["It is 7 times faster."]
    assert not uncovered("It is [7 times faster](../eval/results/2026-11-27-cpu-epyc/README.md).", figures)


def test_every_row_is_about_a_sentence_and_names_a_source() -> None:
    texts = [" ".join(text.split()) for text in documents()]
    for _, words, sources in rows():
        assert any(words in text for text in texts), words
        for source in sources.split("; "):
            run = re.fullmatch(r"`(eval/results/\d{4}-\d\d-\d\d-[\w-]+)`", source)
            assert source in SOURCES or (run and (ROOT / run[1] / "README.md").is_file()), source
