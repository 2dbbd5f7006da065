"""Chunks by content: what is computed and under which key it is kept, bad entries, failing stores, threads."""

from __future__ import annotations

import hashlib
import logging
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import tiny_model
from tests.predicting import predicting
from tests.waiting import PATIENCE
from transformers import DynamicCache

from cuvee.blend import chunk_cache as module
from cuvee.blend.blender import Blender
from cuvee.blend.chunk_cache import ChunkCache, ChunkCounters, ChunkStore
from cuvee.blend.segments import Segment
from cuvee.blend.selectors import Nothing
from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.errors import CorruptError, CuveeError, InputError, ProfileMismatchError
from cuvee.codec.layout import KVLayout
from cuvee.codec.models.fingerprint import PREFIX, function_digest, model_fingerprint
from cuvee.codec.models.forward import cache_argument, prefill
from cuvee.codec.profiles.profile import Profile
from cuvee.integrations.stores.base import StoreError
from cuvee.learning.calibrate import fit
from cuvee.naming.identity import Identity, Scope, content_digest, store_key

TOKENS = [7, 3, 60, 0, 22, 3, 41, 18, 9, 5, 33]
OTHER = [8, *TOKENS[1:]]
CONTEXTS = torch.tensor([[5, 4, 3, 2, 1], [11, 12, 13, 14, 15], [60, 0, 60, 0, 60]])
START = CONTEXTS.shape[1]
SECRETS = (b"an old secret, 16+", b"a new secret, 16+")


class Shelf(dict[str, bytes]):
    """The least that is a store: no checksums, and faults on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: dict[str, Exception] = {}
        self.calls: list[str] = []
        self.keeps = True

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.faults:
            raise self.faults[name]

    def get(self, key: str) -> bytes | None:  # type: ignore[override]
        self._call("get")
        return super().get(key)

    def put(self, key: str, blob: bytes) -> bool:
        self._call("put")
        if self.keeps:
            self[key] = blob
        return self.keeps

    def delete(self, key: str) -> bool:
        self._call("delete")
        return self.pop(key, None) is not None


@pytest.fixture
def model() -> Any:
    return tiny_model("llama")


def layout_of(model: Any) -> KVLayout:
    return KVLayout.from_config(model.config, dtype=model.dtype)


def exact(model: Any) -> Codec:
    return Codec(Profile.unlearned(layout_of(model)), "lossless")


def lossy(model: Any, step: float = 0.1) -> Codec:
    return Codec(fitted_codec(model, 2).profile, step=step)


def fitted_codec(model: Any, seed: int = 0) -> Codec:
    layout = layout_of(model)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        chunks = prefill(model, torch.randint(61, (4, 64), generator=noise), layout)
    return Codec(fit(layout, chunks), step=0.1)


def make(model: Any, store: ChunkStore | None = None, **arguments: Any) -> ChunkCache:
    codec = arguments.pop("codec", None) or exact(model)
    return ChunkCache(model, codec, Shelf() if store is None else store, **arguments)


def blob_of(library: ChunkCache, tokens: Any, leading: bool = False) -> bytes:
    """The blob of a chunk."""
    blob = library.segment(tokens, leading=leading).chunk
    assert isinstance(blob, bytes)
    return blob


@contextmanager
def passes(model: Any) -> Iterator[list[int]]:
    """Lengths of the inputs that the model is run on, which is never for gradients."""
    seen: list[int] = []

    def note(_: Any, args: Any, kwargs: Any) -> None:
        assert not torch.is_grad_enabled()
        seen.append(kwargs["input_ids"].shape[1])

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    yield seen
    handle.remove()


def averaged(model: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Keys and values `[T, H, D]` of each layer, in float32: each context computed with the chunk, then the mean."""
    rows = []
    for context in CONTEXTS:
        cache: Any = DynamicCache()
        with torch.no_grad():
            model(input_ids=torch.cat([context, torch.tensor(TOKENS)])[None], **cache_argument(model, cache))
        rows.append([(layer.keys[0, :, START:], layer.values[0, :, START:]) for layer in cache.layers])
    means = [
        [torch.stack([row[layer][kind] for row in rows]).float().mean(0).transpose(0, 1) for kind in (0, 1)]
        for layer in range(2)
    ]
    return [keys for keys, _ in means], [values for _, values in means]


