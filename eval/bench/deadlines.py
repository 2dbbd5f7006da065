"""Loads with a deadline in vLLM: how many deadlines are met that can be met, behind links of known rates.

    prompts --> vLLM, CuveeConnector --> an HTTP object store whose answers share 1 … 64 MB/s
                      |
                      +--> first token; tokens that were loaded from both parts, loaded from the base, or computed

Each prompt is stored as a base and a refinement. Over each link it is asked for without a deadline, once as it is
stored and once from bases alone; then with deadlines of half, once and twice the time of loading everything, and of
computing everything. The engine's own cache is emptied before each request. KLs are those of the first token, from what
the engine says after computing everything, over the 1,000 tokens that are likeliest then and a rest.

**Feasible** is what would be met by someone who knows all times: by loading every base, or by computing everything.
Loading some chunks and computing the others takes a time between these, because later tokens are dearer to compute.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import numpy as np

from cuvee.calibration.bundled import EVALUATION_TEXTS
from cuvee.calibration.corpus import read_corpus, spread_sequences
from cuvee.codec.errors import CuveeError, InputError
from cuvee.eval.bench.engine_process import CHUNK, QUESTION, Engine, EngineAnswer, EngineVariant, conditions
from cuvee.eval.bench.frame import Shown, checkpoint, machine_and_vllm, need_vllm, run_bench, say
from cuvee.eval.documents import ReportTable
from cuvee.naming.part_keys import MAX_PARTS, part_number

__all__ = ["SlowStore", "run_deadlines_bench", "show_deadlines"]

MB = 1e6  # bytes
FACTORS = 0.5, 1.0, 2.0  # deadlines, over the time that loading or computing everything takes
_QUALITY = "high"
_GRAIN = 0.01  # seconds: what a link carries at once
_TOP = 1000  # tokens whose logprobs are compared


class SlowStore:
    """Objects in memory, by path: PUT, GET and HEAD, over HTTP/1.1 on a loopback port.

    Attributes:
        url: of the store, for cuvee.
        rate: bytes per second that all answers share; infinite: no limit.
        bases_only: refinements are not found.
    """

    def __init__(self, rate: float = math.inf) -> None:
        self.rate, self.bases_only = rate, False
        self.objects: dict[str, bytes] = {}
        self._link, self._answers = threading.Lock(), 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/kv"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def find(self, path: str) -> bytes | None:
        """Return an object; None: there is none."""
        return None if self.bases_only and part_number(path) else self.objects.get(path)

    def answer(self, write: Callable[[bytes], object], body: bytes) -> None:
        """Write the body of an answer, piece by piece, as fast as the link carries it beside other answers."""
        with self._link:
            self._answers += 1
        try:
            step = max(int(min(self.rate * _GRAIN, len(body))), 1)
            for piece in (body[at : at + step] for at in range(0, len(body), step)):
                with self._link:
                    time.sleep(len(piece) / self.rate)
                write(piece)
        finally:
            with self._link:
                self._answers -= 1

    def drain(self) -> None:
        """Wait until no answer is under way: what was asked for and given up would keep others from the link."""
        while self._answers:
            time.sleep(_GRAIN)


def _handler(store: SlowStore) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

        def do_PUT(self) -> None:
            store.objects[self.path] = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self._say(201)

        def do_GET(self) -> None:
            data = store.find(self.path)
            self._say(404 if data is None else 200, data or b"")

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:  # each request would be a line
            pass

        def _say(self, status: int, body: bytes = b"") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                with suppress(ConnectionError):  # the client gave up
                    store.answer(self.wfile.write, body)

    return Handler


def run_deadlines_bench(model: Path, profile: Path, tokens: int, number: int, rates: Sequence[float]) -> dict[str, Any]:
    """Run the benchmark.

    Args:
        model: folder of a checkpoint, with its tokenizer.
        profile: of this model.
        tokens: of each prompt that are stored; a multiple of the chunk.
        number: of prompts.
        rates: of the links, in MB/s.

    Returns:
        The report, as a dict for JSON.

    Raises:
        ImportError: vLLM is not installed.
        InputError: an argument is out of range, or the texts have too few tokens.
        CuveeError: an engine failed, or did not tell what a request with a deadline is to be told.
    """
    need_vllm()
    prompts = _prompts(model, tokens, number)
    longest = tokens + QUESTION + 1
    options = {"max_model_len": longest, "max_num_batched_tokens": longest, "block_size": 32, "max_logprobs": _TOP}
    with (
        tempfile.TemporaryDirectory(prefix="cuvee-deadlines-") as folder,
        Engine(Path(folder) / "engine.log") as engine,
        SlowStore() as store,
    ):
        say("computing and storing")
        variant = EngineVariant("objects", _QUALITY, store.url)
        engine.start(model, options, variant, profile, more={"refinements": MAX_PARTS - 1})
        computed = [_stored(engine, store, prompt) for prompt in prompts]
        computing = [answer.seconds for answer in computed]
        links = []
        for rate in rates:
            say(f"{rate:g} MB/s")
            store.rate, store.bases_only = rate * MB, True
            of_bases = [_asked(engine, store, prompt) for prompt in prompts]
            store.bases_only = False
            of_all = [_asked(engine, store, prompt) for prompt in prompts]
            bases, loading = ([answer.seconds for answer in answers] for answers in (of_bases, of_all))
            loads = [
                {"of": of, "factor": factor, "feasible": factor * whole >= min(base, answer.seconds)}
                | _aimed(engine, store, prompt, factor * whole, answer)
                for of, wholes in (("loading", loading), ("computing", computing))
                for factor in FACTORS
                for prompt, whole, base, answer in zip(prompts, wholes, bases, computed, strict=True)
            ]
            links.append({"mb_per_s": rate, "loading": loading, "bases": bases, "loads": loads})
            for name, answers in (("loading_kl", of_all), ("bases_kl", of_bases)):
                links[-1][name] = [each.first_token_kl(exact) for exact, each in zip(computed, answers, strict=True)]
    said = {**conditions(model, _QUALITY, profile), "tokens": tokens, "prompts": number}
    return {**said, "computing": computing, "links": links}


def _prompts(model: Path, tokens: int, number: int) -> list[list[int]]:
    """Token ids of prompts: what is stored, and a question of `QUESTION` tokens."""
    if tokens < CHUNK or tokens % CHUNK:
        raise InputError(f"tokens: must be a multiple of {CHUNK}, got {tokens}")
    corpora = [read_corpus(name, str(model)) for name in EVALUATION_TEXTS]
    found: list[list[int]] = spread_sequences(corpora, tokens + QUESTION, number).tolist()
    if not 0 < number <= len(found):
        raise InputError(f"prompts: must be 1 … {len(found)}, as many as the texts have, got {number}")
    return found


def _stored(engine: Engine, store: SlowStore, prompt: Sequence[int]) -> EngineAnswer:
    """Have a prompt computed, and stored in parts."""
    least = len(store.objects) + MAX_PARTS * (len(prompt) // CHUNK)
    answer = engine.ask([prompt], expect_cached=[0], forget=True, logprobs=_TOP)
    engine.idle()
    if lacks := least - len(store.objects):
        raise CuveeError(f"the store lacks {lacks} parts of a prompt")
    return answer


def _asked(engine: Engine, store: SlowStore, prompt: Sequence[int], params: Any = None) -> EngineAnswer:
    """Ask for a prompt, and wait until the link is free again."""
    answer = engine.ask([prompt], expect_cached=None, forget=True, logprobs=_TOP, params=params)
    store.drain()
    return answer


def _aimed(
    engine: Engine, store: SlowStore, prompt: Sequence[int], deadline: float, expected: EngineAnswer
) -> dict[str, Any]:
    """Ask for a prompt by a deadline in seconds; returns what came of it, beside the answer after computing it."""
    answer = _asked(engine, store, prompt, {"cuvee": {"deadline_ms": 1e3 * deadline}})
    computed, base, both = map(round, answer.loaded_at)
    if not computed + base + both:
        raise CuveeError(f"an engine must count the parts that it loads, it counted {answer.loaded_at}")
    tokens = {"both": both, "base": base, "computed": len(prompt) - QUESTION - base - both}
    met, kl = answer.seconds <= deadline, answer.first_token_kl(expected)
    return {"deadline": deadline, "seconds": answer.seconds, "met": met, "kl": kl, **tokens}


def show_deadlines(report: Mapping[str, Any]) -> Shown:
    """Make the table of a report."""
    rows, links = [], report["links"]
    for link, rate in ((link, f"{link['mb_per_s']:g} MB/s") for link in links):
        for of, name in (("bases alone", "bases"), ("both parts", "loading")):
            figures = f"{np.median(link[name]):.2f}", f"{np.mean(link[name + '_kl']):.4f}"
            rows.append([rate, f"none: {of}", "", *figures, *[""] * 4])
        for of, factor in dict.fromkeys((load["of"], load["factor"]) for load in link["loads"]):
            loads = [load for load in link["loads"] if (load["of"], load["factor"]) == (of, factor)]
            due, seconds = (f"{np.median([load[name] for load in loads]):.2f}" for name in ("deadline", "seconds"))
            tokens = [f"{np.mean([load[name] for load in loads]):.0f}" for name in ("both", "base", "computed")]
            kl = f"{np.mean([load['kl'] for load in loads]):.4f}"
            rows.append([rate, f"{factor:g} x {of}", due, seconds, kl, _share(loads), *tokens])
    preface = (
        f"{machine_and_vllm(report)}. {report['model']}, {report['quality']} in two parts, {report['prompts']} prompts "
        f"of {report['tokens']} tokens. Computed, the first token comes after {np.median(report['computing']):.2f} s. "
        f"Met, of the feasible deadlines: {_share([load for link in links for load in link['loads']])}."
    )
    columns = ["link ", "deadline ", "s", "first token, s", "KL", "met of feasible"]
    columns += ["both parts", "base alone", "computed"]
    table = ReportTable(columns, rows, "Median seconds, mean KL of the first token, mean tokens")
    return Shown("Loads with a deadline, in vLLM", preface, [table])


def _share(loads: Sequence[Mapping[str, Any]]) -> str:
    """Say how many of the feasible deadlines were met."""
    met = [load["met"] for load in loads if load["feasible"]]
    return f"{sum(met)} of {len(met)}"


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", "-m", required=True, help="folder of a checkpoint, or smollm2")
    parser.add_argument("--profile", type=Path, required=True, help="of the model")
    parser.add_argument("--tokens", type=int, default=1024, help="of each prompt")
    parser.add_argument("--prompts", type=int, default=6, help="number of them")
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 4.0, 16.0, 64.0], help="of the links, MB/s")


def _measure(given: argparse.Namespace) -> dict[str, Any]:
    return run_deadlines_bench(checkpoint(given.model), given.profile, given.tokens, given.prompts, given.rates)


if __name__ == "__main__":
    about = "Loads with a deadline in vLLM, from a store that is as slow as a link."
    sys.exit(run_bench("deadlines", about, _options, _measure, show_deadlines))
