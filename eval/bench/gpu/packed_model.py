"""SmolLM2 in fewer bytes than its checkpoint, and exactly: the quantized blocks of its weights, layer by layer.

    config.json      the model's configuration, the ids of the tokens that are kept, the bundled texts as their indices
    vocabulary.xz    the rows of those tokens: blocks of Q8_0, then the last norm
    layer-NN.xz      the norms of a layer, then its matrices in blocks of Q4_1

A token that occurs in no bundled text is left out, so predictions are over the tokens that do. The cache does not
depend on them. With the first layers alone, their part of the cache is exact, too; predictions are then those of the
last norm and the vocabulary after these layers.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.errors import CorruptError, InputError

__all__ = ["BLOCK", "load_packed", "pack_smollm2", "pack_tensors", "unpack_q4_1", "unpack_q8_0"]

BLOCK = 32  # weights, which share a scale
_Q4_1, _Q8_0 = 20, 34  # bytes of a block
_MATRICES = (
    ("self_attn.q_proj", "attn_q"), ("self_attn.k_proj", "attn_k"), ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"), ("mlp.gate_proj", "ffn_gate"), ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
)  # fmt: skip
_NORMS = (("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm"))

Bytes = npt.NDArray[np.uint8]


def unpack_q4_1(blocks: Bytes) -> torch.Tensor:
    """The weights of blocks `[N, 20]`, float32 `[N, 32]`: a scale and an offset in float16, then 32 times 4 bits."""
    scale, offset = (np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32) for at in (0, 2))
    level = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], 1)
    return torch.from_numpy(scale * level + offset)


def unpack_q8_0(blocks: Bytes) -> torch.Tensor:
    """The weights of blocks `[N, 34]`, float32 `[N, 32]`: a scale in float16, then 32 bytes with signs."""
    scale = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
    return torch.from_numpy(scale * np.ascontiguousarray(blocks[:, 2:]).view(np.int8))


def pack_tensors(path: Path, arrays: Sequence[Bytes]) -> None:
    """Compress bytes, one array after the other, into a file."""
    path.write_bytes(lzma.compress(b"".join(array.tobytes() for array in arrays), preset=9 | lzma.PRESET_EXTREME))


def pack_smollm2(gguf: Path, checkpoint: Path, texts: dict[str, list[int]], folder: Path) -> list[Path]:
    """Write the packed model, and check that it gives the weights of the checkpoint, bit for bit.

    Args:
        gguf: the quantized weights.
        checkpoint: the folder that transformers made of them.
        texts: ids of the tokens of each text.
        folder: for the files.

    Returns:
        the files in the order in which they are worth carrying.

    Raises:
        CorruptError: the packed weights are not those of the checkpoint.
    """
    from gguf import GGUFReader
    from safetensors.torch import load_file

    found = {tensor.name: tensor for tensor in GGUFReader(gguf).tensors}
    config = json.loads((checkpoint / "config.json").read_text())

    def raw(name: str) -> Bytes:
        return np.ascontiguousarray(found[name].data).view(np.uint8)

    kept = sorted({token for ids in texts.values() for token in ids})
    place = {token: index for index, token in enumerate(kept)}
    about = {
        "config": config,
        "all_tokens": config["vocab_size"],
        "kept": kept,
        "texts": {name: [place[token] for token in ids] for name, ids in texts.items()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    first = folder / "config.json"
    first.write_text(json.dumps(about, separators=(",", ":")))
    made = {folder / "vocabulary.xz": [raw("token_embd.weight")[kept], raw("output_norm.weight")]}
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for layer in range(config["num_hidden_layers"]):
        arrays = [raw(f"blk.{layer}.{name}.weight") for _, name in _NORMS]
        for _, name in _MATRICES:
            rows = raw(f"blk.{layer}.{name}.weight")
            if name in heads:  # a GGUF file keeps pairs of channels that RoPE turns together side by side
                rows = rows.reshape(heads[name], -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
            arrays.append(np.ascontiguousarray(rows))
        made[folder / f"layer-{layer:02d}.xz"] = arrays
    with ThreadPoolExecutor() as pool:
        list(pool.map(pack_tensors, made, made.values()))
    want = load_file(checkpoint / "model.safetensors")
    want["model.embed_tokens.weight"] = want["model.embed_tokens.weight"][kept]
    got = _weights([folder])[1]
    if set(got) != set(want) - {"lm_head.weight"} or not all(torch.equal(got[name], want[name]) for name in got):
        raise CorruptError(f"{folder}: the packed weights must be those of {checkpoint}: make the model anew")
    return [first, *made]


def _weights(folders: Sequence[Path]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What `config.json` says, with the number of layers that are there, and their weights in bfloat16."""
    files = {path.name: path for folder in folders for path in sorted(folder.iterdir())}
    if missing := {"config.json", "vocabulary.xz", "layer-00.xz"} - set(files):
        raise InputError(f"folders: must hold {', '.join(sorted(missing))}: make gpu-carry")
    about = json.loads(files["config.json"].read_text())
    config = about["config"]
    width, inner = config["hidden_size"], config["intermediate_size"]
    size = width // config["num_attention_heads"]
    keys = size * config["num_key_value_heads"]
    shapes = ((width, width), (keys, width), (keys, width), (width, width), *((inner, width),) * 2, (width, inner))
    data = _bytes(files["vocabulary.xz"])
    end = len(about["kept"]) * width // BLOCK * _Q8_0
    weights = {
        "model.embed_tokens.weight": unpack_q8_0(data[:end].reshape(-1, _Q8_0)).view(-1, width),
        "model.norm.weight": torch.from_numpy(data[end:].view(np.float32).copy()),
    }
    names = (f"layer-{layer:02d}.xz" for layer in range(config["num_hidden_layers"]))
    there = [files[name] for name in takewhile(files.__contains__, names)]
    with ThreadPoolExecutor() as pool:
        unpacked = list(pool.map(_bytes, there))
    for layer, data in enumerate(unpacked):
        at = 0
        for name, _ in _NORMS:
            norm = torch.from_numpy(data[at : at + 4 * width].view(np.float32).copy())
            weights[f"model.layers.{layer}.{name}.weight"] = norm
            at += 4 * width
        for (name, _), (rows, columns) in zip(_MATRICES, shapes, strict=True):
            length = rows * columns // BLOCK * _Q4_1
            blocks = data[at : at + length].reshape(-1, _Q4_1)
            weights[f"model.layers.{layer}.{name}.weight"] = unpack_q4_1(blocks).view(rows, columns)
            at += length
    layers = len(there)
    about["layers"], about["all_layers"] = layers, config["num_hidden_layers"]
    config.update(num_hidden_layers=layers, vocab_size=len(about["kept"]), tie_word_embeddings=True)
    return about, {name: weight.bfloat16() for name, weight in weights.items()}


def _bytes(path: Path) -> Bytes:
    return np.frombuffer(lzma.decompress(path.read_bytes()), np.uint8)


def load_packed(folders: Sequence[Path]) -> tuple[Any, dict[str, torch.Tensor], str]:
    """Load the model from folders that together hold its files.

    Returns:
        the model in float32, in evaluation mode, on the CPU; the ids of each text, int64 `[T]`; a line that says what
        it is.

    Raises:
        InputError: not even the first layer is there.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    about, weights = _weights(folders)
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    model = LlamaForCausalLM(LlamaConfig.from_dict({**about["config"], **special, "dtype": "float32"})).float().eval()
    model.load_state_dict({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]})
    title = (
        f"SmolLM2-135M-Instruct, {about['layers']} of {about['all_layers']} layers, "
        f"{len(about['kept']):,} of {about['all_tokens']:,} tokens"
    )
    return model, {name: torch.tensor(ids) for name, ids in about["texts"].items()}, title
