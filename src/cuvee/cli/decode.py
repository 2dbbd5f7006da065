"""`cuvee decode`: restore a saved cache from blobs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cuvee.cli.files import blob_files, check_absent, check_output, errors_of, read_profile, whole_folder
from cuvee.cli.options import Config, Force, ProfileFile, need_one_of_profile_and_config
from cuvee.cli.output import chunk_count

if TYPE_CHECKING:
    from cuvee.codec.chunk import KVChunk
    from cuvee.codec.codec import Codec


def decode(
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="Blobs that encode wrote: a .cuvee file, or a folder of them.")
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The safetensors file to write.")],
    profile: ProfileFile = None,
    config: Config = None,
    start: Annotated[
        int | None, typer.Option(min=0, help="Position of the first token. Default: its original position.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Refuse to restore more tokens: a small file may claim a huge cache.")
    ] = 1 << 17,
    force: Force = False,
) -> None:
    """Restore a cache, at its original position or at another one.

    Example: cuvee decode blobs cache.safetensors --profile model.safetensors
    """
    need_one_of_profile_and_config(profile, config)

    from cuvee.codec.chunk import KVChunk
    from cuvee.codec.codec import Codec
    from cuvee.codec.coding.decoding import check_tokens
    from cuvee.codec.format.container import inspect
    from cuvee.integrations.transformers.cache_file import write_cache_file

    check_output(target, force)
    files = blob_files(source)
    whole_folder(source, files)
    chunks: list[KVChunk] = []
    codec: Codec | None = None
    tokens = 0
    for path in files:
        blob = path.read_bytes()
        with errors_of(path):
            info = inspect(blob)
            tokens += info.tokens
            check_tokens(tokens, max_tokens)
            if codec is None:
                # A codec decodes blobs of any quality of its profile; every profile has this quality.
                codec = Codec(read_profile(profile, config, info.dtype), "lossless")
                moved = 0 if start is None else start - info.start
            chunks.append(codec.decode(blob, info.start + moved, max_tokens=max_tokens))
    with errors_of(source):
        whole = KVChunk.concat(chunks)
    check_absent(target, force)  # again: the file may have appeared while decoding
    write_cache_file(target, whole.keys, whole.values, whole.start, whole.token_ids)
    print(f"{target}: {whole.tokens} tokens from position {whole.start}, {chunk_count(len(chunks))}")
