"""The sections of a report.

What a report lacks (tasks, standard errors of a single sequence, a curve that does not reach a size) is left out or
said in words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from cuvee.eval.documents import SMALL_MODEL, ReportBlock, ReportSection, ReportTable
from cuvee.eval.formatting import format_bits, format_interval, format_number, format_percent, format_ratio, with_error
from cuvee.eval.methods import family_label
from cuvee.eval.report.families import family_rank, is_learned, label_and_setting, layer_entries
from cuvee.eval.report.report_plots import PLOTS, machine_name
from cuvee.eval.report.schema import BlendEntry, LengthEntry, MethodEntry, Report, Score, TextInfo
from cuvee.eval.report.scoring import ABSENT, shows_something

__all__ = ["RATIOS", "against", "by_kind", "equal_kl", "headline", "report_preface", "report_sections", "report_title"]

RATIOS = (4, 8, 16, 32)  # how many times smaller the cache shall be


def report_sections(report: Report) -> list[ReportSection]:
    """Return all sections of a report, in order, without empty ones."""
    made = (
        against, headline, equal_kl, by_kind, _sizes, _methods, _lengths, _tasks, _blends, _layers, _profiles,
        _curves, _provenance, _limits,
    )  # fmt: skip
    return [section for section in (make(report) for make in made) if section.blocks]


def report_title(report: Report) -> str:
    """Return the title of a report."""
    return f"What compressing its KV cache costs {report.model.name}"


def report_preface(report: Report) -> list[str]:
    """Return the paragraphs before the first section."""
    lines = []
    if not report.complete:
        lines.append("This run is not complete: the same command continues where it stopped.")
    lines.append(
        f"Measured {_date(report)} on {machine_name(report)}, with cuvee {report.environment['cuvee']}. The model's "
        f"predictions after the decoded cache are compared with those after the exact one, for the same tokens. "
        f"Bits per value count everything that is stored for a cache except the profile; the cache itself has 16."
    )
    return lines


def against(report: Report) -> ReportSection:
    """Make the section on what changed since an earlier report."""
    found = report.against
    title = "What changed"
    if found is None:
        return ReportSection("against", title, [])
    changes = sorted(found.changes, key=lambda change: not change.worse)
    rows = [
        [
            _name(report, change.key),
            change.metric,
            format_number(change.before, 4),
            format_number(change.after, 4),
            with_error(change.after - change.before, change.stderr, signed=True),
            "worse" if change.worse else "better",
        ]
        for change in changes
    ]
    rows += [[key, metric, "", "", "", "missing"] for key, _, metric in (m.rpartition(" ") for m in found.missing)]
    count = f"{found.worse} figures" if found.worse != 1 else "1 figure"
    text = (
        f"Since {found.name}: {count} worse or missing, {found.unchanged} unchanged. A change counts if it is "
        "larger than two standard errors of its paired difference."
    )
    blocks: list[ReportTable | ReportBlock] = [ReportBlock("text", text)]
    if rows:
        strong = frozenset(index for index, row in enumerate(rows) if row[-1] != "better")
        blocks.append(ReportTable(["method ", "figure ", "before", "now", "change", " "], rows, strong=strong))
    return ReportSection("against", title, blocks)


def headline(report: Report) -> ReportSection:
    """Make the section on what you lose at 4x, 8x, 16x and 32x."""
    rows: list[list[str]] = []
    sentence = ""
    for ratio in RATIOS:
        for family in _learned_families(report):
            entries = [e for e in report.quality if e.family == family and e.bits_per_value > 0]
            finest = max(e.bits_per_value for e in entries)
            bits = min(16 / ratio, finest)
            label = family_label(family)
            kl, loss, same = (_at(entries, bits, field) for field in ("kl", "delta_nll", "top1"))
            if kl is None or loss is None or same is None:
                smallest = format_ratio(16 / min(e.bits_per_value for e in entries))
                rows.append([f"{ratio}x", "", label, f"not measured beyond {smallest}", "", "", ""])
                continue
            # To first order, a small change of the loss is the same relative change of the perplexity.
            growth = loss[1] and math.exp(loss[0]) * loss[1]
            costs = [
                with_error(*kl),
                with_error(*same, percent=True),
                with_error(math.expm1(loss[0]), growth, signed=True, percent=True),
            ]
            rows.append([f"{ratio}x", format_bits(bits), label, *costs, _task_changes(report, family, bits)])
            if ratio == 8 and not sentence:
                sentence = (
                    f"At {format_ratio(16 / bits)} ({label}), the KL to the exact cache is {costs[0]} nats per token, "
                    f"{costs[1]} of the most likely next tokens stay what they were, and the perplexity changes by "
                    f"{costs[2]}."
                )
    if not rows:
        return ReportSection("lose", "What you lose", [])
    sentence = sentence or "No curve reaches 8x."
    for entry in report.quality:
        if entry.family == "destroyed":
            change = with_error(math.expm1(entry.delta_nll), None, signed=True, percent=True)
            sentence += (
                f" For scale: with a destroyed cache the KL is {format_number(entry.kl)} and the perplexity changes "
                f"by {change}."
            )
    columns = ["size", "bits per value", "codec ", "KL", "top-1 kept", "perplexity", "tasks "]
    note = (
        "Interpolated between measured settings, ± one standard error. Where the finest setting measured is already "
        "smaller than the size asked for, the row is of that setting."
    )
    if report.scores:
        note += (
            " Tasks: the best scored setting that fits in the size, and the scores it moves by more than one standard "
            "error of the paired difference."
        )
    else:
        columns.pop()
        rows = [row[:-1] for row in rows]
    strong = frozenset(index for index, row in enumerate(rows) if row[0] == "8x")
    table = ReportTable(columns, rows, note=note, strong=strong)
    return ReportSection("lose", "What you lose", [ReportBlock("text", sentence), table, _figure("size_kl")])


def _task_changes(report: Report, family: str, bits: float) -> str:
    """Summarize the tasks at a family's best scored setting of at most `bits` per value."""
    known = {e.key: e for e in report.quality if e.family == family and e.bits_per_value <= bits}
    scored = {s.key for s in report.scores} & set(known)
    if not scored:
        return "no scored setting is this small"
    best = max(scored, key=lambda key: known[key].bits_per_value)
    moved = [
        f"{score.task} {format_number(score.difference, signed=True)}"
        for score in report.scores
        if score.key == best and _mark(report, score)
    ]
    setting = f"{known[best].setting} ({format_ratio(16 / known[best].bits_per_value)})"
    return f"{setting}: {', '.join(moved) or 'none beyond one standard error'}"


