from __future__ import annotations

import copy
import json
import math
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from cuvee.codec.errors import FormatError, InputError, VersionError
from cuvee.eval.report.compare import Change, Comparison, Condition, compare_reports, print_comparison
from cuvee.eval.report.report_file import METRIC_FIELDS, load_report

Report = dict[str, Any]


def quality(key: str, bits: list[float], kl: list[float], speed: float | None = 0.5) -> dict[str, Any]:
    mean = float(np.mean(bits))
    return {
        "key": key,
        "family": key.partition("@")[0],
        "bits_per_value": mean,
        "ratio": 16 / mean if mean else None,
        "kl": float(np.mean(kl)),
        "nll": 3 + float(np.mean(kl)),
        "top1": 0.9,
        "encode_gb_per_s": speed,
        "decode_gb_per_s": speed,
        "per_sequence": {"bits_per_value": bits, "kl": kl, "delta_nll": list(kl), "top1": [0.8, 0.9, 1.0]},
    }


def score(key: str, task: str, per_doc: list[float]) -> dict[str, Any]:
    return {"key": key, "task": task, "score": float(np.mean(per_doc)), "stderr": 0.25, "per_doc": per_doc}


@pytest.fixture
def before() -> Report:
    return {
        "format": "cuvee-report",
        "version": 1,
        "complete": True,
        "configuration": {"dtype": "float32", "cache_dtype": "bfloat16", "chunk_tokens": 256},
        "environment": {
            "cuvee": "0.1.0",
            "commit": "abc1234",
            "cpu": "a fast one",
            "cores": 2,
            "gpu": None,
            "date": "d",
        },
        "model": {"name": "books-3m", "fingerprint": "aa" * 16},
        "text": {
            "calibration": [{"name": "harbour", "sha256": "11" * 32}],
            "evaluation": [{"name": "orchard", "sha256": "22" * 32}],
            "sequences": 3,
            "length": 512,
            "prefix": 384,
            "tokens_sha256": "33" * 32,
        },
        "quality": [
            quality("bf16", [16.0, 16.0, 16.0], [0.0, 0.0, 0.0], None),
            quality("destroyed", [0.0, 0.0, 0.0], [2.0, 3.0, 4.0], None),
            quality("cuvee/layer@balanced", [1.0, 1.2, 1.4], [0.01, 0.02, 0.03]),
            quality("cuvee/layers:3@high", [2.0, 2.2, 2.4], [0.001, 0.002, 0.003]),
        ],
        "tasks": [{"name": name, "metric": "acc", "docs": 4, "docs_sha256": name} for name in ("kv_8", "copy")],
        "scores": [
            score("bf16", "kv_8", [1.0, 1.0, 1.0, 0.0]),
            score("cuvee/layer@balanced", "kv_8", [1.0, 1.0, 0.0, 0.0]),
            score("cuvee/layer@balanced", "copy", [1.0, 1.0, 0.0, 1.0]),
        ],
        "skipped": [],
    }


@pytest.fixture
def after(before: Report) -> Report:
    return copy.deepcopy(before)


def method(report: Report, key: str = "cuvee/layer@balanced") -> dict[str, Any]:
    return next(entry for entry in report["quality"] if entry["key"] == key)


def replace_method(report: Report, new: dict[str, Any]) -> None:
    report["quality"] = [new if entry["key"] == new["key"] else entry for entry in report["quality"]]


def compared(a: Report, b: Report, *conditions: str, allow_different: bool = False) -> Comparison:
    return compare_reports(a, b, [Condition.parse(c) for c in conditions], allow_different)


def change(comparison: Comparison, metric: str, key: str = "cuvee/layer@balanced", task: str | None = None) -> Change:
    return next(c for c in comparison.changes if (c.key, c.metric, c.task) == (key, metric, task))


def failed(a: Report, b: Report, condition: str) -> list[str]:
    return [f.key for f in compared(a, b, condition).failures]


# Reading ------------------------------------------------------------------------------------------------------------


def load(folder: Path, report: Any) -> Report:
    path = folder / "report.json"
    path.write_text(report if isinstance(report, str) else json.dumps(report))
    return load_report(path)


def test_a_report_is_read(tmp_path: Path, before: Report) -> None:
    assert load(tmp_path, before) == before
    del before["skipped"]
    assert load(tmp_path, before) == before


