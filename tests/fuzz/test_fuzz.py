"""Tests of the fuzzer: short runs with a fixed seed, past findings, and defects that it must find."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.codec.reference import rans
from tests.fuzz import engine
from tests.fuzz.blobs import BlobTarget
from tests.fuzz.dice import Dice
from tests.fuzz.engine import Finding
from tests.fuzz.entries import EntryTarget
from tests.fuzz.pages import PagesTarget
from tests.fuzz.profiles import ProfileTarget
from tests.fuzz.targets import TARGETS, named

from cuvee.codec.errors import CorruptError
from cuvee.integrations.stores.envelope import verify

ROOT = Path(__file__).parents[2]
CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.bin"))
assert len(CORPUS) >= 6
# The cases of a short run, about 10 s in total, and outcomes that it must reach: its cases get far.
RUNS = {
    "blob": (400, {"decoded", "FormatError", "CorruptError", "InputError"}),
    "states": (150, {"restored", "FormatError", "ProfileMismatchError"}),
    "profile": (150, {"loaded", "FormatError"}),
    "envelope": (600, {"read", "CorruptError", "ExpiredError"}),
    "pages": (150, {"0 pages", "4 pages", "8 pages"}),
    "url": (300, {"opened", "InputError"}),
}


@pytest.mark.parametrize("name", TARGETS)
def test_a_short_run_finds_nothing(name: str) -> None:
    cases, common = RUNS[name]
    outcomes = engine.run([named(name)], 20, range(cases))
    assert common <= set(outcomes[name]), outcomes


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_past_findings_stay_fixed(path: Path) -> None:
    target = named(path.name.partition("-")[0])
    target.warm_up()
    assert engine.judge(target, path.read_bytes()) != "VersionError", "it tests nothing: write it in the new version"


# --- deliberate defects are found


def off_by_one(*arguments: Any, decode: Any = rans.rans_decode) -> Any:
    """The reference's decoder, with a symbol changed."""
    out = decode(*arguments)
    out[0, out.shape[1] // 2] ^= 1
    return out


def _verify_without_payload(*entry: Any) -> None:
    """Check an entry, but not the checksum of its payload."""
    try:
        verify(*entry)
    except CorruptError as error:
        if "checksum of the payload" not in str(error):
            raise


REFERENCE = ("tests.fuzz.blobs.REFERENCE_EVERY", 1)
# Who finds it, in how many cases, what the finding says, and what is put in the place of what.
DEFECTS: dict[str, tuple[type[Any], int, str, list[tuple[str, Any]]]] = {
    "values": (
        BlobTarget, 300, "reference", [REFERENCE, ("tests.codec.reference.sections.rans_decode", off_by_one)],
    ),
    "rules of profiles": (
        ProfileTarget, 1500, "Error|Warning",  # NumPy warns, or refuses, depending on its version
        [
            ("cuvee.codec.profiles.section_profile.read_array", lambda arrays, name, *_: arrays[name]),
            ("cuvee.codec.profiles.section_profile.class_table", lambda frequencies: None),
        ],
    ),
    "checksums of payloads": (
        EntryTarget, 300, "no writer makes",
        [("tests.fuzz.entries.verify", _verify_without_payload)],
    ),
    "places": (
        PagesTarget, 300, "other contents",
        [("cuvee.codec.format.keys.hmac.compare_digest", lambda tag, other: True)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DEFECTS)
def test_a_missing_check_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, cases, said, patches = DEFECTS[name]
    target = kind()
    target.warm_up()
    for where, instead in patches:
        monkeypatch.setattr(where, instead)
    with pytest.raises(Finding, match=said):
        engine.run([target], 3, range(cases))


class Odd:
    """A target that runs a given function."""

    name = "odd"
    weight = 1.0

    def __init__(self, work: Callable[[], object]) -> None:
        self.work = work

    def warm_up(self) -> None:
        pass

    def memory(self, data: bytes) -> int:
        return 32 << 20

    def make(self, dice: Dice) -> bytes:
        return dice.junk(4)

    def check(self, data: bytes) -> str:
        self.work()
        return "done"


def test_hangs_are_found() -> None:
    def compute() -> None:
        while True:
            sum(range(1000))

    with pytest.raises(Finding, match="hangs: computes"):
        engine.judge(Odd(compute), b"", cpu=0.2)
    with pytest.raises(Finding, match="hangs: waits"):
        engine.judge(Odd(lambda: time.sleep(30)), b"", wall=0.2)
    assert signal.getitimer(signal.ITIMER_REAL)[0] == signal.getitimer(signal.ITIMER_PROF)[0] == 0


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the system does not tell peaks")
def test_memory_is_found_also_if_it_is_given_back() -> None:
    gc.collect()  # garbage of earlier tests must not be freed while this test measures
    with pytest.raises(Finding, match="grow by"):
        engine.judge(Odd(lambda: np.ones(400 << 20, np.uint8).sum()), b"")
    assert engine.judge(Odd(lambda: np.ones(1 << 20, np.uint8).sum()), b"") == "done"


def test_foreign_errors_and_warnings_are_found() -> None:
    import warnings

    for work in (lambda: 1 // 0, lambda: warnings.warn("a warning", stacklevel=1), lambda: sys.exit(3)):
        with pytest.raises(Finding):
            engine.judge(Odd(work), b"")


# --- as a program


@pytest.mark.nightly
def test_the_program_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fuzz", "--seconds", "1", "--targets", "envelope", "--folder", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0 and "no finding in" in done.stdout, done.stdout + done.stderr
