"""Write the documents of the local tasks: `python -m cuvee.eval.bench.task_documents`.

Prose comes only from the bundled evaluation texts, and everything else from the lists below. Equal inputs give equal
bytes. Nothing but the context tells the answers: which of the choices is right is drawn, and neither the choices nor
the last token of the context depends on that draw. A model without its cache has to guess.
"""

from __future__ import annotations

import json
import random
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from cuvee.calibration.bundled import EVALUATION_TEXTS, bundled_text, load_bundled_model
from cuvee.codec.support.files import write_atomically
from cuvee.eval.tasks import TASKS_PATH
from cuvee.eval.tasks.public import QUALITIES, THINGS

__all__ = ["DOCUMENTS", "documents", "encode_documents"]

DOCUMENTS = 200  # of each multiple-choice task
CHOICES = 8  # of kv and needle tasks

PASSAGES = 6
PASSAGE_TOKENS = 64

CONTEXT_TOKENS = 384  # of likelihood tasks
CONTINUATION_TOKENS = 96
QUERY_WORDS = 8  # with which the span to be repeated begins

FIRST_NAMES = """
    John Mary Thomas Anne William Jane Henry Sarah George Martha Robert Alice Edward Ruth Samuel Emma
    James Lucy Peter Clara Joseph Fanny Hugh Ellen Walter Grace Arthur Kate Simon Rose Daniel Agnes
""".split()
LAST_NAMES = """
    Marigold Heron Speedwell Arrow Lapwing Crescent Dauntless Halcyon Juniper Lantern Mermaid Nautilus Osprey Petrel
    Quickstep Raven Sparrow Thistle Unicorn Vixen Wanderer Zephyr Albion Beacon Comet Dolphin Emerald Falcon Gazelle
    Hawthorn Ivanhoe Jessamine
""".split()
PLACES = """
    London Bristol Dover Whitby Oxford Paris Dublin York Kent Boston Exeter Derby Bath Calais Leeds Durham
    Norwich Vienna Rome Naples Hull Plymouth Cork Lisbon Madrid Berlin Venice Geneva Chester Lincoln Stafford Brighton
""".split()

NEEDLES = (
    "In a cellar at {place} lay {first}'s {quality}",
    "On Monday {first} {last} sold the {quality}",
    "At {place} {first} {last} lost one {quality}",
    "The brig from {place} brought {first} {last} one {quality}",
)
"""The beginnings of needles. The value follows."""

_TITLES = ("Mr.", "Mrs.", "Dr.", "St.", "Messrs.")


class Prose:
    """A text as words, with the number of tokens that each takes.

    Args:
        text: a paragraph per line. The title and the headings of chapters are left out.
        count: returns the number of tokens in a text.
    """

    def __init__(self, text: str, count: Callable[[str], int]) -> None:
        _, *lines = (line for line in text.splitlines() if line and not line.startswith("Chapter "))
        self.words = " ".join(lines).split()
        self._before = [0, *accumulate(count(" " + word) for word in self.words)]
        ends = [word.rstrip("\"'").endswith((".", "?", "!")) and word not in _TITLES for word in self.words]
        # `"Stop!" cried he.` is one sentence.
        self.starts = [0, *(i for i, word in enumerate(self.words) if i and ends[i - 1] and not word[0].islower())]
        """The words that begin a sentence."""

    def end(self, first: int, tokens: int) -> int | None:
        """Return the end of a span of at most `tokens` tokens from word `first`; None if the text is too short."""
        limit = self._before[first] + tokens
        return bisect_right(self._before, limit) - 1 if limit <= self._before[-1] else None

    def begin(self, end: int, tokens: int) -> int:
        """Return the beginning of a span of at most `tokens` tokens that ends before the word `end`."""
        return bisect_left(self._before, self._before[end] - tokens)

    def span(self, first: int, end: int) -> str:
        """The words from `first` up to, but not including, `end`."""
        return " ".join(self.words[first:end])


