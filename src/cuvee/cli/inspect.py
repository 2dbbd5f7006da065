"""`cuvee inspect`: describe blobs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from cuvee.cli.files import blob_files, errors_of
from cuvee.cli.options import Json
from cuvee.cli.output import make_console, make_table, print_json


def inspect(
    sources: Annotated[list[Path], typer.Argument(metavar="FILE", help="Blobs (.cuvee), or folders of them.")],
    as_json: Json = False,
) -> None:
    """Describe blobs: tokens, size, scheme, step, token ids. Needs no profile.

    Example: cuvee inspect blobs
    """
    from cuvee.codec.format.container import inspect as read

    infos = []
    for source in sources:
        for path in blob_files(source):
            with errors_of(path):
                infos.append((path, read(path.read_bytes())))
    if as_json:
        print_json(
            [
                {"file": str(path), **asdict(info), "bits_per_value": info.bits_per_value, "ratio": info.ratio}
                for path, info in infos
            ]
        )
        return
    table = make_table("file", "kind", "scheme", "tokens", "dtype", "step", "token ids", "bytes", "bits/value", "ratio")
    for path, info in infos:
        table.add_row(
            str(path),
            info.kind,
            info.scheme,
            f"{info.start} … {info.start + info.tokens - 1}",
            info.dtype,
            "" if info.step is None else f"{info.step:.4g}",
            f"{info.token_id_bytes:,} bytes" if info.token_id_bytes else "",
            f"{info.total_bytes:,}",
            f"{info.bits_per_value:.3f}",
            f"{info.ratio:.2f}x",
        )
    raw, size = sum(info.raw_bytes for _, info in infos), sum(info.total_bytes for _, info in infos)
    console = make_console()
    console.print(table)
    if len(infos) > 1:
        console.print(f"{len(infos)} blobs: {raw:,} -> {size:,} bytes, {raw / size:.2f}x", highlight=False)