def equal_kl(report: Report) -> ReportSection:
    """Make the section on the codec's size at the KL of each baseline."""
    ratios = [r for anchor in report.comparison for r in anchor.ratios]
    families = sorted({str(r.of) for r in ratios}, key=lambda family: family_rank(report, family))
    rows: list[list[str]] = []
    missing: list[str] = []
    for anchor in report.comparison:
        name = _name(report, anchor.anchor)
        sizes = {f.family: f.bits_per_value for f in anchor.families}
        sizes[anchor.anchor] = anchor.bits_per_value
        missing += [
            f"{family_label(f.family)}, at the KL of {name}: {f.reason}"
            for f in anchor.families
            if f.bits_per_value is None and f.reason
        ]
        for against in dict.fromkeys(str(r.against) for r in anchor.ratios):
            found = {str(r.of): r for r in anchor.ratios if r.against == against}
            cells = [format_interval(found.get(family)) for family in families]
            rows.append(
                [name, format_number(anchor.kl), _name(report, against), format_bits(sizes.get(against)), *cells]
            )
    if not rows:
        return ReportSection("equal-kl", "How much smaller at equal KL", [])
    columns = [
        "at the KL of ",
        "KL",
        "against ",
        "its bits per value",
        *(f"smaller by: {family_label(f)}" for f in families),
    ]
    note = (
        "Sizes are read off the measured curves at the KL of the baseline. In brackets: 95% of the bootstrap over "
        "sequences."
    )
    blocks: list[ReportTable | ReportBlock] = [ReportTable(columns, rows, note=note)]
    if missing:
        blocks.append(ReportBlock("list", items=tuple(missing)))
    return ReportSection("equal-kl", "How much smaller at equal KL", blocks)


