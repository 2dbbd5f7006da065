"""The bundled model and texts, and the re-read protocol."""

import re
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cuvee.codec.data.bundled import (
    CALIBRATION_TEXTS,
    EVALUATION_TEXTS,
    TEXTS,
    bundled_model_path,
    bundled_text,
    load_bundled_model,
)
from cuvee.codec.errors import InputError
from cuvee.codec.learning.sequences import LENGTH, PREFIX, SEED, reread, sample_text, split_sequences

TEXT_FOLDER = bundled_model_path().parents[1] / "texts"
README = (TEXT_FOLDER / "README.md").read_text(encoding="ascii")


@pytest.fixture(scope="module")
def bundled() -> tuple[Any, Any]:
    return load_bundled_model()


@pytest.fixture
def rows() -> Tensor:
    """Random rows in which a repeated span cannot come about by chance."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 1 << 40, (5, LENGTH), generator=generator)


def nll_of_tails(model: Any, rows: Tensor, prefix: int, *, cached: bool) -> float:
    """Mean NLL in nats of tokens [prefix + 1:], given the whole row or only the row from `prefix` on."""
    seen = rows if cached else rows[:, prefix:]
    with torch.no_grad():
        logits = model(input_ids=seen).logits[:, -(rows.shape[1] - prefix) : -1]
    return float(torch.nn.functional.cross_entropy(logits.transpose(1, 2), rows[:, prefix + 1 :]))


# --- data


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


def test_model_path_is_what_from_pretrained_reads() -> None:
    names = {file.name for file in bundled_model_path().iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= names


def test_loading_leaves_the_progress_bar_setting_alone() -> None:
    from transformers.utils import logging

    assert logging.is_progress_bar_enabled()
    load_bundled_model()
    assert logging.is_progress_bar_enabled()


def test_loading_draws_no_progress_bar(capfd: pytest.CaptureFixture[str]) -> None:
    load_bundled_model()
    assert capfd.readouterr() == ("", "")


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


def test_texts_readme_is_true(bundled: tuple[Any, Any]) -> None:
    table = re.findall(r"^\| `(\w+)\.txt` \| (\w+) \| ([\d,]+) \| ([\d,]+) \|$", README, flags=re.MULTILINE)
    expected = []
    for name in TEXTS:
        text = bundled_text(name)
        purpose = "calibration" if name in CALIBRATION_TEXTS else "evaluation"
        expected.append((name, purpose, f"{len(text.split()):,}", f"{len(bundled[1](text).input_ids):,}"))
    assert table == expected


def runs_of_words(text: str, length: int) -> list[tuple[str, ...]]:
    """Every `length` consecutive words of `text`, without punctuation and case."""
    words = re.findall(r"[a-z']+", text.lower())
    return list(zip(*(words[i:] for i in range(length)), strict=False))


@pytest.mark.parametrize(("one", "two"), list(combinations(TEXTS, 2)))
def test_two_texts_share_no_phrase(one: str, two: str) -> None:
    first, second = (set(runs_of_words(bundled_text(name), 7)) for name in (one, two))
    assert len(first) > 3000
    assert first.isdisjoint(second)


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_does_not_repeat_itself(name: str) -> None:
    """A language model copies a passage that it has seen, which would make the ordinary rows look easy."""
    runs = runs_of_words(bundled_text(name), 9)
    assert len(set(runs)) == len(runs)


@pytest.mark.parametrize(("one", "two"), list(combinations(TEXTS, 2)))
def test_two_texts_share_no_character(one: str, two: str) -> None:
    titled = r"(?:Mr|Mrs|Miss|Dr|Captain|Major|Colonel|Sergeant|Aunt)\.? ([A-Z][a-z]+)"
    first, second = (set(re.findall(titled, bundled_text(name))) for name in (one, two))
    assert min(len(first), len(second)) >= 4
    assert first.isdisjoint(second)


@pytest.mark.parametrize("name", ["", "emma", "../texts/harbour", "harbour.txt"])
def test_unknown_text(name: str) -> None:
    with pytest.raises(InputError, match=r"^name: .*harbour, millrace, postroad, orchard, lantern, garrison$"):
        bundled_text(name)


# --- split_sequences


def test_split_cuts_consecutive_sequences() -> None:
    cut = split_sequences(torch.arange(100, dtype=torch.int32), count=3, length=7, offset=11)
    assert cut.dtype == torch.int64
    assert torch.equal(cut, torch.arange(11, 32).view(3, 7))


def test_split_takes_the_text_to_its_last_token() -> None:
    assert split_sequences(torch.arange(10), 2, 4, 2)[-1, -1] == 9
    with pytest.raises(InputError, match=r"^token_ids: has 10 tokens, but 2 x 4 from offset 3 need 11"):
        split_sequences(torch.arange(10), 2, 4, 3)


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("token_ids", {"token_ids": torch.zeros(2, 10, dtype=torch.long)}),
        ("token_ids", {"token_ids": torch.zeros(10)}),
        ("token_ids", {"token_ids": torch.zeros(10, dtype=torch.bool)}),
        ("count", {"count": 0}),
        ("length", {"length": 0}),
        ("offset", {"offset": -1}),
    ],
)
def test_split_names_the_bad_argument(field: str, arguments: dict[str, Any]) -> None:
    good: dict[str, Any] = {"token_ids": torch.arange(10), "count": 1, "length": 2, "offset": 0}
    with pytest.raises(InputError, match=rf"^{field}: "):
        split_sequences(**(good | arguments))


# --- reread


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


def test_reread_is_deterministic(rows: Tensor) -> None:
    assert torch.equal(reread(rows), reread(rows, prefix=PREFIX, seed=SEED))
    assert not torch.equal(reread(rows), reread(rows, seed=SEED + 1))
    assert torch.equal(reread(rows)[:3], reread(rows[:3]))


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


@pytest.mark.parametrize("tokens", [torch.zeros(LENGTH, dtype=torch.long), torch.zeros(2, LENGTH)])
def test_reread_names_the_bad_tokens(tokens: Tensor) -> None:
    with pytest.raises(InputError, match=r"^tokens: "):
        reread(tokens)


def test_reread_of_no_rows() -> None:
    assert reread(torch.zeros(0, LENGTH, dtype=torch.long)).shape == (0, LENGTH)


# --- sample_text


class Fixed(torch.nn.Module):
    """A stand-in for a model: the same logits whatever came before, and no use for a cache."""

    def __init__(self, config: Any, logits: Tensor) -> None:
        super().__init__()
        self.config = config
        self.logits = logits
        self.device = torch.device("cpu")

    def forward(self, input_ids: Tensor, **_: object) -> SimpleNamespace:
        return SimpleNamespace(logits=self.logits.expand(*input_ids.shape, -1))


def test_sample_is_deterministic(bundled: tuple[Any, Any]) -> None:
    model, _ = bundled
    sample = sample_text(model, count=3, length=24, seed=1)
    assert sample.shape == (3, 24)
    assert sample.dtype == torch.int64
    assert (sample[:, 0] == model.config.bos_token_id).all()
    assert ((sample >= 0) & (sample < model.config.vocab_size)).all()
    assert torch.equal(sample, sample_text(model, count=3, length=24, seed=1))
    assert not torch.equal(sample, sample_text(model, count=3, length=24, seed=2))
    assert len({tuple(row) for row in sample.tolist()}) == 3


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sample_reads_all_that_came_before(bundled: tuple[Any, Any], temperature: float) -> None:
    """One pass without a cache gives each token's interval of [0, 1): the draw must have fallen into it."""
    model, _ = bundled
    sample = sample_text(model, count=3, length=64, seed=5, temperature=temperature)
    assert len(set(sample.flatten().tolist())) > 30
    with torch.no_grad():
        logits = model(input_ids=sample).logits[:, :-1].double()
    upper = (logits / temperature).softmax(-1).cumsum(-1)
    lower = torch.nn.functional.pad(upper, (1, 0))
    chosen = sample[:, 1:, None]
    draws = torch.rand(64, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64).T[:, 1:]
    rounding = 1e-4
    assert (lower.gather(-1, chosen)[..., 0] <= draws + rounding).all()
    assert (upper.gather(-1, chosen)[..., 0] >= draws - rounding).all()


