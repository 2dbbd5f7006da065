"""The benchmarks: vLLM's own client, and LMCache's, which needs nothing of LMCache (package lmcache-cli).

command(server) -> a process that asks the server --> a file --> read(folder) -> what each request took
"""

from __future__ import annotations

import csv
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from cuvee.codec.errors import CuveeError, InputError

__all__ = ["WORKLOADS", "LMCacheWorkload", "PrefixRepetition", "Workload", "choose_workloads"]

_VLLM_CLIENT = (
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main; "
    "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)


class Workload(Protocol):
    """A benchmark client."""

    @property
    def name(self) -> str:
        """In tables and on the command line."""
        ...

    def check(self) -> None:
        """Raise InputError if the client is not installed; the message says how to get it."""
        ...

    def command(self, url: str, model: str, folder: Path, seed: int) -> list[str]:
        """Return the command that runs it against a server; its files go to `folder`. Equal seeds ask equal prompts."""
        ...

    def read(self, folder: Path) -> list[float]:
        """Seconds to the first token, of each request.

        Raises:
            CuveeError: a request failed, or the files are not as expected.
        """
        ...


@dataclass(frozen=True, slots=True)
class PrefixRepetition:
    """`vllm bench serve --dataset-name prefix_repetition`: random prefixes, each followed by several suffixes.

    Attributes:
        name: of the workload.
        prefix, suffix, output: tokens.
        prefixes: how many.
        prompts: how many requests; two at a time.
    """

    name: str = "prefix_repetition"
    prefix: int = 2048
    suffix: int = 64
    output: int = 16
    prefixes: int = 6
    prompts: int = 12

    def check(self) -> None:
        """See `Workload.check`."""
        if find_spec("vllm") is None:
            raise InputError(f"workload: {self.name!r} needs vLLM's client: pip install vllm")

    def command(self, url: str, model: str, folder: Path, seed: int) -> list[str]:
        """See `Workload.command`."""
        sizes = {
            "prefix-len": self.prefix,
            "suffix-len": self.suffix,
            "num-prefixes": self.prefixes,
            "output-len": self.output,
        }
        return [
            sys.executable, "-c", _VLLM_CLIENT, "--backend", "openai", "--base-url", url, "--model", model,
            "--dataset-name", "prefix_repetition",
            *(f"--prefix-repetition-{name}={size}" for name, size in sizes.items()),
            f"--num-prompts={self.prompts}", "--request-rate=inf", "--max-concurrency=2", "--num-warmups=0",
            f"--seed={seed}", "--ignore-eos", "--disable-tqdm", "--save-result", "--save-detailed",
            f"--result-dir={folder}", "--result-filename=requests.json",
        ]  # fmt: skip

    def read(self, folder: Path) -> list[float]:
        """See `Workload.read`."""
        try:
            found = json.loads((folder / "requests.json").read_text())
            errors, seconds = [error for error in found["errors"] if error], [float(t) for t in found["ttfts"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CuveeError(f"{self.name} left no result that can be read in {folder}: {error}") from error
        return _checked(self.name, errors, seconds)


@dataclass(frozen=True, slots=True)
class LMCacheWorkload:
    """A workload of `lmcache bench engine`.

    Attributes:
        name: of the workload.
        options: its own.
        volume: GB of KV that it is to make, which sets the number of its documents.
    """

    name: str
    options: tuple[str, ...]
    volume: float
    tokens_per_gb: int = 46_603  # SmolLM2-135M in bfloat16; the documents' number follows from it

    def check(self) -> None:
        """See `Workload.check`."""
        if _lmcache() is None:
            raise InputError(
                f"workload: {self.name!r} needs LMCache's client: pip install lmcache-cli, or leave it out"
            )

    def command(self, url: str, model: str, folder: Path, seed: int) -> list[str]:
        """See `Workload.command`."""
        return [
            _lmcache() or "lmcache", "bench", "engine", "--engine-url", url, "--model", model, "--workload", self.name,
            "--kv-cache-volume", f"{self.volume}", "--tokens-per-gb-kvcache", f"{self.tokens_per_gb}",
            "--no-interactive", "--json", "-q", "--ignore-eos", "--seed", f"{seed}",
            "--output-dir", f"{folder}", "--no-warmup", *self.options,
        ]  # fmt: skip

    def read(self, folder: Path) -> list[float]:
        """See `Workload.read`."""
        try:
            with (folder / "bench_results.csv").open(newline="") as file:
                rows = list(csv.DictReader(file))
            errors = [row["error"] or "it says not why" for row in rows if row["successful"] != "True"]
            seconds = [float(row["ttft"]) for row in rows]
        except (OSError, ValueError, KeyError) as error:
            raise CuveeError(f"{self.name} left no result that can be read in {folder}: {error}") from error
        return _checked(self.name, errors, seconds)


WORKLOADS: tuple[Workload, ...] = (
    PrefixRepetition(),
    LMCacheWorkload(
        "long-doc-qa",
        ("--ldqa-document-length=2500", "--ldqa-query-per-document=2", "--ldqa-max-output-length=8",
         "--ldqa-num-inflight-requests=2"),
        volume=0.22,
    ),
    LMCacheWorkload(
        "multi-round-chat",
        ("--mrc-shared-prompt-length=500", "--mrc-chat-history-length=2000", "--mrc-output-length=16", "--mrc-qps=1",
         "--mrc-duration=12"),
        volume=0.11,
    ),
    LMCacheWorkload(
        "kv-tier-pressure",
        ("--ktp-context-length=1200", "--ktp-docs-per-request=2", "--ktp-system-prompt-length=200",
         "--ktp-pool-size=8", "--ktp-num-requests=12", "--ktp-max-output-length=8", "--ktp-num-inflight-requests=2"),
        volume=0.22,
    ),
    # The same documents in ever-changing order. The client wants the model's tokenizer, so transformers beside it.
    LMCacheWorkload(
        "long-doc-permutator",
        ("--ldp-num-contexts=5", "--ldp-context-length=768", "--ldp-system-prompt-length=200",
         "--ldp-num-permutations=12", "--ldp-max-output-length=8", "--ldp-num-inflight-requests=1"),
        volume=0.22,
    ),
)  # fmt: skip


def choose_workloads(names: Sequence[str]) -> tuple[Workload, ...]:
    """Return the workloads with these names, or without names all that can run.

    Raises:
        InputError: a workload is unknown, or its client or any client is not installed.
    """
    known = {workload.name: workload for workload in WORKLOADS}
    for name in names:
        if name not in known:
            raise InputError(f"workload: must be one of {', '.join(known)}, got {name!r}")
        known[name].check()
    chosen = tuple(known[name] for name in names) or tuple(filter(_can_run, known.values()))
    if not chosen:
        raise InputError("workload: no benchmark client is installed: pip install vllm lmcache-cli")
    return chosen


def _can_run(workload: Workload) -> bool:
    try:
        workload.check()
    except InputError:
        return False
    return True


def _lmcache() -> str | None:
    """LMCache's client: on the path, or beside this Python."""
    return shutil.which("lmcache") or shutil.which("lmcache", path=str(Path(sys.executable).parent))


def _checked(name: str, errors: Sequence[str], seconds: list[float]) -> list[float]:
    if errors:
        raise CuveeError(f"{name}: {len(errors)} of {len(seconds)} requests failed; the first: {errors[0][:300]}")
    if not seconds:
        raise CuveeError(f"{name} made no request: a longer duration or a larger volume is needed")
    return seconds
