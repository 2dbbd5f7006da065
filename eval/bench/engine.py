"""What compressed offload costs and saves in vLLM, measured on the real engine with `CuveeConnector`.

    footprint      bytes in a file store over raw bytes, on text that no profile has seen; every preset
    first token    seconds from request to first token, for a prompt of a long prefix and a short question:
                   computed; found in the engine's own prefix cache (the floor); stored (a miss); loaded (a hit)
    storing        throughput of a batch of new prompts, with and without storing what it computes

    this process --commands--> engine A: no connector
                 --commands--> engine B: lossless, file store …    each in a process of its own, one works at a time

Machines are noisy, so engines take turns with the same prompt, and ratios are taken within a turn. Before anything is
timed, what a lossless engine says after a load must be what the engine says after a hit of its own prefix cache, and
in every timed run the engine must count as cached exactly the tokens it should have found. Times are medians, with the
20th and 80th percentile; raw bytes are those of the engine's cache; 1 GB = 10**9 bytes.

The prompts of `first token` and `storing` are random tokens, and their model, unless one is given, has random weights:
its speed is that of a real one of the same shape, its KV is not, so its sizes say nothing.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from cuvee.codec.errors import CuveeError, InputError
from cuvee.codec.layout import KVLayout
from cuvee.codec.profile import PRESETS, Profile
from cuvee.eval.bench.cpu import Timing
from cuvee.eval.bench.machine import hardware, torch_threads
from cuvee.eval.corpus import calibration_windows, read_corpus, spread_sequences
from cuvee.eval.data import CALIBRATION_TEXTS, EVALUATION_TEXTS, bundled_model_path, load_bundled_model
from cuvee.eval.protocol import LENGTH, PREFIX, reread

__all__ = ["FULL", "QUICK", "Scope", "print_engine_report", "run_engine_bench"]

CHUNK = 256
QUESTION = 16  # tokens after the prefix: less than a block, so that our hits and the engine's own are equally long
PROOF_TOKENS = 4
TOLERANCE = 1e-3  # difference of logprobs of the same tokens over the same cache
SETTLE_SECONDS = 120.0
DTYPE = "bfloat16"
PLAIN = "no connector"


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama of random weights."""

    layers: int = 8
    hidden: int = 1024
    intermediate: int = 2816
    heads: int = 16
    kv_heads: int = 4
    head_size: int = 64
    vocabulary: int = 4096
    positions: int = 8448

    def save(self, folder: Path) -> None:
        """Write a checkpoint that vLLM can read."""
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_size,
            max_position_embeddings=self.positions,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
            tie_word_embeddings=False,
            dtype=DTYPE,
        )
        with torch.random.fork_rng():
            torch.manual_seed(0)
            LlamaForCausalLM(config).bfloat16().save_pretrained(folder)


@dataclass(frozen=True, slots=True)
class Variant:
    """An engine with the connector.

    Attributes:
        name: in the tables.
        quality: preset; the profile is the generic one.
        store: URL; `{folder}` stands for a temporary folder.
        load_async: as the connector's option.
        filled_by: another variant that fills the store they share; this one has no misses.
    """

    name: str
    quality: str
    store: str
    load_async: bool = True
    filled_by: str | None = None


VARIANTS = (
    Variant("lossless, file", "lossless", "file://{folder}/lossless"),
    Variant("lossless, file, sync", "lossless", "file://{folder}/lossless", False, "lossless, file"),
    Variant("balanced, file", "balanced", "file://{folder}/balanced"),
    Variant("balanced, file, sync", "balanced", "file://{folder}/balanced", False, "balanced, file"),
    Variant("lossless, memory", "lossless", "memory://?max_gb=2"),
)


@dataclass(frozen=True, slots=True)
class Scope:
    """What a run measures, and how long it may take.

    Attributes:
        shape: of the model, where none is given.
        variants: engines that are compared with one without the connector.
        lengths: tokens of the prefixes; multiples of the chunk.
        rounds: of all lengths, after one that proves and warms up.
        seconds: no further round of `first token` is begun after so many, but three are measured.
        hits: loads of one prompt a round.
        batch: (prompts, tokens of each, tokens to generate) of `storing`.
        batch_rounds: of `storing`.
        presets, chunks, groups: of `footprint`; group "generic" is the profile that needs no calibration.
        windows: sequences that a profile is calibrated on.
        prompts: of `footprint`, at most.
    """

    shape: Shape = field(default_factory=Shape)
    variants: tuple[Variant, ...] = VARIANTS
    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096)
    rounds: int = 9
    seconds: float = 900.0
    hits: int = 3
    batch: tuple[int, int, int] = (8, 512, 16)
    batch_rounds: int = 5
    presets: tuple[str, ...] = tuple(PRESETS)
    chunks: tuple[int, ...] = (256, 64)
    groups: tuple[str, ...] = ("layer", "generic")
    windows: int = 100
    prompts: int = 32


