"""Fixtures of the emulator's own tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.ptx.build import NoCompiler, library
from tests.ptx.driver import State, installed, state


@pytest.fixture(scope="session")
def engine() -> None:
    """The engine, compiled. Without g++ the test is skipped."""
    try:
        library()
    except NoCompiler as error:
        pytest.skip(str(error))


@pytest.fixture
def emulator() -> State:
    """What Triton's kernels run on. The test is skipped where they run on a GPU, or nowhere."""
    if not installed():
        pytest.skip("the emulator is not installed")
    return state()


@pytest.fixture(params=["sm_80", "sm_100"])
def target(request: pytest.FixtureRequest, emulator: State) -> Iterator[str]:
    """Run the test on each target, whatever target other tests use."""
    before = emulator.target
    emulator.target = request.param
    yield request.param
    emulator.target = before
