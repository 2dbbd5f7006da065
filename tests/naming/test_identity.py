"""Keys: golden values, every field counts, nothing is ambiguous, chains are incremental."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cuvee.codec.errors import InputError
from cuvee.naming.identity import Identity, Media, PageNames, PrefixChain, Scope, content_digest, store_key, tenant_id

LOSSY = Identity("llama-7b", "spm", b"layout-16-bytes!", b"profile-16-bytes", "step:-64", 2)
SCOPE = Scope("acme", "sql-lora", (Media(3, 6, "image-1"),))


def chain(tokens: Any, chunks: int, identity: Identity = LOSSY, scope: Scope = SCOPE, size: int = 4) -> list[bytes]:
    return PrefixChain(identity, scope, size).digests(tokens, chunks)


def tails(
    tokens: Any, chunks: int, sizes: list[int], identity: Identity = LOSSY, scope: Scope = SCOPE, size: int = 4
) -> list[bytes]:
    whole = PrefixChain(identity, scope, size)
    whole.digests(tokens, chunks)
    return whole.tails(tokens, chunks, sizes)


# The bytes of a key are a persistent format: whoever has to change a value below orphans every stored entry, raises
# identity.VERSION and says so in the changelog.
GOLDEN_PREFIX = [
    "27960fc446471b07e874b0b361b2660abda9e8a8709b37d7ae4c121e740ce56d",
    "24033403f2b6d780e3817662b7292592a93a265485e022c320d3daea5193718b",
]
GOLDEN_TAILS = [
    "b8acf5ac23654b3e6526ae5e3f1d0b64e8ac6aabf1398046d07aa817f0627430",
    "352ce4e1130d246962faedaa57205b664b92181e2f6b4c896ab78cc31c336375",
]
GOLDEN_CONTENT = "162dfe769b7a5689f5ab118ac98d453ee4f78e1c9f3a849bbddc075565abcaeb"
GOLDEN_CONTEXT = "7833e2d8b930a53c6281bbb82749f214e6f4ef6840851acd490bfea70b7edf20"


def test_golden_values() -> None:
    assert [digest.hex() for digest in chain(range(100, 108), 2)] == GOLDEN_PREFIX
    assert [digest.hex() for digest in tails(range(100, 108), 1, [1, 3])] == GOLDEN_TAILS
    assert content_digest(LOSSY, SCOPE, range(100, 108)).hex() == GOLDEN_CONTENT
    assert content_digest(LOSSY, SCOPE, range(100, 108), context=b"").hex() == GOLDEN_CONTENT
    assert content_digest(LOSSY, SCOPE, range(100, 108), context=b"contexts").hex() == GOLDEN_CONTEXT
    assert tenant_id("") == "399a81219c4b118d05336784dfd82aa0"
    assert tenant_id("acme") == "fde3980a662832b5d524682ec0731094"
    assert tenant_id("é\ud800") == "248adbffceef042c1f78904d9910acc5"
    assert store_key("acme", bytes(range(32)), 258) == f"{tenant_id('acme')}/{bytes(range(32)).hex()}0102"
    tagged = f"{tenant_id('acme')}/{bytes(range(32)).hex()}0102a0a1a2a3a4a5a6a7"
    assert store_key("acme", bytes(range(32)), 258, bytes(range(0xA0, 0xA8))) == tagged


def test_a_store_key_is_one() -> None:
    from cuvee.integrations.stores.base import check_key

    tenant, name = check_key(store_key("acme", chain(range(4), 1)[0], 3))
    assert tenant == tenant_id("acme") and len(tenant) == 32 and len(name) == 68
    tagged = store_key("acme", chain(range(4), 1)[0], 3, bytes(8))
    assert check_key(tagged) == (tenant, name + "0" * 16)


CHANGES: list[tuple[Identity, Scope]] = [
    (replace(LOSSY, **change), SCOPE)
    for change in (
        {"model": "llama-7c"}, {"tokenizer": ""}, {"layout": b"layout-16-bytes?"}, {"profile": b"profile-16-byteS"},
        {"quality": "step:64"}, {"quality": "step:-64,parts:2"}, {"shards": 1}, {"quality": "lossless", "profile": b""},
    )
]  # fmt: skip
CHANGES += [(LOSSY, replace(SCOPE, tenant=tenant)) for tenant in ("", "acmE")]
CHANGES += [(LOSSY, replace(SCOPE, adapter=adapter)) for adapter in ("", "acme")]


@pytest.mark.parametrize(("identity", "scope"), CHANGES)
def test_every_field_of_identity_and_scope_changes_every_key(identity: Identity, scope: Scope) -> None:
    assert set(chain(range(8), 2)).isdisjoint(chain(range(8), 2, identity=identity, scope=scope))
    assert content_digest(LOSSY, SCOPE, range(8)) != content_digest(identity, scope, range(8))
    assert pages().page(b"name") != pages(identity, scope).page(b"name")


@pytest.mark.parametrize(
    "other",
    [
        (),
        (Media(3, 6, "image-2"),),
        (Media(3, 7, "image-1"),),
        (Media(3, 5, "image-1"), Media(5, 6, "image-1")),
    ],
    ids=str,
)
def test_media_change_the_keys_of_the_chunks_they_touch(other: tuple[Media, ...]) -> None:
    scope = replace(SCOPE, media=other)
    assert set(chain(range(8), 2)).isdisjoint(chain(range(8), 2, scope=scope))
    for run in (range(4), range(8)):
        assert content_digest(LOSSY, SCOPE, run) != content_digest(LOSSY, scope, run)


def test_the_chunk_size_changes_every_key() -> None:
    assert set(chain(range(16), 4)).isdisjoint(chain(range(16), 2, size=8))
    # ... of the first chunk too, though that is all it depends on
    assert chain(range(4), 1, scope=Scope())[0] not in chain(range(8), 1, scope=Scope(), size=8)


names = st.text(alphabet="ab", max_size=3)
media = st.builds(
    lambda start, length, name: Media(start, start + length, name),
    st.integers(0, 6),
    st.integers(1, 4),
    st.text(alphabet="ab", min_size=1, max_size=2),
)
identities = st.builds(
    lambda model, tokenizer, layout, profile, step, shards: Identity(
        model, tokenizer, layout, profile, f"step:{step}" if profile else "lossless", shards
    ),
    st.text(alphabet="ab", min_size=1, max_size=3),
    names,
    st.binary(min_size=1, max_size=2),
    st.binary(max_size=2),
    st.integers(-9, 9),
    st.integers(1, 3),
)
scopes = st.builds(lambda t, a, m: Scope(t, a, tuple(sorted(m))), names, names, st.lists(media, max_size=3))
inputs = st.tuples(identities, scopes, st.lists(st.integers(-2, 2), min_size=4, max_size=8))


@settings(max_examples=300, deadline=None)
@given(inputs, inputs)
def test_other_inputs_other_digests(one: Any, other: Any) -> None:
    def seen(scope: Scope, length: int) -> Scope:
        return replace(scope, media=tuple(item for item in scope.media if item.start < length))

    (identity, scope, tokens), (identity2, scope2, tokens2) = one, other
    same = (identity, seen(scope, len(tokens)), tokens) == (identity2, seen(scope2, len(tokens2)), tokens2)
    assert (content_digest(*one) == content_digest(*other)) == same
    same = (identity, seen(scope, 4), tokens[:4]) == (identity2, seen(scope2, 4), tokens2[:4])
    assert (chain(tokens, 1, identity, scope) == chain(tokens2, 1, identity2, scope2)) == same


@settings(max_examples=200, deadline=None)
@given(inputs, st.binary(max_size=3), inputs, st.binary(max_size=3))
def test_other_contexts_other_digests(one: Any, context: bytes, other: Any, context2: bytes) -> None:
    same = content_digest(*one) == content_digest(*other) and context == context2
    assert (content_digest(*one, context=context) == content_digest(*other, context=context2)) == same
    assert (content_digest(*one, context=context) == content_digest(*one, context=context2)) == (context == context2)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=6), st.integers(0, 3))
def test_a_chain_grows_to_the_same_digests(steps: list[int], more: int) -> None:
    tokens, scope = list(range(28)), Scope(media=(Media(3, 9, "a"), Media(14, 15, "b")))
    whole = chain(tokens, 7, scope=scope)
    growing = PrefixChain(LOSSY, scope, 4)
    for chunks in steps:
        assert growing.digests(tokens[: 4 * chunks + more], chunks) == whole[:chunks]


@pytest.mark.parametrize(
    ("chunks", "sizes", "message"),
    [
        (2, [1], "chunks: must be 0 … 1, the chunks hashed so far, got 2"),
        (-1, [1], "chunks: must be 0 … 1"),
        (0, [4], "sizes: must be 1 … 3, got 4"),
        (0, [2, 0], "sizes: must be 1 … 3, got 0"),
        (1, [3], "sizes: must be 1 … 2, got 3"),
    ],
)
def test_tails_that_cannot_be(chunks: int, sizes: list[int], message: str) -> None:
    whole = PrefixChain(LOSSY, SCOPE, 4)
    whole.digests(range(6), 1)
    with pytest.raises(InputError, match=message):
        whole.tails(range(6), chunks, sizes)


def test_only_new_chunks_are_looked_at() -> None:
    class Watched(list[int]):
        seen: list[slice]

        def __getitem__(self, index: Any) -> Any:
            self.seen.append(index)
            return super().__getitem__(index)

        def __iter__(self) -> Any:
            raise AssertionError("read as a whole")

    tokens = Watched(range(20))
    tokens.seen = []
    growing = PrefixChain(LOSSY, SCOPE, 4)
    growing.digests(tokens, 2)
    growing.digests(tokens, 2)
    growing.digests(tokens, 1)
    growing.digests(tokens, 4)
    growing.digests(tokens, 0)
    assert tokens.seen == [slice(0, 8), slice(8, 16)]


@pytest.mark.parametrize(
    "make",
    [
        tuple,
        lambda x: np.array(x, dtype=np.uint16),
        lambda x: np.array(x, dtype=">i8"),
        lambda x: torch.tensor(x, dtype=torch.int32),
        lambda x: np.repeat(x, 2)[::2],
    ],
)
def test_any_row_of_integers_will_do(make: Any) -> None:
    tokens = [5, 60000, 7, 8]
    assert chain(make(tokens), 1) == chain(tokens, 1)
    assert content_digest(LOSSY, SCOPE, make(tokens)) == content_digest(LOSSY, SCOPE, tokens)


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, 3, 4.5],
        [1, 2, 3, 2**63],
        np.array([1, 2, 3, 4], dtype=np.uint64),
        [True, False, True, False],
        [[1], [2], [3], [4]],
        b"abcd",
        [1, 2, 3, None],
    ],
    ids=str,
)
def test_what_is_no_row_of_integers_is_refused(tokens: Any) -> None:
    with pytest.raises(InputError, match=r"^tokens: must be a row of integers"):
        chain(tokens, 1)
    with pytest.raises(InputError, match=r"^tokens: must be a row of integers"):
        content_digest(LOSSY, SCOPE, tokens)


@pytest.mark.parametrize("chunks", [-1, 3])
def test_chunks_must_be_full(chunks: int) -> None:
    growing = PrefixChain(LOSSY, SCOPE, 4)
    with pytest.raises(InputError, match=r"^chunks: must be 0 … 2, the full chunks of 4 tokens"):
        growing.digests(range(11), chunks)
    growing.digests(range(12), 3)
    with pytest.raises(InputError, match=r"^chunks: "):  # the caller's sequence shrank
        growing.digests(range(11), 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": ""}, "identity.model, identity.layout: must"),
        ({"model": b"x"}, "identity.model: must be str, got bytes"),
        ({"tokenizer": None}, "identity.tokenizer: must be str"),
        ({"layout": "x"}, "identity.layout: must be bytes"),
        ({"profile": "x"}, "identity.profile: must be bytes"),
        ({"quality": 3}, "identity.quality: must be str"),
        ({"quality": "balanced"}, "identity.quality: must be 'lossless' or"),
        ({"quality": "step:"}, "identity.quality: "),
        ({"quality": "step:01"}, "identity.quality: "),
        ({"quality": "step:-0"}, "identity.quality: "),
        ({"quality": "step:٣"}, "identity.quality: "),
        ({"quality": "step:5,parts:1"}, "identity.quality: "),
        ({"quality": "step:5,parts:4"}, "identity.quality: "),
        ({"quality": "step:5,parts:03"}, "identity.quality: "),
        ({"quality": "step:5,parts:3,plain:4"}, "identity.quality: "),
        ({"quality": "lossless,parts:3"}, "identity.quality: "),
        ({"quality": "step:5,plain:5"}, "identity.quality: "),
        ({"quality": "step:5,plain:4,plain:3"}, "identity.quality: "),
        ({"quality": "lossless,plain:4"}, "identity.quality: "),
        ({"quality": "lossless"}, "identity.profile: must be empty for lossless"),
        ({"profile": b""}, "identity.profile: must be Profile.id"),
        ({"shards": 0}, "identity.shards: must be 1 … 65536, got 0"),
        ({"shards": 65537}, "identity.shards: "),
        ({"shards": True}, "identity.shards: must be int, got bool"),
    ],
    ids=str,
)
def test_an_identity_is_checked(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        replace(LOSSY, **change)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Media(2, 2, "a"), "media.start, media.end: "),
        (lambda: Media(0, 2, ""), "media.id: "),
        (lambda: Media(0, 2.0, "a"), "media.end: must be int"),  # type: ignore[arg-type]
        (lambda: Scope(adapter=3), "scope.adapter: must be str"),  # type: ignore[arg-type]
        (lambda: Scope(media=[Media(0, 1, "a")]), "scope.media: must be tuple"),  # type: ignore[arg-type]
        (lambda: Scope(media=((0, 1, "a"),)), "scope.media.*must be Media"),  # type: ignore[arg-type]
        (lambda: PrefixChain(LOSSY, SCOPE, 0), "chunk_tokens: must be at least 1"),
        (lambda: PrefixChain(LOSSY, SCOPE, 4.0), "chunk_tokens: must be int"),  # type: ignore[arg-type]
        (lambda: content_digest(LOSSY, SCOPE, []), "tokens: must hold at least one token"),
        (lambda: content_digest(LOSSY, SCOPE, [1], context="a"), "context: must be bytes"),  # type: ignore[arg-type]
        (lambda: tenant_id(None), "tenant: must be str"),  # type: ignore[arg-type]
        (lambda: store_key("a", bytes(16)), "digest: must be 32 bytes, got 16"),
        (lambda: store_key("a", "00" * 32), "digest: must be bytes"),  # type: ignore[arg-type]
        (lambda: store_key("a", bytes(32), -1), "shard: must be 0 … 65535, got -1"),
        (lambda: store_key("a", bytes(32), 0, bytes(7)), "key_id: must be 8 bytes or none, got 7"),
        (lambda: store_key("a", bytes(32), 0, "00" * 8), "key_id: must be bytes"),  # type: ignore[arg-type]
    ],
)
def test_bad_arguments_are_named(call: Any, message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        call()


def pages(identity: Identity = LOSSY, scope: Scope = SCOPE, engine: str = "engine", size: int = 64) -> PageNames:
    return PageNames(identity, scope, engine, size)


def test_golden_values_of_pages() -> None:
    """Stores outlive processes: a change of these values orphans every stored page."""
    names = pages()
    assert names.page(b"one").hex() == "14ea17a4723c0365129b4385d189ae9f0b9e90d966a09ac98d92acb8ffcef526"


@pytest.mark.parametrize("other", [pages(engine="engine2"), pages(size=65)])
def test_engine_and_size_change_the_names_of_pages(other: PageNames) -> None:
    assert pages().page(b"name") != other.page(b"name")


def test_pages_need_an_engine_tokens_and_names() -> None:
    for wrong, message in (({"engine": ""}, "engine: must name"), ({"size": 0}, "page_tokens: must be at least 1")):
        with pytest.raises(InputError, match=message):
            pages(**wrong)
    for name in (b"", "text", None):
        with pytest.raises(InputError, match="name: must be"):
            pages().page(name)  # type: ignore[arg-type]
