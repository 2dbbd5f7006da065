"""Options of blending: for the engine (`BlendOptions`) and for one request (`BlendRequest`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from cuvee.blend.segmentation import ContentChunker, LineBreaks, ParagraphChunker, Span
from cuvee.codec.errors import InputError
from cuvee.codec.support.suggest import suggestion
from cuvee.integrations.vllm.request_params import PARAMETERS, request_fields, shown

KL_PRESETS = {"careful": 0.002, "balanced": 0.005, "fast": 0.02}
"""Names for values of `kl`, in nats."""

DEFAULT_COST = 0.15
_MOST_KL = 100.0
_CHECK_EVERY = 32  # where a cost must be learned and nothing else was asked for


@dataclass(frozen=True, slots=True)
class BlendOptions:
    """Option `blend` of the connector, by the names of the JSON that sets it; `{}` is all defaults.

    Attributes:
        cost: share of the reused tokens' computation to spend on recomputing some of them; 1 recomputes all of them.
            Default: 0.15, or none if `kl` is given.
        separator: text or token ids between the parts of prompts; None: parts are found by paragraphs and content.
        least_tokens, mean_tokens, most_tokens: sizes of the segments that are found so. Segments of fewer than
            `least_tokens` are never used, however they were found.
        harvest: store the segments of prompts that were computed, not reused.
        min_context: tokens that must stand before a segment for it to be stored, unless the request names it. A
            segment computed at the beginning of a prompt lacks the context that it usually has.
        min_reused: fewest tokens that a blend must reuse; otherwise the prompt is computed.
        check_every: also compute every n-th blend exactly, and export how far the next token's distribution moved
            (`blend_kl`). Each check takes a whole prefill, in slices like the blend itself. 0: never. Default: 0, or 32
            with `kl`, which needs checks. With `kl` the first eight blends are checked, too.
        most_segments: most segments per prompt that are looked up and stored. If there are more, the longest are kept,
            and the first among equals: clients choose the number, and the longest save most per lookup.
        paragraphs: find segments by paragraphs, if the engine has a tokenizer, and only long ones by their content.
        kl: instead of `cost`, how far blends may move the next token's distribution on average, in nats, or a name in
            `KL_PRESETS`. The cost is learned from blends that are checked (`quality.py`).
        correct: correct the reused tokens that are not recomputed by how the recomputed ones changed
            (`cuvee.blend.correction`). Tokens learn from those of their slice and of earlier ones, not of later ones.
        min_position: tokens before this position are computed even where a segment holds them. All later tokens
            attend to them most (attention sinks: Xiao et al., arXiv:2309.17453), and segments were computed behind
            more text.

    Raises:
        InputError: a value of the wrong type or range.
    """

    cost: float | None = None
    separator: str | tuple[int, ...] | None = None
    least_tokens: int = 64
    mean_tokens: int = 192
    most_tokens: int = 768
    harvest: bool = True
    min_context: int = 128
    min_reused: int = 256
    check_every: int | None = None
    most_segments: int = 1024
    kl: float | None = None
    paragraphs: bool = True
    correct: bool = True
    min_position: int = 64

    def __post_init__(self) -> None:
        kl, cost, every = _aim("blend", self.kl, self.cost), self.cost, self.check_every
        object.__setattr__(self, "kl", kl)
        object.__setattr__(self, "cost", DEFAULT_COST if kl is None and cost is None else cost)
        object.__setattr__(self, "check_every", (0 if kl is None else _CHECK_EVERY) if every is None else every)
        given: Any = self.separator
        if isinstance(given, list | tuple):
            if not given or not all(type(token) is int and token >= 0 for token in given):
                raise InputError(f"blend.separator: must be at least one token id, got {given!r}")
            object.__setattr__(self, "separator", tuple(given))
        elif given is not None and not (isinstance(given, str) and given):
            raise InputError(f"blend.separator: must be a text or a list of token ids, or left out, got {given!r}")
        for name in ("correct", "harvest", "paragraphs"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"blend.{name}: must be true or false, got {getattr(self, name)!r}")
        for name, least in (
            ("most_segments", 1), ("min_reused", 1), ("min_context", 0), ("min_position", 0), ("check_every", 0),
        ):  # fmt: skip
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise InputError(f"blend.{name}: must be a whole number of at least {least}, got {value!r}")
        if kl is not None and not self.check_every:
            raise InputError("blend.check_every: must be at least 1 with blend.kl, which is kept by checks, got 0")
        try:
            self.chunker()
        except InputError as error:
            raise InputError(f"blend: least_tokens, mean_tokens and most_tokens must fit each other: {error}") from None

    @classmethod
    def from_json(cls, given: Any) -> BlendOptions:
        """Return options from the engine's JSON.

        Raises:
            InputError: not an object, an unknown name, or a value of the wrong type or range.
        """
        if not isinstance(given, Mapping):
            raise InputError(f'blend: must be an object such as {{}} or {{"cost": 0.3}}, got {given!r}')
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise InputError(f"blend: has no option {name!r}: {suggestion(name, known)}")
        if "cost" in given:
            _check_cost("blend.cost", given["cost"])
        if "kl" in given:
            _kl("blend", given["kl"])
        return cls(**given)

    def chunker(self, breaks: LineBreaks | None = None) -> ContentChunker | ParagraphChunker:
        """Return what finds segments: by paragraphs if the line breaks are known, else by content alone."""
        content = ContentChunker(self.least_tokens, self.mean_tokens, self.most_tokens)
        return content if breaks is None or not self.paragraphs else ParagraphChunker(content, breaks)


@dataclass(frozen=True, slots=True)
class BlendRequest:
    """Options of one request, in `kv_transfer_params`: `{"cuvee": {"segments": [[0, 512], …], "cost": 0.3}}`.

    Attributes:
        blend: if False, the request is computed or loaded exactly.
        segments: token positions `[start, end)` of its parts, in order, not overlapping; None: they are found.
        cost, kl: as in `BlendOptions`; if both are None, the engine's.
    """

    blend: bool = True
    segments: tuple[Span, ...] | None = None
    cost: float | None = None
    kl: float | None = None

    @classmethod
    def of(cls, params: Any, tokens: int) -> BlendRequest:
        """Read `kv_transfer_params` of a prompt of this many tokens.

        Raises:
            InputError: an unknown field, or a value of the wrong type or range.
        """
        given = request_fields(params)
        if given is None:
            return cls()
        blend, cost, name = given.get("blend", True), given.get("cost"), PARAMETERS
        if not isinstance(blend, bool):
            raise InputError(f"{PARAMETERS}.blend: must be true or false, got {shown(blend)}")
        kl = _aim(name, given.get("kl"), cost)
        segments = given.get("segments")
        return cls(blend, None if segments is None else _spans(segments, tokens), cost, kl)


def _spans(given: Any, tokens: int) -> tuple[Span, ...]:
    name = f"{PARAMETERS}.segments"
    if not isinstance(given, list | tuple):
        raise InputError(f"{name}: must be a list of [start, end], got {type(given).__name__}")
    spans: list[Span] = []
    for number, pair in enumerate(given):
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(type(at) is int for at in pair):
            raise InputError(f"{name}[{number}]: must be [start, end], two token positions, got {shown(pair)}")
        start, end = pair
        before = spans[-1][1] if spans else 0
        if not before <= start < end <= tokens:
            raise InputError(
                f"{name}[{number}]: must be a span of tokens {before} … {tokens}, after those before it, got "
                f"[{shown(start)}, {shown(end)}]"
            )
        spans.append((start, end))
    return tuple(spans)


def _aim(name: str, kl: object, cost: object) -> float | None:
    """Return the KL that is asked for, in nats; None if it is not. Check that at most one of KL and cost is given."""
    if cost is not None:
        _check_cost(f"{name}.cost", cost)
        if kl is not None:
            raise InputError(f"{name}.kl: must not be given along with cost, got both")
    return None if kl is None else _kl(name, kl)


def _kl(name: str, kl: object) -> float:
    """Return a KL in nats, given as a number or by name."""
    if isinstance(kl, str) and kl in KL_PRESETS:
        return KL_PRESETS[kl]
    if isinstance(kl, bool) or not isinstance(kl, int | float) or not 0 < kl <= _MOST_KL:
        raise InputError(
            f"{name}.kl: must be a number above 0 and up to 100, or one of {', '.join(KL_PRESETS)}, got {shown(kl)}"
        )
    return float(kl)


def _check_cost(name: str, cost: object) -> None:
    if isinstance(cost, bool) or not isinstance(cost, int | float) or not 0 <= cost <= 1:
        raise InputError(f"{name}: must be a number from 0 to 1, got {shown(cost)}")
