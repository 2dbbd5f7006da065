"""The program in the process that an `Engine` starts: `python -m cuvee.eval.bench.engine.served`.

It reads commands from standard input and answers on standard output, a line of JSON each.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cuvee.codec.errors import CuveeError

SETTLE_SECONDS = 120.0


class _Served:
    """The commands of an `Engine`, in its process."""

    def __init__(self) -> None:
        self._llm: Any = None
        self._steps = 0
        self._requests = 0
        self._origin: dict[str, float] = {}

    def start(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        defaults = {
            "enforce_eager": True,
            "max_num_seqs": 16,
            "skip_tokenizer_init": True,
            "disable_log_stats": False,  # the connector's figures are among them
        }
        self._llm = LLM(**{**defaults, **arguments})
        core = self._core()
        step = core.step_fn

        def counted() -> Any:
            outputs, executed = step()
            self._steps += 1
            if not executed and core.scheduler.has_requests():
                time.sleep(0.001)  # as an engine in a process of its own does in its loop
            return outputs, executed

        core.step_fn = counted
        self._origin = _connector_figures()

    def stop(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()
        self._llm = None

    def ask(
        self, prompts: list[list[int]], max_tokens: int, forget: bool, logprobs: int | None, params: Any
    ) -> dict[str, Any]:
        from vllm import SamplingParams

        extra = {"kv_transfer_params": params} if params is not None else None
        parameters = SamplingParams(
            temperature=0, max_tokens=max_tokens, logprobs=logprobs, ignore_eos=True, detokenize=False,
            extra_args=extra,
        )  # fmt: skip
        if forget and not self._llm.reset_prefix_cache():
            raise CuveeError("the engine did not empty its prefix cache")
        before, steps = _connector_figures(), self._steps
        engine, waiting = self._llm.llm_engine, set[str]()
        done: dict[str, Any] = {}
        began = time.perf_counter()
        for prompt in prompts:
            self._requests += 1
            waiting.add(str(self._requests))
            engine.add_request(str(self._requests), {"prompt_token_ids": prompt}, parameters)
        names = sorted(waiting, key=int)
        first = 0.0
        while len(done) < len(names):
            for output in engine.step():
                if output.request_id in waiting and output.outputs[0].token_ids:
                    waiting.discard(output.request_id)
                    first = time.perf_counter()
                if output.finished:
                    done[output.request_id] = output
        finished = time.perf_counter()
        outputs = [done[name] for name in names]
        after = _connector_figures()
        return {
            "seconds": first - began,
            "finished": finished - began,
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "logprobs": [
                [{str(token): entry.logprob for token, entry in at.items()} for at in output.outputs[0].logprobs or ()]
                for output in outputs
            ],
            "cached": [output.num_cached_tokens for output in outputs],
            "told": [output.kv_transfer_params for output in outputs],
            "figures": {
                **{name: value - before.get(name, 0) for name, value in after.items()},
                "steps": self._steps - steps,
            },
        }

    def settle(self, figure: str, least: float) -> dict[str, float]:
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            figures = _connector_figures()
            figures = {name: value - self._origin.get(name, 0) for name, value in figures.items()}
            if figures.get(figure, 0) >= least:
                return figures
            if time.monotonic() > deadline:
                raise CuveeError(f"{figure} is {figures.get(figure, 0):.0f}, expected {least:.0f}")
            self.ask([[1]], 1, False, None, None)  # the figures arrive with the engine's steps

    def idle(self) -> None:
        deadline = time.monotonic() + SETTLE_SECONDS
        self.ask([[1]], 1, False, None, None)  # the figures arrive with the engine's steps
        while _waiting():
            if time.monotonic() > deadline:
                raise CuveeError(f"the engine was still storing after {SETTLE_SECONDS:.0f} s")
            self.ask([[1]], 1, False, None, None)

    def _core(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core


def _connector_figures() -> dict[str, float]:
    """The connector's counters and the sums of its histograms, by `name` or `name{label}`, added up over engines."""
    from prometheus_client import REGISTRY

    figures: dict[str, float] = {}
    for metric in REGISTRY.collect():
        if not metric.name.startswith("vllm:cuvee_"):
            continue
        for sample in metric.samples:
            name = sample.name.removeprefix("vllm:cuvee_")
            if name.endswith(("_total", "_sum")):
                name = name.rpartition("_")[0]
                if own := [value for label, value in sample.labels.items() if label not in ("model_name", "engine")]:
                    name += f"{{{','.join(own)}}}"
                figures[name] = figures.get(name, 0) + sample.value
    return figures


def _waiting() -> float:
    """How many bytes wait to be stored, as the connector told last."""
    from prometheus_client import REGISTRY

    samples = [sample for metric in REGISTRY.collect() for sample in metric.samples]
    return float(sum(sample.value for sample in samples if sample.name == "vllm:cuvee_pending_bytes"))


def _let_engines_follow_each_other() -> None:
    """Let a second engine start on a CPU: vLLM then calls `vars` on all modules, and llvmlite's gives no mapping."""
    from vllm.triton_utils import dispatcher

    def mapping(value: object) -> Mapping[str, Any]:
        found: object = vars(value)
        return found if isinstance(found, Mapping) else {}

    dispatcher.vars = mapping


def _serve(commands: Iterator[str], reply: Callable[[str], None]) -> None:
    """Execute commands until there are no more or one fails."""
    _let_engines_follow_each_other()
    served = _Served()
    for line in commands:
        method, *arguments = json.loads(line)
        try:
            result = getattr(served, method)(*arguments)
        except Exception as error:
            import traceback

            traceback.print_exc()
            reply(json.dumps({"error": f"{type(error).__name__}: {error}"}))
            return
        reply(json.dumps({"result": result}))


if __name__ == "__main__":
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM logs to standard output
    with contextlib.suppress(BrokenPipeError):
        _serve(iter(sys.stdin), lambda text: print(text, file=replies, flush=True))
