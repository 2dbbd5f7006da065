"""Test that the README's Python runs, and that its figures are those of the committed runs."""

from __future__ import annotations

import inspect
import json
import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import cuvee
from cuvee.codec.codec import MAX_DECODED_TOKENS, Codec
from cuvee.codec.format.keys import MAX_KEY_BYTES, MIN_KEY_BYTES
from cuvee.integrations.stores import urls
from cuvee.integrations.vllm.connector_config import Options

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SAID = " ".join(README.split())  # without line breaks
RESULTS = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
REAL = ROOT / "eval" / "results" / "2026-11-25-smollm2-report"
WIDE = ROOT / "eval" / "results" / "2026-11-25-smollm2-five-layers"
CLIENTS = ROOT / "eval" / "results" / "2026-11-23-clients"
RAG = ROOT / "eval" / "results" / "2026-11-27-smollm2-rag"
TASKS = ROOT / "eval" / "results" / "2026-11-23-smollm2-tasks"
LENGTHS = ROOT / "eval" / "results" / "2026-11-23-smollm2-lengths"
PEERS = ROOT / "eval" / "results" / "2026-11-26-smollm2-peers"
QUALITIES = ROOT / "eval" / "results" / "2026-11-25-smollm2-qualities"
LONG = ROOT / "eval" / "results" / "2026-11-23-engine-smollm2" / "engine.json"
NEW_CHUNKS = ROOT / "eval" / "results" / "2026-11-27-new-chunks" / "engine.json"
BLEND = (ROOT / "blend" / "README.md").read_text(encoding="utf-8")
REPORT = ROOT / "eval" / "results" / "2026-11-20-report" / "report.json"
ENGINE = ROOT / "eval" / "results" / "2026-11-21-vllm" / "engine.json"
PUBLISHED = ROOT / "eval" / "results" / "2026-11-23-smollm2-blend" / "xquad" / "blend.json"
CORRECTED = ROOT / "eval" / "results" / "2026-11-25-smollm2-blend" / "xquad" / "blend.json"
BLENDED = ROOT / "eval" / "results" / "2026-11-21-blend" / "blend.json"
FAMILIES = ("cuvee/layer", "cuvee/all")
ANCHORS = ("fp8-e4m3", "kivi4", "cachegen")


def test_the_python_of_the_readme_runs(tmp_path: Path) -> None:
    (library,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(library, "README.md", "exec"), names)
    assert names["cache"].get_seq_length() == 300
    assert len(names["blobs"]) == 2
    assert 5 < cuvee.inspect(names["blobs"][0]).ratio < 50
    (of_blend,) = re.findall(r"```python\n(.*?)```", BLEND, re.DOTALL)
    names["documents"], names["question"] = names["text"][:384].split(128), names["text"][650:680]
    names["contexts"] = names["text"][2000:3024].view(8, 128)
    of_blend = of_blend.replace("/var/cache/chunks", str(tmp_path / "chunks"))
    exec(compile(of_blend, "blend/README.md", "exec"), names)
    assert names["result"].record.tokens == 384 + 30 and any((tmp_path / "chunks").iterdir())
    assert 0.1 < names["result"].record.cost < 0.25 and names["chunks"].counters.misses == 3


def test_the_readme_is_one_page() -> None:
    assert len(README.splitlines()) <= 120


def test_links_and_pictures_of_the_readme_exist() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(targets) > 12
    for target in targets:
        assert (ROOT / target).is_file(), target


def ratio_cell(found: dict[str, Any]) -> str:
    if found["ratio"] is None:
        return "-"
    return f"{found['ratio']:.1f}x** ({found['low']:.1f} to {found['high']:.1f})"


