"""`cuvee bench`: measure speed and memory on this machine's CPU, or in a serving engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cuvee.cli.files import check_absent, write_file
from cuvee.cli.options import Force, Json, ReportFile, refuse_moved
from cuvee.cli.output import make_console, print_json

if TYPE_CHECKING:
    from rich.console import Console

_ENGINE = "cuvee bench engine"
_MOVED = {
    "--device": "cuvee bench cpu` or `python -m cuvee.eval.bench.gpu",
    "--engine": _ENGINE,
    "--model": f"{_ENGINE} --model MODEL",
    "-m": f"{_ENGINE} --model MODEL",
    "--store": f"{_ENGINE} --store URL",
}


class _CpuUnlessNamed(typer.core.TyperGroup):
    """A group that reads `cuvee bench --quick` as `cuvee bench cpu --quick`."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override, unused-ignore]
        """Find the command."""
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            refuse_moved(ctx, args, _MOVED)
            args = ["cpu", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_CpuUnlessNamed,
    help="Measure speed and memory: on the CPU (the default), of loads with a deadline, in vLLM, or with other "
    "people's benchmarks.",
)


@app.command("cpu")
def bench_cpu(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer cases and repeats: a minute.")] = False,
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            show_default=False,
            help="Compare, and time stages, on the cache of this model. Repeatable. Default: compare on books-3m, and "
            "smollm2 if it is there.",
        ),
    ] = None,
    threads: Annotated[
        list[int] | None,
        typer.Option(
            "--threads", min=1, show_default=False, help="Number of threads to compare. Repeatable. Default: 1 and 2."
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="COMMIT",
            show_default=False,
            help="Instead, only encode and decode, in turns with this commit, or with the checkout in this folder.",
        ),
    ] = None,
    profiles: Annotated[
        list[Path] | None,
        typer.Option(
            "--profile",
            show_default=False,
            help="Measure with this profile of a --model, and learn none; with --against, measure with it, too. "
            "Repeatable.",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            metavar="PART",
            show_default=False,
            help="Measure this part: coders, stages, whole, scaling, comparison, first_use or memory. Repeatable. "
            "Default: all.",
        ),
    ] = None,
    out: ReportFile = None,
    force: Force = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    as_json: Json = False,
) -> None:
    """Measure every stage beside the core's limits, whole encodes and decodes, their scaling, memory, and alternatives.

    Alternatives are memcpy, FP8, lz4, zstd and constriction on the same bytes in the same run. lz4 and zstd come with
    cuvee[eval]. Takes five minutes.

    Example: cuvee bench cpu --quick --model smollm2

    Example: cuvee bench cpu --only stages --model smollm2 --profile smollm2.safetensors

    Example: cuvee bench cpu --against HEAD~1 --model smollm2
    """
    from cuvee.eval.bench.cpu.cpu_bench import COMPARED_THREADS, run_cpu_bench
    from cuvee.eval.bench.cpu.cpu_tables import cpu_markdown, print_cpu_report, print_turns, turns_markdown

    if markdown and as_json:
        raise typer.BadParameter("give --markdown or --json, not both")
    if profiles and against is None and not models:
        raise typer.BadParameter("goes with --model or --against", param_hint="--profile")
    if only and against is not None:
        raise typer.BadParameter("does not go with --against", param_hint="--only")
    if against is not None:
        from cuvee.eval.bench.cpu.turns import compare_with

        asked = tuple(models or ()), tuple(profiles or ()), tuple(sorted(set(threads or (1,))))
        _measure(
            lambda progress: compare_with(against, *asked, quick, progress),
            (lambda report, console: print(turns_markdown(report), end="")) if markdown else print_turns,
            out, force, as_json,
        )  # fmt: skip
        return
    counts = tuple(sorted(set(threads or COMPARED_THREADS)))
    _measure(
        lambda progress: run_cpu_bench(
            quick, tuple(models or ()), counts, tuple(only or ()), tuple(profiles or ()), progress
        ),
        (lambda report, console: print(cpu_markdown(report), end="")) if markdown else print_cpu_report,
        out, force, as_json,
    )  # fmt: skip


