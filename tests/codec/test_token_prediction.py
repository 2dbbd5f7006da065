"""Prediction from tokens: the table and its maps, blobs with token ids, and what is refused."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from tests import recognizing
from tests.chunks import error, same
from tests.forked import works_in_child
from transformers import LlamaForCausalLM

import cuvee
from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.coding.id_coding import read_token_ids, write_token_ids
from cuvee.codec.coding.open_blob import Expected
from cuvee.codec.errors import CorruptError, FormatError, InputError
from cuvee.codec.format.container import inspect, read_header, write_blob
from cuvee.codec.models.forward import prefill
from cuvee.codec.paged import PagedCache
from cuvee.codec.paged_chunks import PagedChunks
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.quality import KL_MARGIN, CurvePoint
from cuvee.codec.profiles.token_prediction import (
    LARGEST_COEFFICIENT,
    CoefficientMap,
    PredictionCache,
    Predictions,
    TokenMap,
    TokenTable,
)
from cuvee.codec.support import integer_products
from cuvee.codec.token_ids import NO_TOKEN, as_token_ids
from cuvee.naming.identity import Identity

VOCABULARY, TOKENS = 96, 300


SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_key_value_heads": 2, "max_position_embeddings": 512}
text = partial(recognizing.text, vocabulary=VOCABULARY)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return recognizing.small_model(**SIZES)


@pytest.fixture(scope="module")
def profile(model: LlamaForCausalLM) -> Profile:
    return cuvee.calibrate(model, text(30, 64, 1), "layers:2", more_text=text(40, 64, 2), progress=False)


@pytest.fixture(scope="module")
def chunk(model: LlamaForCausalLM) -> KVChunk:
    with torch.no_grad():
        (made,) = prefill(model, text(1, TOKENS, 3), cuvee.KVLayout.from_config(model.config, dtype=torch.float32))
    return made


def without_ids(chunk: KVChunk) -> KVChunk:
    return KVChunk(chunk.keys, chunk.values, chunk.layout, chunk.start, following=chunk.following)


def test_blobs_with_ids_are_smaller_at_no_more_error(profile: Profile, chunk: KVChunk) -> None:
    """The backends write the same bytes and read the same values."""
    sizes, errors = [], []
    for given in (chunk, without_ids(chunk)):
        codecs = [Codec(profile, step=0.25, backend=backend) for backend in ("numba", "reference")]
        blob = codecs[0].encode(given)
        assert codecs[1].encode(given) == blob
        backs = [codec.decode(blob) for codec in codecs]
        assert same(*backs)
        sizes.append(len(blob))
        errors.append(error(backs[0], chunk))
    assert sizes[0] < 0.8 * sizes[1] and errors[0] < errors[1]


def test_decoding_returns_the_ids(profile: Profile, chunk: KVChunk) -> None:
    codec = Codec(profile, step=0.25)
    blob = codec.encode(without_ids(chunk).with_token_ids(chunk.token_ids))
    assert blob == codec.encode(chunk)
    back = codec.decode(blob)
    assert back.token_ids is not None and chunk.token_ids is not None
    assert np.array_equal(back.token_ids, chunk.token_ids)
    part = codec.decode(blob, tokens=range(10, 20))
    assert part.token_ids is not None and np.array_equal(part.token_ids, chunk.token_ids[10:20])
    assert codec.decode(codec.encode(without_ids(chunk))).token_ids is None
    assert inspect(blob).token_id_bytes == 2 * TOKENS


def test_chunks_with_a_token_that_has_no_id_are_coded_without_ids(profile: Profile, chunk: KVChunk) -> None:
    """A token that is not predicted has values in components that are not coded where all tokens are predicted."""
    codec = Codec(profile, step=0.25)
    ids = np.array(chunk.token_ids)
    ids[100] = NO_TOKEN
    assert codec.encode(chunk.with_token_ids(ids)) == codec.encode(without_ids(chunk))


def curves(*plain: float | None) -> list[CurvePoint]:
    """Return points with a KL of 1e-3 at step index -64 with ids, and with `plain` at -64, 0 and 64 without."""
    own = [CurvePoint(64 * k, 3.0 - k, 1e-2, 4e-3 * 4.0**k) for k in (-1, 0, 1)]
    other = [CurvePoint(64 * k, 4.0 - k, 1e-2, kl, plain=True) for k, kl in zip((-1, 0, 1), plain, strict=True)]
    return own + other


def test_calibrating_and_measuring_measure_chunks_without_ids_as_well(
    model: LlamaForCausalLM, profile: Profile, chunk: KVChunk
) -> None:
    """The curve without ids is that of a profile that cannot predict; with ids, fewer bits are coded."""
    indices = [point.step_index for point in profile.curve]
    assert [point.step_index for point in profile.plain_curve] == [*indices[::2]]
    for without in profile.plain_curve[:-1]:
        (with_ids,) = [point for point in profile.curve if point.step_index == without.step_index]
        assert without.bits_per_value > 1.05 * with_ids.bits_per_value
    measured = cuvee.measure(profile, model, text(4, 64, 5), step_indices=[0, -64, 0], progress=False)
    lone = cuvee.measure(profile.plain, model, text(4, 64, 5), step_indices=[-64, 0], progress=False)
    assert measured.plain_curve == lone.curve and not lone.plain_curve
    assert profile.plain.token_table is None
    blobs = [Codec(each, step=0.25).encode(without_ids(chunk)) for each in (profile, profile.plain)]
    assert len(blobs[0]) == len(blobs[1])


def test_chunks_without_ids_keep_a_kl_by_their_own_curve(profile: Profile, chunk: KVChunk, tmp_path: Path) -> None:
    """They lose four times as much at the same step, and so get a step that is finer by an octave."""
    profile.with_curve(curves(4e-3, 1.6e-2, 6.4e-2)).save(tmp_path / "p")
    own = Profile.load(tmp_path / "p")
    assert own.points == tuple(profile.with_curve(own.points).points) and len(own.plain_curve) == 3
    codec = Codec(own, kl=KL_MARGIN * 4e-3)
    assert codec.step_index == 0 and codec.quality_name == "step:0,plain:-64"
    assert codec.described_quality.endswith(": step=1 (step=0.5 without token ids)")
    assert own.resolve(kl=KL_MARGIN * 4e-3, plain=True) == -64
    finer = Codec(own, step=0.5)
    with_ids, plain = codec.encode(chunk), codec.encode(without_ids(chunk))
    assert plain == finer.encode(without_ids(chunk)) and read_header(plain).step_index == -64
    assert with_ids != finer.encode(chunk) and read_header(with_ids).step_index == 0
    cache, slots = PagedCache.of_chunk(chunk), torch.arange(TOKENS)
    assert codec.encode(PagedChunks(cache, [slots, slots], [0, 0], tokens=[None, chunk.token_ids])) == [plain, with_ids]
    # A key of a store stands for both.
    for blob in (plain, with_ids):
        assert codec.open(blob, expected=Expected(TOKENS, 0, "float32")).tokens == TOKENS
    with pytest.raises(CorruptError, match="step index"):
        finer.open(with_ids, expected=Expected(TOKENS, 0, "float32"))
    with pytest.raises(CorruptError, match=r"step index -64, got .* step index 0$"):
        codec.open(Codec(own, step=1.0).encode(without_ids(chunk)), expected=Expected(TOKENS, 0, "float32"))
    assert same(codec.decode(plain), finer.decode(plain))
    # Sizes and steps are those of chunks with ids.
    for codec in (Codec(own, bits=3.0), Codec(own, step=1.0)):
        assert codec.quality_name == "step:0"
        assert read_header(codec.encode(without_ids(chunk))).step_index == 0


def test_a_kl_that_no_step_keeps_without_ids_is_lossless_without_ids(
    profile: Profile, chunk: KVChunk, caplog: pytest.LogCaptureFixture
) -> None:
    own = profile.with_curve(curves(1e-2, 4e-2, 1.6e-1))
    with caplog.at_level(logging.INFO):
        codec = Codec(own, kl=KL_MARGIN * 4e-3)
    assert "curve of chunks without token ids reaches: lossless instead" in caplog.text
    assert codec.quality_name == "step:0,plain:lossless" and not codec.lossless
    assert codec.described_quality.endswith(": step=1 (lossless without token ids)")
    blob = codec.encode(without_ids(chunk))
    assert same(codec.decode(blob), chunk)
    assert codec.open(blob, expected=Expected(TOKENS, 0, "float32")).header.lossless
    assert not same(codec.decode(codec.encode(chunk)), chunk)
    names = {codec.quality_name, Codec(own, step=1.0).quality_name, Codec(own, "lossless").quality_name}
    assert names == {"step:0,plain:lossless", "step:0", "lossless"}
    for name in names:
        Identity(model="m", tokenizer="", layout=b"l", profile=b"" if name == "lossless" else own.id, quality=name)


@pytest.mark.usefixtures("untold")
def test_a_profile_without_a_curve_for_them_says_that_chunks_without_ids_may_lose_more(
    profile: Profile, chunk: KVChunk, caplog: pytest.LogCaptureFixture
) -> None:
    for points, more in ((curves(4e-3, 1.6e-2, 6.4e-2), False), (curves(4e-3, 1.6e-2, 6.4e-2)[:3], True)):
        caplog.clear()
        Codec(profile.with_curve(points), kl=4e-3).encode(without_ids(chunk))
        assert "its blob is larger" in caplog.text
        assert ("its KL may exceed the profile's curve" in caplog.text) == more


def test_ids_are_ignored_where_nothing_is_predicted(model: LlamaForCausalLM, profile: Profile, chunk: KVChunk) -> None:
    plain = cuvee.calibrate(model, text(20, 64, 1), "layer", predict_tokens=False, progress=False)
    assert plain.token_table is None
    for codec in (Codec(profile, "lossless"), Codec(plain, step=0.25)):
        blob = codec.encode(chunk)
        assert blob == codec.encode(without_ids(chunk))
        assert read_header(blob).token_id_bytes == 0


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.zeros(TOKENS - 1, np.int64), "token_ids: must be 300 integers"),
        (np.zeros((1, TOKENS), np.int64), "token_ids: must be 300 integers"),
        (np.zeros(TOKENS), "token_ids: must be 300 integers"),
        (torch.full((TOKENS,), VOCABULARY), "token_ids: must be below 96, the vocabulary"),
        (torch.full((TOKENS,), -100), "token_ids: must be ids of the vocabulary, or -1"),
        ("text", "token_ids: must be"),
        ([[1], [2, 3]], "token_ids: must be"),
    ],
)
def test_bad_ids_are_refused(profile: Profile, chunk: KVChunk, ids: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Codec(profile, step=0.25).encode(chunk.with_token_ids(ids))


def test_chunks_check_their_ids(chunk: KVChunk) -> None:
    with pytest.raises(InputError, match="token_ids: must be 300 integers"):
        KVChunk(chunk.keys, chunk.values, chunk.layout, 0, [1, 2, 3])
    joined = KVChunk.concat([chunk.slice(0, 10), chunk.slice(10, 30)])
    assert joined.token_ids is not None and np.array_equal(joined.token_ids, chunk.token_ids[:30])  # type: ignore[index]
    assert KVChunk.concat([chunk.slice(0, 10), without_ids(chunk).slice(10, 30)]).token_ids is None
    assert as_token_ids(range(3), 3).dtype == np.int64
    for wrong in (2**64 - 1, 2**64 - 5, 2**63):
        with pytest.raises(InputError, match=f"^tokens: must be ids of the vocabulary, .* got {wrong}$"):
            as_token_ids(np.array([1, wrong], np.uint64), 2)
    assert as_token_ids(np.array([1, 2], np.uint64), 2).tolist() == [1, 2]


def test_changed_ids_are_noticed(profile: Profile, chunk: KVChunk) -> None:
    codec = Codec(profile, step=0.25)
    blob = bytearray(codec.encode(chunk))
    header = read_header(bytes(blob))
    blob[header.header_bytes + 17] ^= 1
    with pytest.raises(CorruptError, match="token ids: their checksum does not match"):
        codec.decode(bytes(blob))
    keyed = Codec(profile, step=0.25, key=b"k" * 16)
    changed = bytearray(keyed.encode(chunk))
    changed[header.header_bytes + 17] ^= 1
    with pytest.raises(CorruptError, match="authentication tag"):
        keyed.decode(bytes(changed))


def forged(profile: Profile, blob: bytes, ids: bytes) -> bytes:
    """The same sections with other ids, and checksums that match."""
    header = read_header(blob)
    sections = [
        blob[header.section_offset(i) : header.section_offset(i) + size] for i, size in enumerate(header.section_bytes)
    ]
    return write_blob(header, sections, token_ids=ids)


def test_forged_ids_are_refused(model: LlamaForCausalLM, profile: Profile, chunk: KVChunk) -> None:
    codec = Codec(profile, step=0.25)
    blob = codec.encode(chunk)
    beyond = forged(profile, blob, write_token_ids(np.full(TOKENS, VOCABULARY), 1 << 15))
    with pytest.raises(FormatError, match="token ids: must be below 96"):
        codec.decode(beyond)
    for size in (1, 2 * TOKENS - 1, 4 * TOKENS):
        with pytest.raises(FormatError, match="bytes of token ids"):
            codec.decode(forged(profile, blob, bytes(size)))
    wide = forged(profile, blob, write_token_ids(np.array(chunk.token_ids), 1 << 20))
    assert same(codec.decode(wide), codec.decode(blob)), "three bytes say the same as two"
    plain = cuvee.calibrate(model, text(20, 64, 1), "layers:2", predict_tokens=False, progress=False)
    other = Codec(plain, step=0.25)
    foreign = forged(plain, other.encode(chunk), write_token_ids(np.array(chunk.token_ids), VOCABULARY))
    with pytest.raises(FormatError, match="header: must list no token ids"):
        other.decode(foreign)


@pytest.mark.parametrize("vocabulary", [65_536, 65_537])
def test_ids_of_every_vocabulary_survive(vocabulary: int, profile: Profile, chunk: KVChunk) -> None:
    ids = np.array([0, 1, vocabulary // 2, vocabulary - 1] * (TOKENS // 4), np.int64)
    written = write_token_ids(ids, vocabulary)
    assert len(written) == TOKENS * (2 if vocabulary <= 65_536 else 3)
    blob = forged(profile, Codec(profile, step=0.25).encode(chunk), written)
    again = read_token_ids(blob, read_header(blob), vocabulary)
    assert again is not None and np.array_equal(again, ids)


def test_too_little_text_predicts_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        few = cuvee.calibrate(
            recognizing.small_model(**SIZES, num_hidden_layers=1), text(4, 60, 1), "head", progress=False
        )
    assert few.token_table is None
    assert "no prediction from tokens" in caplog.text


def numbers(rows: int, features: int, values: int, seed: int = 0) -> tuple[TokenTable, TokenMap]:
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randint(-7, 8, (rows, features), dtype=torch.int8, generator=generator)
    weights = torch.randint(-127, 128, (features, values), dtype=torch.int8, generator=generator)
    return TokenTable(embedding, torch.rand(rows, generator=generator)), TokenMap(
        weights, torch.rand(values, generator=generator)
    )


@pytest.mark.parametrize("instructions", [False, True])
def test_predictions_do_not_depend_on_the_cpu(instructions: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if instructions and not integer_products.has_exact_instructions():
        pytest.skip("this CPU has no int8 instructions, or oneDNN does not use them")
    monkeypatch.setattr(integer_products, "has_exact_instructions", lambda: instructions)
    table, token_map = numbers(50, 40, 24)
    exact = (table.embedding.long() @ token_map.weights.long()).float()
    expected = (exact * table.row_scale[:, None] * token_map.scale).bfloat16()
    assert torch.equal(token_map.predict(table), expected)
    matrix = torch.randn(24, 40, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-12, 12)[:, None]
    matrix[3] = 0
    coefficient_map = CoefficientMap.rounded(matrix)
    integers = (matrix.double() / coefficient_map.scale[:, None]).round()
    assert int(integers.abs().max()) == LARGEST_COEFFICIENT
    sums = table.embedding.long() @ integers.long().T
    coefficients = (sums.double() * table.row_scale.double()[:, None] * coefficient_map.scale).float()
    assert torch.equal(coefficient_map.predict(table), coefficients)
    assert torch.equal(coefficient_map.matrix, integers * coefficient_map.scale[:, None])


def test_the_largest_numbers_of_a_coefficient_map_fit_its_digits() -> None:
    edges = [0, 1, 127, 128, 255, 256, 32639, 32640, 32768, 65536, LARGEST_COEFFICIENT - 1, LARGEST_COEFFICIENT]
    matrix = torch.tensor([[sign * edge for edge in edges for sign in (1, -1)]], dtype=torch.float32)
    assert torch.equal(CoefficientMap.rounded(matrix).matrix.float(), matrix)


@pytest.mark.parametrize("kept", [0, 5, 50])
def test_a_full_cache_computes_the_others(kept: int) -> None:
    """And sinks, the first three positions, are not predicted."""
    table, token_map = numbers(50, 40, 24)
    exact = token_map.predict(table)
    cache = PredictionCache(table, token_map, 3, 2 * 24 * kept)
    generator = np.random.default_rng(0)
    for round in range(30):
        ids, start = generator.integers(0, 50, 17), (0, 2, 3, 10)[round % 4]
        found = cache.of(ids, start)
        values, sinks = found.rows[torch.from_numpy(found.index)], max(3 - start, 0)
        assert not values[:sinks].any() and torch.equal(values[sinks:], exact[torch.from_numpy(ids)][sinks:])


def test_threads_find_whole_rows_and_each_its_own() -> None:
    """A thread is held while it computes rows, until another waits for it, or has come through without waiting."""
    table, token_map = numbers(50, 40, 24)
    exact = token_map.predict(table)
    begun, met = threading.Event(), threading.Event()

    class Held:
        size, dtype = token_map.size, token_map.dtype

        def predict(self, rows: TokenTable) -> torch.Tensor:
            if not begun.is_set():
                begun.set()
                met.wait(60)
            return token_map.predict(rows)

    class Watched:
        def __init__(self) -> None:
            self._lock = threading.Lock()

        def __enter__(self) -> None:
            if not self._lock.acquire(blocking=False):
                met.set()
                self._lock.acquire()

        def __exit__(self, *_: object) -> None:
            self._lock.release()

    def is_right(found: Predictions, ids: list[int]) -> bool:
        return torch.equal(found.rows[torch.from_numpy(np.array(found.index))], exact[ids])

    class Numbers(np.ndarray[Any, np.dtype[np.int64]]):
        def __setitem__(self, ids: Any, rows: Any) -> None:
            super().__setitem__(ids, rows)
            if self is cache._row_of:
                published.append(is_right(cache.of(ids, 3), ids.tolist()))

    cache, published = PredictionCache(table, cast("TokenMap", Held()), 3, 1 << 20), list[bool]()
    cache._lock, cache._row_of = cast("threading.Lock", Watched()), cache._row_of.view(Numbers)
    one, other = [5, 6, 7], [7, 8, 9]
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(cache.of, np.array(one), 3)
        assert begun.wait(60)
        second = cache.of(np.array(other), 3)
        met.set()
        assert is_right(first.result(), one) and is_right(second, other) and published == [True, True]


class Noticed(np.ndarray[Any, Any]):
    """Calls something once numbers were written to it."""

    then: Any = None

    def __setitem__(self, at: Any, value: Any) -> None:
        super().__setitem__(at, value)
        then, self.then = self.then, None
        if then is not None:
            then()


def test_a_child_forked_once_rows_have_numbers_writes_other_rows() -> None:
    table, token_map = numbers(50, 40, 24)
    cache, told = PredictionCache(table, token_map, 0, 1 << 20), list[bool]()

    def child() -> bool:
        first, others = cache.of(np.arange(5), 0), cache.of(np.arange(5, 9), 0)
        return not set(first.index) & set(others.index)

    cache._row_of = own = cache._row_of.view(Noticed)
    own.then = lambda: told.append(works_in_child(child))
    cache.of(np.arange(5), 0)
    assert told == [True]


def test_a_table_needs_a_map_in_every_section(profile: Profile) -> None:
    half = (replace(profile.learned[0], token_map=None), *profile.learned[1:])
    with pytest.raises(FormatError, match="learned: must have a token map in every section"):
        Profile(profile.layout, profile.group, profile.source, profile.family, half, token_table=profile.token_table)