@pytest.mark.parametrize(("folder", "pca"), [(REAL, "pca/layers:4"), (WIDE, "pca/layers:5")])
def test_the_figures_of_the_real_model_are_those_of_the_committed_run(folder: Path, pca: str) -> None:
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    kinds = report["by_kind"]
    assert [(kind["text"], kind["reread"]) for kind in kinds] == [
        ("pd_dracula.md", False), ("pd_dracula.md", True), ("python.txt", False), ("python.txt", True),
    ]  # fmt: skip
    ours = "cuvee/smollm2"
    page = (folder / "README.md").read_text(encoding="utf-8")
    expected = {(anchor, anchor): [ratio_cell(ratio(k, anchor, ours, anchor)) for k in kinds] for anchor in ANCHORS}
    expected |= {(anchor, pca): [ratio_cell(ratio(k, anchor, ours, pca)) for k in kinds] for anchor in ANCHORS[:2]}
    for cells, key in zip(rows("baseline", page), expected, strict=True):
        assert cells[1:] == expected[key], cells[0]
    if folder == WIDE:
        pairs = [(a, a) for a in (*ANCHORS, "cachegen-tables-free")] + [("fp8-e4m3", pca)]
        for (_, bits, kl, smaller), (anchor, against) in zip(rows("baseline", README), pairs, strict=True):
            (of,) = (entry for entry in report["comparison"] if entry["anchor"] == anchor)
            size = next((f["bits_per_value"] for f in of["families"] if f["family"] == against), of["bits_per_value"])
            assert (bits, kl) == (f"{size:.2f}", f"{of['kl']:.4f}"), against
            assert smaller == ratio_cell(ratio(report, anchor, ours, against)), against
        # The bits per value at which cuvee has the KL of FP8, by kind of text.
        at_kl = [8 / ratio(kind, "fp8-e4m3", ours, "fp8-e4m3")["ratio"] for kind in kinds]
        assert f"{min(at_kl):.1f} to {max(at_kl):.1f} bits per value" in SAID
    sizes = [e for e in report["sizes"] if e["family"] == ours]
    shown = rows("KL, nats per token", page)
    assert shown[0][1:] == [f"{e['bits_per_value']:.2f}" for e in sizes]
    assert shown[1][1:] == [f"{16 / e['bits_per_value']:.1f}" for e in sizes]
    if folder == WIDE:
        groups = json.loads((WIDE / "groups.json").read_text(encoding="utf-8"))
        for cells, (name, group) in zip(rows("group", page), groups.items(), strict=True):
            told = [f(p) for p in group["points"] for f in (_bits, _kl)]
            assert cells == [f"`{name}`", f"{group['megabytes']:.0f}", *told]


def _bits(point: dict[str, float]) -> str:
    return f"{point['bits_per_value']:.2f}"


def _kl(point: dict[str, float]) -> str:
    return f"{point['kl']:.4f}"


def test_lengths_are_those_of_the_committed_run() -> None:
    page = (LENGTHS / "README.md").read_text(encoding="utf-8")
    found = json.loads((LENGTHS / "lengths.json").read_text(encoding="utf-8"))["lengths"]
    methods: dict[str, list[dict[str, Any]]] = {}
    for entry in found:
        methods.setdefault(entry["key"], []).append(entry)
    named = {"`high`": "high", "`balanced`": "balanced", "`small`": "small"}
    labels = {entry["label"].partition(" @")[0]: entry["key"] for entry in found}
    for cells in rows("method", page):
        preset = named.get(cells[0].partition("cuvee, ")[2])
        entries = methods[f"cuvee/mixture4@{preset}" if preset else labels[cells[0]]]
        for entry, bits, kl in zip(entries, cells[1::2], cells[2::2], strict=True):
            mean, error = kl.split(" ± ")
            digits = len(mean.partition(".")[2])
            assert bits == f"{entry['bits_per_value']:.2f}" and mean == f"{entry['kl']:.{digits}f}", cells[0]
            assert error == f"{entry['kl_stderr']:.{digits}f}", cells[0]
    assert [entry["length"] for entry in methods["cuvee/mixture4@balanced"]] == [256, 1024, 4096, 7936]


