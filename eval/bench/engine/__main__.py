"""`python -m cuvee.eval.bench.engine`: what compressed offload costs and saves in vLLM."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from cuvee.eval.bench.engine.engine_bench import run_engine_bench
from cuvee.eval.bench.engine.engine_tables import show_engine
from cuvee.eval.bench.engine.scope import ENGINE_FULL, ENGINE_QUICK
from cuvee.eval.bench.frame import checkpoint, run_bench


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="fewer cases and repeats: three minutes")
    parser.add_argument("--model", "-m", required=True, help="folder of a checkpoint, or smollm2")
    parser.add_argument("--profile", type=Path, help="of the model, for its lossy engines")
    parser.add_argument(
        "--length", action="append", type=int, default=[], metavar="TOKENS", help="of the prefix to time; repeatable"
    )


def _measure(given: argparse.Namespace, progress: Console) -> dict[str, Any]:
    scope = ENGINE_QUICK if given.quick else ENGINE_FULL
    if given.length:
        scope = replace(scope, lengths=tuple(sorted(set(given.length))))
    return run_engine_bench(scope, checkpoint(given.model), given.profile, progress)


if __name__ == "__main__":
    sys.exit(run_bench("engine", "Compressed offload in vLLM, in ten minutes.", _options, _measure, show_engine))
