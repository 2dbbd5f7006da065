"""Tasks on public data whose answer lies in a long context: documents as the YAML files beside this one want them.

A document is what a prompt cache holds, and a question about it:

    context ("" without it)  |  question  |  one of the choices, or the continuation

All is drawn with a seed, so every run and every machine gets the same documents in the same order.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

from cuvee.codec.errors import InputError
from cuvee.eval.tasks import sources

__all__ = [
    "OpenQuestion",
    "key_values",
    "line_retrieval",
    "musique",
    "open_questions",
    "wikitext2",
    "xquad",
]

QUALITIES = """
    old blue broken little silver iron wooden quiet heavy golden bitter narrow hollow scarlet gentle frozen crooked
    ancient yellow stubborn ragged polished dusty noble tender wicked foreign hidden solemn painted patient rusty
""".split()
THINGS = """
    basket kettle ladder mirror saddle bridge candle hammer pillow cradle barrel cottage ribbon anchor trumpet bonnet
    carriage pistol chimney shovel curtain needle cellar button feather statue wagon compass spindle garland bucket
    tobacco
""".split()

CHOICES = 10
DOCUMENTS = 200  # where the data would give more
PARAGRAPHS_PER_ARTICLE = 5  # in all of XQuAD
CONTEXT_WORDS = 2_735  # about 3,584 tokens of SmolLM2
SCORED_WORDS = 391  # about 512
QUESTION_WORDS = 16  # of WikiText-2 that are left when there is no context

_SEED = 7


def xquad(
    data: str | None = None, *, passages: Any = 16, context: str = "given", any_version: Any = False, **metadata: Any
) -> dict[str, Any]:
    """XQuAD in English: a question about one of several paragraphs, all others being of other articles.

    Artetxe, Ruder, Yogatama: On the Cross-lingual Transferability of Monolingual Representations, ACL 2020
    (arXiv:1910.11856).

    Args:
        data: the folder with the file.
        passages: how many paragraphs make a context. There is one question for each paragraph of the data.
        context: "given" or "absent", to see what the question alone is worth.
        any_version: see `read_bytes`.
        metadata: whatever else lm-eval passes, which is ignored.

    Returns:
        The split "test" as a `datasets.Dataset` in memory.

    Raises:
        CorruptError, InputError: see `read_bytes`; or an argument is out of range.
    """
    rng = random.Random(_SEED)
    questions = _xquad_questions(data, passages, any_version, rng)
    return _dataset([question.document() for question in questions], context, rng)


def _xquad_questions(data: str | None, passages: Any, any_version: Any, rng: random.Random) -> list[OpenQuestion]:
    count = _at_least_one("passages", passages)
    paragraphs = _xquad_paragraphs(data, any_version)
    most = len(paragraphs) - PARAGRAPHS_PER_ARTICLE + 1
    if count > most:
        raise InputError(f"passages: the data has {most} paragraphs that fit together, got {count}")
    found = []
    for index, (text, questions) in enumerate(paragraphs):
        article = index // PARAGRAPHS_PER_ARTICLE
        others = [p for i, (p, _) in enumerate(paragraphs) if i // PARAGRAPHS_PER_ARTICLE != article]
        chosen = rng.sample(others, count - 1)
        chosen.insert(rng.randrange(count), text)
        question, answer = rng.choice(questions)
        found.append(OpenQuestion(tuple(chosen), question, answer))
    return found


def _xquad_paragraphs(data: str | None, any_version: Any) -> list[tuple[str, list[tuple[str, str]]]]:
    """Paragraphs in the order of the file, each with its questions and their answers."""
    found = sources.read_json("xquad", data, any_version)
    try:
        return [
            (p["context"], [(q["question"], q["answers"][0]["text"]) for q in p["qas"]])
            for article in found["data"]
            for p in article["paragraphs"]
        ]
    except (KeyError, IndexError, TypeError) as error:
        raise sources.malformed("xquad", data, f"is not in SQuAD's format ({type(error).__name__}: {error})") from error


def key_values(
    data: str | None = None, *, context: str = "given", any_version: Any = False, **metadata: Any
) -> dict[str, Any]:
    """A JSON object of 75 pairs of random UUIDs, and one of its keys: its value against nine others of the object.

    Liu et al.: Lost in the Middle, TACL 2024 (arXiv:2307.03172). Arguments and errors: see `xquad`.
    """
    rows = sources.read_objects("kv_uuid", data, any_version)
    rng = random.Random(_SEED)
    docs = []
    for number, found in enumerate(rows, 1):
        try:
            pairs = [(str(key), str(value)) for key, value in found["ordered_kv_records"]]
            key, value = found["key"], found["value"]
            others = [other for _, other in pairs if other != value]
            choices = rng.sample(others, CHOICES - 1)
        except (KeyError, TypeError, ValueError) as error:
            raise sources.malformed(
                "kv_uuid", data, f"holds no {CHOICES} pairs, key and value in line {number}"
            ) from error
        answer = rng.randrange(CHOICES)
        choices.insert(answer, value)
        listed = ",\n ".join(f'"{k}": "{v}"' for k, v in pairs)
        docs.append(
            {
                "context": f"A JSON object, and one pair of it again.\n\n{{{listed}}}\n\n",
                "question": f'{{"{key}": "',
                "choices": choices,
                "answer": answer,
            }
        )
    return _dataset(docs, context, rng)


def line_retrieval(*, lines: Any = 100, context: str = "given", **metadata: Any) -> dict[str, Any]:
    """Lines with a name and a number each, and one of the names: its number against nine others of the same text.

    Made here, in the way of LongChat's line retrieval (Li et al.: How Long Can Open-Source LLMs Truly Promise on
    Context Length?, 2023).

    Args:
        lines: how many lines make a context.
        context: see `xquad`.
        metadata: whatever else lm-eval passes, which is ignored.

    Raises:
        InputError: `lines` is out of range.
    """
    count = _at_least_one("lines", lines)
    names = [f"{quality}-{thing}" for quality in QUALITIES for thing in THINGS]
    if not CHOICES <= count <= len(names):
        raise InputError(f"lines: must be {CHOICES} to {len(names)}, got {count}")
    rng = random.Random(_SEED)
    docs = []
    for _ in range(DOCUMENTS):
        numbers = [str(number) for number in rng.sample(range(10_000, 100_000), count)]
        starts = [f"line {name}: REGISTER_CONTENT is <" for name in rng.sample(names, count)]
        asked = rng.randrange(count)
        choices = rng.sample([number for number in numbers if number != numbers[asked]], CHOICES - 1)
        answer = rng.randrange(CHOICES)
        choices.insert(answer, numbers[asked])
        docs.append(
            {
                "context": "Every line below has a name and a number.\n\n"
                + "".join(f"{start}{number}>\n" for start, number in zip(starts, numbers, strict=True)),
                "question": f"\nNow one of these lines again.\n{starts[asked]}",
                "choices": choices,
                "answer": answer,
            }
        )
    return _dataset(docs, context, rng)


def wikitext2(
    data: str | None = None,
    *,
    words: Any = CONTEXT_WORDS,
    context: str = "given",
    any_version: Any = False,
    **metadata: Any,
) -> dict[str, Any]:
    """WikiText-2's validation text in pieces: the last 391 words of each are scored (Merity et al., arXiv:1609.07843).

    Arguments and errors: see `xquad`; `words` is the number of words before the scored ones.
    """
    count = _at_least_one("words", words)
    if count <= QUESTION_WORDS:
        raise InputError(f"words: must be more than {QUESTION_WORDS}, got {count}")
    lines = sources.read_text("wikitext2", data, any_version).split("\n")
    text = "\n".join(line.strip() for line in lines).strip()
    ends = [match.end() for match in re.finditer(r"\S+", text)]
    if len(ends) <= count + SCORED_WORDS:
        raise InputError(f"words: the text has {len(ends)} words, got {count} and {SCORED_WORDS} that are scored")
    docs: list[dict[str, Any]] = []
    start = 0
    for first in range(0, len(ends) - count - SCORED_WORDS, count + SCORED_WORDS):
        given, middle, end = (ends[first + n - 1] for n in (count - QUESTION_WORDS, count, count + SCORED_WORDS))
        docs.append(
            {
                "context": text[start:given].lstrip(),
                "question": text[given:middle],
                "continuation": text[middle:end],
            }
        )
        start = end
    return _dataset(docs, context, random.Random(_SEED))


def musique(
    data: str | None = None, *, context: str = "given", any_version: Any = False, **metadata: Any
) -> dict[str, Any]:
    """MuSiQue's questions over twenty paragraphs (Trivedi et al., TACL 2022, arXiv:2108.00573), and the answer.

    Arguments and errors: see `xquad`.
    """
    questions = _musique_questions(data, any_version)
    return _dataset([question.document() for question in questions], context, random.Random(_SEED))


def _musique_questions(data: str | None, any_version: Any) -> list[OpenQuestion]:
    rows = sources.read_objects("musique", data, any_version)
    found = []
    for number, row in enumerate(rows, 1):
        try:
            passages = tuple(f"{p['title']}\n{p['paragraph_text']}" for p in row["paragraphs"])
            found.append(OpenQuestion(passages, row["question"], row["answer"]))
        except (KeyError, TypeError) as error:
            raise sources.malformed("musique", data, f"is not in MuSiQue's format, question {number}") from error
    return found


# --- what they share


@dataclass(frozen=True, slots=True)
class OpenQuestion:
    """A question about passages, and its answer."""

    passages: tuple[str, ...]
    question: str
    answer: str

    def document(self) -> dict[str, Any]:
        """Return the document whose continuation is the answer."""
        return {
            "context": "".join(f"{passage}\n\n" for passage in self.passages),
            "question": f"Answer in as few words as possible.\nQuestion: {self.question}\nAnswer:",
            "continuation": f" {self.answer}",
            "answer": self.answer,
        }


def open_questions(
    name: str, data: str | None = None, *, passages: int = 16, any_version: Any = False
) -> list[OpenQuestion]:
    """The questions of XQuAD or MuSiQue, in the order of the data.

    Args:
        name: "xquad" or "musique".
        data: the folder with the file.
        passages: how many a question of XQuAD comes with. MuSiQue brings its own.
        any_version: see `read_bytes`.

    Raises:
        CorruptError, InputError: as for `xquad` and `musique`.
    """
    if name == "xquad":
        return _xquad_questions(data, passages, any_version, random.Random(_SEED))
    return _musique_questions(data, any_version)


def _dataset(docs: list[dict[str, Any]], context: str, rng: random.Random) -> dict[str, Any]:
    """Documents in an order in which the first few are of all parts of the data."""
    from datasets import Dataset

    if context not in ("given", "absent"):
        raise InputError(f"context: must be given or absent, got {context!r}")
    rng.shuffle(docs)
    if context == "absent":
        docs = [{**doc, "context": "", "question": doc["question"].lstrip()} for doc in docs]
    return {"test": Dataset.from_list(docs)}


def _at_least_one(name: str, value: Any) -> int:
    """A count, which may come from a command line as text."""
    text = str(value)
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise InputError(f"{name}: must be a whole number of at least 1, got {value!r}")
    return int(text)
