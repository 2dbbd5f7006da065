"""The local tasks: what their documents promise, and that only a model with its cache can do them."""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from cuvee.calibration.corpus import load_bundled_model
from cuvee.codec.errors import InputError
from cuvee.eval import tasks
from cuvee.eval.baselines.quantizers import Destroyed, Kivi, Uncompressed
from cuvee.eval.lm import CuveeLM
from cuvee.eval.tasks import LINES_TASK, LOCAL_TASKS, TASKS_PATH, documents, facts_of

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
    assert set(index.all_subtasks) == {*LOCAL_TASKS, LINES_TASK} and index.all_groups == ["cuvee_local"]
    assert tuple(index.task_index["cuvee_local"].cfg["task"]) == LOCAL_TASKS
    assert {path.stem for path in TASKS_PATH.glob("*.jsonl")} == set(LOCAL_TASKS)


def test_facts() -> None:
    for name in (*LOCAL_TASKS, LINES_TASK):
        facts = facts_of(name)
        assert facts is not None
        docs = documents.line_retrieval()["test"].to_list() if name == LINES_TASK else committed(name)
        chances = {None} if name in NLL_TASKS else {1 / len(doc["choices"]) for doc in docs}
        assert {facts.chance} == chances
        metric = ("nats_per_word", False) if name in NLL_TASKS else ("acc", True)
        assert (facts.metric, facts.higher_is_better) == metric
        assert facts.description.endswith(".") and len(facts.description) <= 120 and "\n" not in facts.description
        assert facts.shorter == ("lines=50" if name == LINES_TASK else None)
    assert facts_of("cuvee_local") is None


def test_without_lm_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks._facts.cache_clear()
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(ImportError, match=r"the tasks need lm-eval: pip install 'cuvee\[eval\]'"):
        facts_of("cuvee_kv_8")


# --- the documents


def test_the_documents_are_those_whose_properties_are_known() -> None:
    """They fit 512 positions of the bundled model, and their prose is that of the evaluation texts."""
    content = b"".join(path.read_bytes() for path in sorted(TASKS_PATH.glob("*.jsonl")))
    assert hashlib.sha256(content).hexdigest() == "b93d699be05ea96a6fa32d9d9b9eb5ce7cddc645c804d7ec45d27a612363f6f3"


def test_lines() -> None:
    count = 25
    docs = documents.line_retrieval(lines=str(count), version=1.0)["test"].to_list()
    assert len(docs) == 200 and {doc["answer"] for doc in docs} == set(range(10))
    for doc in docs[:20]:
        listed = dict(re.findall(r"line ([\w-]+): REGISTER_CONTENT is <(\d{5})>\n", doc["context"]))
        (asked,) = re.findall(r"line ([\w-]+): REGISTER_CONTENT is <$", doc["question"])
        assert len(listed) == count and doc["choices"][doc["answer"]] == listed[asked]
        assert set(doc["choices"]) <= set(listed.values()) and len(set(doc["choices"])) == 10
    alone = documents.line_retrieval(lines=count, context="absent")["test"].to_list()
    assert alone == [{**doc, "context": "", "question": doc["question"].lstrip()} for doc in docs]


def test_the_lines_are_those_of_earlier_reports() -> None:
    plain = json.dumps(documents.line_retrieval()["test"].to_list()).encode()
    assert hashlib.sha256(plain).hexdigest() == "8611ee95124dffbfac9ae18ee23bd788603455c1d87f5e14aaa966dbff78ea2d"


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [
        (documents.line_retrieval, {"lines": 9}, "lines: must be 10 to 1024, got 9"),
        (documents.line_retrieval, {"lines": 1.5}, "lines: must be 10 to 1024, got 1.5"),
        (documents.line_retrieval, {"context": "none"}, "context: must be given or absent, got 'none'"),
        (documents.load, {"documents": "none.jsonl"}, r"documents: no file none\.jsonl in .*: install cuvee again"),
    ],
)
def test_documents_that_cannot_be_made(make: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        make(**given)


def test_nats_per_word() -> None:
    assert documents.nats_per_word({"continuation": "three short words"}, [(-6.0, False)]) == {"nats_per_word": 2.0}


# --- in lm-eval


@pytest.fixture
def lm() -> CuveeLM:
    model, tokenizer = load_bundled_model()
    return CuveeLM(pretrained=model, tokenizer=tokenizer, method=Uncompressed(), batch_size=4)


def test_what_is_asked_about_lines_is_the_document(lm: CuveeLM) -> None:
    given: dict[str, Any] = {"task_manager": manager(lines=12), "limit": 2, "log_samples": True, "bootstrap_iters": 0}
    found: Any = simple_evaluate(lm, tasks=[LINES_TASK], **given)
    assert found["n-samples"][LINES_TASK]["effective"] == 2 and "acc,none" in found["results"][LINES_TASK]
    for sample in found["samples"][LINES_TASK]:
        doc, asked = sample["doc"], sample["arguments"]
        pairs = [tuple(one.values()) for one in asked.values()] if isinstance(asked, dict) else asked
        assert [tuple(pair)[:2] for pair in pairs] == [
            (doc["context"] + doc["question"], one) for one in doc["choices"]
        ]
        assert sample["target"] == doc["answer"]


def test_a_context_longer_than_the_model_is_refused_with_the_setting_that_helps(lm: CuveeLM) -> None:
    match = r"^tasks: cuvee_lines_100 has .* tokens, the model reads 512: give it less .* --metadata lines=50; only"
    with pytest.raises(InputError, match=match):
        evaluate(lm, [LINES_TASK], 1)


def test_a_task_of_lm_eval_reads_local_files(lm: CuveeLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As eval/tasks/README.md says: a YAML file includes the task, and names other data."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "own").mkdir()
    rows = [{"context": "Ann founded Ely.", "question": "Who founded Ely?", "answers": {"text": ["Ann"]}}] * 2
    (tmp_path / "xquad.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    readme = (TASKS_PATH / "README.md").read_text()
    (yaml,) = re.findall(r"```yaml\n(.*?)```", readme, re.DOTALL)
    yaml = yaml.replace("LM_EVAL/", f"{Path(lm_eval.__file__).parent}/", 1).replace("/data/", f"{tmp_path}/")
    (tmp_path / "own" / "mine.yaml").write_text(yaml)
    index = TaskManager(include_path=str(tmp_path / "own"), include_defaults=False)
    found: Any = simple_evaluate(lm, tasks=["my_xquad"], task_manager=index, bootstrap_iters=0)
    assert found["n-samples"]["my_xquad"]["effective"] == 2 and 0 <= found["results"]["my_xquad"]["f1,none"] <= 1


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
    guesses = {name: (facts and facts.chance) or 0.0 for name in CHOICE_TASKS for facts in [facts_of(name)]}
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
