"""Task scores of methods, through lm-eval."""

from __future__ import annotations

import json
import logging
import random
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.every_model import build

from cuvee.calibration.corpus import BUNDLED_MODEL, load_bundled_model
from cuvee.codec.errors import InputError
from cuvee.eval import cached_reading
from cuvee.eval.baselines.quantizers import Destroyed, Uncompressed
from cuvee.eval.report.schema import Score, Task
from cuvee.eval.report.scoring import TaskList, TaskScorer, shows_something
from cuvee.eval.tasks import LINES_TASK, LOCAL_TASKS, TASKS_PATH

pytest.importorskip("lm_eval")
SETTINGS: dict[str, Any] = {"chunk_tokens": 256, "cache_dtype": "bfloat16", "batch_size": 4}


def scorer(books: Any, *tasks: str, limit: int | None = None, metadata: dict[str, str] | None = None) -> TaskScorer:
    return TaskScorer(books.model, BUNDLED_MODEL, TaskList(tasks, metadata, seed=1), limit=limit, **SETTINGS)


def test_a_group_stands_for_its_members(books: Any) -> None:
    assert sorted(scorer(books, "cuvee_local").names) == sorted(LOCAL_TASKS)


def test_a_programs_own_random_numbers_go_on(books: Any) -> None:
    def drawn() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002

    def seed() -> None:
        random.seed(5)
        np.random.seed(5)  # noqa: NPY002
        torch.manual_seed(5)

    scores = scorer(books, "cuvee_reread_nll", limit=1)
    seed()
    wanted = drawn()
    seed()
    scores.score(Uncompressed(), "cuvee_reread_nll")
    assert drawn() == wanted


def test_methods_of_a_task_share_its_exact_caches(books: Any, prefills: list[list[int]]) -> None:
    scores = scorer(books, "cuvee_kv_8", "cuvee_kv_16", limit=2)
    passes = []
    for name in ("cuvee_kv_8", "cuvee_kv_8", "cuvee_kv_16", "cuvee_kv_8"):  # another task's make room
        scores.score(Uncompressed(), name)
        passes.append(len(prefills))
    assert passes == [1, 1, 2, 3]


@pytest.mark.parametrize(("room", "rows"), [(10_000, [4, 1]), (450, [2, 2, 1]), (100, [1] * 5)])
def test_long_contexts_are_read_by_fewer_rows(
    room: int, rows: list[int], books: Any, prefills: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached_reading, "_PASS_TOKENS", room)
    scorer(books, "cuvee_kv_16", limit=5).score(Uncompressed(), "cuvee_kv_16")
    assert [*map(len, prefills)] == rows


def test_likelihoods_of_a_model_in_16_bits_are_added_in_32() -> None:
    """In bfloat16 a sum of 300 nats would be one of the multiples of 2."""
    model, _ = load_bundled_model(torch.bfloat16)
    tasks = TaskList(("cuvee_books_nll",), seed=1)
    scores = TaskScorer(model, BUNDLED_MODEL, tasks, **SETTINGS, limit=4)
    task, score = scores.score(Uncompressed(), "cuvee_books_nll")
    lines = (TASKS_PATH / "cuvee_books_nll.jsonl").read_text(encoding="utf-8").splitlines()[:4]
    words = [len(json.loads(line)["continuation"].split()) for line in lines]
    sums = torch.tensor([each * count for each, count in zip(score.per_doc or [], words, strict=True)])
    assert (sums > 128).all() and (sums - sums.bfloat16().float()).abs().max() > 0.05
    assert not task.higher_is_better and task.chance is None
    assert score.per_doc and score.score == pytest.approx(sum(score.per_doc) / 4) and score.stderr
    whole = TaskScorer(load_bundled_model()[0], BUNDLED_MODEL, tasks, **SETTINGS, limit=4)
    _, exact = whole.score(Uncompressed(), "cuvee_books_nll")
    assert score.per_doc == pytest.approx(exact.per_doc, rel=0.01)


def test_a_task_gets_its_metadata(books: Any) -> None:
    scores = scorer(books, LINES_TASK, metadata={"lines": "12"}, limit=2)
    task, score = scores.score(Uncompressed(), LINES_TASK)
    assert (task.metric, task.docs, task.chance) == ("acc", 2, 0.1) and len(score.per_doc or []) == 2
    _, alone = scores.score(Destroyed(), LINES_TASK, exact=replace(score, per_doc=None))  # nothing to pair with
    assert alone.difference == alone.score - score.score and alone.difference_stderr is None
    assert scores.score(Uncompressed(), LINES_TASK) == (task, score)


@pytest.mark.nightly  # lm-eval's index of its own tasks takes ten seconds
def test_unknown_tasks_are_named_with_a_hint() -> None:
    with pytest.raises(InputError, match=r"^tasks: 'cuvee_needle_129' is not known; did you mean .*cuvee_needle_128"):
        TaskList(("cuvee_kv_8", "cuvee_needle_129"), seed=1)


