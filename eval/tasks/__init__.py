"""Tasks for lm-eval that need their context and so distinguish good KV codecs from bad ones (see `README.md` here).

Reports read the facts about a task from its YAML file.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, cast

from cuvee.codec.errors import InputError

__all__ = ["LOCAL_TASKS", "PUBLIC_TASKS", "TASKS_PATH", "chance", "description", "is_ours", "main_metric", "shorter"]

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

PUBLIC_TASKS = (
    "cuvee_xquad",
    "cuvee_kv_uuid_75",
    "cuvee_lines_100",
    "cuvee_wikitext2",
    "cuvee_musique_nll",
)
"""The tasks on public data, which is not part of cuvee: all but `cuvee_lines_100` load it (`sources`)."""


def is_ours(task_name: str) -> bool:
    """Return whether a task of this name has a YAML file here."""
    return task_name in _configs()


def shorter(task_name: str) -> str | None:
    """Return the setting that gives a task less context, in the form of `--metadata`, or None."""
    return cast("str | None", _config(task_name)["metadata"].get("shorter")) if is_ours(task_name) else None


def chance(task_name: str) -> float | None:
    """Return the score of a guess, or None for likelihoods and free answers.

    Raises:
        InputError: none of our tasks has that name.
        ImportError: lm-eval is not installed.
    """
    return cast("float | None", _config(task_name)["metadata"].get("chance"))


def description(task_name: str) -> str:
    """Return the task of the model in one line. Errors: see `chance`."""
    return cast(str, _config(task_name)["metadata"]["description"])


def main_metric(task_name: str) -> tuple[str, bool]:
    """Return the metric to report, by lm-eval's name, and whether higher is better. Errors: see `chance`."""
    first = _config(task_name)["metric_list"][0]
    return first["metric"], first["higher_is_better"]


def _config(task_name: str) -> dict[str, Any]:
    tasks = _configs()
    if task_name not in tasks:
        raise InputError(f"task_name: must be one of {', '.join(tasks)}, got {task_name!r}")
    return tasks[task_name]


@cache
def _configs() -> dict[str, dict[str, Any]]:
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as missing:
        raise ImportError("the tasks need lm-eval: pip install 'cuvee[eval]'") from missing
    manager = TaskManager(include_path=str(TASKS_PATH), include_defaults=False)
    return {name: cast(dict[str, Any], manager.task_index[name].cfg) for name in manager.all_subtasks}
