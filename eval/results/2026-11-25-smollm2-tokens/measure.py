"""Measure the size of a cache at the KL of FP8, on two texts of 10 sequences each, plain and re-reading.

python measure.py PROFILE.safetensors OUT.json NOVEL.md CODE.txt
"""

import json
import math
import sys
from pathlib import Path

import torch

import cuvee
from cuvee.calibration import load_smollm2, reread, split_sequences
from cuvee.codec.learning.divergence import compare
from cuvee.codec.models.forward import prefill, score

CACHED, STEP_INDICES = 384, tuple(range(-192, 1, 32))


def fp8(chunk: cuvee.KVChunk) -> cuvee.KVChunk:
    """Cast a chunk to FP8 e4m3 and back."""
    keys, values = ([x.to(torch.float8_e4m3fn).float() for x in unit] for unit in (chunk.keys, chunk.values))
    return cuvee.KVChunk(keys, values, chunk.layout, chunk.start)


profile_path, out, *paths = sys.argv[1:]
model, tokenizer = load_smollm2(torch.float32)
texts = {}
for name, path in zip(("novel", "code"), paths, strict=True):
    ids = tokenizer(Path(path).read_text(errors="ignore")[:1_500_000], return_tensors="pt").input_ids[0]
    texts[name] = split_sequences(ids, 10)
    texts[f"{name}, re-reading"] = reread(split_sequences(ids, 20), CACHED, 0)[::2][:10]
profile = cuvee.Profile.load(profile_path)
measured = cuvee.measure(profile, model, texts, prefix=CACHED, step_indices=STEP_INDICES)
result = {}
for name, tokens in texts.items():
    losses = []
    with torch.no_grad():
        for batch in tokens.split(5):
            chunks, rest = prefill(model, batch[:, :CACHED], profile.layout), batch[:, CACHED:]
            exact = score(model, chunks, rest)
            losses += compare(exact, score(model, [fp8(chunk) for chunk in chunks], rest), rest[:, 1:])[0]
    target = sum(losses) / len(losses)
    curve = sorted(measured.curves[name], key=lambda point: point.step_index)
    below = [point for point in curve if point.kl <= target][-1]
    above = next(point for point in curve if point.kl > target)
    share = math.log(target / below.kl) / math.log(above.kl / below.kl)
    bits = below.bits_per_value * (above.bits_per_value / below.bits_per_value) ** share
    result[name] = {
        "fp8_kl": target,
        "bits": bits,
        "times_smaller": 8 / bits,
        "curve": [{"step_index": p.step_index, "bits": p.bits_per_value, "kl": p.kl} for p in curve],
    }
    print(f"{name}: {bits:.3f} bits at {target:.5f}, {8 / bits:.2f} times smaller than FP8", flush=True)
Path(out).write_text(json.dumps(result, indent=2) + "\n")