def by_kind(report: Report) -> ReportSection:
    """Make the section on the codec's size by text, with and without repeats of the cache."""
    kinds = report.by_kind
    tables = []
    for family in _learned_families(report):
        profile = report.profiles.get(family.partition("/")[2])
        same = f"pca/{profile and profile.group}"
        columns: dict[tuple[str, str], str] = {}
        for kind in kinds:
            for anchor in kind.comparison:
                name = _name(report, anchor.anchor)
                columns.setdefault((anchor.anchor, anchor.anchor), name)
        for key, against in list(columns):
            columns[key, same] = f"{family_label(same)}, at the KL of {_name(report, against)}"
        rows = []
        for kind in kinds:
            found = {
                (anchor.anchor, ratio.against): ratio
                for anchor in kind.comparison
                for ratio in anchor.ratios
                if ratio.of == family
            }
            if found:
                what = "repeats its cache" if kind.reread else "plain"
                cells = [format_interval(found[key]) if key in found else "" for key in columns]
                rows.append([kind.text, what, str(kind.sequences), *cells])
        # A grouping that PCA was not measured with has no column.
        kept = [i for i in range(len(columns)) if any(row[3 + i] for row in rows)]
        if rows and kept:
            heads = list(columns.values())
            tables.append(
                ReportTable(
                    ["text ", "sequences are ", "of them", *(heads[i] for i in kept)],
                    [row[:3] + [row[3 + i] for i in kept] for row in rows],
                    title=family_label(family),
                )
            )
    if not tables:
        return ReportSection("by-kind", "How much smaller, by kind of text", [])
    text = (
        "The same for the sequences of each text alone: how many times smaller the codec is than a baseline, at the KL "
        "of that baseline on these sequences. In brackets: 95% of the bootstrap over them."
    )
    return ReportSection("by-kind", "How much smaller, by kind of text", [ReportBlock("text", text), *tables])


def _sizes(report: Report) -> ReportSection:
    """Make the section on the size of each curve at round KLs."""
    entries = report.sizes
    kls = sorted({float(e.kl) for e in entries})
    found = {(str(e.family), float(e.kl)): e for e in entries}
    families = sorted({str(e.family) for e in entries}, key=lambda family: family_rank(report, family))
    rows = []
    for family in families:
        cells = []
        for kl in kls:
            e = found.get((family, kl))
            size = e and e.bits_per_value
            cells.append("" if not size else f"{format_bits(size)} ({format_ratio(16 / size)})")
        if any(cells):
            rows.append([family_label(family), *cells])
    if not rows:
        return ReportSection("sizes", "What a KL costs", [])
    table = ReportTable(
        ["curve ", *(f"KL {kl:g}" for kl in kls)],
        rows,
        note="Bits per value, and how many times smaller than 16 bits; empty where a curve was not measured. Nats per "
        "token, over all sequences.",
    )
    return ReportSection("sizes", "What a KL costs", [table])


def _methods(report: Report) -> ReportSection:
    shown = [e for e in report.quality if e.kind != "curve"]
    if not shown:
        return ReportSection("methods", "Every method", [])
    note = (
        "± one standard error over sequences. ΔNLL: what the decoded cache adds to the negative log-likelihood of the "
        "real next tokens, paired, in nats per token. Top-1: tokens whose most likely successor stays the same. GB/s "
        "of 16-bit cache; none where bits are counted and not made."
    )
    blocks: list[ReportTable | ReportBlock] = [_quality_table(report, shown, note)]
    if report.skipped:
        blocks.append(ReportTable(["left out ", "why "], [[s.key, s.reason] for s in report.skipped], title="Left out"))
    return ReportSection("methods", "Every method", blocks)


def _curves(report: Report) -> ReportSection:
    shown = [e for e in report.quality if e.kind == "curve"]
    blocks: list[ReportTable | ReportBlock] = [_quality_table(report, shown, "")] if shown else []
    return ReportSection("curves", "The other points of the curves", blocks)


def _quality_table(report: Report, entries: Sequence[MethodEntry], note: str) -> ReportTable:
    columns = [
        "method ", "bits per value", "ratio", "KL", "ΔNLL", "perplexity", "top-1 kept", "encode GB/s", "decode GB/s",
        "what its bits count ",
    ]  # fmt: skip
    rows: list[list[str]] = []
    strong: set[int] = set()
    for e in sorted(entries, key=lambda e: (family_rank(report, e.family), e.bits_per_value)):
        if _is_preset(e):
            strong.add(len(rows))
        rows.append(
            [
                label_and_setting(e),
                format_bits(e.bits_per_value),
                format_ratio(e.ratio),
                with_error(e.kl, e.kl_stderr),
                with_error(e.delta_nll, e.delta_nll_stderr, signed=True),
                format_number(math.exp(e.nll), 4),
                with_error(e.top1, e.top1_stderr, percent=True),
                format_number(e.encode_gb_per_s),
                format_number(e.decode_gb_per_s),
                e.counts,
            ]
        )
    return ReportTable(columns, rows, note=note, strong=frozenset(strong))