@pytest.mark.parametrize("text", ["", "{", '{"format": "cuvee-report", "version": NaN}', "[" * 100_000])
def test_what_is_not_json(tmp_path: Path, text: str) -> None:
    with pytest.raises(FormatError, match=r"report\.json is not JSON: "):
        load(tmp_path, text)


def test_bytes_that_are_no_text_and_no_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FormatError, match="x is not JSON"):
        load_report(tmp_path / "x")
    with pytest.raises(FileNotFoundError):
        load_report(tmp_path / "y")


@pytest.mark.parametrize("data", [[], 3, {}, {"format": "cuvee-bench", "version": 1}])
def test_another_file_is_not_a_report(tmp_path: Path, data: Any) -> None:
    with pytest.raises(FormatError, match=r"is not a report: give the report\.json that"):
        load(tmp_path, data)


@pytest.mark.parametrize("version", [None, 0, -1, 1.0, "1", True])
def test_no_version(tmp_path: Path, before: Report, version: Any) -> None:
    with pytest.raises(FormatError, match="version: must be a whole number from 1"):
        load(tmp_path, {**before, "version": version})


def test_a_newer_version(tmp_path: Path, before: Report) -> None:
    with pytest.raises(VersionError, match="is a report of version 2; this cuvee reads up to 1: update it"):
        load(tmp_path, {**before, "version": 2})


@pytest.mark.parametrize("complete", [False, None, 1])
def test_an_unfinished_run(tmp_path: Path, before: Report, complete: Any) -> None:
    with pytest.raises(InputError, match=r"^report: .* has not finished; give its command again"):
        load(tmp_path, {**before, "complete": complete})


_BALANCED = "quality cuvee/layer@balanced: "


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        *(((name,), None, f"{name}: must be an object") for name in ("configuration", "environment", "model", "text")),
        *(((name,), [3], f"{name}: must list objects") for name in ("quality", "tasks", "scores")),
        (("scores",), None, "scores: must list objects"),
        (("skipped",), [{"reason": "x"}], "skipped: must list objects with a key"),
        (("skipped",), {}, "skipped: must list objects with a key"),
        (("text", "calibration"), "x", "text.calibration: must list texts"),
        (("text", "evaluation"), [3], "text.evaluation: must list texts"),
        (("quality", 2, "key"), None, "quality: each must have a name"),
        (("quality", 2, "key"), "bf16", "quality: bf16 is there twice"),
        (("tasks", 1, "name"), "kv_8", "tasks: kv_8 is there twice"),
        (("scores", 1, "key"), "bf16", "scores: bf16 kv_8 is there twice"),
        (("scores", 1, "task"), 3, "scores: each must have a name"),
        *(
            (("quality", 2, f), "1", f"{_BALANCED}{f}: must be a number")
            for m, f in METRIC_FIELDS.items()
            if m != "score"
        ),
        *((("quality", 2, f), None, f"{_BALANCED}{f}: must be a number") for f in ("bits_per_value", "kl", "top1")),
        (("quality", 2, "kl"), True, f"{_BALANCED}kl: must be a number"),
        (("quality", 2, "kl"), 10**400, f"{_BALANCED}kl: must be a number"),
        (("quality", 2, "per_sequence"), None, f"{_BALANCED}per_sequence: must be an object"),
        (("quality", 2, "per_sequence", "kl"), [0.1], f"{_BALANCED}per_sequence: must list as many numbers of each"),
        (("quality", 2, "per_sequence", "top1"), None, f"{_BALANCED}per_sequence: must list as many numbers of each"),
        (("quality", 2, "per_sequence", "kl"), [1, 2, "3"], f"{_BALANCED}per_sequence: must list as many numbers"),
        (("scores", 0, "score"), None, "scores bf16 kv_8: score: must be a number"),
        (("scores", 0, "stderr"), "x", "scores bf16 kv_8: stderr: must be a number"),
        (("scores", 0, "per_doc"), [None], "scores bf16 kv_8: per_doc: must list numbers"),
    ],
)  # fmt: skip
def test_a_damaged_report(
    tmp_path: Path, before: Report, where: tuple[str | int, ...], value: Any, message: str
) -> None:
    place: Any = before
    for name in where[:-1]:
        place = place[name]
    place[where[-1]] = value
    with pytest.raises(FormatError) as caught:
        load(tmp_path, before)
    assert str(caught.value).startswith(f"{tmp_path / 'report.json'}: {message}")


