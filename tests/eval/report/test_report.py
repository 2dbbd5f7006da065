"""The report as a whole: what it holds, how it goes on after an interruption, and what it refuses."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from tests.conftest import Books, fitted_profile
from tests.eval.report.world import run_report
from tests.package.cli.running import run
from tests.waiting import PATIENCE

from cuvee.calibration.bundled import bundled_model_path
from cuvee.calibration.corpus import load_model
from cuvee.calibration.kinds import LONG
from cuvee.codec.chunk import KVChunk
from cuvee.codec.errors import InputError, ProfileError, ProfileMismatchError, UnsupportedModelError
from cuvee.codec.layout import KVLayout
from cuvee.codec.models.fingerprint import model_fingerprint
from cuvee.codec.models.forward import prefill
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.quality import PRESET_KL
from cuvee.eval.baselines.pca import PcaTransform
from cuvee.eval.baselines.quantizers import CacheGen, Kivi, Uncompressed
from cuvee.eval.machine import hardware
from cuvee.eval.methods import BASELINES, family_label
from cuvee.eval.quality import CodecMethod, Quality, QualityBench
from cuvee.eval.report.candidates import Candidate, codec_candidates, select
from cuvee.eval.report.comparing import ANCHORS
from cuvee.eval.report.report_config import ReportConfig, quick_config
from cuvee.eval.report.report_plan import ReportPlan
from cuvee.eval.report.scoring import TaskScorer
from cuvee.eval.stats import paired_difference
from cuvee.learning.calibrate import calibrate, fit

pytest.importorskip("lm_eval")
TASK = "cuvee_kv_8"
CONFIG = replace(
    quick_config(ReportConfig()),
    length=128,
    sequences=6,
    chunk_tokens=64,
    tasks=(TASK,),
    limit=6,
)
TIMED = ("seconds", "date", "commit")


@pytest.fixture(scope="module")
def config(books: Books, tmp_path_factory: pytest.TempPathFactory) -> ReportConfig:
    books.profile.save(path := tmp_path_factory.mktemp("profile") / "layer.safetensors")
    return replace(CONFIG, profiles=(str(path),))


@pytest.fixture(scope="module")
def done(config: ReportConfig, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("report") / "run"
    with open(out.with_name("log"), "w", encoding="utf-8") as file:
        return out, run_report(config, out, Console(file=file), command="cuvee report --quick")


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for `done`, which comes first: a quarter of the time of a report this small goes into drawing."""
    monkeypatch.setattr("cuvee.eval.report.rendering.write_plot", lambda *_: False)


def untimed(data: Any) -> Any:
    """The same without what differs from run to run."""
    if isinstance(data, dict):
        return {key: untimed(value) for key, value in data.items() if key not in TIMED}
    return [untimed(item) for item in data] if isinstance(data, list) else data


def test_a_report_holds_every_method_and_how_it_was_made(
    done: tuple[Path, dict[str, Any]], config: ReportConfig, books: Books
) -> None:
    out, data = done
    assert json.loads((out / "report.json").read_text()) == data
    assert data["complete"] and data["command"] == "cuvee report --quick" and not data["skipped"]
    keys = [entry["key"] for entry in data["quality"]]
    assert len(set(keys)) == len(keys)
    left_out = {"fp8-e4m3-unit", "fp8-e4m3-head", "int8", "cachegen-tables-free"}
    assert set(keys) >= (BASELINES.keys() - left_out) | {f"cuvee/layer@{preset}" for preset in PRESET_KL}
    assert "cuvee/lossless" in keys and not any(k.startswith("pca/") for k in keys)
    for entry in data["quality"]:
        assert len(entry["per_sequence"]["kl"]) == 6 and entry["chunk_tokens"] == 64
        assert entry["family"] == entry["key"].partition("@")[0]
    text = data["text"]
    assert (text["sequences"], text["length"], text["prefix"]) == (6, 128, 96)
    assert [t["name"] for t in text["evaluation"]] == ["orchard", "lantern", "garrison"]
    assert len(text["tokens_sha256"]) == 64
    assert data["environment"]["cpu"] and data["environment"]["torch"] == torch.__version__
    assert data["configuration"]["model_fingerprint"] == data["model"]["fingerprint"]
    assert data["model"]["parameters"] == 3_443_136
    (profile,) = data["profiles"].values()
    assert (profile["id"], profile["longest"]) == (books.profile.id.hex(), max(books.profile.lengths))
    assert profile["bytes"] == Path(config.profiles[0]).stat().st_size
    assert profile["bits_per_value_over_1m_tokens"] == pytest.approx(8 * profile["bytes"] / (1e6 * 1536))
    first = data["quality"][0]
    assert np.mean(data["exact"]["per_sequence"]) == pytest.approx(first["nll"] - first["delta_nll"])


