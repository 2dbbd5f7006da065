"""`cuvee bench eviction` with presses whose choices are made here: what it measures, reads and refuses."""

from __future__ import annotations

import base64
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cuvee.codec.codec import Codec
from cuvee.codec.data.corpus import load_tokenizer
from cuvee.codec.entropy.token_classes import CLASSES, NEUTRAL
from cuvee.codec.errors import FormatError, InputError
from cuvee.codec.learning.divergence import compare
from cuvee.codec.models.forward import cache_argument, empty_cache, prefill
from cuvee.eval.bench.eviction import soft
from cuvee.eval.bench.eviction.eviction_bench import (
    BY_CLASSES,
    CUVEE,
    DROPPED,
    DROPPED_FP8,
    PASSAGES,
    PRESSES,
    RATIOS,
    SCORED,
    SOFT_RATIOS,
    Case,
    measure,
    question_cases,
    run_eviction_bench,
    text_cases,
)
from cuvee.eval.bench.eviction.eviction_bench import CONTEXT as CACHED
from cuvee.eval.bench.eviction.eviction_tables import Curve, draw_eviction_report, eviction_markdown, kl_at, size_at
from cuvee.eval.bench.eviction.presses import Kept, Presses, read_presses, run_presses
from cuvee.eval.plots import save_figure

CONTEXT, FIRST = 192, 8
ALIKE = PRESSES[0], RATIOS[0]  # of which all heads keep the same positions, so that a mask can stand for it


def recent(layers: int, heads: int, tokens: int, ratio: float) -> Kept:
    """The first token and the last ones, as StreamingLLM keeps them; in every second head only last ones."""
    count = int(tokens * (1 - ratio))
    kept: Kept = np.zeros((layers, heads, tokens), bool)
    kept[..., :1] = kept[..., tokens - count + 1 :] = True
    kept[:, 1::2, 0], kept[:, 1::2, tokens - count] = False, True
    return kept


@pytest.fixture(scope="module")
def case(books: Any) -> Case:
    row = books.orchard[0]
    return Case("orchard", row[:CONTEXT], row[CONTEXT:], FIRST)


@pytest.fixture(scope="module")
def presses(books: Any) -> Presses:
    layers, heads = books.layout.num_layers, books.layout.layers[0].kv_heads
    kept = {(press, ratio): recent(layers, heads, CONTEXT, ratio) for press in PRESSES for ratio in RATIOS}
    kept[ALIKE][:] = kept[ALIKE][0, 0]
    return Presses("0.5.5", "5.2.0", [kept])


@pytest.fixture(scope="module")
def report(books: Any, case: Case, presses: Presses) -> dict[str, Any]:
    measured = measure(books.model, books.profile, [case], presses, lambda _: None)
    hardware = {"cpu": "a CPU", "cores": 1, "torch": "2", "commit": "abc", "date": "today"}
    return {"hardware": hardware, "model": "books-3m", "profile": "books", **measured}


def points(report: dict[str, Any], family: str, press: str = "") -> list[dict[str, Any]]:
    return [each for each in report["points"] if each["family"] == family and each["press"] == press]


def test_dropping_positions_equals_masking_them(
    books: Any, case: Case, presses: Presses, report: dict[str, Any]
) -> None:
    kept = presses.kept[0][ALIKE]
    with torch.no_grad():
        (chunk,) = prefill(books.model, case.context[None], books.layout)
        answers = []
        for dtype, seen in ((torch.float32, np.ones(CONTEXT, bool)), (torch.bfloat16, kept[0, 0])):
            cache = empty_cache()
            for layer in range(books.layout.num_layers):
                units = (chunk.keys[layer], chunk.values[layer])
                cache.update(*(unit.to(dtype).float().transpose(0, 1)[None] for unit in units), layer)
            mask = torch.cat([torch.from_numpy(seen), torch.ones(len(case.rest), dtype=torch.bool)])[None].long()
            positions = torch.arange(CONTEXT, CONTEXT + len(case.rest))[None]
            read = books.model(
                input_ids=case.rest[None], attention_mask=mask, position_ids=positions,
                **cache_argument(books.model, cache),
            )  # fmt: skip
            answers.append(read.logits[:, FIRST - 1 : -1].float().log_softmax(-1))
        (kl,), (loss,), _ = compare(answers[0], answers[1], case.rest[None, FIRST:])
    (point,) = [each for each in points(report, DROPPED, ALIKE[0]) if each["ratio"] == ALIKE[1]]
    assert kl > 1e-3
    assert point["kl"] == pytest.approx(kl, rel=1e-3) and point["delta_nll"] == pytest.approx(loss, rel=1e-2, abs=1e-4)
    assert report["texts"][0]["nll_without_context"] > report["texts"][0]["nll"]