def test_peers_are_those_of_the_committed_run() -> None:
    report = json.loads((PEERS / "report.json").read_text(encoding="utf-8"))
    told = {
        "turboquant@4": "TurboQuant, 4 bits",
        "turboquant@3": "TurboQuant, 3 bits",
        "kakeyalattice/d4@10": "D4, range 10",
        "kakeyalattice/e8@10": "E8, range 10",
        "kivi4": "int4",
        "fp8-e4m3": "",
    }
    table = rows("at its own KL", (PEERS / "README.md").read_text(encoding="utf-8"))
    for (anchor, label), cells in zip(told.items(), table, strict=True):
        (entry,) = (e for e in report["comparison"] if e["anchor"] == anchor)
        found = ratio(report, anchor, "cuvee/learned", anchor)
        assert label in cells[0] and cells[1:3] == [f"{entry['bits_per_value']:.2f}", f"{entry['kl']:.4f}"], anchor
        assert cells[3] == f"{found['ratio']:.1f}x ({found['low']:.1f}x to {found['high']:.1f}x)", anchor
    four, e8 = (ratio(report, key, "cuvee/learned", key) for key in ("turboquant@4", "kakeyalattice/e8@10"))
    for found in (four, e8):
        assert f"{found['ratio']:.1f}x ({found['low']:.1f} to {found['high']:.1f})" in SAID


def test_qualities_deliver_what_the_committed_run_delivered() -> None:
    page = (QUALITIES / "README.md").read_text(encoding="utf-8")
    found = json.loads((QUALITIES / "qualities.json").read_text(encoding="utf-8"))
    texts = [found[name] for name in ("dracula", "emma", "multidoc", "musique", "python")]
    table = {cells[0].replace("`", "").replace("no token ids", "no ids"): cells[1:] for cells in rows("quality", page)}
    for name, cells in table.items():
        asked = 5e-3 if name.startswith("balanced") else float(name.partition(",")[0].removeprefix("kl="))
        bits = sum(text[name]["bits"] for text in texts) / len(texts)
        worst = max(text[name]["kl_worst"] for text in texts)
        assert cells == [
            f"{bits:.2f}",
            *(f"{text[name]['kl'] / asked:.2f}" for text in texts),
            f"{worst / asked:.1f}",
        ], name
    assert table.keys() == found["quality_name"].keys() | {f"{name}, no ids" for name in found["quality_name"]}
    ran_as = {"high": "kl=0.001", "balanced": "kl=0.005", "bits=1.004": "balanced"}
    files = [json.loads((QUALITIES / name).read_text(encoding="utf-8")) for name in ("xquad.json", "xquad-bits.json")]
    scores = {ran_as[s["arm"]]: s for file in files for s in file["scores"] if s["arm"] != "exact"}
    losses = {name: f"{s['difference']:.2f} ± {s['difference_stderr']:.2f}" for name, s in scores.items()}
    sizes_of = {name: f"{s['bits_per_value']:.2f}" for name, s in scores.items()}
    for variant, size, loss in rows("variant", page):
        assert (size, loss) == (sizes_of[variant.strip("`")], losses[variant.strip("`")])


