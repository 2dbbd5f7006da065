"""The setup that both roles of the connector share: model, profile, quality and identity.

Models and features of vLLM that cuvee does not support are refused by name when the engine starts (`refusals`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from cuvee.codec.codec import Codec
from cuvee.codec.errors import InputError, UnsupportedModelError
from cuvee.codec.layout import KVLayout
from cuvee.codec.models.fingerprint import VOLATILE
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.quality import LOSSLESS
from cuvee.integrations.identity.checkpoint import (
    Checkpoint,
    changed_while_loading,
    name_of_weights,
    naming_with_profile,
    tokenizer_identity,
)
from cuvee.integrations.identity.engine_config import vllm_options
from cuvee.integrations.identity.records import (
    IdentityRecord,
    about_layout,
    about_model,
    about_secrets,
    identity_fields,
)
from cuvee.integrations.identity.weights_name import Make
from cuvee.integrations.profiles.collection import find_profile
from cuvee.integrations.profiles.location import shown_profile
from cuvee.integrations.vllm.connector_config import Options
from cuvee.integrations.vllm.pages.coded_pages import pairs_of_codes
from cuvee.integrations.vllm.pages.layer_groups import (
    CachedLayers,
    LayerGroup,
    RecurrentLayer,
    all_latent,
    is_draft,
    read_layers,
)
from cuvee.integrations.vllm.refusals import (
    check_blend,
    check_heads,
    check_latents,
    check_layers,
    check_recurrent,
    check_windows,
    codes_of_cache,
    dtype_of_cache,
    refuse_features,
)
from cuvee.naming.identity import Identity

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Setup:
    """The connector's view of the engine.

    Attributes:
        options: of the connector.
        layout: KV layout of what is coded of the whole model; its dtype is that of the engine's cache. Of an fp8 cache
            these are values or, lossless, pairs of codes (`coded_pages`).
        profile: of the whole model.
        quality: "lossless", or "step:" and the step's index.
        block_tokens: tokens per block of the engine's scheduler: whole blocks of every group of layers.
        shards: tensor-parallel ranks.
        loads, stores: whether this engine loads, and stores (`kv_role`).
        prefix_caching: whether a request finds in the engine what another request loaded.
        step_tokens: most tokens that a step of the engine computes.
        groups: layers that share a table of the engine's blocks; empty: all layers, and the engine keeps all tokens.
        alone: whether no other rank computes with this one: neither a tensor-parallel one, nor one of a data-parallel
            engine, which may have experts for this one.
        encodes: whether the engine encodes images itself. What it takes from another engine it knows by name alone.
        remote_workers: whether the workers run in processes of their own, each with its own store object.
        layers: the model's that cache.
        codes: dtype of an fp8 cache; None: the pages hold values.
        pages: KV layout of the pages of an fp8 cache; None: that of what is coded.
        other_connectors: whether other connectors see the engine's requests (vLLM's MultiConnector).
        replicated: whether all tensor-parallel ranks hold the same pages, as of latents (MLA).
        left: share of a device's memory that the engine leaves free.
        about: what helps people to recognize the model (`cuvee.integrations.identity.records.about_model`).
    """

    options: Options
    layout: KVLayout
    profile: Profile
    quality: str
    block_tokens: int
    shards: int
    loads: bool
    stores: bool
    prefix_caching: bool
    step_tokens: int = 8192
    groups: tuple[LayerGroup, ...] = ()
    alone: bool = True
    encodes: bool = True
    remote_workers: bool = False
    layers: CachedLayers | None = None
    codes: torch.dtype | None = None
    pages: KVLayout | None = None
    other_connectors: bool = False
    replicated: bool = False
    left: float = 1.0
    about: Mapping[str, str] = field(default_factory=dict)

    @property
    def holders(self) -> tuple[int, ...]:
        """The ranks that store entries, each under its number. Where pages are replicated, it is the first, and all
        others load what that one has stored.
        """
        return (0,) if self.replicated else tuple(range(self.shards))

    def holder(self, rank: int) -> int:
        """Return the rank that stores what a rank holds."""
        return 0 if self.replicated else rank

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each group of layers; None: the engine keeps all its tokens."""
        return tuple(group.window for group in self.groups) or (None,)

    @property
    def blocks(self) -> tuple[int, ...]:
        """Tokens per block of each group of layers."""
        return tuple(group.block or self.block_tokens for group in self.groups) or (self.block_tokens,)

    @property
    def recurrent(self) -> tuple[RecurrentLayer, ...]:
        """Layers of this process that keep states in place of tokens."""
        return () if self.layers is None else self.layers.recurrent

    @property
    def loads_in_part(self) -> bool:
        """Whether a part of a load can be restored and the rest computed. Not where there are several groups of layers,
        since block numbers then tell the engine nothing; nor with windows and states, which end with the whole load.
        """
        return self.windows == (None,) and not self.recurrent

    def coding(self, key_ids: Sequence[bytes]) -> str:
        """Return profile, quality and ids of secrets, as text: processes that differ in them must not share names."""
        profile = "" if self.quality == LOSSLESS else self.profile.id.hex()
        return " ".join(filter(None, (profile, self.quality, *(key_id.hex() for key_id in key_ids))))

    @property
    def predicts(self) -> bool:
        """Whether the codec predicts a part of the cache from token ids."""
        return self.quality != LOSSLESS and self.profile.token_table is not None

    @classmethod
    def of_engine(cls, vllm_config: Any, kv_cache_config: Any) -> Setup:
        """Read vLLM's configuration.

        Args:
            vllm_config: vLLM's `VllmConfig`.
            kv_cache_config: vLLM's `KVCacheConfig`.

        Raises:
            InputError: an unknown option, or a value out of range.
            UnsupportedModelError: a model or a feature of the engine that cuvee does not support.
            ProfileMismatchError: a profile of another model.
            FileNotFoundError, CuveeError: there is no profile where option `profile` says (`find_profile`).
        """
        transfer = vllm_config.kv_transfer_config
        options = Options.from_dict(transfer.kv_connector_extra_config)
        options.secrets()
        refuse_features(vllm_config)
        text_config, parallel = vllm_config.model_config.hf_text_config, vllm_config.parallel_config
        drafted = vllm_config.speculative_config is not None
        cached = read_layers(kv_cache_config, text_config.num_hidden_layers if drafted else None)
        groups, specs = cached.groups, cached.specs
        block, tokens = cached.block, options.chunk_tokens
        if tokens % block:
            raise InputError(f"chunk_tokens: must be a multiple of the engine's block size {block}, got {tokens}")
        check_windows(groups, tokens, block)
        codes = codes_of_cache(vllm_config, specs)
        layout = KVLayout.from_config(
            text_config,
            dtype_of_cache(specs) if codes is None else vllm_config.model_config.dtype,
            states=bool(cached.recurrent),
        )
        if cached.recurrent:
            check_recurrent(vllm_config)
        if options.blend is not None:
            check_blend(vllm_config, layout, codes, options.blend)
        if layout.max_positions is not None and tokens > layout.max_positions:
            raise InputError(f"chunk_tokens: must be within the model's {layout.max_positions} positions, got {tokens}")
        if layout.layers[0].latent:
            check_latents(vllm_config, layout, options)
        shards = parallel.tensor_parallel_size
        check_layers(layout, cached)
        check_heads(layout, cached, shards)
        pages = None if codes is None else layout
        layout, profile, quality = _coded(options, layout, codes, vllm_config.instance_id)
        cache = vllm_config.cache_config
        profile.shard(0, shards)  # a basis that crosses ranks is refused now
        setup = cls(
            options, layout, profile, quality, block, shards, transfer.is_kv_consumer, transfer.is_kv_producer,
            bool(cache.enable_prefix_caching), vllm_config.scheduler_config.max_num_batched_tokens,
            groups,
            alone=shards == parallel.data_parallel_size == 1,
            encodes=vllm_config.ec_transfer_config is None or not vllm_config.ec_transfer_config.is_ec_consumer,
            remote_workers=parallel.distributed_executor_backend != "uni", layers=cached,
            codes=codes, pages=pages, replicated=all_latent(kv_cache_config),
            left=1.0 if cache.kv_cache_memory_bytes else 1.0 - cache.gpu_memory_utilization,
            about=_about(vllm_config.model_config),
        )  # fmt: skip
        if options.deadline_ms is not None and not setup.loads_in_part:
            raise UnsupportedModelError(
                f"deadline_ms: a model with {'recurrent layers' if cached.recurrent else 'sliding windows'} loads a "
                "prefix as a whole or not at all; remove it"
            )
        return setup

    @classmethod
    def planned(cls, vllm_config: Any) -> Setup:
        """Return what the configuration alone tells of an engine that has not started: enough for its `record`.

        Args:
            vllm_config: vLLM's `VllmConfig`.

        Raises:
            InputError, UnsupportedModelError, ProfileMismatchError, FileNotFoundError, CuveeError: as `of_engine`; and
                UnsupportedModelError for recurrent layers, whose states have shapes that only an engine knows.
        """
        from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

        transfer, model, cache = vllm_config.kv_transfer_config, vllm_config.model_config, vllm_config.cache_config
        options = Options.from_dict(transfer.kv_connector_extra_config)
        refuse_features(vllm_config)
        if model.is_hybrid or model.has_inner_state:
            raise UnsupportedModelError(
                "model: must have no recurrent layers, whose states have shapes that only an engine knows: start the "
                "engine, and compare the record that it writes"
            )
        codes = codes_of_cache(vllm_config, ())
        dtype = model.dtype if codes is not None else kv_cache_dtype_str_to_dtype(cache.cache_dtype, model)
        layout = KVLayout.from_config(model.hf_text_config, dtype)
        layout, profile, quality = _coded(options, layout, codes, vllm_config.instance_id)
        shards = vllm_config.parallel_config.tensor_parallel_size
        return cls(
            options, layout, profile, quality, 0, shards, False, False, False, codes=codes, about=_about(model)
        )  # fmt: skip

    def record(self, identity: Identity) -> IdentityRecord:
        """Return the record of an engine with this identity, without entries."""
        tokens, key_ids = self.options.chunk_tokens, self.options.key_ids()
        fields = identity_fields(identity, self.layout, tokens, key_ids, engine="vllm")
        return IdentityRecord(fields, {**self.about, **about_layout(self.layout), **about_secrets(key_ids)})

    def identity(self, vllm_config: Any) -> Identity:
        """Return the identity of this engine's blobs: everything but tokens that determines their content. Takes as
        long as reading the checkpoint's files.

        Raises:
            InputError: as `naming`, and files that change while they are read.
        """
        identity, make = self.naming(vllm_config)
        return replace(identity, model=make(threading.Event()))

    def naming(self, vllm_config: Any) -> tuple[Identity, Make]:
        """Return the identity of this engine's blobs with another `model`, and what makes its own, which takes as long
        as reading the checkpoint's files, and refuses a profile that was calibrated on other weights.

        Raises:
            InputError: there are no such files, or they are not what the engine reads; an option that processes write
                differently (`set_options`).
        """
        model, named = vllm_config.model_config, self.options.model_id
        options = vllm_options(vllm_config, named=named is not None)
        if self.recurrent:  # their dtypes decide what later layers compute
            options = {**options, "recurrent_states": _states_in_keys(self.recurrent)}
        logger.info("cuvee: options of the engine that are part of the keys: %s", options or "none")
        checkpoint = None if named else _checkpoint(vllm_config)

        def name(stop: threading.Event) -> str:
            weights = named or ""
            if checkpoint is not None:
                weights = checkpoint.identity(stop)
                if changed_while_loading(vllm_config, model.model):
                    raise InputError("model: must not change while the engine starts")
            return name_of_weights(weights, model.dtype, options)

        make: Make = name
        if self.options.profile is None:
            logger.info(
                "cuvee: no profile is configured, so the quality is %s. With a profile learned for this model, entries "
                "are several times smaller, at a measured KL (`cuvee profile learn`, then option 'profile')",
                self.quality,
            )
        elif self.options.check_model:
            shown = shown_profile(self.options.profile)
            make = naming_with_profile(name, self.profile, shown, model.model, revision=model.revision)
        identity = Identity(
            model="unnamed",
            tokenizer=_tokenizer(model),
            layout=self.layout.fingerprint,
            profile=b"" if self.quality == LOSSLESS else self.profile.id,
            quality=self.quality,
            shards=self.shards,
        )
        return identity, make

    def codec(self, rank: int) -> Codec:
        """Return the codec of one rank, which is this process. It starts no threads, because the worker codes several
        chunks at a time.
        """
        profile = self.profile.shard(rank, self.shards)
        asked, secrets = _asked(self.options, self.codes, self.layout), self.options.secrets() or None
        codec = Codec(profile, **asked, threads=1, refinements=self.options.refinements, key=secrets)
        if codec.key_ids and rank == 0:
            # Replicas with other secrets do not find each other's entries; the id in the log shows why.
            logger.info("cuvee: blobs are signed with the key of id %s", _key_ids(codec))
        return codec

    def check_registered(self, shares: Mapping[str, str | None], vllm_config: Any) -> None:
        """Refuse layers of a worker that are neither cached by the scheduler's account nor a drafter's, and attend to
        the cache of none that is.

        Args:
            shares: of each layer, the one whose cache it attends to; None: its own.
            vllm_config: vLLM's `VllmConfig`.

        Raises:
            UnsupportedModelError: there are such layers.
        """
        drafted = vllm_config.speculative_config is not None
        most = vllm_config.model_config.hf_text_config.num_hidden_layers if drafted else None
        known = () if self.layers is None else (*self.layers.names, *(layer.name for layer in self.recurrent))
        for name, shared in shares.items():
            if not {name, shared} & {*known} and not is_draft(name, most):
                raise UnsupportedModelError(
                    f"{name}: has a cache that the engine's scheduler does not know: serve this model without "
                    "CuveeConnector"
                )

    def layout_of_pages(self, rank: int) -> KVLayout:
        """Return the KV layout of a rank's pages."""
        return (self.pages or self.layout).shard(rank, self.shards)


