"""A made-up report, for its document and its plot."""

from __future__ import annotations

from typing import Any

import pytest
from tests.eval.report.world import entry


@pytest.fixture
def report() -> dict[str, Any]:
    """A report of made-up figures: baselines, three curves at the same KLs, and something of all else."""
    points = (
        ("bf16", "16-bit cache", 16.0, 2e-5), ("fp8-e4m3", "FP8 e4m3", 8.0, 5e-3), ("kivi4", "KIVI int4", 5.0, 0.017),
        ("cachegen", "CacheGen as shipped", 6.0, 0.048), ("destroyed", "destroyed cache", 0.0, 0.8),
    )  # fmt: skip
    quality = [entry(key, bits, kl) | {"label": label} for key, label, bits, kl in points]
    settings = (
        ("high", 3.1, 1e-3), ("balanced", 1.2, 5e-3), ("small", 0.6, 0.02), ("2^-5", 5.3, 2e-5), ("2^0", 0.4, 0.1),
    )  # fmt: skip
    curves = ("cuvee/layer", "cuvee", 1.0), ("cuvee/all", "cuvee joint", 0.6), ("pca/all", "PCA", 1.5)
    for family, name, factor in curves:
        more: dict[str, Any] = {"counts": "ideal entropy"} if family == "pca/all" else {}
        for setting, bits, kl in settings:
            kind = "curve" if family == "pca/all" or setting.startswith("2^") else "preset"
            made = entry(f"{family}@{setting}", factor * bits, kl, kind, **more)
            quality.append(made | {"label": f"{name}, {setting}"})
    for made in quality:
        made["per_sequence"]["delta_nll"] = [made["delta_nll"] * share for share in (1.7, 0.2, 1.9, 0.2)]
        made["per_sequence"]["kl"] = [made["kl"]] * 4
    exact = quality[0]["nll"] - quality[0]["delta_nll"]
    tasks = [
        {"name": "recall", "metric": "acc", "higher_is_better": True, "docs": 200, "chance": 0.125,
         "description": "one of eight values, by its key"},
        {"name": "book", "metric": "word_perplexity", "higher_is_better": False, "docs": 9, "chance": None,
         "description": ""},
    ]  # fmt: skip
    scores = []
    for task, base in (("recall", 0.91), ("book", 20.0)):
        for rank, e in enumerate(e for e in quality if e["kind"] != "curve"):
            first = e["key"] == "bf16"
            by_doc = [20.0, 1.0] if task == "book" else [1.0, 1.0, 0.0] if first else [0.0, 0.0, 1.0]
            scores.append(
                {"key": e["key"], "task": task, "score": base - 0.005 * rank, "stderr": 0.02,
                 "difference": None if first else -0.005 * rank, "difference_stderr": None if first else 0.012,
                 "per_doc": by_doc, "bits_per_value": e["bits_per_value"], "docs": 200}
            )  # fmt: skip
    change = {"key": "kivi4", "metric": "kl", "before": 0.2, "after": 0.3, "stderr": 0.01, "more_is_better": False}
    return {
        "format": "cuvee-report",
        "version": 6,
        "complete": True,
        "digest": "d1" * 16,
        "command": "cuvee report --out a_folder",
        "configuration": {"cache_dtype": "bfloat16", "chunk_tokens": 256, "limit": None, "seed": 7},
        "environment": {
            "cuvee": "0.1.0", "cpu": "A CPU", "cores": 2, "gpu": None, "torch": "2.13.0", "triton": None,
            "date": "2026-11-20T10:00:00+00:00",
        },
        "model": {
            "name": "books-3m", "fingerprint": "f0" * 16, "model_type": "llama", "parameters": 3443136,
            "dtype": "float32", "layers": 6, "values_per_token": 1536, "positions": 512,
        },
        "text": {
            "evaluation": [{"name": "orchard", "sha256": "bb" * 32, "tokens": 9000}],
            "sequences": 4, "length": 256, "prefix": 192,
            "tokens_sha256": "cc" * 32,
            "kinds": [
                {"text": "orchard", "reread": True, "rows": [0, 2]},
                {"text": "orchard", "reread": False, "rows": [1, 3]},
            ],
        },
        "profiles": {
            "layer": {"id": "1d" * 16, "group": "layer", "source": "calibrated", "bytes": 1234567,
                      "bits_per_value_over_1m_tokens": 0.0064},
        },
        "exact": {"per_sequence": [exact + away for away in (-2.0, 2.0, -1.9, 1.9)]},
        "quality": quality,
        "tasks": tasks,
        "scores": scores,
        "against": {
            "name": "old.json", "unchanged": 7, "missing": ["kivi4 recall", "lost kl", "lost top1"], "worse": 4,
            "changes": [
                {**change, "metric": "top1", "more_is_better": True, "worse": False}, {**change, "worse": True},
            ],
        },
        "skipped": [{"key": "turboquant@2", "reason": "too few sequences"}],
        "comparison": [
            {
                "anchor": "fp8-e4m3", "kl": 0.0047, "bits_per_value": 8.0,
                "families": [
                    {"family": "cuvee/layer", "bits_per_value": 1.27, "low": 1.2, "high": 1.35},
                    {"family": "cuvee/all", "bits_per_value": None, "reason": "its curve ends at 0.02"},
                    {"family": "pca/all", "bits_per_value": 1.9, "low": 1.8, "high": 2.0},
                ],
                "ratios": [
                    {"of": "cuvee/layer", "against": "fp8-e4m3", "ratio": 6.34, "low": 6.01, "high": 6.72},
                    {"of": "cuvee/layer", "against": "pca/all", "ratio": 1.5, "low": 1.2, "high": None},
                    {"of": "cuvee/all", "against": "fp8-e4m3", "ratio": None, "low": None, "high": None},
                ],
            }
        ],
        "by_kind": [
            {
                "text": name, "reread": again, "sequences": 5,
                "comparison": [
                    {
                        "anchor": "fp8-e4m3", "kl": 0.004, "bits_per_value": 8.0, "families": [],
                        "ratios": [
                            {"of": "cuvee/layer", "against": "fp8-e4m3", "ratio": ratio, "low": low, "high": 9.5},
                            {"of": "cuvee/layer", "against": "pca/layer", "ratio": None, "low": None, "high": None},
                            {"of": "cuvee/layer", "against": "pca/all", "ratio": 1.4, "low": 1.3, "high": 1.5},
                        ],
                    }
                ],
            }
            for name, again, ratio, low in (
                ("orchard", False, 6.5, 5.5), ("orchard", True, 5.5, 4.5), ("lantern", False, 7.5, None)
            )
        ],
        "sizes": [
            {"family": "cuvee/layer", "kl": 0.005, "bits_per_value": 1.25},
            {"family": "cuvee/layer", "kl": 0.02, "bits_per_value": 0.5},
            {"family": "pca/all", "kl": 0.005, "bits_per_value": None},
            {"family": "pca/all", "kl": 0.02, "bits_per_value": 2.0},
            {"family": "cuvee/all", "kl": 0.02, "bits_per_value": None},
        ],
        "seconds": 312.4,
    }  # fmt: skip
