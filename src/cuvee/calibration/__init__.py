"""Calibration data: texts, mixtures of texts, token sequences, and models to learn from.

    load_bundled_model                   the small bundled model
    load_model, load_tokenizer           any model by name or path, such as "smollm2", which is downloaded once
    bundled_text, mixture_text           bundled texts
    read_corpus, spread_sequences        your texts, and sequences spread evenly over them
    mixture                              the default: sequences of eight kinds of text, by kind
    more_text                            all sequences of the bundled texts, to predict caches from their tokens
    reread, sample_text                  sequences made to re-read, or sampled from the model

`cuvee.calibrate` takes the token sequences that these functions return.

Example:
    >>> from cuvee.calibration import read_corpus, spread_sequences
    >>> spread_sequences([read_corpus("harbour", "books-3m")], 512, 2).shape
    torch.Size([2, 512])
"""

from cuvee.calibration.bundled import (
    CALIBRATION_TEXTS,
    EVALUATION_TEXTS,
    bundled_model_path,
    bundled_text,
)
from cuvee.calibration.corpus import (
    BUNDLED_MODEL,
    Corpus,
    load_bundled_model,
    load_model,
    load_tokenizer,
    read_corpus,
    spread_sequences,
)
from cuvee.calibration.kinds import KINDS, mixture, mixture_text, more_text, tokenized
from cuvee.calibration.real_model import ModelUnavailableError
from cuvee.calibration.sequences import LENGTH, PREFIX, reread, sample_text

__all__ = [
    "BUNDLED_MODEL",
    "CALIBRATION_TEXTS",
    "EVALUATION_TEXTS",
    "KINDS",
    "LENGTH",
    "PREFIX",
    "Corpus",
    "ModelUnavailableError",
    "bundled_model_path",
    "bundled_text",
    "load_bundled_model",
    "load_model",
    "load_tokenizer",
    "mixture",
    "mixture_text",
    "more_text",
    "read_corpus",
    "reread",
    "sample_text",
    "spread_sequences",
    "tokenized",
]
