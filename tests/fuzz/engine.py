"""Runs cases and judges them: time, memory, exceptions; in a process of its own where it runs for long."""

from __future__ import annotations

import atexit
import logging
import mmap
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Protocol

from tests.fuzz.dice import Dice

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "out" / "fuzz"
CPU_SECONDS = 60.0  # of a case; honest ones take half a second, up to ten with kernels to compile
WALL_SECONDS = 120.0  # of one that waits: a machine may be busy with something else
SPARE_ADDRESSES = 2 << 30  # what a process may map beyond what it has when warm
_PROGRESS_SECONDS = 15.0
_STATE = struct.Struct("<qqq")  # target, number, cases so far


class Finding(Exception):
    """A case was not answered as it has to be."""


class Target(Protocol):
    """One kind of input.

    Attributes:
        name: as the command line and file names have it.
        weight: share of the time.
    """

    name: str
    weight: float

    def warm_up(self) -> None:
        """Compile and cache whatever cases share, so that it is not counted as theirs."""

    def make(self, dice: Dice) -> bytes:
        """The bytes of a case."""

    def check(self, data: bytes) -> str:
        """Judge a case; what became of it, in a word. Raises Finding, or what the code under test should not raise."""

    def memory(self, data: bytes) -> int:
        """Bytes by which a process may grow over the case."""