def test_curves_end_where_they_cost_too_much(
    done: tuple[Path, dict[str, Any]], config: ReportConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def costs(data: dict[str, Any]) -> list[float]:
        return [e["kl"] for e in data["quality"] if e["family"] == "cuvee/layer" and e["kind"] == "curve"]

    whole = costs(done[1])
    assert len(whole) >= 6 and whole[2] < whole[-2]
    monkeypatch.setattr("cuvee.eval.report.report_run.WORST_KL", whole[2] * 0.99)
    short = costs(run_report(replace(config, tasks=(), methods=("cuvee/layer",)), tmp_path / "run"))
    assert short == pytest.approx(whole[:3], rel=1e-3)


def test_scores_are_paired_with_those_of_the_exact_cache(done: tuple[Path, dict[str, Any]]) -> None:
    _, data = done
    (task,) = data["tasks"]
    assert (task["name"], task["docs"], task["chance"]) == (TASK, 6, 0.125)
    scores = {entry["key"]: entry for entry in data["scores"]}
    assert set(scores) == {
        "bf16", "destroyed", "kivi2", "cuvee/layer@balanced",
    }  # fmt: skip
    exact = scores["bf16"]
    assert exact["difference"] is None and exact["bits_per_value"] == 16
    for score in scores.values():
        assert score["score"] == pytest.approx(sum(score["per_doc"]) / 6) and len(score["per_doc"]) == 6
    lost = scores["destroyed"]
    assert lost["difference"] == pytest.approx(lost["score"] - exact["score"]) and lost["difference_stderr"] > 0
    assert lost["score"] < exact["score"] and lost["bits_per_value"] == 0
    assert 0.3 < scores["cuvee/layer@balanced"]["bits_per_value"] < 4


def test_the_comparison_is_at_the_kl_of_the_anchors(done: tuple[Path, dict[str, Any]]) -> None:
    _, data = done
    quality = {entry["key"]: entry for entry in data["quality"]}
    assert [entry["anchor"] for entry in data["comparison"]] == [*ANCHORS, "kivi2"]  # quick leaves the others out
    for entry in data["comparison"]:
        assert entry["kl"] == quality[entry["anchor"]]["kl"]
    assert {r["against"] for r in data["comparison"][0]["ratios"]} == {"fp8-e4m3"}
    assert {r["against"] for r in data["comparison"][3]["ratios"]} <= {"kivi2"}
    against = {r["against"]: r for r in data["comparison"][1]["ratios"] if r["of"] == "cuvee/layer"}
    assert against["kivi4"]["ratio"] > 2 and against["kivi4"]["low"] < against["kivi4"]["ratio"]


class Interrupted:
    """Lets so many methods through, then the user presses Ctrl-C; remembers what was measured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
        self.measured: list[str] = []
        run = QualityBench.run

        def counted(bench: QualityBench, name: str, *args: Any, **more: Any) -> Quality:
            if len(self.measured) == most:
                raise KeyboardInterrupt
            self.measured.append(name)
            return run(bench, name, *args, **more)

        monkeypatch.setattr(QualityBench, "run", counted)


def test_an_interrupted_run_goes_on_and_ends_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(CONFIG, methods=("fp8-e4m3", "kivi4", "kivi2"), limit=2, sequences=2)
    whole = run_report(config, tmp_path / "whole", command="cuvee report --quick")
    with monkeypatch.context() as patch:
        Interrupted(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            run_report(config, tmp_path / "run", command="cuvee report --quick")
    half = json.loads((tmp_path / "run" / "report.json").read_text())
    assert not half["complete"] and len(half["quality"]) == 2 and not (tmp_path / "run" / "report.md").exists()
    with monkeypatch.context() as patch:
        rest = Interrupted(patch, 1000)
        patch.setattr("cuvee.eval.progress._SILENCE", 0)
        console = Console(file=(log := io.StringIO()))
        data = run_report(config, tmp_path / "run", console, command="cuvee report --quick")
    assert "quality: kivi2, 2 of 2 sequences" in log.getvalue()
    assert len(rest.measured) == len(whole["quality"]) - 2 == 2
    assert data["quality"][:2] == half["quality"]
    assert untimed(data) == untimed(whole)


def test_scores_before_an_interruption_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    score, asked = TaskScorer.score, []

    def once(*given: Any) -> Any:
        asked.append(given)
        if len(asked) > 1:
            raise KeyboardInterrupt
        return score(*given)

    monkeypatch.setattr(TaskScorer, "score", once)
    with pytest.raises(KeyboardInterrupt):
        run_report(replace(CONFIG, methods=("kivi2",), limit=2, sequences=2), tmp_path / "run")
    assert [s["key"] for s in json.loads((tmp_path / "run" / "report.json").read_text())["scores"]] == ["bf16"]


def test_a_complete_run_is_only_rendered_anew(
    done: tuple[Path, dict[str, Any]], config: ReportConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, whole = done
    shutil.copytree(out, tmp_path / "run")
    (tmp_path / "run" / "report.md").unlink()
    Interrupted(monkeypatch, 0)
    assert untimed(run_report(config, tmp_path / "run")) == untimed(whole)
    assert (tmp_path / "run" / "report.md").exists()


def test_results_of_another_configuration_or_software_are_never_mixed(
    done: tuple[Path, dict[str, Any]], config: ReportConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, _ = done
    before, machine = (out / "report.json").read_bytes(), hardware()
    monkeypatch.setattr("cuvee.eval.runs.load_model", lambda *given: pytest.fail("the model was loaded"))
    changes: dict[str, Any] = {"chunk_tokens": 32, "evaluation": ("orchard",), "limit": 5}
    for field, value in changes.items():
        called = "texts" if field == "evaluation" else field
        with pytest.raises(InputError, match=rf"^out: .* holds another run \(it differs in {called}\)"):
            run_report(replace(config, **{field: value}), out)
    monkeypatch.setattr("cuvee.eval.report.report_plan.hardware", lambda: {**machine, "torch": "1.0"})
    with pytest.raises(InputError, match="differs in software"):
        run_report(config, out)
    assert (out / "report.json").read_bytes() == before


def test_a_folder_that_holds_other_things_is_left_alone(config: ReportConfig, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"^out: .* is not empty and holds no report"):
        run_report(config, tmp_path)
    with pytest.raises(InputError, match=r"^out: must be a folder"):
        run_report(config, tmp_path / "notes.txt")
    (tmp_path / "report.json").write_text('{"results": []}')
    with pytest.raises(InputError, match=r"^out: .* is not a report"):
        run_report(config, tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_profile_that_was_exchanged_is_noticed(
    done: tuple[Path, dict[str, Any]], config: ReportConfig, tmp_path: Path, books: Books
) -> None:
    own = books.profile
    plain = Profile(own.layout, own.group, own.source, own.family, own.learned, min_step_index=own.min_step_index)
    other_curve = own.with_curve(own.points[1:], own.lengths)
    assert plain.id != own.id == other_curve.id
    asked = replace(config, profiles=(str(tmp_path / "layer.safetensors"),))
    for other, what in ((plain, "profiles"), (other_curve, "curves")):
        other.save(tmp_path / "layer.safetensors")
        with pytest.raises(InputError, match=f"differs in .*{what}"):
            run_report(asked, done[0])


def test_the_profile_has_to_fit_the_methods(config: ReportConfig, tmp_path: Path, books: Books) -> None:
    learn = "must name one, unless .*: learn one with `cuvee profile learn some/model -o model.safetensors`"
    for name in ("a/p", "b/p", "a/p@2", "mine"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        books.profile.save(tmp_path / name)
    p, other, named, mine = (str(tmp_path / name) for name in ("a/p", "b/p", "a/p@2", "mine"))
    idle = f"must be measured by a method, got {p} with none of it: leave"
    changes: list[tuple[dict[str, Any], str]] = [
        ({"model": "some/model", "profiles": ()}, learn),
        ({"model": "some/model", "profiles": (), "methods": ("kivi4", "cuvee")}, learn),
        ({"model": "some/model", "profiles": (), "methods": ("kivi4", "cuvee/mine@small")}, learn),
        ({"profiles": (p, mine), "methods": ("kivi4", "cuvee/lossless")}, idle),
        ({"profiles": (p, mine), "methods": ("cuvee/mine@small",)}, idle),
        ({"profiles": (p, other)}, "must have different names"),
        ({"profiles": (named,)}, "must have different names"),
    ]
    for change, message in changes:
        with pytest.raises(InputError, match=f"^profiles: {message}"):
            run_report(replace(config, **change), tmp_path / "run")
    with pytest.raises(InputError, match=r"^methods: 'cuvee/min' is not known, did you mean 'cuvee/mine"):
        run_report(replace(config, profiles=(mine,), methods=("cuvee/min",)), tmp_path / "run")


def test_a_profile_of_another_model_is_refused(tmp_path: Path, books: Any) -> None:
    config = replace(CONFIG, profiles=(str(tmp_path / "other"),))
    fitted_profile("gqa", "layer").save(tmp_path / "other")
    with pytest.MonkeyPatch.context() as weights:
        weights.setattr("cuvee.eval.runs.load_model", lambda *given: pytest.fail("the model was loaded"))
        with pytest.raises(ProfileMismatchError, match="other: layout: the profile is for synthetic"):
            run_report(config, tmp_path / "run")
    profile = books.profile
    assert profile.model == model_fingerprint(books.model)
    Profile(
        profile.layout, profile.group, profile.source, profile.family, profile.learned,
        min_step_index=profile.min_step_index, model=f"w2-{0:032x}", curve=profile.curve,
    ).save(tmp_path / "other")  # fmt: skip
    with pytest.raises(ProfileMismatchError, match="was calibrated on other weights"):
        run_report(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "mamba"}, "mamba"),
        ({"sequences": 0}, "^sequences: "),
        ({"metadata": ("x",)}, "^metadata: "),
        ({"tasks": ("cuvee_kv_9",)}, r"^tasks: 'cuvee_kv_9' is not known; did you mean 'cuvee_kv_8'"),
        ({"length": 1024}, "^length: must be at most 512, the model's positions, got 1024"),
        ({"device": "cuda:99"}, "^device: must be a device that torch can use here, got 'cuda:99'"),
        ({"evaluation": ("nowhere.txt",)}, "no such text file"),
        ({"methods": ("kivi5",)}, r"^methods: 'kivi5' is not known, did you mean 'kivi"),
        ({"methods": ("turboquant",)}, "^turboquant: is not installed; pip install"),
        ({"length": 7}, "^length: must be at least 8, got 7"),
        ({"tasks": ("cuvee_kv_8",), "evaluation": ("ids.jsonl",), "model": "untokenized"}, "untokenized"),
    ],
)
def test_what_does_not_fit_is_said_before_the_weights_are_read(
    tmp_path: Path, change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cuvee.eval.runs.load_model", lambda *given: pytest.fail("the model was loaded"))
    # The index of lm-eval's own tasks takes ten seconds; test_scoring.py reads it nightly.
    from lm_eval import tasks

    manager = tasks.TaskManager
    monkeypatch.setattr(tasks, "TaskManager", lambda **more: manager(**{**more, "include_defaults": False}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "fused_turboquant", None)
    (tmp_path / "mamba").mkdir()
    (tmp_path / "mamba" / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    (tmp_path / "untokenized").mkdir()
    shutil.copy(bundled_model_path() / "config.json", tmp_path / "untokenized")
    (tmp_path / "ids.jsonl").write_text(json.dumps([5] * 800))
    with pytest.raises((InputError, FileNotFoundError, UnsupportedModelError), match=message):
        run_report(replace(CONFIG, **{"methods": ("kivi4",), **change}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_report_of_other_texts_is_refused_before_anything_is_measured(
    done: tuple[Path, dict[str, Any]], config: ReportConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = done[0] / "report.json"
    with pytest.raises(InputError, match=rf"^against: .* measured 6 documents of {TASK}, not 5 .--limit"):
        run_report(replace(config, limit=5), tmp_path / "run", against=old)
    monkeypatch.setattr("cuvee.eval.runs.load_model", lambda *given: pytest.fail("the model was loaded"))
    for change, words in (
        ({"sequences": 3}, "6 sequences .--sequences., not 3"), ({"dtype": "bfloat16"}, "a model in float32, not bf"),
        ({"chunk_tokens": 32}, "chunks of 64 tokens, not 32"), ({"evaluation": ("orchard",)}, "the texts orchard, lan"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=f"^against: .* measured {words}"):
            run_report(replace(config, **change), tmp_path / "run", against=old)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["qwen3_next", pytest.param("gemma3_text", marks=pytest.mark.nightly)])
def test_hybrids_and_windows_past_their_length(name: str, tmp_path: Path, books: Books) -> None:
    folder = tmp_path / "tiny"
    shutil.copytree(bundled_model_path(), folder)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    from tests.every_model import config_of, make, shrink

    config = shrink(config_of(name), 4, sections=False)
    config.vocab_size = vocabulary
    torch.manual_seed(0)
    make(config).save_pretrained(folder)
    model = load_model(str(folder), "float32")
    calibrate(model, books.harbour[:24, :128], "layer", progress=False).save(folder / "tiny.safetensors")
    wanted = replace(
        CONFIG, model=str(folder), profiles=(str(folder / "tiny.safetensors"),), sequences=2, limit=2,
        methods=("cuvee/tiny@balanced", "cuvee/lossless", "fp8-e4m3"), batch_size=1,
    )  # fmt: skip
    data = run_report(wanted, tmp_path / "run")
    measured = {entry["key"]: entry for entry in data["quality"]}
    assert "cuvee/tiny@balanced" in measured
    assert abs(measured["cuvee/lossless"]["kl"]) < 1e-6  # what bfloat16 loses
    assert all(abs(entry["kl"]) < 1 for entry in measured.values())
    assert {score["task"] for score in data["scores"]} == {TASK}


def test_what_fails_is_left_out_and_nothing_else(books: Books, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that cannot store a cache or be scored, a preset without a curve, a task too long for the model."""

    def refuse(method: Any, chunk: Any) -> Any:
        raise InputError("chunk: holds values that cannot be stored")

    score = TaskScorer.score

    def fail(scorer: TaskScorer, method: Any, *given: Any) -> Any:
        if isinstance(method, Kivi):
            raise InputError("chunk: holds values that cannot be stored")
        return score(scorer, method, *given)

    monkeypatch.setattr(CacheGen, "encode", refuse)
    monkeypatch.setattr(TaskScorer, "score", fail)
    monkeypatch.setattr("cuvee.eval.lm.CuveeLM.max_length", 200)  # the pairs fit, the prose does not
    few = [replace(point, kl=None) for point in books.profile.curve[:1]]  # one point is no curve
    books.profile.save(tmp_path / "mine.safetensors")
    books.profile.with_curve(few).save(tmp_path / "few.safetensors")
    config = replace(
        CONFIG, profiles=(str(tmp_path / "mine.safetensors"), str(tmp_path / "few.safetensors")),
        methods=(
            "fp8-e4m3", "kivi4", "kivi2", "cachegen", "destroyed", "cuvee/mine", "cuvee/mine@2^-2.5", "cuvee/few@small",
        ),
        tasks=("cuvee_reread_nll", TASK), limit=2, sequences=2,
    )  # fmt: skip
    data = run_report(config, tmp_path / "run")
    reasons = {entry["key"]: entry["reason"] for entry in data["skipped"]}
    assert set(reasons) == {"cachegen", "kivi4", "kivi2", "cuvee/few@small", "cuvee_reread_nll"}
    assert "no curve for error" in reasons["cuvee/few@small"]
    assert re.search("cuvee_reread_nll has a request of .* tokens, the model reads 200", reasons["cuvee_reread_nll"])
    measured = {entry["key"] for entry in data["quality"]}
    assert not {"cachegen", "cuvee/few@small"} & measured and {"kivi2", "cuvee/mine@balanced"} <= measured
    assert {(entry["key"], entry["task"]) for entry in data["scores"]} == {
        (key, TASK) for key in ("bf16", "fp8-e4m3", "destroyed", "cuvee/mine@balanced", "cuvee/mine@2^-2.5")
    }
    assert [entry["anchor"] for entry in data["comparison"]] == ["fp8-e4m3", "kivi4", "kivi2"]
    text = (tmp_path / "run" / "report.md").read_text()
    assert "cuvee/few@small" in text and "cuvee_reread_nll" in text


# --- methods by name


def keys_of(data: dict[str, Any]) -> list[str]:
    return [entry["key"] for entry in data["quality"]]


def test_a_full_disk_keeps_what_was_measured(
    done: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, config = tmp_path / "run", replace(CONFIG, methods=("kivi4", "kivi2", "cachegen"), tasks=())
    write, left = os.replace, [3]

    def full(*paths: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*paths)

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", full)
        with pytest.raises(InputError, match=r"^out: .*report.json cannot be written .No space left.* same command"):
            run_report(config, out)
    assert keys_of(json.loads((out / "report.json").read_text())) == ["bf16", "kivi4"]
    assert [path.name for path in out.iterdir()] == ["report.json"]
    data = run_report(config, out)
    assert data["complete"] and keys_of(data) == ["bf16", "kivi4", "kivi2", "cachegen"]


def test_a_log_says_what_is_measured_and_how_much_is_done(
    done: tuple[Path, dict[str, Any]], config: ReportConfig, tmp_path: Path
) -> None:
    line = next(line for line in done[0].with_name("log").read_text().splitlines() if line.startswith("tasks are"))
    scored, others = line.split("; not with ")
    assert scored == "tasks are scored with bf16, kivi2, destroyed, cuvee/layer@balanced"
    assert (
        others.startswith("fp8-e4m3, kivi4, cachegen, cuvee/lossless, to save time") and "--method fp8-e4m3" in others
    )
    with open(tmp_path / "log", "w+", encoding="utf-8") as file:
        few = replace(config, methods=("kivi4", "cuvee/layer@small"), tasks=(), sequences=2)
        run_report(few, tmp_path / "run", Console(file=file))
        file.seek(0)
        said = file.read()
    assert "quality: kivi4" in said and "quality: cuvee/layer@" in said and "tasks are scored" not in said
    counted = [(int(done), int(total)) for done, total in re.findall(r"(\d+) of (\d+): ", said)]
    assert counted[0][0] == 1 and all(done <= total for done, total in counted)


LISTED = [
    Candidate(key, key, "point", Uncompressed)
    for key in ("bf16", "fp8-e4m3", "int8", "pca/layer@1", "pca/all@1", "cuvee/all@high", "cuvee/layer@high")
]
QUICK = [c for c in LISTED if c.key not in ("int8", "pca/all@1")]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ((), "bf16 fp8-e4m3 pca/layer@1 cuvee/all@high cuvee/layer@high"),
        (("cuvee", "fp8-e4m3"), "bf16 fp8-e4m3 cuvee/all@high cuvee/layer@high"),
        (("cuvee/layer", "cuvee/layer@high"), "bf16 cuvee/layer@high"),
        (("pca",), "bf16 pca/layer@1"),
        (("pca/all", "int8"), "bf16 int8 pca/all@1"),  # a quick report leaves them out unless they are asked for
    ],
)
def test_methods_are_selected_by_key_family_or_kind(names: tuple[str, ...], expected: str) -> None:
    assert [c.key for c in select(LISTED, names, QUICK)] == expected.split()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pca/alt", "'pca/alt' is not known, did you mean 'pca/all'. there are bf16, fp8-e4m3, int8, pca/layer,"),
        ("zip", "'zip' is not known: there are bf16, .*cuvee/layer, and settings of them after an @, as in pca/layer@"),
    ],
)
def test_a_method_that_is_not_known_is_named_with_those_that_are(name: str, message: str) -> None:
    with pytest.raises(InputError, match=f"^methods: {message}"):
        select(LISTED, ("fp8-e4m3", name), QUICK)


