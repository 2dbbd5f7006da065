"""Learn a profile from the lossless entries that vLLM's connector has stored: store --> chunks --> `cuvee.fit`.

An engine without a profile stores lossless entries. They hold the exact cache of real traffic, so a profile can be
fitted to them on any machine that reaches the store, without the model, a GPU or gradients. They hold no token ids, so
such a profile predicts nothing from ids.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.errors import CuveeError, InputError
from cuvee.codec.format.container import read_header
from cuvee.codec.format.keys import make_keys
from cuvee.codec.layout import KVLayout
from cuvee.codec.profiles.profile import Profile
from cuvee.integrations.stores import Store
from cuvee.learning.calibrate import fit
from cuvee.learning.moments import tokens_needed
from cuvee.naming.identity import store_key, tenant_id

_ENTRY = re.compile(r"([0-9a-f]{64})0000([0-9a-f]{16})?")  # rank 0's part of a chunk: digest, rank, id of the secret


def fit_from_store(
    store: Store,
    layout: KVLayout,
    *,
    tenant: str = "",
    ranks: int = 1,
    group: str | None = None,
    tokens: int = 40_000,
    secrets: Sequence[bytes] = (),
    model: Callable[[], str | None] = lambda: None,
) -> Profile:
    """Fit a profile to one tenant's lossless entries of one model. Entries of other kinds are passed over.

    Nothing in an entry names the weights it was computed with. If the store also holds lossless entries of another
    model with the same layout (a fine-tuned copy, or a LoRA adapter), the profile is of the mixture.

    Args:
        store: a store that can list its keys.
        layout: of the whole model, in any dtype.
        tenant: the `cache_salt` of the requests; empty: of requests without one.
        ranks: tensor-parallel ranks of the engines that stored the entries.
        group: as for `cuvee.fit`; default: `"layer"`, or `"heads:1"` for several ranks.
        tokens: stop after this many; twice as many as the group needs are read in any case.
        secrets: those that may authenticate the entries.
        model: returns the fingerprint of the weights, which the profile then names. Called once the store is known to
            have such entries, because it may read all weights.

    Returns:
        A profile of source `"fitted"`. Keys are hashes, so its chunks are a random sample of what the tenant stored.

    Raises:
        InputError: the store holds no such entries with a tag of one of the secrets (without secrets: with no tag).
        ProfileError: it holds too few of them; the message gives the number that is needed.
        StoreError: the store failed, or cannot list its keys.

    Example:
        >>> from cuvee import LayerLayout
        >>> from cuvee.integrations.stores import open_store
        >>> layout = KVLayout("mine", (LayerLayout(2, 8, 8, None),) * 3, "float32", max_positions=None)
        >>> codec, store = Codec(Profile.unlearned(layout), "lossless"), open_store("memory://?max_gb=1", guarded=False)
        >>> for number in range(8):
        ...     chunk = KVChunk(torch.randn(3, 64, 2, 8), torch.randn(3, 64, 2, 8), layout)
        ...     _ = store.put(store_key("", bytes([number]) * 32), codec.encode(chunk))
        >>> fit_from_store(store, layout).source
        'fitted'
        >>> store.close()
    """
    if all(layer.latent for layer in layout.layers):  # all ranks hold the same, which the first has stored
        ranks = 1
    group = group or ("layer" if ranks == 1 else "heads:1")
    wanted = max(tokens, 2 * tokens_needed(layout, group))
    chunks = _read(store, layout, tenant, ranks, wanted, secrets)
    first = next(chunks, None)
    if first is None:
        raise InputError(
            f"store: must hold lossless entries of this model, stored by vLLM's connector with tensor_parallel_size="
            f"{ranks} for this tenant"
            + (" and signed with the given secret" if secrets else " without a secret")
            + ", got none: serve the model without a profile first"
        )
    return fit(layout, chain([first], chunks), group, model=model())


def _read(
    store: Store, layout: KVLayout, tenant: str, ranks: int, tokens: int, secrets: Sequence[bytes]
) -> Iterator[KVChunk]:
    """Yield chunks of all heads until there are enough tokens."""
    shard, key_ids = layout.shard(0, ranks), {key.id for key in make_keys(list(secrets) or None)} or {b""}
    for key in store.keys(tenant_id(tenant)):
        name = _ENTRY.fullmatch(key.partition("/")[2])
        if name is None:
            continue
        digest, key_id = bytes.fromhex(name[1]), bytes.fromhex(name[2] or "")
        if key_id not in key_ids:
            continue
        blobs = store.get_many([store_key(tenant, digest, rank, key_id) for rank in range(ranks)])
        parts: list[KVChunk] = []
        for rank, blob in enumerate(blobs):
            bound = store_key(tenant, digest, rank).encode() if key_id else b""
            part = None if blob is None else _decode(blob, shard, bound, secrets)
            if part is not None:
                parts.append(part)
        if len(parts) == ranks and len({(part.start, part.tokens, part.layout.dtype) for part in parts}) == 1:
            yield _joined(layout, parts)
            tokens -= parts[0].tokens
            if tokens <= 0:
                return


def _decode(blob: bytes, layout: KVLayout, bound: bytes, secrets: Sequence[bytes]) -> KVChunk | None:
    """Decode an entry; None: it is damaged, of another model, or not lossless."""
    try:
        header = read_header(blob)
        own = replace(layout, dtype=header.dtype)
        if not header.lossless or header.layout != own.fingerprint:
            return None
        codec = Codec(Profile.unlearned(own), "lossless", key=list(secrets) or None)
        return codec.decode(blob, associated_data=bound if secrets else b"")
    except CuveeError as error:
        if error.blames_blob:
            return None
        raise


def _joined(layout: KVLayout, parts: Sequence[KVChunk]) -> KVChunk:
    """Return the chunk of all heads; with fewer heads than ranks, each head is that of several ranks in a row."""

    def join(which: str) -> list[torch.Tensor]:
        every = [max(len(parts) // layer.kv_heads, 1) for layer in layout.layers]
        return [torch.cat([getattr(part, which)[at] for part in parts[::step]], 1) for at, step in enumerate(every)]

    return KVChunk(join("keys"), join("values"), replace(layout, dtype=parts[0].layout.dtype), parts[0].start)