def _coded(options: Options, layout: KVLayout, codes: torch.dtype | None, engine: str) -> tuple[KVLayout, Profile, str]:
    """Return layout, profile and quality of what is coded of pages with this layout: of fp8, lossless, the codes."""
    profile = Profile.unlearned(layout) if options.profile is None else _find_profile(engine, options.profile, layout)
    profile.check_layout(layout)
    codec = Codec(profile, **_asked(options, codes, layout), refinements=options.refinements)
    if codes is not None and codec.lossless:
        layout = pairs_of_codes(layout, codes)
        profile = Profile.unlearned(layout)
    return layout, profile, codec.quality_name


def _checkpoint(vllm_config: Any) -> Checkpoint:
    """Return the files that vLLM has read the model's weights from."""
    model = vllm_config.model_config
    elsewhere = getattr(model, "model_weights", "")
    if elsewhere and elsewhere != model.model:
        raise InputError(
            f"model: must hold its weights, got {elsewhere}, where vLLM reads them from: set option 'model_id' to a "
            "name of your own that changes with the weights"
        )
    load_format = str(vllm_config.load_config.load_format)
    return Checkpoint(model.model, revision=model.revision, load_format=load_format)


def _about(model: Any) -> dict[str, str]:
    return about_model(str(model.model), model.revision, model.hf_text_config.to_dict(), VOLATILE)


