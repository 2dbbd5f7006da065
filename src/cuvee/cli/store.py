"""`cuvee store`: inspect a store, say whose entries it has, and delete the entries of a tenant.

A store inside the serving process (`memory://`) cannot be reached from here; the other tiers of a `tiered:` URL can.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cuvee.cli.options import Json
from cuvee.cli.output import make_console, make_table, print_json
from cuvee.codec.errors import InputError
from cuvee.integrations.stores.base import Store, StoreError

if TYPE_CHECKING:
    from cuvee.integrations.identity.records import IdentityRecord

app = typer.Typer(no_args_is_help=True, help="Inspect a store of compressed caches, or delete the entries of a tenant.")

_CHECK_BYTES = 64 << 10

_Url = Annotated[str, typer.Argument(metavar="URL", help="The URL that the server gets: file://, redis://, tiered:…")]


@app.command("info")
def store_info(
    url: _Url,
    check: Annotated[
        bool, typer.Option("--check", help="Store, read and delete an entry, and report the time.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Report whether a store can be reached and what it holds. Exit code 1 if it or one of its tiers cannot be reached.

    A folder that does not exist cannot be reached: a server creates it with its first entry. Entries and bytes of a
    folder are counted one by one; other stores do not tell theirs.

    Example: cuvee store info redis://127.0.0.1:6379/0 --check
    """
    from cuvee.integrations.stores.disk import DiskStore

    rows: list[dict[str, Any]] = []
    with shared_tiers(url) as (shown, tiers):
        for tier in tiers:
            row: dict[str, Any] = {"tier": tier.name, "reachable": True, "seconds": None, "error": None}
            row |= {"entries": None, "bytes": None}
            try:
                _must_exist(tier)
                if check:
                    row["seconds"] = _round_trip(tier)
                else:
                    tier.contains([_new_key()])
                if isinstance(tier, DiskStore):
                    row["entries"], row["bytes"] = tier.count()
            except StoreError as error:
                row |= {"reachable": False, "error": str(error)}
            rows.append(row)
    if as_json:
        print_json({"url": shown, "tiers": rows})
    else:
        _show(rows)
    _fail(rows)