def assert_chunk(got: KVChunk, keys: Any, values: Any, atol: float = 0.0, rtol: float = 0.0) -> None:
    for one, other in zip((*got.keys, *got.values), (*keys, *values), strict=True):
        torch.testing.assert_close(one, other, atol=atol, rtol=rtol)


# What is computed ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "contexts"), [(torch.float32, None), (torch.bfloat16, CONTEXTS)])
def test_a_chunk_computed_alone_is_the_prefill(dtype: torch.dtype, contexts: torch.Tensor | None) -> None:
    model = tiny_model("llama", dtype)
    codec = exact(model)
    blob = blob_of(make(model, codec=codec, contexts=contexts), TOKENS, leading=contexts is not None)
    with torch.no_grad():
        expected = prefill(model, torch.tensor([TOKENS]), layout_of(model))[0]
    got = codec.decode(blob)
    assert got.start == 0 and got.tokens == len(TOKENS)
    assert_chunk(got, expected.keys, expected.values)


def test_behind_contexts_a_chunk_is_the_average(model: Any) -> None:
    codec = exact(model)
    got = codec.decode(blob_of(make(model, codec=codec, contexts=CONTEXTS), TOKENS))
    assert got.start == START
    keys, values = averaged(model)
    assert_chunk(got, keys, values, atol=1e-5)
    alone = codec.decode(blob_of(make(model, codec=codec), TOKENS))
    assert not torch.allclose(alone.values[1], values[1], atol=1e-3), "contexts that change nothing test nothing"


def test_the_average_is_taken_in_float32() -> None:
    """Of equal rows it is exact, where sums in bfloat16 would be rounded."""
    model = tiny_model("llama", torch.bfloat16)
    codec = exact(model)
    one = codec.decode(blob_of(make(model, codec=codec, contexts=CONTEXTS[:1]), TOKENS))
    seven = codec.decode(blob_of(make(model, codec=codec, contexts=CONTEXTS[:1].repeat(7, 1)), TOKENS))
    assert_chunk(seven, one.keys, one.values)


@pytest.mark.parametrize("contexts", [None, CONTEXTS], ids=["alone", "behind"])
def test_a_blob_holds_the_ids_that_a_profile_predicts_from(model: Any, contexts: torch.Tensor | None) -> None:
    codec = Codec(predicting(fitted_codec(model).profile), step=0.1)
    got = codec.decode(blob_of(make(model, codec=codec, contexts=contexts), TOKENS))
    assert got.token_ids is not None and got.token_ids.tolist() == TOKENS


def test_contexts_are_computed_once_and_only_when_needed(model: Any) -> None:
    store, size = Shelf(), len(TOKENS)
    with passes(model) as seen:
        library = make(model, store, contexts=CONTEXTS)
        blob_of(library, TOKENS, leading=True)
        assert seen == [size]
        blob_of(library, TOKENS)
        assert seen == [size, START, START, START, size, size, size]
        blob_of(library, [*TOKENS, 1])
        assert seen[7:] == [size + 1] * 3
        blob_of(library, TOKENS)
        blob_of(make(model, store, contexts=CONTEXTS), TOKENS)
        assert len(seen) == 10


# Stores --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["redis://:secret@host/0", {}])
def test_what_is_not_a_store_is_refused(model: Any, store: Any) -> None:
    """And not shown, for a URL may hold a password."""
    got = rf"^store: must have get, put and delete, got {type(store).__name__}: open_store\(URL\) makes one$"
    with pytest.raises(InputError, match=got):
        make(model, store)
    with pytest.raises(InputError, match=r"^codec: must have no refinements, .*: make it without refinements="):
        make(model, codec=Codec(fitted_codec(model).profile, step=0.1, refinements=1))


# Keys ----------------------------------------------------------------------------------------------------------------


def key_of(library: ChunkCache, store: Shelf, tokens: Any = TOKENS, **arguments: Any) -> str:
    before = set(store)
    blob_of(library, tokens, **arguments)
    (key,) = set(store) - before
    return key


