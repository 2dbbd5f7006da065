"""The default calibration text: several kinds of bundled text, and samples of the model itself.

A profile fits the kind of text it was learned on: learned on one novel, it needs twice the bits on source code. A
mixture costs nothing on the novel and works on other text; samples of the model cover the kinds that it leaves out.

| kind | what | written for this project |
|---|---|---|
| prose | novels, essays, letters, reportage | yes |
| encyclopaedia | articles, dense with names and numbers | yes |
| tokenized | the articles as they look in corpora: punctuation set apart from words, rare words replaced | yes |
| code | source code and configuration in a dozen languages | yes |
| dialogue | conversations, in the model's chat template where it has one | yes |
| tables | tables, logs, lists, records | yes |
| reread | prose and articles whose last quarter repeats an earlier part, so the model must read its cache | yes |
| long | prose in sequences of twice the length, if the model has the positions | yes |
| samples | the model's own text, started with words from the kinds above | sampled |
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from cuvee.calibration.bundled import CALIBRATION_TEXTS, TEXTS_FOLDER, bundled_text
from cuvee.calibration.corpus import leading_ids, text_ids, with_leading
from cuvee.calibration.sequences import reread, sample_text
from cuvee.codec.errors import InputError
from cuvee.codec.models.fingerprint import model_fingerprint
from cuvee.learning.run import Run, key_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "KINDS", "MIXTURE_SEQUENCES", "REREAD", "SAMPLES", "check_mixture_size", "mixture", "mixture_text", "more_text",
    "tokenized",
]  # fmt: skip

REREAD, SAMPLES = "reread", "samples"  # the kinds that are generated, not read from files
LONG = "long"  # the kind of longer sequences
# Each kind's share of the sequences.
SHARES: Mapping[str, float] = {
    "prose": 0.15, "encyclopaedia": 0.15, "tokenized": 0.15, "code": 0.2, "dialogue": 0.1, "tables": 0.05,
    REREAD: 0.08, SAMPLES: 0.12,
}  # fmt: skip
KINDS = tuple(SHARES)
MIXTURE_SEQUENCES = 96  # default
LEAST = 3  # sequences per kind, of which two are held out to measure the curve

_STEP_TOKENS = 32  # that a forward pass takes as long for as for a step of a few rows, which reads all weights
_CALL_FLOPS = 75e6  # that a CPU computes while it calls the operations of a layer: most of a small model's step
_FOLDER = TEXTS_FOLDER / "mixture"


def mixture_text(kind: str, tokenizer: PreTrainedTokenizerBase | None = None) -> list[str]:
    """Return the texts of one kind, each a document.

    Args:
        kind: any of `KINDS` except "reread" and "samples".
        tokenizer: renders dialogues in its chat template. Without a tokenizer or a template, dialogues are plain text.

    Raises:
        InputError: the kind is unknown.
    """
    if kind == "dialogue":
        return [_conversation(turns, tokenizer) for turns in json.loads(_read("dialogue.json"))]
    if kind not in SHARES or kind in (REREAD, SAMPLES):
        raise InputError(f"kind: must be one of {', '.join(KINDS[:-2])}, got {kind!r}")
    if kind == "tokenized":
        return [tokenized(_read("encyclopaedia.txt"))]
    texts = [_read(f"{kind}.txt")]
    return texts + [bundled_text(name) for name in CALIBRATION_TEXTS] if kind == "prose" else texts


def check_mixture_size(sequences: int, length: int) -> None:
    """Raise InputError if `mixture` needs more or longer sequences."""
    for name, value, least in (("sequences", sequences, len(KINDS) * LEAST), ("length", length, 8)):
        if value < least:
            raise InputError(f"{name}: must be at least {least}, got {value}")


def mixture(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sequences: int = MIXTURE_SEQUENCES,
    length: int = 512,
    seed: int = 0,
    samples: bool = True,
    run: Run | None = None,
) -> dict[str, torch.Tensor]:
    """Make token sequences of every kind, for `cuvee.calibrate`.

    Args:
        model: the model, in evaluation mode; draws the samples.
        tokenizer: the model's tokenizer.
        sequences: approximate number of sequences to return; each kind has at least three.
        length: tokens per sequence, T.
        seed: seed of the samples.
        samples: whether to draw samples, which takes as long as generating `sequences / 7` texts of T tokens.
        run: shows progress, and keeps the samples.

    Returns:
        int64 `[N, T]` on the CPU for each kind. Every sequence begins with the tokens that the tokenizer puts before a
        text (BOS). A text too short for its share gives fewer sequences. `cuvee.calibrate` needs three sequences per
        kind, so shorter texts are left out.

    Raises:
        InputError: `sequences` or `length` is out of range.

    Example:
        >>> from cuvee.calibration.corpus import load_bundled_model
        >>> from cuvee.calibration.kinds import mixture
        >>> kinds = mixture(*load_bundled_model(), sequences=24, length=64, samples=False)
        >>> list(kinds)
        ['prose', 'encyclopaedia', 'tokenized', 'code', 'dialogue', 'tables', 'reread', 'long']
        >>> kinds["prose"].shape
        torch.Size([4, 64])
    """
    check_mixture_size(sequences, length)
    leading = leading_ids(tokenizer)
    out: dict[str, torch.Tensor] = {}
    starts: list[torch.Tensor] = []
    again: list[torch.Tensor] = []
    for kind, share in SHARES.items():
        if kind in (REREAD, SAMPLES):
            continue
        rows = _sequences(kind, tokenizer, length)
        whole = len(rows)
        if whole < LEAST:
            continue
        wanted = min(max(round(sequences * share), LEAST), whole)
        out[kind] = rows[torch.arange(wanted) * whole // wanted]
        starts.append(rows[:, : len(leading) + 1])
        if kind in ("prose", "encyclopaedia"):
            again.append(rows[torch.arange(whole) % 2 == 1])
    pool = torch.cat(again) if again else torch.empty(0)
    if len(pool) >= LEAST:
        wanted = min(max(round(sequences * SHARES[REREAD]), LEAST), len(pool))
        # `reread` changes every second row.
        chosen = pool[torch.arange(wanted) * len(pool) // wanted].repeat_interleave(2, dim=0)
        out[REREAD] = reread(chosen, 3 * length // 4, seed)[::2]
    if (limit := getattr(model.config, "max_position_embeddings", None)) is None or limit >= 2 * length:
        rows = _sequences("prose", tokenizer, 2 * length)
        if len(rows) >= LEAST:
            out[LONG] = rows[torch.arange(LEAST) * len(rows) // LEAST]
    if samples:
        count = max(round(sequences * SHARES[SAMPLES]), LEAST)
        begin = torch.cat(starts) if starts else None
        if begin is not None:
            begin = begin[torch.randperm(len(begin), generator=torch.Generator().manual_seed(seed))]
            begin = begin.repeat(-(-count // len(begin)), 1)[:count]
        out[SAMPLES] = _samples(model, count, length, seed, begin, run or Run(shown=False))
    return out


def sampling_cost(model: PreTrainedModel, sequences: int, length: int) -> float:
    """Return about what the samples of `mixture` take, as the forward pass of so many tokens."""
    weights: int = max(model.num_parameters(exclude_embeddings=True), 1)
    layers: int = model.config.get_text_config().num_hidden_layers
    calls = _CALL_FLOPS * layers / (2 * weights)
    return length * (_STEP_TOKENS + calls + SHARES[SAMPLES] * sequences)


def _samples(
    model: PreTrainedModel, count: int, length: int, seed: int, starts: torch.Tensor | None, run: Run
) -> torch.Tensor:
    """Return samples of the model, those that an interrupted run has kept if there are any."""
    if not run.keeps:
        return sample_text(model, count, length, seed, starts, run)
    run.begin("samples", key_of(model, model_fingerprint(model), count, length, seed, starts))
    rows: torch.Tensor | None = run.value("rows")
    if rows is None:
        run.put("rows", rows := sample_text(model, count, length, seed, starts, run))
    return rows


def more_text(tokenizer: PreTrainedTokenizerBase, length: int = 512) -> torch.Tensor:
    """Return all sequences of the bundled texts, for `cuvee.calibrate(more_text=)`, int64 `[N, length]`.

    `mixture` draws its sequences from these, apart from those that it generates.

    Example:
        >>> from cuvee.calibration.corpus import load_bundled_model
        >>> more_text(load_bundled_model()[1], 64).shape[1]
        64
    """
    kinds = (kind for kind in KINDS if kind not in (REREAD, SAMPLES))
    return torch.cat([_sequences(kind, tokenizer, length) for kind in kinds])


def _sequences(kind: str, tokenizer: PreTrainedTokenizerBase, length: int) -> torch.Tensor:
    """Return all whole sequences of a kind's texts, `[N, length]`."""
    leading = leading_ids(tokenizer)
    joined = torch.cat([text_ids(tokenizer, text, leading) for text in mixture_text(kind, tokenizer)])
    body = length - len(leading)
    whole = len(joined) // body
    return with_leading(leading, joined[: whole * body].view(whole, body))


