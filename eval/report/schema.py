"""What a report holds: the one form of `report.json`, which the run fills, continues, compares and renders.

Report.to_dict() --> report.json --> Report.from_dict()      refuses what is missing or of another type, by name
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from cuvee.codec.errors import FormatError, VersionError
from cuvee.codec.support.plain_json import parse_json
from cuvee.eval.quality import Quality

__all__ = [
    "REPORT_FORMAT", "REPORT_VERSION", "Anchor", "ChangeEntry", "Changes",
    "Exact", "FamilySize", "Kind", "KindComparison", "MethodEntry", "ModelInfo", "ProfileEntry", "Ratio",
    "Report", "Score", "SizeAtKl", "Skipped", "Source", "Task", "TextInfo", "read_entry",
]  # fmt: skip

REPORT_FORMAT, REPORT_VERSION = "cuvee-report", 6
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MethodEntry(Quality):
    """The quality of a method: see `Quality`, and `Candidate` for the key, family, label, kind and setting."""

    key: str
    family: str
    label: str
    kind: str
    setting: str


@dataclass(frozen=True, slots=True)
class Task:
    """A task of lm-eval; `chance` is the score of a guess, and `docs_sha256` names the documents."""

    name: str
    metric: str
    higher_is_better: bool
    docs: int
    chance: float | None
    description: str
    docs_sha256: str


@dataclass(frozen=True, slots=True)
class Score:
    """The score of a method on a task, by document where it is a mean, and its difference from the exact cache's."""

    key: str
    task: str
    score: float
    stderr: float | None
    per_doc: list[float] | None
    bits_per_value: float | None
    docs: int
    difference: float | None
    difference_stderr: float | None


@dataclass(frozen=True, slots=True)
class Skipped:
    """What was left out, and why."""

    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class FamilySize:
    """The size of a family at the KL of an anchor, with its 95% interval; a `reason` where its curve ends before."""

    family: str
    bits_per_value: float | None
    low: float | None = None
    high: float | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times smaller the family `of` is than `against`, with its 95% interval."""

    of: str
    against: str
    ratio: float | None
    low: float | None
    high: float | None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Anchor:
    """A method at whose KL all curves are compared."""

    anchor: str
    kl: float
    bits_per_value: float
    families: list[FamilySize]
    ratios: list[Ratio]


@dataclass(frozen=True, slots=True)
class KindComparison:
    """The comparison on the sequences of one text, which repeat a part of their cache (`reread`) or do not."""

    text: str
    reread: bool
    sequences: int
    comparison: list[Anchor]


@dataclass(frozen=True, slots=True)
class SizeAtKl:
    """The size of a family at a round KL; None where its curve was not measured."""

    family: str
    kl: float
    bits_per_value: float | None


@dataclass(frozen=True, slots=True)
class ChangeEntry:
    """A figure of a method that changed since an earlier report, and the standard error of the paired difference."""

    key: str
    metric: str
    before: float
    after: float
    stderr: float | None
    more_is_better: bool
    worse: bool


@dataclass(frozen=True, slots=True)
class Changes:
    """What changed since the report `name`; `missing` names methods and metrics, `worse` counts both."""

    name: str
    changes: list[ChangeEntry]
    unchanged: int
    missing: list[str]
    worse: int


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model and the shape of its cache."""

    name: str
    fingerprint: str
    model_type: str
    parameters: int
    dtype: str
    layers: int
    values_per_token: int
    positions: int | None


@dataclass(frozen=True, slots=True)
class Source:
    """A text that was measured on."""

    name: str
    sha256: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Kind:
    """The sequences of one text, by their place, which repeat a part of their cache or do not."""

    text: str
    reread: bool
    rows: list[int]


@dataclass(slots=True)
class TextInfo:
    """Texts and sequences; `prefix` tokens of each are cached."""

    evaluation: list[Source]
    sequences: int
    length: int
    prefix: int
    tokens_sha256: str
    kinds: list[Kind]


@dataclass(frozen=True, slots=True)
class ProfileEntry:
    """A profile: its bytes as saved.

    `longest` is the length of the longest sequences that its curve was measured on; None if it does not say.
    """

    id: str
    group: str
    source: str
    bytes: int
    bits_per_value_over_1m_tokens: float
    longest: int | None = None


