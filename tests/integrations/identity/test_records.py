"""Records of identities: what they say and hide, how they count, and what becomes of hostile ones."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from cuvee.codec.errors import CorruptError
from cuvee.codec.layout import KVLayout, LayerLayout, Rope
from cuvee.integrations.identity.checkpoint import name_of_weights
from cuvee.integrations.identity.records import (
    SAMPLE,
    EntrySample,
    IdentityRecord,
    about_layout,
    about_model,
    about_secrets,
    differences,
    identity_fields,
    shown_value,
)
from cuvee.integrations.stores.base import RECORDS
from cuvee.naming.identity import Identity, store_key

LAYOUT = KVLayout("llama", (LayerLayout(2, 16, 16, None),) * 3, "bfloat16", 4096)
WIDER = replace(LAYOUT, dtype="float32")
OPTIONS = {"hf_overrides": {"rope_scaling": {"factor": 2.0}}, "quantization": "fp8"}


def named(layout: KVLayout = LAYOUT, **changes: Any) -> Identity:
    weights: dict[str, Any] = {"weights": "aa", "dtype": torch.bfloat16, "options": OPTIONS}
    weights |= {name: changes.pop(name) for name in [*changes] if name in weights}
    identity = Identity(name_of_weights(**weights), "tt", layout.fingerprint, b"", "lossless")
    return replace(identity, **changes)


def record(layout: KVLayout = LAYOUT, chunk: int = 256, keys: tuple[bytes, ...] = (), **changes: Any) -> IdentityRecord:
    return IdentityRecord(identity_fields(named(layout, **changes), layout, chunk, keys, engine="vllm"))


def key(number: int, tenant: str = "somebody") -> str:
    return store_key(tenant, hashlib.sha256(number.to_bytes(8)).digest())


@pytest.mark.parametrize(
    ("other", "fields"),
    [
        (record(weights="bb"), {"weights": ("aa", "bb")}),
        (record(dtype=torch.float16), {"dtype": ("torch.bfloat16", "torch.float16")}),
        (record(tokenizer="uu"), {"tokenizer": ("tt", "uu")}),
        (record(WIDER), {"cache_dtype": ("bfloat16", "float32")}),
        (record(replace(LAYOUT, layers=LAYOUT.layers[:2])), {"layers": ("3", "2")}),
        (record(replace(LAYOUT, max_positions=None)), {"max_positions": ("4096", "")}),
        (record(replace(LAYOUT, model_type="qwen")), {"model_type": ("llama", "qwen")}),
        (record(profile=b"p", quality="step:7"), {"profile": ("", "70"), "quality": ("lossless", "step:7")}),
        (record(shards=2), {"tensor_parallel_size": ("1", "2")}),
        (record(chunk=128), {"chunk_tokens": ("256", "128")}),
        (record(keys=(bytes(8),)), {"secret": ("", "0" * 16)}),
        (record(options={"quantization": "fp8"}), {"options.hf_overrides.rope_scaling.factor": ("2.0", "")}),
        (record(options=OPTIONS | {"quantization": "awq"}), {"options.quantization": ("fp8", "awq")}),
        (record(options=OPTIONS | {"environment": {"VLLM_X": "12"}}), {"options.environment.VLLM_X": ("", "12")}),
        (record(model=f"{named().model} live 99"), {"weights_changed": ("", "live 99")}),
    ],
)  # fmt: skip
def test_every_kind_of_difference_is_named(other: IdentityRecord, fields: dict[str, Any]) -> None:
    assert differences(record(), other) == fields
    assert other.id != record().id


def test_every_field_of_an_identity_is_in_a_record() -> None:
    """A field that is added to `Identity` must be named, or two identities would look alike."""
    changes = {"model": "m", "tokenizer": "t", "layout": b"l", "profile": b"p", "quality": "step:1", "shards": 3}
    assert set(changes) == set(Identity.__dataclass_fields__)
    changes |= {"profile": {"profile": b"p", "quality": "step:1"}, "quality": {"profile": b"", "quality": "lossless"}}
    base = named(profile=b"q", quality="step:1")
    for name, value in changes.items():
        other = replace(base, **(value if isinstance(value, dict) else {name: value}))
        fields = [identity_fields(each, LAYOUT, 256, engine="vllm") for each in (other, base)]
        assert fields[0] != fields[1], name


def test_weights_that_differ_are_explained_by_the_two_models() -> None:
    config = {"rope_parameters": {"rope_theta": 1e4}, "hidden_size": 64, "_commit_hash": "x", "vocab_size": None}
    mine, other = record(), record(weights="bb")
    mine.about = about_model("/models/llama", None, config, {"_commit_hash"})
    other.about = about_model("org/llama", "r2", config | {"rope_parameters": {"rope_theta": 5e5}}, {"_commit_hash"})
    assert differences(mine, other) == {
        "weights": ("aa", "bb"), "model": ("llama", "org/llama"), "revision": ("", "r2"),
        "config.rope_parameters.rope_theta": ("10000.0", "500000.0"),
    }  # fmt: skip
    assert not differences(mine, replace(mine, about=other.about))  # the same content under another name


def test_a_secret_that_is_accepted_makes_no_difference() -> None:
    new, old, strange = (bytes([number]) * 8 for number in range(3))
    mine, other = record(keys=(new, old)), record(keys=(old,))
    assert set(differences(mine, other)) == {"secret"}, "records of older versions"
    mine.about = about_secrets((new, old))
    mine = IdentityRecord.from_bytes(mine.key, mine.to_bytes())
    assert not differences(mine, other)
    assert set(differences(mine, record(keys=(old,), weights="bb"))) == {"weights"}
    assert all(set(differences(mine, record(keys=keys))) == {"secret"} for keys in ((strange,), ()))
    assert set(differences(other, mine)) == {"secret"}, "which it does not accept"
    assert about_secrets((new,)) == {} and len(about_secrets([new] * 99)["accepted_secrets"]) <= 160


def test_layouts_that_differ_are_explained_by_their_layers() -> None:
    layers = LAYOUT.layers
    wide = replace(LAYOUT, layers=(*layers[:2], replace(layers[2], kv_heads=4, rope=Rope((1.0, 0.5)))))
    mine, other = record(), record(wide)
    assert set(differences(mine, other)) == {"layout"}, "records of older versions"
    mine.about = about_layout(LAYOUT)
    assert set(differences(mine, other)) == {"layout"}, "one of them"
    other.about = about_layout(wide)
    found = differences(mine, IdentityRecord.from_bytes(other.key, other.to_bytes()))
    assert found.pop("layout.rope")[0] == "none x 3"
    assert found == {"layout.kv_heads": ("2 x 3", "2 x 2, 4 x 1")}
    other.about = about_layout(LAYOUT)  # the same layers, of states that are not in it
    assert set(differences(mine, other)) == {"layout"}


def test_no_secret_is_written() -> None:
    secret = "hunter2-hunter2"
    options = {
        "hf_token": secret, "loader": {"api_key": secret, "url": f"s3://user:{secret}@host/x?sig={secret}"},
        "password": secret, "long": 300 * secret, "lines": f"{secret}\n", "num_tokens": 7, "bos_token_id": 1,
    }  # fmt: skip
    made = record(options=options)
    text = made.to_bytes().decode()
    assert secret not in text
    assert made.fields["options.num_tokens"] == "7" and made.fields["options.bos_token_id"] == "1"
    assert made.fields["options.hf_token"].startswith("digest-") and made.id != record(options={}).id
    assert IdentityRecord.from_bytes(made.key, made.to_bytes()).to_bytes() == made.to_bytes()
    assert shown_value("model", "x" * 161).startswith("digest-")


def test_a_record_with_many_options_stays_within_its_limits_and_apart() -> None:
    options = {f"option{number}": number for number in range(1000)}
    one, other = record(options=options), record(options=options | {"option999": 1})
    assert one.id != other.id and set(differences(one, other)) == {"options"}
    assert IdentityRecord.from_bytes(one.key, one.to_bytes()).id == one.id


def _broken(**changes: Any) -> bytes:
    return json.dumps(json.loads(record().to_bytes()) | changes).encode()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "must be JSON"), (b"\xff\xfe", "must be JSON"), (b"[" * 5000, "must be JSON"), (b"[]", "of version 1"),
        (b"9" * 10_000, "must be JSON"), (b" " * 70_000, "at most 65536 bytes"), (_broken(version=2), "of version 1"),
        (_broken(fields={"dtype": "evil"}), "of these fields"), (_broken(fields={"a\nb": "x"}), "within their limits"),
        (_broken(fields={"a": "\x1b[31m"}), "within their limits"), (_broken(fields={"a": 1}), "within their limits"),
        (_broken(fields={"a": "x" * 161}), "within their limits"), (_broken(about=[]), "within their limits"),
        (_broken(about={f"a{n}": "" for n in range(257)}), "within their limits"),
        (_broken(written=-1), "within their limits"), (_broken(written=True), "within their limits"),
        (_broken(bound=1.5), "within their limits"), (_broken(bound=1 << 65), "within their limits"),
        (_broken(sample=["../../etc"]), "within their limits"), (_broken(sample=["ab/01"]), "within their limits"),
        (_broken(sample=[f"{RECORDS}/{'0' * 64}"]), "within their limits"),
        (_broken(sample=[7]), "within their limits"),
        (_broken(sample=[key(n) for n in range(SAMPLE + 1)]), "within their limits"),
    ],
)  # fmt: skip
def test_a_hostile_record_is_refused_in_one_line(data: bytes, message: str) -> None:
    with pytest.raises(CorruptError) as caught:
        IdentityRecord.from_bytes(record().key, data)
    assert message in str(caught.value) and str(caught.value).isprintable() and len(str(caught.value)) < 250


def test_a_sample_counts_few_entries_exactly_and_many_nearly() -> None:
    for number, off in ((0, 0), (1, 0), (SAMPLE, 0), (20_000, 0.3)):
        sample = EntrySample()
        for each in range(number):
            sample.add(key(each))
            sample.add(key(each))
        assert sample.exact is (number <= SAMPLE) and len(sample.keys) <= SAMPLE
        assert abs(sample.count(len(sample.keys)) - number) <= off * number
    halves = EntrySample(), EntrySample()
    for each in range(20_000):
        halves[each % 2].add(key(each))
    halves[0].merge(halves[1])
    assert halves[0].keys == sample.keys and halves[0].bound >= sample.bound > 0