def key_values(pairs: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    """`Old Mary Heron kettle. Old John Raven ladder. … Old Mary Heron` | ` kettle`."""
    for _ in range(DOCUMENTS):
        names = zip(rng.sample(FIRST_NAMES, pairs), rng.sample(LAST_NAMES, pairs), strict=True)
        keys = [f"Old {first} {last}" for first, last in names]
        values = rng.sample(THINGS, pairs)
        asked = rng.randrange(pairs)
        choices = rng.sample([value for value in values if value != values[asked]], CHOICES - 1)
        answer = rng.randrange(CHOICES)
        choices.insert(answer, values[asked])
        listed = [f"{key} {value}." for key, value in zip(keys, values, strict=True)]
        yield {"context": " ".join([*listed, keys[asked]]), "choices": choices, "answer": answer}


def needles(
    tokens: int, texts: list[Prose], count: Callable[[str], int], rng: random.Random
) -> Iterator[dict[str, Any]]:
    """`… prose. On Monday Mary Heron sold the blue kettle. Prose … On Monday Mary Heron sold the blue` | ` kettle`."""
    for _ in range(DOCUMENTS):
        (query,) = _queries(1, rng)
        choices = rng.sample(THINGS, CHOICES)
        answer = rng.randrange(CHOICES)
        needle = f"{query} {choices[answer]}."
        prose = _hide(needle, tokens - count(f" {needle} {query}"), texts, rng)
        yield {"context": f"{prose} {query}", "choices": choices, "answer": answer}


def passages(texts: list[Prose], count: Callable[[str], int], rng: random.Random) -> Iterator[dict[str, Any]]:
    """Like `needles`, but with a needle of the same kind in each of six passages, whose values are the choices."""
    for _ in range(DOCUMENTS):
        queries = _queries(PASSAGES, rng)
        choices = rng.sample(THINGS, PASSAGES)
        answer = rng.randrange(PASSAGES)
        hidden = [f"{query} {value}." for query, value in zip(queries, choices, strict=True)]
        parts = [_hide(needle, PASSAGE_TOKENS - count(" " + needle), texts, rng) for needle in hidden]
        rng.shuffle(parts)
        yield {"context": "\n\n".join([*parts, queries[answer]]), "choices": choices, "answer": answer}


def _queries(number: int, rng: random.Random) -> list[str]:
    """Make beginnings of needles of one kind. No two share a name, a place or a quality."""
    kind = rng.choice(NEEDLES)
    first, last, quality, place = (rng.sample(words, number) for words in (FIRST_NAMES, LAST_NAMES, QUALITIES, PLACES))
    return [
        kind.format(first=f, last=n, quality=q, place=p) for f, n, q, p in zip(first, last, quality, place, strict=True)
    ]


def _hide(needle: str, tokens: int, texts: list[Prose], rng: random.Random) -> str:
    """About `tokens` tokens of prose, with the needle before one of its sentences."""
    text = rng.choice(texts)
    first, end = rng.choice([(i, end) for i in text.starts if (end := text.end(i, tokens)) is not None])
    cut = rng.choice([i for i in text.starts if first <= i < end])
    return " ".join(part for part in (text.span(first, cut), needle, text.span(cut, end)) if part)


def stories(texts: list[Prose]) -> Iterator[dict[str, Any]]:
    """Prose and how it continues. No word is in two continuations."""
    for text, first, middle, end in _windows(texts):
        yield {"context": text.span(first, middle), "continuation": text.span(middle, end)}


def repeats(texts: list[Prose], rng: random.Random) -> Iterator[dict[str, Any]]:
    """Make prose, a few of its words again, and their continuation."""
    for text, first, middle, _ in _windows(texts):
        spans = [(i, end) for i in range(first, middle) if (end := text.end(i, CONTINUATION_TOKENS)) is not None]
        # Some words must remain between span and query, or repeating it would take no look back.
        start, end = rng.choice([span for span in spans if span[1] < middle - QUERY_WORDS])
        begun = start + QUERY_WORDS
        context = f"{text.span(first, middle)}\n\n{text.span(start, begun)}"
        yield {"context": context, "continuation": text.span(begun, end)}


def _windows(texts: list[Prose]) -> Iterator[tuple[Prose, int, int, int]]:
    """Contexts and continuations (first, middle, end). Each continuation begins where the one before it ended."""
    for text in texts:
        middle = text.end(0, CONTEXT_TOKENS)
        while middle is not None and (end := text.end(middle, CONTINUATION_TOKENS)) is not None:
            yield text, text.begin(middle, CONTEXT_TOKENS), middle, end
            middle = end


def documents() -> dict[str, list[dict[str, Any]]]:
    """The documents of each task, by its name."""
    _, tokenizer = load_bundled_model()

    def count(text: str) -> int:
        return len(tokenizer(text).input_ids)

    texts = [Prose(bundled_text(name), count) for name in EVALUATION_TEXTS]
    made: dict[str, Iterator[dict[str, Any]]] = {}
    for pairs in (8, 16, 32):
        made[f"cuvee_kv_{pairs}"] = key_values(pairs, random.Random(pairs))
    for tokens in (128, 256, 440):
        made[f"cuvee_needle_{tokens}"] = needles(tokens, texts, count, random.Random(tokens))
    made["cuvee_passages"] = passages(texts, count, random.Random(1))
    made["cuvee_books_nll"] = stories(texts)
    made["cuvee_reread_nll"] = repeats(texts, random.Random(2))
    return {name: list(docs) for name, docs in made.items()}


def encode_documents(docs: list[dict[str, Any]]) -> bytes:
    """Documents as JSONL in ASCII."""
    return b"".join(json.dumps(doc).encode("ascii") + b"\n" for doc in docs)


def main(folder: Path = TASKS_PATH) -> None:
    """Write the files of all tasks."""
    for name, docs in documents().items():
        write_atomically(folder / f"{name}.jsonl", encode_documents(docs))
        print(f"{name}: {len(docs)} documents", file=sys.stderr)


if __name__ == "__main__":
    main()
