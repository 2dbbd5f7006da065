"""The command line. Exit codes: 0 done, 1 the input or the files at fault (one line says how), 2 wrong usage.

Heavy modules are imported inside the commands, so that `cuvee --help` is quick. What a program would read goes to
standard output as JSON (`--json`); progress and errors go to standard error.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cuvee.codec.errors import CuveeError, FormatError, InputError
from cuvee.integrations.stores.cli import store_app

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from rich.table import Table

    from cuvee.codec.chunk import KVChunk
    from cuvee.codec.codec import Codec
    from cuvee.codec.layout import KVLayout
    from cuvee.codec.profile import Profile


class _State:
    """What the options before the command say."""

    debug = False


class _Commands(typer.core.TyperGroup):
    """Turns the errors a user can mend into one line on standard error and exit code 1."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override, unused-ignore]
        """Run a command."""
        try:
            return super().invoke(ctx)
        except (CuveeError, OSError, ImportError) as error:
            if _State.debug or (isinstance(error, OSError) and error.errno == errno.EPIPE):
                raise
            typer.echo(f"error: {_one_line(error)}", err=True)
            raise typer.Exit(1) from None


app = typer.Typer(
    name="cuvee",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
profile_app = typer.Typer(no_args_is_help=True, help="Learn a profile for a model, or look at one.")
app.add_typer(profile_app, name="profile")
app.add_typer(store_app, name="store")

_DEFAULT_CHUNK = 256
_FILE_WIDTH = 120
_MODEL_HELP = "Folder or name of a transformers model; books-3m is bundled, smollm2 is a real one, fetched once."
_NAME_DIGITS = 5  # of a blob's number in a folder: 00000.cuvee
_SUFFIX = ".cuvee"


class _Dtype(StrEnum):
    auto = "auto"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class _Device(StrEnum):
    cpu = "cpu"
    cuda = "cuda"


class _Target(StrEnum):
    sm_80 = "sm_80"
    sm_90 = "sm_90"
    sm_100 = "sm_100"
    gfx942 = "gfx942"


_ProfileFile = Annotated[Path | None, typer.Option("--profile", help="The profile.")]
_Config = Annotated[
    Path | None,
    typer.Option("--config", help="Instead of a profile: the model's config.json (lossless, or nothing learned)."),
]
_Force = Annotated[bool, typer.Option("--force", help="Replace the output if it exists.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def main() -> None:
    """Entry point of the `cuvee` script."""
    app(prog_name="cuvee")


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def _version(asked: bool) -> None:
    if asked:
        from cuvee import __version__

        print(f"cuvee {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Compress the KV cache of a language model into small files and back."""
    _State.debug = debug


# demo ----------------------------------------------------------------------------------------------------------------


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the plot goes.")] = Path("out/demo.png"),
    plot: Annotated[bool, typer.Option(help="Draw the plot.")] = True,
    model: Annotated[str, typer.Option("--model", "-m", help=_MODEL_HELP)] = "books-3m",
    json_to: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Also write all figures as JSON; - is standard output.")
    ] = None,
) -> None:
    """Compress the cache of a model and show what that saves and costs.

    A minute on the bundled model, which needs no network; a few on smollm2, which is fetched once (270 MB on disk).
    """
    from cuvee.eval.demo import run_demo

    report = run_demo(_console(stderr=json_to == "-"), out if plot else None, model=model)
    if json_to is not None:
        if json_to == "-":
            _print_json(report)
        else:
            _write(Path(json_to), json.dumps(report, indent=2, allow_nan=False).encode() + b"\n", force=True)


# profile -------------------------------------------------------------------------------------------------------------


@profile_app.command("learn")
def profile_learn(
    model_path: Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL_HELP)],
    texts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TEXT]...",
            help="Learn from these alone: text files; .jsonl files: a line is a list of token ids, or an object with "
            "input_ids or text; hf:DATASET:SPLIT:COLUMN; or bundled texts by name. Default: a mixture of the kinds "
            "that come with cuvee and of the model's own samples.",
        ),
    ] = None,
    *,
    out: Annotated[Path, typer.Option("--out", "-o", help="The profile to write.")],
    own: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            metavar="TEXT[=SHARE]",
            help="Add a text to the mixture, as a kind of its own; SHARE of the sequences, default 0.25. Repeatable.",
        ),
    ] = None,
    group: Annotated[
        str,
        typer.Option(
            help="What one basis spans: head, unit, layer, layers:n, all, or auto: as many layers as decode within "
            "--flops. Larger is smaller on disk."
        ),
    ] = "auto",
    flops: Annotated[
        float | None,
        typer.Option(min=1, help="With auto, operations per decoded value; default 1536 on a CPU, else 4096."),
    ] = None,
    sequences: Annotated[
        int | None, typer.Option(min=3, help="At most so many sequences; default 96, of given texts 128.")
    ] = None,
    length: Annotated[int, typer.Option(min=8, help="Tokens in a sequence.")] = 512,
    prefix: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sequence that count as cached; default: three quarters.")
    ] = None,
    repeat: Annotated[
        bool,
        typer.Option(
            "--reread/--no-reread",
            help="With TEXT: let the rest of every second sequence repeat a part of its cache, so that the cache "
            "matters. The mixture has such a kind.",
        ),
    ] = True,
    seed: Annotated[int, typer.Option(help="Of the sampled texts and targets, and of --reread.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences a forward and backward pass.")] = 4,
    dtype: Annotated[
        _Dtype, typer.Option(help="Of the model; auto: as its files say, on a CPU float32, which is faster there.")
    ] = _Dtype.auto,
    device: Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1 …")] = "cpu",
    force: _Force = False,
    as_json: _Json = False,
) -> None:
    """Learn a profile: the directions of the cache that the model's loss depends on, and what each quality costs.

    Under torchrun, processes share the work, each with the whole model: one GPU each with --device cuda.
    """
    from cuvee.codec.errors import InputError
    from cuvee.codec.profile import Profile
    from cuvee.eval.corpus import load_model, load_tokenizer, read_corpus, spread_sequences
    from cuvee.eval.mixture import check_size, mixture
    from cuvee.eval.protocol import reread

    _check_absent(out, force)
    if texts and own:
        raise InputError("--text adds to the mixture, TEXT takes its place: give one of them")
    rank, distributed = _process_of_torchrun(device)
    if distributed and device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    chosen = "float32" if dtype is _Dtype.auto and device == "cpu" else dtype.value
    tokens: Any
    if texts:
        tokens = spread_sequences([read_corpus(text, model_path) for text in texts], length, sequences or 128)
        model = load_model(model_path, chosen, device)
        if repeat:
            tokens = reread(tokens, 3 * length // 4 if prefix is None else prefix, seed)
    else:
        count = sequences or 96
        check_size(count, length)  # before a model is loaded
        shares = [_text_and_share(text) for text in own or []]
        added = {
            Path(name).name: spread_sequences([read_corpus(name, model_path)], length, max(round(share * count), 3))
            for name, share in shares
        }
        model = load_model(model_path, chosen, device)
        # Before the added kinds, so that one of the same name takes the place of the mixture's.
        tokens = mixture(model, load_tokenizer(model_path), count, length, seed, progress=rank == 0) | added
    profile = Profile.calibrate(
        model, tokens, group, prefix=prefix, batch_size=batch_size, seed=seed, flops=flops, distributed=distributed
    )
    if rank:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    profile.save(out)
    _show_profile(profile, out, as_json)


def _process_of_torchrun(device: str) -> tuple[int, bool]:
    """Rank of this process, and whether torchrun started it, in which case it joins the others."""
    from torch import distributed

    if not distributed.is_torchelastic_launched():
        return 0, False
    if device.startswith("cuda"):
        import torch

        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    return distributed.get_rank(), True


def _text_and_share(text: str) -> tuple[str, float]:
    """NAME or NAME=SHARE, as --text gives it."""
    from cuvee.codec.errors import InputError

    name, found, share = text.rpartition("=")
    if not found:
        return text, 0.25
    try:
        value = float(share)
    except ValueError:
        return text, 0.25  # a name with an equals sign in it
    if not 0 < value <= 100:
        raise InputError(f"--text {text}: the share must lie above 0 and be at most 100")
    return name, value


@profile_app.command("show")
def profile_show(
    file: Annotated[Path, typer.Argument(help="A profile.")],
    as_json: _Json = False,
) -> None:
    """Say what a profile is for and what each quality costs with it."""
    from cuvee.codec.profile import Profile

    _show_profile(Profile.load(file), file, as_json)


def _show_profile(profile: Profile, path: Path, as_json: bool) -> None:
    layout = profile.layout
    data = {
        "file": str(path),
        "bytes": path.stat().st_size,
        "id": profile.id.hex(),
        "source": profile.source,
        "group": profile.group,
        "model": profile.model,
        "layout": {**layout.to_dict(), "fingerprint": layout.fingerprint.hex()},
        "values_per_token": layout.values_per_token,
        "sections": [
            {
                "first_layer": section.first_layer,
                "end_layer": section.end_layer,
                "values": section.values,
                "blocks": list(section.blocks),
                "components": len(learned.scale),
                "prediction": learned.prediction.name.lower(),
                "sinks": len(learned.basis.sinks),
            }
            for section, learned in zip(profile.sections, profile.learned, strict=bool(profile.learned))
        ],
        "curve": [{**asdict(point), "step": 2.0 ** (point.step / 64)} for point in profile.curve],
        "curves": {
            kind: [{**asdict(point), "step": 2.0 ** (point.step / 64)} for point in points]
            for kind, points in profile.curves.items()
        },
    }
    if as_json:
        _print_json(data)
        return
    first, shapes = layout.layers[0], len(set(layout.layers))
    shape = f"{layout.num_layers} layers" + (f" of {shapes} shapes, the first" if shapes > 1 else "")
    facts = {
        "profile": f"{path} ({data['bytes']:,} bytes)",
        "id": data["id"],
        "model": f"{layout.model_type}, {shape} {first.kv_heads} x {first.head_dim}, {layout.dtype}",
        "weights": profile.model or "not recorded",
        "learned by": profile.source,
        "group": f"{profile.group}: {len(profile.sections)} sections, {_predictions(profile)}",
    }
    console = _console()
    grid = _table_class().grid(padding=(0, 2))
    for name, value in facts.items():
        grid.add_row(f"[dim]{name}[/dim]", str(value))
    console.print(grid)
    if not profile.curve:
        console.print("No curve was measured: ask for a quality by step.")
        return
    table = _new_table("step", "bits/value", "ratio", "KL ± s.e.", "delta NLL ± s.e.", "top-1")
    width = 8 * layout.torch_dtype.itemsize
    for point in profile.curve:
        table.add_row(
            f"{2.0 ** (point.step / 64):.3g}",
            f"{point.bits_per_value:.3f}",
            f"{width / point.bits_per_value:.1f}x",
            _with_error(point.kl, point.kl_stderr),
            _with_error(point.delta_nll, point.delta_nll_stderr, "+"),
            "" if point.top1 is None else f"{100 * point.top1:.1f} %",
        )
    console.print(table)
    if profile.curves:
        # No more steps than fit beside the names.
        steps = sorted({point.step for points in profile.curves.values() for point in points})
        steps = steps[:: -(-len(steps) // 6)]
        kinds = _new_table("kind of text", *(f"{2.0 ** (step / 64):.3g}" for step in steps))
        for kind, points in profile.curves.items():
            known = {point.step: point.kl for point in points if point.kl is not None}
            kinds.add_row(kind, *(f"{known[step]:.2g}" if step in known else "" for step in steps))
        console.print("KL by kind and step; kl= and the presets go by the worst:")
        console.print(kinds)


def _predictions(profile: Profile) -> str:
    kinds = {section.prediction.name.lower() for section in profile.learned} - {"none"}
    return f"prediction {', '.join(sorted(kinds))}" if kinds else "no prediction between tokens"


def _with_error(value: float | None, error: float | None, sign: str = "") -> str:
    if value is None:
        return ""
    return f"{value:{sign}.5f}" + ("" if error is None else f" ± {error:.5f}")


# encode, decode ------------------------------------------------------------------------------------------------------


@app.command()
def encode(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="CACHE",
            help="safetensors file: layer.0.keys [T, H, D], layer.0.values, … ; keys after RoPE; metadata start.",
        ),
    ],
    target: Annotated[
        Path,
        typer.Argument(
            metavar="OUT", help="A folder for 00000.cuvee, 00001.cuvee …, or x.cuvee where one chunk holds everything."
        ),
    ],
    profile: _ProfileFile = None,
    config: _Config = None,
    quality: Annotated[
        str | None, typer.Option(help="lossless, high, balanced (the default) or small.", show_default=False)
    ] = None,
    kl: Annotated[float | None, typer.Option(help="Instead: nats per token the predictions may move.")] = None,
    bits: Annotated[float | None, typer.Option(help="Instead: bits per value.")] = None,
    ratio: Annotated[float | None, typer.Option(help="Instead: how many times smaller.")] = None,
    step: Annotated[float | None, typer.Option(help="Instead: the quantizer step.")] = None,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens a blob.")] = _DEFAULT_CHUNK,
    force: _Force = False,
    as_json: _Json = False,
) -> None:
    """Compress a saved cache."""
    asked = {"quality": quality, "kl": kl, "bits": bits, "ratio": ratio, "step": step}
    given = [f"--{name}" for name, value in asked.items() if value is not None]
    if len(given) > 1:
        raise typer.BadParameter(f"give one of them, not {' and '.join(given)}")
    _one_of_profile_and_config(profile, config)

    from cuvee.codec.codec import Codec

    tensors, start = _read_cache(source)
    dtype = _dtype_of(tensors)
    known = _profile(profile, config, dtype)
    codec = Codec(known, quality, kl=kl, bits=bits, ratio=ratio, step=step)
    chunk = _to_chunk(source, tensors, start, replace(known.layout, dtype=dtype))
    pieces = range(0, chunk.tokens, chunk_tokens)
    single = target.suffix == _SUFFIX
    if single and len(pieces) > 1:
        raise InputError(
            f"{target} can hold one chunk, the cache has {chunk.tokens} tokens and so {len(pieces)} chunks: "
            f"name a folder, or give --chunk-tokens {chunk.tokens}"
        )
    _check_absent(target, force)
    with _naming(source):
        blobs = _encode_all(codec, chunk, chunk_tokens)
    if single:
        _write(target, blobs[0], force)
    else:
        _write_folder(target, {f"{i:0{_NAME_DIGITS}}{_SUFFIX}": blob for i, blob in enumerate(blobs)}, force)
    size = sum(map(len, blobs))
    values = chunk.tokens * chunk.layout.values_per_token
    report = {
        "out": str(target),
        "chunks": len(blobs),
        "tokens": chunk.tokens,
        "start": start,
        "raw_bytes": chunk.nbytes,
        "bytes": size,
        "bits_per_value": 8 * size / values,
        "ratio": chunk.nbytes / size,
    }
    if as_json:
        _print_json(report)
    else:
        print(
            f"{target}: {chunk.tokens} tokens, {chunk.nbytes:,} -> {size:,} bytes, {report['ratio']:.2f}x, "
            f"{report['bits_per_value']:.3f} bits per value, {_count(len(blobs), 'chunk')}"
        )


def _encode_all(codec: Codec, chunk: KVChunk, chunk_tokens: int) -> list[bytes]:
    from rich.progress import track

    starts = range(0, chunk.tokens, chunk_tokens)
    shown = track(starts, "encoding", console=_console(stderr=True), transient=True, disable=len(starts) < 4)
    return [codec.encode(chunk.slice(t, min(t + chunk_tokens, chunk.tokens))) for t in shown]


@app.command()
def decode(
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="What encode wrote: a .cuvee file, or a folder of them.")
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The safetensors file to write.")],
    profile: _ProfileFile = None,
    config: _Config = None,
    start: Annotated[
        int | None, typer.Option(min=0, help="Position of the first token; default: where it was.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Refuse to restore more: a small file may claim a huge cache.")
    ] = 1 << 17,
    force: _Force = False,
    as_json: _Json = False,
) -> None:
    """Restore a cache, where it was or at another position."""
    _one_of_profile_and_config(profile, config)

    from safetensors.torch import save

    from cuvee.codec.chunk import KVChunk
    from cuvee.codec.codec import Codec, check_tokens
    from cuvee.codec.container import inspect

    _check_absent(target, force)
    chunks: list[KVChunk] = []
    codec: Codec | None = None
    tokens = 0
    for path in _blob_files(source):
        blob = path.read_bytes()
        with _naming(path):
            info = inspect(blob)
            tokens += info.tokens
            check_tokens(tokens, max_tokens)
            if codec is None:
                # A codec decodes blobs of any quality of its profile; this one is always to be had.
                codec = Codec(_profile(profile, config, info.dtype), "lossless")
                moved = 0 if start is None else start - info.start
            chunks.append(codec.decode(blob, info.start + moved, max_tokens=max_tokens))
    with _naming(source):
        whole = KVChunk.concat(chunks)
    tensors = {}
    for layer, (keys, values) in enumerate(zip(whole.keys, whole.values, strict=True)):
        tensors[f"layer.{layer}.keys"] = keys.contiguous()
        tensors[f"layer.{layer}.values"] = values.contiguous()
    _write(target, save(tensors, {"start": str(whole.start)}), force)
    report = {"out": str(target), "chunks": len(chunks), "tokens": whole.tokens, "start": whole.start}
    if as_json:
        _print_json(report)
    else:
        print(f"{target}: {whole.tokens} tokens from position {whole.start} on, {_count(len(chunks), 'chunk')}")


