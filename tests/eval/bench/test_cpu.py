"""The benchmark: it runs, it proves before it times, and its report is complete. No speed is asserted."""

from __future__ import annotations

import io
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from cuvee.cli import app
from cuvee.codec.errors import CuveeError, InputError
from cuvee.codec.stages.implementations import get_stages
from cuvee.eval.bench.cpu import coders, first_use
from cuvee.eval.bench.cpu.alternatives import ALTERNATIVES
from cuvee.eval.bench.cpu.cases import CPU_SHAPES, fit_profile, make_chunk
from cuvee.eval.bench.cpu.coders import compare_coders, draw_symbols, torch_decoder
from cuvee.eval.bench.cpu.cpu_bench import run_cpu_bench
from cuvee.eval.bench.cpu.cpu_tables import cpu_markdown, print_cpu_report
from cuvee.eval.bench.cpu.first_use import FIRST_USE_STEPS
from cuvee.eval.bench.shapes import CacheShape
from cuvee.eval.timing import Effort


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """Of a benchmark that repeats as little as it may."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cuvee.eval.bench.cpu.cpu_bench.QUICK_ROUNDS", 2)
        patch.setattr("cuvee.eval.bench.cpu.cpu_bench.QUICK_FIRST_USES", 1)
        done = CliRunner().invoke(app, ["bench", "--quick", "--json"])
    assert done.exit_code == 0, done.output
    data: dict[str, Any] = json.loads(done.stdout)
    return data


def numbers(data: Any) -> Iterator[float]:
    if isinstance(data, dict):
        for value in data.values():
            yield from numbers(value)
    elif isinstance(data, list):
        for value in data:
            yield from numbers(value)
    elif isinstance(data, int | float) and not isinstance(data, bool):
        yield data


def test_the_report_names_the_machine_and_the_versions(report: dict[str, Any]) -> None:
    machine = report["hardware"]
    assert machine.keys() >= {
        "cpu",
        "cores",
        "python",
        "torch",
        "numba",
        "constriction",
        "lz4",
        "zstandard",
        "commit",
        "date",
    }
    assert machine["cpu"] and machine["cores"] >= 1 and report["quick"] is True


def test_every_figure_is_a_positive_number(report: dict[str, Any]) -> None:
    for part in ("coders", "stages", "whole", "scaling", "comparison", "first_use"):
        assert report[part]
        assert all(math.isfinite(n) and n >= 0 for n in numbers(report[part])), part
    for entry in report["whole"]:
        assert entry["encode_gb_per_s"]["median"] > 0 and entry["decode_gb_per_s"]["median"] > 0
        assert entry["decode_gb_per_s"]["p20"] <= entry["decode_gb_per_s"]["median"] <= entry["decode_gb_per_s"]["p80"]
    assert {entry["threads"] for entry in report["whole"]} >= {1}


def test_stages_are_apart(report: dict[str, Any]) -> None:
    shape, large = "books-3m", "llama-3.1-8b, 4 of 32 layers"
    cases = [(entry["cache"], entry["profile"]) for entry in report["stages"]]
    assert cases == [(shape, "layer"), (large, "head"), (large, "lossless")]
    both = {"container", "rest"}
    for entry in report["stages"][:2]:
        learned = both | {"product"}
        assert entry["encode"]["seconds"].keys() == learned | {"gather", "quantize and pack", "entropy coding"}
        assert entry["decode"]["seconds"].keys() == learned | {
            "read sections", "entropy decoding, dequantize", "place",
        }  # fmt: skip
    for entry in report["stages"]:
        for what in ("encode", "decode"):
            assert entry[what]["seconds"].keys() >= both
            assert all(seconds > 0 for name, seconds in entry[what]["seconds"].items() if name != "rest")
            assert 0 <= entry[what]["share_of_rest"] < 1
            for name, work in entry[what]["work"].items():
                for own in work:
                    rate = own["amount"] / entry[what]["seconds"][name]
                    assert own["per_second"] == pytest.approx(rate)
                    assert own["limit_per_second"] == entry["limits_per_second"][own["limit"]]
                    assert own["share"] == pytest.approx(rate / own["limit_per_second"])


def test_coders_are_compared_on_the_same_symbols(report: dict[str, Any]) -> None:
    bits = report["coders"]["bits_per_symbol"]
    assert bits["constriction"] == pytest.approx(bits["ideal"], rel=0.01)
    assert bits["ideal"] <= bits["rans"] <= 1.04 * bits["ideal"]
    assert all(ratio > 0 for ratio in report["coders"]["ratios"].values())


def test_scaling_covers_tokens_and_layers(report: dict[str, Any]) -> None:
    tokens = [point["tokens"] for point in report["scaling"]["tokens"]["points"]]
    layers = [point["layers"] for point in report["scaling"]["layers"]["points"]]
    assert tokens == sorted(tokens) and tokens[0] == 16 and layers == [1, 6]


def test_memory_is_measured_or_said_to_be_unknown(report: dict[str, Any]) -> None:
    for entry in report["memory"]:
        encode, decode = entry["encode_over_raw"], entry["decode_over_raw"]
        assert encode is None or 0.05 < encode < 50  # a blob at the least
        assert decode is None or 0.95 < decode < 50  # the chunk at the least


def test_every_method_is_compared_on_every_cache(report: dict[str, Any]) -> None:
    measured = [entry for entry in report["comparison"] if "skipped" not in entry]
    cases = [(entry["cache"], entry["tokens"], entry["real"]) for entry in measured]
    shape = "llama-3.1-8b, 4 of 32 layers"
    assert cases == [("books-3m", 64, True), ("books-3m", 256, True), (shape, 64, False), (shape, 256, False)]
    for entry in measured:
        (group,) = entry["profiles"]
        names = [method.name for method in ALTERNATIVES]
        assert [row["method"] for row in entry["methods"]] == [*names, "cuvee lossless", f"cuvee balanced, {group}"]
        assert entry["references"] == ["memcpy", "cuvee lossless", f"cuvee balanced, {group}"]
        for row in entry["methods"]:
            assert "skipped" not in row, row  # make setup installs them all
            assert [one["threads"] for one in row["by_threads"]] == entry["threads"] == [1, 2]
            assert row["most_over_fewest_threads"].keys() == {"encode", "decode"}
            for one in row["by_threads"]:
                assert one["encode_gb_per_s"]["median"] > 0 and one["decode_gb_per_s"]["median"] > 0
                assert list(one["decode_over"]) == entry["references"]


def test_what_the_methods_store(report: dict[str, Any]) -> None:
    for entry in report["comparison"]:
        rows = {row["method"]: row for row in entry.get("methods", ())}
        for row in rows.values():
            assert (row["relative_error"] == 0) is row["exact"]
        if rows:
            bits = {name: row["bits_per_value"] for name, row in rows.items()}
            assert bits.pop("memcpy") == 16 and all(0 < other < 16 for other in bits.values())
            assert 8 < bits["FP8, by table"] == bits["FP8, torch's cast"] < 8.1
            assert 0.01 < rows["FP8, by table"]["relative_error"] == rows["FP8, torch's cast"]["relative_error"] < 0.05
            own = rows["cuvee lossless"]["by_threads"][0]["decode_over"]
            assert own["cuvee lossless"]["median"] == 1 and own["memcpy"]["median"] > 0


def test_a_cache_left_out_is_named(report: dict[str, Any]) -> None:
    assert {"cache": "smollm2", "skipped": "left out by --quick; --model smollm2 measures it"} in report["comparison"]


def test_first_use_adds_up(report: dict[str, Any]) -> None:
    assert [entry["quality"] for entry in report["first_use"]] == ["lossless", "balanced"]
    for entry in report["first_use"]:
        assert list(entry["seconds"]) == list(FIRST_USE_STEPS)
        median = {step: timing["median"] for step, timing in entry["seconds"].items()}
        assert all(seconds > 0 for seconds in median.values())
        before = [step for step in FIRST_USE_STEPS if step not in ("second_decode", "total")]
        assert median["total"] >= 0.9 * max(median[step] for step in before)


def test_a_failing_first_use_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_use, "_PROGRAM", "raise SystemExit('no such thing')")
    profile = fit_profile(CacheShape(1, 1, 8, 1e4).layout(), "layer")
    with pytest.raises(CuveeError, match=r"first use failed.*no such thing"):
        first_use.measure_first_use(profile, 16, 1)


def test_the_report_in_markdown(report: dict[str, Any]) -> None:
    text = cpu_markdown(report)
    assert text.startswith("# cuvee bench cpu\n") and text.endswith("\n") and "\n\n\n" not in text
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1, table[0]
    (comparison,) = (table for table in tables if "/memcpy" in table[0])
    first = [line.split("|")[1].strip() for line in comparison]
    assert first.count("memcpy") == 4 and first.count("cuvee lossless") == 4
    assert any("smollm2: skipped" in cell for cell in first) and any("zstd" in cell for cell in first)


def test_the_report_prints(report: dict[str, Any]) -> None:
    out = io.StringIO()
    print_cpu_report(report, Console(file=out, width=100))
    text = out.getvalue()
    assert "constriction" in text and "Peak memory" in text and "…" not in text
    assert "zstd" in text and "books-3m, 256 tokens" in text and "smollm2: skipped" in text and "First use" in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_wrong_coder_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong:
        rans_encode = staticmethod(get_stages("numba").rans_encode)

        @staticmethod
        def rans_decode(*args: Any) -> np.ndarray[Any, Any]:
            return np.asarray(get_stages("numba").rans_decode(*args)) ^ np.uint8(1)

    monkeypatch.setattr(coders, "get_stages", lambda name: Wrong)
    with pytest.raises(CuveeError, match="did not return its input"):
        compare_coders(Effort(0.0, 1, 1), 256, 8)


def test_without_constriction_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "constriction", None)
    with pytest.raises(InputError, match="pip install constriction"):
        run_cpu_bench(quick=True)
    with pytest.raises(InputError, match="pip install constriction"):
        compare_coders(Effort(0.0, 1, 1), 256, 8)


def test_the_gpu_bench_needs_no_constriction() -> None:
    code = "import sys; sys.modules['constriction'] = None; import cuvee.eval.bench.gpu.__main__, cuvee.cli"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_torch_decoder_wants_full_lanes() -> None:
    symbols = draw_symbols(4, 100)
    streams = get_stages("numba").rans_encode(symbols.data, symbols.which, symbols.tables, 8)
    with pytest.raises(InputError, match=r"^tokens"):
        torch_decoder(streams, symbols.which, symbols.tables, 8, 100)


def test_synthetic_caches_repeat() -> None:
    layout = CPU_SHAPES["books-3m"].layout()
    a, b, c = make_chunk(layout, 5), make_chunk(layout, 5), make_chunk(layout, 5, seed=1)
    assert torch.equal(a.keys[3], b.keys[3]) and not torch.equal(a.keys[3], c.keys[3])
