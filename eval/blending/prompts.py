"""The prompts of a report on blending: cached chunks, the text after them, and what of it is scored.

reread       adjacent chunks of a text; every second prompt goes on with a repeat of a span of them
ahead        the same, of which the first half of what goes on is given and the second half scored
passages     documents of the task cuvee_passages: a passage is a chunk, the last sentence has six possible ends
FILE.jsonl   passages, a query that begins a sentence of one of them, and its end
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from cuvee.codec.errors import InputError
from cuvee.eval.corpus import Corpus, spread_sequences
from cuvee.eval.protocol import reread
from cuvee.eval.tasks import TASKS_PATH

__all__ = ["Construction", "Prompt", "ahead_prompts", "multidoc_prompts", "passage_prompts", "reread_prompts"]

T = TypeVar("T")

_MULTIDOC = {"passages": list, "gold": int, "query": str, "target": str}
_CUT = 64  # tokens of a passage of a prompt that is too long


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """Chunks `[T_i]`, the text after them `[S]`, both int64, and what is scored.

    Attributes:
        kind: what sets it apart from others of its construction.
        chunks: cached, in order.
        text: not cached.
        scored: how many of the last tokens of the text are predicted; 0 where there are choices.
        choices: token ids of continuations of the text, of which the model should take `answer`; if there is only
            one, its likelihood is all there is to tell.
        answer: index of the right one, whose tokens are then the ones predicted.
    """

    kind: str
    chunks: tuple[torch.Tensor, ...]
    text: torch.Tensor
    scored: int
    choices: tuple[tuple[int, ...], ...] = ()
    answer: int = 0

    @property
    def tokens(self) -> torch.Tensor:
        """All of it, `[T]`."""
        return torch.cat([*self.chunks, self.text])

    @property
    def length(self) -> int:
        """Tokens, the longest choice included."""
        return len(self.tokens) + max(map(len, self.choices), default=0)


@dataclass(frozen=True, slots=True)
class Construction:
    """Prompts made in one way."""

    name: str
    about: str
    prompts: list[Prompt]


def reread_prompts(
    texts: Sequence[Corpus], count: int, chunks: int, chunk_tokens: int, suffix: int, seed: int
) -> Construction:
    """At most `count` disjoint prompts, spread over texts.

    Args:
        texts: what they are cut from.
        count: of prompts.
        chunks: cached chunks of each.
        chunk_tokens: tokens of a chunk.
        suffix: tokens after them.
        seed: of the spans that are repeated.

    Raises:
        InputError: texts that are too short, or chunks that leave no room to draw a span.
    """
    cached = chunks * chunk_tokens
    plain = spread_sequences(texts, cached + suffix, count)
    prompts = [
        Prompt(
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
    """Prompts of `reread_prompts` as a server sees them: what is scored is not there yet when tokens are selected."""
    prompts = []
    for prompt in whole.prompts:
        half = len(prompt.text) // 2
        continuation = tuple(prompt.text[half:].tolist())
        prompts.append(Prompt(prompt.kind, prompt.chunks, prompt.text[:half], 0, (continuation,)))
    about = "the prompts of reread: the first half of the text is given, the second half scored"
    return Construction("ahead", about, prompts)


def passage_prompts(tokenizer: Any, count: int) -> Construction:
    """At most `count` documents of the task, spread over all of them."""
    lines = (TASKS_PATH / "cuvee_passages.jsonl").read_text(encoding="ascii").splitlines()
    prompts = []
    for line in _spread(lines, count):
        document = json.loads(line)
        *passages, query = document["context"].split("\n\n")
        text = _ids(tokenizer, query)
        # As lm-eval does it: whole, less the context.
        choices = tuple(tuple(_ids(tokenizer, f"{query} {choice}")[len(text) :]) for choice in document["choices"])
        chunks = _passage_chunks(tokenizer, passages)
        prompts.append(Prompt("passages", chunks, torch.tensor(text), 0, choices, document["answer"]))
    about = (
        "documents of the task cuvee_passages: six passages, each a cached chunk, and a sentence of one of them begun "
        "again, to be ended by the right one of six words"
    )
    return Construction("passages", about, prompts)


def multidoc_prompts(path: Path, tokenizer: Any, count: int, fit: int) -> Construction:
    """At most `count` prompts of a file, spread over it: an object a line, with id, passages, gold, query and target.

    Args:
        path: the file.
        tokenizer: of the model.
        count: of prompts.
        fit: a prompt of more tokens has its passages cut, to 64 tokens each.

    Raises:
        InputError: a line that is something else, or no line.
        OSError: no such file.
    """
    prompts = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except ValueError as error:
            raise InputError(f"{path}:{number} is not JSON: {error}") from error
        wrong = [n for n, t in _MULTIDOC.items() if not isinstance(item, dict) or not isinstance(item.get(n), t)]
        if wrong or "id" not in item:
            raise InputError(
                f"{path}:{number} must be an object with id, passages (a list), gold (a number), query and target "
                f"(texts); {(wrong or ['id'])[0]} is missing or of another kind"
            )
        passages = item["passages"]
        if not passages or not all(isinstance(p, str) and p for p in passages) or not item["query"]:
            raise InputError(f"{path}:{number}: passages and query must be texts that are not empty")
        if not 0 <= item["gold"] < len(passages):
            raise InputError(f"{path}:{number}: gold is {item['gold']}, there are {len(passages)} passages")
        query = _ids(tokenizer, item["query"])
        target = _ids(tokenizer, item["query"] + item["target"])[len(query) :]
        if not target:
            raise InputError(f"{path}:{number}: target holds no token")
        chunks = _passage_chunks(tokenizer, passages)
        if sum(map(len, chunks)) + len(query) + len(target) > fit:
            chunks = tuple(chunk[:_CUT] for chunk in chunks)
        kind = "answer in the first passage" if item["gold"] == 0 else "answer in a later passage"
        prompts.append(Prompt(kind, chunks, torch.tensor(query), 0, (tuple(target),)))
    if not prompts:
        raise InputError(f"{path} holds no prompts")
    about = f"{path.name}: passages, each a cached chunk, and a query that begins a sentence of one of them"
    return Construction(path.stem, about, _spread(prompts, count))


def _spread(items: Sequence[T], count: int) -> list[T]:
    kept = min(len(items), count)
    return [items[i * len(items) // kept] for i in range(kept)]


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return ids


def _passage_chunks(tokenizer: Any, passages: Sequence[str]) -> tuple[torch.Tensor, ...]:
    """Tokens of passages, each with the blank line after it; what the tokenizer begins a text with before the first."""
    ids = [_ids(tokenizer, passage + "\n\n") for passage in passages]
    ids[0] = [*tokenizer("").input_ids, *ids[0]]
    return tuple(map(torch.tensor, ids))
