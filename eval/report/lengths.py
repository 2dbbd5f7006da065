"""Size and KL as caches grow: every length is measured before the same scored tokens.

    row   . . . . . . . . . . . . . . . . . . . . | a b c d     the longest cache
                              . . . . . . . . . . | a b c d     a shorter one: its last tokens
                                     cached         scored

So nothing but the cache changes from length to length.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cuvee.calibration.corpus import Corpus, sequences_by_text, with_leading
from cuvee.calibration.sequences import reread
from cuvee.codec.errors import InputError
from cuvee.codec.profiles.quality import PRESET_KL
from cuvee.eval.methods import UNCOMPRESSED
from cuvee.eval.quality import Quality
from cuvee.eval.report.candidates import Candidate
from cuvee.eval.report.schema import LengthEntry, MethodEntry

__all__ = ["USUAL_KL", "length_candidates", "length_entry", "length_tokens"]

USUAL_KL = PRESET_KL["balanced"]  # of families with a dial, the setting that is nearest to it is measured


def length_tokens(
    texts: Sequence[Corpus],
    lengths: Sequence[int],
    scored: int,
    count: int,
    positions: int | None,
    repeated: bool,
    seed: int,
) -> dict[int, torch.Tensor]:
    """Sequences for each length.

    Args:
        texts: to cut them from.
        lengths: cached tokens.
        scored: tokens after them.
        count: the most sequences to measure.
        positions: of the model; None if there is no limit.
        repeated: whether the scored tokens of every second row repeat a part of what all lengths have cached.
        seed: of these repeats.

    Returns:
        int64 `[N, length + scored]` by length, in rising order. All of them end in the same tokens.

    Raises:
        InputError: a length that the model or the texts do not reach, or one too short to repeat anything.
    """
    ordered = sorted(set(lengths))
    longest, shortest = ordered[-1], ordered[0]
    if positions is not None and longest + scored > positions:
        raise InputError(
            f"cache_lengths: {longest} cached tokens and {scored} scored ones are {longest + scored}, and the "
            f"model has {positions} positions: give at most {positions - scored}"
        )
    leading = texts[0].leading
    least = scored + len(leading) + 2 if repeated else len(leading) + 1
    if shortest < least:
        remedy = ", or leave the repeats out" if repeated else ""
        raise InputError(
            f"cache_lengths: must be at least {least} with {scored} scored tokens, got {shortest}: give a "
            f"longer one{remedy}"
        )
    try:
        rows = sequences_by_text(texts, longest + scored, count)[0]
    except InputError as error:
        raise InputError(
            f"cache_lengths: no text holds {longest + scored} tokens in a row ({longest} cached, {scored} scored): "
            f"give a longer text to measure on, or smaller lengths"
        ) from error
    if repeated:
        cached = shortest - len(leading)
        rows[:, -(cached + scored) :] = reread(rows[:, -(cached + scored) :], cached, seed)
    return {
        length: rows if length == longest else with_leading(leading, rows[:, -(length + scored - len(leading)) :])
        for length in ordered
    }


def length_candidates(
    candidates: Sequence[Candidate], names: Sequence[str], quality: Sequence[MethodEntry]
) -> list[Candidate]:
    """What to measure at every length: methods with one setting, presets, whatever was named with its setting, and of
    families that are nothing but a dial the setting whose KL was nearest to that of `balanced`.

    Args:
        candidates: of the report.
        names: what was selected.
        quality: what has been measured. A method that is not there was left out, for a reason.
    """
    kl = {entry.key: entry.kl for entry in quality}
    chosen = []
    for candidate in candidates:
        family = [c for c in candidates if c.family == candidate.family and c.key in kl]
        dial = bool(family) and all(c.kind == "curve" for c in family)
        named = candidate.key in names
        free = dial and not any(c.key in names for c in family)
        nearest = free and candidate is min(family, key=lambda c: abs(kl[c.key] - USUAL_KL))
        if candidate.key in kl and candidate.key != UNCOMPRESSED and (candidate.kind != "curve" or named or nearest):
            chosen.append(candidate)
    return chosen


def length_entry(candidate: Candidate, length: int, quality: Quality) -> LengthEntry:
    """Return the entry of a method at one length."""
    return LengthEntry(
        candidate.key, candidate.family, candidate.label, candidate.kind, candidate.setting, length,
        quality.bits_per_value, quality.ratio, quality.kl, quality.kl_stderr, quality.delta_nll, quality.top1,
        quality.sequences, quality.per_sequence,
    )  # fmt: skip
