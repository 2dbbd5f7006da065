"""Real vLLM engines for tests: they live in a process of their own, which is told what to do by files.

    run_engines(folder, engines) -> {name: Ran}     this file, run as a script: engines, one after the other
    run_script(folder, script, ...) -> (status, log)
    Server.started(folder, model, ...)              the OpenAI server, on a free port

pytest itself never imports vLLM: it starts threads, pins cores and keeps global state.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import math
import multiprocessing
import operator
import os
import pickle
import random
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
import types
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, cast

import pytest
from tests.integrations.stores.loopback import free_port
from tests.integrations.vllm import gpu_defaults
from tests.integrations.vllm_tier import cpu_copies
from tests.waiting import PATIENCE

ROOT = Path(__file__).parents[3]
MAX_MODEL_LEN = 512
FP8 = ("fp8_e4m3", "fp8_e5m2")
NO_FP8 = "vLLM needs AVX-512 for fp8 caches on a CPU"
_KV_BYTES = 64 << 20
_START_SECONDS, _STOP_SECONDS = 300.0, 90.0  # of a server
_freeze = gc.freeze

# A window is two blocks of the engine, a fraction of a prompt.
_WINDOW = {"head_dim": 32, "sliding_window": 64, "num_hidden_layers": 4}
_SHARED = {
    **_WINDOW,
    "num_hidden_layers": 8,
    "num_kv_shared_layers": 4,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 2,
    "vocab_size_per_layer_input": 256,
    "hidden_size_per_layer_input": 32,
}
# Their states are smaller than the pages of a block of 32 tokens, so that the engine does not make larger blocks.
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_expand": 1}
# On a CPU, vLLM 0.32 and 0.33 raise where a step of Mamba 2 spans several of these. transformers, which shows once how
# the model caches, multiplies matrices of that size: at 2048 it takes 50 seconds.
_MAMBA2["mamba_chunk_size"] = MAX_MODEL_LEN
_TINY: dict[str, tuple[str, dict[str, Any]]] = {
    # Steps of one block, the only ones that its tests take, span no more than one of these.
    "falcon_h1": ("FalconH1Config", {**_MAMBA2, "mamba_d_ssm": 128, "mamba_chunk_size": 64}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            **_WINDOW,
            "query_pre_attn_scalar": 32,
            "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention"],
        },
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        # vLLM reads no head of its own for Gemma 3n.
        {**_SHARED, "laurel_rank": 16, "activation_sparsity_pattern": [0.0] * 8, "tie_word_embeddings": True},
    ),
    "gemma4": ("Gemma4TextConfig", {**_SHARED, "global_head_dim": 64}),
    "gpt_oss": ("GptOssConfig", {**_WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "granite": (
        "GraniteMoeHybridConfig",
        {
            **_MAMBA2,
            "num_hidden_layers": 4,
            "layer_types": ["mamba", "attention"] * 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 128,
            "position_embedding_type": "rope",
        },
    ),
    "lfm2": (
        "Lfm2Config",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention"] * 2,
            "tie_word_embeddings": True,
            "block_auto_adjust_ff_dim": False,
            # vLLM reads these, too.
            "conv_dim": 128,
            "conv_dim_out": 128,
            "block_dim": 128,
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
        },
    ),
    "llama": ("LlamaConfig", {"head_dim": 32}),
    "llama4": (
        "Llama4TextConfig",
        {
            "head_dim": 32,
            "attention_chunk_size": 128,
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 1, 0, 1],
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 256,
        },
    ),
    "mistral": ("MistralConfig", _WINDOW),
    "nemotron_h": (
        "NemotronHConfig",
        {
            "head_dim": 32,
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "attention"] * 2,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 1,
            "expand": 1,
        },
    ),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 64}),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            # vLLM's operators for CPUs take heads of 128 and bfloat16; wide keys and values keep blocks at 32 tokens.
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 1,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "num_hidden_layers": 4,
            "layer_types": [*["linear_attention"] * 3, "full_attention"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
    ),
}


def need_vllm() -> None:
    """Skip where vLLM is not installed; fail instead if CUVEE_REQUIRE_VLLM=1."""
    if find_spec("vllm") is not None:
        return
    if os.environ.get("CUVEE_REQUIRE_VLLM") == "1":
        pytest.fail("CUVEE_REQUIRE_VLLM=1, but vLLM is not installed")
    pytest.skip("needs vLLM")


def fp8_runs() -> bool:
    """Whether vLLM's attention takes fp8 caches on this CPU: with AVX-512 or AMX."""
    import torch

    return bool(torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported())


