"""Tasks on public data: loaders on small files of the same formats, whatever can be wrong with the data, scores."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import re
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from cuvee.calibration.corpus import load_bundled_model
from cuvee.codec.errors import CorruptError, InputError
from cuvee.eval.baselines.quantizers import Uncompressed
from cuvee.eval.lm import CuveeLM
from cuvee.eval.lm_command import complete_arguments
from cuvee.eval.tasks import PUBLIC_TASKS, TASKS_PATH, chance, is_ours, main_metric, public, shorter, sources

LOADERS: dict[str, Callable[..., Any]] = {
    "xquad": public.xquad,
    "kv_uuid": public.key_values,
    "wikitext2": public.wikitext2,
    "musique": public.musique,
}
SMALL: dict[str, dict[str, Any]] = {"xquad": {"passages": 3}, "wikitext2": {"words": 40}}
CHOICE = [name for name in PUBLIC_TASKS if "lines" in name or "kv" in name]


def squad(articles: int = 4) -> dict[str, Any]:
    def paragraph(article: int, number: int) -> dict[str, Any]:
        name = f"Town{article}{number}"
        asked = {"question": f"Who founded {name}?", "answers": [{"text": f"Ann {name}", "answer_start": 0}]}
        return {"context": f"{name} was founded by Ann {name}.", "qas": [asked]}

    made = [{"title": f"T{a}", "paragraphs": [paragraph(a, p) for p in range(5)]} for a in range(articles)]
    return {"version": "1.1", "data": made}


def pairs(count: int, seed: int) -> dict[str, Any]:
    drawn = random.Random(seed)
    records = [[f"{drawn.getrandbits(64):016x}", f"{drawn.getrandbits(64):016x}"] for _ in range(count)]
    return {"ordered_kv_records": records, "key": records[3][0], "value": records[3][1]}


def jsonl(items: list[Any]) -> str:
    return "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small file of the format of every source."""

    def path(name: str) -> Path:
        return tmp_path / sources.SOURCES[name].file

    path("xquad").write_text(json.dumps(squad()))
    path("kv_uuid").write_bytes(gzip.compress(jsonl([pairs(12, seed) for seed in range(6)]).encode()))
    path("wikitext2").write_text(" \n = Title = \n \n" + "".join(f" word{i} goes{i} on{i} .{i}\n" for i in range(600)))
    # JSON may hold a line separator as it is; it ends no line of the file.
    paragraphs = [{"title": f"P{i}", "paragraph_text": f"P{i} lies\u2028in Q{i}."} for i in range(3)]
    path("musique").write_text(
        jsonl([{"question": f"Where is P{i}?", "answer": f"Q{i}", "paragraphs": paragraphs} for i in range(3)])
    )
    return tmp_path


def load(name: str, data: Path, **arguments: Any) -> list[dict[str, Any]]:
    made = LOADERS[name](str(data), any_version=True, **{**SMALL.get(name, {}), **arguments})
    return list(made["test"].to_list())


# --- the YAML files


def test_names() -> None:
    manager = TaskManager(include_path=str(TASKS_PATH), include_defaults=False)
    assert set(manager.task_index["cuvee_public"].cfg["task"]) == set(PUBLIC_TASKS)
    assert all(is_ours(name) for name in PUBLIC_TASKS) and not is_ours("cuvee_public") and not is_ours("piqa")
    assert {name: chance(name) for name in PUBLIC_TASKS if name in CHOICE} == dict.fromkeys(CHOICE, 0.1)
    assert {main_metric(name) for name in PUBLIC_TASKS if name in CHOICE} == {("acc", True)}
    nll = set(PUBLIC_TASKS) - set(CHOICE)
    assert {main_metric(name) for name in nll} == {("nats_per_word", False)}


@pytest.mark.parametrize("name", PUBLIC_TASKS)
def test_what_the_advice_for_a_shorter_context_says_works(name: str, folder: Path) -> None:
    setting = shorter(name)
    if name in ("cuvee_kv_uuid_75", "cuvee_musique_nll"):  # whose contexts are as the data has them
        assert setting is None
        return
    assert setting is not None
    key, _, value = setting.partition("=")
    # passages=8 or words=1000 need more than the small files have; the argument must exist all the same.
    loader = {"xquad": public.xquad, "lines": public.line_retrieval, "wikitext2": public.wikitext2}[name.split("_")[1]]
    assert key in (loader.__kwdefaults__ or {})
    assert int(value) < int((loader.__kwdefaults__ or {})[key])


