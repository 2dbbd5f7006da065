"""`python -m cuvee.eval.bench.clients`: `vllm bench serve` and `lmcache bench engine`, with and without cuvee."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from cuvee.eval.bench.clients.clients_bench import ClientsRun, run_clients
from cuvee.eval.bench.clients.clients_tables import show_clients
from cuvee.eval.bench.clients.variants import choose_variants
from cuvee.eval.bench.clients.workloads import choose_workloads
from cuvee.eval.bench.engine.engine_bench import describe_model
from cuvee.eval.bench.frame import checkpoint, run_bench

_SERVER = ("--dtype", "bfloat16", "--max-num-seqs", "8", "--block-size", "32")


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", "-m", required=True, help="folder of a checkpoint, or smollm2")
    parser.add_argument("--profile", type=Path, help="of the model; without it, no lossy variant runs")
    parser.add_argument("--variant", action="append", default=[], metavar="NAME", help="repeatable (default: all)")
    parser.add_argument("--workload", action="append", default=[], metavar="NAME", help="repeatable (default: all)")
    parser.add_argument("--kv-cache-mb", type=int, default=400, help="memory for the server's own KV cache")
    parser.set_defaults(out=Path("out/clients"))


def _measure(given: argparse.Namespace, progress: Console) -> dict[str, Any]:
    variants = choose_variants(given.variant, given.profile)
    workloads = choose_workloads(given.workload)
    model = checkpoint(given.model)
    run = ClientsRun(
        model, variants, workloads, None if given.profile is None else given.profile.resolve(),
        (*_SERVER, "--kv-cache-memory-bytes", str(given.kv_cache_mb * 10**6)), given.out.resolve(),
        describe_model(model, random_weights=False)["raw_bytes_per_token"],
    )  # fmt: skip
    return run_clients(run, progress)


if __name__ == "__main__":
    about = "Run other people's benchmarks against vLLM's server, five minutes for each variant."
    sys.exit(run_bench("clients", about, _options, _measure, show_clients))