def _key_ids(codec: Codec) -> str:
    first, *others = (key_id.hex() for key_id in codec.key_ids)
    return first + (f"; also accepted: {', '.join(others)}" if others else "")


def _states_in_keys(layers: Sequence[RecurrentLayer]) -> list[list[str]]:
    """Return the shapes and dtypes of states, each once, as JSON."""
    each = {(str(layer.shapes), ", ".join(str(dtype) for dtype in layer.dtypes)) for layer in layers}
    return [list(pair) for pair in sorted(each)]


@lru_cache(maxsize=1)
def _find_profile(engine: str, where: str, layout: KVLayout) -> Profile:
    """Find the profile of a model with this layout once per engine: with one rank, both roles live in one process."""
    return find_profile(where, layout)


def _asked(options: Options, codes: torch.dtype | None, layout: KVLayout) -> dict[str, Any]:
    """Return the quality that is asked of the codec. A ratio is that of the engine's cache, which may be fp8."""
    if codes is None or options.ratio is None:
        return options.quality_of(layout.dtype)
    asked = dict(options.codec_quality)
    return {**asked, "bits": 8 * codes.itemsize / asked.pop("ratio")}


def _tokenizer(model: Any) -> str:
    """Name the tokenizer; "" if there is none or it is unknown, since KV depends on token ids alone."""
    if model.skip_tokenizer_init or not model.tokenizer:
        return ""
    try:
        return tokenizer_identity(model.tokenizer, revision=model.tokenizer_revision)
    except InputError as error:
        logger.info("cuvee: the tokenizer is not part of the keys: %s", error)
        return ""