def test_sizes_are_those_of_what_is_kept(report: dict[str, Any]) -> None:
    whole = report["bytes_per_token"]
    for wide, narrow in zip(points(report, DROPPED, PRESSES[0]), points(report, DROPPED_FP8, PRESSES[0]), strict=True):
        assert wide["bytes_per_token"] == whole * int(CONTEXT * (1 - wide["ratio"])) / CONTEXT
        assert narrow["bytes_per_token"] == wide["bytes_per_token"] / 2
    plain = [each["bytes_per_token"] for each in points(report, CUVEE) if isinstance(each["quality"], float)]
    assert plain == sorted(plain, reverse=True)
    # What is dropped takes fewer bits than a half of what all tokens take.
    for few, many in zip(
        points(report, BY_CLASSES, "TOVAPress")[3:], points(report, BY_CLASSES, "TOVAPress"), strict=False
    ):
        assert (few["ratio"], many["ratio"]) == (0.75, 0.5) and few["quality"] == many["quality"]
        assert few["bytes_per_token"] < many["bytes_per_token"]
        assert few["kl"] > many["kl"]


def test_the_coarsest_class_codes_less_and_less(report: dict[str, Any]) -> None:
    rows = report["coarsest"]
    components = [each["components"] for each in rows]
    assert components == sorted(components, reverse=True) and components[-1] == 0 < components[0]
    assert all(each["components"] <= each["neutral_components"] for each in rows)


def test_the_report_as_tables_and_as_a_plot(report: dict[str, Any], tmp_path: Path) -> None:
    text = eviction_markdown(report)
    for heading in ("orchard: 1 x 192 tokens", "Dropped positions, at their own KL", "the coarsest class"):
        assert heading in text
    assert "| dropped, FP8 | SnapKV | 0.9375 |" in text and "kvpress 0.5.5" in text
    save_figure(draw_eviction_report(report), tmp_path / "plot.svg")
    assert "bytes per token" in (tmp_path / "plot.svg").read_text()
    json.dumps(report, allow_nan=False)


def test_curves_are_read_between_their_points() -> None:
    curve = Curve(CUVEE, "", 0.0, [10, 100, 1000], [1e-1, 1e-2, 1e-4], [3.0, 2.0, 0.0])
    kl, loss = kl_at(curve, 10**1.5) or (0, 0)
    assert kl == pytest.approx(10**-1.5) and loss == pytest.approx(2.5)
    assert kl_at(curve, 9) is None and kl_at(curve, 1001) is None
    assert size_at(curve, 1e-3) == pytest.approx(10**2.5) and size_at(curve, 1) == pytest.approx(10)
    assert size_at(curve, 1e-5) is None
    bumpy = replace(curve, kls=[1e-1, 1e-3, 1e-2])  # more bytes, and more KL, by chance
    assert size_at(bumpy, 1e-3) == pytest.approx(100)


def test_weights_give_the_classes_that_they_stand_for(books: Any) -> None:
    codec = Codec(books.profile, step=0.5)
    (chunk,) = prefill(books.model, books.orchard[:1, :CONTEXT], books.layout)
    classes = soft.token_classes(codec, codec.encode(chunk))
    assert classes.shape == (books.layout.num_layers, CONTEXT)
    weights = soft.weights_of_classes(classes)

    def found(given: Any) -> Any:
        return soft.token_classes(codec, codec.encode(chunk, importance=given)).mean(0)

    level = classes.mean() - NEUTRAL  # the neutral class stands for the mean of all weights
    assert np.abs(found(weights) - np.clip(classes.mean(0) - level, 0, CLASSES - 1)).max() <= 1
    kept = recent(books.layout.num_layers, books.layout.layers[0].kv_heads, CONTEXT, SOFT_RATIOS[0])
    dropped = soft.votes([kept]) == 0
    assert 0.4 < dropped.mean() < 0.6
    in_classes, by_itself = found(soft.evicted(weights, kept, 0.5)), found(soft.alone(weights, kept, 0.5, 2))
    assert (in_classes[dropped] == CLASSES - 1).all() and (by_itself[dropped] >= CLASSES - 2).all()
    assert abs(in_classes[~dropped].mean() - NEUTRAL) < 0.5
    assert abs(by_itself[~dropped].mean() - (NEUTRAL - 4)) < 0.5  # two octaves are four classes


