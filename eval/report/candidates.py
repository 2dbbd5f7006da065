"""The methods of a report: baselines with one setting, baselines that learn, and the codec at its presets and steps."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.errors import InputError, ProfileError
from cuvee.codec.layout import KVLayout
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.quality import PRESET_KL
from cuvee.eval.baselines.kakeyalattice import KAKEYA_RANGES, KakeyaLattice
from cuvee.eval.baselines.pca import MOST_VALUES, PCA_STEPS, PcaTransform, pca_columns
from cuvee.eval.baselines.turboquant import TURBOQUANT_BITS, TurboQuant
from cuvee.eval.methods import BASELINES, UNCOMPRESSED, family_label
from cuvee.eval.quality import CodecMethod, Method

__all__ = ["PEERS", "Candidate", "codec_candidates", "fixed_baselines", "pca_candidates", "peers", "select"]

CURVE_OCTAVES = (  # steps measured beside the presets, the finest first
    -6.0, -5.0, -4.0, -3.5, -3.0, -2.5, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0,
)  # fmt: skip
# Baselines that a quick report leaves out.
NOT_QUICK = ("fp8-e4m3-unit", "fp8-e4m3-head", "int8", "cachegen-tables-free")
PEERS = ("kakeyalattice", "turboquant")  # which need a package


@dataclass(frozen=True, slots=True)
class Candidate:
    """One method of a report.

    Attributes:
        key: names it; unique in a report.
        label: what people call it.
        kind: "point" (the only setting), "curve" (one setting of a dial) or "preset" (of the codec, and on its curve).
        make: builds the method. For some, that means learning a basis first.
    """

    key: str
    label: str
    kind: str
    make: Callable[[], Method]

    @property
    def family(self) -> str:
        """The key without the setting."""
        return self.key.partition("@")[0]

    @property
    def setting(self) -> str:
        """The setting after the @; empty if there is none."""
        return self.key.partition("@")[2]

    @property
    def names(self) -> tuple[str, ...]:
        """The names that select it: its key, its family, and the first part of the family."""
        return self.key, self.family, self.family.partition("/")[0]


def select(candidates: Sequence[Candidate], names: Sequence[str], quick: Sequence[Candidate]) -> list[Candidate]:
    """The candidates with one of these names, in order, and the 16-bit cache.

    Args:
        candidates: all there are.
        names: see `Candidate.names`; if there are none, all of `quick` is returned.
        quick: those to choose from, unless a name is of none of them.

    Raises:
        InputError: no candidate has that name.
    """
    if not names:
        return list(quick)
    chosen = {UNCOMPRESSED}
    for name in names:
        found = [c.key for c in quick if name in c.names] or [c.key for c in candidates if name in c.names]
        if not found:
            families = ", ".join(dict.fromkeys(c.family for c in candidates))
            near = difflib.get_close_matches(name, dict.fromkeys(n for c in candidates for n in c.names), 1)
            meant = f", did you mean {near[0]!r}?" if near else ":"
            raise InputError(
                f"methods: {name!r} is not known{meant} there are {families}, and settings of them after an @, as in "
                "pca/layer@0.4"
            )
        chosen.update(found)
    return [c for c in candidates if c.key in chosen]


def fixed_baselines(quick: bool) -> list[Candidate]:
    """The baselines with one setting."""
    skipped = NOT_QUICK if quick else ()
    return [Candidate(key, label, "point", make) for key, (label, make) in BASELINES.items() if key not in skipped]


def peers() -> list[Candidate]:
    """Return the published packages that run by their own code, at every setting; left out by name if not installed."""
    lattices = [
        Candidate(
            f"kakeyalattice/{lattice}@{q_range}",
            family_label(f"kakeyalattice/{lattice}"),
            "curve",
            partial(KakeyaLattice, lattice, q_range),
        )
        for lattice in ("d4", "e8")
        for q_range in KAKEYA_RANGES
    ]
    return lattices + [
        Candidate(f"turboquant@{bits}", family_label("turboquant"), "curve", partial(TurboQuant, bits))
        for bits in TURBOQUANT_BITS
    ]


def pca_candidates(
    layout: KVLayout, caches: Callable[[], list[KVChunk]], groups: Sequence[str], quick: bool
) -> list[Candidate]:
    """Return PCA with the groups that a profile can have, at every setting. It is learned when one is first made.

    Args:
        layout: of the caches that are coded.
        caches: called for the caches to learn from, when they are first needed.
        groups: of the profiles; a group too wide for PCA becomes "layer".
        quick: one group, and fewer settings.
    """

    @cache
    def learned(group: str) -> PcaTransform:
        return PcaTransform.fit(layout, caches(), group)

    def make(group: str, step: float) -> Method:
        return learned(group).method(step)

    found = []
    widths = {group: max(map(len, pca_columns(layout, group))) for group in groups}
    narrow = dict.fromkeys(group if widths[group] <= MOST_VALUES else "layer" for group in groups)
    for group in list(narrow)[:1] if quick else narrow:
        family = f"pca/{group}"
        for step in PCA_STEPS[1::2] if quick else PCA_STEPS:
            found.append(
                Candidate(f"{family}@{step:g}", family_label(family), "curve", partial(make, group, float(step)))
            )
    return found


def codec_candidates(layout: KVLayout, profiles: Mapping[str, Profile], quick: bool) -> list[Candidate]:
    """Return the lossless codec, and that of each profile at presets and further steps.

    Args:
        layout: of the caches.
        profiles: by name.
        quick: fewer steps.
    """
    found = [_coded("cuvee/lossless", "point", lambda: Codec(Profile.unlearned(layout), "lossless"))]
    for name, profile in profiles.items():
        found += [
            _coded(f"cuvee/{name}@{preset}", "preset", partial(_reaching, profile, preset)) for preset in PRESET_KL
        ]
        found += [
            _coded(f"cuvee/{name}@2^{octave:g}", "curve", partial(Codec, profile, step=2.0**octave))
            for octave in (CURVE_OCTAVES[1::2] if quick else CURVE_OCTAVES)
        ]
    return found


def _reaching(profile: Profile, preset: str) -> Codec:
    """Return the codec of a preset. If the profile's curve does not reach its KL, it would be lossless, off the curve.

    Raises:
        ProfileError: the curve does not reach it.
    """
    codec = Codec(profile, preset)
    if codec.lossless:
        raise ProfileError(f"{preset}: the profile's curve does not reach a KL of {PRESET_KL[preset]:g}")
    return codec


def _coded(key: str, kind: str, codec: Callable[[], Codec]) -> Candidate:
    family, _, setting = key.partition("@")
    label = family_label(family) if not setting else f"{family_label(family)}, {setting}"
    return Candidate(key, label, kind, lambda: CodecMethod(codec()))
