"""Profiles fitted to a store's lossless entries: which entries count, by how many ranks, under which secrets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.errors import InputError, ProfileError
from cuvee.codec.layout import KVLayout, LayerLayout, Rope
from cuvee.codec.models.fingerprint import PREFIX
from cuvee.codec.profiles.profile import Profile
from cuvee.integrations.profiles.store_learning import fit_from_store
from cuvee.integrations.stores import Store, StoreError, open_store
from cuvee.naming.identity import store_key

LAYOUT = KVLayout("synthetic", (LayerLayout(2, 8, 8, Rope((1.0, 0.3, 0.1, 0.01))),) * 3, "bfloat16", 4096)
TOKENS, ENTRIES = 64, 16
SECRET, OTHER = b"0123456789abcdef", b"fedcba9876543210"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(f"file://{tmp_path}/kv", guarded=False)
    yield opened
    opened.close()


def chunks(count: int = ENTRIES, layout: KVLayout = LAYOUT) -> list[KVChunk]:
    """Values of a few common directions, at various positions."""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(4, layout.values_per_token, generator=generator)
    made = []
    for at in range(count):
        rows = torch.randn(TOKENS, 4, generator=generator) @ mixed
        rows += torch.randn(rows.shape, generator=generator) / 8
        keys, values = rows.view(TOKENS, 3, 2, 2, 8).permute(2, 1, 0, 3, 4).to(layout.torch_dtype)
        made.append(KVChunk(keys, values, layout, start=TOKENS * (at + 1)))
    return made


def rank_of(chunk: KVChunk, rank: int, ranks: int) -> KVChunk:
    heads = [list(own) for own in chunk.layout.shard_heads(rank, ranks)]

    def own(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor[:, kept] for tensor, kept in zip(tensors, heads, strict=True)]

    return KVChunk(own(chunk.keys), own(chunk.values), chunk.layout.shard(rank, ranks), start=chunk.start)


def fill(store: Store, given: Sequence[KVChunk], ranks: int = 1, tenant: str = "", key: bytes | None = None) -> None:
    for at, chunk in enumerate(given):
        for rank in range(ranks):
            own, digest = rank_of(chunk, rank, ranks), bytes([at]) * 32
            codec = Codec(Profile.unlearned(own.layout), "lossless", key=key)
            bound = store_key(tenant, digest, rank).encode() if key else b""
            key_id = codec.key_ids[0] if key else b""
            store.put(store_key(tenant, digest, rank, key_id), codec.encode(own, associated_data=bound))


def bits(profile: Profile) -> float:
    codec = Codec(profile, step=0.5)
    given = chunks()
    return 8 * sum(len(codec.encode(chunk)) for chunk in given) / (len(given) * TOKENS * LAYOUT.values_per_token)


def test_it_learns_the_directions_of_what_is_stored(store: Store) -> None:
    fill(store, chunks())
    profile = fit_from_store(store, replace(LAYOUT, dtype="float32"), model=lambda: PREFIX + "a1" * 16)
    assert (profile.source, profile.group, profile.model) == ("fitted", "layer", PREFIX + "a1" * 16)
    assert profile.text_tokens == (ENTRIES - 2) * TOKENS, "every eighth entry is held out for the curve"
    assert profile.curve and bits(profile) < 4, "4 directions of 96 values take little more than their own bits"


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_heads_of_all_ranks_are_put_together(store: Store, tmp_path: Path, ranks: int) -> None:
    """Four ranks share two heads. The profile is that of the whole chunks, and every rank can use its part of it."""
    fill(store, chunks(), ranks)
    store.delete(store_key("", bytes([3]) * 32, ranks - 1))  # evicted: the other ranks' parts say too little
    profile = fit_from_store(store, LAYOUT, ranks=ranks)
    assert profile.group == "heads:1" and profile.shard(ranks - 1, ranks).learned
    whole = open_store(f"file://{tmp_path}/whole", guarded=False)
    fill(whole, chunks())
    whole.delete(store_key("", bytes([3]) * 32))
    expected = fit_from_store(whole, LAYOUT, group="heads:1")
    assert profile.text_tokens == expected.text_tokens and bits(profile) == pytest.approx(bits(expected), rel=0.02)
    whole.close()


def test_entries_that_cannot_be_learned_from_are_passed_over(store: Store) -> None:
    fill(store, chunks())
    expected = fit_from_store(store, LAYOUT).text_tokens
    lossy = Codec(fit_from_store(store, LAYOUT), step=0.1)
    other = replace(LAYOUT, max_positions=7777)
    foreign = KVChunk(chunks(1)[0].keys, chunks(1)[0].values, other)
    good = Codec(Profile.unlearned(LAYOUT), "lossless").encode(chunks(1)[0])
    for at, blob in enumerate(
        (
            lossy.encode(chunks(1)[0]), Codec(Profile.unlearned(other), "lossless").encode(foreign), b"cuvR" + good,
            good[:-1], good[:-9] + bytes(9), b"",
        )
    ):  # fmt: skip
        store.put(store_key("", bytes([100 + at]) * 32), blob)
    store.put(f"{store_key('', bytes(32)).partition('/')[0]}/ab", good)  # a key of somebody else
    fill(store, chunks(3), tenant="somebody")
    assert fit_from_store(store, LAYOUT).text_tokens == expected


def test_the_tenant_and_the_secret_decide(store: Store) -> None:
    fill(store, chunks(), key=SECRET)
    fill(store, chunks(12), tenant="somebody", key=SECRET)
    assert fit_from_store(store, LAYOUT, secrets=[OTHER, SECRET]).text_tokens == (ENTRIES - 2) * TOKENS
    assert fit_from_store(store, LAYOUT, tenant="somebody", secrets=[SECRET]).text_tokens == 11 * TOKENS
    with pytest.raises(InputError, match=r"store: must hold lossless entries .* without a secret, got none"):
        fit_from_store(store, LAYOUT)
    with pytest.raises(InputError, match="signed with the given secret, got none"):
        fit_from_store(store, LAYOUT, secrets=[OTHER])
    with pytest.raises(InputError, match="tensor_parallel_size=2"):
        fit_from_store(store, LAYOUT, ranks=2, secrets=[SECRET])


def test_it_reads_no_more_than_it_needs(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store, chunks())
    read: list[str] = []
    get_many = store.get_many

    def counted(keys: Sequence[str]) -> list[bytes | None]:
        read.extend(keys)
        return get_many(keys)

    monkeypatch.setattr(store, "get_many", counted)
    profile = fit_from_store(store, LAYOUT, group="head", tokens=200)
    assert len(read) == 4 and profile.text_tokens == 4 * TOKENS
    for at in range(5, ENTRIES):
        store.delete(store_key("", bytes([at]) * 32))
    with pytest.raises(ProfileError, match="group: 'all' spans 96 values and must have at least 384"):
        fit_from_store(store, LAYOUT, group="all")


def test_a_store_that_cannot_list_its_keys_says_so(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "keys", lambda tenant: Store.keys(store, tenant))
    with pytest.raises(StoreError, match="disk store: cannot list its keys"):
        fit_from_store(store, LAYOUT)
