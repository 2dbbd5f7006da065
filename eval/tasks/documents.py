"""Functions for the YAML files: load or make documents, and compute a likelihood as a metric."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

from cuvee.codec.errors import InputError
from cuvee.eval.tasks import TASKS_PATH

__all__ = ["line_retrieval", "load", "nats_per_word"]

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
DOCUMENTS = 200

_SEED = 7


def load(documents: str, **metadata: Any) -> dict[str, Any]:
    """Load the documents of one task, as lm-eval's `custom_dataset` wants them.

    Args:
        documents: the name of a JSONL file next to the YAML file. With `data_files`, lm-eval would look in the working
            directory.
        metadata: other arguments of lm-eval, which are ignored.

    Returns:
        The split "test" as a `datasets.Dataset` in memory.

    Raises:
        InputError: there is no such file.
    """
    from datasets import Dataset

    path = TASKS_PATH / documents
    if not path.is_file():
        raise InputError(f"documents: no file {documents} in {TASKS_PATH}: install cuvee again")
    with path.open(encoding="ascii") as lines:
        return {"test": Dataset.from_list([json.loads(line) for line in lines])}


def line_retrieval(*, lines: Any = 100, context: str = "given", **metadata: Any) -> dict[str, Any]:
    """Make lines with a name and a number each, and one of the names: its number against nine others of the same text.

    In the way of LongChat's line retrieval (Li et al.: How Long Can Open-Source LLMs Truly Promise on Context Length?,
    2023). All is drawn with a seed, so every run gets the same documents in the same order.

    Args:
        lines: how many lines make a context, a number or its digits.
        context: "given", or "absent" for the question alone.
        metadata: other arguments of lm-eval, which are ignored.

    Returns:
        The split "test" as a `datasets.Dataset` in memory.

    Raises:
        InputError: an argument is out of range.
    """
    from datasets import Dataset

    names = [f"{quality}-{thing}" for quality in QUALITIES for thing in THINGS]
    digits = str(lines)
    count = int(digits) if digits.isascii() and digits.isdigit() else 0
    if not CHOICES <= count <= len(names):
        raise InputError(f"lines: must be {CHOICES} to {len(names)}, got {lines!r}")
    if context not in ("given", "absent"):
        raise InputError(f"context: must be given or absent, got {context!r}")
    rng = random.Random(_SEED)
    docs = []
    for _ in range(DOCUMENTS):
        numbers = [str(number) for number in rng.sample(range(10_000, 100_000), count)]
        starts = [f"line {name}: REGISTER_CONTENT is <" for name in rng.sample(names, count)]
        asked = rng.randrange(count)
        choices = rng.sample([number for number in numbers if number != numbers[asked]], CHOICES - 1)
        answer = rng.randrange(CHOICES)
        choices.insert(answer, numbers[asked])
        listed = "".join(f"{start}{number}>\n" for start, number in zip(starts, numbers, strict=True))
        question = f"\nNow one of these lines again.\n{starts[asked]}"
        docs.append(
            {
                "context": f"Every line below has a name and a number.\n\n{listed}" if context == "given" else "",
                "question": question if context == "given" else question.lstrip(),
                "choices": choices,
                "answer": answer,
            }
        )
    rng.shuffle(docs)
    return {"test": Dataset.from_list(docs)}


def nats_per_word(doc: Mapping[str, Any], results: list[tuple[float, bool]]) -> dict[str, float]:
    """Negative log-likelihood of the continuation per word, which does not depend on the tokenizer.

    Args:
        doc: has a field `continuation`.
        results: one pair of the log-likelihood and whether it was the greedy choice.
    """
    ((log_likelihood, _),) = results
    return {"nats_per_word": -log_likelihood / len(doc["continuation"].split())}
