"""Records of identities: readable notes in a store that say what its entries are of.

A key hides everything that it is derived from, so two engines that do not share entries cannot tell why. Each engine
therefore writes one record of its identity beside the entries: its fields by name, and a sample of the entries' keys.

    <RECORDS>/<id of the fields> -> {"fields": {"dtype": "torch.bfloat16", …}, "about": {…}, "sample": [keys], …}

- **They tell no secret.** Salts, tenants and adapters are not in them; an option that may hold a secret, and any long
  value, is a digest; of the secret that signs entries they hold the id, as every key does.
- **They decide nothing.** Whoever can write to the store can write any record, with or without a secret. So they are
  not signed, nothing is loaded or stored by them, and they are parsed as untrusted text, within limits.
- **They are no entries.** No tenant's id looks like `RECORDS`, and stores neither count nor evict what is under it.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby, islice
from operator import attrgetter
from typing import Any, Self, TypeVar

from cuvee.codec.errors import CorruptError
from cuvee.codec.layout import KVLayout, Rope
from cuvee.codec.support.plain_json import parse_json
from cuvee.integrations.stores.base import RECORDS, Store, StoreError, is_key
from cuvee.integrations.stores.redaction import redacted
from cuvee.naming.identity import Identity

MOST_RECORDS = 64
"""Identities that a store keeps records of; the oldest ones go first."""

SAMPLE = 128
"""Keys in a record: up to so many entries are counted exactly, more of them within a tenth, mostly."""

T = TypeVar("T")

_VERSION = 1
_MOST_BYTES = 64 << 10  # of a record
_MOST_FIELDS = 256
_MOST_TEXT = 160  # characters of a value
_MOST_READ = 4 * MOST_RECORDS  # records that are looked at; others have been planted
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,119}")
_OF_LAYOUTS = ("cache_dtype", "model_type", "layers", "max_positions")
_OF_LAYERS = ("kv_heads", "head_dim", "value_dim", "rope", "sliding_window")
_ACCEPTED = "accepted_secrets"
_MOST_ACCEPTED = 9  # ids that fit into a value
_EVERY = 1 << 64
# Names of options whose values may be secrets. Not `bos_token_id`, nor `num_tokens`.
_SECRET = re.compile(r"(^|[_.])(token|secret|passw(or)?d|credentials?|key|salt|auth)$", re.IGNORECASE)


class EntrySample:
    """The keys of those entries whose digests are lowest: a sample that tells how many entries there are.

    Digests are uniform, so of all entries, the share below a bound is the bound's share of all digests. While there
    is room, the bound is above all digests, and the sample is complete.

    Args:
        bound: every entry whose digest begins with a lower number is in the sample; at most 2 ** 64.
        keys: of entries.

    Example:
        >>> sample = EntrySample()
        >>> sample.add("ab/01" + 14 * "0"), sample.add("ab/02" + 14 * "0")
        (None, None)
        >>> sample.count(2), sample.exact
        (2, True)
    """

    def __init__(self, bound: int = _EVERY, keys: Iterable[str] = ()) -> None:
        self.bound = bound
        self.keys = {key for key in keys if rank(key) < bound}
        self._fit()

    @property
    def exact(self) -> bool:
        """Whether every entry is in it."""
        return self.bound == _EVERY

    def add(self, key: str) -> None:
        """Note an entry."""
        if rank(key) < self.bound:
            self.keys.add(key)
            self._fit()

    def merge(self, other: EntrySample) -> None:
        """Note the entries of another sample."""
        self.bound = min(self.bound, other.bound)
        self.keys = {key for key in self.keys | other.keys if rank(key) < self.bound}
        self._fit()

    def count(self, present: int) -> int:
        """Return about how many entries there are if so many of the sample are there."""
        return present if self.exact else round(present * _EVERY / max(self.bound, 1))

    def _fit(self) -> None:
        if len(self.keys) > SAMPLE:
            ordered = sorted(self.keys, key=rank)
            self.bound = rank(ordered[SAMPLE])
            self.keys = {key for key in ordered[:SAMPLE] if rank(key) < self.bound}


def rank(key: str) -> int:
    """Return the first 64 bits of the digest in a key."""
    return int(key.partition("/")[2][:16], 16)


@dataclass(slots=True)
class IdentityRecord:
    """What a store is told of an identity.

    Attributes:
        fields: what determines the identity, by name.
        about: what helps to recognize it, and does not determine it: the model's name and revision, its configuration.
        written: when the record was, in milliseconds since 1970.
        sample: of its entries.
    """

    fields: Mapping[str, str]
    about: Mapping[str, str] = field(default_factory=dict)
    written: int = 0
    sample: EntrySample = field(default_factory=EntrySample)

    @property
    def id(self) -> str:
        """32 hexadecimal digits: a digest of the fields."""
        text = json.dumps(dict(self.fields), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16, person=b"cuvee-record").hexdigest()

    @property
    def key(self) -> str:
        """The record's key in a store."""
        return f"{RECORDS}/{self.id}"

    def to_bytes(self) -> bytes:
        """Return the record as a store keeps it."""
        data = {
            "version": _VERSION, "fields": dict(self.fields), "about": dict(self.about), "written": self.written,
            "bound": self.sample.bound, "sample": sorted(self.sample.keys),
        }  # fmt: skip
        return json.dumps(data, sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, key: str, data: bytes) -> Self:
        """Read a record that anybody may have written.

        Raises:
            CorruptError: it is not one, exceeds a limit, or is another identity's.
        """
        name = key.partition("/")[2][:32]
        if len(data) > _MOST_BYTES:
            raise CorruptError(f"record {name}: must have at most {_MOST_BYTES} bytes, got {len(data)}")
        try:
            given = parse_json(data)
        except ValueError as error:
            raise CorruptError(f"record {name}: must be JSON, got what is not: {str(error)[:80]!r}") from None
        if not isinstance(given, dict) or given.get("version") != _VERSION:
            raise CorruptError(f"record {name}: must be of version {_VERSION}: upgrade cuvee, or delete the record")
        values: tuple[Any, Any, Any] = (given.get("written"), given.get("bound"), given.get("sample"))
        written, bound, keys = values
        sound = (
            all(_is_table(given.get(each)) for each in ("fields", "about"))
            and type(written) is int
            and 0 <= written < 1 << 50
            and type(bound) is int
            and 0 <= bound <= _EVERY
            and isinstance(keys, list)
            and len(keys) <= SAMPLE
            and all(isinstance(each, str) and _is_entry(each) for each in keys)
        )
        if not sound:
            raise CorruptError(f"record {name}: must hold fields, times and keys within their limits, got others")
        record = cls(given["fields"], given["about"], written, EntrySample(bound, keys))
        if record.id != name:
            raise CorruptError(f"record {name}: must be of these fields, got those of {record.id}")
        return record


