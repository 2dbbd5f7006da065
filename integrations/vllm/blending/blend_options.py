"""Options of blending: for the engine (`BlendOptions`) and for one request (`BlendRequest`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from cuvee.blend.segmentation import ContentChunker, LineBreaks, ParagraphChunker, Span
from cuvee.codec.errors import InputError
from cuvee.codec.support.suggest import suggestion
from cuvee.integrations.options import check_values, limited
from cuvee.integrations.vllm.request_params import PARAMETERS, misplaced_field, request_fields, shown

_LEAST_SEGMENT = 12  # tokens of `segment_tokens`: a third of them is the shortest segment


@dataclass(frozen=True, slots=True)
class BlendOptions:
    """Option `blend` of the connector, by the names of the JSON that sets it; `{}` is all defaults.

    Attributes:
        cost: share of the reused tokens' computation to spend on recomputing some of them; 1 recomputes all of them.
        segment_tokens: tokens of the parts of prompts on average: a third as many at least, and four times as many at
            most. Shorter parts are never used. They are found by paragraphs, and long ones by their content; by content
            alone if the engine has no tokenizer.
        min_context: tokens that must stand before a segment for it to be stored, unless the request names it. A segment
            computed at the beginning of a prompt lacks the context that it usually has.

    Raises:
        InputError: a value of the wrong type or range.
    """

    cost: float = limited(0.15, elsewhere=True)
    segment_tokens: int = limited(192, least=_LEAST_SEGMENT)
    min_context: int = limited(128, least=0)

    def __post_init__(self) -> None:
        _check_cost("blend.cost", self.cost)
        check_values(self, "blend.")

    @property
    def least_tokens(self) -> int:
        """Tokens of the shortest segment that is used."""
        return self.segment_tokens // 3

    @property
    def min_position(self) -> int:
        """Tokens before this position are computed even where a segment holds them. All later tokens attend to them
        most (attention sinks: Xiao et al., arXiv:2309.17453), and segments were computed behind more text.
        """
        return self.least_tokens

    @property
    def min_reused(self) -> int:
        """Fewest tokens that a blend must reuse; otherwise the prompt is computed."""
        return 4 * self.least_tokens

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
        return cls(**given)

    def chunker(self, breaks: LineBreaks | None = None) -> ContentChunker | ParagraphChunker:
        """Return what finds segments: by paragraphs if the line breaks are known, else by content alone."""
        content = ContentChunker(self.least_tokens, self.segment_tokens, 4 * self.segment_tokens)
        return content if breaks is None else ParagraphChunker(content, breaks)


@dataclass(frozen=True, slots=True)
class BlendRequest:
    """Options of one request, in `kv_transfer_params`: `{"cuvee": {"segments": [[0, 512], …], "cost": 0.3}}`.

    Attributes:
        blend: if False, the request is computed or loaded exactly.
        segments: token positions `[start, end)` of its parts, in order, not overlapping; None: they are found.
        cost: as in `BlendOptions`; None: the engine's.
    """

    blend: bool = True
    segments: tuple[Span, ...] | None = None
    cost: float | None = None

    @classmethod
    def of(cls, params: Any, tokens: int) -> BlendRequest:
        """Read `kv_transfer_params` of a prompt of this many tokens.

        Raises:
            InputError: an unknown field, a value of the wrong type or range, or a field that may be misplaced.
        """
        given = request_fields(params)
        if misplaced := misplaced_field(params):  # it may be "blend": false
            raise InputError(misplaced)
        blend, cost = given.get("blend", True), given.get("cost")
        if not isinstance(blend, bool):
            raise InputError(f"{PARAMETERS}.blend: must be true or false, got {shown(blend)}")
        if cost is not None:
            _check_cost(f"{PARAMETERS}.cost", cost)
        segments = given.get("segments")
        return cls(blend, None if segments is None else _spans(segments, tokens), cost)


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


def _check_cost(name: str, cost: object) -> None:
    if isinstance(cost, bool) or not isinstance(cost, int | float) or not 0 <= cost <= 1:
        raise InputError(f"{name}: must be a number from 0 to 1, got {shown(cost)}")
