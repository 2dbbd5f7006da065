"""Tasks for lm-eval that need their context and so distinguish good KV codecs from bad ones (see `README.md` here).

Reports read the facts about a task from its YAML file.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["LINES_TASK", "LOCAL_TASKS", "NO_DATA", "TASKS_PATH", "TaskFacts", "facts_of"]

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
LINES_TASK = "cuvee_lines_100"  # of no group: too long for the bundled model
NO_DATA = (
    "lm-eval's own tasks download their data once, to Hugging Face's cache: run this where there is a network, or let "
    "a task read local files (eval/tasks/README.md)"
)
"""The remedy where the data of a task cannot be loaded."""


@dataclass(frozen=True, slots=True)
class TaskFacts:
    """What the YAML file of one of our tasks says.

    Attributes:
        metric: to report, by lm-eval's name; `higher_is_better` is its direction.
        chance: the score of a guess; None for likelihoods.
        description: of what the model is to do, in one line.
        shorter: the setting that gives the task less context, in the form of `--metadata`.
    """

    metric: str
    higher_is_better: bool
    chance: float | None
    description: str
    shorter: str | None


def facts_of(task_name: str) -> TaskFacts | None:
    """Return the facts about one of our tasks; None for all other names.

    Raises:
        ImportError: lm-eval is not installed.
    """
    return _facts().get(task_name)


@cache
def _facts() -> dict[str, TaskFacts]:
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as missing:
        raise ImportError("the tasks need lm-eval: pip install 'cuvee[eval]'") from missing
    manager = TaskManager(include_path=str(TASKS_PATH), include_defaults=False)
    found = {}
    for name in manager.all_subtasks:
        config = manager.task_index[name].cfg
        (metric,), says = config["metric_list"], config["metadata"]
        found[name] = TaskFacts(
            metric["metric"], metric["higher_is_better"], says.get("chance"), says["description"], says.get("shorter")
        )
    return found