def test_what_is_delivered_now_is_what_the_committed_runs_delivered() -> None:
    page = (REAL / "README.md").read_text(encoding="utf-8")
    found = json.loads((REAL / "xquad.json").read_text(encoding="utf-8"))
    scores = {score["arm"]: score for score in found["scores"]}
    for variant, size, loss in rows("variant", page):
        score = scores[variant.strip("`")]
        assert size == f"{score['bits_per_value']:.2f}", variant
        assert loss == f"{score['difference']:.2f} ± {score['difference_stderr']:.2f}", variant
    for folder in (REAL, WIDE):
        qualities = json.loads((folder / "qualities.json").read_text(encoding="utf-8"))
        texts = [qualities[name] for name in ("dracula", "emma", "multidoc", "musique", "python")]
        for quality, *cells in rows("quality", (folder / "README.md").read_text(encoding="utf-8")):
            name = quality.replace("`", "").replace("no token ids", "no ids")
            asked = 5e-3 if name.startswith("balanced") else float(name.partition(",")[0].removeprefix("kl="))
            assert cells == [
                f"{sum(text[name]['bits'] for text in texts) / len(texts):.2f}",
                *(f"{text[name]['kl'] / asked:.2f}" for text in texts),
                f"{max(text[name]['kl_worst'] for text in texts) / asked:.1f}",
            ], name
    ends = json.loads((REAL / "ends.json").read_text(encoding="utf-8"))
    for where, step, *cells in rows("read", page):
        for version, pair in zip(("before", "after"), (cells[:2], cells[2:]), strict=True):
            own = [
                e for e in ends
                if (e["profile"], e["where"]) == (version, where.split()[-1])
                and e["step_index"] == round(64 * math.log2(float(step)))
            ]  # fmt: skip
            bits, kl = (sum(e[name] for e in own) / len(own) for name in ("bits", "kl"))
            assert pair == [f"{bits:.2f}", f"{kl:.4f}"], (where, step, version)
    lengths = json.loads((WIDE / "lengths.json").read_text(encoding="utf-8"))
    means = []
    for tokens in (256, 1024, 4096, 7936):
        own = [entry for entry in lengths if entry["tokens"] == tokens]
        means.append([sum(entry[name] for entry in own) / len(own) for name in ("kl", "bits")])
    kls, sizes = zip(*means, strict=True)
    for figures in (f"{min(kls):.4f} to {max(kls):.4f} nats", f"{min(sizes):.2f} to {max(sizes):.2f} bits"):
        assert figures in SAID


def test_what_tasks_lose_is_what_the_committed_runs_lost() -> None:
    page = (TASKS / "README.md").read_text(encoding="utf-8")
    page = page[page.index("## With the default profile") :]
    found = {}
    for path in TASKS.glob("*-default*.json"):
        for score in json.loads(path.read_text(encoding="utf-8"))["scores"]:
            found[score["task"], score["docs"], score["arm"]] = score
    shown = [cells for cells in rows("task", page) if cells[1] != "exact"]
    assert len(shown) == 17
    for cells in shown:
        task, docs = re.fullmatch(r"`(\w+)` \(\w+, (\d+)\)", cells[0]).groups()  # type: ignore[union-attr]
        score = found[task, int(docs), cells[1]]
        assert cells[2] == f"{score['score']:.3f} ± {score['stderr']:.3f}", cells
        assert cells[3] == f"{score['difference']:+.3f} ± {score['difference_stderr']:.3f}", cells
        assert cells[5] == f"{score['bits_per_value']:.2f}", cells


def test_other_peoples_benchmarks_took_what_the_committed_run_took() -> None:
    run = json.loads((CLIENTS / "clients.json").read_text(encoding="utf-8"))
    told = "prefix_repetition", "long-doc-qa", "multi-round-chat", "kv-tier-pressure"
    phases = "cold", "warm", "after a restart"
    for cells in rows("arm", (CLIENTS.parent / "README.md").read_text(encoding="utf-8")):
        arm = run["arms"][cells[0].partition(",")[0]]
        for cell, workload in zip(cells[1:5], told, strict=True):
            found = [arm["workloads"][workload][p]["p50_ratio"] for p in phases if p in arm["workloads"][workload]]
            assert cell.replace("*", "").split(" / ") == [f"{x:.2f}".removeprefix("0") for x in found], cells[0]
        if "bytes_per_1000_tokens" in arm.get("disk", {}):
            assert cells[5] == f"{arm['disk']['bytes_per_1000_tokens'] / 1e6:.1f}", cells[0]


def test_blends_of_retrieval_traffic_took_what_the_committed_run_took() -> None:
    traffic, restart = (
        json.loads((RAG / "default.json").read_text(encoding="utf-8"))[part] for part in ("traffic", "restart")
    )
    assert all(f"{part['p50_ratio']:.2f}" in SAID for part in (traffic, restart))
    table = rows("engine", (RAG / "README.md").read_text(encoding="utf-8"))
    for part, shown in (("traffic", table[:4]), ("restart", table[4:])):
        for name, (_, *cells) in zip(("default", "uncorrected", "cost-0.05"), shown[1:], strict=True):
            run = json.loads((RAG / f"{name}.json").read_text(encoding="utf-8"))[part]
            own, over = run["blends"], (run["p50_ratio"], run["p99_ratio"])
            told = [f"{100 * own['reused']:.0f} %", f"{own['p50']:.2f}", f"{own['p99']:.2f}"]
            assert cells == told + [f"{ratio:.2f}".removeprefix("0") for ratio in over], (part, name)
        cache = json.loads((RAG / "default.json").read_text(encoding="utf-8"))[part]["prefix_cache"]
        told = [f"{100 * cache['reused']:.0f} %", f"{cache['p50']:.2f}", f"{cache['p99']:.2f}", "", ""]
        assert shown[0][1:] == told


