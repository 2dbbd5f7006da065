"""The default calibration text: its kinds, their shares, and what makes each of them what it is."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.conftest import BOS
from transformers import LlamaConfig, LlamaForCausalLM

from cuvee.calibration import kinds as module
from cuvee.calibration.kinds import KINDS, LONG, REREAD, SAMPLES, mixture, mixture_text, sampling_cost, tokenized
from cuvee.codec.errors import InputError

LENGTH = 64
SHARES = {
    "prose": 0.15, "encyclopaedia": 0.15, "tokenized": 0.15, "code": 0.2, "dialogue": 0.1, "tables": 0.05,
    "reread": 0.08, "samples": 0.12,
}  # fmt: skip


@pytest.fixture(scope="module")
def made(bundled: tuple[Any, Any]) -> dict[str, torch.Tensor]:
    return mixture(*bundled, sequences=24, length=LENGTH)


def test_kinds_and_shapes(made: dict[str, torch.Tensor], bundled: tuple[Any, Any]) -> None:
    assert tuple(SHARES) == KINDS and tuple(made) == (*KINDS[:-1], LONG, SAMPLES)
    assert made[LONG].shape == (3, 2 * LENGTH)
    vocabulary = bundled[0].config.vocab_size
    for kind, rows in made.items():
        assert rows.dtype == torch.int64 and rows.device.type == "cpu"
        assert kind == LONG or rows.shape == (max(round(24 * SHARES[kind]), 3), LENGTH), kind
        assert int(rows.min()) >= 0 and int(rows.max()) < vocabulary
        assert len({tuple(row.tolist()) for row in rows}) == len(rows), f"{kind}: every sequence is another one"


def test_the_same_arguments_give_the_same_text(made: dict[str, torch.Tensor], bundled: tuple[Any, Any]) -> None:
    again, other = (mixture(*bundled, sequences=24, length=LENGTH, seed=seed) for seed in (0, 1))
    for kind, rows in made.items():
        assert torch.equal(again[kind], rows)
        assert torch.equal(other[kind], rows) == (kind not in (REREAD, SAMPLES)), kind


def test_longer_sequences_need_a_model_with_positions_for_them(bundled: tuple[Any, Any]) -> None:
    for limit, long in ((2 * LENGTH, True), (2 * LENGTH - 1, False), (None, True)):
        model: Any = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=limit))
        assert (LONG in mixture(model, bundled[1], sequences=24, length=LENGTH, samples=False)) == long


def test_reread_rows_repeat_a_part_of_their_cache(made: dict[str, torch.Tensor]) -> None:
    prefix = 3 * LENGTH // 4
    for row in made[REREAD]:
        tail = row[prefix:]
        assert any(torch.equal(row[at : at + len(tail)], tail) for at in range(prefix - len(tail) + 1))


def test_every_sequence_begins_as_the_tokenizer_begins_a_text(bundled: tuple[Any, Any], with_bos: Any) -> None:
    """Models whose every prompt starts with BOS never see a sequence without."""
    made = mixture(bundled[0], with_bos, sequences=24, length=LENGTH)
    assert tuple(made) == (*KINDS[:-1], LONG, SAMPLES)
    for kind, rows in made.items():
        assert rows.shape[1] == (2 * LENGTH if kind == LONG else LENGTH)
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
        "prose": 6, "encyclopaedia": 3, "tables": 5, REREAD: 4, LONG: 3
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


def test_a_step_of_a_small_model_takes_as_long_as_its_calls(bundled: tuple[Any, Any]) -> None:
    """On one core a step took the time of 94 tokens in float32 and 207 in bfloat16."""
    assert 94 < sampling_cost(bundled[0], 96, 512) / 512 < 207
    with torch.device("meta"):
        large = LlamaForCausalLM(LlamaConfig())
    assert sampling_cost(large, 96, 512) / 512 == pytest.approx(32 + 0.12 * 96, abs=1)
