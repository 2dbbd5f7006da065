"""The bundled model and texts, with which the demo, the tests and the reports need no network.

The bundled model, books-3m, is a Llama of 3.44 M parameters (see `models/books-3m/README.md`). The six texts were
written for this project (see `texts/README.md`): three for calibrating profiles, three for measuring them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from cuvee.codec.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "CALIBRATION_TEXTS",
    "EVALUATION_TEXTS",
    "TEXTS",
    "bundled_model_path",
    "bundled_text",
    "load_bundled_model",
    "no_progress_bar",
]

CALIBRATION_TEXTS = ("harbour", "millrace", "postroad")
EVALUATION_TEXTS = ("orchard", "lantern", "garrison")
TEXTS = CALIBRATION_TEXTS + EVALUATION_TEXTS

_HERE = Path(__file__).parent
TEXTS_FOLDER = _HERE / "texts"


def bundled_model_path() -> Path:
    """Return the folder of the bundled model, which `from_pretrained` reads."""
    return _HERE / "models" / "books-3m"


def load_bundled_model(
    dtype: torch.dtype = torch.float32,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the bundled model and its tokenizer, in evaluation mode, on the CPU and without a network.

    Args:
        dtype: of the parameters. They are stored as bfloat16; float32, the default, is both faster and
            more precise on a CPU.

    Raises:
        InputError: `dtype` is not a floating-point type.
        ImportError: transformers is not installed (install `cuvee[transformers]`).

    Example:
        >>> from cuvee.calibration.bundled import load_bundled_model
        >>> model, tokenizer = load_bundled_model()
        >>> f"{model.num_parameters():,}", model.config.num_hidden_layers
        ('3,443,136', 6)
    """
    if not dtype.is_floating_point:
        raise InputError(f"dtype: must be a floating-point type, got {dtype}")
    from cuvee.calibration.corpus import BUNDLED_MODEL, load_model, load_tokenizer

    return load_model(BUNDLED_MODEL, str(dtype).removeprefix("torch.")), load_tokenizer(BUNDLED_MODEL)


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


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Hide the progress bar of a load that takes a fraction of a second; restore the setting afterwards."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