def test_a_task_may_be_a_file(books: Any, tmp_path: Path) -> None:
    """Such as lm-eval's own with local data: worked examples, and an answer that is generated."""
    docs = [{"question": f"Say {word}.", "answer": word} for word in ("kettle", "ladder", "mirror")]
    (tmp_path / "docs.jsonl").write_text("\n".join(map(json.dumps, docs)))
    text = f"""
        task: my_task
        dataset_path: json
        dataset_kwargs: {{data_files: {{test: {tmp_path / "docs.jsonl"}}}}}
        test_split: test
        output_type: generate_until
        doc_to_text: "Q: {{{{question}}}} A:"
        doc_to_target: answer
        fewshot_config: {{sampler: first_n, samples: [{{question: Say saddle., answer: saddle}}]}}
        num_fewshot: 1
        generation_kwargs: {{until: ["Q:"], max_gen_toks: 4}}
        metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
    """
    (tmp_path / "mine.yaml").write_text(textwrap.dedent(text))
    scores = scorer(books, str(tmp_path / "mine.yaml"), "cuvee_needle_128", limit=3)
    assert scores.names == ["my_task", "cuvee_needle_128"]
    task, score = scores.score(Uncompressed(), "my_task")
    assert (task.metric, task.docs, len(score.per_doc or [])) == ("exact_match", 3, 3)
    with pytest.raises(InputError, match=r"^tasks: must be names or YAML files, got other\.yaml, which is no file"):
        TaskList(("other.yaml",), seed=1)
    for text in (
        "task: [mine",
        f"task: mine\ndataset_path: json\ndataset_kwargs: {{data_files: {tmp_path}/mine.yaml}}",
    ):
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(
            InputError, match=r"^tasks: .*bad\.yaml does not describe a task with its data \(\w+Error: "
        ):
            TaskList((str(tmp_path / "bad.yaml"),), seed=1)


def test_data_that_cannot_be_downloaded_is_named_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs.yaml").write_text("task: theirs\ndataset_path: google/xquad\ntest_split: test\n")

    def unreachable(path: str, *given: Any, **more: Any) -> Any:
        raise ConnectionError(f"Couldn't reach {path!r} on the Hub")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    message = (
        r"^tasks: .*theirs.* cannot load their data \(Couldn't reach 'google/xquad' on the Hub\): .* a network, or"
    )
    with pytest.raises(InputError, match=message):
        TaskList((str(tmp_path / "theirs.yaml"),), seed=1)


def test_what_a_failing_task_printed_is_shown(
    books: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import lm_eval

    def fail(*args: Any, **kwargs: Any) -> None:
        print("the last words", file=sys.stderr)
        raise RuntimeError("out of memory")

    logging.getLogger("lm_eval").setLevel(logging.INFO)
    scores = scorer(books, "cuvee_kv_8")
    monkeypatch.setattr(lm_eval, "evaluate", fail, raising=False)
    with pytest.raises(RuntimeError, match="out of memory"):
        scores.score(Uncompressed(), "cuvee_kv_8")
    assert "the last words" in capsys.readouterr().err
    assert logging.getLogger("lm_eval").level == logging.INFO


def score_of(key: str, difference: float, stderr: float | None) -> Score:
    return Score(key, "t", 0.5, None, None, 16.0, 100, difference, stderr)


@pytest.mark.parametrize(
    ("controls", "guess", "higher", "verdict"),
    [
        ([], 0.2, True, None),
        ([score_of("destroyed", -0.3, None)], 0.2, True, None),  # a single document
        ([score_of("destroyed", -0.3, 0.1)], 0.2, True, True),
        ([score_of("destroyed", -0.3, 0.16)], 0.2, True, False),
        ([score_of("destroyed", -(0.1 + 0.2), 0.15)], 0.2, True, False),  # two errors, as rounded more
        ([score_of("destroyed", -0.3, 0.1), score_of("absent", -0.1, 0.1)], 0.2, True, False),
        ([score_of("destroyed", 0.3, 0.1)], 0.2, True, False),
        ([score_of("destroyed", 0.3, 0.1)], None, False, True),  # nats, of which fewer are better
        ([score_of("destroyed", -0.3, 0.1)], 0.45, True, False),  # the exact cache only guesses
    ],
)
def test_a_task_shows_something_if_every_control_loses(
    controls: list[Score], guess: float | None, higher: bool, verdict: bool | None
) -> None:
    task = Task("t", "acc", higher, 100, guess, "", "")
    assert shows_something(task, [score_of("bf16", 0.0, None), *controls]) is verdict


def test_models_with_states_are_scored_row_by_row(books: Any, prefills: list[list[int]]) -> None:
    """Padding would change a state."""
    model, _, _ = build("qwen3_next")
    model.resize_token_embeddings(books.model.config.vocab_size)
    tasks = TaskList(("cuvee_kv_8",), seed=1)
    TaskScorer(model, BUNDLED_MODEL, tasks, **SETTINGS, limit=3).score(Uncompressed(), "cuvee_kv_8")
    assert [*map(len, prefills)] == [1, 1, 1]
