"""The prompts of a report on blending: cached chunks, the text after them, and its scored part.

reread       adjacent chunks of a text; every second prompt continues with a repeat of a span of them
ahead        the same, but the first half of the continuation is given, and only the second half scored
passages     documents of the task cuvee_passages: each passage is a chunk, and the last sentence has six possible ends
xquad        public data: a question about one of six paragraphs, each a chunk, and its answer
musique      public data: a question that needs two to four of the paragraphs it comes with, and its answer
FILE.jsonl   passages, a query that begins a sentence in one of them, and how that sentence ends
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cuvee.codec.data.corpus import Corpus, json_lines, pick_evenly, spread_sequences
from cuvee.codec.errors import InputError
from cuvee.codec.learning.sequences import reread
from cuvee.eval.tasks import TASKS_PATH
from cuvee.eval.tasks.public import open_questions

__all__ = [
    "PUBLIC",
    "BlendPrompt",
    "Construction",
    "ahead_prompts",
    "multidoc_prompts",
    "passage_prompts",
    "public_prompts",
    "reread_prompts",
]

PUBLIC = {
    "xquad": "a question of XQuAD about one of six paragraphs, each a cached chunk, and its answer",
    "musique": "a question of MuSiQue, which needs several of its passages, each a cached chunk, and its answer",
}
_PARAGRAPHS = 6  # in a prompt of XQuAD

_MULTIDOC = {"passages": list, "gold": int, "query": str, "target": str}
_CUT = 64  # tokens that are left of each passage if a prompt is too long


@dataclass(frozen=True, slots=True, eq=False)
class BlendPrompt:
    """Chunks `[T_i]`, the text after them `[S]`, both int64, and what to score.

    Attributes:
        kind: what sets the prompt apart from others of its construction.
        chunks: the cached part, in order.
        text: the part that is not cached.
        scored: how many tokens at the end of the text are scored; 0 if there are choices.
        choices: token ids of possible continuations of the text, of which the model should take `answer`. If there is
            only one, only its likelihood counts.
        answer: the index of the right choice, whose tokens are then scored.
        words: how many words answer a question; 0 if the prompt is none.
    """

    kind: str
    chunks: tuple[torch.Tensor, ...]
    text: torch.Tensor
    scored: int
    choices: tuple[tuple[int, ...], ...] = ()
    answer: int = 0
    words: int = 0

    @property
    def tokens(self) -> torch.Tensor:
        """All tokens of the prompt, `[T]`."""
        return torch.cat([*self.chunks, self.text])

    @property
    def length(self) -> int:
        """The number of tokens, including the longest choice."""
        return len(self.tokens) + max(map(len, self.choices), default=0)


@dataclass(frozen=True, slots=True)
class Construction:
    """Prompts made in one way."""

    name: str
    about: str
    prompts: list[BlendPrompt]


def reread_prompts(
    texts: Sequence[Corpus], count: int, chunks: int, chunk_tokens: int, suffix: int, seed: int
) -> Construction:
    """Make at most `count` disjoint prompts, spread over texts.

    Args:
        texts: what to cut them from.
        count: how many prompts.
        chunks: how many cached chunks each has.
        chunk_tokens: tokens in a chunk.
        suffix: tokens after the chunks.
        seed: for drawing the spans that are repeated.

    Raises:
        InputError: the texts are too short, or the chunks leave no room to draw a span.
    """
    cached = chunks * chunk_tokens
    plain = spread_sequences(texts, cached + suffix, count)
    prompts = [
        BlendPrompt(
            "ordinary" if index % 2 else "re-read",
            row[:cached].split(chunk_tokens),
            row[cached:],
            suffix - 1,
        )
        for index, row in enumerate(reread(plain, cached, seed))
    ]
    about = (
        f"{chunks} adjacent chunks of {chunk_tokens} tokens of a text, then {suffix} tokens: in "
        f"every second prompt a repeat of a span of the chunks, in the others what follows in the text"
    )
    return Construction("reread", about, prompts)


def ahead_prompts(whole: Construction) -> Construction:
    """The prompts of `reread_prompts` as a server sees them: what is scored is not there yet when it selects tokens."""
    prompts = []
    for prompt in whole.prompts:
        half = len(prompt.text) // 2
        continuation = tuple(prompt.text[half:].tolist())
        prompts.append(BlendPrompt(prompt.kind, prompt.chunks, prompt.text[:half], 0, (continuation,)))
    about = "the prompts of reread: the first half of the text is given, the second half scored"
    return Construction("ahead", about, prompts)


def passage_prompts(tokenizer: Any, count: int) -> Construction:
    """Make prompts from at most `count` documents of the task, spread over all of them."""
    lines = (TASKS_PATH / "cuvee_passages.jsonl").read_text(encoding="ascii").splitlines()
    prompts = []
    for line in pick_evenly(lines, count):
        document = json.loads(line)
        *passages, query = document["context"].split("\n\n")
        text = _ids(tokenizer, query)
        # As in lm-eval: the tokens of the whole, without the tokens of the context.
        choices = tuple(tuple(_ids(tokenizer, f"{query} {choice}")[len(text) :]) for choice in document["choices"])
        chunks = _passage_chunks(tokenizer, passages)
        prompts.append(BlendPrompt("passages", chunks, torch.tensor(text), 0, choices, document["answer"]))
    about = (
        "documents of the task cuvee_passages: six passages, each a cached chunk, and a sentence of one of them begun "
        "again, to be ended by the right one of six words"
    )
    return Construction("passages", about, prompts)


def public_prompts(name: str, data: str | None, any_version: bool, tokenizer: Any, count: int) -> Construction:
    """Make at most `count` prompts from public data, spread over its first, third, fifth … question.

    The default selector was chosen on the others.

    Args:
        name: a key of `PUBLIC`.
        data: the folder with the file; default: the copy on the hub.
        any_version: take another file than the published one.
        tokenizer: of the model.
        count: how many prompts.

    Raises:
        CorruptError, InputError: the data is missing or damaged.
    """
    prompts = []
    questions = open_questions(name, data, passages=_PARAGRAPHS, any_version=any_version)[::2]
    for question in pick_evenly(questions, count):
        document = question.document()
        text = _ids(tokenizer, document["question"])
        answer = tuple(_ids(tokenizer, document["question"] + document["continuation"])[len(text) :])
        chunks = _passage_chunks(tokenizer, question.passages)
        words = len(question.answer.split())
        prompts.append(BlendPrompt(name, chunks, torch.tensor(text), 0, (answer,), words=words))
    return Construction(name, PUBLIC[name], prompts)


def multidoc_prompts(path: Path, tokenizer: Any, count: int, fit: int) -> Construction:
    """Make at most `count` prompts from a file, spread over it.

    Args:
        path: the file. Each line is an object with id, passages, gold, query and target.
        tokenizer: of the model.
        count: how many prompts.
        fit: if a prompt has more tokens, its passages are cut to 64 tokens each.

    Raises:
        InputError: a line is no such object, or there are no lines.
        OSError: there is no such file.
    """
    prompts = []
    for number, item in json_lines(path):
        wrong = [n for n, t in _MULTIDOC.items() if not isinstance(item, dict) or not isinstance(item.get(n), t)]
        if wrong or "id" not in item:
            raise InputError(
                f"{path}:{number}: must be an object with id, passages (a list), gold (a number), query and target "
                f"(texts); {(wrong or ['id'])[0]} is missing or of another kind"
            )
        passages = item["passages"]
        if not passages or not all(isinstance(p, str) and p for p in passages) or not item["query"]:
            raise InputError(f"{path}:{number}: passages and query must be texts that are not empty")
        if not 0 <= item["gold"] < len(passages):
            raise InputError(f"{path}:{number}: gold must be from 0 to {len(passages) - 1}, got {item['gold']}")
        query = _ids(tokenizer, item["query"])
        target = _ids(tokenizer, item["query"] + item["target"])[len(query) :]
        if not target:
            raise InputError(f"{path}:{number}: target must have at least one token, got {item['target']!r}")
        chunks = _passage_chunks(tokenizer, passages)
        if sum(map(len, chunks)) + len(query) + len(target) > fit:
            chunks = tuple(chunk[:_CUT] for chunk in chunks)
        kind = "answer in the first passage" if item["gold"] == 0 else "answer in a later passage"
        prompts.append(BlendPrompt(kind, chunks, torch.tensor(query), 0, (tuple(target),)))
    if not prompts:
        raise InputError(f"{path}: must hold at least one prompt, got an empty file")
    about = f"{path.name}: passages, each a cached chunk, and a query that begins a sentence of one of them"
    return Construction(path.stem, about, pick_evenly(prompts, count))


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return ids


def _passage_chunks(tokenizer: Any, passages: Sequence[str]) -> tuple[torch.Tensor, ...]:
    """Tokens of passages, each with the blank line after it. The first begins as the tokenizer begins a text."""
    ids = [_ids(tokenizer, passage + "\n\n") for passage in passages]
    ids[0] = [*tokenizer("").input_ids, *ids[0]]
    return tuple(map(torch.tensor, ids))
