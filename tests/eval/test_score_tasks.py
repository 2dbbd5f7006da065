"""What tasks show: variants on the bundled model, files that are continued, verdicts, and the command."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.conftest import Books
from tests.package.cli.running import fails, misused, run

from cuvee.codec.errors import FormatError, InputError, ProfileError, ProfileMismatchError
from cuvee.codec.profiles.profile import Profile
from cuvee.eval.report import scoring
from cuvee.eval.score_tasks import TasksConfig, run_tasks, shows_something, tasks_tables
from cuvee.eval.stats import paired_difference
from cuvee.eval.tasks import sources

QUIET = Console(quiet=True)
DOCS = 6


def config(**changes: Any) -> TasksConfig:
    return TasksConfig(
        **{
            "model": "books-3m",
            "tasks": ("cuvee_kv_8",),
            "variants": ("destroyed", "absent", "small"),
            "limit": DOCS,
            **changes,
        }
    )


@pytest.fixture(scope="module")
def found(books: Books, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two tasks: one of ours without a context apart from its question, and line retrieval, which has one."""
    folder = tmp_path_factory.mktemp("tasks")
    out, profile = folder / "new" / "scores.json", folder / "books.safetensors"
    books.profile.save(profile)
    tasks = ("cuvee_kv_8", "cuvee_lines_100")
    made = run_tasks(config(tasks=tasks, profile=str(profile), metadata=("lines=10",)), out, QUIET, "cuvee tasks …")
    assert json.loads(out.read_text()) == json.loads(json.dumps(made))
    return made


def test_variants(found: dict[str, Any]) -> None:
    variants = {
        name: [s["arm"] for s in found["scores"] if s["task"] == name] for name in ("cuvee_kv_8", "cuvee_lines_100")
    }
    # Without a context apart from the question, `absent` would be the exact cache once more.
    assert variants == {
        "cuvee_kv_8": ["exact", "destroyed", "small"],
        "cuvee_lines_100": ["exact", "destroyed", "absent", "small"],
    }
    for score in found["scores"]:
        (exact,) = [s for s in found["scores"] if s["task"] == score["task"] and s["arm"] == "exact"]
        assert len(score["per_doc"]) == DOCS and score["score"] == pytest.approx(sum(score["per_doc"]) / DOCS)
        if score["arm"] == "exact":
            assert score["bits_per_value"] == 16 and "difference" not in score
        else:
            mean, error = paired_difference(score["per_doc"], exact["per_doc"])
            assert (score["difference"], score["difference_stderr"]) == (mean, error)
    bits = {s["arm"]: s["bits_per_value"] for s in found["scores"] if s["task"] == "cuvee_kv_8"}
    assert bits["destroyed"] == 0 < bits["small"] < 16
    assert [task["chance"] for task in found["tasks"]] == [0.125, 0.1]
    assert found["command"] == "cuvee tasks …" and found["asked"]["data"] is None and "cpu" in found["hardware"]


def test_tables(found: dict[str, Any]) -> None:
    first, second = tasks_tables(found)
    assert first.title == "cuvee_kv_8: acc (more is better, a guess 0.125), 6 documents"
    assert [row[0] for row in first.rows] == ["exact", "destroyed", "small"]
    assert [row[0] for row in second.rows] == ["exact", "destroyed", "absent", "small"]
    assert first.rows[0][2] == "" and first.rows[1][2].startswith(("-", "+")) and " ± " in first.rows[1][2]
    assert second.note.startswith("Of 100 lines")


@pytest.mark.parametrize(
    ("higher", "guess", "exact", "control", "verdict"),
    [
        (True, 0.1, [1, 1, 1, 1, 1, 0, 1, 1], [0, 0, 0, 0, 0, 0, 0, 1], True),
        (True, 0.1, [1, 0, 0, 1, 0, 0, 1, 0], [0, 0, 0, 1, 0, 0, 1, 0], False),
        (True, 0.9, [1, 1, 1, 1, 1, 0, 1, 1], [0, 0, 0, 0, 0, 0, 0, 1], False),  # no better than a guess
        (True, 0.1, [0, 0, 0, 0, 0, 0, 0, 1], [1, 1, 1, 1, 1, 0, 1, 1], False),
        (False, None, [2.0, 2.1, 2.2], [3.0, 3.2, 3.1], True),
        (False, None, [3.0, 3.2, 3.1], [2.0, 2.1, 2.2], False),
        (False, None, [2.0], [3.0], None),
    ],
)
def test_verdict(
    higher: bool, guess: float | None, exact: list[float], control: list[float], verdict: bool | None
) -> None:
    mean, error = paired_difference(control, exact)
    task = {"name": "t", "higher_is_better": higher, "chance": guess, "docs": len(exact)}
    scores: list[dict[str, Any]] = [
        {"task": "t", "arm": "exact", "score": sum(exact) / len(exact)},
        {"task": "t", "arm": "destroyed", "difference": mean, "difference_stderr": error},
    ]
    assert shows_something({"tasks": [task], "scores": scores}, "t") is verdict
    assert shows_something({"tasks": [task], "scores": scores[:1]}, "t") is None