@app.command("loading")
def bench_loading(
    loads: Annotated[
        int | None,
        typer.Option(min=1, show_default=False, help="Loads per kind of link and bandwidth. Default: 60."),
    ] = None,
    kl_max: Annotated[float, typer.Option(help="Nats per token that no answer may lose more than.")] = 0.02,
    seed: Annotated[int, typer.Option(min=0, help="Of prompts, deadlines and links.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="4 loads each: a minute.")] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw times and KL to this file (.svg, .png).", show_default=False)
    ] = None,
    out: ReportFile = None,
    force: Force = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    as_json: Json = False,
) -> None:
    """Simulate loads that have a deadline: parts as cuvee fetches them, CacheGen's policy, one quality, raw, an oracle.

    Links are models of steady, bursty, mobile, shared and stepping ones; costs are SmolLM2-135M's. Takes ten minutes.

    Example: cuvee bench loading --plot loading.svg
    """
    from cuvee.eval.bench.loading.loading_bench import LOADS, QUICK_LOADS, run_loading_bench
    from cuvee.eval.bench.loading.loading_tables import draw_loading_report, loading_markdown, print_loading_report
    from cuvee.eval.plots import save_figure

    if markdown and as_json:
        raise typer.BadParameter("give --markdown or --json, not both")
    if plot is not None:
        check_absent(plot, force)
    count = loads or (QUICK_LOADS if quick else LOADS)

    def run(progress: Console) -> dict[str, Any]:
        report = run_loading_bench(count, kl_max, seed, progress=progress)
        if plot is not None:
            save_figure(draw_loading_report(report), plot)
        return report

    _measure(
        run, (lambda report, console: print(loading_markdown(report), end="")) if markdown else print_loading_report,
        out, force, as_json,
    )  # fmt: skip


