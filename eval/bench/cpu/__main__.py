"""`python -m cuvee.eval.bench.cpu`."""

from __future__ import annotations

import sys

from cuvee.eval.bench.cpu import cpu_bench
from cuvee.eval.bench.frame import run_bench

if __name__ == "__main__":
    sys.exit(
        run_bench(
            "cpu", "Compare speeds and sizes on this CPU, in five minutes (--quick: one).",
            cpu_bench.cpu_options, cpu_bench.measure_cpu, cpu_bench.show_cpu,
        )
    )  # fmt: skip