def tokenized(text: str) -> str:
    """Format a text like language-modeling corpora: spaces around punctuation, `@-@` within words, no rare words.

    Models are measured on such files (Penn Treebank, WikiText), although they look unlike the text that models usually
    read. A profile learned without such punctuation loses several times as much on them.

    Example:
        >>> tokenized("A well-known river, 1,200 km long.")
        'A well @-@ known river , 1 @,@ 200 km long .'
    """
    counts = Counter(re.findall(r"[A-Za-z]+", text))
    words = sum(counts.values())
    # Every third of the long words that occur once: about 3% of all words, as in WikiText-2.
    once = sorted(word for word, count in counts.items() if count == 1 and word.islower() and len(word) > 6)
    rare = set(once[::3])
    text = re.sub(r"(?<=\w)-(?=\w)", " @-@ ", text)
    text = re.sub(r"(?<=\d)([.,])(?=\d)", r" @\1@ ", text)
    text = re.sub(r"(?<!@)([.,;:!?()\[\]\"%$£])(?!@)", r" \1 ", text)
    text = re.sub(r"(?<=\w)('s\b|n't\b)", r" \1", text)
    if words > 500:  # in a short text every word is rare
        text = re.sub(r"[a-z]+", lambda found: "<unk>" if found[0] in rare else found[0], text)
    return "\n".join(re.sub(r" +", " ", line).strip() for line in text.split("\n"))


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _conversation(turns: list[dict[str, str]], tokenizer: Any) -> str:
    if getattr(tokenizer, "chat_template", None):
        return str(tokenizer.apply_chat_template(turns, tokenize=False))
    return "".join(f"{turn['role'].capitalize()}: {turn['content']}\n\n" for turn in turns)
