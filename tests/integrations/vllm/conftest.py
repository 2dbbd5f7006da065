"""Errors that the connector keeps from its engine are not kept from its tests; and the worlds that tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cuvee.integrations.guard import Guard

if TYPE_CHECKING:  # they import the codec, which some modules here must not have before vLLM
    from tests.integrations.vllm.sides import Bench, Desk
    from tests.integrations.vllm.small_engine import SmallEngine


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


@pytest.fixture
def desk() -> Iterator[Callable[..., Desk]]:
    """Makes scheduler sides, with a store that a test fills, and closes them."""
    from tests.integrations.vllm.sides import Desk

    made: list[Desk] = []

    def make(**options: Any) -> Desk:
        made.append(Desk(**options))
        return made[-1]

    yield make
    for each in made:
        each.store.before = lambda operation: None
        each.side.close()


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    """Makes workers with pages, and closes them."""
    from tests.integrations.vllm.sides import Bench

    made: list[Bench] = []

    def make(**options: Any) -> Bench:
        made.append(Bench(**options))
        return made[-1]

    yield make
    for each in made:
        each.store.before = lambda operation: None
        each.worker.close()


@pytest.fixture
def engine() -> Iterator[Callable[..., SmallEngine]]:
    """Makes small engines, and closes them."""
    from tests.integrations.vllm.small_engine import SmallEngine

    made: list[SmallEngine] = []

    def make(**options: Any) -> SmallEngine:
        made.append(SmallEngine(**options))
        return made[-1]

    yield make
    for each in made:
        each.close()
