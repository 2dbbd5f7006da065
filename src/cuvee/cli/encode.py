"""`cuvee encode`: compress a saved cache into blobs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cuvee.cli.files import blob_name, check_output, errors_of, read_profile, write_folder
from cuvee.cli.options import DEFAULT_CHUNK_TOKENS, Config, Force, ProfileFile, need_one_of_profile_and_config
from cuvee.cli.output import chunk_count, make_console

if TYPE_CHECKING:
    from cuvee.codec.chunk import KVChunk
    from cuvee.codec.codec import Codec


def encode(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="CACHE",
            help="A safetensors file with the tensors layer.0.keys [T, H, D], after RoPE, layer.0.values, …. Its "
            "metadata may give start, the position of the first token. With token_ids [T] it may compress better.",
        ),
    ],
    target: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="A folder for the blobs 00000-of-00002.cuvee, …"),
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
    kl: Annotated[float | None, typer.Option(help="Instead of a quality: at most this KL, in nats per token.")] = None,
    bits: Annotated[
        float | None,
        typer.Option(
            help="Instead: about this many bits per value, on texts like the profile's at 256 tokens per chunk."
        ),
    ] = None,
    ratio: Annotated[float | None, typer.Option(help="Instead: at least this many times smaller.")] = None,
    step: Annotated[float | None, typer.Option(help="Instead: the quantizer step.")] = None,
    worst: Annotated[
        bool, typer.Option("--worst", help="With --kl: of the worst kind of text, as presets, not the mean.")
    ] = False,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens per blob.")] = DEFAULT_CHUNK_TOKENS,
    force: Force = False,
) -> None:
    """Compress a saved cache.

    Example: cuvee encode cache.safetensors blobs --profile model.safetensors --quality high
    """
    options = {"quality": quality, "kl": kl, "bits": bits, "ratio": ratio, "step": step}
    chosen = [f"--{name}" for name, value in options.items() if value is not None]
    if len(chosen) > 1:
        raise typer.BadParameter(f"must be one option for the quality, got {' and '.join(chosen)}")
    need_one_of_profile_and_config(profile, config)
    check_output(target, force, blobs=True)

    from cuvee.codec.codec import Codec
    from cuvee.integrations.transformers.cache_checks import check_chunk
    from cuvee.integrations.transformers.cache_file import cache_file_dtype, read_cache_file

    dtype = cache_file_dtype(source)
    loaded = read_profile(profile, config, dtype)
    sized = None if ratio is None else dtype
    codec = Codec(loaded, quality, kl=kl, bits=bits, ratio=ratio, step=step, worst=worst, dtype=sized)
    chunk = read_cache_file(source, loaded.layout)
    with errors_of(source):
        if not codec.lossless and (known := loaded.known_layers) is not None:
            check_chunk(known, chunk, chunk_tokens)
        blobs = _encode_all(codec, chunk, chunk_tokens)
    write_folder(target, {blob_name(i, len(blobs)): blob for i, blob in enumerate(blobs)}, force)
    size = sum(map(len, blobs))
    values = chunk.tokens * chunk.layout.values_per_token
    print(
        f"{target}: {chunk.tokens} tokens, {chunk.nbytes:,} -> {size:,} bytes, {chunk.nbytes / size:.2f}x, "
        f"{8 * size / values:.3f} bits per value, {chunk_count(len(blobs))}"
    )


def _encode_all(codec: Codec, chunk: KVChunk, chunk_tokens: int) -> list[bytes]:
    from rich.progress import track

    starts = range(0, chunk.tokens, chunk_tokens)
    shown = track(starts, "encoding", console=make_console(stderr=True), transient=True, disable=len(starts) < 4)
    return [codec.encode(chunk.slice(t, min(t + chunk_tokens, chunk.tokens))) for t in shown]