def test_a_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "scores.json"
    score: Callable[..., Any] = scoring.TaskScorer.score
    calls: list[str] = []

    def counted(self: Any, method: Any, name: str) -> Any:
        calls.append(name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return score(self, method, name)

    monkeypatch.setattr(scoring.TaskScorer, "score", counted)
    with pytest.raises(KeyboardInterrupt):
        run_tasks(config(variants=("destroyed",)), out, QUIET)
    assert [s["arm"] for s in json.loads(out.read_text())["scores"]] == ["exact"]
    run_tasks(config(variants=("destroyed",)), out, QUIET)
    assert len(calls) == 3
    more = run_tasks(config(variants=("destroyed", "fp8-e4m3")), out, QUIET)
    assert [s["arm"] for s in more["scores"]] == ["exact", "destroyed", "fp8-e4m3"] and len(calls) == 4
    with pytest.raises(InputError, match=r"^out: .*scores\.json holds scores of another configuration: name another"):
        run_tasks(config(variants=("destroyed",), limit=3), out, QUIET)
    for content in ("[]", "{}", "x"):
        out.write_text(content)
        with pytest.raises(FormatError, match=r"scores\.json: holds no scores of tasks: name another file"):
            run_tasks(config(), out, QUIET)


def test_a_log_says_how_far_a_variant_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuvee.eval.progress.LINE_SECONDS", 0.0)
    monkeypatch.setattr("cuvee.eval.progress.TICK", 0.01)
    file = io.StringIO()
    run_tasks(config(tasks=("cuvee_kv_8",), variants=("destroyed",), limit=40), None, Console(file=file, width=200))
    said = file.getvalue()
    assert re.search(r"s  cuvee_kv_8: exact \(contexts: \d+ of 40, 0 of 2 steps done", said)
    assert re.search(r"s  cuvee_kv_8: destroyed \((contexts: \d+ of 40, )?1 of 2 steps done\)", said)
    assert re.search(r"^cuvee_kv_8, destroyed: 0\.\d{4}$", said, re.MULTILINE)


def test_a_run_that_is_told_to_stop_keeps_its_scores(tmp_path: Path) -> None:
    out = tmp_path / "scores.json"
    typed = [
        sys.executable,
        "-m",
        "cuvee",
        "tasks",
        "cuvee_kv_8",
        "--limit",
        "40",
        "--variants",
        "fp8-e4m3,kivi4,kivi2",
    ]
    with subprocess.Popen([*typed, "-o", str(out)], stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not out.exists():
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, said
    assert f"interrupted: {out} keeps what was scored" in said and "Traceback" not in said
    kept = [score["arm"] for score in json.loads(out.read_text())["scores"]]
    assert kept == ["exact", "fp8-e4m3", "kivi4", "kivi2"][: len(kept)] and 1 <= len(kept) < 4
    assert [path.name for path in tmp_path.iterdir()] == ["scores.json"]  # and no temporary file


def test_variants_that_finished_are_kept(tmp_path: Path) -> None:
    """A later task has no data: what was scored before it stays in the file, if the data is looked for in time."""
    with pytest.raises(InputError, match=r"^data: .* holds no kv-retrieval-75_keys\.jsonl\.gz: download it from"):
        run_tasks(config(tasks=("cuvee_kv_8", "cuvee_kv_uuid_75"), data=str(tmp_path)), tmp_path / "o.json", QUIET)
    assert not (tmp_path / "o.json").exists()  # found out before anything was scored
    with pytest.raises(InputError, match=r"^tasks: cuvee_lines_100 has a request of \d+ tokens, the model reads 2048"):
        run_tasks(config(tasks=("cuvee_kv_8", "cuvee_lines_100"), variants=("destroyed",)), tmp_path / "o.json", QUIET)
    assert [s["arm"] for s in json.loads((tmp_path / "o.json").read_text())["scores"]] == ["exact", "destroyed"]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"tasks": ()}, "tasks: must be at least one"),
        ({"variants": ("exakt",)}, r"variants: 'exakt' is not known; did you mean 'exact'\?"),
        ({"variants": ("kl",)}, "variants: 'kl' is not known"),
        ({"variants": ("kl=little",)}, "variants: must be kl=NUMBER, got 'kl=little'"),
        ({"variants": ("quality=high",)}, "variants: 'quality=high' is not known"),
        ({"metadata": ("lines",)}, "metadata: must be name=value, got 'lines'"),
        ({"data": "nowhere"}, "data: must be the folder with the files of the tasks, got nowhere"),
    ],
)
def test_wrong_configurations(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=f"^{match}"):
        config(**changes)


