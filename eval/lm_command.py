"""`cuvee eval`: lm-eval's own command line, with the model `cuvee` and cuvee's tasks."""

from __future__ import annotations

import sys

import torch

from cuvee.codec.errors import InputError
from cuvee.eval.lm import CuveeLM  # which registers the model
from cuvee.eval.tasks import NO_DATA, TASKS_PATH

__all__ = ["complete_arguments", "run_cli"]

_HELP = """
cuvee's own arguments:
  --model_args          of the model cuvee, which is the default; beside those of hf:
    profile=FILE        a learned profile
    quality=NAME        lossless, high, balanced (default with a profile) or small; or one of kl=, bits=, ratio=, step=
    method=NAME         a baseline in place of a codec, such as fp8-e4m3
    chunk_tokens=N      tokens coded together (default 256)
    cache_dtype=DTYPE   dtype in which chunks are coded (default: the model's)
    truncation=True     cut contexts that are too long at the left, in place of an error
"""


def run_cli(args: list[str]) -> int:
    """Run lm-eval's own command line with the model `cuvee` registered, and return the exit status.

    As in lm-eval, the word `run` may be left out. If no model is named, `run` takes `cuvee`; if no device is, it takes
    the CPU where there is no GPU. All commands also look for tasks in cuvee's own folder, unless `--include_path` names
    another one. After a run with the model `cuvee`, the last line tells the quality, the bits per value and the ratio.

    Args:
        args: without the program's name, such as `["--model_args", "pretrained=…,quality=balanced", "--tasks", "…"]`.

    Raises:
        InputError: a task is not known, or its data cannot be downloaded.
    """
    from lm_eval.__main__ import cli_evaluate

    before, CuveeLM.last_summary = sys.argv, ""
    sys.argv = ["lm-eval", *complete_arguments(args)]
    try:
        cli_evaluate()
        if CuveeLM.last_summary:
            print(CuveeLM.last_summary)
    except ConnectionError as error:
        raise InputError(f"--tasks: {error}: {NO_DATA}") from error
    except ValueError as error:
        unknown = str(error).removeprefix("Tasks not found: ")
        if unknown == str(error):
            raise
        raise InputError(f"--tasks: not known: {unknown}; `cuvee eval ls tasks` lists them") from error
    except SystemExit as exit_:
        if not exit_.code and {"-h", "--help"} & {*args} and args[0] not in ("ls", "validate"):
            print(_HELP)
        if isinstance(exit_.code, str):
            print(exit_.code, file=sys.stderr)
            return 1
        return exit_.code or 0
    finally:
        sys.argv = before
    return 0


def complete_arguments(args: list[str]) -> list[str]:
    """Add what `run_cli` promises before the user's own arguments, so that these override it."""
    if not args or args[0] in ("-h", "--help") or args == ["run"]:
        return args  # which print help
    if args[0] not in ("run", "ls", "validate"):
        args = ["run", *args]
    defaults = {"include_path": str(TASKS_PATH)}
    if args[0] == "run":
        defaults["model"] = "cuvee"
        if not torch.cuda.is_available():  # lm-eval's own default is cuda:0
            defaults["device"] = "cpu"
    decided = _yaml_settings(args)
    added = [word for name, value in defaults.items() if name not in decided for word in (f"--{name}", value)]
    return [args[0], *added, *args[1:]]


def _yaml_settings(args: list[str]) -> set[str]:
    """The settings in the YAML file that the arguments name. The command line overrides them."""
    from lm_eval.config.evaluate_config import EvaluatorConfig

    for arg, following in zip(args, [*args[1:], ""], strict=True):
        name, _, value = arg.partition("=")
        if name in ("--config", "-C"):
            return set(EvaluatorConfig.load_yaml_config(value or following))
    return set()