def test_the_key_is_the_content_digest(model: Any) -> None:
    """Written out, for it is a persistent format."""
    store, codec = Shelf(), fitted_codec(model)
    library = make(model, store, codec=codec, contexts=CONTEXTS, tenant="acme")
    name = f"{model_fingerprint(model)} {function_digest(model)}"
    identity = Identity(name, "", layout_of(model).fingerprint, codec.profile.id, f"step:{codec.step_index}")
    scope = Scope(tenant="acme")
    alone = store_key("acme", content_digest(identity, scope, TOKENS))
    assert key_of(library, store, leading=True) == alone
    data = struct.pack("<17q", *CONTEXTS.shape, *CONTEXTS.flatten().tolist())
    name_of_contexts = hashlib.blake2b(data, digest_size=32, person=b"cuvee-contexts").digest()
    behind = content_digest(identity, scope, TOKENS, context=name_of_contexts)
    assert key_of(library, store) == store_key("acme", behind)
    store.clear()
    exact_identity = replace(identity, profile=b"", quality="lossless")
    assert key_of(make(model, store), store) == store_key("", content_digest(exact_identity, Scope(), TOKENS))


@pytest.mark.parametrize("changes", [{"hidden_act": "relu"}, {}], ids=["configuration", "buffers"])
def test_equal_weights_with_another_configuration_or_other_buffers_are_another_model(changes: dict[str, Any]) -> None:
    """Frequencies of RoPE are stored with no model."""
    store, one, other = Shelf(), tiny_model("llama"), tiny_model("llama", **changes)
    other.load_state_dict(one.state_dict())
    if not changes:
        other.model.rotary_emb.inv_freq[1] *= 1.5
    assert model_fingerprint(one) == model_fingerprint(other)
    first, library = blob_of(make(one, store), TOKENS), make(other, store)
    assert blob_of(library, TOKENS) != first and library.counters.misses == 1 and len(store) == 2


def test_the_last_bit_of_a_frequency_is_that_of_a_cpu(model: Any) -> None:
    """As in the fingerprints of layouts. A change by a thousandth is another model's."""
    other, before = deepcopy(model), function_digest(model)
    frequencies = other.model.rotary_emb.inv_freq
    frequencies.copy_(frequencies.nextafter(torch.tensor(2.0)))
    assert function_digest(other) == before
    frequencies[-1] *= 1.001
    assert function_digest(other) != before


def test_a_copy_from_disk_is_the_same_model(model: Any, tmp_path: Path) -> None:
    """Saving a model writes its class and dtype into its configuration, also while it is in use."""
    store = Shelf()
    library = make(model, store)
    blob = blob_of(library, TOKENS)
    model.save_pretrained(tmp_path)
    assert model.config.architectures and blob_of(library, TOKENS) == blob
    copy = make(type(model).from_pretrained(tmp_path).eval(), store)
    assert blob_of(copy, TOKENS) == blob and copy.counters.hits == 1


@pytest.mark.parametrize("form", [np.array, lambda x: torch.tensor(x, dtype=torch.int32)])
def test_any_row_of_integers_is_the_same_chunk(model: Any, form: Callable[[Any], Any]) -> None:
    store = Shelf()
    library = make(model, store)
    assert blob_of(library, form(TOKENS)) == blob_of(library, TOKENS)
    assert library.counters.hits == 1 and len(store) == 1


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_contexts_are_kept_as_they_were(model: Any, dtype: torch.dtype) -> None:
    store, contexts = Shelf(), CONTEXTS.to(dtype, copy=True)
    library = make(model, store, contexts=contexts)
    contexts.zero_()
    blob = blob_of(library, TOKENS)
    other = make(model, store, contexts=CONTEXTS)
    assert blob_of(other, TOKENS) == blob and other.counters.hits == 1
    assert blob_of(make(model, contexts=CONTEXTS), TOKENS) == blob


# Bad entries ---------------------------------------------------------------------------------------------------------


def flipped(blob: bytes, at: int) -> bytes:
    data = bytearray(blob)
    data[at] ^= 0x10
    return bytes(data)