def params(kinds: Iterable[str], nightly: Collection[str] = ()) -> list[Any]:
    """Kinds of engines as parameters of a test, which skips those that this CPU cannot run."""
    marks: dict[str, list[Any]] = {kind: [pytest.mark.nightly] for kind in nightly}
    if not fp8_runs():
        marks |= {kind: [pytest.mark.skip(reason=NO_FP8)] for kind in FP8}
    return [pytest.param(kind, marks=marks.get(kind, [])) for kind in kinds]


def save_tiny_model(family: str, path: Path, seed: int = 0, **changes: Any) -> Path:
    """A checkpoint of three or four random layers with two KV heads, unless changed, without a tokenizer.

    The weights are large enough that attention looks far back and predictions are sharp: a wrong cache shows.
    """
    import torch
    import transformers

    name, extra = _TINY[family]
    config = getattr(transformers, name)(
        **{
            "vocab_size": 256,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            "tie_word_embeddings": False,
            "initializer_range": 0.2,
            **extra,
            **changes,
        }
    )
    torch.manual_seed(seed)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


def cuvee(store: str | Sequence[str], **options: Any) -> dict[str, Any]:
    """`kv_transfer_config` of our connector; lossless, and loads whatever it finds, unless told otherwise.

    Threads that store do not give way, and lookups may be late: beside another engine on the same cores, both would
    wait for seconds.
    """
    extra: dict[str, Any] = {
        "store": store, "quality": "lossless", "decide": "always", "chunk_tokens": 128, "store_niceness": 0,
        "lookup_timeout": 30.0, **options,
    }  # fmt: skip
    return {
        "kv_connector": "CuveeConnector",
        "kv_connector_module_path": "cuvee.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {name: value for name, value in extra.items() if value is not None},
    }


def transfer(folder: Path, store: str, **options: Any) -> dict[str, Any]:
    """Our connector on a store in a folder, as an option of an engine; chunks of 64 tokens, unless told otherwise."""
    return {"kv_transfer_config": cuvee(f"file://{folder / 'stores' / store}", **{"chunk_tokens": 64, **options})}


@dataclass(frozen=True, slots=True)
class Step:
    """Prompts that are answered, greedily unless several answers are asked for.

    Attributes:
        prompts: token ids; [step, prompt, ids] stands for that earlier prompt, its answer, and these ids.
        together: submit all at once, rather than one after the other.
        max_tokens: tokens of an answer.
        samples: answers to each prompt; several are drawn.
        logprobs: of so many tokens at every position; -1: of all.
        salt: `cache_salt` of the requests.
        params: `kv_transfer_params`, one for each prompt; none at all if empty.
        media: of each prompt, more fields of vLLM's prompts: what stands for its placeholders; none at all if empty.
        forget: empty the engine's own prefix cache before each submission.
        sleeps: let the engine sleep and wake up first; "changed": and change its weights in place meanwhile.
        weights: change them first, and tell the connector nothing: "changed" in place, by training for instance, or
            "reloaded" from the checkpoint's files. "named": have the checkpoint read, and wait for its name.
        until: repeat a request of one token until a counter has reached a value: (name, value).
        settles: repeat one until nothing waits to be stored; "each": after each submission.
    """

    prompts: Sequence[Any] = ()
    together: bool = False
    max_tokens: int = 8
    samples: int = 1
    logprobs: int = 5
    salt: str | None = None
    params: Sequence[Mapping[str, Any] | None] = ()
    media: Sequence[Mapping[str, Any]] = ()
    forget: bool = False
    sleeps: bool | Literal["changed"] = False
    weights: Literal["changed", "reloaded", "named"] | None = None
    until: tuple[str, float] | None = None
    settles: bool | Literal["each"] = False


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine and what it is to do; `options` are arguments of `vllm.LLM`.

    `unread`: none of the checkpoint is read to name it before a step says so. `watched`: a watchdog looks for files and
    sockets in the connector's hooks, and then, so that it is seen to work, for an `os.stat` in one; the log has both.
    """

    name: str
    model: Path
    steps: Sequence[Step]
    options: Mapping[str, Any] = field(default_factory=dict)
    unread: bool = False
    watched: bool = False


@dataclass(frozen=True, slots=True)
class Program:
    """A script that runs where engines do, because to import vLLM takes longer than the script; it may start none."""

    name: str
    path: Path
    arguments: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine said to a prompt.

    Attributes:
        tokens: generated ids.
        logprobs: at every position, token -> logprob.
        cached: prompt tokens that were not computed, by the engine's count.
        told: `kv_transfer_params` that came with the answer.
    """

    tokens: list[int]
    logprobs: list[dict[int, float]]
    cached: int
    told: dict[str, Any] | None = None


def cached(answers: Sequence[Answer]) -> list[int]:
    """The prompt tokens that were not computed, of each answer."""
    return [answer.cached for answer in answers]


