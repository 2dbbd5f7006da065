"""Identity: the names under which chunks of KV are stored and found again.

A chunk has digests of these kinds, BLAKE2b over canonical bytes:

    prefix    root ─┬─> digest 0 ─┬─> digest 1 ─┬─> …     this chunk after exactly that prefix, for cache lookups
                 chunk 0       chunk 1       chunk 2
    tail                     digest 0 ───> digest         the first tokens of an unfinished chunk after digest 0
    content   root ───> digest of one run of tokens       these tokens at any position, for blending
    page      root ───> digest of an engine's own name    a page of an engine that does not say its tokens
    beside    digest 0 ───> digest                        further tensors of chunk 0, such as a drafter's layers

The root holds everything that determines a token's KV (`Identity`) and who may read it (`Scope`). The key of an entry
is made of tenant, digest and tensor-parallel shard, and of the id of the secret if blobs carry a tag. The keys of a
chunk's refinements follow from it (`part_keys`).

**Keys are a persistent format.** Stores outlive processes, and replicas of several versions share them, so any change
of the bytes hashed here orphans every stored entry. A deliberate change raises `VERSION`, which enters every digest,
and gets a line in the changelog. `tests/naming/test_identity.py` holds the expected values.

The encoding is canonical: no two inputs give the same bytes. Every field is preceded by its length, numbers are
little-endian int64, and strings are UTF-8, never normalized (including lone surrogates, which JSON requests may hold).
Each kind of digest has its own `person` tag, so that kinds are never confused.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from cuvee.codec.errors import InputError
from cuvee.codec.format.keys import KEY_ID_BYTES
from cuvee.naming.part_keys import MAX_PARTS

VERSION = 1
DIGEST_BYTES = 32
TENANT_BYTES = 16
MAX_SHARDS = 1 << 16

_LOSSLESS = "lossless"
# Each number has one spelling: "+5" or "05" would be other keys for the same bytes.
_INDEX = "(?:0|-?[1-9][0-9]*)"
_QUALITY = re.compile(f"step:({_INDEX})(?:,plain:(?!\\1(?:,|$))(?:lossless|{_INDEX}))?(?:,parts:[2-{MAX_PARTS}])?")


@dataclass(frozen=True, slots=True)
class Identity:
    """Everything that determines the contents of a cached chunk, except its tokens and its `Scope`.

    Attributes:
        model: names weights and configuration.
        tokenizer: names the tokenizer; empty if sequences only come as token ids.
        layout: `KVLayout.fingerprint` of the whole model, not of one shard: heads, RoPE, dtype.
        profile: `Profile.id`; empty for lossless, which needs no profile.
        quality: `Codec.quality_name`: `"lossless"`, `"step:<index>"` or `"step:<index>,plain:<index or lossless>"`,
            followed by `",parts:<number>"` if chunks are stored in parts. It is part of the key because a lossless
            reader must never find lossy bytes.
        shards: tensor-parallel size.

    Raises:
        InputError: a field has another type, model or layout is empty, or quality and profile do not agree.
    """

    model: str
    tokenizer: str
    layout: bytes
    profile: bytes
    quality: str
    shards: int = 1

    def __post_init__(self) -> None:
        _check_fields("identity", self)
        if not self.model or not self.layout:
            raise InputError("identity.model, identity.layout: must name the model and its layout, got an empty one")
        if self.quality == _LOSSLESS:
            if self.profile:
                raise InputError("identity.profile: must be empty for lossless, which depends on no profile, got bytes")
        elif not _QUALITY.fullmatch(self.quality):
            raise InputError(
                f"identity.quality: must be 'lossless' or 'step:<index>', a Codec.quality_name, got {self.quality!r}"
            )
        elif not self.profile:
            raise InputError(f"identity.profile: must be Profile.id for quality {self.quality!r}, got no bytes")
        if not 1 <= self.shards <= MAX_SHARDS:
            raise InputError(f"identity.shards: must be 1 … {MAX_SHARDS}, got {self.shards}")


@dataclass(frozen=True, slots=True, order=True)
class Media:
    """A multimodal item. Its placeholder tokens are at `[start, end)` of the sequence; `id` names its content."""

    start: int
    end: int
    id: str

    def __post_init__(self) -> None:
        _check_fields("media", self)
        if not 0 <= self.start < self.end:
            raise InputError(f"media.start, media.end: must be 0 <= start < end, got {self.start}, {self.end}")
        if not self.id:
            raise InputError("media.id: must name the item's content (its hash), got an empty string")


@dataclass(frozen=True, slots=True)
class Scope:
    """The parts of a request besides its tokens that enter its keys.

    Attributes:
        tenant: cache salt. Sequences of different tenants never share a key. Requests without a salt form one tenant.
        adapter: names the LoRA adapter and its weights; empty for none.
        media: multimodal items, in any order. They may overlap.
    """

    tenant: str = ""
    adapter: str = ""
    media: tuple[Media, ...] = ()

    def __post_init__(self) -> None:
        _check_fields("scope", self)
        for item in self.media:
            _check_type("scope.media[]", item, Media)


class PrefixChain:
    """Prefix digests of one growing sequence: digest i names the KV of chunk i after exactly the chunks 0 … i-1.

    Each chunk is hashed once. **Contract:** a chain serves one sequence that only grows at its end, and never reads
    hashed tokens again. If you change or remove tokens, make a new chain: the old one would return the digests of the
    old tokens. Do not use a chain from several threads at once.

    Args:
        identity: identity of the model and its codec.
        scope: scope of the request. The positions of its media items count in this sequence.
        chunk_tokens: tokens per chunk.
    """

    __slots__ = ("_digests", "_media", "_root", "chunk_tokens")

    def __init__(self, identity: Identity, scope: Scope, chunk_tokens: int) -> None:
        _check_type("chunk_tokens", chunk_tokens, int)
        if chunk_tokens < 1:
            raise InputError(f"chunk_tokens: must be at least 1, got {chunk_tokens}")
        self.chunk_tokens = chunk_tokens
        self._media = sorted(scope.media)
        self._root = _blake2b(b"cuvee-root", _root(identity, scope) + canonical(_int(chunk_tokens)))
        self._digests: list[bytes] = []

    def digests(self, tokens: Sequence[int], chunks: int) -> list[bytes]:
        """Return the digests of the first `chunks` full chunks, 32 bytes each. Fewer than before give their prefix.

        Args:
            tokens: the sequence so far (list, NumPy array, CPU tensor, …), any integers within int64.
            chunks: number of chunks; all must be full.

        Raises:
            InputError: `tokens` holds fewer than `chunks` full chunks, or values that are not such integers.
        """
        size = self.chunk_tokens
        if not 0 <= chunks <= len(tokens) // size:
            raise InputError(
                f"chunks: must be 0 … {len(tokens) // size}, the full chunks of {size} tokens, got {chunks}"
            )
        done = len(self._digests)
        if chunks > done:
            new = memoryview(_tokens(tokens[done * size : chunks * size]))
            width = 8 * size
            previous = self._digests[-1] if done else self._root
            for index in range(done, chunks):
                at = (index - done) * width
                media = _media(self._media, index * size, (index + 1) * size)
                # The root fixes the number of tokens, so no length is needed here.
                previous = _blake2b(b"cuvee-prefix", previous, new[at : at + width], media)
                self._digests.append(previous)
        return self._digests[:chunks]

    def tails(self, tokens: Sequence[int], chunks: int, sizes: Sequence[int]) -> list[bytes]:
        """Return the digests of unfinished chunks, 32 bytes each: the tokens after `chunks` full chunks, per length.

        This does not change the chain, so another thread may call it while the owner goes on.

        Args:
            tokens: the sequence so far, as for `digests`.
            chunks: full chunks before; `digests` must have returned their digests.
            sizes: lengths, each from 1 to one token less than a chunk.

        Raises:
            InputError: the chunks before are not hashed yet, a length is out of range or beyond the tokens, or the
                tokens are not such integers.
        """
        if not 0 <= chunks <= len(self._digests):
            raise InputError(f"chunks: must be 0 … {len(self._digests)}, the chunks hashed so far, got {chunks}")
        start = chunks * self.chunk_tokens
        most = min(self.chunk_tokens - 1, len(tokens) - start)
        for size in sizes:
            if not 1 <= size <= most:
                raise InputError(f"sizes: must be 1 … {most}, got {size}")
        data = memoryview(_tokens(tokens[start : start + max(sizes, default=0)])) if sizes else memoryview(b"")
        previous = self._digests[chunks - 1] if chunks else self._root
        return [
            _blake2b(b"cuvee-tail", previous, _int(size), data[: 8 * size], _media(self._media, start, start + size))
            for size in sizes
        ]


def content_digest(identity: Identity, scope: Scope, tokens: Sequence[int], *, context: bytes = b"") -> bytes:
    """Return 32 bytes that identify a run of tokens at any position.

    Args:
        identity: identity of the model and its codec.
        scope: scope of the request. The positions of its media items count from the run's first token.
        tokens: the run: at least one token, any integers within int64.
        context: names the tokens that preceded the run when it was computed; empty if it was computed alone.

    Raises:
        InputError: there are no tokens, they are not such integers, or `context` is not bytes.
    """
    _check_type("context", context, bytes)
    if not len(tokens):
        raise InputError("tokens: must hold at least one token, got none")
    data = _tokens(tokens)
    media = _media(sorted(scope.media), 0, len(tokens))
    # Everything before the context has its length, so the context cannot be mistaken for another field.
    behind = canonical(context) if context else b""
    return _blake2b(b"cuvee-content", _root(identity, scope), _int(len(data)), data, media, behind)


def companion_digest(digest: bytes, name: bytes) -> bytes:
    """Return 32 bytes that identify further tensors of the tokens of `digest`; `name` tells what they are."""
    return _blake2b(b"cuvee-beside", digest, canonical(name))


class PageNames:
    """Digests of pages that an engine names itself, usually by a hash chain over the tokens up to the page's end.

    Args:
        identity: identity of the model and its codec.
        scope: scope of the pages. Whatever else the engine distinguishes must be part of its names.
        engine: names the engine and its way of naming pages.
        page_tokens: tokens per page.

    Raises:
        InputError: an empty engine, or pages of no tokens.

    Example:
        >>> identity = Identity("model", "", b"layout", b"", "lossless")
        >>> names = PageNames(identity, Scope(), "mine", page_tokens=64)
        >>> len(names.page(b"first")), names.page(b"first") == names.page(b"second")
        (32, False)
    """

    __slots__ = ("_root", "page_tokens", "tenant")

    def __init__(self, identity: Identity, scope: Scope, engine: str, page_tokens: int) -> None:
        _check_type("engine", engine, str)
        _check_type("page_tokens", page_tokens, int)
        if not engine:
            raise InputError("engine: must name the engine, got an empty string")
        if page_tokens < 1:
            raise InputError(f"page_tokens: must be at least 1, got {page_tokens}")
        self.page_tokens = page_tokens
        self.tenant = scope.tenant
        kind = canonical(_text(engine), _int(page_tokens))
        self._root = _blake2b(b"cuvee-root", _root(identity, scope) + canonical(kind))

    def page(self, name: bytes) -> bytes:
        """Return 32 bytes that identify the page of this name.

        Raises:
            InputError: the name is empty or not bytes.
        """
        _check_type("name", name, bytes)
        if not name:
            raise InputError("name: must be the engine's name of a page, got no bytes")
        return _blake2b(b"cuvee-page", self._root, name)


PAGE_ENGINES = ("lmcache-l2", "sglang-hicache", "vllm-tier")
"""The engines of `PageNames` whose adapters are here."""


def page_tenant(engine: str, tenant: str) -> str:
    """Return a tenant of an adapter's own, which may delete all that it has stored, in place of the user's."""
    return f"{engine}:{tenant}"


def tenant_id(tenant: str) -> str:
    """Return the tenant's part of a store key: 32 hexadecimal digits, BLAKE2b of the cache salt, which may be empty.

    This hides the salt from anybody who can list the store, but only if it is hard to guess.
    """
    _check_type("tenant", tenant, str)
    data = bytes([VERSION]) + canonical(_text(tenant))
    return hashlib.blake2b(data, digest_size=TENANT_BYTES, person=b"cuvee-tenant").hexdigest()


def store_key(tenant: str, digest: bytes, shard: int = 0, key_id: bytes = b"") -> str:
    """Return the key of one shard of a chunk: tenant id, digest and shard, in 32 + 64 + 4 hexadecimal digits.

    A slash follows the tenant id. If blobs carry a tag, the id of their secret comes last, 16 more digits. Replicas
    with different secrets, or with none, then neither find nor replace nor delete each other's entries. The tag itself
    binds a blob to the key without this id.

    Args:
        tenant: cache salt, as in the scope that the digest was made with.
        digest: a digest of `PrefixChain.digests` or `content_digest`.
        shard: tensor-parallel rank. The digest already covers the number of ranks.
        key_id: one of `Codec.key_ids`; empty if blobs have no tag.

    Raises:
        InputError: the digest or the key id has another length, or the shard is out of range.
    """
    _check_type("digest", digest, bytes)
    if len(digest) != DIGEST_BYTES:
        raise InputError(f"digest: must be {DIGEST_BYTES} bytes, got {len(digest)}")
    _check_type("shard", shard, int)
    if not 0 <= shard < MAX_SHARDS:
        raise InputError(f"shard: must be 0 … {MAX_SHARDS - 1}, got {shard}")
    _check_type("key_id", key_id, bytes)
    if len(key_id) not in (0, KEY_ID_BYTES):
        raise InputError(f"key_id: must be {KEY_ID_BYTES} bytes or none, got {len(key_id)}")
    return f"{tenant_id(tenant)}/{digest.hex()}{shard:04x}{key_id.hex()}"


def canonical(*fields: bytes) -> bytes:
    """Join the fields, each after its length. Other fields, or the same bytes split elsewhere, give other bytes."""
    return b"".join(_int(len(field)) + field for field in fields)


def _root(identity: Identity, scope: Scope) -> bytes:
    return bytes([VERSION]) + canonical(
        _text(identity.model), _text(identity.tokenizer), identity.layout, identity.profile, _text(identity.quality),
        _int(identity.shards), _text(scope.tenant), _text(scope.adapter),
    )  # fmt: skip


def _media(items: Iterable[Media], start: int, end: int) -> bytes:
    """Return canonical bytes of the items that overlap `[start, end)`, with places relative to `start`."""
    fields = [
        canonical(_int(item.start - start), _int(item.end - start), _text(item.id))
        for item in items
        if item.start < end and item.end > start
    ]
    return _int(len(fields)) + b"".join(fields)


def _tokens(tokens: Sequence[int]) -> bytes:
    array = np.asarray(tokens)
    # Only types that int64 holds exactly: a float or an unsigned 64-bit number could turn into another token.
    if array.ndim != 1 or array.dtype.kind not in "iu" or not np.can_cast(array.dtype, np.int64):
        raise InputError(f"tokens: must be a row of integers within int64, got {array.dtype} {list(array.shape)}")
    return array.astype("<i8", copy=False).tobytes()


def _blake2b(person: bytes, *parts: bytes | memoryview) -> bytes:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES, person=person)
    for part in parts:
        digest.update(part)
    return digest.digest()


def _int(value: int) -> bytes:
    return value.to_bytes(8, "little", signed=True)


def _text(value: str) -> bytes:
    return value.encode("utf-8", "surrogatepass")


def _check_type(name: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise InputError(f"{name}: must be {kind.__name__}, got {type(value).__name__}")


def _check_fields(name: str, value: Any) -> None:
    """Check the types of a dataclass's fields; of a tuple only that it is one."""
    for field in fields(value):
        kind = {"str": str, "int": int, "bytes": bytes}.get(str(field.type), tuple)
        _check_type(f"{name}.{field.name}", getattr(value, field.name), kind)