def _lengths(report: Report) -> ReportSection:
    """Size and KL as the cache grows."""
    entries = report.lengths
    lengths = sorted({int(e.length) for e in entries})
    rows: list[list[str]] = []
    strong: set[int] = set()
    found = {(str(e.key), int(e.length)): e for e in entries}
    shown = {str(e.key): e for e in entries}
    for key in sorted(shown, key=lambda k: (family_rank(report, shown[k].family), -shown[k].bits_per_value)):
        if _is_preset(shown[key]):
            strong.add(len(rows))
        cells = []
        for length in lengths:
            e = found.get((key, length))
            cells += ["", ""] if e is None else [format_bits(e.bits_per_value), with_error(e.kl, e.kl_stderr)]
        rows.append([label_and_setting(shown[key]), *cells])
    if not rows:
        return ReportSection("lengths", "Cache lengths", [])
    cached = {int(entry.cached): entry for entry in report.text.lengths}
    sequences = max((int(cached[n].sequences) for n in lengths if n in cached), default=0)
    text = (
        f"Bits per value and KL with more and more cached tokens, over {sequences} sequences. The scored tokens are "
        f"the same at every length: a shorter cache holds the last tokens of a longer one."
    )
    columns = ["method ", *(f"{n:,}: {what}" for n in lengths for what in ("bits", "KL"))]
    table = ReportTable(columns, rows, note="KL in nats per token, ± one standard error.", strong=frozenset(strong))
    return ReportSection("lengths", "Cache lengths", [ReportBlock("text", text), table])


def _tasks(report: Report) -> ReportSection:
    quality = {e.key: e for e in report.quality}
    blocks: list[ReportTable | ReportBlock] = []
    for task in report.tasks:
        scores = [s for s in report.scores if s.task == task.name]
        if not scores:
            continue
        scores.sort(key=lambda s: _score_rank(report, quality, s))
        rows = [
            [
                _name(report, s.key),
                format_bits(s.bits_per_value),
                with_error(s.score, s.stderr),
                "" if s.difference is None else with_error(s.difference, s.difference_stderr, signed=True),
                _mark(report, s),
            ]
            for s in scores
        ]
        if task.chance is not None:
            rows.append(["chance", "", format_number(task.chance), "", ""])
        better = "higher" if task.higher_is_better else "lower"
        about = [f"{task.docs} documents, {better} is better", str(task.description).strip().rstrip(".")]
        if shows_something(task, scores) is False:
            about.append("It shows nothing about a codec: without a usable cache the score is no worse, or a guess")
        blocks.append(
            ReportTable(
                ["method ", "bits per value", str(task.metric), "difference to 16 bits", "beyond one s.e. "],
                rows,
                title=str(task.name),
                note=". ".join(text for text in about if text) + ".",
                strong=frozenset(i for i, s in enumerate(scores) if s.key in quality and _is_preset(quality[s.key])),
            )
        )
    if not blocks:
        return ReportSection("tasks", "Scores of tasks", [])
    text = (
        "± one standard error over documents; differences are paired, document by document, with the cache at 16 "
        "bits. The last column says which differences are larger than their standard error."
    )
    return ReportSection("tasks", "Scores of tasks", [ReportBlock("text", text), *blocks])


