"""`cuvee profile`: learn or fit the profile of a model, show one, and share profiles between machines."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import cuvee
from cuvee.cli.files import check_output
from cuvee.cli.options import MODEL_HELP, Dtype, Force
from cuvee.cli.output import make_console
from cuvee.cli.profile_show import print_profile, profile_show
from cuvee.codec.errors import InputError

if TYPE_CHECKING:
    from cuvee.codec.profiles.profile import Profile
    from cuvee.learning.run import Run

_WHERE_HELP = (
    "The collection of profiles: a folder, object storage (s3://bucket/prefix, …), or a repository of "
    "the Hugging Face hub (hf://owner/name, or hf://owner/name@revision)."
)

MIXTURE_SEQUENCES = 96  # as in `cuvee.calibration.kinds`, which needs torch
LEAST_SEQUENCES = 24  # likewise: three of each kind
QUICK_SEQUENCES = 56  # of a mixture: about what the largest groups of layers on a CPU are learned from

Out = Annotated[Path, typer.Option("--out", "-o", help="The profile to write, such as model.safetensors.")]

app = typer.Typer(no_args_is_help=True, help="Learn the profile of a model, show one, or share them.")


@app.command("learn")
def profile_learn(
    model_path: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    *,
    out: Out,
    texts: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            metavar="TEXT",
            help="Add a text to the mixture, as a kind of its own, with a quarter of --sequences: a text file, or "
            "a .jsonl file whose lines are lists of token ids, or objects with input_ids or text. Repeatable.",
        ),
    ] = None,
    group: Annotated[
        str,
        typer.Option(
            help="What one basis spans: head, unit, layer, layers:n, heads:n, all, or auto: as many layers as the "
            "device decodes quickly. A larger group makes smaller blobs but a larger profile."
        ),
    ] = "auto",
    tensor_parallel: Annotated[
        bool,
        typer.Option(
            "--tensor-parallel",
            help="With auto: a group heads:n, whose profile any number of tensor-parallel ranks can share. It takes "
            "more bits than layers:n.",
        ),
    ] = False,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Learn sooner: from fewer sequences, without samples of the model, and without "
            "prediction from tokens, which takes much text. Blobs are larger; the loss that is promised is measured on "
            "the same kinds of text, at half as many steps.",
        ),
    ] = False,
    sequences: Annotated[
        int | None,
        typer.Option(
            min=LEAST_SEQUENCES,
            help=f"Learn from about this many sequences of the mixture. Default: {MIXTURE_SEQUENCES}; with --quick "
            f"{QUICK_SEQUENCES}.",
            show_default=False,
        ),
    ] = None,
    length: Annotated[int, typer.Option(min=8, help="Tokens per sequence; three quarters count as cached.")] = 512,
    seed: Annotated[int, typer.Option(help="Seed of the sampled texts and targets.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences per forward and backward pass.")] = 4,
    dtype: Annotated[
        Dtype,
        typer.Option(
            help="Dtype of the model. auto: that of its files; on a CPU without instructions for it float32, which is "
            "faster there."
        ),
    ] = Dtype.auto,
    device: Annotated[str, typer.Option(help="Device of the model: cpu, cuda, cuda:1, …")] = "cpu",
    force: Force = False,
) -> None:
    """Learn which directions of the cache a model's loss depends on, and measure what each quality costs.

    The text is a mixture of several kinds that come with cuvee and of the model's own samples.

    Example: cuvee profile learn smollm2 -o smollm2.safetensors
    """
    from cuvee.calibration.corpus import (
        BUNDLED_MODEL,
        learning_dtype,
        load_config,
        load_model,
        load_tokenizer,
        read_corpus,
        spread_sequences,
    )
    from cuvee.calibration.kinds import check_mixture_size, mixture, more_text, sampling_cost
    from cuvee.codec.models.forward import check_tokens, coded_layout
    from cuvee.codec.support.devices import usable_device
    from cuvee.eval.machine import torch_threads
    from cuvee.learning.calibrate import expected_costs
    from cuvee.learning.curve import CURVE_STEP_INDICES
    from cuvee.learning.moments import need_tokens
    from cuvee.learning.run import Run

    check_output(out, force)
    if tensor_parallel and group != "auto":
        raise InputError(f"--tensor-parallel: must come with --group auto, got --group {group}, which says it all")
    sequences = sequences or (QUICK_SEQUENCES if quick else MIXTURE_SEQUENCES)
    # All that needs no weights is checked before they are loaded, which may take minutes.
    check_mixture_size(sequences, length)
    usable_device(device, "--device")
    layout = coded_layout(load_config(model_path))
    if layout.max_positions is not None and length > layout.max_positions:
        raise InputError(f"--length: must be at most {layout.max_positions}, the model's positions, got {length}")
    added = {
        Path(name).name: spread_sequences([read_corpus(name, model_path)], length, max(sequences // 4, 3))
        for name in texts or []
    }
    if group != "auto":
        count = sequences + sum(map(len, added.values()))
        need_tokens(layout, group, count * length, count)  # of which about two thirds are learned from
    tokenizer = load_tokenizer(model_path)
    chosen = dtype.value
    if dtype is Dtype.auto:
        chosen, why = learning_dtype(model_path, device)
        typer.echo(f"dtype {chosen}: {why}", err=True)
    model = load_model(model_path, chosen, device)
    for rows in added.values():
        check_tokens(model, rows, None)  # before the samples, which take minutes
    more = None if quick else more_text(tokenizer, length)
    run = Run(keep=out.with_name(f"{out.name}.partial"))
    # The steps of the bundled model gain nothing from more threads, and on a busy machine these wait for each other.
    threads = torch_threads(1) if model_path == BUNDLED_MODEL else nullcontext()
    with _interruptible(out, run), threads:
        # The mixture comes first, so that an added kind replaces one of the same name.
        if not quick:
            kinds = mixture(model, tokenizer, sequences, length, seed, samples=False) | added
            run.expect(("sampling", sampling_cost(model, sequences, length)), *expected_costs(model, kinds, more))
        tokens = mixture(model, tokenizer, sequences, length, seed, samples=not quick, run=run) | added
        profile = cuvee.calibrate(
            model, tokens, group, more_text=more, batch_size=batch_size, seed=seed, tensor_parallel=tensor_parallel,
            progress=run, step_indices=CURVE_STEP_INDICES[::2] if quick else None,
        )  # fmt: skip
        _save(profile, out)
        run.finish()
    report = shlex.join(
        ["cuvee", "report", "--model", model_path, "--profile", str(out), "--quick", "-o", f"out/{out.stem}"]
    )
    typer.echo(f"Measure it on other texts, beside baselines:  {report}")
    typer.echo(
        f"Use it:  cuvee.Codec(cuvee.Profile.load({str(out)!r}), 'balanced'), or as option \"profile\" of an engine"
    )


@app.command("fit")
def profile_fit(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP + " Only its files are read.")],
    url: Annotated[str, typer.Argument(metavar="URL", help="The store, as the engines get it.")],
    *,
    out: Out,
    group: Annotated[
        str | None,
        typer.Option(
            help="What one basis spans, as for `cuvee profile learn`. Default: layer, or heads:1 for several ranks.",
            show_default=False,
        ),
    ] = None,
    salt: Annotated[str, typer.Option(help="The tenant's cache_salt. Default: none.")] = "",
    ranks: Annotated[int, typer.Option(min=1, help="The tensor_parallel_size of the engines that stored.")] = 1,
    tokens: Annotated[int, typer.Option(min=1, help="Learn from about this many tokens.")] = 40_000,
    key_env: Annotated[
        str | None, typer.Option(help="The environment variable with the secret that signs the entries.")
    ] = None,
    force: Force = False,
) -> None:
    """Fit a profile to the lossless entries that vLLM's connector has stored, without gradients and without texts.

    Engines find it by the weights in MODEL, whose fingerprint it names.

    Example: cuvee profile fit MODEL redis://127.0.0.1:6379/0 -o fitted.safetensors
    """
    import torch

    from cuvee.calibration.corpus import model_path
    from cuvee.cli.store import shared_tiers
    from cuvee.integrations.identity.checkpoint import read_layout
    from cuvee.integrations.identity.secret_sources import read_secret
    from cuvee.integrations.identity.weight_fingerprints import weight_fingerprints
    from cuvee.integrations.profiles.store_learning import fit_from_store
    from cuvee.learning.moments import tokens_needed

    check_output(out, force)
    path = model_path(model)
    secrets = () if key_env is None else (read_secret("--key-env", env=key_env),)
    layout = read_layout(path, torch.bfloat16)
    if group is not None:
        tokens_needed(layout, group)  # refuses what is no group of the model

    def fingerprint() -> str | None:
        weights = weight_fingerprints(path)  # after all that takes no time: it reads every byte
        if not weights.found:
            unknown = f"the weights' fingerprint is unknown ({weights.unknown})"
            typer.echo(f"note: {unknown}: engines cannot check that it is theirs", err=True)
        return weights.found[0] if weights.found else None

    with _interruptible(out), shared_tiers(url) as (shown, tiers), _waiting(f"reading {shown}"):
        profile = fit_from_store(
            tiers[-1], layout, tenant=salt, ranks=ranks, group=group, tokens=tokens, secrets=secrets,
            model=fingerprint,
        )  # fmt: skip
    _save(profile, out)


@contextmanager
def _interruptible(out: Path, run: Run | None = None) -> Iterator[None]:
    """Say what Ctrl-C leaves of a profile that is being learned."""
    try:
        yield
    except KeyboardInterrupt:
        kept = run.kept() if run else ""
        rest = f"goes on from {kept}" if kept else "starts from the beginning"
        typer.echo(f"interrupted: {out} was not written; the same command {rest}", err=True)
        raise typer.Exit(130) from None


def _save(profile: Profile, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    profile.save(out)
    print_profile(profile, out)


app.command("show")(profile_show)


@app.command("push")
def profile_push(
    file: Annotated[Path, typer.Argument(help="A profile (.safetensors).")],
    where: Annotated[str, typer.Argument(metavar="WHERE", help=_WHERE_HELP)],
) -> None:
    """Put a profile into a collection, and say by which name engines find it there.

    Example: cuvee profile push smollm2.safetensors s3://bucket/profiles
    """
    from cuvee.codec.profiles.profile import Profile
    from cuvee.integrations.profiles.collection import ProfileCollection
    from cuvee.integrations.profiles.location import ProfileLocation

    location = ProfileLocation.parse(where)
    if location.id is not None:
        raise InputError(f"WHERE: must be without an id, got {location.shown}: the profile in FILE has one")
    collection = ProfileCollection(location)
    with _waiting(f"pushing {file} to {location.shown}"):
        profile = Profile.load(file)
        size = collection.push(profile)
    typer.echo(f"pushed {size:,} bytes: engines find it as {location.shown}#{profile.id.hex()}")


@app.command("list")
def profile_list(
    where: Annotated[str, typer.Argument(metavar="WHERE", help=_WHERE_HELP)],
    *,
    model: Annotated[str | None, typer.Option(help="List the profiles that fit this model alone.")] = None,
) -> None:
    """List the profiles in a collection, the last pushed first: id, when it was pushed, bytes, and the model's layout.

    Example: cuvee profile list s3://bucket/profiles
    """
    import time

    import torch

    from cuvee.calibration.corpus import model_path
    from cuvee.integrations.identity.checkpoint import read_layout
    from cuvee.integrations.profiles.collection import ProfileCollection
    from cuvee.integrations.profiles.location import ProfileLocation

    location = ProfileLocation.parse(where)
    layout = None if model is None else read_layout(model_path(model), torch.bfloat16)
    with _waiting(f"listing {location.shown}"):
        collection = ProfileCollection(location)
        profiles = [(each, collection.layout_of(each)) for each in collection.list(layout)]
    for each, shown in profiles:
        pushed = time.strftime("%Y-%m-%d %H:%M", time.gmtime(each.time))
        typer.echo(f"{each.id}  {pushed}  {each.size:>14,}  {shown}")
    if not profiles:
        typer.echo(f"no profiles in {location.shown}", err=True)


@app.command("pull")
def profile_pull(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help=MODEL_HELP + " Another name must be in the local cache of the hub.")
    ],
    where: Annotated[
        str,
        typer.Argument(
            metavar="WHERE",
            help=_WHERE_HELP + " It ends in #ID, the id of the profile (cuvee profile list).",
        ),
    ],
    *,
    out: Out,
    other_weights: Annotated[
        bool,
        typer.Option(
            "--other-weights",
            help="Also accept a profile that was calibrated on other weights, such as those of the model "
            "before it was quantized.",
        ),
    ] = False,
    force: Force = False,
) -> None:
    """Write a model's profile from a collection to a file, after verifying that it is the model's, and show it.

    An engine takes the same WHERE as option "profile", and then needs no file.

    Example: cuvee profile pull smollm2 s3://bucket/profiles#ID -o smollm2.safetensors
    """
    import torch

    from cuvee.calibration.corpus import model_path
    from cuvee.integrations.identity.checkpoint import read_layout
    from cuvee.integrations.identity.weight_fingerprints import weight_fingerprints
    from cuvee.integrations.profiles.collection import ProfileCollection
    from cuvee.integrations.profiles.location import ProfileLocation

    check_output(out, force)
    location = ProfileLocation.parse(where)
    location.need_id()
    path = model_path(model)
    layout = read_layout(path, torch.bfloat16)  # profiles serve caches of any dtype
    with _waiting(f"pulling from {location.shown}"):
        weights = tuple if other_weights else lambda: weight_fingerprints(path).found
        profile = ProfileCollection(location).pull(layout, weights=weights)
    _save(profile, out)


@contextmanager
def _waiting(what: str) -> Iterator[None]:
    """Show on a terminal what takes long, which one request to a store or to the hub may."""
    from rich.markup import escape

    with make_console(stderr=True).status(escape(what)):
        yield