@app.command("deadlines")
def bench_deadlines(
    model: Annotated[
        Path, typer.Option("--model", "-m", help="Folder of the checkpoint, or smollm2.", show_default=False)
    ],
    profile: Annotated[Path, typer.Option("--profile", help="Profile of this model.", show_default=False)],
    stores: Annotated[
        list[str] | None,
        typer.Option("--store", metavar="STORE", show_default=False, help="redis or http. Repeatable. Default: both."),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, show_default=False, help="Stored tokens of a prompt, a multiple of 256. Default: 2048."),
    ] = None,
    prompts: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="Different prompts. Default: 6.")
    ] = None,
    texts: Annotated[
        list[str] | None,
        typer.Option("--text", metavar="TEXT", show_default=False,
                     help="Where prompts are from: a file or a name. Repeatable. Default: bundled texts."),
    ] = None,
    kl_max: Annotated[float, typer.Option(help="Nats per token that a loaded prompt may lose.")] = 0.02,
    dtype: Annotated[
        str, typer.Option(help="The engine's. bfloat16 rounds by more than fine parts lose; float32 does not.")
    ] = "bfloat16",
    quick: Annotated[bool, typer.Option("--quick", help="3 prompts of 1,024 tokens.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="Draw first tokens and KL to this file (.svg, .png).", show_default=False),
    ] = None,
    out: ReportFile = None,
    force: Force = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Measure loads with a deadline in vLLM, over links of 1 to 64 MB/s to Redis and to an HTTP object store.

    The servers run on this machine, behind a proxy that is as slow as the link. redis-server has to be installed.

    Example: cuvee bench deadlines --model smollm2 --profile smollm2.safetensors --plot deadlines.svg
    """
    from cuvee.eval.bench.deadlines.deadlines_bench import DEADLINES_FULL, DEADLINES_QUICK, run_deadlines_bench
    from cuvee.eval.bench.deadlines.deadlines_tables import (
        deadlines_markdown,
        draw_deadlines_report,
        print_deadlines_report,
    )
    from cuvee.eval.plots import save_figure

    if markdown and as_json:
        raise typer.BadParameter("give --markdown or --json, not both")
    if plot is not None:
        check_absent(plot, force)
    scope = DEADLINES_QUICK if quick else DEADLINES_FULL
    scope = replace(
        scope,
        tokens=tokens or scope.tokens,
        prompts=prompts or scope.prompts,
        stores=tuple(dict.fromkeys(stores or scope.stores)),
        texts=tuple(texts or scope.texts),
        dtype=dtype,
        kl_max=kl_max,
    )
    checkpoint = _checkpoint(model)

    def run(progress: Console) -> dict[str, Any]:
        report = run_deadlines_bench(scope, checkpoint, profile, progress)
        if plot is not None:
            save_figure(draw_deadlines_report(report), plot)
        return report

    _measure(
        run,
        (lambda report, console: print(deadlines_markdown(report), end="")) if markdown else print_deadlines_report,
        out, force, as_json,
    )  # fmt: skip


@app.command("engine")
def bench_engine(
    model: Annotated[
        Path | None,
        typer.Option("--model", "-m", help="Time this checkpoint, or smollm2, instead of random weights."),
    ] = None,
    stores: Annotated[
        list[str] | None,
        typer.Option("--store", metavar="URL", help="Also load from this store. Repeatable.", show_default=False),
    ] = None,
    lengths: Annotated[
        list[int] | None,
        typer.Option(
            "--length", metavar="TOKENS", show_default=False, help="Length of the prefix to time. Repeatable."
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            "--profile",
            help="Profile of the model, for its lossy engines. Without one, there are none.",
        ),
    ] = None,
    store_nicenesses: Annotated[
        list[int] | None,
        typer.Option(
            "--store-niceness",
            metavar="0…19",
            show_default=False,
            help="Also measure storing by threads that give way like this. Repeatable.",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer cases and repeats: three minutes.")] = False,
    out: ReportFile = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Measure what compressed offload costs and saves in vLLM: sizes, and first tokens with and without a hit.

    Takes ten minutes, on the device that vLLM was built for.

    Example: cuvee bench engine --store redis://127.0.0.1:6379/0 --length 512 --length 4096
    """
    from cuvee.eval.bench.engine.engine_bench import run_engine_bench
    from cuvee.eval.bench.engine.engine_tables import print_engine_report
    from cuvee.eval.bench.engine.scope import ENGINE_FULL, ENGINE_QUICK

    scope = ENGINE_QUICK if quick else ENGINE_FULL
    if lengths:
        scope = replace(scope, lengths=tuple(sorted(set(lengths))))
    checkpoint = None if model is None else _checkpoint(model)
    nicenesses = tuple(store_nicenesses or ())
    _measure(
        lambda progress: run_engine_bench(scope, checkpoint, stores or (), profile, nicenesses, progress),
        print_engine_report, out, force, as_json,
    )  # fmt: skip


@app.command("blend")
def bench_blend(
    model: Annotated[
        Path, typer.Option("--model", "-m", help="Folder of the checkpoint, or smollm2.", show_default=False)
    ],
    lengths: Annotated[
        list[int] | None,
        typer.Option(
            "--length", metavar="TOKENS", show_default=False,
            help="Tokens of documents in a prompt, a multiple of 512. Repeatable. Default: 1024, 2048, 4096.",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns for each length.")] = 5,
    quality: Annotated[str, typer.Option(help="Quality of the stored documents.")] = "lossless",
    profile: Annotated[
        Path | None, typer.Option("--profile", help="Profile of this model, for a lossy quality.", show_default=False)
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw the ratios to this file (.svg, .png).", show_default=False)
    ] = None,
    out: ReportFile = None,
    force: Force = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Measure the time to first token of blended prompts in vLLM, over computing them, by length and cost.

    Example: cuvee bench blend --model smollm2 --length 1024 --length 4096
    """
    from cuvee.eval.bench.engine.blend_bench import BlendScope, draw_blend_report, print_blend_report, run_blend_bench
    from cuvee.eval.plots import save_figure

    if plot is not None:
        check_absent(plot, force)
    scope = BlendScope(rounds=rounds, quality=quality)
    if lengths:
        scope = replace(scope, lengths=tuple(sorted(set(lengths))))
    checkpoint = _checkpoint(model)

    def run(progress: Console) -> dict[str, Any]:
        report = run_blend_bench(scope, checkpoint, profile, progress)
        if plot is not None:
            save_figure(draw_blend_report(report), plot)
        return report

    _measure(run, print_blend_report, out, force, as_json)


@app.command("clients")
def bench_clients(
    model: Annotated[
        Path, typer.Option("--model", "-m", help="Folder of the checkpoint to serve, or smollm2.", show_default=False)
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder for the report.")] = Path("out/clients"),
    profile: Annotated[
        Path | None,
        typer.Option("--profile", help="Profile of this model; without it, no lossy variant runs.", show_default=False),
    ] = None,
    variants: Annotated[
        list[str] | None,
        typer.Option("--variant", metavar="NAME", help="Run this one. Repeatable. Default: all.", show_default=False),
    ] = None,
    workloads: Annotated[
        list[str] | None,
        typer.Option(
            "--workload", metavar="NAME", show_default=False,
            help="Run this one. Repeatable. Default: all whose client is installed.",
        ),
    ] = None,
    questions: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", show_default=False,
            help="For rag-qa-quality: a file of questions with documents and answers, such as MuSiQue's.",
        ),
    ] = None,
    kv_cache_mb: Annotated[int, typer.Option(min=1, help="Memory for the server's own KV cache.")] = 400,
    force: Force = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Run other people's benchmarks against vLLM's server, with and without cuvee.

    They are `vllm bench serve` and `lmcache bench engine` (pip install lmcache-cli). Takes five minutes per variant.

    Example: cuvee bench clients --model smollm2 --profile smollm2.safetensors
    """
    from cuvee.eval.bench.clients.clients_bench import ClientsRun, run_clients
    from cuvee.eval.bench.clients.clients_tables import clients_markdown
    from cuvee.eval.bench.clients.variants import choose_variants
    from cuvee.eval.bench.clients.workloads import choose_workloads
    from cuvee.eval.bench.engine.engine_bench import describe_model
    from cuvee.eval.runs import check_folder

    check_folder(out, force)
    server = (
        "--dtype", "bfloat16", "--max-num-seqs", "8", "--block-size", "32",
        "--kv-cache-memory-bytes", str(kv_cache_mb * 10**6),
    )  # fmt: skip
    servers = choose_variants(variants or (), profile)
    chosen = choose_workloads(workloads or (), None if questions is None else questions.resolve())
    checkpoint = _checkpoint(model)
    run = ClientsRun(
        checkpoint, servers, chosen,
        None if profile is None else profile.resolve(), server, out.resolve(),
        describe_model(checkpoint, random_weights=False)["raw_bytes_per_token"],
    )  # fmt: skip
    report = run_clients(run, make_console(stderr=True))
    if as_json:
        print_json(report)
    else:
        print(clients_markdown(report), end="")


def _checkpoint(model: Path) -> Path:
    """Return the folder of a checkpoint, or of the real model if it is named."""
    from cuvee.codec.data.real_model import REAL_MODEL, smollm2_path

    return smollm2_path() if str(model) == REAL_MODEL else model.resolve()


def _measure(
    run: Callable[[Console], dict[str, Any]],
    print_report: Callable[[dict[str, Any], Console], None],
    out: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    if out is not None:
        check_absent(out, force)
    report = run(make_console(stderr=True))
    if out is not None:
        write_file(out, (json.dumps(report, indent=2, allow_nan=False) + "\n").encode(), force)
    if as_json:
        print_json(report)
    else:
        print_report(report, make_console())
