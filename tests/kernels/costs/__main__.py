"""`make costs`: the kernels compiled without a GPU, against their budgets.

Exit code 1 if a kernel does not compile or exceeds its budget.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from tests.kernels.costs.static_costs import TARGETS, check, report, shared_bytes


def main() -> int:
    """Compile, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.costs")
    parser.add_argument("--target", action="append", choices=TARGETS, help="compile for this one; default: all")
    parser.add_argument("names", nargs="*", help="kernels, by the names of their specs; default: all")
    given = parser.parse_args()
    data = report(given.target or TARGETS, names=given.names)
    wrong = check(data)
    print("\n".join(_costs(data)))
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    return int(bool(wrong))


def _costs(data: dict[str, Any]) -> list[str]:
    """Return a line per kernel: instructions of the loop and per symbol, registers, bytes."""
    lines = [f"{'kernel':24}{'target':8}{'loop':>6}{'each':>7}{'regs':>6}{'spill':>6}{'shared':>8}"]
    for entry in data["kernels"]:
        start = f"{entry['kernel']:24}{entry['target']:8}"
        if entry["error"] is not None:
            lines.append(f"{start}failed")
            continue
        loop = entry["loop"] or {"instructions": 0, "instructions_per_symbol": None}
        each = loop["instructions_per_symbol"]
        lines.append(
            f"{start}{loop['instructions']:6}{'' if each is None else f'{each:.1f}':>7}{entry['registers']:6}"
            f"{entry['spilled_bytes']:6}{shared_bytes(entry):8}"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