def test_what_is_read(tmp_path: Path) -> None:
    article = [
        {
            "context": f"The number of {n} is {7 * n}.",
            "qas": [{"question": f"Of {n}?", "answers": [{"text": str(7 * n)}]}],
        }
        for n in range(10)
    ]
    data = {"data": [{"paragraphs": article[:5]}, {"paragraphs": article[5:]}]}
    (tmp_path / "xquad.en.json").write_text(json.dumps(data))
    tokenizer = load_tokenizer("books-3m")
    cases = question_cases("books-3m", tmp_path, 2, any_version=True)
    assert len(cases) == 2
    for number, case in zip((0, 5), cases, strict=True):
        context, rest = str(tokenizer.decode(case.context)), case.rest
        assert context.count("The number of") == PASSAGES and f"is {7 * number}." in context
        assert str(tokenizer.decode(rest[: case.first])).endswith(f"Question: Of {number}?\nAnswer:")
        assert str(tokenizer.decode(rest[case.first :])).strip() == str(7 * number)
    (text,) = text_cases("orchard", "books-3m", 1)
    assert (text.text, len(text.context), len(text.rest), text.first) == ("orchard", CACHED, SCORED, 1)


def packed(*heads: str) -> str:
    bits = np.array([[[int(bit) for bit in head] for head in heads]])
    return base64.b64encode(np.packbits(bits).tobytes()).decode()


def answer(**changes: Any) -> str:
    told = {"kvpress": "0.5.5", "transformers": "5.2.0", "layers": 1, "heads": 2}
    return json.dumps({**told, "kept": [{"KnormPress": [packed("10010", "11000")]}], **changes})


def read(text: str) -> Presses:
    return read_presses(text, [[5, 6, 7, 8, 9]], ["KnormPress"], [0.5])


def test_what_the_worker_writes_is_read() -> None:
    (kept,) = read(answer()).kept
    assert kept["KnormPress", 0.5].tolist() == [[[True, False, False, True, False], [True, True, False, False, False]]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"^presses: must be what presses_worker\.py writes"),
        ("[]", r"^presses: must be what presses_worker\.py writes"),
        (answer(kept=[]), "^presses: must be for 1 contexts, got 0"),
        (answer(kept=[{}]), r"^presses: must be what presses_worker\.py writes \(KeyError: 'KnormPress'\)"),
        (answer(kept=[{"KnormPress": []}]), r"^presses: must be what presses_worker\.py writes \(ValueError"),
        (answer(kept=[{"KnormPress": ["?"]}]), "^presses: KnormPress at 0.5 must be base64"),
        (answer(layers=2), r"^presses: KnormPress at 0.5 must hold 20 bits for \[2, 2, 5\], got 16"),
        (answer(kept=[{"KnormPress": [packed("10010", "10000")]}]), "must keep equally many positions in all heads"),
        (answer(kept=[{"KnormPress": [packed("00000", "00000")]}]), "must keep equally many positions in all heads"),
    ],
)  # fmt: skip
def test_another_answer_is_refused(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        read(text)


def test_an_environment_without_kvpress(tmp_path: Path) -> None:
    for python, message in (
        (tmp_path / "python", r"must be the interpreter .* \(No such file or directory\): make one with"),
        (Path("/bin/true"), "could not run kvpress's presses: it ended with status 0$"),
        (Path(sys.executable), r"kvpress is not installed in .*: pip install kvpress==0\.5\.5$"),
    ):
        with pytest.raises(InputError, match=f"^python: .*{message}"):
            run_presses(python, tmp_path, [[1, 2]], ["KnormPress"], [0.5])


def test_what_cannot_be_measured(books: Any, fitted: Any, tmp_path: Path) -> None:
    other, plain = (tmp_path / f"{name}.safetensors" for name in ("other", "plain"))
    fitted("gqa", "layer").save(other)
    books.profile.plain.save(plain)
    for profile, sequences, texts, message in (
        (other, 1, (), "a profile of another model"),
        (plain, 1, (), "must predict tokens and classes"),
        (plain, 0, (), "must not both be 0"),
        (plain, 1, ("orchard", str(tmp_path / "orchard")), "must have different names"),
    ):
        with pytest.raises(InputError, match=message):
            run_eviction_bench("books-3m", profile, Path("python"), sequences, 0, texts)