# --- the documents


@pytest.mark.parametrize("name", [*LOADERS])
def test_documents_are_the_same_each_time_and_the_context_can_be_left_out(name: str, folder: Path) -> None:
    docs = load(name, folder)
    assert docs == load(name, folder) and len(docs) >= 1
    alone = load(name, folder, context="absent")
    assert [doc["context"] for doc in alone] == [""] * len(docs)
    assert [doc["question"] for doc in alone] == [doc["question"].lstrip() for doc in docs]
    assert all(doc["context"] and doc["context"] not in doc["question"] for doc in docs)
    with pytest.raises(InputError, match=r"^context: must be given or absent, got 'none'"):
        load(name, folder, context="none")


def test_xquad(folder: Path) -> None:
    docs = load("xquad", folder)
    assert len(docs) == 20
    for doc in docs:
        passages = doc["context"].strip().split("\n\n")
        town = re.findall(r"Who founded (\w+)\?", doc["question"])[0]
        assert len(passages) == 3 and doc["answer"] == f"Ann {town}" and doc["continuation"] == f" Ann {town}"
        assert sum(doc["answer"] in passage for passage in passages) == 1
        assert sum(passage.startswith(town[:-1]) for passage in passages) == 1  # the others are of other articles
        assert doc["question"].endswith("\nAnswer:")
    places = {
        doc["context"]
        .strip()
        .split("\n\n")
        .index(next(p for p in doc["context"].strip().split("\n\n") if doc["answer"] in p))
        for doc in docs
    }
    assert places == {0, 1, 2}
    with pytest.raises(InputError, match=r"^passages: the data has 16 paragraphs that fit together, got 17"):
        load("xquad", folder, passages=17)
    for wrong in (0, "many", -1, 1.5):
        with pytest.raises(InputError, match=r"^passages: must be a whole number of at least 1"):
            load("xquad", folder, passages=wrong)


def test_key_values(folder: Path) -> None:
    docs = load("kv_uuid", folder)
    assert len(docs) == 6
    for doc in docs:
        listed = json.loads(re.findall(r"\{.*\}", doc["context"], re.DOTALL)[0])
        key = re.findall(r'^\{"(\w+)": "$', doc["question"])[0]
        assert len(listed) == 12 and len(set(doc["choices"])) == 10
        assert doc["choices"][doc["answer"]] == listed[key]
        assert set(doc["choices"]) <= set(listed.values())


@pytest.mark.parametrize("count", [10, 25])
def test_line_retrieval(count: int) -> None:
    docs = public.line_retrieval(lines=str(count), version=1.0)["test"].to_list()
    assert len(docs) == 200
    for doc in docs[:20]:
        listed = dict(re.findall(r"line ([\w-]+): REGISTER_CONTENT is <(\d{5})>\n", doc["context"]))
        asked = re.findall(r"line ([\w-]+): REGISTER_CONTENT is <$", doc["question"])[0]
        assert len(listed) == count and doc["choices"][doc["answer"]] == listed[asked]
        assert set(doc["choices"]) <= set(listed.values()) and len(set(doc["choices"])) == 10
    assert {doc["answer"] for doc in docs} == set(range(10))
    for wrong in (9, 5000):
        with pytest.raises(InputError, match=r"^lines: must be 10 to \d+, got"):
            public.line_retrieval(lines=wrong)


def test_wikitext2(folder: Path) -> None:
    docs = load("wikitext2", folder)
    text = (folder / "wikitext2_valid.txt").read_text().split()
    assert len(docs) == len(text) // (40 + 391)
    for doc in docs:
        words = [doc[part].split() for part in ("context", "question", "continuation")]
        assert list(map(len, words)) == [24, 16, 391]
        start = text.index(words[0][-1]) - 23
        joined = doc["context"] + doc["question"] + doc["continuation"]
        assert joined.split() == text[start : start + 431] and "\n" in joined
    assert len({doc["continuation"] for doc in docs}) == len(docs)
    with pytest.raises(InputError, match=r"^words: the text has 2403 words, got 5000 and 391"):
        load("wikitext2", folder, words=5000)
    with pytest.raises(InputError, match=r"^words: must be more than 16"):
        load("wikitext2", folder, words=16)