def test_no_sequences_and_a_missing_field_and_infinity(tmp_path: Path, before: Report) -> None:
    text = json.dumps(before)
    with pytest.raises(FormatError, match="is not JSON: it holds 1e999, which is no float"):
        load(tmp_path, text.replace('"kl": 3.0', '"kl": 1e999'))
    method(before)["per_sequence"] = {name: [] for name in ("bits_per_value", "kl", "delta_nll", "top1")}
    with pytest.raises(FormatError, match="must list as many numbers of each kind"):
        load(tmp_path, before)
    del method(before)["ratio"]
    with pytest.raises(FormatError, match="ratio: must be a number"):
        load(tmp_path, before)


# Conditions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "metric", "sign", "limit", "unit", "methods", "tasks"),
    [
        ("kl>5%", "kl", ">", 5, "%", "*", "*"),
        ("kl>0.001", "kl", ">", 0.001, "", "*", "*"),
        ("top1<-2se", "top1", "<", -2, "se", "*", "*"),
        ("  bits > +.5 %  @ cuvee/* ", "bits", ">", 0.5, "%", "cuvee/*", "*"),
        ("ratio<-1.", "ratio", "<", -1, "", "*", "*"),
        ("nll>1e-3se@x", "nll", ">", 0.001, "se", "x", "*"),
        ("encode<-2E1%", "encode", "<", -20, "%", "*", "*"),
        ("decode<-0.1", "decode", "<", -0.1, "", "*", "*"),
        ("kl>5%@cuvee/layer@balanced", "kl", ">", 5, "%", "cuvee/layer@balanced", "*"),
        ("kl>5@cuvee/layers:3@high", "kl", ">", 5, "", "cuvee/layers:3@high", "*"),
        ("score<-2se@cuvee/*:kv_*", "score", "<", -2, "se", "cuvee/*", "kv_*"),
        ("score<-2se@cuvee/*", "score", "<", -2, "se", "cuvee/*", "*"),
        ("score<0@cuvee/layers:3@*:kv_8", "score", "<", 0, "", "cuvee/layers:3@*", "kv_8"),
    ],
)
def test_grammar(text: str, metric: str, sign: str, limit: float, unit: str, methods: str, tasks: str) -> None:
    assert Condition.parse(text) == Condition(text.strip(), metric, sign, limit, unit, methods, tasks)


@pytest.mark.parametrize(
    "text",
    ["", "kl", "kl>", "kl>x", "kl=5", "kl>=5", ">5", "kl>5%%", "kl>5 percent", "kl>5%@", "kl>5%@a b", "kl>nan",
     "kl>inf", "kl>--1", "kl>5%cuvee/*", "kl>1e", "kl>5%\n;top1<1", "k l>5"],
)  # fmt: skip
def test_what_is_no_condition(text: str) -> None:
    with pytest.raises(InputError, match=r"^fail_if: .* is not METRIC>NUMBER"):
        Condition.parse(text)


def test_unknown_metrics_get_a_suggestion() -> None:
    with pytest.raises(InputError, match=r"fail_if: no metric 'top_1' in 'top_1<0'; did you mean 'top1'\?"):
        Condition.parse("top_1<0")
    with pytest.raises(InputError, match=r"no metric 'zzz' in .*; there are bits, ratio, kl, nll, top1, encode, deco"):
        Condition.parse("zzz>1")


@pytest.mark.parametrize("metric", ["encode", "decode"])
def test_speeds_have_no_standard_error(metric: str) -> None:
    with pytest.raises(InputError, match="a speed has no standard error here; give GB/s or %"):
        Condition.parse(f"{metric}<-2se")


@pytest.mark.parametrize("where", [":kv_8", "cuvee/*:", ":"])
def test_half_a_pair_of_patterns(where: str) -> None:
    with pytest.raises(InputError, match="has nothing on one side of its colon"):
        Condition.parse(f"score<0@{where}")


