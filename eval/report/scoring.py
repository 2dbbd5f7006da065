"""Task scores: lm-eval on a model whose caches go through a method."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import io
import logging
import math
import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cuvee.calibration.corpus import load_tokenizer
from cuvee.codec.errors import InputError
from cuvee.codec.support.suggest import suggestion
from cuvee.eval.cached_reading import ExactCaches, rows_of
from cuvee.eval.methods import UNCOMPRESSED, baseline
from cuvee.eval.quality import Method
from cuvee.eval.report.schema import Score, Task
from cuvee.eval.stats import exceeds, paired_difference
from cuvee.eval.tasks import LINES_TASK, NO_DATA, TASKS_PATH, facts_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from cuvee.eval.lm import CuveeLM

__all__ = ["ABSENT", "CONTROLS", "TaskList", "TaskScorer", "shows_something"]

ABSENT = "absent"  # the exact cache of the question alone, for tasks with a separate context
CONTROLS = ("destroyed", ABSENT)
_CLEAR = 2  # standard errors
_EXACT_SHARE = 8  # of a CPU's memory, for contexts: each method would compute them anew for minutes


class TaskList:
    """Tasks of lm-eval with their documents, which need no model.

    Args:
        tasks: names of tasks that come with lm-eval or cuvee, or YAML files of tasks. A group stands for its members.
        metadata: for tasks that need it.
        seed: of everything that lm-eval draws.

    Attributes:
        names: of the tasks, with groups replaced by their members.

    Raises:
        ImportError: lm-eval is not installed.
        InputError: an unknown task.
    """

    def __init__(self, tasks: Sequence[str], metadata: Mapping[str, str] | None = None, *, seed: int) -> None:
        try:
            from lm_eval.tasks import TaskManager
        except ImportError as error:
            raise ImportError("task scores need lm-eval: pip install 'cuvee[eval]', or leave the tasks out") from error
        self.seed = seed
        index = {"include_path": str(TASKS_PATH), "metadata": dict(metadata or {})}
        self._manager: Any = TaskManager(**index, include_defaults=False)
        names = list(self._manager.all_tasks)
        named = [name for name in tasks if not name.endswith(".yaml")]
        if not all(self._manager.match_tasks([name]) for name in named):
            # Reading the index of lm-eval's own tasks takes seconds, so this is done only if they are asked for.
            self._manager = TaskManager(**index)
            names = list(dict.fromkeys([*names, *self._manager.all_tasks]))
        for name in named:
            if not self._manager.match_tasks([name]):
                raise InputError(f"tasks: {name!r} is not known; {_suggested_tasks(name, names)}")
        for name in tasks:
            if name not in named and not Path(name).is_file():
                raise InputError(f"tasks: must be names or YAML files, got {name}, which is no file")
        self._files: dict[str, str] = {}  # of the tasks that have one, by their names
        with _quiet():
            try:
                for name in tasks:
                    if name not in named:
                        self._files |= dict.fromkeys(self._load_file(name)["tasks"], name)
                self.names: list[str] = list(self.load(tasks)["tasks"])
            except OSError as error:
                raise InputError(f"tasks: {', '.join(tasks)} cannot load their data ({error}): {NO_DATA}") from error

    def _load_file(self, name: str) -> Any:
        """The tasks of a YAML file."""
        try:
            return self.load([name])
        except OSError:
            raise
        except Exception as error:  # YAML, lm-eval and datasets raise errors of any class for what is wrong in it
            why = " ".join(f"{type(error).__name__}: {error}".split())
            raise InputError(
                f"tasks: {name} does not describe a task with its data ({why}): correct it (eval/tasks/README.md)"
            ) from error

    def load(self, names: Sequence[str]) -> Any:
        """The tasks in the form that lm-eval's `evaluate` takes."""
        loaded = self._manager.load([self._files.get(name, name) for name in names])
        for task in loaded["tasks"].values():
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=self.seed)
        return loaded