def _one_of_profile_and_config(profile: Path | None, config: Path | None) -> None:
    if (profile is None) == (config is None):
        raise typer.BadParameter(
            "give --profile, or --config for coding without one (lossless, or statistics in the blob)"
        )


def _profile(file: Path | None, config: Path | None, dtype: str) -> Profile:
    """The profile in a file, or the generic one for the model of a config."""
    from cuvee.codec.layout import KVLayout
    from cuvee.codec.profile import Profile

    if file is not None:
        return Profile.load(file)
    if config is None:
        raise InputError("config: give a profile, or the config of the model")
    if not config.exists():
        raise FileNotFoundError(errno.ENOENT, "no such config", str(config))
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise ImportError("--config needs transformers: install cuvee[transformers], or use --profile") from error
    try:
        # Never the code of a repository that the file names, and no question whether it may run.
        read = AutoConfig.from_pretrained(str(config), trust_remote_code=False).get_text_config(decoder=True)
        return Profile.generic(KVLayout.from_config(read, dtype=dtype))
    except (CuveeError, OSError, ImportError):
        raise
    except Exception as error:  # transformers has no class of its own for a configuration that makes no sense
        raise InputError(f"{config}: {error}") from error


def _read_cache(path: Path) -> tuple[dict[str, torch.Tensor], int]:
    """The tensors of a saved cache and the position of its first token."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, "no such cache file", str(path))
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise FormatError(f"{path} is not a safetensors file: {error}") from error
    text = metadata.get("start", "0")
    if not (text.isascii() and text.isdigit()):
        raise InputError(f"{path}: its metadata says start={text!r}, which is not a position")
    return tensors, int(text)


def _dtype_of(tensors: dict[str, torch.Tensor]) -> str:
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
    if len(dtypes) != 1:
        raise InputError(f"the cache mixes dtypes: {', '.join(sorted(dtypes)) or 'it is empty'}")
    return dtypes.pop()


def _to_chunk(path: Path, tensors: dict[str, torch.Tensor], start: int, layout: KVLayout) -> KVChunk:
    from cuvee.codec.chunk import KVChunk

    expected = [f"layer.{i}.{kind}" for i in range(layout.num_layers) for kind in ("keys", "values")]
    if missing := [name for name in expected if name not in tensors]:
        raise InputError(f"{path} has no tensor {missing[0]!r}; a cache of this model has {layout.num_layers} layers")
    if extra := sorted(tensors.keys() - set(expected)):
        raise InputError(f"{path} has a tensor {extra[0]!r}, which a cache of this model does not have")
    with _naming(path):
        return KVChunk(
            [tensors[name] for name in expected[::2]], [tensors[name] for name in expected[1::2]], layout, start
        )


# inspect -------------------------------------------------------------------------------------------------------------


@app.command()
def inspect(
    sources: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Blobs, or folders of them.")],
    as_json: _Json = False,
) -> None:
    """Say what blobs hold. Needs no profile."""
    from cuvee.codec.container import inspect as read

    infos = []
    for source in sources:
        for path in _blob_files(source):
            with _naming(path):
                infos.append((path, read(path.read_bytes())))
    if as_json:
        _print_json(
            [
                {"file": str(path), **asdict(info), "bits_per_value": info.bits_per_value, "ratio": info.ratio}
                for path, info in infos
            ]
        )
        return
    table = _new_table("file", "scheme", "tokens", "dtype", "step", "bytes", "bits/value", "ratio")
    for path, info in infos:
        table.add_row(
            str(path),
            info.scheme,
            f"{info.start} … {info.start + info.tokens - 1}",
            info.dtype,
            "" if info.step is None else f"{info.step:.4g}",
            f"{info.total_bytes:,}",
            f"{info.bits_per_value:.3f}",
            f"{info.ratio:.2f}x",
        )
    raw, size = sum(info.raw_bytes for _, info in infos), sum(info.total_bytes for _, info in infos)
    console = _console()
    console.print(table)
    if len(infos) > 1:
        console.print(f"{len(infos)} blobs: {raw:,} -> {size:,} bytes, {raw / size:.2f}x", highlight=False)


def _blob_files(source: Path) -> list[Path]:
    """The blobs of a folder in order, or the file itself."""
    if not source.is_dir():
        return [source]
    files = sorted(source.glob(f"*{_SUFFIX}"))
    if not files:
        raise InputError(f"{source} holds no {_SUFFIX} files")
    return files


# bench ---------------------------------------------------------------------------------------------------------------


@app.command()
def bench(
    as_json: _Json = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer cases and repeats: half a minute on a CPU, two on a GPU.")
    ] = False,
    device: Annotated[_Device, typer.Option(help="What to measure.")] = _Device.cpu,
    engine: Annotated[
        bool,
        typer.Option("--engine", help="Measure offload in vLLM instead: sizes, first tokens with and without a hit."),
    ] = False,
    model: Annotated[
        Path | None,
        typer.Option("--model", "-m", help="With --engine: a checkpoint to time instead of random weights."),
    ] = None,
    stores: Annotated[
        list[str] | None,
        typer.Option("--store", metavar="URL", help="With --engine: also load from this store.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write the report to this file, too, as JSON.", show_default=False)
    ] = None,
    force: _Force = False,
) -> None:
    """Measure speed and memory on this machine: every stage alone, and whole encodes and decodes.

    On a GPU also what the machine could do at best, and a CacheGen-style decoder. With --engine: what compressed
    offload costs and saves in vLLM (ten minutes; --quick: three).
    """
    if not engine and (model is not None or stores):
        raise typer.BadParameter("--model and --store belong to --engine")
    if engine and device is not _Device.cpu:
        raise typer.BadParameter("--engine measures on the device that vLLM was built for: leave --device out")
    if out is not None:
        _check_absent(out, force)
    progress = _console(stderr=True)
    if engine:
        from cuvee.eval.bench.engine import FULL, QUICK, print_engine_report, run_engine_bench

        report = run_engine_bench(QUICK if quick else FULL, model, stores or (), progress)
        print_report: Callable[[dict[str, Any], Console], None] = print_engine_report
    elif device is _Device.cuda:
        from cuvee.eval.bench.gpu import print_gpu_report, run_gpu_bench

        report = run_gpu_bench(quick, progress)
        print_report = print_gpu_report
    else:
        from cuvee.eval.bench import cpu

        report = cpu.run_bench(quick, progress)
        print_report = cpu.print_report
    if out is not None:
        _write(out, (json.dumps(report, indent=2, allow_nan=False) + "\n").encode(), force)
    if as_json:
        _print_json(report)
    else:
        print_report(report, _console())


# report, eval --------------------------------------------------------------------------------------------------------


# What `cuvee report --blend` takes.
_OF_BLEND = {
    "blend", "model", "out", "profiles", "calibration", "evaluation", "multidoc", "seed", "quick", "force", "as_json",
}  # fmt: skip


@app.command()
def report(
    ctx: typer.Context,
    model: Annotated[str, typer.Option("--model", "-m", help=_MODEL_HELP)] = "books-3m",
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder for the report.")] = Path("out/report"),
    profiles: Annotated[
        list[Path] | None,
        typer.Option("--profile", help="Measure this profile instead of learning one.", show_default=False),
    ] = None,
    groups: Annotated[
        list[str] | None,
        typer.Option(
            "--group",
            help="Learn a profile with this group. Default: layer, and all where the model is small enough.",
            show_default=False,
        ),
    ] = None,
    calibration: Annotated[
        list[str] | None,
        typer.Option("--calibrate-on", metavar="TEXT", help="Default: bundled texts.", show_default=False),
    ] = None,
    calibration_sequences: Annotated[int, typer.Option(min=3, help="At most so many of them.")] = 200,
    samples: Annotated[int, typer.Option(min=0, help="Learn from so many sequences sampled from the model, too.")] = 0,
    evaluation: Annotated[
        list[str] | None,
        typer.Option("--measure-on", metavar="TEXT", help="Default: bundled texts.", show_default=False),
    ] = None,
    sequences: Annotated[int, typer.Option(min=1, help="At most so many of them.")] = 32,
    length: Annotated[int, typer.Option(min=8, help="Tokens in a sequence.")] = 512,
    prefix: Annotated[
        int | None, typer.Option(min=1, help="Tokens of it that are cached; default: three quarters.")
    ] = None,
    repeat: Annotated[
        bool, typer.Option("--reread/--no-reread", help="Let every second sequence repeat a part of its cache.")
    ] = True,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens coded together.")] = _DEFAULT_CHUNK,
    tasks: Annotated[
        str | None,
        typer.Option(help="lm-eval tasks, separated by commas; none for no tasks. Default: cuvee's local tasks."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many documents a task.")] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(min=0, help="Examples before each question; default: as the task says.")
    ] = None,
    chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="Put prompts into the tokenizer's chat template.")
    ] = False,
    include_path: Annotated[Path | None, typer.Option(help="A folder with tasks of your own.")] = None,
    metadata: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="For tasks that ask for it.", show_default=False)
    ] = None,
    dtype: Annotated[
        _Dtype, typer.Option(help="Of the model; auto: float32 on a CPU, elsewhere as its files say.")
    ] = _Dtype.auto,
    cache_dtype: Annotated[_Dtype, typer.Option(help="Of the caches that are coded.")] = _Dtype.bfloat16,
    device: Annotated[str, typer.Option(help="Where the model runs and its caches are coded.")] = "cpu",
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences a forward pass.")] = 8,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 7,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer sequences, methods and tasks: two minutes on the bundled model.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace another run in the folder.")] = False,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="OLD.json NEW.json", help="Measure nothing; compare two reports.", show_default=False),
    ] = None,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONDITION",
            help="With --compare: exit code 1 where it holds, such as 'kl>5%', 'score<-1se', 'bits>1%@cuvee/*'.",
            show_default=False,
        ),
    ] = None,
    allow_different: Annotated[
        bool, typer.Option("--allow-different", help="With --compare: even of other models, texts or chunks.")
    ] = False,
    blend: Annotated[
        bool,
        typer.Option("--blend", help="Measure blending instead: what selective recompute recovers, and how fast."),
    ] = False,
    multidoc: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="With --blend: also these prompts, objects with id, passages, gold, query, target.",
            show_default=False,
        ),
    ] = None,
    as_json: _Json = False,
) -> None:
    """Say what compression costs a model, measured beside the baselines: sizes, KL, task scores, plots.

    A TEXT is a file (.jsonl: a document a line), hf:DATASET:SPLIT:COLUMN or the name of a bundled text. An interrupted
    report goes on when the same command is given again.

    With --blend: what prompts put together from cached chunks lose, by selector and cost (twelve minutes; --quick:
    two). It goes to out/blend and takes --model, --profile (one), --calibrate-on, --measure-on, --multidoc, --seed,
    --quick and --force.
    """
    if blend:
        typed = [p for p in ctx.command.params if _is_typed(ctx, p.name)]
        if wrong := [parameter.opts[0] for parameter in typed if parameter.name not in _OF_BLEND]:
            raise typer.BadParameter(f"--blend takes no {' and no '.join(wrong)}")
        if len(profiles or ()) > 1:
            raise typer.BadParameter("--blend takes one --profile")
        asked: dict[str, Any] = {"model": model, "seed": seed, "multidoc": tuple(map(str, multidoc or ()))}
        asked |= {"profile": str(profiles[0])} if profiles else {}
        asked |= {"calibration": tuple(calibration)} if calibration else {}
        asked |= {"evaluation": tuple(evaluation)} if evaluation else {}
        _report_blend(asked, out if _is_typed(ctx, "out") else Path("out/blend"), quick, force, as_json)
        return
    if multidoc:
        raise typer.BadParameter("--multidoc needs --blend")
    if compare is not None:
        _compare(*compare, fail_if or [], allow_different, as_json)
        return
    if fail_if or allow_different:
        raise typer.BadParameter("--fail-if and --allow-different need --compare")

    from cuvee.eval.report.run import ReportConfig, quick_config, run_report

    given: dict[str, Any] = {
        "profiles": tuple(map(str, profiles or ())),
        "groups": tuple(groups or ()),
        "metadata": tuple(metadata or ()),
        "include_path": None if include_path is None else str(include_path),
    }
    if calibration:
        given["calibration"] = tuple(calibration)
    if evaluation:
        given["evaluation"] = tuple(evaluation)
    if tasks is not None:
        given["tasks"] = () if tasks == "none" else tuple(filter(None, tasks.split(",")))
    if cache_dtype is _Dtype.auto:
        raise typer.BadParameter("must be a dtype; auto says none", param_hint="--cache-dtype")
    config = ReportConfig(
        model=model, calibration_sequences=calibration_sequences, samples=samples, sequences=sequences, length=length,
        prefix=prefix, reread=repeat, chunk_tokens=chunk_tokens, limit=limit, dtype=dtype.value,
        cache_dtype=cache_dtype.value, device=device, batch_size=batch_size, seed=seed, num_fewshot=num_fewshot,
        chat_template=chat_template, **given,
    )  # fmt: skip
    if quick:
        config = quick_config(config)
    data = run_report(config, out, _console(stderr=True), force=force, command=_typed())
    if as_json:
        _print_json(data)
        return

    from cuvee.eval.report.render import print_summary

    print_summary(data, _console())
    print(f"{out / 'report.md'}\n{out / 'report.html'}\n{out / 'report.json'}")


def _is_typed(ctx: typer.Context, name: str | None) -> bool:
    """Whether an option was given, even with its default."""
    source = ctx.get_parameter_source(name or "")
    return source is not None and source.name == "COMMANDLINE"


def _report_blend(asked: dict[str, Any], out: Path, quick: bool, force: bool, as_json: bool) -> None:
    from cuvee.eval.blending.report import BlendConfig, quick_blend_config, run_blend_report

    config = BlendConfig(**asked)
    if quick:
        config = quick_blend_config(config)
    data = run_blend_report(config, out, _console(stderr=True), force=force, command=_typed())
    if as_json:
        _print_json(data)
        return

    from cuvee.eval.blending.render import print_blend_summary

    print_blend_summary(data, _console())
    print(f"{out / 'blend.md'}\n{out / 'blend.json'}")


def _typed() -> str:
    """The command as it was typed."""
    import shlex
    import sys

    return shlex.join(["cuvee", *sys.argv[1:]])


def _compare(old: Path, new: Path, conditions: list[str], allow_different: bool, as_json: bool) -> None:
    from cuvee.eval.report.compare import Condition, compare_reports, load_report, print_comparison

    comparison = compare_reports(
        load_report(old),
        load_report(new),
        [Condition.parse(text) for text in conditions],
        allow_different=allow_different,
    )
    if as_json:
        _print_json(comparison.to_dict())
    else:
        print_comparison(comparison, _console())
    if comparison.failures:
        raise typer.Exit(1)


@app.command(
    "eval",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
)
def evaluate(ctx: typer.Context) -> None:
    """lm-eval's own command line, with the model `cuvee` and cuvee's tasks registered: `cuvee eval run --help`.

    `cuvee eval run --model_args pretrained=MODEL,profile=FILE,quality=balanced --tasks cuvee_local`
    """
    from cuvee.eval.lm import run_cli

    if code := run_cli(ctx.args):
        raise typer.Exit(code)


# kernels -------------------------------------------------------------------------------------------------------------


@app.command()
def kernels(
    targets: Annotated[
        list[_Target] | None,
        typer.Option("--target", help="Compile for it; may be given several times. Default: all.", show_default=False),
    ] = None,
    as_json: _Json = False,
) -> None:
    """Compile the Triton kernels without a GPU and say what they cost. Exit code 1 where one exceeds its budget.

    The instructions of the innermost loop, of the entropy coder also for one symbol; registers, spills, memory, code.
    """
    from cuvee.kernels.static import TARGETS, check, report

    with _console(stderr=True).status("compiling"):
        data = report([target.value for target in targets] if targets else TARGETS)
    wrong = check(data)
    if as_json:
        _print_json({**data, "violations": wrong})
    else:
        _show_kernels(data)
    for line in wrong:
        typer.echo(f"error: {line}", err=True)
    if wrong:
        raise typer.Exit(1)


def _show_kernels(data: dict[str, Any]) -> None:
    from cuvee.kernels.static import shared_bytes

    table = _new_table("kernel", "target", "loop", "each", "regs", "spill", "shared", "code", "s")
    for entry in data["kernels"]:
        if entry["error"] is not None:
            table.add_row(entry["kernel"], entry["target"], "failed")
            continue
        loop = entry["loop"] or {"instructions": 0, "instructions_per_symbol": None}
        each = loop["instructions_per_symbol"]
        table.add_row(
            entry["kernel"],
            entry["target"],
            str(loop["instructions"] or ""),
            "" if each is None else f"{each:.1f}",
            str(entry["registers"]),
            str(entry["spilled_bytes"]),
            str(shared_bytes(entry)),
            str(entry["code_bytes"]),
            f"{entry['seconds']:.1f}",
        )
    console = _console()
    console.print(table)
    console.print("loop: instructions; each: for one symbol; spill, shared and code: bytes", highlight=False)
    console.print(", ".join(f"{name} {version}" for name, version in data["versions"].items()), highlight=False)


# Shared --------------------------------------------------------------------------------------------------------------


def _console(stderr: bool = False) -> Console:
    from rich.console import Console

    console = Console(stderr=stderr)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _FILE_WIDTH  # a file or a pipe has no width; at rich's 80 columns tables lose their figures
    return console


def _table_class() -> type[Table]:
    from rich.table import Table

    return Table


def _new_table(*columns: str) -> Table:
    from rich import box

    # Narrow enough for 80 columns; where it is not, the first column gives way.
    table = _table_class()(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", overflow="fold", no_wrap=bool(index))
    return table


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=2, allow_nan=False))


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Put the file's name before an error about its contents."""
    try:
        yield
    except CuveeError as error:
        raise type(error)(f"{path}: {error}") from error


