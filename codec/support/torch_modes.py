"""Modes of torch that a program has set for its own work: they change nothing of ours.

A default device would move our tables, and autocast would multiply coefficients in bfloat16. Both are set per thread,
so setting them aside touches no other thread. The default dtype belongs to the whole process: no code here depends on
it, because every call that makes a tensor of floats names the dtype (`tests/codec/test_torch_modes.py` looks).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_CPU = torch.device("cpu")
_AUTOCAST = ("cpu", "cuda")


def without_modes(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function run as if the caller had set neither a default device nor autocast."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        device = torch.get_default_device()
        cast = [kind for kind in _AUTOCAST if torch.is_autocast_enabled(kind)]
        if device == _CPU and not cast:
            return function(*args, **kwargs)
        with ExitStack() as stack:
            if device != _CPU:
                stack.enter_context(_CPU)
            for kind in cast:
                stack.enter_context(torch.autocast(kind, enabled=False))
            return function(*args, **kwargs)

    return run
