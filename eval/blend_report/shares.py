"""The figures of a report on blending: shares recovered, selectors at equal cost, what decoded chunks lose.

The floor is the blend of exact chunks, each computed alone, with nothing recomputed. The share recovered is one minus
the mean KL over the mean KL of the floor: 0 at the floor, 1 for a full prefill. Standard errors are over prompts, by
the delta method, because both means come from the same prompts; intervals of ratios are percentile bootstraps over
prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from cuvee.codec.errors import InputError
from cuvee.codec.learning.divergence import stderr
from cuvee.eval.blend_report.selectors import ALONE, COMPARED, DEFAULT, EXACT, KINDS_OF_CHUNKS, NOTHING, SELECTORS
from cuvee.eval.stats import DRAWS, F64, Resamples, interval, paired_difference

__all__ = [
    "RIVALS",
    "Figures",
    "Measured",
    "MeasuredPrompts",
    "codec_costs",
    "compare_selectors",
    "first_figures",
    "mean_figures",
    "ratio_of_shares",
    "share_recovered",
    "summarize",
]

RIVALS = {"hkvd": ("hkvd", "hkvd-gradual"), "boundary": ("boundary",)}  # each is taken at the better of its settings
Figures = dict[str, Any]


@dataclass(slots=True)
class Measured:
    """One selector at one cost on one kind of chunks, with one number per prompt."""

    kv: str
    chunks: str
    selector: str
    cost: float | None
    described: str = ""
    reason: str | None = None
    kl: list[float] = field(default_factory=list)
    delta_nll: list[float] = field(default_factory=list)
    top1: list[float] = field(default_factory=list)
    spent: list[float] = field(default_factory=list)
    correct: list[bool] = field(default_factory=list)


@dataclass(slots=True)
class MeasuredPrompts:
    """The measurements of the first prompts of a construction.

    Attributes:
        methods: the first one is the floor: exact chunks computed alone, nothing recomputed.
        coded: bytes of all chunks, by quality and kind of chunks.
        full: whether the full prefill takes the right choice, of prompts with choices.
        answers: what the right answer costs after a full prefill, nats per word, of prompts that ask a question.
        prompts: how many are finished.
    """

    methods: list[Measured]
    coded: dict[tuple[str, str], int]
    full: list[bool] = field(default_factory=list)
    answers: list[float] = field(default_factory=list)
    prompts: int = 0

    def to_dict(self) -> Figures:
        """For JSON."""
        coded = [{"kv": kv, "chunks": chunks, "bytes": size} for (kv, chunks), size in self.coded.items()]
        return asdict(self) | {"coded": coded}

    @classmethod
    def from_dict(cls, found: Figures) -> MeasuredPrompts:
        """Read the output of `to_dict`.

        Raises:
            InputError: the dict has another form.
        """
        try:
            return cls(
                [Measured(**one) for one in found["methods"]],
                {(one["kv"], one["chunks"]): int(one["bytes"]) for one in found["coded"]},
                [bool(one) for one in found["full"]],
                [float(one) for one in found["answers"]],
                int(found["prompts"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"unfinished: cannot be read ({error!r})") from error


def share_recovered(kl: Sequence[float] | F64, floor: Sequence[float] | F64) -> tuple[float | None, float | None]:
    """One minus the mean KL over the mean KL of the floor, and its standard error over prompts (delta method).

    Args:
        kl: nats per token, one number per prompt.
        floor: the same if nothing is recomputed.

    Returns:
        The share, which is None if the floor is no worse than the reference; and its error, None for a single prompt.

    Example:
        >>> share_recovered([0.1, 0.1], [0.4, 0.4])
        (0.75, 0.0)
    """
    above, below = np.asarray(kl, np.float64), np.asarray(floor, np.float64)
    if below.mean() <= 0:
        return None, None
    ratio = above.mean() / below.mean()
    error = stderr(((above - ratio * below) / below.mean()).tolist())
    return float(1 - ratio), error


def ratio_of_shares(of: F64, against: F64, floor: F64, seed: int) -> dict[str, float | None]:
    """Return the ratio of the shares that two methods recover, with a 95 % interval.

    The ratio is None if the other method recovers nothing. An end of the interval is None if that is so in too many
    draws.

    Args:
        of: KL of the one method, one number per prompt.
        against: KL of the other.
        floor: KL of the floor.
        seed: of the bootstrap over prompts.
    """
    sample = Resamples(len(floor), DRAWS, seed)
    won, base = sample.mean(floor - of), sample.mean(floor - against)
    low, high = interval(np.divide(won, base, out=np.full(DRAWS, np.inf), where=base > 0), lowest=-np.inf)
    whole = float((floor - against).sum())
    return {"ratio": float((floor - of).sum()) / whole if whole > 0 else None, "low": low, "high": high}


def summarize(
    one: Measured, floor: Measured, kinds: Sequence[str], full: Sequence[bool], rates: Sequence[float] = ()
) -> Figures:
    """An entry of the report: what was measured, and what follows from it.

    Args:
        one: what was measured.
        floor: the same of the floor.
        kinds: of the prompts.
        full: whether the full prefill takes the right choice, for prompts with choices.
        rates: tokens per word of the answer, for prompts that ask a question. The entry then says how much of what the
            answer's likelihood loses at the floor is recovered.
    """
    named: Figures = {
        "kv": one.kv,
        "chunks": one.chunks,
        "selector": one.selector,
        "label": SELECTORS[one.selector][0],
        "cost": one.cost,
        "described": one.described or None,
        "reason": one.reason,
    }
    if one.reason is not None:
        return named
    kl = np.array(one.kl)
    below = np.array(floor.kl)
    share, error = share_recovered(kl, below)
    parts = {}
    for kind in dict.fromkeys(kinds) if len(set(kinds)) > 1 else ():
        mask = np.array([k == kind for k in kinds])
        part, part_error = share_recovered(kl[mask], below[mask])
        parts[kind] = {
            "prompts": int(mask.sum()),
            **mean_figures("kl", kl[mask].tolist()),
            "share": part,
            "share_stderr": part_error,
        }
    return {
        **named,
        "spent": float(np.mean(one.spent)),
        **mean_figures("kl", one.kl),
        "share": share,
        "share_stderr": error,
        **mean_figures("delta_nll", one.delta_nll),
        **mean_figures("top1", one.top1),
        **accuracy(one.correct, full),
        **_answers(one, floor, np.array(rates)),
        "parts": parts,
        "per_prompt": {
            "kl": one.kl,
            "delta_nll": one.delta_nll,
            "top1": one.top1,
            "spent": one.spent,
            "correct": one.correct or None,
        },
    }


def _answers(one: Measured, floor: Measured, rates: F64) -> Figures:
    """Return the loss of the answer's likelihood, in nats per word, and the recovered share of the floor's loss."""
    if not len(rates):
        return {}
    lost, below = np.array(one.delta_nll) * rates, np.array(floor.delta_nll) * rates
    share, error = share_recovered(lost, below)
    return {**mean_figures("answer_loss", lost.tolist()), "answer_share": share, "answer_share_stderr": error}


def first_figures(construction: str, found: Sequence[Measured]) -> str:
    """Summarize exact chunks computed alone so far in a line: shares recovered at the lowest cost compared.

    Example:
        >>> floor = Measured("exact", "alone", "nothing", None, kl=[0.2])
        >>> first_figures("reread", [floor, Measured("exact", "alone", "boundary", 0.15, kl=[0.05])])
        'reread, prompts: 1; KL of the floor 0.200; recovered at cost 0.15: boundary 0.75'
    """
    alone = [one for one in found if one.kv == EXACT and one.chunks == ALONE and one.kl]
    floor = next((one.kl for one in alone if one.selector == NOTHING), [])
    if not floor:
        return ""
    cost = min((one.cost for one in alone if one.cost in COMPARED), default=None)
    shares = {
        SELECTORS[one.selector][0]: share_recovered(one.kl, floor)[0]
        for one in alone
        if one.cost == cost and one.cost is not None and one.reason is None and len(one.kl) == len(floor)
    }
    known = ", ".join(f"{label} {share:.2f}" for label, share in shares.items() if share is not None)
    line = f"{construction}, prompts: {len(floor)}; KL of the floor {np.mean(floor):.3f}"
    return f"{line}; recovered at cost {cost:g}: {known}" if known else line


def mean_figures(name: str, values: Sequence[float]) -> Figures:
    """A mean over prompts and its standard error, under `name` and `name`_stderr."""
    return {name: float(np.mean(values)), f"{name}_stderr": stderr(values)}


def accuracy(correct: Sequence[bool], full: Sequence[bool]) -> Figures:
    """The accuracy, and its paired difference to that of the full prefill."""
    names = ("accuracy", "accuracy_stderr", "difference", "difference_stderr")
    if not correct:
        return dict.fromkeys(names)
    difference = paired_difference(list(map(float, correct)), list(map(float, full))) if full else (None, None)
    return dict(zip(names, (float(np.mean(correct)), stderr(list(map(float, correct))), *difference), strict=True))


def _measured(made: Figures, **named: Any) -> list[Figures]:
    """The entries with these values that could be measured."""
    return [
        entry
        for entry in made["entries"]
        if entry["reason"] is None and all(entry[name] == value for name, value in named.items())
    ]


def _kl(entry: Figures) -> F64:
    return np.array(entry["per_prompt"]["kl"])


def compare_selectors(made: Figures, seed: int) -> list[Figures]:
    """Compare the best selector and the default with HKVD and boundary tokens, at equal cost and on exact chunks."""
    (floor_entry,) = _measured(made, kv=EXACT, chunks=ALONE, selector=NOTHING)
    floor = _kl(floor_entry)
    found = []
    for cost in COMPARED:
        for chunks in KINDS_OF_CHUNKS:
            measured = _measured(made, kv=EXACT, chunks=chunks, cost=cost)
            if not measured or floor_entry["share"] is None:
                continue
            best = max(measured, key=lambda entry: float(entry["share"]))
            default = [entry for entry in measured if entry["selector"] == DEFAULT]
            for entry in [best, *(d for d in default if d is not best)]:
                against = [
                    _against(made, entry, floor, rival, on, cost, seed)
                    for on in dict.fromkeys((chunks, ALONE))
                    for rival in RIVALS
                ]
                found.append(
                    {
                        "construction": made["name"],
                        "cost": cost,
                        "chunks": chunks,
                        "selector": entry["selector"],
                        "label": entry["label"],
                        "best": entry is best,
                        "share": entry["share"],
                        "share_stderr": entry["share_stderr"],
                        "against": against,
                    }
                )
    return found


def _against(made: Figures, of: Figures, floor: F64, rival: str, chunks: str, cost: float, seed: int) -> Figures:
    """A ratio of shares, with the rival at the better of its settings."""
    wanted = (EXACT, chunks, cost)
    asked = [
        e for e in made["entries"] if e["selector"] in RIVALS[rival] and (e["kv"], e["chunks"], e["cost"]) == wanted
    ]
    settings = [entry for entry in asked if entry["reason"] is None]
    named = {"rival": rival, "chunks": chunks}
    if not settings:
        reason = next((entry["reason"] for entry in asked), "was not measured")
        empty = dict.fromkeys(("selector", "share", "ratio", "low", "high"))
        return {**named, **empty, "reason": reason}
    other = max(settings, key=lambda entry: float(entry["share"]))
    ratio = ratio_of_shares(_kl(of), _kl(other), floor, seed)
    return {**named, "selector": other["selector"], "share": other["share"], **ratio, "reason": None}


def codec_costs(made: Figures) -> list[Figures]:
    """Return the points of the share that decoded chunks lose, paired with exact chunks of the same kind."""
    (floor_entry,) = _measured(made, kv=EXACT, chunks=ALONE, selector=NOTHING)
    scale = float(_kl(floor_entry).mean())
    found = []
    for entry in made["entries"]:
        if entry["kv"] == EXACT or entry["reason"] is not None or scale <= 0:
            continue
        named = {"chunks": entry["chunks"], "selector": entry["selector"], "cost": entry["cost"]}
        for exact in _measured(made, kv=EXACT, **named):
            # The error is that of the difference alone, because the floor is the same in both shares.
            lost, error = paired_difference(entry["per_prompt"]["kl"], exact["per_prompt"]["kl"])
            found.append(
                {
                    "construction": made["name"],
                    "kv": entry["kv"],
                    **named,
                    "label": entry["label"],
                    "points": 100 * lost / scale,
                    "points_stderr": None if error is None else 100 * error / scale,
                }
            )
    return found
