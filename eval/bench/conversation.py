"""The loss of generations: a conversation whose cache is stored after every turn and restored before the next.

    stored blobs --decode--> cache --model reads a turn--> its predictions, KL from those of the exact conversation
         ^                                  |
         +-------------- encode ------------+

| way | stored after a turn |
|---|---|
| once | the blobs that were there, and one of the new tokens |
| again | the same, but each old blob is decoded and encoded once more, at its place |
| anew | the whole cache, in chunks of 256 tokens as it stands now |
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import cuvee
from cuvee.calibration.corpus import BUNDLED_MODEL, load_config, read_corpus, sequences_by_text
from cuvee.codec.dtypes import TORCH_DTYPES
from cuvee.codec.errors import InputError
from cuvee.codec.models.forward import cache_argument, coded_layout, empty_cache
from cuvee.eval.bench.frame import Shown, machine_line, run_bench, say
from cuvee.eval.documents import ReportTable
from cuvee.eval.formatting import format_number, with_error
from cuvee.eval.machine import hardware
from cuvee.eval.quality import CHUNK_TOKENS, spans
from cuvee.eval.runs import MeasuredModel
from cuvee.integrations.transformers import chunks_from_cache
from cuvee.learning.divergence import stderr

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["WAYS", "converse"]


def _once(codec: cuvee.Codec, whole: cuvee.KVChunk, blobs: list[bytes]) -> list[bytes]:
    known = sum(cuvee.inspect(blob).tokens for blob in blobs)
    return [*blobs, codec.encode(whole.slice(known, whole.tokens))]


def _again(codec: cuvee.Codec, whole: cuvee.KVChunk, blobs: list[bytes]) -> list[bytes]:
    return [*(codec.encode(codec.decode(blob)) for blob in blobs), _once(codec, whole, blobs)[-1]]


def _anew(codec: cuvee.Codec, whole: cuvee.KVChunk, blobs: list[bytes]) -> list[bytes]:
    return [codec.encode(whole.slice(*span)) for span in spans(whole.tokens, CHUNK_TOKENS)]


WAYS: dict[str, Callable[[cuvee.Codec, cuvee.KVChunk, list[bytes]], list[bytes]]] = {
    "once": _once, "again": _again, "anew": _anew,
}  # fmt: skip
"""What is stored after a turn of a whole cache, given what was stored after the last one."""


@torch.no_grad()
def converse(model: PreTrainedModel, codec: cuvee.Codec, ids: torch.Tensor, prompt: int, turn: int) -> dict[str, Any]:
    """Read a text as a conversation: a prompt, then turns of equal length.

    Args:
        codec: of a profile of the model.
        ids: int64 `[1, T]`.
        prompt, turn: tokens. What is left at the end of the text is not read.

    Returns:
        By way: `kl`, nats per token of each turn, and `bytes`, of the blobs that it begins with.
    """

    def read(cache: Any, start: int, end: int) -> torch.Tensor:
        logits = model(input_ids=ids[:, start:end], use_cache=True, **cache_argument(model, cache)).logits
        return torch.log_softmax(logits[0].float(), -1)

    def whole(cache: Any, end: int) -> cuvee.KVChunk:
        return chunks_from_cache(cache, layout, ids[:, :end], chunk_tokens=end)[0]

    layout = cuvee.KVLayout.of(model)
    exact = empty_cache()
    read(exact, 0, prompt)
    blobs = dict.fromkeys(WAYS, _once(codec, whole(exact, prompt), []))
    found: dict[str, Any] = {way: {"kl": [], "bytes": []} for way in WAYS}
    for start in range(prompt, ids.shape[1] - turn + 1, turn):
        expected = read(exact, start, start + turn)
        for way, store in WAYS.items():
            cache = cuvee.decode_cache(codec, blobs[way], model)
            got = read(cache, start, start + turn)
            found[way]["kl"].append(float((expected.exp() * (expected - got)).sum(-1).mean()))
            found[way]["bytes"].append(sum(map(len, blobs[way])))
            blobs[way] = store(codec, whole(cache, start + turn), blobs[way])
    return found


def _show(report: Mapping[str, Any]) -> Shown:
    machine, conversations = report["hardware"], report["conversations"]
    line = machine_line(machine, f"torch {machine['torch']}")
    rows = []
    for turn in range(report["turns"]):
        kl = [[one[way]["kl"][turn] for one in conversations] for way in WAYS]
        once, anew = (sum(one[way]["bytes"][turn] for one in conversations) for way in ("once", "anew"))
        cached = report["prompt"] + turn * report["turn"]
        losses = [with_error(float(np.mean(one)), stderr(one)) for one in kl]
        rows.append([str(turn + 1), str(cached), *losses, format_number(once / anew, 2)])
    title = f"{report['model']}, {report['quality']}: KL by turn, {len(conversations)} conversations"
    note = "KL of a turn's predictions from those of the exact conversation, nats per token, ± one standard error."
    columns = ["turn", "cached", *WAYS, "bytes, once / anew"]
    return Shown(line, [ReportTable(columns, rows, title, note)])


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", "-m", default=BUNDLED_MODEL, help="a folder, a hub name, books-3m or smollm2")
    parser.add_argument("--profile", type=Path, required=True, help="of the model")
    parser.add_argument("--quality", default="balanced", help="a preset (default: balanced)")
    parser.add_argument("--dtype", default="float32", choices=tuple(TORCH_DTYPES), help="of the model")
    parser.add_argument("--text", default="orchard", help="a file or a bundled text (default: orchard)")
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=256, help="tokens before the first turn")
    parser.add_argument("--turn", type=int, default=64, help="tokens of a turn")
    parser.add_argument("--turns", type=int, default=4)


def _measure(given: argparse.Namespace) -> dict[str, Any]:
    for name in ("conversations", "prompt", "turn", "turns"):
        if getattr(given, name) < 1:
            raise InputError(f"{name}: must be at least 1, got {getattr(given, name)}")
    codec = cuvee.Codec(cuvee.Profile.load(given.profile), given.quality)
    length = given.prompt + given.turns * given.turn
    rows, _ = sequences_by_text([read_corpus(given.text, given.model)], length, given.conversations)
    codec.profile.check_layout(coded_layout(load_config(given.model)))
    measured = MeasuredModel.load(given.model, given.dtype)
    measured.check_profile(given.profile, codec.profile)
    conversations = []
    for row in rows:
        conversations.append(converse(measured.lm, codec, row[None], given.prompt, given.turn))
        say(f"conversation {len(conversations)} of {len(rows)}")
    return {
        "model": measured.describe()["name"], "dtype": given.dtype, "quality": codec.described_quality,
        "text": Path(given.text).name, "prompt": given.prompt, "turn": given.turn, "turns": given.turns,
        "conversations": conversations, "hardware": hardware(),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(run_bench("conversation", "What storing a cache after every turn costs.", _options, _measure, _show))
