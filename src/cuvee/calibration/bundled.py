"""The bundled model and texts, with which the demo, the tests and the reports need no network.

The bundled model, books-3m, is a Llama of 3.44 M parameters (see `models/books-3m/README.md`). The six texts were
written for this project (see `texts/README.md`): three for calibrating profiles, three for measuring them.
"""

from __future__ import annotations

from pathlib import Path

from cuvee.codec.errors import InputError

__all__ = [
    "CALIBRATION_TEXTS",
    "EVALUATION_TEXTS",
    "TEXTS",
    "bundled_model_path",
    "bundled_text",
]

CALIBRATION_TEXTS = ("harbour", "millrace", "postroad")
EVALUATION_TEXTS = ("orchard", "lantern", "garrison")
TEXTS = CALIBRATION_TEXTS + EVALUATION_TEXTS

_HERE = Path(__file__).parent
TEXTS_FOLDER = _HERE / "texts"


def bundled_model_path() -> Path:
    """Return the folder of the bundled model, which `from_pretrained` reads."""
    return _HERE / "models" / "books-3m"


def bundled_text(name: str) -> str:
    """Return one of the bundled texts, plain ASCII.

    Args:
        name: one of `CALIBRATION_TEXTS` or `EVALUATION_TEXTS`, such as "harbour" or "orchard".

    Raises:
        InputError: the name is unknown.

    Example:
        >>> from cuvee.calibration.bundled import bundled_text
        >>> bundled_text("orchard").splitlines()[0]
        'THE ORCHARD AT CULVERLEY'
    """
    if name not in TEXTS:
        raise InputError(f"name: must be one of {', '.join(TEXTS)}, got {name!r}")
    return (TEXTS_FOLDER / f"{name}.txt").read_text(encoding="ascii")