def entry_of(model: Any, codec: Codec | None = None, start: int = 0, tokens: Any = TOKENS) -> bytes:
    """A blob that is well-formed, and not what is looked for."""
    with torch.no_grad():
        chunk = prefill(model, torch.tensor([tokens]), layout_of(model))[0]
    return (codec or lossy(model)).encode(KVChunk(chunk.keys, chunk.values, chunk.layout, start))


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(lambda model, blob: blob[:-1], id="truncated"),
        pytest.param(lambda model, blob: flipped(blob, -1), id="section-damaged"),
        pytest.param(lambda model, blob: entry_of(model, tokens=TOKENS[:-1]), id="wrong-length"),
        pytest.param(lambda model, blob: entry_of(model, start=START), id="wrong-start"),
        pytest.param(lambda model, blob: entry_of(model, lossy(model, 0.2)), id="other-step"),
        pytest.param(
            lambda model, blob: entry_of(model, Codec(lossy(model).profile, step=0.1, key=bytes(32))), id="other-secret"
        ),
    ],
)
def test_a_bad_entry_is_replaced(
    model: Any, bad: Callable[[Any, bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    store = Shelf()
    library = make(model, store, codec=lossy(model))
    blob = blob_of(library, TOKENS)
    (key,) = store
    store[key] = bad(model, blob)
    store.calls.clear()
    assert blob_of(library, TOKENS) == blob == store[key]
    assert store.calls == ["get", "delete", "put"]
    assert library.counters == ChunkCounters(misses=2, stored=2, rejected=1)
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert blob_of(library, TOKENS) == blob and library.counters.hits == 1


def test_an_entry_of_another_profile_is_left_as_it_is(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    """It is sound: a reader with its profile decodes it."""
    caplog.set_level(logging.INFO)
    store = Shelf()
    library = make(model, store, codec=lossy(model))
    blob = blob_of(library, TOKENS)
    (key,) = store
    store[key] = theirs = entry_of(model, fitted_codec(model))
    store.calls.clear()
    assert blob_of(library, TOKENS) == blob and store[key] == theirs
    assert store.calls == ["get"]
    assert library.counters == ChunkCounters(misses=2, stored=1, rejected=1)
    assert "left as it is" in caplog.text


def test_a_chunk_that_is_stored_without_loss_is_used_as_it_is(model: Any) -> None:
    """A lossy codec stores what it cannot make smaller so."""
    store = Shelf()
    blob_of(make(model, store, codec=lossy(model)), TOKENS)
    (key,) = store
    store[key] = entry_of(model, exact(model))
    library = make(model, store, codec=lossy(model))
    assert blob_of(library, TOKENS) == store[key] and library.counters == ChunkCounters(hits=1)


@pytest.mark.parametrize("place", ["tenant", "tokens", "model"])
def test_a_tagged_blob_of_another_place_is_rejected(model: Any, place: str) -> None:
    """An attacker who can write to the store and have a chunk computed has a blob with a valid tag, of equal shape."""
    codec = Codec(exact(model).profile, "lossless", key=SECRETS[0])
    store, elsewhere = Shelf(), Shelf()
    library = make(model, store, codec=codec)
    blob = blob_of(library, TOKENS)
    (key,) = store
    if place == "model":
        model = deepcopy(model)
        with torch.no_grad():
            next(model.parameters()).mul_(2.0)
    other = make(model, elsewhere, codec=codec, tenant="attacker" if place == "tenant" else "")
    blob_of(other, OTHER if place == "tokens" else TOKENS)
    ((name, foreign),) = elsewhere.items()
    assert name != key
    store[key] = foreign
    assert blob_of(library, TOKENS) == blob == store[key]
    assert library.counters.rejected == 1


def test_while_secrets_are_replaced_entries_of_both_are_found(model: Any) -> None:
    profile, store = exact(model).profile, Shelf()
    old, both, new = (
        make(model, store, codec=Codec(profile, "lossless", key=key)) for key in (SECRETS[0], SECRETS[::-1], SECRETS[1])
    )
    assert blob_of(both, TOKENS) != b"" and both.counters.stored == 1
    assert blob_of(new, TOKENS) and new.counters.hits == 1, "written with the first"
    blob_of(old, OTHER)
    blob_of(both, OTHER)
    assert both.counters == ChunkCounters(hits=1, misses=1, stored=1)


def test_segments_of_a_codec_with_a_key_are_blended(model: Any) -> None:
    codec = Codec(exact(model).profile, "lossless", key=SECRETS[0])
    library, plain = make(model, codec=codec), make(model)
    prompt, expected = (
        [each.segment(TOKENS, leading=True), each.segment(OTHER), Segment([1, 2, 3])] for each in (library, plain)
    )
    got: Any = Blender(model, codec, selector=Nothing()).blend(prompt)
    want: Any = Blender(model, exact(model), selector=Nothing()).blend(expected)
    for one, other in zip(got.cache.layers, want.cache.layers, strict=True):
        assert torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)
    swapped = [Segment(TOKENS, prompt[0].chunk, associated_data=prompt[1].associated_data), prompt[2]]
    with pytest.raises(CorruptError, match="belong somewhere else"):
        Blender(model, codec).blend(swapped)


# A store that fails --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operations", "error"),
    [(("get",), StoreError("no route")), (("put",), OSError("disk full")), (("get", "put"), RuntimeError("a bug"))],
)
def test_a_store_that_fails_costs_a_computation(
    model: Any, operations: tuple[str, ...], error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    store = Shelf()
    library = make(model, store, contexts=CONTEXTS)
    blob = blob_of(make(model, contexts=CONTEXTS), TOKENS)
    store.faults = dict.fromkeys(operations, error)
    for _ in range(3):
        assert blob_of(library, TOKENS) == blob
    stored = 0 if "put" in operations else 3
    assert library.counters == ChunkCounters(misses=3, stored=stored, errors=3 * len(operations))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and str(error) in record.getMessage()
    store.faults = {}
    blob_of(library, TOKENS)
    assert blob_of(library, TOKENS) == blob and library.counters.errors == 3 * len(operations)
    (key,) = store
    store[key], store.faults = blob[:-1], {"delete": error}
    assert blob_of(library, TOKENS) == blob and library.counters.rejected == 1


# Threads -------------------------------------------------------------------------------------------------------------


class Awaited(Future[bytes]):
    """Says when somebody waits for it."""

    waiting = threading.Semaphore(0)

    def result(self, timeout: float | None = None) -> bytes:
        self.waiting.release()
        return super().result(timeout)


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    Awaited.waiting = threading.Semaphore(0)
    monkeypatch.setattr(module, "Future", Awaited)
    return Awaited.waiting


def run_while_computing(
    model: Any, library: ChunkCache, waiting: threading.Semaphore, then: Callable[[], None], tokens: Any = TOKENS
) -> list[Future[bytes]]:
    """Four threads ask for a chunk; three of them wait before the model gets to run `then`."""
    once = iter([True])

    def hook(*_: Any) -> None:
        if next(once, False):
            for _waiter in range(3):
                assert waiting.acquire(timeout=PATIENCE)
            then()

    handle = model.register_forward_pre_hook(hook)
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(blob_of, library, tokens) for _ in range(4)]
    handle.remove()
    return asked


def test_threads_that_ask_for_one_chunk_compute_it_once(model: Any, waiting: threading.Semaphore) -> None:
    store = Shelf()
    store.keeps = False  # whoever does not wait computes
    library = make(model, store, contexts=CONTEXTS)
    with passes(model) as seen:
        asked = run_while_computing(model, library, waiting, lambda: None)
    assert len({future.result() for future in asked}) == 1
    assert len(seen) == 6 and store.calls == ["get", "put"]
    assert library.counters == ChunkCounters(hits=3, misses=1)
    assert not library._running


def test_a_computation_that_fails_fails_for_all_that_wait_and_is_tried_again(
    model: Any, waiting: threading.Semaphore
) -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError("out of memory")

    library = make(model)
    asked = run_while_computing(model, library, waiting, fail)
    assert [type(future.exception()) for future in asked] == [torch.OutOfMemoryError] * 4
    assert library.counters == ChunkCounters()
    assert blob_of(library, TOKENS) == blob_of(make(model), TOKENS)
    assert library.counters == ChunkCounters(misses=1, stored=1)


def test_threads_with_many_chunks(model: Any) -> None:
    """The model runs one at a time, its contexts are computed once, everybody gets what was asked for."""
    library, alone = make(model, contexts=CONTEXTS), make(model, contexts=CONTEXTS)
    texts = [[token, *TOKENS] for token in range(6)]
    expected = [blob_of(alone, text) for text in texts]
    inside = most = 0

    def enter(*_: Any) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.002)  # somebody else's turn

    def leave(*_: Any) -> None:
        nonlocal inside
        inside -= 1

    handles = [model.register_forward_pre_hook(enter), model.register_forward_hook(leave)]
    with ThreadPoolExecutor(4) as pool, passes(model) as seen:
        assert list(pool.map(partial(blob_of, library), texts * 3)) == expected * 3
    for handle in handles:
        handle.remove()
    assert most == 1 and len(seen) == 3 + 6 * 3
    assert library.counters == ChunkCounters(hits=12, misses=6, stored=6)


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "tokens: must be a row of at least one integer"),
        ([1, 61], "tokens: must lie in the model's vocabulary, 0 … 60, got 61"),
        ([1, -1], "tokens: must lie in .*, got -1$"),
        ([1] * 4092, "tokens: must end within the model's 4096 positions, got 4092 from position 5:"),
    ],
)
def test_bad_tokens_are_refused(model: Any, tokens: Any, message: str) -> None:
    store = Shelf()
    library = make(model, store, contexts=CONTEXTS)
    with pytest.raises(InputError, match=f"^{message}"):
        library.segment(tokens)
    assert not store.calls and library.counters == ChunkCounters()