def test_a_codec_may_be_asked_for_a_number(books: Books, tmp_path: Path) -> None:
    books.profile.save(tmp_path / "p.safetensors")
    variants = ("bits=3", "step=0.5", "small")
    found = run_tasks(config(variants=variants, profile=str(tmp_path / "p.safetensors"), limit=2), None, QUIET)
    scores = {score["arm"]: score["bits_per_value"] for score in found["scores"]}
    assert list(scores) == ["exact", *variants] and len(set(scores.values())) == 4
    assert 2 < scores["bits=3"] < 4


def test_what_a_profile_does_not_reach_is_found_out_before_anything_is_scored(books: Books, tmp_path: Path) -> None:
    books.profile.with_curve([]).save(tmp_path / "p.safetensors")
    with pytest.raises(ProfileError, match="curve"):
        run_tasks(
            config(profile=str(tmp_path / "p.safetensors"), variants=("destroyed", "kl=0.001")),
            tmp_path / "o.json",
            QUIET,
        )
    assert not (tmp_path / "o.json").exists()


def test_a_profile_of_another_model(fitted: Callable[[str, str], Profile], tmp_path: Path) -> None:
    fitted("gqa", "layer").save(tmp_path / "p.safetensors")
    with pytest.raises(ProfileMismatchError):
        run_tasks(config(profile=str(tmp_path / "p.safetensors")), None, QUIET)


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "o.json"
    shared = (
        "tasks",
        "cuvee_lines_100",
        "--metadata",
        "lines=10",
        "--limit",
        2,
        "--variants",
        "exact,destroyed",
        "-o",
        out,
    )
    done = run(*map(str, shared))
    assert "destroyed" in done.stdout and "cuvee_lines_100: acc" in done.stdout
    again = run(*map(str, shared), "--json")
    assert json.loads(again.stdout) == json.loads(out.read_text())
    fails("tasks", "cuvee_lines_100", "--variants", "exakt", match="variants: 'exakt' is not known")
    fails("tasks", "cuvee_xquad", "--data", tmp_path / "nowhere", match="data: must be the folder")
    (tmp_path / sources.SOURCES["xquad"].file).write_text("{}")
    # These are found out after the model was loaded, which shows a bar.
    said = run("tasks", "cuvee_xquad", "--data", tmp_path, code=1).stderr.splitlines()[-1]
    assert re.match(
        r"error: .*xquad\.en\.json has 2 bytes instead of 609,383: it is truncated, or another version", said
    )
    said = run("tasks", "cuvee_xqad", code=1).stderr.splitlines()[-1]
    assert said.startswith("error: tasks: 'cuvee_xqad' is not known; did you mean 'cuvee_xquad'")
    # Of lm-eval's 15,000 tasks none is near, so only the groups are named.
    said = run("tasks", "nosuchtask", code=1).stderr.splitlines()[-1]
    assert said.startswith("error: tasks: 'nosuchtask' is not known; cuvee's groups are cuvee_local and cuvee_public")
    assert len(said) < 200
    misused("tasks")


def test_the_real_model_reads_its_cache(smollm2: tuple[Any, Any]) -> None:
    tasks, metadata = ("cuvee_reread_nll", "cuvee_lines_100"), ("lines=20",)
    found = run_tasks(
        config(model="smollm2", tasks=tasks, variants=("destroyed",), metadata=metadata, limit=2, dtype="bfloat16"),
        None,
        QUIET,
    )
    exact, destroyed = (s for s in found["scores"] if s["task"] == "cuvee_reread_nll")
    assert destroyed["score"] > exact["score"] + 2 and shows_something(found, "cuvee_reread_nll")
    exact, destroyed = (s for s in found["scores"] if s["task"] == "cuvee_lines_100")
    assert destroyed["score"] < 1 and len(exact["per_doc"]) == 2
