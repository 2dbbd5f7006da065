"""Errors that the connector keeps from its engine are not kept from its tests; and the worlds that tests share."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from cuvee.integrations.core.guard import Guard


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """For the files of the engines of a module; skips its tests without vLLM."""
    from tests.integrations.vllm.engines import need_vllm

    need_vllm()
    return tmp_path_factory.mktemp(request.module.__name__.rpartition("_")[2])


@pytest.fixture
def contained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, BaseException]]:
    """Entry points and errors, in order; a test that takes this expects some."""
    seen: list[tuple[str, BaseException]] = []
    note = Guard.note

    def noted(self: Guard, entry: str, error: BaseException) -> None:
        seen.append((entry, error))
        note(self, entry, error)

    monkeypatch.setattr(Guard, "note", noted)
    return seen


@pytest.fixture(autouse=True)
def nothing_is_contained(request: pytest.FixtureRequest, contained: list[tuple[str, BaseException]]) -> Iterator[None]:
    """Fail a test in which an error was contained that it did not ask for."""
    yield
    if "contained" in signature(request.function).parameters:
        return
    assert not contained, f"in {contained[0][0]}: {contained[0][1]!r}"


def _makes(kind: str, module: str) -> Callable[..., Iterator[Callable[..., Any]]]:
    """A fixture that makes worlds of a kind, and closes them. It imports them late: not before vLLM."""

    @pytest.fixture
    def fixture() -> Iterator[Callable[..., Any]]:
        made: list[Any] = []

        def make(**options: Any) -> Any:
            made.append(getattr(importlib.import_module(f"tests.integrations.vllm.{module}"), kind)(**options))
            return made[-1]

        yield make
        for each in made:
            each.close()

    return fixture


desk, bench, engine = _makes("Desk", "sides"), _makes("Bench", "sides"), _makes("SmallEngine", "small_engine")
