"""The bundled model and texts."""

import hashlib
from typing import Any

import pytest
import torch
from torch import Tensor

from cuvee.calibration.bundled import CALIBRATION_TEXTS, EVALUATION_TEXTS, TEXTS, bundled_model_path, bundled_text
from cuvee.calibration.corpus import BUNDLED_MODEL, load_bundled_model, read_corpus, spread_sequences
from cuvee.calibration.sequences import LENGTH, PREFIX, reread
from cuvee.codec.errors import InputError

TEXT_FOLDER = bundled_model_path().parents[1] / "texts"


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
    model, _ = bundled
    repeated = reread(spread_sequences([read_corpus("orchard", BUNDLED_MODEL)], LENGTH, 6))[::2]
    cached = nll_of_tails(model, repeated, PREFIX, cached=True)
    alone = nll_of_tails(model, repeated, PREFIX, cached=False)
    assert cached < alone - 1.5


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool])
def test_model_refuses_a_dtype_without_fractions(dtype: torch.dtype) -> None:
    with pytest.raises(InputError, match=r"^dtype: "):
        load_bundled_model(dtype)


def test_the_texts_are_those_whose_properties_are_known(bundled: tuple[Any, Any]) -> None:
    """Plain ASCII of at least 3,000 words, of which no two share a phrase of seven words; three of them are for tests.

    Figures are compared with those of other days: the texts stay as they are.
    """
    files = sorted(TEXT_FOLDER.glob("*.txt"))
    assert {file.stem for file in files} == {*TEXTS} == {*CALIBRATION_TEXTS, *EVALUATION_TEXTS} and len(files) == 6
    content = b"".join(file.read_bytes() for file in files)
    assert hashlib.sha256(content).hexdigest() == "7286b38e68db12a906388b6c4dfa68649b76b91ef58619daea8e603720df446b"
    assert all(bundled[1].decode(bundled[1](bundled_text(name)).input_ids) == bundled_text(name) for name in TEXTS)


@pytest.mark.parametrize("name", ["", "emma", "../texts/harbour", "harbour.txt"])
def test_unknown_text(name: str) -> None:
    with pytest.raises(
        InputError, match=r"^name: must be one of harbour, millrace, postroad, orchard, lantern, garrison, got "
    ):
        bundled_text(name)
