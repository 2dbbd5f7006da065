"""The sections of a report, each a function from a report to blocks.

What a report lacks (tasks, standard errors of a single sequence, a curve that does not reach a size) is left out or
said in words. A section without blocks is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from cuvee.eval.documents import SMALL_MODEL, Block, Bullets, Code, ReportSection, ReportTable
from cuvee.eval.formatting import format_number, with_error
from cuvee.eval.report.curve_sections import by_kind, equal_kl, headline, sizes
from cuvee.eval.report.families import name_of, rows_of
from cuvee.eval.report.method_sections import methods, tasks
from cuvee.eval.report.schema import Report

__all__ = ["report_preface", "report_sections", "report_title", "summary_sections"]


def report_title(report: Report) -> str:
    """Return the title of a report."""
    return f"Compressing the KV cache of {report.model.name}"


def report_preface(report: Report) -> list[str]:
    """Return the paragraphs before the first section."""
    lines = []
    if not report.complete:
        lines.append("This run is not complete: the same command continues where it stopped.")
    machine = report.environment
    date = str(machine["date"]).partition("T")[0]
    name = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores"
    lines.append(
        f"Measured {date} on {name}, with cuvee {machine['cuvee']}. The model's "
        f"predictions after the decoded cache are compared with those after the exact one, for the same tokens. "
        f"Bits per value count everything that is stored for a cache except the profile; the cache itself has 16."
    )
    return lines


def _against(report: Report) -> list[Block]:
    """List what changed since an earlier report."""
    found = report.against
    if found is None:
        return []
    changes = sorted(found.changes, key=lambda change: not change.worse)
    rows = [
        [
            name_of(report, change.key),
            change.metric,
            format_number(change.before, 4),
            format_number(change.after, 4),
            with_error(change.after - change.before, change.stderr, signed=True),
            "worse" if change.worse else "better",
        ]
        for change in changes
    ]
    here = {entry.key for entry in report.quality} | {score.key for score in report.scores}
    missing: dict[str, list[str]] = {}
    for key, _, metric in (name.rpartition(" ") for name in found.missing):
        missing.setdefault(key, []).append(metric)
    rows += [
        [key, ", ".join(metrics) if key in here else "all", "", "", "", "missing"] for key, metrics in missing.items()
    ]
    count = f"{found.worse} figures" if found.worse != 1 else "1 figure"
    text = (
        f"Since {found.name}: {count} worse or missing, {found.unchanged} unchanged. A change counts if it is "
        "larger than two standard errors of its paired difference."
    )
    strong = frozenset(index for index, row in enumerate(rows) if row[-1] != "better")
    columns = ["method ", "figure ", "before", "now", "change", " "]
    return [text, ReportTable(columns, rows, strong=strong)] if rows else [text]


def _profiles(report: Report) -> list[Block]:
    rows = [
        [
            name,
            str(p.group),
            str(p.source),
            f"{p.bytes:,}",
            format_number(p.bits_per_value_over_1m_tokens),
            str(p.id),
        ]
        for name, p in report.profiles.items()
    ]
    columns = ["profile ", "group ", "source ", "bytes", "bits per value over 1M tokens", "id "]
    note = "A profile is learned once for a model and kept beside it; its bytes are not part of the sizes above."
    return [ReportTable(columns, rows, note=note)] if rows else []


def _provenance(report: Report) -> list[Block]:
    text, configuration = report.text, report.configuration
    facts = {
        "cache stored as": configuration.get("cache_dtype"),
        "sequences": f"{text.sequences} of {text.length} tokens, the first {text.prefix} cached",
        "tokens coded together": configuration.get("chunk_tokens"),
        "SHA-256 of the tokens": text.tokens_sha256,
        "perplexity of new text, exact cache": _exact_perplexity(report, rows_of(report, reread=False)),
        "perplexity of copied text, exact cache": _exact_perplexity(report, rows_of(report, reread=True)),
        "documents per task, at most": configuration.get("limit"),
        "seed": configuration.get("seed"),
        "time taken": f"{report.seconds:.0f} s",
        "digest of the configuration": report.digest,
    }
    model = report.model
    shown = {
        "model": f"{model.name} ({model.model_type}, {model.parameters:,} parameters, {model.dtype})",
        "model fingerprint": model.fingerprint,
        "cache": f"{model.layers} layers, {model.values_per_token:,} values per token",
        **facts,
    }
    texts = [[one.name, f"{one.tokens:,}", one.sha256] for one in text.evaluation]
    blocks: list[Block] = [Code(report.command)] if report.command else []
    blocks.append(ReportTable(["what ", "value "], _named(shown)))
    if texts:
        blocks.append(ReportTable(["name ", "tokens", "SHA-256 "], texts, title="Texts"))
    environment = _named(report.environment)
    blocks.append(ReportTable(["what ", "version or kind "], environment, title="Software and hardware"))
    return blocks


def _exact_perplexity(report: Report, rows: Sequence[int]) -> str | None:
    if report.exact is None or not rows:
        return None
    return format_number(math.exp(fmean(report.exact.per_sequence[row] for row in rows)), 4)


def _named(values: Mapping[str, object]) -> list[list[str]]:
    return [[name, str(value)] for name, value in values.items() if value is not None]


def _limits(report: Report) -> list[Block]:
    model, text = report.model, report.text
    says = [
        f"Standard errors and intervals are over {text.sequences} sequences of the same few texts. Neighboring "
        f"sequences share vocabulary and topic, so the figures of another text may lie outside these intervals."
        if text.sequences > 1
        else "There is a single sequence, so there are no standard errors.",
    ]
    if model.parameters < SMALL_MODEL:
        says.append(
            f"{model.name} has {model.parameters / 1e6:.3g} million parameters. A large model may lose more or less "
            f"at the same size: run this report on it."
        )
    says += [
        "Every second sequence repeats a part of its cache, which a model must read to predict it: KL is usually "
        "larger there than on ordinary text.",
        "Baselines are written from their descriptions. Where a table says ideal entropy, or that levels are counted, "
        "no bytes were written: their real sizes are at least that.",
    ]
    if report.scores:
        says.append(
            "Documents of a task share text and templates, so they are not independent trials. "
            "With this many comparisons some differ by more than one standard error by chance alone."
        )
    return [Bullets(tuple(says))]


_SECTIONS: tuple[tuple[str, Callable[[Report], Sequence[Block]]], ...] = (
    ("What changed", _against),
    ("Quality by size", headline),
    ("Ratios at equal KL", equal_kl),
    ("Ratios at equal KL, by kind of text", by_kind),
    ("Size by KL", sizes),
    ("Every method", methods),
    ("Scores of tasks", tasks),
    ("Profiles", _profiles),
    ("How it was measured", _provenance),
    ("Limits", _limits),
)
_SUMMARY = 3  # of them, which say what changed, what you lose, and how much smaller the cache is


def report_sections(report: Report) -> list[ReportSection]:
    """Return all sections of a report, in order, without empty ones."""
    return _made(report, _SECTIONS)


def summary_sections(report: Report) -> list[ReportSection]:
    """Return the sections that a terminal shows."""
    return _made(report, _SECTIONS[:_SUMMARY])


def _made(report: Report, sections: Sequence[tuple[str, Callable[[Report], Sequence[Block]]]]) -> list[ReportSection]:
    made = [ReportSection(title, make(report)) for title, make in sections]
    return [section for section in made if section.blocks]