@dataclass(frozen=True, slots=True)
class Ran:
    """What an engine did: the answers of each step, its Prometheus counters after each, what it logged."""

    steps: list[list[Answer]]
    metrics: list[dict[str, float]]
    log: str = ""

    def metric(self, name: str, after: int = -1) -> float:
        """A counter or gauge after a step (default: the last), as `total`; 0 if there is none."""
        return total(self.metrics[after], name)

    def assert_sound(self, *unless: str) -> None:
        """Nothing failed, was recomputed or left out, these metrics apart."""
        lost = (f"store_operations{{result={result}}}" for result in ("corrupt", "error", "dropped"))
        for name in {"failures", "contained", "recomputed_tokens", "stores_skipped", *lost} - {*unless}:
            assert self.metric(f"vllm:cuvee_{name}") == 0, name


def ids(count: int, seed: int | str) -> list[int]:
    """Random tokens that every tiny model has."""
    return random.Random(seed).choices(range(1, 256), k=count)


def distinct_chunks(size: int, *texts: Sequence[int]) -> int:
    """How many whole chunks texts have, each after its prefix, if every token has KV."""
    return len({tuple(text[:end]) for text in texts for end in range(size, len(text) + 1, size)})


def total(samples: Mapping[str, float], name: str) -> float:
    """Add up the samples of a metric, or of those of its labels that are named: `name{kind=chunk,tier=disk}`."""
    name, _, labels = name.partition("{")
    wanted = set(filter(None, labels.rstrip("}").split(",")))
    own = ((key.replace('"', "").rstrip("}").partition("{"), value) for key, value in samples.items())
    return sum(value for (of, _, held), value in own if of == name and wanted <= set(held.split(",")))


class EngineFailure(AssertionError):
    """A process with engines failed; the message ends with its output."""