def _blends(report: Report) -> ReportSection:
    """Make the section on prompts that are put together from cached chunks."""
    tables = []
    for made in report.blends:
        found = {(e.kv, e.selector, e.cost): e for e in made.entries}
        costs = sorted({cost for _, _, cost in found if cost is not None})
        rows: list[list[str]] = []
        strong: set[int] = set()
        for kv in dict.fromkeys(kv for kv, _, _ in found):
            floor = found[kv, "nothing", None]
            kl = "" if floor.kl is None else with_error(floor.kl, floor.kl_stderr)
            figures = [format_bits(floor.bits_per_value), kl]
            rows.append([floor.label, kv, *figures, _recovered(floor), *[""] * len(costs)])
            for selector in dict.fromkeys(selector for _, selector, _ in found if selector != "nothing"):
                entries = [found[kv, selector, cost] for cost in costs]
                if selector == "default":
                    strong.add(len(rows))
                rows.append([entries[0].label, kv, "", "", "", *map(_recovered, entries)])
        columns = ["selector ", "chunks ", "bits per value", "KL", "0%", *map(format_percent, costs)]
        title = f"{made.name}: {made.prompts} prompts"
        tables.append(ReportTable(columns, rows, title, strong=frozenset(strong)))
    if not tables:
        return ReportSection("blends", "Prompts of cached chunks", [])
    text = (
        "Prompts are put together from chunks that were cached alone, and a part of their tokens is computed again, at "
        "a cost in token-layers. Recovered: one minus KL over that of exact chunks with nothing recomputed. A dash: "
        "the cost does not pay for what the selector looks at."
    )
    return ReportSection("blends", "Prompts of cached chunks", [ReportBlock("text", text), *tables])


def _recovered(entry: BlendEntry) -> str:
    if entry.reason is not None:
        return "\N{EM DASH}"
    return "" if entry.share is None else with_error(entry.share, entry.share_stderr, percent=True)


def _layers(report: Report) -> ReportSection:
    entries = layer_entries(report)
    if not entries:
        return ReportSection("layers", "Layers", [])
    columns, rows = ["layer"], [[str(i)] for i in range(len(entries[0].layers))]
    for entry in entries:
        if all(layer.bits_per_value is not None for layer in entry.layers):
            columns.append(f"bits: {entry.label}")
            for row, layer in zip(rows, entry.layers, strict=True):
                row.append(format_bits(layer.bits_per_value))
    for entry in entries:
        columns.append(f"error of K / V: {entry.label}")
        for row, layer in zip(rows, entry.layers, strict=True):
            row.append(f"{format_number(layer.key_error, 2)} / {format_number(layer.value_error, 2)}")
    note = (
        "Error: squared error over the variance, keys after RoPE. Bits of a layer without the header of the blob; "
        "none where one basis spans several layers."
    )
    return ReportSection("layers", "Layers", [ReportTable(columns, rows, note=note)])


def _profiles(report: Report) -> ReportSection:
    rows = [
        [
            name,
            str(p.group),
            str(p.source),
            f"{p.bytes:,}",
            format_number(p.bits_per_value_over_1m_tokens),
            format_number(p.seconds),
            str(p.id),
        ]
        for name, p in report.profiles.items()
    ]
    columns = ["profile ", "group ", "source ", "bytes", "bits per value over 1M tokens", "seconds to learn", "id "]
    note = "A profile is learned once for a model and kept beside it; its bytes are not part of the sizes above."
    return ReportSection("profiles", "Profiles", [ReportTable(columns, rows, note=note)] if rows else [])


