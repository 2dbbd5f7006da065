"""The default calibration text: its kinds, their shares, and what makes each of them what it is."""

from __future__ import annotations

import doctest
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.conftest import BOS

from cuvee.calibration import kinds as module
from cuvee.calibration.bundled import load_bundled_model
from cuvee.calibration.kinds import KINDS, REREAD, SAMPLES, mixture, mixture_text, tokenized
from cuvee.codec.errors import InputError
from cuvee.codec.learning.calibrate import calibrate

LENGTH = 64
SHARES = {
    "prose": 0.15, "encyclopaedia": 0.15, "tokenized": 0.15, "code": 0.2, "dialogue": 0.1, "tables": 0.05,
    "reread": 0.08, "samples": 0.12,
}  # fmt: skip


@pytest.fixture(scope="module")
def bundled() -> tuple[Any, Any]:
    return load_bundled_model()


@pytest.fixture(scope="module")
def made(bundled: tuple[Any, Any]) -> dict[str, torch.Tensor]:
    return mixture(*bundled, sequences=24, length=LENGTH)


def test_kinds_and_shapes(made: dict[str, torch.Tensor], bundled: tuple[Any, Any]) -> None:
    assert tuple(made) == KINDS == tuple(SHARES)
    vocabulary = bundled[0].config.vocab_size
    for kind, rows in made.items():
        assert rows.dtype == torch.int64 and rows.device.type == "cpu"
        assert rows.shape == (max(round(24 * SHARES[kind]), 3), LENGTH), kind
        assert int(rows.min()) >= 0 and int(rows.max()) < vocabulary
        assert len({tuple(row.tolist()) for row in rows}) == len(rows), f"{kind}: every sequence is another one"


def test_the_same_arguments_give_the_same_text(made: dict[str, torch.Tensor], bundled: tuple[Any, Any]) -> None:
    again, other = (mixture(*bundled, sequences=24, length=LENGTH, seed=seed) for seed in (0, 1))
    for kind, rows in made.items():
        assert torch.equal(again[kind], rows)
        assert torch.equal(other[kind], rows) == (kind not in (REREAD, SAMPLES)), kind


def test_sequences_are_spread_over_their_text(made: dict[str, torch.Tensor], bundled: tuple[Any, Any]) -> None:
    """One in the first half of a text and one in the second, as they stand there."""
    tokenizer = bundled[1]
    for kind in KINDS[:-2]:
        ids = torch.cat([torch.tensor(tokenizer(text).input_ids) for text in mixture_text(kind, tokenizer)])
        places = [
            next(at for at in range(0, len(ids), LENGTH) if torch.equal(ids[at : at + LENGTH], row))
            for row in made[kind]
        ]
        assert places == sorted(places) and places[0] == 0 and places[-1] > len(ids) / 2


def test_reread_rows_repeat_a_part_of_their_cache(made: dict[str, torch.Tensor]) -> None:
    prefix = 3 * LENGTH // 4
    for row in made[REREAD]:
        tail = row[prefix:]
        assert any(torch.equal(row[at : at + len(tail)], tail) for at in range(prefix - len(tail) + 1))


