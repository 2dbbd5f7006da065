"""Fixtures of the reports and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.learned import learned_once, shared_folder

import cuvee


@pytest.fixture(scope="module", autouse=True)
def calibrated_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Reports learn a profile first; nearly all tests here do so from the same texts, and are about what follows.

    Of a module, not of the session: the tests of calibration itself, which the same worker may run next, need the real
    one.
    """
    with pytest.MonkeyPatch.context() as patch:
        learn = learned_once(cuvee.calibrate, shared_folder(tmp_path_factory, "learned"))
        patch.setattr(cuvee, "calibrate", learn)
        yield
