"""Opens the `PageStore` of each rank and tenant of an engine: profile, codec, identity and store, by the adapter's
options.
"""

from __future__ import annotations

import hashlib
import logging
from contextlib import suppress
from functools import partial
from threading import Event, Lock
from typing import Any
from uuid import uuid4

from cuvee.codec.codec import Codec
from cuvee.codec.errors import InputError, ProfileMismatchError
from cuvee.codec.layout import KVLayout
from cuvee.codec.models.fingerprint import VOLATILE
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.support.once import Once
from cuvee.integrations.core.guard import Recorder
from cuvee.integrations.identity.checkpoint import naming_with_profile, read_config
from cuvee.integrations.identity.identity_records import IdentityRecords
from cuvee.integrations.identity.identity_records import Recorder as Gauges
from cuvee.integrations.identity.records import (
    IdentityRecord,
    about_layout,
    about_model,
    about_secrets,
    identity_fields,
)
from cuvee.integrations.identity.weights_name import Make, Named, WeightsName
from cuvee.integrations.options import CodingOptions
from cuvee.integrations.pages import opaque
from cuvee.integrations.pages.page_store import Note, PageStore, no_note
from cuvee.integrations.pages.recognition import tells_positions
from cuvee.integrations.profiles.collection import find_profile
from cuvee.integrations.profiles.location import shown_profile
from cuvee.integrations.stores import open_store
from cuvee.naming.identity import Identity, PageNames, Scope, page_tenant

logger = logging.getLogger(__name__)

_FEW_TOKENS = 64  # per page, below which entries are notably larger and slower to code