def identity_fields(
    identity: Identity, layout: KVLayout | None, chunk_tokens: int, key_ids: Sequence[bytes] = (), *, engine: str
) -> dict[str, str]:
    """Return what determines the keys of an engine's entries besides tokens, tenant, adapter and images, by name.

    Args:
        identity: of the engine's blobs.
        layout: that the identity names; None of opaque pages, which have none.
        chunk_tokens: tokens per chunk.
        key_ids: of the secrets, that of the writing secret first; none without secrets.
        engine: names the engine and its way of naming chunks.
    """
    weights, dtype, options, live = _parts(identity.model)
    known: dict[str, Any] = {} if layout is None else {
        "cache_dtype": layout.dtype, "model_type": layout.model_type, "layers": len(layout.layers),
        "max_positions": layout.max_positions,
    }  # fmt: skip
    named = {
        "engine": engine, "weights": weights, "dtype": dtype, "weights_changed": live,
        "tokenizer": identity.tokenizer, "layout": identity.layout.hex(), **known, "profile": identity.profile.hex(),
        "quality": identity.quality, "tensor_parallel_size": identity.shards, "chunk_tokens": chunk_tokens,
        "secret": key_ids[0].hex() if key_ids else "",
    }  # fmt: skip
    fields = {name: shown_value(name, value) for name, value in named.items() if value not in ("", None)}
    options = dict(_flat("options", options))
    room = _MOST_FIELDS - len(fields) - 1
    fields |= dict(islice(options.items(), room))
    if len(options) > room:
        fields["options"] = _digest(sorted(options.items()))
    return fields


