"""Sequences made to repeat their prefix, or sampled from a model."""

from typing import Any

import pytest
import torch
from torch import Tensor

from cuvee.calibration.sequences import LENGTH, PREFIX, reread, sample_text
from cuvee.codec.errors import InputError


@pytest.fixture
def rows() -> Tensor:
    """Random rows in which a repeated span cannot come about by chance."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 1 << 40, (5, LENGTH), generator=generator)


def test_reread_repeats_a_span_in_every_second_row(rows: Tensor) -> None:
    before = rows.clone()
    result = reread(rows)
    assert torch.equal(rows, before)
    assert result.dtype == torch.int64
    assert result.shape == rows.shape
    assert torch.equal(result[:, :PREFIX], rows[:, :PREFIX])
    assert torch.equal(result[1::2], rows[1::2])
    tail = LENGTH - PREFIX
    starts = []
    for row in result[::2]:
        (start,) = (row[:PREFIX] == row[PREFIX]).nonzero().flatten().tolist()
        assert 0 <= start < PREFIX - tail - 1
        assert torch.equal(row[PREFIX:], row[start : start + tail])
        starts.append(start)
    assert len(set(starts)) == len(starts)


def test_reread_draws_every_start_and_no_other() -> None:
    # 8 tokens, 6 of them cached: a tail of 2, and starts in [0, 3).
    result = reread(torch.arange(8).repeat(200, 1), prefix=6)
    assert set(result[::2, 6].tolist()) == {0, 1, 2}


@pytest.mark.parametrize(("length", "smallest"), [(4, 3), (5, 4), (8, 5), (9, 6), (512, 257)])
def test_reread_accepts_exactly_the_prefixes_it_says(length: int, smallest: int) -> None:
    tokens = torch.zeros(1, length, dtype=torch.long)
    reread(tokens, prefix=smallest)
    reread(tokens, prefix=length - 1)
    for prefix in (-1, 0, smallest - 1, length, length + 1):
        with pytest.raises(InputError, match=rf"^prefix: must lie in \[{smallest}, {length - 1}\]"):
            reread(tokens, prefix=prefix)


def test_sample_is_what_the_model_predicts(bundled: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than are sampled together; their mean surprise is the entropy of the predictions, end or not."""
    model, _ = bundled
    own = model.generation_config
    monkeypatch.setattr(own, "temperature", 0.1)
    sample = sample_text(model, count=70, length=40, seed=5)
    assert model.generation_config is own
    assert sample.shape == (70, 40) and len({tuple(row) for row in sample.tolist()}) == 70
    assert torch.equal(sample_text(model, count=70, length=40, seed=5), sample), "the same seed"
    torch.manual_seed(0)
    state = torch.get_rng_state()
    assert not torch.equal(sample_text(model, count=70, length=40, seed=6), sample)
    assert torch.equal(torch.get_rng_state(), state), "the caller's generator is left alone"
    with torch.no_grad():
        logits = model(input_ids=sample).logits[:, :-1].double().log_softmax(-1)
    surprise = -logits.gather(-1, sample[:, 1:, None]).mean()
    entropy = -(logits.exp() * logits).sum(-1).mean()
    assert float(surprise) == pytest.approx(float(entropy), rel=0.05)


def test_sample_goes_on_from_what_is_given(bundled: tuple[Any, Any]) -> None:
    starts = torch.tensor([[5, 6, 7], [7, 6, 5]])
    sample = sample_text(bundled[0], count=2, length=8, seed=0, starts=starts)
    assert sample.shape == (2, 8) and torch.equal(sample[:, :3], starts)
    # The draws of the other tokens depend on all of them.
    assert not torch.equal(sample[0, 3:], sample[1, 3:])
    assert sample_text(bundled[0], count=2, length=3, seed=0, starts=starts).tolist() == starts.tolist()


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("count", {"count": 0}),
        ("length", {"length": 0}),
        ("starts", {"starts": torch.tensor([1])}),
        ("starts", {"starts": torch.tensor([[1], [2]])}),
        ("starts", {"starts": torch.tensor([[1, 2, 3]])}),
        ("starts", {"starts": torch.empty(1, 0, dtype=torch.int64)}),
    ],
)
def test_sample_names_the_bad_argument(bundled: tuple[Any, Any], field: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=rf"^{field}: "):
        sample_text(bundled[0], **({"count": 1, "length": 2, "seed": 0} | arguments))


@pytest.mark.parametrize(
    ("bos", "eos", "first"), [(5, 7, 5), (None, 7, 7), (None, [9, 8], 9), (None, None, None), (None, [], None)]
)
def test_sample_starts_from_bos_or_eos(
    bundled: tuple[Any, Any], bos: Any, eos: Any, first: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = bundled
    monkeypatch.setattr(model.config, "bos_token_id", bos)
    monkeypatch.setattr(model.config, "eos_token_id", eos)
    if first is None:
        with pytest.raises(InputError, match=r"^model: "):
            sample_text(model, count=1, length=2, seed=0)
    else:
        assert sample_text(model, count=1, length=2, seed=0)[0, 0] == first
