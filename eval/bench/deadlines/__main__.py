"""`python -m cuvee.eval.bench.deadlines`: loads with a deadline in vLLM, over links of 1 to 64 MB/s."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from cuvee.eval.bench.deadlines.deadlines_bench import DEADLINES_FULL, DEADLINES_QUICK, run_deadlines_bench
from cuvee.eval.bench.deadlines.deadlines_tables import show_deadlines
from cuvee.eval.bench.frame import checkpoint, run_bench


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="3 prompts of 1,024 tokens")
    parser.add_argument("--model", "-m", required=True, help="folder of a checkpoint, or smollm2")
    parser.add_argument("--profile", type=Path, required=True, help="of the model")
    parser.add_argument("--kl-max", type=float, default=0.02, help="nats per token that a prompt may lose")
    parser.add_argument(
        "--dtype", default="bfloat16", help="the engine's (default: bfloat16, whose rounding hides fine parts)"
    )


def _measure(given: argparse.Namespace, progress: Console) -> dict[str, Any]:
    scope = DEADLINES_QUICK if given.quick else DEADLINES_FULL
    scope = replace(scope, dtype=given.dtype, kl_max=given.kl_max)
    return run_deadlines_bench(scope, checkpoint(given.model), given.profile, progress)


if __name__ == "__main__":
    about = "Loads with a deadline in vLLM, from a store behind a proxy that is as slow as the link."
    sys.exit(run_bench("deadlines", about, _options, _measure, show_deadlines))