def test_samples_begin_as_the_texts_do(bundled: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def sample(model: Any, count: int, length: int, seed: int, **arguments: Any) -> torch.Tensor:
        asked.append({"count": count, "length": length, "seed": seed, **arguments})
        return torch.zeros(count, length, dtype=torch.int64)

    monkeypatch.setattr(module, "sample_text", sample)
    rows = mixture(*bundled, sequences=100, length=LENGTH, seed=5, progress=True)
    assert rows[SAMPLES].shape == (12, LENGTH)
    (call,) = asked
    assert (call["count"], call["length"], call["seed"], call["progress"]) == (12, LENGTH, 5, True)
    starts = call["starts"]
    assert starts.shape == (12, 1) and len(set(starts.flatten().tolist())) > 6
    firsts: set[int] = set()
    for kind in KINDS[:-2]:
        ids = torch.cat([torch.tensor(bundled[1](text).input_ids) for text in mixture_text(kind, bundled[1])])
        firsts |= set(ids[::LENGTH].tolist())
    assert set(starts.flatten().tolist()) <= firsts


def test_every_sequence_begins_as_the_tokenizer_begins_a_text(bundled: tuple[Any, Any], with_bos: Any) -> None:
    """Models whose every prompt starts with BOS never see a sequence without."""
    made = mixture(bundled[0], with_bos, sequences=24, length=LENGTH)
    assert tuple(made) == KINDS
    for kind, rows in made.items():
        assert rows.shape[1] == LENGTH
        assert (rows[:, 0] == BOS).all(), kind
        assert (rows[:, 1] != BOS).any(), kind


def test_texts_that_are_too_short_are_left_out(bundled: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile needs three sequences of a kind; one with fewer would make it refuse them all."""
    tokenizer = bundled[1]
    lengths = {"prose": 6, "encyclopaedia": 3, "tokenized": 2, "code": 1, "dialogue": 0, "tables": 40}
    texts = {
        kind: [tokenizer.decode(tokenizer("the quick brown fox " * 2000).input_ids[: n * LENGTH + 5])]
        for kind, n in lengths.items()
    }
    monkeypatch.setattr(module, "mixture_text", lambda kind, _: texts[kind])
    made = mixture(*bundled, sequences=100, length=LENGTH, samples=False)
    # Every second row of prose and encyclopaedia may be re-read: 3 + 1.
    assert {kind: len(rows) for kind, rows in made.items()} == {
        "prose": 6, "encyclopaedia": 3, "tables": 5, REREAD: 4
    }  # fmt: skip
    texts["prose"] = texts["code"]
    assert tuple(mixture(*bundled, sequences=100, length=LENGTH, samples=False)) == ("encyclopaedia", "tables")
    monkeypatch.setattr(module, "mixture_text", lambda kind, _: ["short"])
    assert mixture(*bundled, sequences=100, length=LENGTH, samples=False) == {}
    # The model can still be asked.
    assert tuple(mixture(*bundled, sequences=24, length=8)) == (SAMPLES,)


@pytest.mark.parametrize(("sequences", "length"), [(23, 64), (0, 64), (-1, 64), (24, 7), (24, 0)])
def test_bad_arguments(sequences: int, length: int, bundled: tuple[Any, Any]) -> None:
    name, least, value = ("length", 8, length) if sequences == 24 else ("sequences", 24, sequences)
    with pytest.raises(InputError, match=f"^{name}: must be at least {least}, got {value}$"):
        mixture(*bundled, sequences=sequences, length=length)


def test_dialogue_with_and_without_a_chat_template() -> None:
    plain = mixture_text("dialogue")
    assert len(plain) > 10
    assert all(re.match(r"(System|User): \S", text) and "\n\nAssistant: " in text for text in plain)
    assert mixture_text("dialogue", SimpleNamespace(chat_template=None)) == plain  # type: ignore[arg-type]

    class Templated:
        chat_template = "some template"

        def apply_chat_template(self, turns: list[dict[str, str]], tokenize: bool) -> str:
            assert tokenize is False
            return "".join(f"<{turn['role']}>{turn['content']}</>" for turn in turns)

    rendered = mixture_text("dialogue", Templated())  # type: ignore[arg-type]
    assert len(rendered) == len(plain)
    for text, other in zip(rendered, plain, strict=True):
        assert text.startswith(("<user>", "<system>")) and "<assistant>" in text and text.endswith("</>")
        roles = re.findall(r"<(user|system|assistant)>", text)
        assert [role.capitalize() for role in roles] == re.findall(r"(?:^|\n\n)(User|System|Assistant): ", other)


# Tokenized text -------------------------------------------------------------------------------------------------------


def test_the_example_is_true() -> None:
    results = doctest.testmod(module)
    assert results.attempted >= 1 and not results.failed


@pytest.mark.parametrize(
    ("plain", "want"),
    [
        ("Well-known.", "Well @-@ known ."),
        ("state-of-the-art", "state @-@ of @-@ the @-@ art"),
        ("3.5 m, 1,200 km", "3 @.@ 5 m , 1 @,@ 200 km"),
        ("1,234,567.8", "1 @,@ 234 @,@ 567 @.@ 8"),
        ("The ship's crew didn't", "The ship 's crew did n't"),
        ("(a [b]) 5% $3 £4", "( a [ b ] ) 5 % $ 3 £ 4"),
        ("One.\n\nTwo;  three", "One .\n\nTwo ; three"),
        ("", ""),
    ],
)
def test_marks_stand_apart(plain: str, want: str) -> None:
    assert tokenized(plain) == want


def test_rare_words_are_gone_in_long_texts_only() -> None:
    short = " ".join(f"unusual{chr(97 + i % 26)}{chr(97 + i // 26)}" for i in range(100))
    assert "<unk>" not in tokenized(short)
    long = "the common words of a text " * 200 + short
    got = tokenized(long)
    assert 30 <= got.count("<unk>") <= 35, "every third of those that come once"
    assert got.count("common words") == 200


# Calibration ----------------------------------------------------------------------------------------------------------


def test_a_profile_can_be_learned_from_it(made: dict[str, torch.Tensor], tiny_model: Callable[..., Any]) -> None:
    tiny = tiny_model("llama")
    texts = {kind: rows % 61 for kind, rows in made.items()}
    profile = calibrate(tiny, texts, "head", progress=False)
    assert tuple(profile.curves) == KINDS