FULL = Scope()
QUICK = Scope(
    lengths=(256, 1024), rounds=3, batch=(4, 512, 16), batch_rounds=3, presets=("lossless", "balanced"), chunks=(256,)
)


def run_engine_bench(
    scope: Scope = FULL,
    model: Path | None = None,
    stores: Sequence[str] = (),
    progress: Console | None = None,
) -> dict[str, Any]:
    """Run the benchmark.

    Args:
        scope: what to measure.
        model: checkpoint for `first token` and `storing`; None: random weights of `scope.shape`.
        stores: URLs to load from, besides memory and files; what is put there stays.
        progress: where to say what is being measured; None is silent.

    Returns:
        A JSON-ready report.

    Raises:
        ImportError: vLLM is not installed.
        InputError: a length that is no multiple of the chunk, or longer than the model's positions.
        CuveeError: an engine failed, or answered what it should not have; then nothing is reported.
    """
    if find_spec("vllm") is None:
        raise ImportError("this benchmark needs vLLM: pip install vllm")
    began, load = time.perf_counter(), os.getloadavg()[1]

    def say(what: str) -> None:
        if progress is not None:
            progress.print(f"{time.perf_counter() - began:6.1f} s  {what}", highlight=False, style="dim")

    if any(length < CHUNK or length % CHUNK for length in scope.lengths):
        raise InputError(f"lengths: must be multiples of {CHUNK}, got {', '.join(map(str, scope.lengths))}")
    report: dict[str, Any] = {"hardware": hardware() | {"vllm": _vllm_version()}}
    with tempfile.TemporaryDirectory(prefix="cuvee-bench-") as temporary:
        folder = Path(temporary)
        if scope.presets:
            report["footprint"] = measure_footprint(scope, folder, say)
        if model is None:
            model = folder / "model"
            scope.shape.save(model)
        report["model"] = describe_model(model, random_weights=model.parent == folder)
        if max(scope.lengths) + QUESTION + PROOF_TOKENS > report["model"]["positions"]:
            raise InputError(f"lengths: must leave room in the model's {report['model']['positions']} positions")
        with ExitStack() as stack:
            chosen = [replace(variant, store=variant.store.format(folder=folder)) for variant in scope.variants]
            chosen += [Variant(f"lossless, {url.partition(':')[0]}", "lossless", url) for url in stores]
            named: dict[str, Variant | None] = {PLAIN: None, **{variant.name: variant for variant in chosen}}
            engines = {  # made before any is started: importing vLLM takes longer than anything else
                name: stack.enter_context(Engine(folder / f"engine{at}.log")) for at, name in enumerate(named)
            }
            for name, variant in named.items():
                say(f"starting an engine: {name}")
                engines[name].start(model, _engine_options(scope, len(engines)), variant)
            report["first_token"] = measure_first_token(scope, report["model"], engines, chosen, say)
            report["storing"] = measure_storing(scope, report["model"], engines, chosen, say)
    report["load_average"] = {"before": load, "after": os.getloadavg()[1]}
    report["seconds"] = time.perf_counter() - began
    return report


def _vllm_version() -> str:
    from importlib.metadata import packages_distributions, version

    return version(packages_distributions()["vllm"][0])  # the builds for other devices have names of their own