@pytest.mark.parametrize(
    ("text", "a", "b", "error", "met"),
    [
        ("kl>0.1", 1, 1.125, None, True),
        ("kl>0.125", 1, 1.125, None, False),  # the limit itself is allowed
        ("kl>5%", 2, 2.125, None, True),
        ("kl>7%", 2, 2.125, None, False),
        ("kl<-5%", 2, 1.875, None, True),
        ("kl<-5%", 2, 2.5, None, False),
        ("nll<-5%", -2, -2.5, None, True),  # of the absolute value
        ("kl>2se", 1, 1.5, 0.2, True),
        ("kl>3se", 1, 1.5, 0.2, False),
        ("kl<-2se", 1, 0.5, 0.2, True),
        ("kl>1000%", 0, 1e-9, None, True),
        ("kl<-1000%", 0, 1e-9, None, False),
        ("kl>1%", 0, 0, None, False),
        ("kl<1%", 0, 0, None, True),
        ("kl>2se", 1, 1.5, 0, True),
        ("kl<-2se", 1, 1.5, 0, False),
        ("kl<-2se", 1, 0.5, 0, True),
        ("kl<-2%", 0, -1e-9, None, True),
        ("kl>0se", 1, 1, 0, False),
    ],
)
def test_when_a_condition_is_met(text: str, a: float, b: float, error: float | None, met: bool) -> None:
    condition = Condition.parse(text)
    assert condition.met(Change("x", condition.metric, None, a, b, error, paired=False)) is met


# Changes ------------------------------------------------------------------------------------------------------------


def test_changes_and_paired_errors_by_hand(before: Report, after: Report) -> None:
    replace_method(after, quality("cuvee/layer@balanced", [1.1, 1.3, 1.5], [0.02, 0.04, 0.06], speed=1.0))
    after["scores"][1] = score("cuvee/layer@balanced", "kv_8", [1.0, 1.0, 1.0, 0.0])
    result = compared(before, after)
    kl = change(result, "kl")
    assert kl.a == pytest.approx(0.02) and kl.b == pytest.approx(0.04) and kl.paired
    assert kl.change == pytest.approx(0.02) and kl.relative == pytest.approx(1)
    assert kl.stderr == pytest.approx(0.01 / math.sqrt(3)) and kl.in_errors == pytest.approx(2 * math.sqrt(3))
    assert change(result, "nll").stderr == pytest.approx(0.01 / math.sqrt(3))
    bits = change(result, "bits")
    assert bits.change == pytest.approx(0.1) and bits.stderr == pytest.approx(0, abs=1e-12) and bits.paired
    ratio = change(result, "ratio")
    assert ratio.change == pytest.approx(16 / 1.3 - 16 / 1.2)
    # d ratio / d bits is -16 / bits**2, and both sizes have a spread of 0.2.
    assert ratio.stderr == pytest.approx((16 / 1.2**2 - 16 / 1.3**2) * 0.2 / math.sqrt(3))
    encode = change(result, "encode")
    assert (encode.change, encode.relative, encode.stderr, encode.in_errors) == (0.5, 1, None, None)
    assert change(result, "top1").change == 0
    found = change(result, "score", task="kv_8")
    assert found.change == 0.25 and found.paired and found.stderr == pytest.approx(0.25)
    assert change(result, "score", task="copy").change == 0
    assert len(result.changes) == 4 * 7 - 4 - 1 + 3  # two methods without speeds, one without a ratio


def test_other_tokens_are_not_paired(before: Report, after: Report) -> None:
    after["text"]["tokens_sha256"] = "44" * 32
    replace_method(after, quality("cuvee/layer@balanced", [1.1, 1.3, 1.5], [0.02, 0.04, 0.06]))
    result = compared(before, after, allow_different=True)
    kl = change(result, "kl")
    assert not kl.paired and kl.stderr == pytest.approx(math.hypot(0.01, 0.02) / math.sqrt(3))
    assert change(result, "nll").stderr is None  # what a sequence lost is not its NLL
    with pytest.raises(InputError, match="'nll>2se': the standard error of bf16 nll is not known"):
        compared(before, after, "nll>2se", allow_different=True)
    for one in (before, after):
        del one["text"]["tokens_sha256"]  # unknown is not the same
    assert not change(compared(before, after), "kl").paired


def test_other_prefixes_and_other_lengths_are_not_paired(before: Report, after: Report) -> None:
    after["text"]["prefix"] = 256
    assert not change(compared(before, after, allow_different=True), "kl").paired
    after["text"]["prefix"] = 384
    for values in method(after)["per_sequence"].values():
        values.append(values[0])
    assert change(compared(before, after), "kl").stderr == pytest.approx(
        math.hypot(0.01 / math.sqrt(3), np.std([0.01, 0.02, 0.03, 0.01], ddof=1) / 2)
    )
    assert not change(compared(before, after), "kl").paired


