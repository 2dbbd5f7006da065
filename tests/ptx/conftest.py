"""Fixtures of the emulator's own tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from tests.cpus import multiply
from tests.ptx.build import NoCompiler, library
from tests.ptx.driver import TARGETS, state

from cuvee.codec.stages.products import Products


@pytest.fixture(scope="session")
def engine() -> None:
    """The engine, compiled. Without g++ the test is skipped, or fails if CUVEE_REQUIRE_PTX is 1."""
    try:
        library()
    except NoCompiler as error:
        if os.environ.get("CUVEE_REQUIRE_PTX") == "1":
            pytest.fail(f"CUVEE_REQUIRE_PTX=1, but {error}")
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def products_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every CPU round what it multiplies to bfloat16, as kernels do, so that only the order of sums differs."""
    multiply(Products.BFLOAT16, monkeypatch)


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test on each target, whatever target other tests use."""
    before = state().target
    state().target = request.param
    yield request.param
    state().target = before