def environment(**changes: str) -> dict[str, str]:
    """Of a process with an engine: offline, one thread, not pinned to a core, engine and caller in one process."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    startup = str(Path(__file__).with_name("startup"))
    path = os.pathsep.join(filter(None, (startup, str(ROOT / "src"), os.environ.get("PYTHONPATH"), str(ROOT))))
    return {
        **inherited,
        "PYTHONPATH": path,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "LMCACHE_TRACK_USAGE": "false",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
        # vLLM's lookup of n-grams gives torch as many threads as Numba has; on shared cores they wait for each other.
        "NUMBA_NUM_THREADS": "1",
        # vLLM has the ranks of logprobs counted by a function that takes each process three seconds to compile.
        "TORCH_COMPILE_DISABLE": "1",
        **changes,
    }


def run_engines(
    folder: Path, engines: Sequence[Engine | Program], timeout: float = 600.0, fresh: bool = False, **variables: str
) -> Results:
    """Run engines one after the other in the process of those before that had this environment, or in a new one.

    Args:
        folder: for the files of this run; made.
        engines: with names of their own.
        timeout: seconds.
        fresh: in a new process: keys that depend on string hashes or addresses are found by the one that made them.
        variables: of the environment.

    Raises:
        EngineFailure: the process ended badly or took too long. An engine that failed is left to who asks for it.
    """
    folder.mkdir(parents=True)
    order, results = folder / "order", folder / "results"
    order.write_bytes(pickle.dumps(list(engines)))
    process = _process(folder, variables, fresh)
    status, text = process.run(order, results, timeout)
    if status != 0:
        _end(process)
        raise EngineFailure(f"engines {', '.join(engine.name for engine in engines)}: {status}\n{_last(text)}")
    return read_results(results, text)


class _EngineProcess:
    """A process that runs orders of engines until it is ended, or pytest is.

    Args:
        folder: its working directory, with its log.
        variables: of its environment.
        fresh: not forked.
    """

    def __init__(self, folder: Path, variables: dict[str, str], fresh: bool) -> None:
        self.variables = variables
        self._log = folder / "log.txt"
        # With AMX, oneDNN rounds a product of bfloat16 otherwise in a batch of another size. The attention keeps AMX.
        usual = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
        self._process = _start(folder, [__file__], usual | variables, True, fresh)

    def run(self, order: Path, results: Path, timeout: float) -> tuple[int | str, str]:
        """Have it do what an order says: 0, its exit status, or that it took too long; and its output."""
        timeout *= _patience()
        deadline, before = time.monotonic() + timeout, self._log.stat().st_size
        orders = self._process.stdin
        assert orders is not None
        with contextlib.suppress(BrokenPipeError):
            orders.write(f"{order}\n{results}\n".encode())
            orders.flush()
        while not results.exists() and self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        ended = self._process.poll()
        status = 0 if results.exists() else f"not done after {timeout:g} s" if ended is None else ended
        return status, self._log.read_bytes()[before:].decode(errors="replace")

    def end(self) -> None:
        """End it and its workers at once."""
        with killed_at_the_end(self._process):
            cast(Any, self._process.stdin).close()


_running: list[_EngineProcess] = []  # at most one with the usual environment, and one with another


def _process(folder: Path, variables: dict[str, str], fresh: bool) -> _EngineProcess:
    """The one that runs with this environment, or a new one. To import vLLM anew takes longer than the memory of two is
    worth: the one with the usual environment goes on beside one with another.
    """
    for process in _running.copy():
        same = process.variables == variables
        if same and not fresh:
            return process
        if same or process.variables:
            _end(process)
    _running.append(_EngineProcess(folder, variables, fresh))
    return _running[-1]


def _end(*processes: _EngineProcess) -> None:
    for process in processes:
        _running.remove(process)
        process.end()


@atexit.register
def _end_running() -> None:
    _end(*_running)


def run_script(
    folder: Path, script: str, *arguments: str, timeout: float = 600.0, **variables: str
) -> tuple[int | str, str]:
    """Run a script that starts engines in a new process: its exit status, or that it took too long, and its output.

    Args:
        folder: its working directory.
        script: path.
        arguments: of the script.
        timeout: seconds.
        variables: of the environment.
    """
    timeout *= _patience()
    process = _start(folder, [script, *arguments], variables)
    with killed_at_the_end(process):
        try:
            status: int | str = process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = f"not done after {timeout:g} s"
    return status, (folder / "log.txt").read_text(errors="replace")


def _patience() -> int:
    return gpu_defaults.PATIENCE if gpu_defaults.wanted() else 1


# Variables that nothing reads when vLLM is imported. With any other, a process imports it by itself.
_READ_LATER = {
    "ONEDNN_MAX_CPU_ISA", "VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
}  # fmt: skip


def _start(
    folder: Path, command: Sequence[str], variables: Mapping[str, str], asked: bool = False, fresh: bool = False
) -> subprocess.Popen[bytes] | _Fork:
    """A process of Python in a folder, where it writes log.txt; `asked` through its standard input."""
    environ = environment(**variables)
    if gpu_defaults.wanted():
        environ.update({} if command[0] == "-m" else gpu_defaults.GPU)  # servers keep the defaults of a CPU
    elif not fresh and variables.keys() <= _READ_LATER:
        return _Fork(folder, command, environ, asked)
    with (folder / "log.txt").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE if asked else None,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environ,
            cwd=folder,
            start_new_session=True,
        )


@functools.cache
def _forking() -> tuple[Connection, subprocess.Popen[bytes]]:
    """A process that imports vLLM once, to be forked, and the way to it. It is killed when pytest ends."""
    orders, theirs = Pipe()
    process = subprocess.Popen(
        [sys.executable, __file__, str(theirs.fileno())], env=environment(), start_new_session=True,
        stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
    )  # fmt: skip
    theirs.close()
    atexit.register(process.wait)  # after the next, which is registered later
    atexit.register(process.kill)
    return orders, process


class _Fork:
    """A script, or a module after `-m`, in a process that has imported vLLM, which takes eight seconds; used as
    `subprocess.Popen` is.
    """

    def __init__(self, folder: Path, command: Sequence[str], environ: Mapping[str, str], asked: bool) -> None:
        (folder / "log.txt").touch()
        orders, forking = _forking()
        taken, given = os.pipe()
        self._said, theirs = Pipe(duplex=False)
        orders.send((str(folder), list(command), dict(environ)))
        for handle in (theirs.fileno(), taken):
            send_handle(orders, handle, forking.pid)
        theirs.close()
        os.close(taken)
        self.stdin = os.fdopen(given, "wb")
        if not asked:
            self.stdin.close()
        self._status: int | None = None
        self.pid: int = self._said.recv()

    def terminate(self) -> None:
        """Ask it to stop."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)

    def poll(self) -> int | None:
        """Its exit status, once it has ended."""
        if self._status is None and self._said.poll():
            self._status = self._said.recv()
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, when it has ended."""
        if self._status is None and not self._said.poll(timeout):
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return cast(int, self.poll())


def read_results(path: Path, text: str) -> Results:
    """What engines did; `text` is the output of their process."""
    found: dict[str, Ran | EngineFailure] = {}
    for name, ran in pickle.loads(path.read_bytes()).items():
        log = text.partition(mark(name))[2].partition("=== end ===")[0]
        found[name] = (
            replace(ran, log=log) if isinstance(ran, Ran) else EngineFailure(f"engine {name}: {ran}\n{_last(log)}")
        )
    return Results(found)


class Results(dict[str, Any]):
    """What the engines of a process did, by name. Asking for one that failed raises EngineFailure, with its log."""

    def __getitem__(self, name: str) -> Ran:
        ran: Ran | EngineFailure = super().__getitem__(name)
        if isinstance(ran, EngineFailure):
            raise ran
        return ran


@contextlib.contextmanager
def killed_at_the_end(process: subprocess.Popen[bytes] | _Fork) -> Iterator[None]:
    """Leave nothing of a process's session behind, workers included."""
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# Comparisons -----------------------------------------------------------------------------------------------------


