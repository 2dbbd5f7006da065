"""What kvpress's presses keep of contexts, computed by `presses_worker.py` in an environment of its own."""

from __future__ import annotations

import base64
import binascii
import json
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cuvee.codec.errors import FormatError, InputError
from cuvee.codec.support.plain_json import parse_json

__all__ = ["Kept", "Presses", "read_presses", "run_presses"]

_WORKER = Path(__file__).with_name("presses_worker.py")
_HOW = "make one with `python3.11 -m venv FOLDER` and `FOLDER/bin/pip install torch kvpress==0.5.5`"

Kept = npt.NDArray[np.bool_]
"""`[L, H, T]`: which positions a press keeps in each layer and KV head."""


@dataclass(frozen=True, slots=True)
class Presses:
    """What presses keep.

    Attributes:
        kvpress, transformers: versions in the environment.
        kept: of each context, by press and ratio.
    """

    kvpress: str
    transformers: str
    kept: list[dict[tuple[str, float], Kept]]


def run_presses(
    python: Path,
    model: Path,
    contexts: Sequence[Sequence[int]],
    presses: Sequence[str],
    ratios: Sequence[float],
) -> Presses:
    """Ask what presses keep of contexts.

    Args:
        python: the interpreter of an environment with kvpress.
        model: folder of the checkpoint.
        contexts: token ids.
        presses: names of kvpress's classes.
        ratios: shares of the positions to drop.

    Raises:
        InputError: there is no such interpreter, kvpress is not installed there, or the process failed.
        FormatError: see `read_presses`.
    """
    asked = {
        "model": str(model), "presses": list(presses), "ratios": list(ratios),
        "contexts": [list(context) for context in contexts],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        question, answer = Path(folder) / "asked.json", Path(folder) / "kept.json"
        question.write_text(json.dumps(asked))
        command = [str(python), str(_WORKER), str(question), str(answer)]
        try:
            done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        except OSError as error:
            raise InputError(
                f"python: must be the interpreter of an environment with kvpress, got {python} ({error.strerror}): "
                f"{_HOW}"
            ) from error
        if done.returncode or not answer.is_file():
            last = (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]
            raise InputError(f"python: {python} could not run kvpress's presses: {last}")
        return read_presses(answer.read_text(), contexts, presses, ratios)


def read_presses(
    text: str, contexts: Sequence[Sequence[int]], presses: Sequence[str], ratios: Sequence[float]
) -> Presses:
    """Read the file that `presses_worker.py` writes; arguments as for `run_presses`.

    Raises:
        FormatError: it is not such a file, or answers another question.

    Example:
        >>> text = '''{"kvpress": "0.5.5", "transformers": "5.2.0", "layers": 1, "heads": 2,
        ...            "kept": [{"KnormPress": ["jw=="]}]}'''
        >>> read_presses(text, [[5, 6, 7, 8]], ["KnormPress"], [0.5]).kept[0]["KnormPress", 0.5].tolist()
        Traceback (most recent call last):
        cuvee.codec.errors.FormatError: presses: KnormPress at 0.5 must keep equally many positions in all heads
        >>> text = text.replace("jw==", "nA==")
        >>> read_presses(text, [[5, 6, 7, 8]], ["KnormPress"], [0.5]).kept[0]["KnormPress", 0.5].tolist()
        [[[True, False, False, True], [True, True, False, False]]]
    """
    try:
        told: dict[str, Any] = parse_json(text)
        if len(told["kept"]) != len(contexts):
            raise FormatError(f"presses: must be for {len(contexts)} contexts, got {len(told['kept'])}")
        kept = [
            {
                (name, ratio): _unpacked(bits, (told["layers"], told["heads"], len(context)), f"{name} at {ratio}")
                for name in presses
                for ratio, bits in zip(ratios, own[name], strict=True)
            }
            for context, own in zip(contexts, told["kept"], strict=True)
        ]
        return Presses(str(told["kvpress"]), str(told["transformers"]), kept)
    except FormatError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(
            f"presses: must be what presses_worker.py writes ({type(error).__name__}: {error})"
        ) from error


def _unpacked(bits: str, shape: tuple[int, int, int], what: str) -> Kept:
    count = int(np.prod(shape))
    try:
        packed = np.frombuffer(base64.b64decode(bits, validate=True), np.uint8)
    except binascii.Error as error:
        raise FormatError(f"presses: {what} must be base64, but {error}") from error
    if len(packed) != -(-count // 8):
        raise FormatError(f"presses: {what} must hold {count} bits for {list(shape)}, got {8 * len(packed)}")
    kept: Kept = np.unpackbits(packed, count=count).reshape(shape).astype(bool)
    counts = kept.sum(-1)
    if counts.min() != counts.max() or not counts.min():
        raise FormatError(f"presses: {what} must keep equally many positions in all heads")
    return kept
