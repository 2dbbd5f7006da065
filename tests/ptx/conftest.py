"""Fixtures of the emulator's own tests."""

from __future__ import annotations

import os

import pytest
from tests.ptx.build import NoCompiler, library


@pytest.fixture(scope="session")
def engine() -> None:
    """The engine, compiled. Without g++ the test is skipped, or fails if CUVEE_REQUIRE_PTX is 1."""
    try:
        library()
    except NoCompiler as error:
        if os.environ.get("CUVEE_REQUIRE_PTX") == "1":
            pytest.fail(f"CUVEE_REQUIRE_PTX=1, but {error}")
        pytest.skip(str(error))