def about_model(name: str, revision: str | None, config: Mapping[str, Any], left_out: Iterable[str]) -> dict[str, str]:
    """Return what helps to recognize weights: the model's name without its folder, its revision and configuration."""
    named = {"model": name.rstrip("/").rpartition("/")[2] if name.startswith(("/", ".")) else name}
    named |= {"revision": revision} if revision else {}
    found = {each: shown_value(each, value) for each, value in named.items()}
    kept = {each: value for each, value in config.items() if each not in set(left_out) and value is not None}
    return dict(islice((found | dict(_flat("config", kept))).items(), _MOST_FIELDS - len(_OF_LAYERS) - 1))


def about_layout(layout: KVLayout | None) -> dict[str, str]:
    """Return what the layers keep, in their order: `4 x 12, 8 x 2` heads."""
    layers, found = () if layout is None else layout.layers, {}
    for name in _OF_LAYERS if layers else ():
        runs = ((_of_layer(value), len([*run])) for value, run in groupby(layers, attrgetter(name)))
        found[f"layout.{name}"] = shown_value(name, ", ".join(f"{value} x {count}" for value, count in runs))
    return found


def about_secrets(key_ids: Sequence[bytes]) -> dict[str, str]:
    """Return the ids of the accepted secrets, if there are several: an engine finds what any of them has signed."""
    return {_ACCEPTED: " ".join(key_id.hex() for key_id in key_ids[:_MOST_ACCEPTED])} if len(key_ids) > 1 else {}


def differences(mine: IdentityRecord, other: IdentityRecord) -> dict[str, tuple[str, str]]:
    """Return the fields in which two identities differ: both values, "" for none. A secret that `mine` accepts is no
    difference: without others, the entries are found.

    Where weights or layouts differ, what is known about the two models says more.
    """
    found = _unequal(mine.fields, other.fields)
    if other.fields.get("secret") in mine.about.get(_ACCEPTED, "").split():
        found.pop("secret", None)
    if {"weights", "layout"} & found.keys():
        about = _unequal(mine.about, other.about)  # records of earlier versions do not tell what layers keep
        about.pop(_ACCEPTED, None)
        found |= {name: pair for name, pair in about.items() if all(pair) or not name.startswith("layout.")}
    if any(name in _OF_LAYOUTS or name.startswith("layout.") for name in found):
        found.pop("layout", None)  # a digest of these
    return found


