"""What a codec costs in quality, on the bundled model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.errors import InputError
from cuvee.eval.baselines.quantizers import Destroyed, Uncompressed
from cuvee.eval.quality import CodecMethod, Quality, QualityBench
from cuvee.eval.report.schema import read_entry


@pytest.fixture(scope="module")
def bench(books: Any) -> QualityBench:
    return QualityBench(books.model, books.orchard[:6], books.prefix, batch_size=4)


class Short(Uncompressed):
    def decode(self, stored: Any) -> KVChunk:
        chunk: KVChunk = super().decode(stored)
        return chunk.slice(0, chunk.tokens - 1)


def test_an_identity_costs_nothing(bench: QualityBench, books: Any) -> None:
    q = bench.run("same", Uncompressed())
    assert (q.delta_nll, q.top1, q.bits_per_value, q.ratio) == (0, 1, 32, 0.5)
    assert abs(q.kl) < 1e-7 and q.kl_stderr is not None and q.kl_stderr < 1e-7
    assert (q.sequences, q.cached_tokens, q.scored_tokens) == (6, 6 * 192, 6 * 63)
    assert json.loads(json.dumps(q.to_dict()))["name"] == "same"


def test_a_destroyed_cache_costs_much(bench: QualityBench) -> None:
    q = bench.run("nothing", Destroyed())
    assert q.bits_per_value == 0 and q.ratio is None
    assert q.kl > 0.3 and q.delta_nll > 0.1 and q.top1 < 0.8
    assert q.kl_stderr is not None and 0 < q.kl_stderr < q.kl


def test_the_cast_to_sixteen_bits_is_part_of_the_figures(books: Any) -> None:
    bench = QualityBench(books.model, books.orchard[:2], books.prefix, dtype="bfloat16")
    held = [chunk.token_ids for chunk in bench.caches if chunk.token_ids is not None]
    assert [ids.tolist() for ids in held] == books.orchard[:2, : books.prefix].tolist()
    q = bench.run("cast", Uncompressed())
    assert 1e-7 < q.kl < 1e-3 and q.bits_per_value == 16 and q.ratio == 1


def test_a_codec_is_measured_with_every_byte(bench: QualityBench, books: Any) -> None:
    codec = Codec(books.profile, "balanced")
    q = bench.run("cuvee", CodecMethod(codec), chunk_tokens=128)
    blobs = [codec.encode(c.slice(t, min(t + 128, 192))) for c in bench.caches for t in (0, 128)]
    values = 6 * 192 * books.layout.values_per_token
    assert q.bits_per_value == pytest.approx(8 * sum(map(len, blobs)) / values)
    assert 0 < q.kl < 0.05 and q.top1 > 0.85 and q.ratio is not None and q.ratio > 5
    assert q.chunk_tokens == 128
    each = q.per_sequence
    for mean, parts in ((q.kl, each.kl), (q.delta_nll, each.delta_nll), (q.bits_per_value, each.bits_per_value)):
        assert mean == pytest.approx(sum(parts) / 6)
    assert q.nll - q.delta_nll == pytest.approx(bench.run("same", Uncompressed()).nll)
    assert read_entry(Quality, json.loads(json.dumps(q.to_dict())), "quality") == q


def test_a_long_prompt_leaves_no_logits_but_the_last(books: Any) -> None:
    """Those of 8,192 tokens of a large vocabulary would take more memory than their cache."""
    seen: list[int] = []
    hook = books.model.lm_head.register_forward_hook(lambda module, given, out: seen.append(out.shape[1]))
    try:
        QualityBench(books.model, books.orchard[:4], 200, batch_size=2)
    finally:
        hook.remove()
    assert seen == [1, books.orchard.shape[1] - 200] * 2


def test_every_batch_is_told(books: Any) -> None:
    told: list[str] = []
    QualityBench(books.model, books.orchard[:3], 200, batch_size=2, progress=told.append).run("same", Uncompressed())
    exact = [f"exact caches of {done} of 3 sequences" for done in (2, 3)]
    assert told == [*exact, "2 of 3 sequences", "3 of 3 sequences"]


def test_the_model_comes_back_as_it_was(books: Any) -> None:
    books.model.train()
    try:
        q = QualityBench(books.model, books.orchard[:1], books.prefix).run("nothing", Destroyed())
        assert q.kl_stderr is q.delta_nll_stderr is q.top1_stderr is None, "of a single sequence"
        assert books.model.training and all(p.requires_grad for p in books.model.parameters())
    finally:
        books.model.eval()


def test_chunks_that_do_not_come_back_are_an_error(bench: QualityBench) -> None:
    with pytest.raises(InputError, match=r"^method: short"):
        bench.run("short", Short())
    with pytest.raises(InputError, match=r"^chunk_tokens"):
        bench.run("", Uncompressed(), 0)
