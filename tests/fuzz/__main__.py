"""The command line of the fuzzer, `python -m tests.fuzz`; see the package."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "src")]

from tests.fuzz import engine
from tests.fuzz.targets import TARGETS, named
from tests.kernels.emulation import start


def main() -> int:
    """Run the fuzzer; return the exit code: 0 without a finding, 1 with a finding, 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description="Fuzz the input that cuvee reads from others."
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of the run")
    parser.add_argument("--seed", type=int, default=0, help="seed of the cases")
    parser.add_argument("--targets", default=",".join(TARGETS), help=f"some of {','.join(TARGETS)}; default: all")
    parser.add_argument("--first", type=int, default=0, help="number of the first case of each target")
    parser.add_argument("--folder", type=Path, default=engine.FOLDER, help="folder for findings")
    parser.add_argument("--replay", metavar="FILE|TARGET:SEED:NUMBER", help="check one case")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.replay is not None:
        return replay(arguments.replay)
    if unknown := sorted(set(arguments.targets.split(",")) - set(TARGETS)):
        parser.error(f"--targets: must be some of {', '.join(TARGETS)}, got {unknown[0]!r}")
    targets = [named(name) for name in arguments.targets.split(",")]
    rest = (targets, arguments.seed, arguments.seconds, arguments.first, arguments.folder)
    if arguments.worker is not None:
        start()
        return engine.work(*rest, arguments.worker)
    with tempfile.TemporaryDirectory(prefix="cuvee-fuzz-") as scratch:
        return engine.watch(*rest, Path(scratch))


def replay(what: str) -> int:
    path = Path(what)
    if path.is_file():
        target, data = named(path.name.partition("-")[0]), path.read_bytes()
    else:
        name, seed, number = what.split(":")
        target = named(name)
        data = engine.case(target, int(seed), int(number))
    start()
    target.warm_up()
    try:
        print(f"{target.name}: {engine.judge(target, data)}")
    except engine.Finding as finding:
        print(f"finding: {target.name}: {finding}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
