"""Tasks for lm-eval that need their context, made to tell a good KV codec from a bad one (see `README.md` here).

What a report needs to know about a task is read from its YAML file.
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
    "cuvee_xquad_f1",
    "cuvee_kv_uuid_75",
    "cuvee_lines_100",
    "cuvee_manyshot_banking77",
    "cuvee_manyshot_clinc150",
    "cuvee_wikitext2",
    "cuvee_gsm8k_nll",
    "cuvee_musique_nll",
)
"""The tasks on public data, which is not part of cuvee: all but `cuvee_lines_100` load it (`sources`)."""


def is_ours(task_name: str) -> bool:
    """Whether one of the YAML files here is that of a task of this name."""
    return task_name in _configs()


def shorter(task_name: str) -> str | None:
    """The setting that gives a task less context, as `--metadata` takes it; None if there is none."""
    return cast("str | None", _config(task_name)["metadata"].get("shorter")) if is_ours(task_name) else None


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
        raise ImportError("the tasks need lm-eval: pip install 'cuvee[eval]'") from missing
    manager = TaskManager(include_path=str(TASKS_PATH), include_defaults=False)
    return {name: cast(dict[str, Any], manager.task_index[name].cfg) for name in manager.all_subtasks}