def test_only_the_methods_asked_for_are_measured(
    done: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And models with many parameters are asked fewer documents."""
    monkeypatch.setattr("cuvee.eval.report.report_plan.SMALL_PARAMETERS", 1_000_000)
    monkeypatch.setattr("cuvee.eval.report.report_plan.LARGE_LIMIT", 2)
    config = replace(CONFIG, methods=("kivi4", "int8", "cuvee/lossless"), limit=None)
    data = run_report(config, tmp_path / "run")
    assert keys_of(data) == ["bf16", "int8", "kivi4", "cuvee/lossless"] and data["complete"]
    assert {(s["key"], s["docs"]) for s in data["scores"]} == {(key, 2) for key in keys_of(data)}
    known = {entry["key"]: entry["kl"] for entry in done[1]["quality"]}
    assert data["quality"][2]["kl"] == pytest.approx(known["kivi4"])
    assert data["configuration"]["methods"] == ["kivi4", "int8", "cuvee/lossless"]
    with pytest.raises(InputError, match="differs in methods"):
        run_report(replace(config, methods=("kivi4",)), tmp_path / "run")


def test_without_a_profile_pca_has_a_basis_per_layer_and_nothing_is_said_of_profiles(tmp_path: Path) -> None:
    config = replace(CONFIG, methods=("pca", "cuvee/lossless", "kivi4"), sequences=2, tasks=())
    assert {c.family for c in ReportPlan(config).candidates} == {"bf16", "kivi4", "pca/layer", "cuvee/lossless"}
    data = run_report(replace(config, methods=config.methods[1:]), tmp_path / "run")
    assert data["profiles"] == data["configuration"]["profiles"] == {} and data["sizes"] == []
    measured = {e["key"]: e for e in data["quality"]}
    assert measured["cuvee/lossless"]["kl"] == pytest.approx(measured["bf16"]["kl"], abs=1e-9)
    assert 10 < measured["cuvee/lossless"]["bits_per_value"] < 13
    written = (tmp_path / "run" / "report.md").read_text()
    assert family_label("cuvee/lossless") in written and "\n## Profiles" not in written and "None" not in written
    with pytest.raises(InputError, match="'cuvee/mine@small' is not known"):
        ReportPlan(replace(config, methods=("cuvee/mine@small",)))


def test_a_preset_below_the_curve_is_left_out_instead_of_shown_as_lossless(books: Books) -> None:
    coarse = books.profile.with_curve(p for p in books.profile.curve if p.kl is not None and p.kl > 2e-3)
    made = {c.key: c for c in codec_candidates(coarse.layout, {"mine": coarse}, True)}
    with pytest.raises(ProfileError, match=r"^high: the profile's curve does not reach a KL of 0.001$"):
        made["cuvee/mine@high"].make()
    small = made["cuvee/mine@small"].make()
    assert isinstance(small, CodecMethod) and not small.codec.lossless


def test_pca_is_fitted_to_the_mixture_with_the_group_of_the_profile(
    tmp_path: Path, books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.no_grad():
        samples = prefill(books.model, books.harbour[:, :144], books.layout)
    pairs = fit(books.layout, samples, "layers:2").with_curve(books.profile.curve)
    pairs.save(tmp_path / "pairs.safetensors")
    # In place of the whole mixture, which takes seconds.
    few = {"a": books.harbour[:15, :128], "b": books.harbour[15:20, :128], LONG: books.harbour[:2]}
    asked, learned, fit_pca = [], list[int](), PcaTransform.fit

    def fitted(layout: KVLayout, chunks: list[KVChunk], group: str) -> PcaTransform:
        learned.extend(chunk.tokens for chunk in chunks)
        return fit_pca(layout, chunks, group)

    def mixed(*_: Any, **given: Any) -> dict[str, torch.Tensor]:
        asked.append(given)
        return few

    monkeypatch.setattr(PcaTransform, "fit", fitted)
    monkeypatch.setattr("cuvee.eval.report.report_plan.mixture", mixed)
    config = replace(
        CONFIG, tasks=(), profiles=(str(tmp_path / "pairs.safetensors"),), sequences=2,
        methods=("pca", "cuvee/pairs@balanced"),
    )  # fmt: skip
    data = run_report(config, tmp_path / "run")
    assert data["profiles"]["pairs"]["id"] == pairs.id.hex() and data["tasks"] == data["scores"] == []
    assert {e["family"] for e in data["quality"]} == {"bf16", "pca/layers:2", "cuvee/pairs"} and not data["skipped"]
    assert family_label("pca/layers:2") == "PCA, a basis per 2 layers"
    bits = [e["bits_per_value"] for e in data["quality"] if e["family"] == "pca/layers:2"]
    assert bits == sorted(bits, reverse=True) and len(bits) == 4
    assert learned == [96] * 20 and asked == [{"length": 128, "seed": config.seed}]


def test_kinds_of_text_are_compared_apart(
    config: ReportConfig, books: Books, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cuvee.eval.report.comparing.LEAST_OF_KIND", 2)
    few = {"harbour": books.harbour[:12, :128]}  # which PCA is fitted to here: the whole mixture takes seconds
    monkeypatch.setattr("cuvee.eval.report.report_plan.mixture", lambda *_, **__: few)
    kinds = replace(
        config,
        tasks=(),
        evaluation=("orchard", "lantern"),
        sequences=7,
        methods=("kivi4", "cuvee/layer@2^-2.5", "cuvee/layer@2^0.5", "pca/layer@0.27", "pca/layer@0.9"),
    )
    data = run_report(kinds, tmp_path / "run")
    assert data["text"]["kinds"] == [
        {"text": "orchard", "reread": False, "rows": [1, 3]},
        {"text": "orchard", "reread": True, "rows": [0, 2]},
        {"text": "lantern", "reread": False, "rows": [5]},
        {"text": "lantern", "reread": True, "rows": [4, 6]},
    ]
    found = {(kind["text"], kind["reread"]): kind for kind in data["by_kind"]}
    assert list(found) == [("orchard", False), ("orchard", True), ("lantern", True)]  # one sequence says too little
    kivi = next(e for e in data["quality"] if e["key"] == "kivi4")["per_sequence"]["kl"]
    for key, rows in ((("orchard", False), [1, 3]), (("lantern", True), [4, 6])):
        (anchor,) = found[key]["comparison"]
        assert anchor["anchor"] == "kivi4" and anchor["kl"] == pytest.approx(sum(kivi[row] for row in rows) / 2)
        assert {r["against"] for r in anchor["ratios"]} == {"kivi4", "pca/layer"}
    assert {e["family"] for e in data["sizes"]} == {"cuvee/layer", "pca/layer"}


# --- an end before its time

COMMAND = [
    "report", "--quick", "--method", "kivi4", "--method", "cuvee", "--no-tasks", "--length", "128", "--sequences", "8",
    "-o",
]  # fmt: skip


def test_ctrl_c_keeps_what_was_measured(config: ReportConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command, said = [*COMMAND, str(tmp_path / "run"), "--profile", config.profiles[0]], []
    for most in (2, 1):
        with monkeypatch.context() as patch:
            Interrupted(patch, most)
            said.append(run(*command, code=130).stderr.replace("\n", ""))
        assert f"interrupted: {tmp_path / 'run'} keeps what was measured" in said[-1]
    assert "measurements done: continuing" in said[1] and "continuing" not in said[0]
    assert len(keys_of(json.loads((tmp_path / "run" / "report.json").read_text()))) == 3


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_told_to_stop_goes_on_later(config: ReportConfig, tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "run"
    # A process in the background ignores SIGINT from its beginning.
    program = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); import cuvee.cli as c; c.main()"
    command = [*COMMAND, str(out), "--profile", config.profiles[0]]
    typed = [sys.executable, "-c", program, *command]
    with subprocess.Popen(typed, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            if (out / "report.json").exists() and len(keys_of(json.loads((out / "report.json").read_text()))) >= 4:
                process.send_signal(number)
                break
            time.sleep(0.01)
        _, said = process.communicate(timeout=PATIENCE)
    if number == signal.SIGINT:
        assert process.returncode == 130 and f"interrupted: {out} keeps what was measured" in said.replace("\n", "")
    else:
        assert process.returncode == -number
    assert "Traceback" not in said
    half = json.loads((out / "report.json").read_text())
    assert not half["complete"] and len(half["quality"]) >= 4
    done = run(*command)
    assert "measurements done: continuing" in done.stderr and str(out / "report.md") in done.stdout
    data = json.loads((out / "report.json").read_text())
    assert data["complete"] and data["quality"][: len(half["quality"])] == half["quality"]


def test_controls_say_which_tasks_show_nothing(tmp_path: Path) -> None:
    """One task of ours without a context apart from its question, and line retrieval, which has one."""
    config = replace(
        CONFIG, methods=("kivi2",), tasks=(TASK, "cuvee_lines_100"), metadata=("lines=10",), controls=True, limit=4
    )
    data = run_report(config, tmp_path / "run", Console(file=(log := io.StringIO())))
    alone = re.findall(r"\d+ of \d+: (\w+): the question alone", log.getvalue())
    assert alone == ["cuvee_lines_100"]
    scored = {task["name"]: [s["key"] for s in data["scores"] if s["task"] == task["name"]] for task in data["tasks"]}
    assert scored == {TASK: ["bf16", "kivi2", "destroyed"], "cuvee_lines_100": ["bf16", "kivi2", "destroyed", "absent"]}
    absent = next(s for s in data["scores"] if s["key"] == "absent")
    exact = next(s for s in data["scores"] if (s["task"], s["key"]) == ("cuvee_lines_100", "bf16"))
    difference, error = paired_difference(absent["per_doc"], exact["per_doc"])
    assert (absent["difference"], absent["difference_stderr"]) == (difference, error)
    text = (tmp_path / "run" / "report.md").read_text()
    assert "the question alone" in text and "It shows nothing about a codec" in text  # to a model as small as this


def test_a_quick_report_is_smaller_but_keeps_what_was_asked_for() -> None:
    quick = quick_config(ReportConfig(sequences=3, tasks=("mine",), limit=7))
    assert quick.quick and (quick.sequences, quick.tasks, quick.limit) == (3, ("mine",), 7)
    whole = ReportConfig()
    assert len(quick_config(whole).tasks) < len(whole.tasks) and quick_config(whole).sequences < whole.sequences
