"""Loads with a deadline in vLLM: how many deadlines are met, and the KL that is expected, behind links of known rates.

    prompts --> vLLM, CuveeConnector --> an HTTP object store whose answers share 1 … 64 MB/s
                      |
                      +--> first token, tokens by parts, expected KL

Each prompt is stored as a base and a refinement. Before each request the engine's own cache is emptied. A prompt is
asked for without a deadline, which loads all of it, and with deadlines of half, once and twice the time of that.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import numpy as np
from rich.console import Console

from cuvee.calibration.bundled import EVALUATION_TEXTS
from cuvee.calibration.corpus import read_corpus, spread_sequences
from cuvee.codec.entropy.residuals import MAX_REFINEMENTS
from cuvee.codec.errors import CuveeError, InputError
from cuvee.eval.bench.engine.process import Engine
from cuvee.eval.bench.engine.scope import CHUNK, QUESTION, EngineVariant, conditions
from cuvee.eval.bench.frame import Shown, checkpoint, machine_and_vllm, need_vllm, run_bench, timed_lines
from cuvee.eval.bench.timing import spread
from cuvee.eval.documents import ReportTable
from cuvee.naming.part_keys import MAX_PARTS

__all__ = ["DeadlinesScope", "SlowStore", "run_deadlines_bench", "show_deadlines"]

MB = 1e6  # bytes
_GRAIN = 0.01  # seconds: what a link carries at once
_SETTLE_SECONDS = 60.0
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
_NOTE = (
    "Medians over prompts. Tokens by parts: loaded from the base alone, and from both parts; the rest of a prompt is "
    "computed. KL in 1/1000 nats per token, as the answer tells it."
)


@dataclass(frozen=True, slots=True)
class DeadlinesScope:
    """The scope of the benchmark.

    Attributes:
        tokens: of each prompt that are stored; a multiple of the chunk.
        prompts: number of different ones.
        kl_max: nats per token that the loaded part of a prompt may lose.
        quality: of all parts together.
        rates: of the links, bytes per second.
        factors: deadlines, over the time that loading everything takes.
    """

    tokens: int = 2048
    prompts: int = 6
    kl_max: float = 0.02
    quality: str = "high"
    rates: tuple[float, ...] = (1 * MB, 4 * MB, 16 * MB, 64 * MB)
    factors: tuple[float, ...] = (0.5, 1.0, 2.0)

    def __post_init__(self) -> None:
        if self.tokens < CHUNK or self.tokens % CHUNK:
            raise InputError(f"tokens: must be a multiple of {CHUNK}, got {self.tokens}")
        if self.prompts < 1:
            raise InputError(f"prompts: must be at least 1, got {self.prompts}")
        if not 0 < self.kl_max < 1:
            raise InputError(f"kl_max: must be above 0 and below 1, got {self.kl_max}")


class SlowStore:
    """Objects in memory, by path: PUT, GET with ranges, and HEAD, over HTTP/1.1 on a loopback port.

    Attributes:
        url: of the store, for cuvee.
        rate: bytes per second that all answers share; infinite: no limit.
        carried: bytes of all answers.
    """

    def __init__(self, rate: float = math.inf) -> None:
        self.rate, self.carried = rate, 0
        self.objects: dict[str, bytes] = {}
        self._answers, self._free = 0, 0.0
        self._changed = threading.Condition()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/kv"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, write: Callable[[bytes], object], body: bytes) -> None:
        """Write the body of an answer as fast as the link carries it, behind the pieces of all others."""
        with self._changed:
            self._answers += 1
        try:
            at = 0
            while at < len(body):
                with self._changed:
                    piece = body[at : at + max(int(min(self.rate * _GRAIN, len(body))), 1)]
                    self._free = max(self._free, time.monotonic()) + len(piece) / self.rate
                    wait = self._free - time.monotonic()
                time.sleep(max(wait, 0.0))
                write(piece)
                at += len(piece)
                with self._changed:
                    self.carried += len(piece)
        finally:
            with self._changed:
                self._answers -= 1
                self._changed.notify_all()

    def drain(self) -> None:
        """Wait until no answer is under way: what was asked for and given up would keep others from the link."""
        with self._changed:
            self._changed.wait_for(lambda: self._answers == 0, _SETTLE_SECONDS)


def _handler(store: SlowStore) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_PUT(self) -> None:
            store.objects[self.path] = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self._say(201)

        def do_GET(self) -> None:
            data = store.objects.get(self.path)
            wanted = _RANGE.fullmatch(self.headers.get("Range", ""))
            if data is None:
                self._say(404)
            elif wanted is None:
                self._say(200, data)
            elif int(wanted[1]) >= len(data):
                self._say(416)
            else:
                first, last = int(wanted[1]), min(int(wanted[2]), len(data) - 1)
                self._say(206, data[first : last + 1], Content_Range=f"bytes {first}-{last}/{len(data)}")

        def do_HEAD(self) -> None:
            data = store.objects.get(self.path)
            self._say(404 if data is None else 200, data or b"")

        def log_message(self, format: str, *args: object) -> None:  # each request would be a line
            pass

        def _say(self, status: int, body: bytes = b"", **fields: str) -> None:
            self.send_response(status)
            for name, value in {**fields, "Content_Length": str(len(body))}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                with suppress(ConnectionError):  # the client gave up
                    store.answer(self.wfile.write, body)

    return Handler


def run_deadlines_bench(
    scope: DeadlinesScope, model: Path, profile: Path, progress: Console | None = None
) -> dict[str, Any]:
    """Run the benchmark.

    Args:
        scope: what to measure.
        model: folder of a checkpoint, with its tokenizer.
        profile: of this model.
        progress: where to list what is being measured; None for nowhere.

    Returns:
        The report, as a dict for JSON.

    Raises:
        ImportError: vLLM is not installed, or what reads the object store.
        InputError: the texts have too few tokens.
        CuveeError: an engine failed, or did not tell what a request with a deadline is to be told.
    """
    need_vllm()
    if find_spec("obstore") is None:
        raise ImportError("the store of this benchmark needs obstore: pip install cuvee[objects]")
    say = timed_lines(progress)
    prompts = _prompts(scope, model)
    longest = scope.tokens + QUESTION + 1
    options = {"max_model_len": longest, "max_num_batched_tokens": longest, "block_size": 32}
    with (
        tempfile.TemporaryDirectory(prefix="cuvee-deadlines-") as folder,
        Engine(Path(folder) / "engine.log") as engine,
        SlowStore() as store,
    ):
        say("computing and storing")
        variant = EngineVariant("objects", scope.quality, store.url)
        more = {"refinements": MAX_REFINEMENTS, "kl_max": scope.kl_max}
        engine.start(model, options, variant, profile, more=more)
        computing = [_stored(engine, store, prompt, scope) for prompt in prompts]
        links = []
        for rate in scope.rates:
            store.rate = rate
            say(f"{rate / MB:g} MB/s")
            whole = [_asked(engine, store, prompt) for prompt in prompts]
            deadlines = []
            for factor in scope.factors:
                wanted = [factor * load["seconds"] for load in whole]
                loads = [_asked(engine, store, *each) for each in zip(prompts, wanted, strict=True)]
                deadlines.append({"factor": factor, "deadline": spread(wanted), **_figures(loads)})
            links.append({"mb_per_s": rate / MB, "no_deadline": _figures(whole), "deadlines": deadlines})
        engine.stop()
    return {
        **conditions(model, scope.quality, profile),
        **{name: getattr(scope, name) for name in ("tokens", "prompts", "kl_max")},
        "computing": spread(computing),
        "links": links,
    }


def _prompts(scope: DeadlinesScope, model: Path) -> list[list[int]]:
    """Token ids of prompts: what is stored, and a question of `QUESTION` tokens."""
    corpora = [read_corpus(name, str(model)) for name in EVALUATION_TEXTS]
    found: list[list[int]] = spread_sequences(corpora, scope.tokens + QUESTION, scope.prompts).tolist()
    if len(found) < scope.prompts:
        raise InputError(f"prompts: must be at most {len(found)}, as many as the texts have, got {scope.prompts}")
    return found


def _stored(engine: Engine, store: SlowStore, prompt: Sequence[int], scope: DeadlinesScope) -> float:
    """Have a prompt stored in parts; returns the seconds that computing it takes."""
    least = len(store.objects) + MAX_PARTS * scope.tokens // CHUNK
    seconds = engine.ask([prompt], expect_cached=[0], forget=True).seconds
    end = time.monotonic() + _SETTLE_SECONDS
    while len(store.objects) < least:
        if time.monotonic() > end:
            raise CuveeError(f"the store lacks {least - len(store.objects)} parts of a prompt")
        engine.idle()
    return seconds


def _asked(engine: Engine, store: SlowStore, prompt: Sequence[int], deadline: float | None = None) -> dict[str, Any]:
    """Load a prompt, by a deadline in seconds if there is one."""
    before = store.carried
    params = None if deadline is None else {"cuvee": {"deadline_ms": 1e3 * deadline}}
    answer = engine.ask([prompt], expect_cached=None, forget=True, params=params)
    store.drain()
    load = {"seconds": answer.seconds, "cached": answer.cached[0], "mb": (store.carried - before) / MB}
    if deadline is None:
        return load
    told = (answer.told[0] or {}).get("cuvee") or {}
    if "parts" not in told:
        raise CuveeError(f"an answer to a deadline must tell its parts, it told {told}")
    return {
        **load, "met": answer.seconds <= deadline, "parts": told["parts"], "expected_kl": told.get("expected_kl", 0.0)
    }  # fmt: skip


def _figures(loads: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum up loads: means, and the spread of the seconds."""
    means = ("cached", "mb", "met", "parts", "expected_kl")
    return {
        "seconds": spread([load["seconds"] for load in loads]),
        **{name: np.mean([load[name] for load in loads], axis=0).tolist() for name in means if name in loads[0]},
    }