def test_the_first_tokens_of_the_real_model_are_those_of_the_committed_run() -> None:
    lengths = json.loads(LONG.read_text(encoding="utf-8"))["first_token"]["lengths"]
    page = (LONG.parent / "README.md").read_text(encoding="utf-8")
    columns = {
        "own": [length["own_cache_over_recompute"] for length in lengths],
        "raw": [length["raw_files"]["hit_over_recompute"] for length in lengths],
    }
    for name in lengths[0]["variants"]:
        columns[name] = [length["variants"][name]["hit_over_recompute"] for length in lengths]
    lossless, balanced = "lossless, file", "balanced, file"
    every = ("own", "raw", lossless, f"{lossless}, sync", balanced, f"{balanced}, sync", "lossless, memory")
    for cells, name in zip(rows("prefix tokens", page), every, strict=True):
        for cell, found in zip(cells[1:], columns[name], strict=True):
            assert float(cell) == pytest.approx(found["median"], abs=0.0051), (cells[0], name)


def test_the_first_tokens_in_the_readme_are_those_of_the_committed_run() -> None:
    lengths = json.loads(NEW_CHUNKS.read_text(encoding="utf-8"))["first_token"]["lengths"]
    for cells, length in zip(rows("prefix", README), lengths, strict=True):
        variants = length["variants"]
        found = [variants[name]["hit_over_recompute"] for name in ("lossless, file", "balanced, file")]
        found += [length["raw_files"]["hit_over_recompute"], length["own_cache_over_recompute"]]
        assert cells == [f"{length['tokens']:,} tokens", *(f"{one['median']:.2f}" for one in found)]


def test_files_and_commands_that_the_readme_names_exist() -> None:
    for name in re.findall(r"`([\w/.]+\.(?:md|py))`", README):
        assert any((ROOT / folder / name).is_file() for folder in (".", "codec")), name
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert f"\n{target}:" in makefile
    for preset in ("lossless", "high", "balanced", "small"):
        assert f'"{preset}"' in README


def test_security_names_what_exists() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    for name in re.findall(r"`([\w/.]+\.(?:md|py))`", text):
        assert (ROOT / name).is_file(), name
    names = {field.name for field in fields(Options)}
    assert {"key_env", "key_file"} <= names and all(f"`{name}`" in text for name in ("key_env", "key_file"))
    assert {"password_env", "password_file"} == set(urls._PASSWORD) and all(f"`{n}=`" in text for n in urls._PASSWORD)
    parameters = {**inspect.signature(Codec).parameters, **inspect.signature(Codec.decode).parameters}
    for name in re.findall(r"`(?:Codec\()?(\w+)=\)?`", text):
        assert name in parameters or name in urls._PASSWORD, name
    assert f"default {MAX_DECODED_TOKENS}" in text and f"{MIN_KEY_BYTES} to {MAX_KEY_BYTES} secret bytes" in text