class TaskScorer:
    """Scores any number of methods on tasks with one model.

    Args:
        model: a transformers causal language model.
        model_name: where its tokenizer comes from (see `load_tokenizer`).
        tasks: the tasks.
        limit: how many documents of each task to use at most.
        chunk_tokens, cache_dtype: as in `CuveeLM`.
        batch_size: rows of a forward pass, if a task's contexts are short.

    Attributes:
        names: of the tasks, with groups replaced by their members.
        docs: how many documents of each are scored.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        model_name: str,
        tasks: TaskList,
        *,
        limit: int | None = None,
        chunk_tokens: int,
        cache_dtype: str,
        batch_size: int,
    ) -> None:
        self._model = model
        self._model_name = model_name
        self._tasks, self.names = tasks, tasks.names
        self._limit = limit
        self._chunk_tokens, self._cache_dtype, self._most_rows = chunk_tokens, cache_dtype, batch_size
        self._scored = ""  # the task whose exact caches are kept

    @cached_property
    def docs(self) -> dict[str, int]:  # noqa: D102, an attribute
        loaded = self._tasks.load(self.names)["tasks"]
        return {name: min(len(task.eval_docs), self._limit or len(task.eval_docs)) for name, task in loaded.items()}

    def first(self, name: str) -> object:
        """Return the first document of a task, to compare it with that of other metadata."""
        with _quiet(), _seeded(self._tasks.seed):
            return next(iter(self._tasks.load([name])["tasks"][name].eval_docs), None)

    @cached_property
    def _lm(self) -> CuveeLM:
        from cuvee.eval.lm import CuveeLM

        return CuveeLM(
            pretrained=self._model,
            tokenizer=load_tokenizer(self._model_name),
            method=baseline(UNCOMPRESSED),
            chunk_tokens=self._chunk_tokens,
            cache_dtype=self._cache_dtype,
        )

    def _begin(self, name: str) -> None:
        """Get ready for a task: its rows are as many as fit in a forward pass, and no other task's caches are kept."""
        task: Any = self._tasks.load([name])["tasks"][name]
        task.build_all_requests(limit=self._limit)
        lengths = [len(self._lm.tok_encode(str(request.args[0]))) for request in task.instances]
        most = 1 if self._lm.layout.states else self._most_rows  # padding would change a state
        self._lm.batch_size_per_gpu = rows_of(min(max(lengths, default=0), self._lm.max_length), most)
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self._lm.exact_caches = ExactCaches(memory // _EXACT_SHARE if self._model.device.type == "cpu" else 0)
        self._scored = name

    def score(self, method: Method, name: str, key: str = "", exact: Score | None = None) -> tuple[Task, Score]:
        """Score one method on one task.

        Args:
            method: the method.
            name: of the task.
            key: of the method, for the score.
            exact: the score of the exact cache, from which the difference is taken, paired if possible.

        Raises:
            InputError: the task has no contexts, or some that are too long for the model.
        """
        import lm_eval

        with _quiet(), _seeded(self._tasks.seed):
            if name != self._scored:
                self._begin(name)
            self._lm.use(method)
            # Not `simple_evaluate`: it does the same, but looks through the whole environment each time, git included.
            results: Any = lm_eval.evaluate(self._lm, self._tasks.load([name]), limit=self._limit, log_samples=True)
        measured = results["results"][name]
        ours = facts_of(name)
        metric, higher = (ours.metric, ours.higher_is_better) if ours else _first_metric(results, name)
        column = next(key for key in measured if key.partition(",")[0] == metric)
        samples = [s for s in results["samples"][name] if s.get("filter", "none") == column.partition(",")[2]]
        per_doc = [s[metric] for s in sorted(samples, key=lambda s: s["doc_id"])]
        scalar = all(isinstance(value, int | float | bool | np.number) for value in per_doc)
        stderr = measured.get(column.replace(",", "_stderr,", 1))
        task = Task(
            name,
            metric,
            higher,
            len(per_doc),
            ours.chance if ours else None,
            ours.description if ours else "",
            hashlib.sha256("".join(sorted(s["doc_hash"] for s in samples)).encode()).hexdigest(),
        )
        value, by_doc = float(measured[column]), [float(one) for one in per_doc] if scalar else None
        difference, error = None, None
        if exact is not None:
            difference = value - exact.score
            if exact.per_doc and by_doc:
                difference, error = paired_difference(by_doc, exact.per_doc)
        return task, Score(
            key, name, value, float(stderr) if isinstance(stderr, int | float) else None, by_doc,
            self._lm.bits_per_value, len(per_doc), difference, error,
        )  # fmt: skip


def shows_something(task: Task, scores: Sequence[Score]) -> bool | None:
    """Return whether a task distinguishes the exact cache from none; None without a control, or with one document.

    It does if each control loses more than two standard errors, and the exact cache is that far above a guess.
    """
    by_key = {score.key: score for score in scores if score.task == task.name}
    controls = [by_key[name] for name in CONTROLS if name in by_key]
    sign, lost = 1 if task.higher_is_better else -1, []
    for control in controls:
        if control.difference is None or control.difference_stderr is None:
            return None
        loses = sign * control.difference < 0
        lost.append(loses and exceeds(control.difference, _CLEAR * control.difference_stderr))
    if not controls:
        return None
    if task.chance is None:
        return all(lost)
    error = math.sqrt(task.chance * (1 - task.chance) / task.docs)
    return all(lost) and sign * (by_key[UNCOMPRESSED].score - task.chance) > _CLEAR * error


def _suggested_tasks(name: str, names: Sequence[str]) -> str:
    """The end of an error about an unknown task: the nearest names, or cuvee's own. lm-eval knows 15,000 names."""
    groups = f"cuvee's are the group cuvee_local and {LINES_TASK}; `lm-eval ls tasks` lists lm-eval's"
    return suggestion(name, names, most=3) if difflib.get_close_matches(name, names, 1) else groups


def _first_metric(results: Mapping[str, Any], name: str) -> tuple[str, bool]:
    metric = results["configs"][name]["metric_list"][0]["metric"]
    return metric, bool(results["higher_is_better"][name].get(metric, True))


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the global generators, which tasks draw from; they go on afterwards as if nothing had been drawn."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng():
            random.seed(seed)
            np.random.seed(seed)  # noqa: NPY002
            torch.manual_seed(seed)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide what lm-eval prints and logs, unless it fails."""
    printed = io.StringIO()
    loggers = [logging.getLogger(name) for name in ("lm_eval", "transformers")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
            yield
    except BaseException as error:
        if not isinstance(error, InputError | KeyboardInterrupt):
            sys.stderr.write(printed.getvalue())
        raise
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
