"""Fixtures of the kernels' tests."""

from __future__ import annotations

import pytest
from tests.emulation import KERNELS_RUN_ON


@pytest.fixture
def plain_coder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entropy coder's references stand in for its kernels, where those would run in the interpreter.

    There they take nine tenths of the time of whole chunks. `test_rans.py` and `test_classes.py` hold each to the
    other, on good bytes and on damaged ones; one test of each scheme and direction runs the kernels themselves.
    """
    if KERNELS_RUN_ON != "interpreter":
        return
    from tests.kernels.naive import rans

    from cuvee.kernels import lossless_scheme, outgoing, transform_scheme

    for user in (lossless_scheme, transform_scheme):
        monkeypatch.setattr(user, "rans_decode", rans.rans_decode_reference)
    monkeypatch.setattr(outgoing, "rans_encode", rans.rans_encode_reference)
