"""The program in the process that an `Engine` starts: `python -m cuvee.eval.bench.engine_served`.

It reads commands from standard input and answers on standard output, a line of JSON each.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

from cuvee.codec.errors import CuveeError

IDLE_SECONDS = 600.0


class _Served:
    """The commands of an `Engine`, in its process."""

    def __init__(self) -> None:
        self._llm: Any = None
        self._requests = 0

    def start(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        defaults = {
            "enforce_eager": True,
            "max_num_seqs": 16,
            "skip_tokenizer_init": True,
            "disable_log_stats": False,  # the connector's figures are among them
        }
        self._llm = LLM(**{**defaults, **arguments})
        core = self._llm.llm_engine.engine_core.engine_core
        step = core.step_fn

        def patient() -> Any:
            outputs, executed = step()
            if not executed and core.scheduler.has_requests():
                time.sleep(0.001)  # as an engine in a process of its own does in its loop
            return outputs, executed

        core.step_fn = patient

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
        return {
            "seconds": first - began,
            "finished": finished - began,
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "logprobs": [
                [{str(token): entry.logprob for token, entry in at.items()} for at in output.outputs[0].logprobs or ()]
                for output in outputs
            ],
            "cached": [output.num_cached_tokens for output in outputs],
        }

    def converse(self, arrivals: list[Any], answer: int, seconds: float) -> dict[str, Any]:
        from vllm import SamplingParams

        parameters = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False)
        engine = self._llm.llm_engine
        due, said = deque(arrivals), defaultdict[int, list[int]](list)
        held: dict[int, deque[Any]] = defaultdict(deque)  # by conversation: turns that have arrived
        free_at: dict[int, float] = defaultdict(float)  # when its last answer was complete; infinite until it is
        asked: dict[str, tuple[int, dict[str, Any]]] = {}
        cpu, began = time.process_time(), time.perf_counter()
        while (now := time.perf_counter() - began) < seconds:
            while due and due[0][0] <= now:
                held[due[0][1]].append(due.popleft())
            for conversation, turns in held.items():
                if turns and free_at[conversation] <= now:
                    at, _, tokens = turns.popleft()
                    said[conversation] += tokens
                    self._requests += 1
                    turn = {"asked": max(at, free_at[conversation]), "prompt": len(said[conversation])}
                    asked[str(self._requests)] = conversation, {**turn, "cached": 0, "tokens_at": []}
                    free_at[conversation] = math.inf
                    prompt = {"prompt_token_ids": list(said[conversation])}
                    engine.add_request(str(self._requests), prompt, parameters)
            if not engine.has_unfinished_requests():
                if not due and not any(held.values()):
                    break
                time.sleep(0.001)
                continue
            for output in engine.step():
                conversation, turn = asked[output.request_id]
                now = time.perf_counter() - began
                new = len(output.outputs[0].token_ids) - len(turn["tokens_at"])
                turn["tokens_at"] += [now] * new
                turn["cached"] = output.num_cached_tokens
                if output.finished:
                    said[conversation] += output.outputs[0].token_ids
                    free_at[conversation] = now
        return {
            "turns": [turn for _, turn in asked.values()],
            "held": sum(map(len, held.values())),
            "cpu_seconds": time.process_time() - cpu,
            **{
                f"{kind}_bytes": sum(each.value for each in _samples(f"{kind}_bytes_total"))
                for kind in ("raw", "stored")
            },
        }

    def idle(self, chunks: float) -> None:
        deadline = time.monotonic() + IDLE_SECONDS
        while True:
            asked = self.ask([[1]], 1, False, None, None)  # the figures arrive with the engine's steps
            stored = sum(each.value for each in _samples("stored_total") if "chunk" in each.labels.values())
            if stored >= chunks and not sum(each.value for each in _samples("pending_bytes")):
                return
            if time.monotonic() > deadline:
                raise CuveeError(
                    f"the engine has stored {stored:.0f} of {chunks:.0f} chunks after {IDLE_SECONDS:.0f} s"
                )
            time.sleep(4 * asked["finished"])  # steps take the processors, which encoding at a low priority needs


def _samples(figure: str) -> list[Any]:
    from prometheus_client import REGISTRY

    samples = [sample for metric in REGISTRY.collect() for sample in metric.samples]
    return [sample for sample in samples if sample.name == f"vllm:cuvee_{figure}"]


def _serve(commands: Iterator[str], reply: Callable[[str], None]) -> None:
    """Execute commands until there are no more or one fails."""
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