def test_another_model_is_paired_but_for_its_nll(before: Report, after: Report) -> None:
    after["model"]["fingerprint"] = "bb" * 16
    result = compared(before, after, allow_different=True)
    assert change(result, "kl").paired and not change(result, "nll").paired
    assert change(result, "nll").stderr is None


def test_other_documents_are_not_paired(before: Report, after: Report) -> None:
    after["tasks"][0]["docs_sha256"] = "other"
    found = change(compared(before, after, allow_different=True), "score", task="kv_8")
    assert not found.paired and found.stderr == pytest.approx(math.hypot(0.25, 0.25))
    del before["tasks"][0]["docs_sha256"], after["tasks"][0]["docs_sha256"]
    assert not change(compared(before, after), "score", task="kv_8").paired


@pytest.mark.parametrize("per_doc", [None, [], [1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
@pytest.mark.parametrize("side", [0, 1])
def test_a_score_that_is_no_mean_of_the_same_documents_is_not_paired(
    before: Report, after: Report, per_doc: list[float] | None, side: int
) -> None:
    damaged = (before, after)[side]["scores"][1]
    damaged["per_doc"] = per_doc
    found = change(compared(before, after), "score", task="kv_8")
    assert not found.paired and found.stderr == pytest.approx(math.hypot(0.25, 0.25))
    damaged["stderr"] = None
    assert change(compared(before, after), "score", task="kv_8").stderr is None


def test_a_single_sequence_has_no_standard_error(before: Report) -> None:
    for entry in before["quality"]:
        entry["per_sequence"] = {name: values[:1] for name, values in entry["per_sequence"].items()}
    found = change(compared(before, before), "kl")
    assert found.stderr is None and found.in_errors is None and not found.paired
    with pytest.raises(InputError, match="fail_if: 'kl>1se': the standard error of bf16 kl is not known"):
        compared(before, before, "kl>1se")


# The gate -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", METRIC_FIELDS)
def test_a_report_against_itself(before: Report, metric: str) -> None:
    units = ["", "%"] if metric in ("encode", "decode") else ["", "%", "se"]
    for unit in units:
        assert not compared(before, before, f"{metric}>0{unit}", f"{metric}<0{unit}", f"{metric}>5{unit}").failures
        # No change at all is below 1, and that is what the condition says must not be.
        result = compared(before, before, f"{metric}<1{unit}")
        assert result.failures and len(result.failures) == sum(c.metric == metric for c in result.changes)


def test_the_right_figures_fail(before: Report, after: Report) -> None:
    replace_method(after, quality("cuvee/layer@balanced", [1.1, 1.3, 1.5], [0.0106, 0.0206, 0.0306], speed=0.4))
    assert failed(before, after, "kl>2%") == ["cuvee/layer@balanced"]
    assert failed(before, after, "kl>4%") == []
    assert failed(before, after, "kl>0.0005") == ["cuvee/layer@balanced"]
    assert failed(before, after, "kl>0.001") == []
    assert failed(before, after, "bits>5%@cuvee/*") == ["cuvee/layer@balanced"]
    assert failed(before, after, "bits>5%@cuvee/layers:3@*") == []
    assert failed(before, after, "encode<-10%") == ["cuvee/layer@balanced"]
    assert failed(before, after, "ratio<-1%") == ["cuvee/layer@balanced"]
    failure = compared(before, after, "kl>2%").failures[0]
    assert (failure.condition, failure.metric, failure.task) == ("kl>2%", "kl", None)
    assert failure.what == "0.02 -> 0.0206, +3 %"


def test_the_right_scores_fail(before: Report, after: Report) -> None:
    for entry in after["scores"]:
        entry["per_doc"] = [0.0] * 4
        entry["score"] = 0.0
    pairs = [(f.key, f.task) for f in compared(before, after, "score<-0.1").failures]
    assert pairs == [("bf16", "kv_8"), ("cuvee/layer@balanced", "kv_8"), ("cuvee/layer@balanced", "copy")]
    pairs = [(f.key, f.task) for f in compared(before, after, "score<-1se@cuvee/*:kv_*").failures]
    assert pairs == [("cuvee/layer@balanced", "kv_8")]
    assert compared(before, after, "score<-1se@*:copy").failures[0].what == "0.75 -> 0, -3 s.e."
    assert failed(before, after, "kl>0") == []


def test_paired_errors_see_what_others_do_not(before: Report, after: Report) -> None:
    kl = [0.0115, 0.0216, 0.0317]
    replace_method(after, quality("cuvee/layer@balanced", [1.0, 1.2, 1.4], kl))
    assert failed(before, after, "kl>2se@cuvee/layer@*") == ["cuvee/layer@balanced"]
    before["text"]["tokens_sha256"] = "other"
    assert not compared(before, after, "kl>2se@cuvee/layer@*", allow_different=True).failures


@pytest.mark.parametrize(
    ("condition", "hint"),
    [
        ("kl>5%@nope*", "there is kl of bf16, destroyed, cuvee/layer@balanced, cuvee/layers:3@high"),
        ("kl>5%@CUVEE/*", "there is kl of bf16"),  # case counts
        ("encode<-1%@bf16", "there is encode of cuvee/layer@balanced, cuvee/layers:3@high"),
        ("score<0@cuvee/*:nope", "there are scores of bf16:kv_8, cuvee/layer@balanced:kv_8"),
        ("score<0@cuvee/layers:3@high", "there are scores of bf16:kv_8"),
    ],
)
def test_a_condition_that_covers_nothing_is_an_error(before: Report, condition: str, hint: str) -> None:
    with pytest.raises(InputError, match=f"^fail_if: .* covers nothing: {hint}") as caught:
        compared(before, before, "bits>5%", condition)
    assert repr(condition) in str(caught.value)


def test_conditions_that_nothing_could_cover(before: Report) -> None:
    before["scores"] = []
    with pytest.raises(InputError, match="covers nothing: the first report has no task scores"):
        compared(before, before, "score<0")
    for entry in before["quality"]:
        entry["encode_gb_per_s"] = None
        entry["key"] += "x" * 3
    with pytest.raises(InputError, match="covers nothing: no method has encode"):
        compared(before, before, "encode<0")
    before["quality"] = [{**before["quality"][0], "key": f"m{i}"} for i in range(10)]
    with pytest.raises(InputError, match=r"there is kl of m0, m1, m2, m3, m4, m5, m6, m7 and 2 more$"):
        compared(before, before, "kl>0@x")


def test_a_lost_method_fails_what_covers_it(before: Report, after: Report) -> None:
    after["quality"] = [entry for entry in after["quality"] if entry["key"] != "cuvee/layer@balanced"]
    after["skipped"] = [{"key": "cuvee/layer@balanced", "reason": "no profile"}]
    result = compared(before, after, "kl>5%", "bits>5%@cuvee/layer@*", "top1<0@bf16", "score<0")
    assert [(m.key, m.metric, m.task, m.reason) for m in result.missing] == [
        ("cuvee/layer@balanced", None, None, "no profile")
    ]
    assert [(f.condition, f.key, f.what) for f in result.failures] == [
        ("kl>5%", "cuvee/layer@balanced", "missing: no profile"),
        ("bits>5%@cuvee/layer@*", "cuvee/layer@balanced", "missing: no profile"),
    ]
    assert not compared(before, after).failures


def test_a_lost_task_is_missing_with_its_reason(before: Report, after: Report) -> None:
    after["scores"] = [score for score in after["scores"] if score["task"] != "kv_8"]
    after["skipped"] = [{"key": "kv_8", "reason": "too long"}]
    result = compared(before, after, "score<0@*:kv_8")
    assert result.missing and {(m.task, m.reason) for m in result.missing} == {("kv_8", "too long")}
    assert {f.what for f in result.failures} == {"missing: too long"}


def test_a_lost_score_fails_what_covers_it(before: Report, after: Report) -> None:
    del after["scores"][1]
    result = compared(before, after, "score<0@cuvee/*:kv_*", "score<0@bf16", "kl>0")
    assert [(m.key, m.metric, m.task) for m in result.missing] == [("cuvee/layer@balanced", "score", "kv_8")]
    assert [(f.condition, f.task, f.what) for f in result.failures] == [("score<0@cuvee/*:kv_*", "kv_8", "missing")]
    assert not compared(before, after, "score<0@cuvee/*:copy").failures


def test_a_lost_figure_fails_what_covers_it(before: Report, after: Report) -> None:
    method(after)["decode_gb_per_s"] = None
    result = compared(before, after, "decode<-5%@cuvee/*", "encode<-5%", "kl>0")
    assert [(f.condition, f.key, f.metric, f.what) for f in result.failures] == [
        ("decode<-5%@cuvee/*", "cuvee/layer@balanced", "decode", "missing")
    ]


def test_what_is_new_does_no_harm(before: Report, after: Report) -> None:
    after["quality"].append(quality("cuvee/new", [1.0, 1.0, 1.0], [9.0, 9.0, 9.0]))
    after["scores"].append(score("cuvee/new", "kv_8", [0.0] * 4))
    after["scores"].append(score("kivi4", "kv_8", [0.0] * 4))
    after["tasks"].append({"name": "new", "metric": "acc", "docs": 3})
    method(after, "bf16")["encode_gb_per_s"] = 9.0
    result = compared(before, after, "kl>0", "score<0")
    assert not result.failures and not result.missing and result.added == ("cuvee/new", "kivi4")


# What must agree ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "name", "value", "shown"),
    [
        ("model", "fingerprint", "bb" * 16, "model.fingerprint (aaaaaaaaaaaa… and bbbbbbbbbbbb…)"),
        ("configuration", "dtype", "bfloat16", "configuration.dtype (float32 and bfloat16)"),
        ("configuration", "cache_dtype", "float16", "configuration.cache_dtype (bfloat16 and float16)"),
        ("configuration", "chunk_tokens", 64, "configuration.chunk_tokens (256 and 64)"),
        ("text", "calibration", [], "text.calibration (111111111111… and none)"),
        ("text", "evaluation", [{"sha256": "5" * 64}] * 2, "text.evaluation (222222222222… and 555555555555…+555"),
        ("text", "sequences", 9, "text.sequences (3 and 9)"),
        ("text", "length", 256, "text.length (512 and 256)"),
        ("text", "prefix", 128, "text.prefix (384 and 128)"),
        ("text", "tokens_sha256", "c" * 64, "text.tokens_sha256 (333333333333… and cccccccccccc…)"),
    ],
)
def test_reports_of_other_things_are_refused(
    before: Report, after: Report, block: str, name: str, value: Any, shown: str
) -> None:
    after[block][name] = value
    with pytest.raises(
        InputError, match=r"^report: must have been measured like the other one, but they differ in"
    ) as caught:
        compared(before, after)
    assert shown in str(caught.value) and "--allow-different" in str(caught.value) and "; " not in str(caught.value)
    assert shown in compared(before, after, allow_different=True).different[0]


@pytest.mark.parametrize(("name", "value"), [("docs", 5), ("metric", "f1"), ("docs_sha256", "x")])
def test_tasks_of_other_documents_are_refused(before: Report, after: Report, name: str, value: Any) -> None:
    after["tasks"][1][name] = value
    with pytest.raises(InputError, match=rf"they differ in tasks copy: {name} \(.* and {value}\)"):
        compared(before, after)


def test_all_differences_are_named_and_the_names_of_texts_do_not_matter(before: Report, after: Report) -> None:
    after["text"]["evaluation"][0]["name"] = "elsewhere/orchard.txt"
    assert compared(before, after).different == ()
    after["configuration"]["chunk_tokens"], after["text"]["length"] = 64, 256
    with pytest.raises(InputError, match=r"chunk_tokens \(256 and 64\); text.length \(512 and 256\)\. --allow"):
        compared(before, after)


@pytest.mark.parametrize(("name", "value"), [("cpu", "a slow one"), ("cores", 64), ("gpu", "one")])
def test_speeds_are_of_one_machine(before: Report, after: Report, name: str, value: Any) -> None:
    after["environment"][name] = value
    assert not compared(before, after, "kl>0").failures
    for metric in ("encode", "decode"):
        with pytest.raises(InputError, match=rf"they differ in environment\.{name}"):
            compared(before, after, "kl>0", f"{metric}<-5%")
    assert not compared(before, after, "encode<-5%", allow_different=True).failures


# What comes out -----------------------------------------------------------------------------------------------------


def printed(comparison: Comparison, width: int = 200) -> str:
    out = StringIO()
    print_comparison(comparison, Console(file=out, width=width))
    return out.getvalue()


def test_the_dict_is_json(before: Report, after: Report) -> None:
    replace_method(after, quality("bf16", [16.0, 16.0, 16.0], [0.0, 0.0, 0.3], None))
    replace_method(after, quality("destroyed", [1.0, 1.0, 1.0], [2.0, 3.0, 4.0], None))
    del after["quality"][3]
    data = compared(before, after, "kl>5%", "bits>1se@destroyed").to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    kl = next(c for c in data["changes"] if (c["key"], c["metric"]) == ("bf16", "kl"))
    assert kl["change"] == pytest.approx(0.1) and kl["relative"] is None and kl["in_errors"] == pytest.approx(1)
    assert kl["conditions"] == kl["failed"] == ["kl>5%"] and kl["paired"] is True
    bits = next(c for c in data["changes"] if (c["key"], c["metric"]) == ("destroyed", "bits"))
    assert (bits["relative"], bits["in_errors"], bits["stderr"]) == (None, None, 0)
    assert data["failures"][0] == {
        "condition": "kl>5%", "key": "bf16", "metric": "kl", "task": None, "what": "0 -> 0.1",
    }  # fmt: skip
    assert data["missing"] == [{"key": "cuvee/layers:3@high", "metric": None, "task": None, "reason": None}]
    assert data["a"]["commit"] == "abc1234" and data["a"]["model"] == "books-3m" and data["a"]["torch"] is None
    assert data["conditions"] == ["kl>5%", "bits>1se@destroyed"] and data["different"] == data["added"] == []


def test_what_is_noticeable() -> None:
    def noticed(a: float, b: float, error: float | None) -> bool:
        return Change("x", "kl", None, a, b, error, paired=True).noticeable

    assert noticed(1, 1.02, 1) and not noticed(1, 1.009, 1)
    assert noticed(1, 1.005, 0.002) and not noticed(1, 1.005, 0.003)
    assert noticed(1, 0.98, None) and not noticed(1, 0.995, None)
    assert not noticed(0, 0, 0) and noticed(0, 1e-9, None)


def test_printing_shows_what_is_watched_and_changed_or_noticeable(before: Report, after: Report) -> None:
    replace_method(after, quality("cuvee/layer@balanced", [1.0, 1.2, 1.4001], [0.011, 0.021, 0.031]))
    text = printed(compared(before, after, "top1<0@bf16", "kl>2%@cuvee/layer@*"), width=80)
    rows = [line for line in text.splitlines() if "0.02 " in line and "+0.001" in line]
    assert len(rows) == 1 and "FAIL" in rows[0] and "+5.0" in rows[0] and text.count("FAIL") == 2
    assert "nll" in text  # noticeable
    assert "top1" not in text and " bits " not in text  # watched and unchanged, hardly changed and not watched
    assert " bits " in printed(compared(before, after, "bits>1%@cuvee/layer@*"), width=80)  # watched, hardly changed


def test_what_rounding_leaves_is_no_change(before: Report, after: Report) -> None:
    replace_method(after, quality("cuvee/layer@balanced", [1.0 + 2e-15, 1.2 + 2e-15, 1.4 + 2e-15], [0.01, 0.02, 0.03]))
    comparison = compared(before, after, "bits>0", "bits>1se", "bits>0%")
    assert not comparison.failures and all(c.change == 0 for c in comparison.changes if c.metric == "bits")


def test_printing_an_open_gate(before: Report) -> None:
    assert printed(compared(before, before)).splitlines()[-1] == "26 figures without a change to speak of"
    assert "passed: the condition is not met" in printed(compared(before, before, "kl>0"))
    assert "passed: none of the conditions is met" in printed(compared(before, before, "kl>0", "bits>0"))


def test_printing_names_what_is_missing_new_or_different(before: Report, after: Report) -> None:
    after["configuration"]["chunk_tokens"] = 64
    after["skipped"] = [{"key": "destroyed", "reason": "[bold] broke"}]
    after["quality"][1]["key"] = "new[red]"
    del after["scores"][2]
    text = printed(compared(before, after, "kl>0", allow_different=True), width=40)
    assert "they differ in configuration.chunk_tokens (256 and 64)" in text
    assert "missing  destroyed: [bold] broke" in text and "missing  cuvee/layer@balanced score copy" in text
    assert "new      new[red]" in text and "FAILED   kl>0   destroyed: missing: [bold] broke" in text