def describe_model(path: Path, random_weights: bool) -> dict[str, Any]:
    """What the figures depend on: JSON-ready."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, local_files_only=True)
    layout = KVLayout.from_config(config, DTYPE)
    text = config.get_text_config()
    return {
        "name": "random weights" if random_weights else path.name,
        "random_weights": random_weights,
        "model_type": config.model_type,
        "layers": layout.num_layers,
        "hidden": text.hidden_size,
        "kv_heads": layout.layers[0].kv_heads,
        "head_dim": layout.layers[0].head_dim,
        "vocabulary": text.vocab_size,
        "positions": text.max_position_embeddings,
        "dtype": DTYPE,
        "raw_bytes_per_token": layout.bytes_per_token,
        "weight_bytes": sum(file.stat().st_size for file in path.glob("*.safetensors")),
    }


def _engine_options(scope: Scope, engines: int) -> dict[str, Any]:
    options: dict[str, Any] = {"max_model_len": max(scope.lengths) + QUESTION + PROOF_TOKENS}
    if torch.cuda.is_available():  # they share it
        options["gpu_memory_utilization"] = 0.8 / engines
    return options


# Statistics ------------------------------------------------------------------------------------------------------


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 20th and 80th percentile, and how many there were."""
    p20, median, p80 = np.quantile(values, [0.2, 0.5, 0.8]).tolist()
    timing = Timing(median, p20, p80, len(values))
    return {"median": timing.median, "p20": timing.p20, "p80": timing.p80, "runs": timing.runs}


def paired(these: Sequence[Sequence[float]], others: Sequence[float]) -> dict[str, float]:
    """Spread of the ratios of these to the other of the same turn.

    Args:
        these: some values a turn.
        others: one value a turn.
    """
    return spread([value / other for values, other in zip(these, others, strict=True) for value in values])


def crossing(lengths: Sequence[int], ratios: Sequence[float]) -> float | None:
    """Length from which on loading is quicker: where the ratio of load to recompute falls below 1 for good.

    Between two lengths the ratio is taken to be a straight line over the logarithm of the length.

    Returns:
        0.0 if loading is quicker at every length measured; None if it is not at the last one.
    """
    if ratios[-1] >= 1:
        return None
    slower = [index for index, ratio in enumerate(ratios) if ratio >= 1]
    if not slower:
        return 0.0
    at = slower[-1]
    share = (ratios[at] - 1) / (ratios[at] - ratios[at + 1])
    return float(lengths[at] * (lengths[at + 1] / lengths[at]) ** share)


# Footprint -------------------------------------------------------------------------------------------------------