@pytest.mark.parametrize(("draw", "token"), [(0.0, 1), (1.0 - 2**-53, 3)])
def test_sample_never_takes_an_impossible_token(
    bundled: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, draw: float, token: int
) -> None:
    model: Any = Fixed(bundled[0].config, torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0]).log())
    monkeypatch.setattr(torch, "rand", lambda *shape, **_: torch.full(shape, draw, dtype=torch.float64))
    assert sample_text(model, count=1, length=2, seed=0)[0, 1] == token


def test_sample_follows_the_distribution(bundled: tuple[Any, Any]) -> None:
    # More rows than are sampled together, so that the split is covered too.
    p = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0])
    model: Any = Fixed(bundled[0].config, p.log())
    drawn = sample_text(model, count=130, length=101, seed=3)[:, 1:]
    frequency = torch.bincount(drawn.flatten(), minlength=6) / drawn.numel()
    assert torch.allclose(frequency, p, atol=0.015)
    assert (frequency[p == 0] == 0).all()
    assert len({tuple(row) for row in drawn.tolist()}) == 130
    hot = sample_text(model, count=64, length=101, seed=3, temperature=1e6)[:, 1:]
    frequency = torch.bincount(hot.flatten(), minlength=6) / hot.numel()
    assert torch.allclose(frequency[p > 0], torch.full((3,), 1 / 3), atol=0.03)


def test_sample_goes_on_from_what_is_given(bundled: tuple[Any, Any]) -> None:
    starts = torch.tensor([[5, 6, 7], [7, 6, 5]])
    sample = sample_text(bundled[0], count=2, length=8, seed=0, starts=starts)
    assert sample.shape == (2, 8) and torch.equal(sample[:, :3], starts)
    # The draws of the other tokens depend on all of them.
    assert not torch.equal(sample[0, 3:], sample[1, 3:])
    assert sample_text(bundled[0], count=2, length=3, seed=0, starts=starts).tolist() == starts.tolist()


def test_sample_of_one_token(bundled: tuple[Any, Any]) -> None:
    assert sample_text(bundled[0], count=2, length=1, seed=0).tolist() == [[0], [0]]


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("count", {"count": 0}),
        ("length", {"length": 0}),
        ("temperature", {"temperature": 0.0}),
        ("temperature", {"temperature": float("nan")}),
        ("temperature", {"temperature": float("inf")}),
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
    ("bos", "eos", "first"),
    [(5, 7, 5), (None, 7, 7), (None, [9, 8], 9), (None, None, None), (None, [], None)],
)
def test_sample_starts_from_bos_or_eos(bundled: tuple[Any, Any], bos: Any, eos: Any, first: int | None) -> None:
    from transformers import LlamaConfig

    config = LlamaConfig.from_dict({**bundled[0].config.to_dict(), "bos_token_id": bos, "eos_token_id": eos})
    model: Any = Fixed(config, torch.zeros(16))
    if first is None:
        with pytest.raises(InputError, match=r"^model: "):
            sample_text(model, count=1, length=2, seed=0)
    else:
        assert sample_text(model, count=1, length=2, seed=0)[0, 0] == first
