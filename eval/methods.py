"""The methods of a report by key, and what to call them.

key       family             what it is
kivi4     kivi4              a baseline with one setting
pca/kv@2  pca/kv             a baseline with a dial, learned from caches: its setting stands behind the @
cuvee/layer@balanced         a codec with a profile: a preset, or a step ("2^-3") on the same curve
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from cuvee.codec.errors import InputError
from cuvee.eval.baselines.quantizers import CacheGen, Destroyed, Float8, Identity, Int8, Kivi
from cuvee.eval.quality import Method

__all__ = ["BASELINES", "EXACT", "Candidate", "baseline", "family_label"]

EXACT = "bf16"  # the key of the cache as it is

BASELINES: dict[str, tuple[str, Callable[[], Method]]] = {
    EXACT: ("16-bit cache", Identity),
    "fp8-e4m3": ("FP8 e4m3", Float8),
    "fp8-e5m2": ("FP8 e5m2", lambda: Float8("e5m2")),
    "int8": ("int8 per tensor", Int8),
    "kivi4": ("KIVI int4", lambda: Kivi(4)),
    "kivi3": ("KIVI int3", lambda: Kivi(3)),
    "kivi2": ("KIVI int2", lambda: Kivi(2)),
    "cachegen": ("CacheGen as shipped", CacheGen),
    "cachegen-tables-free": ("CacheGen, tables free", lambda: CacheGen(count_tables=False)),
    "destroyed": ("destroyed cache", Destroyed),
}
"""Baselines with one setting: key -> (label, how to make it)."""

_GROUPS = {
    "head": "a basis per head",
    "unit": "a basis for K, one for V",
    "layer": "a basis per layer",
    "all": "one basis for all layers",
    "kv": "one basis for all K, one for all V",
}


@dataclass(frozen=True, slots=True)
class Candidate:
    """One method of a report.

    Attributes:
        key: names it; unique in a report.
        label: for people.
        kind: "point" (one setting), "curve" (a setting of a dial) or "preset" (of the codec; on its curve, too).
        make: builds the method, which may take the learning of a basis.
    """

    key: str
    label: str
    kind: str
    make: Callable[[], Method]

    @property
    def family(self) -> str:
        """What its settings have in common."""
        return self.key.partition("@")[0]

    @property
    def setting(self) -> str:
        """Where the dial stands; empty where there is none."""
        return self.key.partition("@")[2]


def baseline(name: str) -> Method:
    """A baseline of `BASELINES` by its key.

    Raises:
        InputError: there is none of that name.
    """
    if name not in BASELINES:
        near = difflib.get_close_matches(name, BASELINES, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(BASELINES)}"
        raise InputError(f"method: {name!r} is not known; {hint}")
    return BASELINES[name][1]()


def family_label(family: str) -> str:
    """What to call a family: "pca/kv" is "PCA, one basis for all K, one for all V"."""
    if family in BASELINES:
        return BASELINES[family][0]
    kind, _, group = family.partition("/")
    if family == "cuvee/lossless":
        return "cuvee lossless"
    if family == "cuvee/generic":
        return "cuvee, nothing learned"
    if group.startswith("layers:"):
        spans = f"a basis for {group.removeprefix('layers:')} layers"
    else:
        spans = _GROUPS.get(group, group)
    name = {"pca": "PCA", "kvtc": "KVTC"}.get(kind, kind)
    return f"{name}, {spans}" if spans else name
