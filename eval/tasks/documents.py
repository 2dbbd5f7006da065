"""Functions for the YAML files: load documents from the files next to them, and compute a likelihood as a metric."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cuvee.codec.errors import InputError
from cuvee.eval.tasks import TASKS_PATH

__all__ = ["load", "nats_per_word"]


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


def nats_per_word(doc: Mapping[str, Any], results: list[tuple[float, bool]]) -> dict[str, float]:
    """Negative log-likelihood of the continuation per word, which does not depend on the tokenizer.

    Args:
        doc: has a field `continuation`.
        results: one pair of the log-likelihood and whether it was the greedy choice.
    """
    ((log_likelihood, _),) = results
    return {"nats_per_word": -log_likelihood / len(doc["continuation"].split())}
