"""Stages of launches and the time that each stage takes, for benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Stage:
    """A traced group of launches between two events of the device."""

    name: str
    begin: torch.cuda.Event
    end: torch.cuda.Event


_trace: ContextVar[list[Stage] | None] = ContextVar("trace", default=None)


@contextmanager
def trace_stages() -> Iterator[list[Stage]]:
    """Collect the stages launched inside, with their events, for benchmarks. Costs two events per stage."""
    stages: list[Stage] = []
    token = _trace.set(stages)
    try:
        yield stages
    finally:
        _trace.reset(token)


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Mark the launches inside as one stage."""
    stages = _trace.get()
    if stages is None:
        yield
        return
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    yield
    end.record()
    stages.append(Stage(name, begin, end))
