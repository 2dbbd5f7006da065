"""The servers that are compared: vLLM alone, with files of its own, and with `CuveeConnector` at several qualities.

The one store that vLLM 0.32 brings and that runs on a CPU is its ExampleConnector, which keeps raw files. It finds a
prompt only as a whole, so the variant shows what raw files cost and save where the same prompts come again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuvee.codec.errors import InputError

__all__ = ["BASELINE", "VARIANTS", "ServerVariant", "choose_variants"]

BASELINE = "no cache"


@dataclass(frozen=True, slots=True)
class ServerVariant:
    """A way to run the server.

    Attributes:
        name: in tables.
        quality: of the connector; None without it.
        own_cache: whether vLLM's prefix cache is on.
        learned: whether it needs a profile.
        blend: whether segments are reused at any position; answers are approximations then.
        raw: whether vLLM's ExampleConnector keeps raw files.
    """

    name: str
    quality: str | None = None
    own_cache: bool = True
    learned: bool = False
    blend: bool = False
    raw: bool = False

    @property
    def stores(self) -> bool:
        """Whether its cache outlives the server."""
        return self.raw or self.quality is not None

    def command(self, store: Path, profile: Path | None) -> list[str]:
        """Return its arguments for the command line of the server."""
        arguments = [] if self.own_cache else ["--no-enable-prefix-caching"]
        if self.quality is not None:
            extra: dict[str, Any] = {"store": f"file://{store}", "quality": self.quality}
            if self.blend:
                extra["blend"] = {}
            if self.learned and profile is not None:
                extra["profile"] = str(profile)
            transfer = {
                "kv_connector": "CuveeConnector",
                "kv_connector_module_path": "cuvee.integrations.vllm",
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            }
            arguments += ["--kv-transfer-config", json.dumps(transfer)]
        if self.raw:
            transfer = {
                "kv_connector": "ExampleConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"shared_storage_path": str(store)},
            }
            # It keeps what the first step of a prompt computes, so that step has to be all of the prompt.
            arguments += ["--kv-transfer-config", json.dumps(transfer), "--max-num-batched-tokens", "16384"]
        return arguments


VARIANTS = (
    ServerVariant(BASELINE, own_cache=False),
    ServerVariant("vLLM's prefix cache"),
    ServerVariant("raw files", own_cache=False, raw=True),
    ServerVariant("cuvee lossless", "lossless"),
    ServerVariant("cuvee high", "high", learned=True),
    ServerVariant("cuvee balanced", "balanced", learned=True),
    ServerVariant("cuvee small", "small", learned=True),
    ServerVariant("cuvee lossless, blend", "lossless", blend=True),
    ServerVariant("cuvee high, blend", "high", learned=True, blend=True),
)


def choose_variants(names: Sequence[str], profile: Path | None) -> tuple[ServerVariant, ...]:
    """Return the variants with these names, and the baseline; without names, all variants that can run.

    Raises:
        InputError: a variant is unknown, or needs a profile and there is none.
    """
    known = {variant.name: variant for variant in VARIANTS}
    for name in names:
        if name not in known:
            raise InputError(f"variant: must be one of {', '.join(map(repr, known))}, got {name!r}")
        if known[name].learned and profile is None:
            raise InputError(f"profile: {name!r} needs one of the model: give --profile, or leave that variant out")
    chosen = names or [variant.name for variant in VARIANTS if profile is not None or not variant.learned]
    return tuple(variant for variant in VARIANTS if variant.name in (BASELINE, *chosen))