def rows(heading: str, text: str = RESULTS) -> list[list[str]]:
    """Return the cells of the table whose first cell is `heading`, by default on the page of results."""
    table = text[text.index(f"| {heading} |") :].split("\n\n", maxsplit=1)[0]
    return [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def ratio(report: dict[str, Any], anchor: str, of: str, against: str) -> dict[str, float]:
    (entry,) = (entry for entry in report["comparison"] if entry["anchor"] == anchor)
    (found,) = (r for r in entry["ratios"] if (r["of"], r["against"]) == (of, against))
    return dict(found)


def test_the_ratios_are_those_of_the_committed_report() -> None:
    report = json.loads(REPORT.read_text(encoding="utf-8"))
    table = rows("smaller than …")
    for cells, anchor in zip(table, (*ANCHORS, "cachegen-tables-free", "int8"), strict=False):
        for cell, family in zip(cells[1:], FAMILIES, strict=True):
            r = ratio(report, anchor, family, anchor)
            assert cell == f"{r['ratio']:.1f}x** ({r['low']:.1f} to {r['high']:.1f})", cells[0]
    against = (("pca/layer", "pca/all"), ("pca/kv", "pca/kv"), ("kvtc/kv", "kvtc/kv"))
    for cells, others in zip(table[5:], against, strict=True):
        for cell, family, other in zip(cells[1:], FAMILIES, others, strict=True):
            ratios = [ratio(report, anchor, family, other)["ratio"] for anchor in ANCHORS]
            assert cell == " / ".join(f"{r:.1f}" for r in ratios) + "x", cells[0]


def test_the_sizes_and_losses_are_those_of_the_committed_report() -> None:
    report = json.loads(REPORT.read_text(encoding="utf-8"))
    quality = {entry["key"]: entry for entry in report["quality"]}
    presets = [[f"{family}@{preset}" for preset in ("high", "balanced", "small")] for family in FAMILIES]
    keys = [["bf16"], ["fp8-e4m3"], ["int8"], ["kivi4"], ["cachegen"], ["cuvee/lossless"], *presets]
    for cells, row in zip(rows("cache of books-3m"), [*keys, ["cuvee/generic@balanced"]], strict=True):
        entries = [quality[key] for key in row]
        assert cells[1] == " / ".join(f"{e['bits_per_value']:.2f}" for e in entries), cells[0]
        digits = 1 if len(row) == 1 else 0
        assert cells[2] == " / ".join(f"{e['ratio']:.{digits}f}" for e in entries) + "x", cells[0]
        if cells[3] != "exact":
            assert cells[3].split(" ± ")[0] == " / ".join(
                f"{e['kl']:.4f}" if e["kl"] >= 1e-4 else f"{e['kl']:.5f}" for e in entries
            ), cells[0]
            assert cells[4] == " / ".join(f"{100 * e['top1']:.1f}" for e in entries) + " %", cells[0]


def test_what_is_said_about_tasks_is_true_of_the_committed_report() -> None:
    report = json.loads(REPORT.read_text(encoding="utf-8"))
    better = {task["name"]: 1 if task["higher_is_better"] else -1 for task in report["tasks"]}
    scores = {(score["key"], score["task"]): score for score in report["scores"]}
    assert len(better) == 9
    for task, sign in better.items():
        for family in FAMILIES:
            for preset in ("high", "balanced"):
                lost = -sign * scores[f"{family}@{preset}", task]["difference"]
                assert lost <= scores["bf16", task]["stderr"] and lost <= (0.0151 if sign > 0 else 0.0055), task
    assert max(-scores["kivi2", task]["difference"] for task, sign in better.items() if sign > 0) >= 0.105


def test_the_figures_of_the_engine_are_those_of_the_committed_run() -> None:
    report = json.loads(ENGINE.read_text(encoding="utf-8"))
    lengths = report["first_token"]["lengths"]
    table = rows("time to first token, of the time it takes to compute")
    for cells, variant in zip(table, ("lossless, file", "lossless, redis", "balanced, file", None), strict=True):
        for cell, length in zip(cells[1:], lengths, strict=True):
            ratio = length["variants"][variant]["hit_over_recompute"] if variant else length["own_cache_over_recompute"]
            assert cell == f"{ratio['median']:.3f}", cells[0]
    for preset, group in (("balanced", "layer"), ("lossless", None)):
        (entry,) = (
            entry
            for entry in report["footprint"]["entries"]
            if entry["chunk_tokens"] == 256 and entry["quality"] == preset and entry["profile"] == group
        )
        assert f"{entry['raw_bytes'] / entry['file_bytes']:.2f}" in RESULTS.split("## In vLLM")[1]
    storing = [ratio["median"] for ratio in report["storing"]["throughput_over_no_connector"].values()]
    assert round(min(storing), 2) >= 0.84 and round(max(storing), 2) <= 0.95


def test_the_shares_of_blending_on_a_real_model_are_those_of_the_committed_run() -> None:
    (published,) = json.loads(PUBLISHED.read_text(encoding="utf-8"))["constructions"]
    (corrected,) = json.loads(CORRECTED.read_text(encoding="utf-8"))["constructions"]
    kinds = (
        (published, "alone", "boundary"), (published, "alone", "hkvd"), (corrected, "alone", "default-uncorrected"),
        (corrected, "alone", "default"), (published, "averaged", "boundary"), (corrected, "averaged", "default"),
        (corrected, "behind", "default-uncorrected"), (corrected, "behind", "default"),
    )  # fmt: skip
    shown: dict[tuple[str, str], list[str]] = {}
    for (made, chunks, selector), cells in zip(kinds, rows("% recovered at cost", BLEND), strict=True):
        found = [
            e
            for e in made["entries"]
            if (e["kv"], e["chunks"]) == ("exact", chunks) and e["selector"] in ("nothing", selector)
        ]
        shares = [None if e["reason"] else (100 * e["share"], 100 * e["answer_share"]) for e in found]
        shown[chunks, selector] = [
            "-" if s is None else "0" if s == (0, 0) else f"{s[0]:.0f} / {s[1]:.0f}" for s in shares
        ]
        assert cells[1:] == shown[chunks, selector], cells[0]
    connector = (ROOT / "integrations" / "vllm" / "blending" / "README.md").read_text(encoding="utf-8")
    for cells, chunks in zip(rows("parts were computed", connector), ("alone", "averaged", "behind"), strict=True):
        entries = [
            e
            for e in corrected["entries"]
            if e["chunks"] == chunks and e["selector"] in ("nothing", "default") and e["cost"] != 0.3
        ]
        figures = [f"{e['share']:.3f} ± {e['share_stderr']:.3f}".replace("0.", ".") for e in entries]
        assert cells[1:] == ["0" if figure == ".000 ± .000" else figure for figure in figures]
    flat = RESULTS.replace("\n", " ")
    for chunks in ("alone", "averaged", "behind"):
        for part in (0, 1):
            figures = [cell.split(" / ")[part] for cell in shown[chunks, "default"][1:]]
            assert " / ".join(figures) + " %" in flat


def test_the_shares_of_blending_are_those_of_the_committed_run() -> None:
    report = json.loads(BLENDED.read_text(encoding="utf-8"))
    made = {construction["name"]: construction for construction in report["constructions"]}
    kinds = (
        ("exact", "alone", "hkvd"), ("exact", "alone", "boundary"), ("exact", "alone", "default"),
        ("exact", "averaged", "nothing"), ("exact", "averaged", "boundary"), ("exact", "averaged", "overlap*boundary"),
        ("exact", "averaged", "default"), ("high", "averaged", "default"), ("balanced", "averaged", "default"),
    )  # fmt: skip
    table = rows("% recovered at cost 15 / 30 / 45 %")
    for cells, kind in zip(table, kinds, strict=True):
        for cell, construction in zip(cells[1:], made.values(), strict=True):
            found = [e for e in construction["entries"] if (e["kv"], e["chunks"], e["selector"]) == kind]
            shown = [e for e in found if e["cost"] in (None, 0.15, 0.3, 0.45)]
            assert cell == " / ".join("-" if e["reason"] else f"{100 * e['share']:.0f}" for e in shown), cells[0]
    ratios = {
        (length["tokens"], blend["selector"], blend["cost"]): blend["ratio"]["median"]
        for length in report["wall_time"]["lengths"]
        for blend in length["blends"]
    }
    for tokens, said in re.findall(r"(\d\.\d\d) at ([\d,]+) tokens", RESULTS):
        assert f"{ratios[int(said.replace(',', '')), 'default', 0.15]:.2f}" == tokens