def test_musique(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docs = load("musique", folder)
    monkeypatch.setenv("HOME", str(folder))
    assert len(docs) == 3 and load("musique", Path("~")) == docs
    for doc in docs:
        place = re.findall(r"Where is P(\d)\?", doc["question"])[0]
        assert doc["context"] == "".join(f"P{i}\nP{i} lies\u2028in Q{i}.\n\n" for i in range(3))
        assert doc["continuation"] == f" Q{place}"


# --- files that are missing, damaged, or of another version


@pytest.mark.parametrize("name", [*LOADERS])
def test_a_missing_file(name: str, folder: Path) -> None:
    source = sources.SOURCES[name]
    (folder / source.file).unlink()
    match = rf"^data: .* holds no {re.escape(source.file)}: download it from https://.* \({re.escape(source.license)}\)"
    with pytest.raises(InputError, match=match):
        load(name, folder)
    with pytest.raises(InputError, match=rf"^data: must be the folder that holds {source.file}, got None: download it"):
        LOADERS[name](None)


@pytest.mark.parametrize("name", [*LOADERS])
def test_another_version_is_refused(name: str, folder: Path) -> None:
    """Small files are too short; of the right size, but with another hash, they are refused as well."""
    source = sources.SOURCES[name]
    path = folder / source.file
    with pytest.raises(
        CorruptError, match=rf"{re.escape(source.file)} has [\d,]+ bytes instead of [\d,]+: it is trunc"
    ) as short:
        sources.read_bytes(name, folder)
    path.write_bytes(path.read_bytes().ljust(source.size))
    with pytest.raises(
        CorruptError, match=rf"{re.escape(source.file)} has the SHA-256 [0-9a-f]{{64}} instead of"
    ) as other:
        sources.read_bytes(name, folder)
    for failure in (short, other):
        assert source.sha256 in str(failure.value) and source.origin in str(failure.value)
        assert "--metadata any_version=true" in str(failure.value)


def test_the_known_version_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, source in sources.SOURCES.items():
        content = (folder / source.file).read_bytes()
        known = replace(source, size=len(content), sha256=hashlib.sha256(content).hexdigest())
        monkeypatch.setitem(sources.SOURCES, name, known)
    for name, loader in LOADERS.items():
        assert loader(str(folder), version=1.0, **SMALL.get(name, {}))["test"].to_list() == load(name, folder)


@pytest.mark.parametrize("cut", [0, 5, 30, -9, -1])
def test_a_truncated_gz(cut: int, folder: Path) -> None:
    path = folder / sources.SOURCES["kv_uuid"].file
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CorruptError, match=r"truncated, or another version"):
        public.key_values(str(folder))
    with pytest.raises(CorruptError, match=r"kv-retrieval-75_keys\.jsonl\.gz (cannot be unpacked|does not hold)"):
        load("kv_uuid", folder)


def test_a_gz_unpacks_to_no_more_than_it_may(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is beyond the limit, no more is unpacked than it takes to notice."""
    path = folder / sources.SOURCES["kv_uuid"].file
    path.write_bytes(gzip.compress(bytes(4 * sources.MAX_UNPACKED_BYTES)))
    tracemalloc.start()
    try:
        with pytest.raises(
            CorruptError, match=r"unpacks to more than 67,108,864 bytes.*download it again from https://"
        ):
            load("kv_uuid", folder)
        assert tracemalloc.get_traced_memory()[1] < 2.5 * sources.MAX_UNPACKED_BYTES
    finally:
        tracemalloc.stop()
    monkeypatch.setattr(sources, "MAX_UNPACKED_BYTES", 100)
    path.write_bytes(gzip.compress(bytes(100)))
    assert sources.read_bytes("kv_uuid", folder, True) == bytes(100)


def packed(data: bytes) -> bytes:
    """Compress without the time of day, which would give a case another name in each of pytest's processes."""
    return gzip.compress(data, mtime=0)


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("xquad", b"\xff", "is not UTF-8 text: .* at byte 0"),
        ("xquad", b"[" * 100_000, "is not JSON: it is nested deeper"),
        (
            "xquad",
            b'{"data": [{"paragraphs": [{"context": "x", "qas": [{"question": "?", "answers": []}]}]}]}',
            "SQuAD",
        ),
        ("kv_uuid", packed(b'{"ordered_kv_records": [["a", "b"]], "key": "a", "value": "b"}'), "holds no 10 pairs"),
        ("kv_uuid", packed(b"{}\n{"), "is no JSON in line 2"),
        ("musique", b"[1]", "does not hold JSON objects"),
        ("musique", b'{"question": "?"}', "is not in MuSiQue's format, question 1"),
    ],
)
def test_a_file_of_another_format(name: str, content: bytes, match: str, folder: Path) -> None:
    path = folder / sources.SOURCES[name].file
    path.write_bytes(content)
    with pytest.raises(CorruptError, match=rf"{re.escape(str(path))} .*{match}.*download it again from https://"):
        load(name, folder)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^data: must be the folder that holds xquad.*, got .*nowhere"):
        public.xquad(str(tmp_path / "nowhere"))
    (tmp_path / "xquad.en.json").write_text("{}")
    with pytest.raises(InputError, match=r"^any_version: must be true or false, got 'perhaps'"):
        public.xquad(str(tmp_path), any_version="perhaps")