def measure_footprint(scope: Scope, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Bytes of books-3m's caches in a file store, as the engine put them there."""
    name = "books-3m"
    prompts = spread_sequences([read_corpus(text, name) for text in EVALUATION_TEXTS], LENGTH, scope.prompts).tolist()
    profiles: dict[str, Path | None] = {}
    for group in scope.groups:
        profiles[group] = None
        if group != "generic":
            say(f"footprint: learning a profile, group {group}")
            path = profiles[group] = folder / f"{group.replace(':', '-')}.safetensors"
            learn_profile(group, scope.windows).save(path)
    entries: list[dict[str, Any]] = []
    # The question is not stored: tokens of whole chunks are.
    options = {"max_model_len": LENGTH + 1, "block_size": min(64, *scope.chunks)}
    with Engine(folder / "footprint.log", VLLM_ALLOW_LONG_MAX_MODEL_LEN="1") as engine:
        for tokens in scope.chunks:
            for quality in scope.presets:
                # Lossless needs no profile.
                for group in scope.groups if quality != "lossless" else scope.groups[:1]:
                    say(f"footprint: {quality}, {group}, chunks of {tokens} tokens")
                    store = folder / f"footprint-{len(entries)}"
                    variant = Variant("footprint", quality, f"file://{store}")
                    engine.start(bundled_model_path(), options, variant, profiles[group], tokens)
                    engine.ask(prompts, expect_cached=[0] * len(prompts))
                    figures = engine.settle(len(prompts) * (LENGTH // tokens))
                    engine.stop()
                    entries.append(
                        {
                            "quality": quality,
                            "profile": None if quality == "lossless" else group,
                            "chunk_tokens": tokens,
                            **_footprint(figures, store),
                        }
                    )
    return {
        "model": name,
        "texts": list(EVALUATION_TEXTS),
        "calibration_texts": list(CALIBRATION_TEXTS),
        "prompts": len(prompts),
        "prompt_tokens": LENGTH,
        "entries": entries,
    }


def learn_profile(group: str, windows: int) -> Profile:
    """Calibrate a profile of books-3m on the bundled texts, as a report does."""
    corpora = [read_corpus(text, "books-3m") for text in CALIBRATION_TEXTS]
    learning = reread(calibration_windows(corpora, LENGTH, windows))
    with torch_threads(1):  # for a model this small more gain little, and on a busy machine they wait for each other
        return Profile.calibrate(load_bundled_model()[0], learning, group, prefix=PREFIX, progress=False)


def _footprint(figures: Mapping[str, float], store: Path) -> dict[str, Any]:
    files = [path.stat() for path in store.rglob("*") if path.is_file()]
    raw, payload = figures["raw_bytes"], figures["stored_bytes"]
    on_disk = sum(file.st_size for file in files)
    if not raw or on_disk < payload:
        raise CuveeError(f"the engine says it stored {payload:.0f} bytes, {store.name} holds {on_disk}")
    return {
        "chunks": int(figures["stored_chunks"]),
        "raw_bytes": int(raw),
        "payload_bytes": int(payload),
        "file_bytes": on_disk,
        "allocated_bytes": sum(512 * file.st_blocks for file in files),
        "bits_per_value": 16 * payload / raw,
        "ratio": raw / payload,
        "ratio_on_disk": raw / on_disk,
    }


# First token -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Runs:
    """Of one variant at one length, by turn."""

    miss: list[float] = field(default_factory=list)
    hit: list[list[float]] = field(default_factory=list)
    loads: list[Mapping[str, float]] = field(default_factory=list)


def measure_first_token(
    scope: Scope, model: Mapping[str, Any], engines: Mapping[str, Engine], chosen: Sequence[Variant],
    say: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """Seconds to the first token, by length: computed, own cache, miss and hit of every variant."""
    draw = random.Random(0)
    plain = engines[PLAIN]
    proofs = {}
    for length in scope.lengths:
        say(f"first token: proof at {length} tokens")
        proofs[length] = _prove(_prompt(draw, model, length), length, engines, chosen)
    recompute: dict[int, list[float]] = {length: [] for length in scope.lengths}
    own: dict[int, list[float]] = {length: [] for length in scope.lengths}
    runs = {(variant.name, length): _Runs() for variant in chosen for length in scope.lengths}
    began = time.perf_counter()
    for turn in range(scope.rounds):
        if turn >= 3 and time.perf_counter() - began > scope.seconds:
            break
        say(f"first token: round {turn + 1}")
        for length in scope.lengths:
            prompt = _prompt(draw, model, length)
            fillers = [PLAIN, *(variant.name for variant in chosen if variant.filled_by is None)]
            for name in draw.sample(fillers, len(fillers)):
                seconds = engines[name].ask([prompt], forget=True, expect_cached=[0]).seconds
                if name == PLAIN:
                    recompute[length].append(seconds)
                else:
                    runs[name, length].miss.append(seconds)
                    engines[name].settle(length // CHUNK)
            expected, loaded = None, []
            for variant in draw.sample([None, *chosen], len(chosen) + 1):
                if variant is None:
                    found = plain.ask([prompt], expect_cached=[length])
                    own[length].append(found.seconds)
                    expected = found.tokens
                    continue
                entry = runs[variant.name, length]
                entry.hit.append([])
                for _ in range(scope.hits):
                    hit = engines[variant.name].ask([prompt], forget=True, expect_cached=[length])
                    entry.hit[-1].append(hit.seconds)
                    entry.loads.append(hit.figures)
                    if variant.quality == "lossless":
                        loaded.append((variant.name, hit.tokens))
            for name, tokens in loaded:
                if tokens != expected:
                    raise CuveeError(f"{name}: a load of {length} tokens changed the next token")
    lengths = []
    for length in scope.lengths:
        prefill = [(length + QUESTION) / seconds for seconds in recompute[length]]
        lengths.append(
            {
                "tokens": length,
                "prompt_tokens": length + QUESTION,
                "recompute_runs": recompute[length],
                "recompute_seconds": spread(recompute[length]),
                "prefill_tokens_per_second": spread(prefill),
                "own_cache_seconds": spread(own[length]),
                "own_cache_over_recompute": paired([[seconds] for seconds in own[length]], recompute[length]),
                "variants": {
                    variant.name: _figures(runs[variant.name, length], recompute[length], model, length)
                    for variant in chosen
                },
            }
        )
    return {
        "chunk_tokens": CHUNK,
        "question_tokens": QUESTION,
        "proof_logprob_difference": proofs,
        "lengths": lengths,
        "variants": [_verdict(variant, lengths, engines[variant.name]) for variant in chosen],
    }


def _prompt(draw: random.Random, model: Mapping[str, Any], length: int) -> list[int]:
    return [draw.randrange(model["vocabulary"]) for _ in range(length + QUESTION)]


def _prove(
    prompt: list[int], length: int, engines: Mapping[str, Engine], chosen: Sequence[Variant]
) -> dict[str, float | None]:
    """What every variant says after a load, against the engine after a hit of its own cache.

    Returns:
        Largest difference of logprobs, by variant; None: the best tokens are other ones.

    Raises:
        CuveeError: a lossless variant says anything else.
    """
    proof: dict[str, Any] = {"max_tokens": PROOF_TOKENS, "logprobs": 5}
    plain = engines[PLAIN]
    plain.ask([prompt], forget=True, expect_cached=[0])
    expected = plain.ask([prompt], expect_cached=[length], **proof)
    differences: dict[str, float | None] = {}
    for variant in chosen:
        engine = engines[variant.name]
        if variant.filled_by is None:
            engine.ask([prompt], expect_cached=[0])
            engine.settle(length // CHUNK)
        loaded = engine.ask([prompt], forget=True, expect_cached=[length], **proof)
        worst = difference(loaded.logprobs[0], expected.logprobs[0])
        if variant.quality == "lossless" and (loaded.tokens != expected.tokens or worst > TOLERANCE):
            raise CuveeError(
                f"{variant.name}: after a load of {length} tokens the engine says {loaded.tokens[0]}, not "
                f"{expected.tokens[0]}; logprobs differ by {worst:.3g}"
            )
        differences[variant.name] = worst if math.isfinite(worst) else None
    return differences


def difference(these: Sequence[Mapping[str, float]], others: Sequence[Mapping[str, float]]) -> float:
    """Largest difference of the first token's logprobs, of tokens that both name; infinite where they share none."""
    first, other = these[0], others[0]
    return max((abs(first[key] - other[key]) for key in first.keys() & other.keys()), default=math.inf)


def _figures(runs: _Runs, recompute: Sequence[float], model: Mapping[str, Any], length: int) -> dict[str, Any]:
    load = [figures["load_seconds"] for figures in runs.loads]
    raw = length * model["raw_bytes_per_token"]
    entry: dict[str, Any] = {
        "hit_runs": runs.hit,
        "miss_runs": runs.miss,
        "hit_seconds": spread([seconds for turn in runs.hit for seconds in turn]),
        "hit_over_recompute": paired(runs.hit, recompute),
        "load_seconds": spread(load),
        "load_tokens_per_second": spread([length / seconds for seconds in load]),
        # Wall time of the decoding thread pool: loads of a single request do not overlap.
        "decode_gb_per_s": spread([raw / 1e9 / figures["decode_seconds"] for figures in runs.loads]),
        **{
            name: spread([figures[name] for figures in runs.loads])
            for name in ("decode_seconds", "fetch_seconds", "lookup_seconds", "steps")
        },
    }
    if runs.miss:
        entry["miss_seconds"] = spread(runs.miss)
        entry["miss_over_recompute"] = paired([[seconds] for seconds in runs.miss], recompute)
    return entry


def _verdict(variant: Variant, lengths: Sequence[Mapping[str, Any]], engine: Engine) -> dict[str, Any]:
    """Where loading begins to pay, measured from outside, and as the connector itself estimates it."""
    ratios = [entry["variants"][variant.name]["hit_over_recompute"]["median"] for entry in lengths]
    return {
        "name": variant.name,
        "quality": variant.quality,
        "profile": "generic",
        "store": variant.store.partition(":")[0],
        "load_async": variant.load_async,
        "pays_from_tokens": crossing([entry["tokens"] for entry in lengths], ratios),
        "connector": engine.estimate(),
    }


# Storing ---------------------------------------------------------------------------------------------------------


def measure_storing(
    scope: Scope, model: Mapping[str, Any], engines: Mapping[str, Engine], chosen: Sequence[Variant],
    say: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """Throughput of a batch of new prompts, with and without storing them."""
    count, length, generated = scope.batch
    draw = random.Random(1)
    names = [PLAIN, *(variant.name for variant in chosen if variant.filled_by is None)]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    behind: dict[str, list[float]] = {name: [] for name in names[1:]}
    for turn in range(scope.batch_rounds):
        say(f"storing: round {turn + 1}")
        prompts = [_prompt(draw, model, length - QUESTION) for _ in range(count)]
        for name in draw.sample(names, len(names)):
            engine = engines[name]
            asked = engine.ask(prompts, max_tokens=generated, forget=True, expect_cached=[0] * count)
            seconds[name].append(asked.finished)
            if name in behind:
                began = time.perf_counter()
                engine.settle(count * ((length + generated - 1) // CHUNK))
                behind[name].append(time.perf_counter() - began)
    tokens = count * (length + generated)
    return {
        "prompts": count,
        "prompt_tokens": length,
        "generated_tokens": generated,
        "tokens_per_second": {name: spread([tokens / s for s in seconds[name]]) for name in names},
        "throughput_over_no_connector": {
            name: paired([[1 / s] for s in seconds[name]], [1 / s for s in seconds[PLAIN]]) for name in names[1:]
        },
        "seconds_until_stored": {name: spread(behind[name]) for name in names[1:]},
    }


# Engines, from outside -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine said to some prompts.

    Attributes:
        seconds: from the submission of all to the first token of the last of them.
        finished: to the last token.
        tokens: generated ids of each.
        logprobs: at every position of each, token -> logprob; empty if not asked for.
        cached: prompt tokens of each that the engine did not compute.
        figures: what the connector counted meanwhile (`steps`: of the engine).
    """

    seconds: float
    finished: float
    tokens: list[list[int]]
    logprobs: list[list[dict[str, float]]]
    cached: list[int]
    figures: dict[str, float]


class Engine:
    """A process that runs engines, one after the other: vLLM sets global state, pins cores and logs as it likes.

    Args:
        log: for what it writes.
        variables: of its environment.
    """

    def __init__(self, log: Path, **variables: str) -> None:
        self._log = log
        self._stored = 0  # chunks that the running engine should have stored
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env=_environment(**variables),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def start(
        self, model: Path, options: Mapping[str, Any], variant: Variant | None = None, profile: Path | None = None,
        chunk_tokens: int = CHUNK,
    ) -> None:  # fmt: skip
        """Start an engine, without a connector or with one, and wait until it is up."""
        arguments: dict[str, Any] = {"model": str(model), "dtype": DTYPE, "seed": 0, **options}
        if variant is not None:
            extra = {
                "store": variant.store,
                "quality": variant.quality,
                "load_async": variant.load_async,
                "chunk_tokens": chunk_tokens,
                "threads": os.cpu_count() or 1,
                "decide": "always",
            }
            if profile is not None:
                extra["profile"] = str(profile)
            arguments["kv_transfer_config"] = {
                "kv_connector": "CuveeConnector",
                "kv_connector_module_path": "cuvee.integrations.vllm",
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            }
        self._stored = 0
        self._call("start", arguments)

    def stop(self) -> None:
        """End the engine; another one may be started."""
        self._call("stop")

    def ask(
        self, prompts: Sequence[Sequence[int]], *, expect_cached: Sequence[int], max_tokens: int = 1,
        forget: bool = False, logprobs: int | None = None,
    ) -> Answer:  # fmt: skip
        """Submit prompts together, greedily.

        Args:
            prompts: token ids.
            expect_cached: tokens of each prompt that must come from a cache.
            max_tokens: tokens of an answer.
            forget: empty the engine's own prefix cache before.
            logprobs: of so many tokens at every position.

        Raises:
            CuveeError: the engine failed, or computed more or fewer tokens than it should have.
        """
        answer = Answer(**self._call("ask", prompts, max_tokens, forget, logprobs))
        if answer.cached != list(expect_cached):
            raise CuveeError(f"the engine found {answer.cached} tokens in a cache, expected {list(expect_cached)}")
        return answer

    def settle(self, chunks: int) -> dict[str, float]:
        """Wait until `chunks` more are stored.

        Returns:
            The connector's figures since the engine started.
        """
        self._stored += chunks
        figures: dict[str, float] = self._call("settle", self._stored)
        return figures

    def estimate(self) -> dict[str, float | None] | None:
        """The connector's own estimate of what loading and computing cost; None: not measured often enough."""
        found: dict[str, float | None] | None = self._call("estimate")
        return found

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


def _environment(**changes: str) -> dict[str, str]:
    """Of a process with an engine: offline, everything in one process, every core, a cache that any machine has."""
    sources = str(Path(sys.modules["cuvee"].__path__[0]).parent)
    path = os.pathsep.join(filter(None, (sources, os.environ.get("PYTHONPATH"))))
    return {
        **{name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        "PYTHONPATH": path,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": str(os.cpu_count() or 1),
        # On a busy machine an engine that spins at barriers takes twice as long. libgomp spins less where there are
        # more threads than cores, which the connector's threads see to: without this line it would look like a cure.
        "GOMP_SPINCOUNT": "1000",
        **changes,
    }


# Engines, from inside --------------------------------------------------------------------------------------------


class _Served:
    """What the commands of `Engine` do, in its process."""

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
            "disable_log_stats": False,  # the connector's figures come that way
        }
        self._llm = LLM(**defaults, **arguments)
        core = self._core()
        step = core.step_fn

        def counted() -> Any:
            outputs, executed = step()
            self._steps += 1
            if not executed and core.scheduler.has_requests():
                time.sleep(0.001)  # as the loop of an engine in a process of its own does
            return outputs, executed

        core.step_fn = counted
        self._origin = _connector_figures()

    def stop(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()
        self._llm = None

    def ask(self, prompts: list[list[int]], max_tokens: int, forget: bool, logprobs: int | None) -> dict[str, Any]:
        from vllm import SamplingParams

        parameters = SamplingParams(
            temperature=0, max_tokens=max_tokens, logprobs=logprobs, ignore_eos=True, detokenize=False
        )
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
            "figures": {
                **{name: value - before.get(name, 0) for name, value in after.items()},
                "steps": self._steps - steps,
            },
        }

    def settle(self, chunks: int) -> dict[str, float]:
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            figures = _connector_figures()
            figures = {name: value - self._origin.get(name, 0) for name, value in figures.items()}
            if figures.get("stored_chunks", 0) >= chunks:
                return figures
            if time.monotonic() > deadline:
                raise CuveeError(f"{figures.get('stored_chunks', 0):.0f} chunks were stored, expected {chunks}")
            self.ask([[1]], 1, False, None)  # figures travel with the engine's steps

    def estimate(self) -> dict[str, float | None] | None:
        found = self._core().scheduler.connector._scheduler._break_even.estimate
        if found is None:
            return None
        named = {
            "break_even_tokens": found.break_even,
            "prefill_tokens_per_second": found.prefill_rate,
            "load_tokens_per_second": found.load_rate,
            "overhead_seconds": found.overhead,
        }
        return {name: value if math.isfinite(value) else None for name, value in named.items()}

    def _core(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core


def _connector_figures() -> dict[str, float]:
    """The connector's counters and sums of its histograms, added up over labels."""
    from prometheus_client import REGISTRY

    figures: dict[str, float] = {}
    for metric in REGISTRY.collect():
        if not metric.name.startswith("vllm:cuvee_"):
            continue
        for sample in metric.samples:
            name = sample.name.removeprefix("vllm:cuvee_")
            if name.endswith(("_total", "_sum")):
                name = name.rpartition("_")[0]
                figures[name] = figures.get(name, 0) + sample.value
    return figures


def _let_engines_follow_each_other() -> None:
    """On a CPU vLLM searches all modules when an engine starts; of llvmlite's library `vars` is no mapping."""
    from vllm.triton_utils import dispatcher

    def mapping(value: object) -> Mapping[str, Any]:
        found: object = vars(value)
        return found if isinstance(found, Mapping) else {}

    dispatcher.vars = mapping


def _serve(commands: Iterator[str], reply: Callable[[str], None]) -> None:
    """Execute commands until there are no more, or one fails."""
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


# The report ------------------------------------------------------------------------------------------------------


def print_engine_report(report: dict[str, Any], console: Console) -> None:
    """Print a report as tables."""
    machine, model = report["hardware"], report["model"]
    console.print(
        f"{machine['cpu']}, {machine['cores']} cores; vLLM {machine['vllm']}, torch {machine['torch']}; commit "
        f"{machine['commit']}, {machine['date']}",
        style="dim",
        highlight=False,
    )

    def show(title: str, table: Table) -> None:
        console.print(f"\n{title}\n", highlight=False)
        console.print(table)

    if "footprint" in report:
        footprint = report["footprint"]
        table = _table("preset", "profile", "chunk", "raw MB", "payload MB", "files MB", "bits/value", "raw/files")
        for entry in footprint["entries"]:
            sizes = (f"{entry[name] / 1e6:.3f}" for name in ("raw_bytes", "payload_bytes", "file_bytes"))
            ratios = (f"{entry['bits_per_value']:.2f}", f"{entry['ratio_on_disk']:.2f}")
            table.add_row(entry["quality"], entry["profile"] or "none", str(entry["chunk_tokens"]), *sizes, *ratios)
        show(
            f"Footprint: {footprint['model']}, {footprint['prompts']} prompts of {footprint['prompt_tokens']} tokens "
            f"from {', '.join(footprint['texts'])}",
            table,
        )
    lengths = report["first_token"]["lengths"]
    names = [variant["name"] for variant in report["first_token"]["variants"]]
    what = (
        f"{model['name']}: {model['layers']} layers, hidden {model['hidden']}, {model['kv_heads']} KV heads of "
        f"{model['head_dim']}, {model['raw_bytes_per_token'] / 1e6:.4f} MB of KV a token"
    )
    table = _table("prefix tokens", *(str(entry["tokens"]) for entry in lengths))
    table.add_row("computed, s", *(_around(entry["recompute_seconds"]) for entry in lengths))
    table.add_row("prefill, tokens/s", *(f"{entry['prefill_tokens_per_second']['median']:.0f}" for entry in lengths))
    table.add_row("own prefix cache, ratio", *(_around(entry["own_cache_over_recompute"]) for entry in lengths))
    for kind in ("hit", "miss"):
        for name in names:
            if f"{kind}_over_recompute" in lengths[0]["variants"][name]:
                found = (entry["variants"][name][f"{kind}_over_recompute"] for entry in lengths)
                table.add_row(f"{kind}: {name}, ratio", *map(_around, found))
    show(f"Time to first token, and its ratio to computing (median, 20th to 80th percentile). {what}", table)

    columns = ["prefix", "hit, ms", "load", "fetch", "decode", "decode, GB/s", "load, 1000 tokens/s", "engine steps"]
    table = _table("medians", *columns)
    for name in names:
        for entry in (lengths[0], lengths[-1]):
            hit = entry["variants"][name]
            milliseconds = (
                f"{1e3 * hit[key]['median']:.3g}"
                for key in ("hit_seconds", "load_seconds", "fetch_seconds", "decode_seconds")
            )
            speeds = (hit["decode_gb_per_s"]["median"], 1e-3 * hit["load_tokens_per_second"]["median"])
            table.add_row(
                name, str(entry["tokens"]), *milliseconds, *(f"{speed:.3g}" for speed in speeds),
                f"{hit['steps']['median']:.0f}",
            )  # fmt: skip
    show("Where the time of a hit goes", table)

    table = _table("", "pays from, measured", "connector says", "prefill tokens/s", "load tokens/s", "overhead ms")
    for variant in report["first_token"]["variants"]:
        table.add_row(variant["name"], *_verdict_row(variant, lengths[0]["tokens"]))
    show("From which length on a load pays", table)

    storing = report["storing"]
    table = _table("", "tokens/s", "throughput, ratio", "stored after, s")
    for name, speed in storing["tokens_per_second"].items():
        ratio, behind = (storing[key].get(name) for key in ("throughput_over_no_connector", "seconds_until_stored"))
        table.add_row(
            name, f"{speed['median']:.0f}", _around(ratio) if ratio else "1", _around(behind) if behind else ""
        )
    show(
        f"Storing: {storing['prompts']} prompts of {storing['prompt_tokens']} new tokens together, "
        f"{storing['generated_tokens']} generated each",
        table,
    )


def _around(value: Mapping[str, float]) -> str:
    return f"{value['median']:.2g} ({value['p20']:.2g}-{value['p80']:.2g})"


def _verdict_row(variant: Mapping[str, Any], shortest: int) -> list[str]:
    measured, said = variant["pays_from_tokens"], variant["connector"]
    shown = "never" if measured is None else f"{measured:.0f}" if measured else f"{shortest} or less"
    if said is None:
        return [shown, "not measured yet", "", "", ""]
    numbers = (said["prefill_tokens_per_second"], said["load_tokens_per_second"])
    return [
        shown,
        "never" if said["break_even_tokens"] is None else f"{said['break_even_tokens']:.0f}",
        *("" if number is None else f"{number:.0f}" for number in numbers),
        f"{1e3 * said['overhead_seconds']:.1f}",
    ]


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    return table


if __name__ == "__main__":
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM logs to standard output
    with contextlib.suppress(BrokenPipeError):
        _serve(iter(sys.stdin), lambda text: print(text, file=replies, flush=True))