def distance(answer: Answer, reference: Answer) -> float:
    """Largest difference between two answers' logprobs, of tokens that both name; inf if other tokens were generated.

    Where the reference's two best tokens are closer to each other than either is to its counterpart, picking the other
    one is no difference; positions after that are not compared, as they continue another text.
    """
    worst = 0.0
    for ours, theirs, token, expected in zip(
        answer.logprobs, reference.logprobs, answer.tokens, reference.tokens, strict=True
    ):
        worst = max([worst, *(abs(ours[key] - theirs[key]) for key in ours.keys() & theirs.keys())])
        if token != expected:
            gap = theirs[expected] - theirs.get(token, -math.inf)
            return worst if gap <= 2 * worst else math.inf
    return worst


def spread(runs: Sequence[Sequence[Answer]]) -> float:
    """Largest distance of any later run of the same prompts from the first: what an engine makes of batching alone."""
    first, *others = runs
    return max(distance(answer, reference) for run in others for answer, reference in zip(run, first, strict=True))


# A server --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(
    folder: Path, command: Sequence[str], port: int, *, page: str = "health", fresh: bool = False, **variables: str
) -> Iterator[str]:
    """Run vLLM's OpenAI server, or one that shows another page once it serves, by arguments of Python, in a folder with
    its log; yield its URL, and stop it as an operator would. `fresh`: not forked.
    """
    process = _start(folder, command, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", **variables}, fresh=fresh)
    log = folder / "log.txt"
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + _START_SECONDS
    try:
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/{page}", timeout=5).close()
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise EngineFailure(f"the server did not start\n{_last(log.read_text(errors='replace'))}")
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
    """Whether any process of a session does."""
    try:
        os.killpg(session, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


class Server:
    """vLLM's OpenAI server.

    Args:
        url: where it listens.
        log: its log.
    """

    def __init__(self, url: str, log: Path) -> None:
        self.url = url
        self._log = log

    @classmethod
    @contextlib.contextmanager
    def started(cls, folder: Path, model: Path, transfer: dict[str, Any], *arguments: str) -> Iterator[Self]:
        """Start one in a folder, with our connector and more arguments; stop it as an operator would."""
        folder.mkdir(parents=True)
        port = free_port()
        command = [
            "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1",
            "--port", str(port), "--shutdown-timeout", "60", "--served-model-name", "model", "--dtype", "float32",
            "--enforce-eager", "--block-size", "32",
            "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(_KV_BYTES),
            "--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(transfer), *arguments,
        ]  # fmt: skip
        with serving(folder, command, port) as url:
            server = cls(url, folder / "log.txt")
            yield server
            begun = time.monotonic()
        if time.monotonic() - begun > 0.9 * _STOP_SECONDS:
            raise EngineFailure(f"the server did not stop\n{_last(server.text())}")

    def text(self) -> str:
        """What it has logged."""
        return self._log.read_text(errors="replace")

    def complete(self, prompt: Sequence[int], max_tokens: int = 8, **fields: Any) -> Completion:
        """POST /v1/completions, greedily, with token ids."""
        body = {
            "model": "model", "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, **fields,
        }  # fmt: skip
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                data = json.load(response)
        except urllib.error.HTTPError as error:
            raise EngineFailure(f"{error}: {error.read()[:2000]!r}\n{_last(self.text())}") from error
        details = data["usage"].get("prompt_tokens_details") or {}
        return Completion(data["choices"][0]["token_ids"], details.get("cached_tokens") or 0)

    def metric(self, name: str) -> float:
        """A counter or gauge of GET /metrics, as `total`."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            lines = response.read().decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return total({name: float(value) for name, _, value in pairs}, name)

    def wait_for_metric(self, name: str, least: float) -> None:
        """Send requests of one token until a counter has reached a value: counters travel with the engine's steps."""
        deadline = time.monotonic() + PATIENCE
        while (value := self.metric(name)) < least:
            if time.monotonic() > deadline:
                raise EngineFailure(f"{name}: {value} after {PATIENCE:g} s, not {least}\n{_last(self.text())}")
            self.complete([1], max_tokens=1)


class Completion(NamedTuple):
    """An answer over HTTP: its token ids, and how many of the prompt's tokens the server says were cached."""

    tokens: list[int]
    cached: int


# What runs in the process ------------------------------------------------------------------------------------------


def _last(log: str) -> str:
    """The end of a log, without what vLLM says at every start."""
    lines = [line for line in log.splitlines() if "is already registered. Overwriting." not in line]
    return "\n".join(line[:500] for line in lines[-80:])


def mark(name: str) -> str:
    """What stands in the log in front of what an engine says."""
    return f"=== engine {name} ==="


def snapshot(llm: Any) -> dict[str, float]:
    """Counters and gauges by name and labels."""
    values: dict[str, float] = {}
    for metric in llm.get_metrics():
        if isinstance(value := getattr(metric, "value", None), int | float):
            labels = ",".join(f"{name}={text}" for name, text in sorted(metric.labels.items()) if name != "model_name")
            values[f"{metric.name}{{{labels}}}"] = values.get(f"{metric.name}{{{labels}}}", 0) + value
        elif (count := getattr(metric, "count", None)) is not None:
            values[f"{metric.name}_count"] = values.get(f"{metric.name}_count", 0) + count
    return values


def _answer(llm: Any, prompts: Sequence[Sequence[int]], step: Step) -> list[Answer]:
    from vllm import SamplingParams

    def parameters(params: Any) -> SamplingParams:
        return SamplingParams(
            temperature=float(step.samples > 1),
            n=step.samples,
            max_tokens=step.max_tokens,
            logprobs=step.logprobs,
            ignore_eos=True,
            detokenize=False,
            extra_args=None if params is None else {"kv_transfer_params": params},
        )

    salt = {} if step.salt is None else {"cache_salt": step.salt}
    given = [parameters(params) for params in step.params or [None] * len(prompts)]
    requests = [
        ({"prompt_token_ids": list(prompt), **salt, **media}, one)
        for prompt, one, media in zip(prompts, given, step.media or [{}] * len(prompts), strict=True)
    ]
    answers = []
    for batch in [requests] if step.together else [[request] for request in requests]:
        if step.forget:
            _forget(llm)
        asked, wanted = zip(*batch, strict=True) if batch else ((), ())
        for output in llm.generate(list(asked), list(wanted), use_tqdm=False):
            for said in output.outputs:
                logprobs = [{token: entry.logprob for token, entry in at.items()} for at in said.logprobs]
                told = output.kv_transfer_params
                answers.append(Answer(list(said.token_ids), logprobs, output.num_cached_tokens, told))
        if step.settles == "each":
            _settle(llm)
    return answers


def _settle(llm: Any) -> None:
    for _ in range(3):  # ranks report one step later what they hold
        _take_a_step(llm)
    _wait_for(llm, "vllm:cuvee_pending_bytes", operator.not_)
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)  # None: of another process
    if core is not None and core.scheduler.has_requests():  # vLLM's own offloading goes on without any
        while core.scheduler.has_requests():
            llm.llm_engine.step()
        _take_a_step(llm)  # which counts what that was


def _sleep(llm: Any, changed: bool) -> None:
    """Let an engine sleep and wake up: a worker on a CPU, which ignores both, calls the connector as vLLM 0.33's worker
    on a GPU does. Meanwhile noise replaces the engine's pages, and some weights change if that is asked for.
    """
    import torch
    from vllm.config import get_layers_from_vllm_config
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    from vllm.model_executor.layers.attention import Attention

    connector = get_kv_transfer_group()
    worker = llm.llm_engine.model_executor.driver_worker.worker
    runner = worker.model_runner

    def sleep(level: int = 1) -> None:
        for _ in range(2):
            connector.unregister_kv_caches()
        memory: dict[int, torch.Tensor] = {}  # layers share it
        for layer in get_layers_from_vllm_config(runner.vllm_config, Attention).values():
            old = layer.kv_cache
            held = old.untyped_storage()
            if held.data_ptr() not in memory:
                memory[held.data_ptr()] = torch.randn(held.nbytes() // old.element_size()).to(old.dtype)
            layer.kv_cache = new = memory[held.data_ptr()].as_strided(old.shape, old.stride(), old.storage_offset())
            runner.kv_caches = [new if cache is old else cache for cache in runner.kv_caches]

    def wake_up(tags: list[str] | None = None) -> None:
        for _ in range(2 * (tags is None or "kv_cache" in tags)):
            connector.restore_kv_caches()

    worker.sleep, worker.wake_up = sleep, wake_up
    llm.sleep(level=1)
    assert llm.wake_up(tags=["weights"]) is False
    if changed:
        next(each for each in runner.model.parameters() if each.numel()).data[5] += 1.0
    assert llm.wake_up(tags=["kv_cache"]) is True
    del worker.sleep, worker.wake_up


def _forget(llm: Any) -> None:
    """Empty the engine's prefix cache. With asynchronous scheduling it may still draft behind the last answer."""
    for _ in range(4):
        if llm.reset_prefix_cache():
            return
        llm.llm_engine.step()
    raise RuntimeError("the engine did not empty its prefix cache")


def _wait_for(llm: Any, metric: str, reached: Callable[[float], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not reached(value := total(snapshot(llm), metric)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{metric} is {value}")
        _take_a_step(llm)


def _take_a_step(llm: Any) -> None:
    from vllm import SamplingParams

    llm.generate([{"prompt_token_ids": [1]}], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)


_digests_held: list[threading.Event] = []


def _hold_digests() -> None:
    """Read no checkpoint of this process until a step says so."""
    from cuvee.integrations.identity import checkpoint, weight_fingerprints

    go = threading.Event()

    def held(usual: Callable[..., Any]) -> Callable[..., Any]:
        def read(*arguments: Any) -> Any:
            go.wait()
            return usual(*arguments)

        return read

    for module, name in ((checkpoint, "file_digests"), (weight_fingerprints, "_fingerprints")):
        vars(module)[name] = held(vars(module)[name])
    _digests_held[:] = [go]


def run_engine(engine: Engine) -> Ran:
    """Start an engine in this process, after `import_vllm`, have it do what it is to do, and end it."""
    import torch

    from cuvee.integrations.identity import weights_name

    # AMX needs a permission of the operating system. oneDNN, as `run_engines` limits it, does not ask for it.
    torch.cpu._init_amx()
    defaults = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 8,
        "block_size": 32,
        "skip_tokenizer_init": True,
        "kv_cache_memory_bytes": _KV_BYTES,
        "disable_log_stats": False,
        "seed": 0,
    }
    if engine.unread:
        _hold_digests()
    # Under any load, a step that follows at once is to find a name.
    weights_name.START_SECONDS = 0.5 if engine.unread else 120.0
    watching = contextlib.ExitStack()
    dog = watching.enter_context(_watched()) if engine.watched else None
    llm = start_engine(engine.model, **{**defaults, **engine.options})
    config = llm.llm_engine.vllm_config
    ahead = config.scheduler_config.async_scheduling
    print(f"V2 runner: {config.use_v2_model_runner}, async scheduling: {ahead}", flush=True)
    try:
        done = run_steps(llm, engine.steps)
        if dog is not None:
            print(f"watchdog: {sorted(dog.hooks)}\nwatchdog: {dog.bites}", flush=True)
            _look_at_a_file_in_a_step(llm)
            print(f"watchdog: {dog.bites}", flush=True)
        return done
    finally:
        watching.close()
        end_engine(llm)


def run_program(program: Program) -> Ran:
    """Run a script in this process; its output is in the log."""
    sys.argv = [str(program.path), *program.arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")
    return Ran([], [])


def _watched() -> contextlib.AbstractContextManager[Any]:
    """Watch what vLLM calls of our connector, apart from its start and its end."""
    from tests.integrations.vllm.watchdog import watched

    from cuvee.integrations.vllm.connector import CuveeConnector

    rare = ("register_kv_caches", "unregister_kv_caches", "restore_kv_caches", "shutdown")
    methods = [name for name, value in vars(CuveeConnector).items() if callable(value) and not name.startswith("_")]
    return watched({CuveeConnector: [name for name in methods if name not in rare]})


def _look_at_a_file_in_a_step(llm: Any) -> None:
    from cuvee.integrations.vllm.scheduler.side import SchedulerSide

    plan = SchedulerSide.plan

    def looking(self: Any, output: Any) -> Any:
        os.stat(ROOT)
        return plan(self, output)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SchedulerSide, "plan", looking)
        _take_a_step(llm)


def run_steps(llm: Any, steps: Sequence[Step]) -> Ran:
    """Have an engine do what it was ordered to."""
    done = Ran([], [])
    asked: list[list[list[int]]] = []
    for step in steps:
        prompts = []
        for prompt in step.prompts:
            if prompt and isinstance(prompt[-1], list):
                earlier, index, ids = prompt
                prompts.append([*asked[earlier][index], *done.steps[earlier][index].tokens, *ids])
            else:
                prompts.append(prompt)
        asked.append(prompts)
        if step.sleeps:
            _sleep(llm, step.sleeps == "changed")
        if step.weights == "changed":
            model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
            for parameter in model.parameters():
                parameter.data.mul_(1.5)
        elif step.weights == "reloaded":
            llm.collective_rpc("reload_weights")
            _forget(llm)
        elif step.weights == "named":
            _digests_held[0].set()
            for thread in threading.enumerate():
                if thread.name == "cuvee-weights":
                    thread.join(PATIENCE)
        done.steps.append(_answer(llm, prompts, step))
        if step.until:
            metric, least = step.until
            _wait_for(llm, metric, functools.partial(operator.le, least))
        if step.settles:
            _settle(llm)
        done.metrics.append(snapshot(llm))
    return done


@functools.cache
def import_vllm() -> None:
    """Import vLLM, so that engines can follow each other in this process."""
    if gpu_defaults.wanted():
        gpu_defaults.install()
    # Its modules make a million objects, none of them garbage: not searching them saves a quarter of the import, and
    # more than half of every engine, which would have all of them searched seven times at its end.
    gc.disable()
    importlib.import_module("vllm.entrypoints.llm")
    # An engine's worker on a CPU calls `vars` on all modules when it starts, which fails for one of llvmlite's.
    importlib.import_module("cuvee.integrations.vllm.connector")
    assert not {"numba", "llvmlite"} & sys.modules.keys(), "the connector imports Numba"
    gc.enable()
    gc.freeze()
    # An engine's own objects are garbage once it has ended.
    cast(Any, gc).freeze = cast(Any, gc).unfreeze = lambda: None
    # Its CPU platform searches all modules at every start, once is enough; of llvmlite's library, `vars` is no mapping.
    from vllm.triton_utils import dispatcher

    def mapping(value: object) -> Mapping[str, Any]:
        found: object = vars(value)
        return found if isinstance(found, Mapping) else {}

    dispatcher.vars = mapping
    platform: Any = importlib.import_module("vllm.platforms").current_platform
    once = functools.cache(platform.register_triton_kernel_overrides)
    type(platform).register_triton_kernel_overrides = staticmethod(once)
    # It asks another process, which imports all of it again, what a model can do: a GPU must not be used before a fork.
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda inspect: inspect()
    # Ranks are forked, as they are on a GPU: a CPU's import all of it again, each of them.
    system: Any = importlib.import_module("vllm.utils.system_utils")
    system.multiprocessing = types.SimpleNamespace(get_context=lambda _: multiprocessing.get_context("fork"))


def start_engine(model: str | Path, **options: Any) -> Any:
    """`vllm.LLM`, after `import_vllm`. One that offloads does so from a CPU."""
    from vllm import LLM

    if options.get("kv_transfer_config", {}).get("kv_connector") == "OffloadingConnector":
        cpu_copies.install()
    gc.collect()
    _freeze()  # what the engine before has imported
    return LLM(model=str(model), **options)


def end_engine(llm: Any) -> None:
    """Shut an engine down; vLLM 0.32 asks what it kills for a name, and gives up if that has just ended by itself."""
    psutil: Any = importlib.import_module("psutil")
    core = llm.llm_engine.engine_core
    try:
        core.shutdown()
    except psutil.NoSuchProcess:
        for process in core.resources.engine_manager.processes:
            process.kill()
            process.join()


def main() -> None:
    """Do what orders say until there are no more: lines with the path of an order, and of its results."""
    import_vllm()
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    for line in sys.stdin:
        order, results = Path(line.rstrip("\n")), Path(sys.stdin.readline().rstrip("\n"))
        done: dict[str, Ran | str] = {}
        for engine in pickle.loads(order.read_bytes()):
            begun, worked = time.monotonic(), time.process_time()
            print(mark(engine.name), flush=True)
            try:
                done[engine.name] = run_engine(engine) if isinstance(engine, Engine) else run_program(engine)
            except Exception:
                done[engine.name] = traceback.format_exc()
                ensure_kv_transfer_shutdown()  # or the next engine would be given this one's connector
            took, worked = time.monotonic() - begun, time.process_time() - worked
            print(f"=== end === of {engine.name} after {took:.1f} s, {worked:.1f} s of them on a core", flush=True)
        written = results.with_suffix(".part")
        written.write_bytes(pickle.dumps(done))
        written.replace(results)


def fork(orders: Connection) -> None:
    """Fork a process for each order, which runs a script. For each, another one waits, and tells who ordered it."""
    import_vllm()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        try:
            folder, command, environ = orders.recv()
        except EOFError:
            os._exit(0)
        said, asked = recv_handle(orders), recv_handle(orders)
        if os.fork() == 0:
            break
        os.close(said)
        os.close(asked)
    orders.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if child := os.fork():
        answers = Connection(said, readable=False)
        answers.send(child)
        answers.send(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        os._exit(0)
    os.close(said)
    os.setsid()
    os.chdir(folder)
    log = os.open("log.txt", os.O_WRONLY | os.O_TRUNC)
    for own, handle in ((0, asked), (1, log), (2, log)):
        os.dup2(handle, own)
    os.environ.clear()
    os.environ.update(environ)
    if command[0] == "-m":
        sys.argv[:] = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = command
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    from tests.integrations.vllm import engines  # whose classes are in orders, unlike those of a script

    if sys.argv[1:]:
        engines.fork(Connection(int(sys.argv[1])))
    else:
        engines.main()
