"""The local tasks: what their documents promise, and that only a model with its cache can do them."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from typing import Any

import pytest
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from cuvee.calibration.corpus import load_bundled_model
from cuvee.codec.errors import InputError
from cuvee.eval import tasks
from cuvee.eval.baselines.quantizers import Destroyed, Kivi, Uncompressed
from cuvee.eval.lm import CuveeLM
from cuvee.eval.tasks import (
    LOCAL_TASKS,
    PUBLIC_TASKS,
    TASKS_PATH,
    chance,
    description,
    documents,
    main_metric,
)

CHOICE_TASKS = LOCAL_TASKS[:7]
NLL_TASKS = LOCAL_TASKS[7:]
LIMIT = 16  # documents of a multiple-choice task that are scored here
LIMIT_CHANCE = 100  # of 16, 5 right would pass for chance, which is 2; of 100, no more than 22 do
LIMIT_NLL = 6


def committed(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (TASKS_PATH / f"{name}.jsonl").read_text("ascii").splitlines()]


def manager(**metadata: Any) -> TaskManager:
    return TaskManager(include_path=str(TASKS_PATH), include_defaults=False, metadata=metadata)


def evaluate(lm: Any, names: list[str], limit: int | None = None, **metadata: Any) -> dict[str, dict[str, Any]]:
    results: Any = simple_evaluate(lm, tasks=names, task_manager=manager(**metadata), limit=limit, log_samples=False)
    found: dict[str, dict[str, Any]] = results["results"]
    return found


# --- what the report reads


def test_names() -> None:
    index = manager()
    assert set(index.all_subtasks) == {*LOCAL_TASKS, *PUBLIC_TASKS}
    assert index.all_groups == ["cuvee_local", "cuvee_public"]
    assert tuple(index.task_index["cuvee_local"].cfg["task"]) == LOCAL_TASKS
    assert {path.stem for path in TASKS_PATH.glob("*.jsonl")} == set(LOCAL_TASKS)


@pytest.mark.parametrize("name", LOCAL_TASKS)
def test_chance_is_one_of_the_choices(name: str) -> None:
    of_choices = {1 / len(doc["choices"]) for doc in committed(name)} if name in CHOICE_TASKS else {None}
    assert of_choices == {chance(name)}


def test_main_metric() -> None:
    metrics = {name: main_metric(name) for name in LOCAL_TASKS}
    choice, nll = dict.fromkeys(CHOICE_TASKS, ("acc", True)), dict.fromkeys(NLL_TASKS, ("nats_per_word", False))
    assert metrics == {**choice, **nll}


def test_description() -> None:
    texts = [description(name) for name in (*LOCAL_TASKS, *PUBLIC_TASKS)]
    assert len(set(texts)) == len(texts)
    assert all(text.endswith(".") and len(text) <= 120 and "\n" not in text for text in texts)
    assert "32 listed pairs" in description("cuvee_kv_32")


@pytest.mark.parametrize("function", [chance, description, main_metric])
def test_unknown_task(function: Any) -> None:
    with pytest.raises(InputError, match=r"^task_name: must be one of cuvee_books_nll, .*, got 'cuvee_local'"):
        function("cuvee_local")


def test_without_lm_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks._configs.cache_clear()
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(ImportError, match=r"the tasks need lm-eval: pip install 'cuvee\[eval\]'"):
        chance("cuvee_kv_8")


# --- the documents


def test_the_documents_are_those_whose_properties_are_known() -> None:
    """They fit 512 positions of the bundled model, and their prose is that of the evaluation texts."""
    content = b"".join(path.read_bytes() for path in sorted(TASKS_PATH.glob("*.jsonl")))
    assert hashlib.sha256(content).hexdigest() == "b93d699be05ea96a6fa32d9d9b9eb5ce7cddc645c804d7ec45d27a612363f6f3"


def test_load() -> None:
    loaded = documents.load("cuvee_kv_8.jsonl", version=1.0, pretrained="a model")
    assert list(loaded) == ["test"]
    assert loaded["test"].to_list() == committed("cuvee_kv_8")


def test_load_without_the_file() -> None:
    with pytest.raises(InputError, match=r"^documents: no file nothing\.jsonl in .*: install cuvee again"):
        documents.load("nothing.jsonl")


def test_nats_per_word() -> None:
    assert documents.nats_per_word({"continuation": "three short words"}, [(-6.0, False)]) == {"nats_per_word": 2.0}


# --- scores, of documents and a model that do not change


@pytest.fixture(scope="module")
def scores() -> dict[str, dict[str, dict[str, Any]]]:
    """scores[method][task][metric]"""
    model, tokenizer = load_bundled_model()
    lm = CuveeLM(pretrained=model, tokenizer=tokenizer, method=Uncompressed(), batch_size=8)
    found = {}
    for name, method in (("exact", Uncompressed()), ("destroyed", Destroyed())):
        lm.use(method)
        limit = LIMIT if name == "exact" else LIMIT_CHANCE
        found[name] = evaluate(lm, list(CHOICE_TASKS), limit) | evaluate(lm, list(NLL_TASKS), LIMIT_NLL)
    lm.use(Kivi(2))
    found["2 bits"] = evaluate(lm, ["cuvee_reread_nll"], LIMIT_NLL)
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("name", CHOICE_TASKS)
def test_exact_cache_is_far_above_chance(scores: Any, name: str) -> None:
    assert scores["exact"][name]["acc,none"] > 0.65


@pytest.mark.nightly
def test_destroyed_cache_leaves_chance(scores: Any) -> None:
    guesses = {name: chance(name) or 0.0 for name in CHOICE_TASKS}
    variances = {name: guess * (1 - guess) / LIMIT_CHANCE for name, guess in guesses.items()}
    found = {name: scores["destroyed"][name]["acc,none"] for name in CHOICE_TASKS}
    for name in CHOICE_TASKS:
        assert abs(found[name] - guesses[name]) < 3 * math.sqrt(variances[name]), name
    total = sum(found.values()) - sum(guesses.values())
    assert abs(total) < 3 * math.sqrt(sum(variances.values()))


@pytest.mark.nightly
def test_destroyed_cache_cannot_be_re_read(scores: Any) -> None:
    exact, rough, destroyed = (scores[m]["cuvee_reread_nll"] for m in ("exact", "2 bits", "destroyed"))
    errors = [result["nats_per_word_stderr,none"] for result in (exact, destroyed)]
    assert exact["nats_per_word,none"] + 0.3 < rough["nats_per_word,none"] < destroyed["nats_per_word,none"] - 1
    assert destroyed["nats_per_word,none"] - exact["nats_per_word,none"] > 5 * math.hypot(*errors)
