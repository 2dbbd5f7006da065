"""`cuvee warmup`: compile the codec before it is needed."""

from __future__ import annotations

import typer


def warmup() -> None:
    """Compile the codec's loops into the cache that later processes read, so that no request waits for it.

    Without it, the first chunks that are coded on a machine wait up to twenty seconds. The cache is `NUMBA_CACHE_DIR`,
    or beside the installed package, or in the user's cache folder. It serves CPUs of the kind that it is made on.

    Example: cuvee warmup
    """
    import time

    from cuvee.cli.warmup_steps import cache_folder, steps

    folder = cache_folder()
    for name, work in steps():
        typer.echo(f"{name} ... ", nl=False)
        began = time.perf_counter()
        work()
        typer.echo(f"{time.perf_counter() - began:.1f} s")
    typer.echo(f"compiled code: {folder}")
