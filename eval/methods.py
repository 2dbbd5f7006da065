"""The methods of a report by key, and what to call them.

key                   family       meaning
kivi4                 kivi4        a baseline with one setting
pca/layer@0.4         pca/layer     a baseline with a dial, learned from caches; its setting stands after the @
cuvee/layer@balanced  cuvee/layer  a codec with a profile: a preset, or a step ("2^-3") on the same curve
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from cuvee.codec.errors import InputError
from cuvee.codec.support.suggest import suggestion
from cuvee.eval.baselines.quantizers import CacheGen, Destroyed, Float8, Int8, Kivi, Uncompressed
from cuvee.eval.quality import CodecMethod, Method

__all__ = ["BASELINES", "UNCOMPRESSED", "baseline", "family_label", "method_identity"]

UNCOMPRESSED = "bf16"  # the key of the unchanged cache

BASELINES: dict[str, tuple[str, Callable[[], Method]]] = {
    UNCOMPRESSED: ("16-bit cache", Uncompressed),
    "fp8-e4m3": ("FP8 e4m3", Float8),
    "fp8-e4m3-unit": ("FP8 e4m3, a scale per tensor", lambda: Float8(scale="unit")),
    "fp8-e4m3-head": ("FP8 e4m3, a scale per head", lambda: Float8(scale="head")),
    "int8": ("int8 per tensor", Int8),
    "kivi4": ("KIVI int4", lambda: Kivi(4)),
    "kivi2": ("KIVI int2", lambda: Kivi(2)),
    "cachegen": ("CacheGen as shipped", CacheGen),
    "cachegen-tables-free": ("CacheGen, tables free", lambda: CacheGen(count_tables=False)),
    "destroyed": ("destroyed cache", Destroyed),
}
"""The baselines with one setting: key -> (label, how to make it)."""

_GROUPS = {
    "head": "a basis per head",
    "unit": "a basis for K, one for V",
    "layer": "a basis per layer",
    "all": "one basis for all layers",
    "d4": "D4",
    "e8": "E8",
}


def baseline(name: str) -> Method:
    """Make the baseline with this key in `BASELINES`.

    Raises:
        InputError: there is no baseline of that name.

    Example:
        >>> from cuvee.eval.methods import baseline
        >>> baseline("kivi4")
        Kivi(bits=4, group=32, counts='levels, and 2 x 16 bits per group for minimum and scale')
    """
    if name not in BASELINES:
        raise InputError(f"method: {name!r} is not known; {suggestion(name, BASELINES)}")
    return BASELINES[name][1]()


def family_label(family: str) -> str:
    """Return the label of a family: "pca/layer" is "PCA, a basis per layer"."""
    if family in BASELINES:
        return BASELINES[family][0]
    kind, _, group = family.partition("/")
    if family == "cuvee/lossless":
        return "cuvee lossless"
    if group.startswith("layers:"):
        spans = f"a basis per {group.removeprefix('layers:')} layers"
    else:
        spans = _GROUPS.get(group, group)
    names = {"pca": "PCA", "kakeyalattice": "KakeyaLattice", "turboquant": "TurboQuant"}
    name = names.get(kind, kind)
    return f"{name}, {spans}" if spans else name


def method_identity(method: Method) -> dict[str, Any]:
    """Return what distinguishes a method from all others, as a dict for JSON, for digests and reports.

    A codec is identified by its profile and its step. Any other method is identified by its attribute `identity` if it
    has one, and by its `repr` otherwise.

    Raises:
        InputError: the `repr` does not show what the method holds (tensors, plain objects).
    """
    given = getattr(method, "identity", None)
    if given is not None:
        return dict(given)
    if isinstance(method, CodecMethod):
        codec = method.codec
        return {
            "method": "cuvee",
            "profile": codec.profile.id.hex(),
            "source": codec.profile.source,
            "step": codec.step_index,
            "lossless": codec.lossless,
        }
    text = repr(method)
    if re.search(r"\b(tensor|array)\(| at 0x", text):
        raise InputError(
            f"method: the repr of {type(method).__name__} does not name its contents: make it a dataclass of plain "
            "values, or give it an attribute `identity`, a dict"
        )
    return {"method": text}