def _check_absent(path: Path, force: bool) -> None:
    if path.exists() and not force:
        raise InputError(f"{path} exists already: choose another name, or --force to replace it")


def _write(path: Path, data: bytes, force: bool) -> None:
    """Write a file in one step: nobody reads half of it."""
    from cuvee.eval.files import write_atomically

    _check_absent(path, force)
    write_atomically(path, data)


def _write_folder(path: Path, files: dict[str, bytes], force: bool) -> None:
    """Write a folder in one step. Only a folder that holds nothing but blobs is ever replaced."""
    _check_absent(path, force)
    if path.exists() and not (path.is_dir() and all(file.suffix == _SUFFIX for file in path.iterdir())):
        raise InputError(f"{path} is not a folder of {_SUFFIX} files alone, so --force leaves it as it is")
    path.parent.mkdir(parents=True, exist_ok=True)
    new, old = (path.with_name(f".{path.name}.{os.getpid()}.{kind}") for kind in ("tmp", "old"))
    new.mkdir()
    try:
        for name, data in files.items():
            (new / name).write_bytes(data)
        if path.exists():
            os.rename(path, old)
        os.rename(new, path)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        if old.exists() and not path.exists():
            os.rename(old, path)
        raise
    shutil.rmtree(old, ignore_errors=True)
