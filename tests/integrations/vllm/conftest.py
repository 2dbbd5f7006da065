"""Errors that the connector keeps from its engine are not kept from its tests."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import signature

import pytest

from cuvee.integrations.guard import Guard


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