# --- in lm-eval


@pytest.fixture(scope="module")
def lm() -> CuveeLM:
    model, tokenizer = load_bundled_model()
    model.config.max_position_embeddings = 2048  # the tasks are longer than what it was trained on
    return CuveeLM(pretrained=model, tokenizer=tokenizer, method=Uncompressed(), batch_size=4)


def evaluate(lm: CuveeLM, names: list[str], limit: int | None = None, **metadata: Any) -> Any:
    manager = TaskManager(include_path=str(TASKS_PATH), include_defaults=False, metadata=metadata)
    return simple_evaluate(lm, tasks=names, task_manager=manager, limit=limit, log_samples=True, bootstrap_iters=0)


def test_every_task_runs(lm: CuveeLM, folder: Path) -> None:
    """On small files, with the exact cache."""
    lm.use(Uncompressed())
    small = {"passages": 2, "lines": 10, "words": 20}
    found = evaluate(lm, ["cuvee_public"], 2, data=str(folder), any_version=True, **small)
    assert set(found["results"]) >= set(PUBLIC_TASKS)
    for name in PUBLIC_TASKS:
        metric, _ = main_metric(name)
        assert found["n-samples"][name]["effective"] == 2 and f"{metric},none" in found["results"][name]
        for sample in found["samples"][name]:
            doc = sample["doc"]
            prompts = {arguments["arg_0"] for arguments in _arguments(sample)}
            assert prompts == {doc["context"] + doc["question"]}
            if name in CHOICE:
                ends = [arguments["arg_1"] for arguments in _arguments(sample)]
                assert ends == doc["choices"] and sample["target"] == doc["answer"]


def _arguments(sample: dict[str, Any]) -> list[dict[str, Any]]:
    given = sample["arguments"]
    return (
        list(given.values())
        if isinstance(given, dict)
        else [dict(zip(("arg_0", "arg_1"), a, strict=False)) for a in given]
    )


def test_a_context_longer_than_the_model(lm: CuveeLM, folder: Path) -> None:
    match = (
        r"^tasks: cuvee_lines_100 has a request of \d+ tokens, the model reads 2048: give it less context, as with "
        r"--metadata lines=50; only with truncation=True"
    )
    with pytest.raises(InputError, match=match):
        evaluate(lm, ["cuvee_lines_100"], 1)
    paragraphs = [{"title": "P", "paragraph_text": "It is long. " * 900}]
    text = jsonl([{"question": "?", "answer": "No", "paragraphs": paragraphs}])
    (folder / sources.SOURCES["musique"].file).write_text(text)
    with pytest.raises(InputError, match=r"^tasks: cuvee_musique_nll has .* reads 2048: only with truncation=True"):
        evaluate(lm, ["cuvee_musique_nll"], 1, data=str(folder), any_version=True)


def test_the_folder_on_the_command_line(tmp_path: Path) -> None:
    ours = ["--include_path", str(TASKS_PATH), "--model", "cuvee", "--tasks", "a"]
    told = ["--metadata", json.dumps({"data": str(tmp_path)})]
    assert complete_arguments(["--tasks", "a", "--data", str(tmp_path)]) == ["run", *ours, *told]
    assert complete_arguments(["run", "--tasks", "a", f"--data={tmp_path}"]) == ["run", *ours, *told]
    for wrong in (["--data"], ["--data="], ["--data", str(tmp_path / "nowhere")]):
        with pytest.raises(InputError, match=r"^--data: must be the folder with the files of the tasks, got '"):
            complete_arguments(["--tasks", "a", *wrong])
