"""The command line.

Exit codes: 0 success; 1 wrong input or files, which one line on standard error explains; 2 wrong usage.

Each command has a module of its own and imports slow modules inside the command, so that `cuvee --help` is quick.
With `--json` a command that describes prints JSON on standard output; progress and errors go to standard error.
"""

from __future__ import annotations

import errno
from typing import Annotated, Any

import typer

from cuvee.cli import (
    decode,
    demo,
    encode,
    inspect,
    model,
    profile,
    report,
    store,
    warmup,
)
from cuvee.cli import eval as lm_eval
from cuvee.codec.errors import CuveeError

__all__ = ["app", "main"]


_DEBUG = "cuvee.debug"


class _Commands(typer.core.TyperGroup):
    """A command group that turns errors users can fix into one line on standard error and exit code 1.

    `--debug` may stand anywhere, also behind the command.
    """

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override, unused-ignore]
        """Take `--debug` out of the command's own arguments."""
        end = args.index("--") if "--" in args else len(args)
        before = [arg for arg in args[:end] if arg != "--debug"]
        ctx.meta[_DEBUG] = len(before) < end
        return super().parse_args(ctx, before + args[end:])

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override, unused-ignore]
        """Run a command."""
        try:
            return super().invoke(ctx)
        except (CuveeError, OSError, ImportError) as error:
            if (
                ctx.params["debug"]
                or ctx.meta.get(_DEBUG)
                or (isinstance(error, OSError) and error.errno == errno.EPIPE)
            ):
                raise
            typer.echo(f"error: {_one_line(error)}", err=True)
            raise typer.Exit(1) from None


app = typer.Typer(
    name="cuvee",
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(demo.demo)
app.command()(encode.encode)
app.command()(decode.decode)
app.command()(inspect.inspect)
app.command()(report.report)
app.command()(warmup.warmup)
app.command(
    "eval",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
)(lm_eval.evaluate)
app.add_typer(model.app, name="model")
app.add_typer(profile.app, name="profile")
app.add_typer(store.app, name="store")


def main() -> None:
    """Run the `cuvee` script."""
    app(prog_name="cuvee")


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def _version(value: bool) -> None:
    if value:
        from cuvee import __version__

        print(f"cuvee {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Compress the KV cache of a language model into small files and back."""
