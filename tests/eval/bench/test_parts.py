"""`cuvee bench parts`: what a small store serves in parts and in whole chunks, and what the report says of it."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from cuvee.codec.errors import InputError
from cuvee.eval.bench.parts import parts_bench
from cuvee.eval.bench.parts.parts_bench import NEW, PART_KL, PARTS, PRESETS, run_parts_bench
from cuvee.eval.bench.parts.parts_tables import parts_markdown, print_parts_report


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_bench, "DOCUMENTS", 40)
    monkeypatch.setattr(parts_bench, "QUICK_REQUESTS", 600)


def methods(case: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {entry["method"]: entry for entry in case["methods"]}


def test_half_a_store_serves_more_tokens_in_parts(small: None) -> None:
    report = run_parts_bench((0.4,), quick=True)
    assert [(case["exponent"], case["new"]) for case in report["cases"]] == [(0.4, new) for new in NEW]
    for case in report["cases"]:
        entries = methods(case)
        assert [*entries] == [PARTS, *PRESETS]
        assert entries[PARTS]["served"] >= 1.5 * entries["high"]["served"]
        assert entries["small"]["served"] >= entries["balanced"]["served"] > entries["high"]["served"]
        assert PART_KL[2] < entries[PARTS]["kl"] < PART_KL[0] and entries["high"]["kl"] == pytest.approx(PART_KL[2])
        for entry in entries.values():
            assert sum(entry["by_parts"]) == pytest.approx(1)
            assert entry["by_parts"][0] == pytest.approx(1 - entry["served"])
    console = Console(record=True, width=200)
    print_parts_report(report, console)
    text, markdown = console.export_text(), parts_markdown(report)
    for shown in (PARTS, *PRESETS, "50% of the documents", f"{methods(report['cases'][0])[PARTS]['served']:.1%}"):
        assert shown in text and shown in markdown


def test_a_store_for_everything_serves_whole_chunks_as_well(small: None) -> None:
    """Parts take 2.5 % more bytes, so a few refinements are missing. Keys count as well, so a whole chunk is, too."""
    for case in run_parts_bench((1.0,), budget=1.0, quick=True)["cases"]:
        entries = methods(case)
        if not case["new"]:
            assert entries[PARTS]["served"] == entries["small"]["served"]
            assert entries["high"]["served"] == pytest.approx(entries[PARTS]["served"], rel=0.01)
        assert entries[PARTS]["kl"] < 2 * PART_KL[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((),), "exponents: must be numbers of at least 0, got \\[\\]"), (((-1.0,),), "exponents: "),
        (((1.0,), 0.0), "budget: must be above 0 and at most 1, got 0.0"), (((1.0,), 1.1), "budget: "),
    ],
)  # fmt: skip
def test_arguments_are_checked(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        run_parts_bench(*arguments)