def shown_value(name: str, value: Any) -> str:
    """Return a value as a record shows it: short, printable, and a digest if it may be a secret."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
    if "://" in text:
        text = redacted(text)
    if _SECRET.search(name) and name != "secret":
        return _digest(text)
    return text if len(text) <= _MOST_TEXT and text.isprintable() else _digest(text)


class RecordStore:
    """The records in a store: those of its tiers that other processes see. A tier that fails leaves the others in use.

    Args:
        stores: of the entries, too.

    Raises (all methods):
        StoreError: every tier failed.
    """

    def __init__(self, *stores: Store) -> None:
        tiers = (tier for store in stores for tier in getattr(store, "tiers", (store,)))
        self._tiers: list[Store] = [tier for tier in tiers if tier.shared]

    @property
    def shared(self) -> bool:
        """Whether other processes may see records here."""
        return bool(self._tiers)

    def read(self) -> tuple[list[IdentityRecord], list[str]]:
        """Return the sound records, each once, and what is wrong with others or with a tier, in one line each."""
        records: dict[str, IdentityRecord] = {}
        problems: list[str] = []

        def of_tier(tier: Store) -> list[tuple[str, bytes | None]]:
            return [(key, tier.get(key)) for key in islice(tier.keys(RECORDS), _MOST_READ)]

        for key, data in chain.from_iterable(self._each(of_tier, problems)):
            if data is None:
                continue
            try:
                record = IdentityRecord.from_bytes(key, data)
            except CorruptError as error:
                problems.append(str(error))
                continue
            if (known := records.setdefault(key, record)) is not record:
                known.sample.merge(record.sample)
                known.written = max(known.written, record.written)
        return [*records.values()], problems

    def write(self, record: IdentityRecord, others: Sequence[IdentityRecord] = ()) -> None:
        """Write a record, and delete the oldest of the others if there are too many."""
        record.written = int(1000 * time.time())
        self._put(record)
        oldest = sorted((each for each in others if each.id != record.id), key=lambda each: each.written)
        for old in oldest[: max(len(oldest) + 1 - MOST_RECORDS, 0)]:
            self.delete(old)

    def delete(self, record: IdentityRecord) -> None:
        """Delete a record."""
        self._each(lambda tier: tier.delete(record.key))

    def count(self, record: IdentityRecord) -> int:
        """Return about how many entries of an identity there are now: exactly, up to `SAMPLE` of them."""
        return record.sample.count(len(self.present(record.sample.keys)))

    def present(self, keys: Iterable[str]) -> set[str]:
        """Return those of some entries' keys that the tiers have."""
        asked = sorted(keys)
        answers = self._each(lambda tier: tier.contains(asked)) if asked else []
        return {key for key, *there in zip(asked, *answers, strict=True) if any(there)}

    def prune(self) -> int:
        """Drop the keys of entries that are gone, and the records that have none left; return the number of these."""
        gone = 0
        for record in self.read()[0]:
            present = self.present(record.sample.keys)
            if not present:
                self.delete(record)
                gone += 1
            elif present != record.sample.keys:
                record.sample.keys = present
                self._put(record)
        return gone

    def _put(self, record: IdentityRecord) -> None:
        self._each(lambda tier: tier.put(record.key, record.to_bytes()))

    def _each(self, ask: Callable[[Store], T], problems: list[str] | None = None) -> list[T]:
        """Return what the tiers answer; of those that fail, note why."""
        answers: list[T] = []
        failed: list[StoreError] = []
        for tier in self._tiers:
            try:
                answers.append(ask(tier))
            except StoreError as error:
                failed.append(error)
        if failed and not answers:
            raise failed[0]
        if problems is not None:
            problems += map(str, failed)
        return answers


def _parts(model: str) -> tuple[str, str, Mapping[str, Any], str]:
    """Return weights, dtype and options of `name_of_weights`, and what follows it once an engine has changed them."""
    try:
        data, end = json.JSONDecoder().raw_decode(model)
        return data["weights"], data["dtype"], data["options"], model[end:].strip()
    except (ValueError, KeyError, TypeError):
        return model, "", {}, ""


def _flat(prefix: str, value: Any) -> Iterable[tuple[str, str]]:
    """Yield nested entries by their names, joined by dots."""
    for name, inner in sorted(value.items()):
        at = f"{prefix}.{name}"
        if not _NAME.fullmatch(at):
            at = f"{prefix}.{_digest(name)}"
        if isinstance(inner, Mapping) and inner:
            yield from _flat(at, inner)
        else:
            yield at, shown_value(at, inner)


def _of_layer(value: Any) -> str:
    return f"{value.rotary_dim} dims {_digest(value.to_dict())}" if isinstance(value, Rope) else str(value).lower()


def _digest(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
    return "digest-" + hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()


def _unequal(mine: Mapping[str, str], other: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    names = dict.fromkeys((*mine, *other))
    return {name: (mine.get(name, ""), other.get(name, "")) for name in names if mine.get(name) != other.get(name)}


def _is_table(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and len(value) <= _MOST_FIELDS
        and all(_NAME.fullmatch(name) for name in value)
        and all(isinstance(text, str) and len(text) <= _MOST_TEXT and text.isprintable() for text in value.values())
    )


def _is_entry(key: str) -> bool:
    return is_key(key) and len(key.partition("/")[2]) >= 16 and not key.startswith(f"{RECORDS}/")
