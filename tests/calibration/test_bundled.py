"""The bundled model and texts."""

import re
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from cuvee.calibration.bundled import (
    CALIBRATION_TEXTS,
    EVALUATION_TEXTS,
    TEXTS,
    bundled_model_path,
    bundled_text,
    load_bundled_model,
)
from cuvee.calibration.sequences import LENGTH, PREFIX, reread, split_sequences
from cuvee.codec.errors import InputError

TEXT_FOLDER = bundled_model_path().parents[1] / "texts"


@pytest.fixture(scope="module")
def bundled() -> tuple[Any, Any]:
    return load_bundled_model()


def nll_of_tails(model: Any, rows: Tensor, prefix: int, *, cached: bool) -> float:
    """Mean NLL in nats of tokens [prefix + 1:], given the whole row or only the row from `prefix` on."""
    seen = rows if cached else rows[:, prefix:]
    with torch.no_grad():
        logits = model(input_ids=seen).logits[:, -(rows.shape[1] - prefix) : -1]
    return float(torch.nn.functional.cross_entropy(logits.transpose(1, 2), rows[:, prefix + 1 :]))


def test_model_loads_without_a_network(bundled: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("loading the bundled model opened a connection")

    monkeypatch.setattr("socket.socket.connect", refuse)
    model, tokenizer = load_bundled_model(torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert not model.training
    assert sum(p.numel() for p in model.parameters()) == 3_443_136
    assert len(tokenizer) == model.config.vocab_size == 4096
    assert bundled[0].dtype == torch.float32


def test_model_reads_its_cache(bundled: tuple[Any, Any]) -> None:
    model, tokenizer = bundled
    ids = tokenizer(bundled_text("orchard"), return_tensors="pt").input_ids[0]
    repeated = reread(split_sequences(ids, 6))[::2]
    cached = nll_of_tails(model, repeated, PREFIX, cached=True)
    alone = nll_of_tails(model, repeated, PREFIX, cached=False)
    assert cached < alone - 1.5


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool])
def test_model_refuses_a_dtype_without_fractions(dtype: torch.dtype) -> None:
    with pytest.raises(InputError, match=r"^dtype: "):
        load_bundled_model(dtype)


@pytest.mark.parametrize("name", TEXTS)
def test_texts(bundled: tuple[Any, Any], name: str) -> None:
    text = bundled_text(name)
    assert text.isascii()
    assert "\r" not in text
    assert "  " not in text
    assert len(text.split()) >= 3000
    paragraphs = [p for p in text.split("\n\n") if len(p) > 80]
    assert len(set(paragraphs)) == len(paragraphs) > 40
    ids = bundled[1](text).input_ids
    assert len(ids) >= 9 * LENGTH
    assert bundled[1].decode(ids) == text


def test_each_text_has_one_purpose() -> None:
    assert len(set(TEXTS)) == len(TEXTS) == 6
    assert set(CALIBRATION_TEXTS).isdisjoint(EVALUATION_TEXTS)
    assert set(CALIBRATION_TEXTS) | set(EVALUATION_TEXTS) == set(TEXTS)
    assert {file.stem for file in TEXT_FOLDER.glob("*.txt")} == set(TEXTS)


def runs_of_words(text: str, length: int) -> list[tuple[str, ...]]:
    """Every `length` consecutive words of `text`, without punctuation and case."""
    words = re.findall(r"[a-z']+", text.lower())
    return list(zip(*(words[i:] for i in range(length)), strict=False))


@pytest.mark.parametrize(("one", "two"), list(combinations(TEXTS, 2)))
def test_two_texts_share_no_phrase(one: str, two: str) -> None:
    first, second = (set(runs_of_words(bundled_text(name), 7)) for name in (one, two))
    assert len(first) > 3000
    assert first.isdisjoint(second)


@pytest.mark.parametrize("name", ["", "emma", "../texts/harbour", "harbour.txt"])
def test_unknown_text(name: str) -> None:
    with pytest.raises(
        InputError, match=r"^name: must be one of harbour, millrace, postroad, orchard, lantern, garrison, got "
    ):
        bundled_text(name)
