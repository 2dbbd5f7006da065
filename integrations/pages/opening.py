"""Opens the `PageStore` of one rank of an engine: profile, codec, identity and store, by the adapter's options."""

from __future__ import annotations

import logging
from collections.abc import Callable

from cuvee.codec.codec import Codec
from cuvee.codec.errors import InputError
from cuvee.codec.identity import Identity, PageNames, Scope
from cuvee.codec.layout import KVLayout
from cuvee.codec.profiles.profile import Profile
from cuvee.integrations.guard import Recorder
from cuvee.integrations.options import CodingOptions
from cuvee.integrations.pages.entries import MAX_RUN_PAGES
from cuvee.integrations.pages.page_store import PageStore
from cuvee.integrations.stores import open_store

logger = logging.getLogger(__name__)


def open_page_store(
    options: CodingOptions,
    layout: KVLayout,
    weights: Callable[[], str],
    *,
    engine: str,
    page_tokens: int,
    counts: Recorder,
    rank: int = 0,
    ranks: int = 1,
    lookup_timeout: float = 2.0,
    load_timeout: float = 30.0,
) -> PageStore:
    """Open what the options describe, for one tensor-parallel rank.

    Args:
        options: of the adapter.
        layout: of the whole model; its dtype is that of the engine's cache.
        weights: names the weights as the engine uses them (`name_of_weights`). Called once everything else is accepted,
            because it reads files.
        engine: names the engine and its way of naming pages; entries of other engines are never found.
        page_tokens: tokens per page of the engine.
        counts: as in `PageStore`.
        rank: tensor-parallel rank.
        ranks: tensor-parallel size.
        lookup_timeout: as in `PageStore`.
        load_timeout: as in `PageStore`.

    Raises:
        InputError: an option out of range, a store or a secret that cannot be used.
        ProfileError, FormatError: the profile cannot be read or cannot do what the options ask.
        ProfileMismatchError: a profile of another model.
    """
    if options.chunk_tokens % page_tokens and options.chunk_tokens > page_tokens:
        raise InputError(
            f"chunk_tokens: must be a multiple of the engine's page size {page_tokens}, got {options.chunk_tokens}"
        )
    profile = Profile.generic(layout) if options.profile is None else Profile.load(options.profile)
    profile.check_layout(layout)
    codec = Codec(
        profile.shard(rank, ranks), **options.codec_quality, dtype=layout.dtype, threads=1,
        key=options.secrets() or None,
    )  # fmt: skip
    run_pages = min(max(options.chunk_tokens // page_tokens, 1), MAX_RUN_PAGES)
    identity = Identity(
        model=weights(),
        tokenizer="",  # the engine's names of pages are made of token ids
        layout=layout.fingerprint,
        profile=b"" if codec.lossless else profile.id,
        quality=codec.quality_name,
        shards=ranks,
    )
    # An engine's adapter may delete all that it stored, so it has tenants of its own.
    names = PageNames(identity, Scope(tenant=f"{engine}:{options.tenant}"), engine, page_tokens)
    logger.info(
        "cuvee: pages of %d tokens are coded %d at a time, at quality %s", page_tokens, run_pages, codec.quality_name
    )
    return PageStore(
        codec, open_store(options.store), names, counts=counts, shard=rank, run_pages=run_pages,
        threads=options.threads, lookup_timeout=lookup_timeout, load_timeout=load_timeout,
    )  # fmt: skip