@dataclass(frozen=True, slots=True)
class Exact:
    """The model with its own cache: nats per token of each sequence, in order."""

    per_sequence: list[float]


@dataclass(slots=True)
class Report:
    """Everything that was measured, and how.

    Attributes:
        format, version: of the file.
        complete: whether nothing is missing.
        digest: of the configuration; runs with equal ones continue each other.
        command: what a reader would type; may be empty.
        configuration: what the figures follow from.
        environment: the machine and software, see `cuvee.eval.machine.hardware`.
        model, text, profiles, exact: what was measured with.
        quality: of methods.
        tasks, scores: of lm-eval.
        skipped: what was left out.
        comparison, by_kind, sizes: read off the curves.
        against: what changed since another report.
        seconds: of all runs together.
    """

    format: str
    version: int
    complete: bool
    digest: str
    command: str
    configuration: dict[str, Any]
    environment: dict[str, Any]
    model: ModelInfo
    text: TextInfo
    profiles: dict[str, ProfileEntry] = field(default_factory=dict)
    exact: Exact | None = None
    quality: list[MethodEntry] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    comparison: list[Anchor] = field(default_factory=list)
    by_kind: list[KindComparison] = field(default_factory=list)
    sizes: list[SizeAtKl] = field(default_factory=list)
    against: Changes | None = None
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> Report:
        """The inverse of `to_dict`.

        Raises:
            FormatError: a field is missing, unknown, or of another type; the message names it.
        """
        return read_entry(cls, data, "report")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Read a `report.json`.

        Raises:
            FormatError: the file is no report, or damaged.
            VersionError: it has another version.
            OSError: the file cannot be read.
        """
        try:
            data = parse_json(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise FormatError(f"{path} is not JSON: {error}") from error
        if not isinstance(data, dict) or data.get("format") != REPORT_FORMAT:
            raise FormatError(f"{path} is not a report: give the report.json that `cuvee report` writes")
        if data.get("version") != REPORT_VERSION:
            machine = data.get("environment")
            commit = machine.get("commit") if isinstance(machine, dict) else None
            remedy = f"check out commit {str(commit).rstrip('+')}, which wrote it, or make it again"
            raise VersionError(
                f"{path} is a report of version {data.get('version')!r}, not {REPORT_VERSION}: "
                f"{remedy if commit else 'make it again'}"
            )
        try:
            return cls.from_dict(data)
        except FormatError as error:
            raise FormatError(f"{path} is damaged: {error}") from error


def read_entry(kind: type[T], data: Any, where: str) -> T:
    """Make a dataclass of the dict that `asdict` gives.

    Args:
        kind: the dataclass.
        data: the dict.
        where: names it in errors.

    Raises:
        FormatError: a field is missing, unknown, or of another type.
    """
    if not isinstance(data, Mapping):
        raise FormatError(f"{where}: must be an object, got {data!r:.60}")
    known = _hints(kind)
    if unknown := data.keys() - known.keys():
        raise FormatError(f"{where}: has an unknown field {min(unknown)!r}")
    needed = {one.name for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING}  # type: ignore[arg-type]
    if missing := needed - data.keys():
        raise FormatError(f"{where}: lacks the field {min(missing)!r}")
    return kind(**{name: _read(known[name], value, f"{where}.{name}") for name, value in data.items()})


_hints: Callable[[Any], dict[str, Any]] = cache(get_type_hints)  # which takes longer than all the rest


def _read(hint: Any, data: Any, where: str) -> Any:
    """Check a value, and make what its type asks for."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        (other,) = (one for one in inner if one is not NoneType)
        return None if data is None else _read(other, data, where)
    if hint is Any:
        return data
    if is_dataclass(hint) and isinstance(hint, type):
        return read_entry(hint, data, where)
    wanted = origin or ((int, float) if hint is float else hint)
    if not isinstance(data, wanted) or (isinstance(data, bool) and hint is not bool):
        raise FormatError(f"{where}: must be of type {getattr(hint, '__name__', hint)}, got {data!r:.60}")
    if isinstance(data, list):
        return [_read(inner[0], value, f"{where}[{index}]") for index, value in enumerate(data)]
    if isinstance(data, dict):
        return {key: _read(inner[1], value, f"{where}.{key}") for key, value in data.items()}
    return data
