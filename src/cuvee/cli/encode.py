"""`cuvee encode`: a saved cache becomes blobs."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cuvee.cli.files import SUFFIX, check_absent, named, read_profile, write_file, write_folder
from cuvee.cli.options import DEFAULT_CHUNK_TOKENS, Config, Force, Json, ProfileFile, need_one_of_profile_and_config
from cuvee.cli.output import counted, make_console, print_json
from cuvee.codec.errors import FormatError, InputError

if TYPE_CHECKING:
    import torch

    from cuvee.codec.chunk import KVChunk
    from cuvee.codec.codec import Codec
    from cuvee.codec.layout import KVLayout

_NAME_DIGITS = 5  # of a blob's number in a folder: 00000.cuvee


def encode(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="CACHE",
            help="A safetensors file: layer.0.keys [T, H, D], after RoPE; layer.0.values; …. Its metadata says start, "
            "the position of the first token.",
        ),
    ],
    target: Annotated[
        Path,
        typer.Argument(
            metavar="OUT", help="A folder for 00000.cuvee, 00001.cuvee, …; or x.cuvee if one chunk holds everything."
        ),
    ],
    profile: ProfileFile = None,
    config: Config = None,
    quality: Annotated[
        str | None,
        typer.Option(
            help="lossless, high, balanced or small. Default: balanced with --profile, lossless with --config.",
            show_default=False,
        ),
    ] = None,
    kl: Annotated[
        float | None, typer.Option(help="Instead of a quality: how far predictions may move, nats per token.")
    ] = None,
    bits: Annotated[float | None, typer.Option(help="Instead: bits per value.")] = None,
    ratio: Annotated[float | None, typer.Option(help="Instead: how many times smaller.")] = None,
    step: Annotated[float | None, typer.Option(help="Instead: the quantizer step.")] = None,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens per blob.")] = DEFAULT_CHUNK_TOKENS,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Compress a saved cache.

    Example: cuvee encode cache.safetensors blobs --profile model.cuvee --quality high
    """
    asked = {"quality": quality, "kl": kl, "bits": bits, "ratio": ratio, "step": step}
    given = [f"--{name}" for name, value in asked.items() if value is not None]
    if len(given) > 1:
        raise typer.BadParameter(f"give one of them, not {' and '.join(given)}")
    need_one_of_profile_and_config(profile, config)

    from cuvee.codec.codec import Codec

    tensors, start = _read_cache(source)
    dtype = _dtype_of(tensors)
    known = read_profile(profile, config, dtype)
    codec = Codec(known, quality, kl=kl, bits=bits, ratio=ratio, step=step, dtype=dtype)
    chunk = _to_chunk(source, tensors, start, replace(known.layout, dtype=dtype))
    pieces = range(0, chunk.tokens, chunk_tokens)
    single = target.suffix == SUFFIX
    if single and len(pieces) > 1:
        raise InputError(
            f"{target} can hold one chunk, the cache has {chunk.tokens} tokens and so {len(pieces)} chunks: "
            f"name a folder, or give --chunk-tokens {chunk.tokens}"
        )
    check_absent(target, force)
    with named(source):
        blobs = _encode_all(codec, chunk, chunk_tokens)
    if single:
        write_file(target, blobs[0], force)
    else:
        write_folder(target, {f"{i:0{_NAME_DIGITS}}{SUFFIX}": blob for i, blob in enumerate(blobs)}, force)
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
        print_json(report)
    else:
        print(
            f"{target}: {chunk.tokens} tokens, {chunk.nbytes:,} -> {size:,} bytes, {report['ratio']:.2f}x, "
            f"{report['bits_per_value']:.3f} bits per value, {counted(len(blobs), 'chunk')}"
        )


def _encode_all(codec: Codec, chunk: KVChunk, chunk_tokens: int) -> list[bytes]:
    from rich.progress import track

    starts = range(0, chunk.tokens, chunk_tokens)
    shown = track(starts, "encoding", console=make_console(stderr=True), transient=True, disable=len(starts) < 4)
    return [codec.encode(chunk.slice(t, min(t + chunk_tokens, chunk.tokens))) for t in shown]


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
    with named(path):
        return KVChunk(
            [tensors[name] for name in expected[::2]], [tensors[name] for name in expected[1::2]], layout, start
        )