@app.command("delete-tenant")
def store_delete_tenant(
    url: _Url,
    salt: Annotated[str, typer.Option("--salt", help="The tenant's cache_salt; '' for requests without one.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    as_json: Json = False,
) -> None:
    """Delete every entry of a tenant, and report how many there were. Exit code 1 if some may remain.

    Stop the tenant's requests first, or servers may write more entries. To empty a whole store, remove the folder, use
    Redis's FLUSHDB, or a lifecycle rule of the bucket.

    Records of identities (`cuvee store explain`) forget these entries, and go if they have no others.

    LMCache's entries of the salt go, too. vLLM's tier and SGLang's HiCache have salts in their names of pages: theirs
    go if the salt is their option `tenant`, which is '' by default, whatever the salts of requests were.

    Entries in the RAM of servers stay there until they are evicted or the servers restart.

    Example: cuvee store delete-tenant redis://127.0.0.1:6379/0 --salt customer-17
    """
    from cuvee.integrations.identity.records import RecordStore
    from cuvee.naming.identity import PAGE_ENGINES, page_tenant, tenant_id

    tenant = tenant_id(salt)
    tenants = [tenant, *(tenant_id(page_tenant(engine, salt)) for engine in PAGE_ENGINES)]
    rows: list[dict[str, Any]] = []
    with shared_tiers(url) as (shown, tiers):
        if not yes:
            typer.confirm(f"Delete every entry of tenant {tenant} in {shown}?", abort=True, err=True)
        for tier in tiers:
            try:
                rows.append({"tier": tier.name, "deleted": sum(map(tier.delete_tenant, tenants)), "error": None})
                RecordStore(tier).prune()
            except StoreError as error:
                rows.append({"tier": tier.name, "deleted": None, "error": str(error)})
    if as_json:
        print_json({"url": shown, "tenant": tenant, "tiers": rows})
    else:
        for row in rows:
            if row["error"] is None:
                typer.echo(f"{row['tier']}: {row['deleted']} deleted")
    _fail(rows)


@app.command("explain", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def store_explain(
    ctx: typer.Context,
    url: _Url,
    identity: Annotated[
        str | None,
        typer.Option("--identity", help="The first digits of the identity that others are compared with."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Compare with an engine that is not started: its model; its flags may follow."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say which identities a store has entries of, how many, and in which fields they differ: why engines do not share.

    Engines find each other's entries if all that determines a KV cache is equal. Each writes a record of that. One
    identity, by default that of the engine that wrote last, is compared with all others; one that differs in nothing is
    signed with another secret that the first accepts. Counts of more than 128
    entries are estimates. A record is text that anybody who can write to the store may have changed.

    With --model and other flags of `vllm serve` behind the URL, all are compared with the identity that such an engine
    would have in this environment, which must have vLLM. Its checkpoint is read, and nothing is loaded or started.

    Example: cuvee store explain file:///var/cache/kv

    Example: cuvee store explain file:///var/cache/kv --model MODEL --dtype bfloat16 --tensor-parallel-size 2
    """
    from cuvee.integrations.identity.records import RecordStore, differences

    if url.startswith("-") or (ctx.args and model is None):
        raise typer.BadParameter(f"an engine's flags must follow URL and --model, got {[url, *ctx.args]}")
    if model is not None and identity is not None:
        raise typer.BadParameter("give --identity or --model, not both")

    with shared_tiers(url) as (shown, tiers):
        for tier in tiers:
            _must_exist(tier)
        records = RecordStore(*tiers)
        found, problems = records.read()
        chosen = [each for each in found if identity is not None and each.id.startswith(identity)]
        if identity is not None and len(chosen) != 1:
            known = ", ".join(sorted(each.id for each in found)) or "no records"
            raise InputError(f"identity: must begin one of {known}, got {identity!r}")
        planned = None if model is None else _planned(["--model", model, *ctx.args])  # which reads the checkpoint
        rows = {each.id: _row(each, records.count(each)) for each in found}
    mine = chosen[0] if chosen else max(found, key=lambda each: each.written, default=None)
    if planned is not None:
        mine = planned
        rows.setdefault(mine.id, _row(mine, 0))
    for each in found:
        if mine is not None and each.id != mine.id:
            rows[each.id]["differs"] = {name: list(pair) for name, pair in differences(mine, each).items()}
    ordered = sorted(rows.values(), key=lambda row: (mine is None or row["identity"] != mine.id, -row["entries"]))
    if as_json:
        print_json({"url": shown, "identities": ordered, "problems": problems})
    else:
        _show_identities(ordered)
    for line in problems:
        typer.echo(f"warning: {line}", err=True)


def _planned(flags: list[str]) -> IdentityRecord:
    """Return `planned_record`, while vLLM tells standard error its warnings, and nothing else."""
    from cuvee.integrations.vllm.planned import planned_record

    with redirect_stdout(sys.stderr):
        logging.disable(logging.INFO)
        try:
            return planned_record(flags)
        finally:
            logging.disable(logging.NOTSET)


def _row(record: IdentityRecord, entries: int) -> dict[str, Any]:
    written = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(record.written / 1000)) if record.written else None
    return {
        "identity": record.id, "entries": entries, "exact": record.sample.exact, "written": written,
        "fields": dict(record.fields), "about": dict(record.about), "differs": None,
    }  # fmt: skip


def _show_identities(rows: list[dict[str, Any]]) -> None:
    if not any(row["written"] for row in rows):
        typer.echo("no engine has written a record here yet")
    for row in rows:
        count = f"{row['entries']:,} {'entry' if row['entries'] == 1 else 'entries'}"
        typer.echo(
            f"{row['identity'][:8]}  {'' if row['exact'] else 'about '}{count}, model "
            f"{row['about'].get('model', 'unknown')}, written {row['written'] or 'by no engine yet'}"
        )
        if row["differs"] == {}:
            typer.echo(
                "          secret: another one, which the first identity accepts: its engines find these entries"
            )
        for name, (mine, other) in (row["differs"] or {}).items():
            typer.echo(f"          {name}: {other or 'not set'}, not {mine or 'unset'}")


@contextmanager
def shared_tiers(url: str) -> Iterator[tuple[str, list[Store]]]:
    """Yield the URL without secrets, and the stores of the URL that this process can reach."""
    from cuvee.integrations.stores.redaction import redacted
    from cuvee.integrations.stores.tiered import TieredStore
    from cuvee.integrations.stores.urls import open_store

    with closing(open_store(url, guarded=False)) as store:
        tiers = store.tiers if isinstance(store, TieredStore) else (store,)
        reachable = [tier for tier in tiers if tier.shared]
        if not reachable:
            raise InputError(f"url: must name a shared store, got {redacted(url)}, which only the server can reach")
        if len(reachable) < len(tiers):
            typer.echo("note: entries in the RAM of servers cannot be reached from here", err=True)
        yield redacted(url), reachable


def _must_exist(tier: Store) -> None:
    """Raise a StoreError if the store is a folder that does not exist."""
    from cuvee.integrations.stores.disk import DiskStore

    if isinstance(tier, DiskStore) and not os.path.lexists(tier.root):
        raise StoreError(f"disk store {tier.root}: does not exist: a server creates it with its first entry")


def _new_key() -> str:
    """Return a key that no server uses."""
    from cuvee.naming.identity import store_key

    return store_key("cuvee store info", secrets.token_bytes(32))


def _round_trip(store: Store) -> float:
    """Put, get and delete an entry; return the seconds that this took.

    Raises:
        StoreError: an operation failed, or the store did not do what it said.
    """
    key, blob = _new_key(), secrets.token_bytes(_CHECK_BYTES)
    begin = time.perf_counter()
    try:
        kept = store.put(key, blob) and store.get(key) == blob
    finally:
        store.delete(key)
    if not kept:
        raise StoreError(
            f"{store.name} store: lost an entry of {_CHECK_BYTES} bytes: is it full, or its budget too small?"
        )
    if store.contains([key])[0]:
        raise StoreError(f"{store.name} store: an entry could not be deleted")
    return time.perf_counter() - begin


def _show(rows: list[dict[str, Any]]) -> None:
    table = make_table("tier", "reachable", "entries", "bytes", "round trip")
    for row in rows:
        table.add_row(
            row["tier"],
            "yes" if row["reachable"] else "no",
            *("not known" if row[name] is None else f"{row[name]:,}" for name in ("entries", "bytes")),
            "" if row["seconds"] is None else f"{1000 * row['seconds']:.1f} ms",
        )
    make_console().print(table)


def _fail(rows: list[dict[str, Any]]) -> None:
    """Print one line on standard error for each tier that failed; exit with code 1 if any did."""
    errors = [row["error"] for row in rows if row["error"] is not None]
    for error in errors:
        typer.echo(f"error: {' '.join(error.split())}", err=True)
    if errors:
        raise typer.Exit(1)