def show_deadlines(report: Mapping[str, Any]) -> Shown:
    """Make the table of a report."""
    rows = []
    for link in report["links"]:
        whole, rate = link["no_deadline"], f"{link['mb_per_s']:g} MB/s"
        rows.append([rate, "-", f"{whole['seconds']['median']:.2f}", "-", f"{whole['cached']:.0f}", _two(whole), "-"])
        for each in link["deadlines"]:
            rows.append(
                [
                    rate, f"{each['deadline']['median']:.2f}", f"{each['seconds']['median']:.2f}", f"{each['met']:.0%}",
                    " + ".join(f"{tokens:.0f}" for tokens in each["parts"]), _two(each),
                    f"{1e3 * each['expected_kl']:.2f}",
                ]
            )  # fmt: skip
    preface = (
        f"{machine_and_vllm(report)}. {report['model']}, {report['quality']} in two parts, {report['prompts']} prompts "
        f"of {report['tokens']} tokens, floor {report['kl_max']} nats per token. Computed, the first token comes after "
        f"{report['computing']['median']:.2f} s."
    )
    columns = ["link ", "deadline, s", "first token, s", "met", "tokens by parts", "MB", "expected KL"]
    return Shown("Loads with a deadline, in vLLM", preface, [ReportTable(columns, rows, "By link", _NOTE)])


def _two(each: Mapping[str, Any]) -> str:
    return f"{each['mb']:.2f}"


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="3 prompts of 1,024 tokens")
    parser.add_argument("--model", "-m", required=True, help="folder of a checkpoint, or smollm2")
    parser.add_argument("--profile", type=Path, required=True, help="of the model")
    parser.add_argument("--kl-max", type=float, default=0.02, help="nats per token that a prompt may lose")


def _measure(given: argparse.Namespace, progress: Console) -> dict[str, Any]:
    scope = DeadlinesScope(kl_max=given.kl_max)
    scope = replace(scope, tokens=1024, prompts=3) if given.quick else scope
    return run_deadlines_bench(scope, checkpoint(given.model), given.profile, progress)


if __name__ == "__main__":
    about = "Loads with a deadline in vLLM, from a store that is as slow as a link."
    sys.exit(run_bench("deadlines", about, _options, _measure, show_deadlines))
