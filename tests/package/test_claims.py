"""Every paragraph of README and docs with a measured figure links to its run, or has a row in docs/claims.md."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "claims.md"
FIGURE = re.compile(
    r"\d ?(?:%|times\b|x\b|ms\b|s\b|seconds\b|minutes\b|GB/s|MB/s|MB\b|bits per value)|factor of \d|KL of \d"
)
NUMBER = r"(?<![\w.])(\d[\d,]*(?:\.\d+)?)"
COUNTED = re.compile(
    rf"{NUMBER} ?(?:%|times\b|x\b|m?s\b|seconds\b|minutes\b|[GM]B\b|bits per value)|(?:factor|KL) of {NUMBER}"
)
RUN = re.compile(r"\]\(([^)#]*results/[^)#]+\.md)[^)]*\)")
COMMIT = re.compile(r"(?<![\w.-])(?=\d*[a-f])(?=[a-f]*\d)[0-9a-f]{7,10}(?![\w.-]\w|\w)")
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


def foreign(text: str, folder: Path) -> list[str]:
    """Return the figures that are in none of the runs which their paragraph links to, or that its rows name.

    They may be rounded, or percentages there. Paragraphs with a row of another source are left out.
    """
    found = []
    for part in paragraphs(text):
        named = [source for _, words, sources in rows() if words in part for source in sources.split("; ")]
        if set(named) & set(SOURCES):
            continue
        files = [folder / name for name in RUN.findall(part)] + [ROOT / name.strip("`") / "README.md" for name in named]
        runs = [file.read_text(encoding="utf-8") for file in files]
        known = [float(number.replace(",", "")) for run in runs for number in re.findall(NUMBER, run)]
        for plain, of in COUNTED.findall(part) if runs else ():
            number = (plain or of).replace(",", "")
            figure, places = float(number), len(number.partition(".")[2])
            if figure not in {round(scale * value, places) for value in known for scale in (1, 100)}:
                found.append(f"{number}: {part}")
    return found


def rows() -> list[list[str]]:
    lines = PAGE.read_text(encoding="utf-8").split("|---|---|---|\n")[1].splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def pages() -> list[Path]:
    return [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if page != PAGE]


def documents() -> list[str]:
    return [page.read_text(encoding="utf-8") for page in pages()]


def test_every_figure_has_a_source() -> None:
    figures = [words for _, words, _ in rows()]
    missing = [part for text in documents() for part in uncovered(text, figures)]
    assert not missing, "link to the run in eval/results, or add a row to docs/claims.md: " + "; ".join(missing)
    assert uncovered("It is 7 times faster.", figures) == ["It is 7 times faster."]
    assert not uncovered("It is [7 times faster](../eval/results/2026-11-27-cpu-epyc/README.md).", figures)


def test_a_figure_is_in_the_run_that_is_named_for_it() -> None:
    found = [each for page in pages() for each in foreign(page.read_text(encoding="utf-8"), page.parent)]
    assert not found, "not in the run's README: " + "; ".join(found)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for right, wrong in (("[4.3 times]", "[5.3 times]"), ("19.6 times", "91.6 times")):
        changed = readme.replace(right, wrong)
        assert changed != readme and len(foreign(changed, ROOT)) == 1


def test_every_row_is_about_a_sentence_and_names_a_source() -> None:
    texts = [" ".join(text.split()) for text in documents()]
    for _, words, sources in rows():
        assert any(words in text for text in texts), words
        for source in sources.split("; "):
            run = re.fullmatch(r"`(eval/results/\d{4}-\d\d-\d\d-[\w-]+)`", source)
            assert source in SOURCES or (run and (ROOT / run[1] / "README.md").is_file()), source


def git(*args: str, given: str = "") -> list[str]:
    return subprocess.run(["git", *args], cwd=ROOT, input=given, stdout=-1, text=True, check=True).stdout.splitlines()


def unknown_commits(text: str) -> list[str]:
    """Return the commits that a text names outside of code, and that the history does not have."""
    named = COMMIT.findall(re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    asked = "".join(f"{commit}^{{commit}}\n" for commit in named)
    found = git("cat-file", "--batch-check", given=asked)
    return [line.partition("^")[0] for line in found if line.endswith("missing")]


def test_the_commits_of_figures_are_in_the_history() -> None:
    if not (ROOT / ".git").exists() or git("rev-parse", "--is-shallow-repository") != ["false"]:
        pytest.skip("a checkout without its history")
    files = [*pages(), *(ROOT / "eval" / "results").rglob("*.md")]
    texts = [file.read_text(encoding="utf-8") for file in files]
    assert sum(len(COMMIT.findall(text)) for text in texts) > 20
    assert [commit for text in texts for commit in unknown_commits(text)] == []
    assert unknown_commits("measured (30 November, 00000bad; busy)") == ["00000bad"]
