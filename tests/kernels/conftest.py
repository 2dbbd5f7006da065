"""Fixtures of the kernels' tests."""

from __future__ import annotations

import pytest
from tests.emulation import KERNELS_RUN_ON

# In Triton's interpreter, which takes a hundred times as long as the emulator: one test of each kind.
CHOSEN = (
    "test_backend.py::test_each_reads_what_the_other_wrote[irregular-layers:2]",
    "test_backend.py::test_each_reads_what_the_other_wrote[partial-unit]",
    "test_backend.py::test_lossless_is_the_same_bytes[yarn-12]",
    "test_rans.py::test_decodes_what_the_codec_wrote[many-12]",
    "test_symbols.py::test_quantizing_gives_the_bytes_of_the_codec[tiles-unit]",
    "test_pages.py::test_fp8_agrees_with_torch",
)


@pytest.fixture(autouse=True)
def few_in_the_interpreter(request: pytest.FixtureRequest) -> None:
    """Skip what is not CHOSEN where kernels run in the interpreter."""
    if KERNELS_RUN_ON == "interpreter" and not request.node.nodeid.endswith(CHOSEN):
        pytest.skip("kernels run on: interpreter")