@pytest.mark.parametrize(
    ("contexts", "message"),
    [
        ([[1, 2], [3, 4]], r"contexts: must be an int32 or int64 tensor \[N, C\], got list"),
        (CONTEXTS.float(), r"contexts: must be an int32 or int64 tensor \[N, C\], got torch.float32"),
        (CONTEXTS[0], r"contexts: must have shape \[N, C\], both above 0, got \[5\]"),
        (CONTEXTS[:, :0], r"contexts: must have shape .*, got \[3, 0\]"),
        (CONTEXTS + 1, "contexts: must lie in the model's vocabulary, 0 … 60, got 61"),
        (torch.zeros(1, 4096, dtype=torch.int64), "contexts: must have C below the model's 4096 positions, got 4096;"),
    ],
)
def test_bad_contexts_are_refused(model: Any, contexts: Any, message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        make(model, contexts=contexts)


def test_a_codec_of_another_model_is_refused(model: Any) -> None:
    with pytest.raises(ProfileMismatchError, match="heads, sizes, RoPE"):
        make(model, codec=exact(tiny_model("qwen2")))
    codec = fitted_codec(model)
    codec.profile.model = f"{PREFIX}00"
    with pytest.raises(ProfileMismatchError, match="calibrated on the model's weights, got one of other weights"):
        make(model, codec=codec)
    codec.profile.model = model_fingerprint(model)
    assert make(model, codec=codec).segment(TOKENS).chunk


@pytest.mark.parametrize("changed", ["weights", "configuration"])
def test_a_model_that_changed_since_is_refused(model: Any, changed: str) -> None:
    """One row of a step of training: what is stored would be the old model's, and what is added the new one's."""
    store = Shelf()
    library = make(model, store)
    library.segment(TOKENS)
    with torch.no_grad():
        if changed == "weights":
            model.get_input_embeddings().weight[3] += 1
        else:
            model.config.hidden_act = "relu"
    with pytest.raises(InputError, match=r"^model: must keep its weights, .*: make another ChunkCache$"):
        library.segment(TOKENS)
    again = make(model, store)
    again.segment(TOKENS)
    assert again.counters.misses == 1 and len(store) == 2


def test_the_last_positions_can_be_used() -> None:
    model = tiny_model("llama", max_position_embeddings=16)
    assert make(model, contexts=CONTEXTS).segment(TOKENS).tokens.tolist() == TOKENS
    with pytest.raises(InputError, match=r"^tokens: must end within the model's 16 positions, got 12 from position 5:"):
        make(model, contexts=CONTEXTS).segment([*TOKENS, 1])
    make(model).segment([1] * 16)
    with pytest.raises(InputError, match=r"^tokens: must end within .*, got 17 from position 0:"):
        make(model).segment([1] * 17)


def test_values_that_cannot_be_coded_are_an_error(model: Any) -> None:
    """And are not stored."""
    store, codec = Shelf(), lossy(model)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.fill_(float("nan"))
    library = make(model, store, codec=codec)
    with pytest.raises(CuveeError):
        blob_of(library, TOKENS)
    assert not store and library.counters == ChunkCounters()
