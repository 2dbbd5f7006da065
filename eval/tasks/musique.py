"""MuSiQue in the form lm-eval wants: questions that need two to four of twenty paragraphs, answered in a few words.

Trivedi, Balasubramanian, Khot, Sabharwal: MuSiQue: Multihop Questions via Single-hop Question Composition, TACL 2022
(arXiv:2108.00573). The data is not part of cuvee.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cuvee.codec.errors import InputError
from cuvee.codec.support.plain_json import parse_json

__all__ = ["load", "normalize", "passages_of", "prompt", "score"]

_HOW = (
    "give MuSiQue's file, as in --metadata musique=musique_ans_v1.0_dev.jsonl; "
    "it comes from https://github.com/StonyBrookNLP/musique (CC BY 4.0)"
)
_FIELDS: dict[str, type] = {
    "id": str, "paragraphs": list, "question": str, "answer": str, "answer_aliases": list, "answerable": bool,
}  # fmt: skip
_TEXTS = ("title", "paragraph_text")


def load(musique: str | Path | None = None, **metadata: Any) -> dict[str, Any]:
    """Load the questions in a file of MuSiQue's published format, one JSON object per line.

    Args:
        musique: the file, relative to the working directory, with the fields `id`, `paragraphs` (each with `title`
            and `paragraph_text`), `question`, `answer`, `answer_aliases` and `answerable`. Others are not kept.
        metadata: whatever else lm-eval passes, which is ignored.

    Returns:
        The split "test" as a `datasets.Dataset` in memory.

    Raises:
        InputError: no file is given, there is no such file, or it has another format. Questions without an answer,
            as in the "full" variant of the data, are refused as well: they would need another metric.
    """
    from datasets import Dataset

    if musique is None:
        raise InputError(f"musique: cuvee_musique has no data of its own: {_HOW}")
    path = Path(musique)
    if not path.is_file():
        raise InputError(f"musique: no file {path}: {_HOW}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"musique: {path} is not UTF-8 text: {_HOW}") from error
    # Not splitlines(): JSON strings may contain U+2028 and other characters that it takes for the end of a line.
    questions = [_question(line, f"{path}, line {i}") for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not questions:
        raise InputError(f"musique: {path} is empty: {_HOW}")
    return {"test": Dataset.from_list(questions)}


def _question(line: str, where: str) -> dict[str, Any]:
    try:
        data = parse_json(line)
    except ValueError as error:
        raise InputError(f"musique: {where} is not JSON: {_HOW}") from error
    if not isinstance(data, dict):
        raise InputError(f"musique: {where} is not a JSON object: {_HOW}")
    for field, kind in _FIELDS.items():
        if not isinstance(data.get(field), kind):
            raise InputError(f"musique: {where} has no field {field!r} of type {kind.__name__}: {_HOW}")
    if not data["answerable"]:
        raise InputError(f"musique: {where} is a question without an answer: use the variant musique_ans, not full")
    paragraphs = data["paragraphs"]
    if not all(isinstance(p, dict) and all(isinstance(p.get(name), str) for name in _TEXTS) for p in paragraphs):
        raise InputError(f"musique: {where} has a paragraph without {' and '.join(_TEXTS)}: {_HOW}")
    if not all(isinstance(alias, str) for alias in data["answer_aliases"]):
        raise InputError(f"musique: {where} has an answer alias that is not a string: {_HOW}")
    kept = {name: data[name] for name in ("id", "question", "answer", "answer_aliases")}
    return {**kept, "paragraphs": [{name: p[name] for name in _TEXTS} for p in paragraphs]}


def prompt(doc: Mapping[str, Any]) -> str:
    """All paragraphs in the order of the file, then the question: the cache holds them all, whichever are needed."""
    paragraphs, _, _ = passages_of(doc)
    task = "Answer the question from the passages above, in as few words as possible."
    return "\n\n".join([*paragraphs, f"{task}\nQuestion: {doc['question']}\nAnswer:"])


def passages_of(question: Mapping[str, Any]) -> tuple[list[str], str, str]:
    """The passages, the question and its first answer, of MuSiQue's format or of one with `ctxs` and `answers`.

    Raises:
        IndexError, KeyError, TypeError: it is of neither.
    """
    if "ctxs" in question:
        passages = [f"{p['title']}\n{p['text']}".strip() for p in question["ctxs"]]
        return passages, question["question"], question["answers"][0]
    passages = [f"{p['title']}\n{p['paragraph_text']}" for p in question["paragraphs"]]
    return passages, question["question"], question["answer"]


def score(doc: Mapping[str, Any], results: list[str]) -> dict[str, float]:
    """F1 of words and exact match, each the best over the answer and its aliases, as in MuSiQue's own script."""
    (given,) = results
    accepted = [doc["answer"], *doc["answer_aliases"]]
    return {
        "f1": max(_f1(normalize(given), normalize(answer)) for answer in accepted),
        "exact_match": max(float(normalize(given) == normalize(answer)) for answer in accepted),
    }


def normalize(answer: str) -> list[str]:
    """Lower-case words without punctuation and articles (the rule of SQuAD, arXiv:1606.05250)."""
    bare = "".join(c for c in answer.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def _f1(given: list[str], answer: list[str]) -> float:
    if not given or not answer:
        return float(given == answer)
    common = sum((Counter(given) & Counter(answer)).values())
    return 2 * common / (len(given) + len(answer))
