"""A drafter's own layers (EAGLE, MTP, draft models), stored losslessly beside each entry and restored with it.

    entry      <digest>                        the model's layers, at the quality that is asked for
    drafts     <digest of it and the drafter>  the drafter's, as the engine holds them

They decide which tokens are proposed, never which are accepted. So an entry is loaded without them where they are
missing, and engines with different drafters, or with none, share the entries.

A head that reads the next token (EAGLE, MTP) has computed an entry's last position with the token that followed. Behind
another one, that position is a little off.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cuvee.codec.codec import Codec
from cuvee.codec.errors import CuveeError, UnsupportedModelError
from cuvee.codec.layout import KVLayout, LayerLayout
from cuvee.codec.paged import PagedCache
from cuvee.codec.profiles.profile import Profile
from cuvee.integrations.identity.checkpoint import Checkpoint
from cuvee.integrations.identity.weights_name import WeightsName
from cuvee.integrations.stores.threads import ThreadPool
from cuvee.integrations.vllm.pages.coded_pages import CodedPages, pairs_of_codes
from cuvee.integrations.vllm.pages.engine_pages import find_pages
from cuvee.integrations.vllm.pages.layer_groups import CachedLayers, is_latent, read_layers
from cuvee.integrations.vllm.refusals import codes_of_cache, dtype_of_cache
from cuvee.integrations.vllm.setup import Setup
from cuvee.naming.identity import canonical, companion_digest

logger = logging.getLogger(__name__)

_UNSTORED = "cuvee: fewer drafts are accepted behind a loaded prompt, because a drafter's layers are not stored: %s"


@dataclass(frozen=True, slots=True)
class Drafts:
    """The layers of a drafter that this process caches.

    Attributes:
        layers: of vLLM's groups.
        pages: KV layout of their pages on this rank.
        codes: dtype of an fp8 cache; None: the pages hold values.
        codec: of these values, or of pairs of codes; lossless, without threads.
        name: of the drafter's weights and layers; its layers are neither stored nor loaded before it is known.
    """

    layers: CachedLayers
    pages: KVLayout
    codes: torch.dtype | None
    codec: Codec
    name: WeightsName

    @classmethod
    def of_engine(cls, vllm_config: Any, kv_cache_config: Any, setup: Setup) -> Drafts | None:
        """Read vLLM's configuration; None: there is no drafter with layers here, or they cannot be stored, which is
        logged.
        """
        if vllm_config.speculative_config is None:
            return None
        try:
            most = vllm_config.model_config.hf_text_config.num_hidden_layers
            layers = read_layers(kv_cache_config, most, drafts=True)
            return cls._of_layers(layers, vllm_config, setup) if layers.names else None
        except CuveeError as error:
            logger.warning(_UNSTORED, error)
            return None

    def found(
        self, layers: Mapping[str, Any], kv_caches: Mapping[str, torch.Tensor]
    ) -> tuple[Drafts, PagedCache] | None:
        """Return them with their pages (`find_pages`); None: the layout of these is not known, which is logged."""
        try:
            own = {name: kv_caches[name] for name in self.layers.names}
            return self, find_pages(self.pages, layers, own, self.codes)
        except UnsupportedModelError as error:
            logger.warning(_UNSTORED, error)
            return None

    @classmethod
    def _of_layers(cls, layers: CachedLayers, vllm_config: Any, setup: Setup) -> Drafts:
        codes = codes_of_cache(vllm_config, layers.specs)
        drafter = vllm_config.speculative_config.draft_model_config
        dtype = dtype_of_cache(layers.specs) if codes is None else setup.layout_of_pages(0).dtype
        shapes = tuple(_shape(spec, setup.layout_of_pages(0).layers[-1]) for spec in layers.specs)
        pages = KVLayout("drafter", shapes, dtype, None)
        layout = pages if codes is None else pairs_of_codes(pages, codes)
        # The weights of heads in the model's own checkpoint are named by the entries' digests.
        model = vllm_config.model_config
        own = (drafter.model, drafter.revision) == (model.model, model.revision)
        checkpoint = None if own else Checkpoint(drafter.model, revision=drafter.revision)

        def make(stop: threading.Event) -> str:
            weights = "" if checkpoint is None else checkpoint.identity(stop)
            name = canonical(weights.encode(), str(drafter.dtype).encode(), layout.fingerprint)
            return hashlib.blake2b(name, digest_size=16).hexdigest()

        key = setup.options.secrets() or None
        codec = Codec(Profile.unlearned(layout), quality="lossless", threads=1, key=key)
        name = WeightsName(make)
        name.wait_at_start()
        return cls(layers, pages, codes, codec, name)


def _shape(spec: Any, last: LayerLayout) -> LayerLayout:
    """Return the shape of a layer's pages; that of latents is the model's."""
    if not is_latent(spec):
        return LayerLayout(
            spec.num_kv_heads, spec.head_size, getattr(spec, "head_size_v", None) or spec.head_size, None
        )
    if not last.latent or spec.head_size != last.head_dim + last.value_dim:
        raise UnsupportedModelError(f"the drafter's latents of {spec.head_size} are others than the model's")
    return last


class DraftPages(CodedPages):
    """The pages of a drafter's layers.

    Args:
        drafts: their layers.
        cache: their pages.
        coders: threads that decode several entries at once.
    """

    def __init__(self, drafts: Drafts, cache: PagedCache, coders: ThreadPool) -> None:
        super().__init__(cache, drafts.layers.groups, drafts.codec.profile.layout, drafts.codec, coders)
        self._name = drafts.name

    def digest(self, entry: bytes) -> bytes:
        """Return the digest of what is stored beside the entry with this digest.

        Raises:
            RuntimeError: the drafter has no name.
        """
        if (named := self._name.current) is None:
            raise RuntimeError("the drafter's weights have no name")
        return companion_digest(entry, bytes.fromhex(named.text))

    @property
    def named(self) -> bool:
        """Whether the drafter has a name; until then its layers are neither stored nor loaded."""
        return self._name.current is not None