@cache
def scratch() -> Path:
    """A folder for the files of cases, which goes with the process."""
    folder = Path(tempfile.mkdtemp(prefix="cuvee-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


class _Overtime(BaseException):
    """Not an Exception: nothing under test may swallow it."""


@contextmanager
def _limited_time(cpu: float, wall: float) -> Iterator[None]:
    """CPU seconds, which a busy machine does not use up, and seconds on the clock, for what waits and never works."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Overtime("waits" if number == signal.SIGALRM else "computes")

    before = [(number, signal.signal(number, stop)) for number in (signal.SIGPROF, signal.SIGALRM)]
    signal.setitimer(signal.ITIMER_PROF, cpu)
    signal.setitimer(signal.ITIMER_REAL, wall)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before:
            signal.signal(number, handler)


class _Peak:
    """The most memory that this process held since `reset`, where /proc tells."""

    def __init__(self) -> None:
        self.known = False
        with suppress(OSError):
            self._status = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
            self._clear = os.open("/proc/self/clear_refs", os.O_WRONLY | os.O_CLOEXEC)
            os.write(self._clear, b"5")
            self.known = True

    def reset(self) -> int:
        if self.known:
            os.pwrite(self._clear, b"5", 0)
        return self.read()

    def read(self) -> int:
        if not self.known:
            return 0
        return int(os.pread(self._status, 4096, 0).partition(b"VmHWM:")[2].split()[0]) << 10


@cache
def _peak() -> _Peak:
    return _Peak()


def judge(target: Target, data: bytes, *, cpu: float = CPU_SECONDS, wall: float = WALL_SECONDS) -> str:
    """Check a case, within its time and its memory.

    Raises:
        Finding: it took too long or too much, or raised something that is no error of cuvee's.
    """
    peak = _peak()
    before = peak.reset()
    try:
        with _limited_time(cpu, wall), warnings.catch_warnings():
            warnings.simplefilter("error")
            outcome = target.check(data)
    except Finding:
        raise
    except _Overtime as error:
        raise Finding(f"hangs: {error} for {cpu if str(error) == 'computes' else wall:g} s") from error
    except (Exception, SystemExit) as error:
        raise Finding(f"{type(error).__name__}: {error}\n{traceback.format_exc()}") from error
    grown, limit = peak.read() - before, target.memory(data)
    if grown > limit:
        # Once more: the first time may have imported, compiled or cached something.
        before = peak.reset()
        with warnings.catch_warnings(), suppress(Exception):
            warnings.simplefilter("error")
            target.check(data)
        grown = min(grown, peak.read() - before)
        if grown > limit:
            raise Finding(f"{len(data)} bytes made the process grow by {grown >> 10} KiB, more than {limit >> 10}")
    if outcome == "OutOfMemoryError":
        raise Finding(f"{len(data)} bytes asked for more memory than there is")
    return outcome


def case(target: Target, seed: int, number: int) -> bytes:
    return target.make(Dice(target.name, seed, number))


def run(
    targets: Sequence[Target], seed: int, numbers: range, note: Callable[[Target, int], None] = lambda *_: None
) -> dict[str, Counter[str]]:
    """Check cases `numbers` of each target; what became of them. For tests: no time decides.

    Raises:
        Finding: the first one, which says the target, seed and number.
    """
    outcomes: dict[str, Counter[str]] = {}
    for target in targets:
        target.warm_up()
        counts = outcomes.setdefault(target.name, Counter())
        for number in numbers:
            note(target, number)
            data = case(target, seed, number)
            try:
                counts[judge(target, data)] += 1
            except Finding as finding:
                raise Finding(f"{target.name}, seed {seed}, number {number}: {finding}") from finding
    return outcomes


def write_finding(folder: Path, target: Target, seed: int, number: int, what: str) -> Path:
    """Keep a case and what it did; the name of the file tells the target."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{target.name}-{seed}-{number}.bin"
    path.write_bytes(case(target, seed, number))
    path.with_suffix(".txt").write_text(
        f"target {target.name}, seed {seed}, number {number}\nagain: python -m tests.fuzz --replay {path}\n\n{what}\n"
    )
    return path


# --- for long: a process that works, and one that watches it


class _State:
    """What the working process is at, for whoever watches it: it may die in any case."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _STATE.size)

    def write(self, target: int, number: int, cases: int) -> None:
        _STATE.pack_into(self._map, 0, target, number, cases)

    def read(self) -> tuple[int, int, int]:
        target, number, cases = _STATE.unpack_from(self._map, 0)
        return target, number, cases


def work(targets: Sequence[Target], seed: int, seconds: float, first: int, folder: Path, state: Path) -> int:
    """The working process. Exit code 1 on a finding."""
    shared = _State(state)
    logging.getLogger("cuvee").setLevel(logging.CRITICAL)  # of every bad entry it says that it is bad
    for target in targets:
        target.warm_up()
    _limit_addresses()
    outcomes = {target.name: Counter[str]() for target in targets}
    spent = {target.name: 0.0 for target in targets}
    numbers = {target.name: first for target in targets}
    begun = told = time.monotonic()
    cases = 0
    while (now := time.monotonic()) - begun < seconds:
        target = min(targets, key=lambda each: spent[each.name] / each.weight)
        number = numbers[target.name]
        shared.write(targets.index(target), number, cases)
        try:
            outcomes[target.name][judge(target, case(target, seed, number))] += 1
        except Finding as finding:
            path = write_finding(folder, target, seed, number, str(finding))
            _tell(outcomes, now - begun)
            print(f"finding: {target.name}, seed {seed}, number {number}: {finding}\nkept as {path}", flush=True)
            return 1
        spent[target.name] += time.monotonic() - now
        numbers[target.name] += 1
        cases += 1
        if now - told > _PROGRESS_SECONDS:
            told = now
            _tell(outcomes, now - begun)
    _tell(outcomes, time.monotonic() - begun)
    print(f"no finding in {cases:,} cases", flush=True)
    return 0


def _limit_addresses() -> None:
    """Ask the system to refuse what no case can justify, also memory that is asked for and never touched."""
    with suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        soft = pages * resource.getpagesize() + SPARE_ADDRESSES
        if hard == resource.RLIM_INFINITY or soft < hard:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _tell(outcomes: dict[str, Counter[str]], seconds: float) -> None:
    parts = []
    for name, counts in outcomes.items():
        most = ", ".join(f"{what} {count:,}" for what, count in counts.most_common(6))
        parts.append(f"  {name}: {counts.total():,} cases ({most})")
    print(f"{seconds:.0f} s\n" + "\n".join(parts), flush=True)


def watch(targets: Sequence[Target], seed: int, seconds: float, first: int, folder: Path, scratch: Path) -> int:
    """Start the working process, with compiled loops that check their bounds, and see whether it dies or hangs."""
    state = scratch / "state"
    state.write_bytes(bytes(_STATE.size))
    environment = {
        **os.environ,
        "NUMBA_BOUNDSCHECK": "1",
        # Its code is other code under the same name: it must never be taken for that of everybody else.
        "NUMBA_CACHE_DIR": str(ROOT / ".numba_cache" / "boundscheck"),
    }
    names = ",".join(target.name for target in targets)
    command = [
        sys.executable, "-m", "tests.fuzz", "--worker", str(state), "--seconds", str(seconds), "--seed", str(seed),
        "--targets", names, "--first", str(first), "--folder", str(folder),
    ]  # fmt: skip
    shared = _State(state)
    last, since = shared.read(), time.monotonic()
    with subprocess.Popen(command, cwd=ROOT, env=environment) as process:
        while process.poll() is None:
            time.sleep(0.2)
            now = shared.read()
            if now != last:
                last, since = now, time.monotonic()
            # It ends cases itself that take too long, unless they do so in compiled code.
            elif any(last) and time.monotonic() - since > 1.5 * WALL_SECONDS:
                process.kill()
        code = process.returncode
    if code in (0, 1):
        return code
    at, number, cases = shared.read()
    target = targets[at]
    what = f"the process ended with {code} in this case, after {cases:,} others: a crash, or a hang that was ended"
    path = write_finding(folder, target, seed, number, what)
    print(f"finding: {target.name}, seed {seed}, number {number}: {what}\nkept as {path}", flush=True)
    return 1
