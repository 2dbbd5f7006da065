"""Hostile blobs on compiled kernels: with valid checksums, they make no kernel access other memory.

The emulator raises at the first access outside of what a launch was given; a GPU, at one outside of what its process
has. CUVEE_PTX_MUTANTS says how many blobs.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest
from tests.fuzz import blobs
from tests.fuzz.blobs import BlobTarget
from tests.fuzz.engine import case
from triton import knobs

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("products_in_bfloat16")]
COUNT = int(os.environ.get("CUVEE_PTX_MUTANTS", "120"))
SEED = 11


@pytest.fixture
def launches() -> Iterator[list[object]]:
    """An entry for every launch from now on."""
    made: list[object] = []
    knobs.runtime.launch_enter_hook.add(made.append)
    yield made
    knobs.runtime.launch_enter_hook.remove(made.append)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of damaged numbers on the CPU
def test_forged_blobs_touch_nothing_else(launches: list[object]) -> None:
    target = BlobTarget()
    target.warm_up()
    outcomes: Counter[str] = Counter()
    reached = 0
    for number in range(COUNT):
        data = case(target, SEED, number)
        if not data:
            continue
        subject, blob = blobs.subjects()[data[0] % len(blobs.subjects())], data[1:]
        outcome, chunk = blobs._decoded(subject, blob, "numba")
        before = len(launches)
        try:
            blobs._compare(subject, blob, chunk, "triton")
        except AssertionError as error:
            raise AssertionError(f"seed {SEED}, number {number}, {subject.name}: {error}") from error
        reached += len(launches) > before
        outcomes[outcome] += 1
    print(f"{COUNT} blobs, {reached} of them reached kernels: {dict(outcomes)}")
    # What the host refuses shows nothing of kernels.
    assert reached >= COUNT // 4, outcomes
    assert len(outcomes) >= 3, outcomes