def _provenance(report: Report) -> ReportSection:
    text, configuration = report.text, report.configuration
    facts = {
        "cache stored as": configuration.get("cache_dtype"),
        "sequences": f"{text.sequences} of {text.length} tokens, the first {text.prefix} cached",
        "repeats": _repeats(text),
        "tokens coded together": configuration.get("chunk_tokens"),
        "sequences to calibrate on": text.calibration_sequences,
        "SHA-256 of the tokens": text.tokens_sha256,
        "perplexity, exact cache": report.exact and format_number(report.exact.perplexity, 4),
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
    sources = (("calibration", text.calibration), ("evaluation", text.evaluation))
    texts = [[use, one.name, f"{one.tokens:,}", one.sha256] for use, found in sources for one in found]
    blocks: list[ReportTable | ReportBlock] = [ReportBlock("code", report.command)] if report.command else []
    blocks.append(ReportTable(["what ", "value "], _named(shown)))
    if texts:
        blocks.append(ReportTable(["text for ", "name ", "tokens", "SHA-256 "], texts, title="Texts"))
    environment = _named(report.environment)
    blocks.append(ReportTable(["what ", "version or kind "], environment, title="Software and hardware"))
    return ReportSection("protocol", "How it was measured", blocks)


def _named(values: Mapping[str, object]) -> list[list[str]]:
    return [[name, str(value)] for name, value in values.items() if value is not None]


def _limits(report: Report) -> ReportSection:
    model, text = report.model, report.text
    says = [
        f"Standard errors and intervals are over {text.sequences} sequences of the same few texts. Neighboring "
        f"sequences share vocabulary and topic, so what another text would give may lie further away than they say."
        if text.sequences > 1
        else "There is a single sequence: nothing here says how far another one would be from it.",
    ]
    if model.parameters < SMALL_MODEL:
        says.append(
            f"{model.name} has {model.parameters / 1e6:.3g} million parameters. What a large model loses at the "
            f"same size is another measurement: run this report on it."
        )
    if text.reread:
        says.append(
            "Half of the sequences repeat a part of their cache, which a model must read to predict them: losses are "
            "larger here than on ordinary text, where it hardly looks back."
        )
    says.append(
        "Baselines are written from their descriptions. Where a table says ideal entropy, or that levels are counted, "
        "no bytes were made: their real sizes are no smaller than that."
    )
    if report.scores:
        says.append(
            "Documents of a task share text and templates, so they are fewer independent trials than their number. "
            "With this many comparisons some differ by more than one standard error by chance alone."
        )
    if any(e.encode_gb_per_s is not None for e in report.quality):
        says.append("Speeds are one pass on this machine, not a benchmark: make bench, in a checkout, is one.")
    return ReportSection("limits", "What the figures do not say", [ReportBlock("list", items=tuple(says))])


def _repeats(text: TextInfo) -> str:
    return "every second sequence repeats a part of its cache" if text.reread else "none: ordinary text"


def _figure(name: str) -> ReportBlock:
    return ReportBlock("figure", PLOTS[name][1], name)


def _learned_families(report: Report) -> list[str]:
    """The families of the codec with a learned profile that have a size, in order."""
    found = {str(e.family) for e in report.quality if is_learned(e.family) and e.bits_per_value > 0}
    return sorted(found, key=lambda family: family_rank(report, family))


def _name(report: Report, key: str) -> str:
    """Return the label of a method or a family."""
    if key == ABSENT:
        return "the question alone"
    labels = [str(e.label) for e in report.quality if e.key == key]
    return labels[0] if labels else family_label(key)


def _family(quality: Mapping[str, MethodEntry], score: Score) -> str:
    key = str(score.key)
    return str(quality[key].family) if key in quality else key.partition("@")[0]


def _is_preset(entry: MethodEntry | LengthEntry) -> bool:
    return entry.kind == "preset" and is_learned(entry.family)


def _score_rank(report: Report, quality: Mapping[str, MethodEntry], score: Score) -> tuple[tuple[int, int], float]:
    return family_rank(report, _family(quality, score)), score.bits_per_value or 0.0


def _mark(report: Report, score: Score) -> str:
    """Return "better" or "worse" if a score differs from 16 bits by more than one standard error, else nothing."""
    difference, error = score.difference, score.difference_stderr
    if not difference or error is None or abs(difference) <= error:
        return ""
    higher = next(task.higher_is_better for task in report.tasks if task.name == score.task)
    return "better" if (difference > 0) == higher else "worse"


def _date(report: Report) -> str:
    return str(report.environment["date"]).partition("T")[0]


def _at(entries: Sequence[MethodEntry], bits: float, field: str) -> tuple[float, float | None] | None:
    """A figure of a family at a given size, and its standard error; None beyond what was measured.

    It is linear between settings over the logarithm of the size. The logarithm of the KL is taken, too.
    """
    order = sorted(entries, key=lambda e: float(e.bits_per_value))
    for low, high in pairwise([order[0], *order]):  # with a single setting the curve has no length
        x0, x1 = low.bits_per_value, high.bits_per_value
        if x0 <= bits <= x1:
            share = math.log(bits / x0) / math.log(x1 / x0) if x0 < x1 else 1.0
            y0, y1 = float(getattr(low, field)), float(getattr(high, field))
            e0, e1 = getattr(low, f"{field}_stderr"), getattr(high, f"{field}_stderr")
            error = None if e0 is None or e1 is None else float(e0 + share * (e1 - e0))
            straight = y0 + share * (y1 - y0)
            return (y0 * (y1 / y0) ** share if field == "kl" and y0 > 0 and y1 > 0 else straight), error
    return None