class PageStores:
    """The page stores of all ranks and tenants that one process serves. They share a store and its threads.

    A shared store keeps a record of their identity (`IdentityRecords`): that of the pages that the engine asks for
    first once the weights have a name. Of several ranks, the first one keeps it.

    Args:
        options: of the adapter; `PageStore` has its timeouts.
        layout: of the whole model; its dtype is that of the engine's cache. None: no page has a known order, so all are
            opaque, and neither profile nor quality is used.
        weights: names the weights as the engine uses them (`naming_of_weights`), in the background, once all else is
            accepted. Until then no page is found, loaded or stored.
        checkpoint: the served model's folder or hub id, and its revision. A profile must have been calibrated on its
            weights, unless `options.check_model` is false; they are compared in the background, too.
        engine: names the engine and its way of naming pages; entries of other engines are never found.
        page_tokens: tokens per page of the engine.
        counts: as in `PageStore`; takes the gauge `identity_entries`, too.
        positions: whether the engine tells the positions of pages.
        shard: tensor-parallel rank and size, of any rank: its codec shows at once whether the options can be met.

    Attributes:
        withdrawn: whether the weights have no name since `withdraw`.

    Raises:
        InputError: an option out of range, a store or a secret that cannot be used; a lossy quality where positions are
            neither told nor recognized.
        ProfileError, FormatError: the profile cannot be read or cannot do what the options ask.
        ProfileMismatchError: a profile of another model, or of other weights if that is known soon
            (`WeightsName.wait_at_start`). Later, it is logged, and no page is found, loaded or stored.
        FileNotFoundError, CuveeError: there is no profile where option `profile` says (`find_profile`).
    """

    def __init__(
        self,
        options: CodingOptions,
        layout: KVLayout | None,
        weights: Make,
        *,
        checkpoint: tuple[str, str | None],
        engine: str,
        page_tokens: int,
        counts: Gauges,
        positions: bool = True,
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        self._options, self._engine, self._page_tokens, self._checkpoint = options, engine, page_tokens, checkpoint
        self._secrets = options.secrets() or None
        self._opaque = Codec.without_profile(opaque.LAYOUT, threads=1, key=self._secrets)
        self._layout = layout or opaque.LAYOUT
        self._lock = Lock()
        self._codecs: dict[tuple[int, int], Codec] = {}
        given = None if layout is None else options.profile
        self._profile = Profile.unlearned(self._layout) if given is None else find_profile(given, self._layout)
        self._profile.check_layout(self._layout)
        self._checks = options.check_model and given is not None
        if options.check_model and given is not None:
            (path, revision), shown = checkpoint, shown_profile(given)
            weights = naming_with_profile(weights, self._profile, shown, path, revision=revision)
        codec = self._opaque if layout is None else self._codec(*shard)
        if not positions and not codec.lossless and not tells_positions(codec.profile):
            raise InputError(
                f"quality: must be 'lossless', got {codec.quality_name}: lossy coding needs the positions of tokens, "
                "which this engine does not tell. A learned profile of a model with RoPE recognizes them: give one in "
                "option 'profile'"
            )
        logger.info("cuvee: pages of %d tokens are coded at quality %s", page_tokens, codec.quality_name)
        if page_tokens < _FEW_TOKENS:
            logger.warning(
                "cuvee: each page of %d tokens has an entry of its own; pages of %d or more take less space and time",
                page_tokens, _FEW_TOKENS,
            )  # fmt: skip
        store = open_store(options.store)
        self._records = IdentityRecords(self._record, store, codec.key_ids, counts)
        self._recorded: tuple[Named, Identity] | None = None
        self._any = PageStore(  # of no name: `of` makes others beside it
            codec, store, self._names(self._identity(codec, shard[1], None), options.tenant), counts=counts,
            layout=codec.profile.layout if layout is None else layout.shard(*shard), shard=shard[0],
            threads=options.threads, lookup_timeout=options.lookup_timeout, load_timeout=options.load_timeout,
        )  # fmt: skip
        self.withdrawn = False
        self._once = Once(logger)
        self._make, self._base = weights, ""
        self._weights = WeightsName(self._name, partial(counts.count, "failures", label="weights"))
        try:
            self._weights.wait_at_start()
        except ProfileMismatchError:
            self.close()
            raise

    def of(self, rank: int, ranks: int, tenant: str, counts: Recorder | None = None) -> PageStore:
        """Return the page store of a tensor-parallel rank and a tenant, under the present name of the weights.

        It costs little, and serves nothing once the weights have another name: ask for one for every call.

        Args:
            rank: tensor-parallel rank.
            ranks: tensor-parallel size.
            tenant: `options.tenant`, or a request's own.
            counts: told what happens there; default: as given to the class.

        Raises:
            InputError: a rank outside of the group, or heads that cannot be divided among the ranks.
            ProfileError: a profile that cannot be cut for these ranks.
        """
        codec, named = self._codec(rank, ranks), self._weights.current
        identity, layout = self._identity(codec, ranks, named), self._layout.shard(rank, ranks)
        return self._any.sibling(
            codec, self._names(identity, tenant), layout, shard=rank, counts=counts,
            valid=partial(self._weights.holds, named), note=self._note(named, identity, rank),
        )  # fmt: skip

    def opaque(
        self, description: str, tenant: str, counts: Recorder | None = None, *, rank: int = 0, main: bool = True
    ) -> PageStore:
        """Return the page store of opaque pages, as `of` returns that of pages whose order is known.

        Args:
            description: all that the engine says about the bytes of a page: of other descriptions no page is found.
            tenant: as in `of`.
            counts: as in `of`.
            rank: of several that hold pages of one name.
            main: whether they are not beside others, which the record of the identity is of.
        """
        named = self._weights.current
        digest = hashlib.blake2b(description.encode(), digest_size=32, person=b"cuvee-opaque").digest()
        identity = self._identity(self._opaque, 1, named, digest)
        return self._any.sibling(
            self._opaque, self._names(identity, tenant), opaque.LAYOUT, shard=rank, counts=counts,
            valid=partial(self._weights.holds, named), note=self._note(named if main else None, identity, rank),
        )  # fmt: skip

    def withdraw(self, reason: str) -> None:
        """Have no page found, loaded or stored until `rename`, because the engine's weights may be others."""
        self.withdrawn = True
        self._weights.withdraw(reason)
        self._any.count("weights_changed")

    def rename(self, version: str | None = None) -> None:
        """Name the engine's weights anew.

        Args:
            version: of the weights, which engines of the same `options.model_id` have in common. None, or without
                `model_id`: nobody else finds what is stored from now on, and neither does this engine after a restart.
        """
        self.withdrawn = False
        if version is not None and self._options.model_id is None:  # two runs of training count from 1
            self._once(
                "version",
                "cuvee: what is stored from now on is found by this engine alone, until it restarts, because version "
                "%r of the weights may be another run's, too: set option 'model_id' to a name of the run, which its "
                "engines have in common", version,
            )  # fmt: skip
            version = None
        suffix = f" live {uuid4().hex}" if version is None else f" version {version}"
        if self._base or (version is None and not self._checks):
            self._weights.use(self._base + suffix)
        else:  # the weights changed before their files were read
            self._weights.make(partial(self._name, suffix=suffix))

    def close(self) -> None:
        """Close all of them, as `PageStore.close` does, after at most five seconds in which entries are counted."""
        self._weights.close()
        self._records.close(self._options.load_timeout)
        self._any.close()

    def _name(self, stop: Event, suffix: str = "") -> str:
        """Return the name of the weights, whose files are read once."""
        self._base = self._base or self._make(stop)
        return self._base + suffix

    def _codec(self, rank: int, ranks: int) -> Codec:
        with self._lock:
            if (rank, ranks) not in self._codecs:
                self._codecs[rank, ranks] = Codec(
                    self._profile.shard(rank, ranks), **self._options.quality_of(self._layout.dtype), threads=1,
                    key=self._secrets,
                )  # fmt: skip
            return self._codecs[rank, ranks]

    def _note(self, named: Named | None, identity: Identity, rank: int) -> Note:
        """Return what is told of entries of an identity; the first of a name gets a record."""
        if named is None or rank:
            return no_note
        with self._lock:
            if self._recorded is None or self._recorded[0] is not named:
                self._recorded = named, identity
                self._records.use(identity)
            return self._records.note if self._recorded[1] == identity else no_note

    def _record(self, identity: Identity) -> IdentityRecord:
        """Return the record of an identity, without entries."""
        layout = self._layout if identity.layout == self._layout.fingerprint else None
        key_ids = self._opaque.key_ids
        fields = identity_fields(identity, layout, self._page_tokens, key_ids, engine=self._engine)
        (path, revision), config = self._checkpoint, dict[str, Any]()
        with suppress(InputError):
            config = read_config(path, revision=revision).to_dict()
        model = about_model(path, revision, config, VOLATILE)
        return IdentityRecord(fields, model | about_layout(layout) | about_secrets(key_ids))

    def _identity(self, codec: Codec, ranks: int, named: Named | None, layout: bytes | None = None) -> Identity:
        return Identity(
            model="unnamed" if named is None else named.text,
            tokenizer="",  # the engine's names of pages are made of token ids
            layout=layout or self._layout.fingerprint,
            profile=b"" if codec.lossless else self._profile.id,
            quality=codec.quality_name,
            shards=ranks,
        )

    def _names(self, identity: Identity, tenant: str) -> PageNames:
        tenant = page_tenant(self._engine, tenant)
        return PageNames(identity, Scope(tenant=tenant), self._engine, self._page_tokens)
