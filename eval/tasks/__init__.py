"""Tasks for lm-eval that need their context, made to tell a good KV codec from a bad one (see `README.md` here).

What a report needs to know about a task is read from its YAML file.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, cast

from cuvee.codec.errors import InputError

__all__ = ["LOCAL_TASKS", "TASKS_PATH", "chance", "description", "main_metric"]

TASKS_PATH = Path(__file__).parent

LOCAL_TASKS = (
    "cuvee_kv_8",
    "cuvee_kv_16",
    "cuvee_kv_32",
    "cuvee_needle_128",
    "cuvee_needle_256",
    "cuvee_needle_440",
    "cuvee_passages",
    "cuvee_books_nll",
    "cuvee_reread_nll",
)
"""The tasks of the group `cuvee_local`, in the order of a report."""


def chance(task_name: str) -> float | None:
    """The score of a guess, or None if there is no such thing (likelihoods, free answers).

    Raises:
        InputError: none of our tasks has that name.
        ImportError: lm-eval is not installed.
    """
    return cast("float | None", _config(task_name)["metadata"].get("chance"))


def description(task_name: str) -> str:
    """What the model has to do, in one line. Errors: see `chance`."""
    return cast(str, _config(task_name)["metadata"]["description"])


def main_metric(task_name: str) -> tuple[str, bool]:
    """The metric to report, by lm-eval's name, and whether more of it is better. Errors: see `chance`."""
    first = _config(task_name)["metric_list"][0]
    return first["metric"], first["higher_is_better"]


def _config(task_name: str) -> dict[str, Any]:
    tasks = _configs()
    if task_name not in tasks:
        raise InputError(f"task_name: no task {task_name!r}; there are {', '.join(tasks)}")
    return tasks[task_name]


@cache
def _configs() -> dict[str, dict[str, Any]]:
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as missing:
        raise ImportError("the tasks need lm-eval: install cuvee[eval]") from missing
    manager = TaskManager(include_path=str(TASKS_PATH), include_defaults=False)
    return {name: cast(dict[str, Any], manager.task_index[name].cfg) for name in manager.all_subtasks}
