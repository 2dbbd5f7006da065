"""The target for the command line, which reads hostile files in this process."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import struct
from functools import cache
from typing import Any

import torch
from safetensors.torch import save
from tests.codec.forging import correlated_chunk
from tests.fuzz.blobs import BlobTarget, subjects
from tests.fuzz.dice import Dice
from tests.fuzz.engine import Finding, scratch
from tests.fuzz.profiles import ProfileTarget, file_of, odd_json, parts

from cuvee.cli import app

_CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "num_hidden_layers": 2, "intermediate_size": 16, "vocab_size": 61, "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "torch_dtype": "bfloat16",
    "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
# The files of each command, by kind.
_COMMANDS: dict[str, tuple[str, ...]] = {
    "inspect": ("blob",),
    "show": ("profile",),
    "decode": ("blob", "profile"),
    "decode-config": ("blob", "config"),
    "encode": ("cache", "profile"),
    "encode-config": ("cache", "config"),
}


@cache
def _good() -> dict[str, bytes]:
    chunk = correlated_chunk(50, 20, 3)
    tensors = {}
    for index, (keys, values) in enumerate(zip(chunk.keys, chunk.values, strict=True)):
        tensors[f"layer.{index}.keys"], tensors[f"layer.{index}.values"] = keys.contiguous(), values.contiguous()
    return {
        "blob": subjects()[1].blob,
        "profile": file_of(*parts()[1]),
        "config": json.dumps(_CONFIG).encode(),
        "cache": save(tensors, {"start": "3"}),
    }


def _joined(command: str, files: list[bytes]) -> bytes:
    return bytes([list(_COMMANDS).index(command)]) + b"".join(struct.pack("<I", len(file)) + file for file in files)


def _split(data: bytes) -> tuple[str, list[bytes]]:
    command = list(_COMMANDS)[data[0] % len(_COMMANDS)] if data else "inspect"
    files, at = [], 1
    for _ in _COMMANDS[command]:
        length = int.from_bytes(data[at : at + 4], "little")
        files.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    return command, files


def _bounded(value: Any) -> Any:
    """Limit huge numbers, because we do not bound what transformers does with a model of 10^24 layers."""
    if isinstance(value, dict):
        return {name: _bounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_bounded(each) for each in value]
    return max(-4096, min(value, 4096)) if type(value) is int else value


class CommandTarget:
    """`inspect`, `profile show`, `decode` and `encode`."""

    name = "cli"
    weight = 1.5

    def __init__(self) -> None:
        self._blobs, self._profiles = BlobTarget(), ProfileTarget()

    def warm_up(self) -> None:
        """Check that good files are read."""
        for command, kinds in _COMMANDS.items():
            data = _joined(command, [_good()[kind] for kind in kinds])
            if not self.check(data).startswith(f"{command}: done") and not command.endswith("-config"):
                raise Finding(f"{command} does not read good files")

    def memory(self, data: bytes) -> int:
        """Allow the memory of a profile."""
        return (200 << 20) + 256 * len(data)

    def make(self, dice: Dice) -> bytes:
        """Make a command and its files, some of which are bad."""
        command = dice.pick(
            ("inspect", "inspect", "show", "show", "decode", "decode-config", "encode", "encode-config")
        )
        files = [_good()[kind] for kind in _COMMANDS[command]]
        for at, kind in enumerate(_COMMANDS[command]):
            if dice.chance(0.7) or len(files) == 1:
                files[at] = self._bad(dice, kind)
        return _joined(command, files)

    def _bad(self, dice: Dice, kind: str) -> bytes:
        if kind == "blob":
            return self._blobs.make(dice)[1:]
        if kind == "profile":
            return self._profiles.make(dice)
        if kind == "config":
            config: Any = _CONFIG
            for _ in range(dice.small(3)):
                config = _bounded(odd_json(dice, config))
            try:
                return json.dumps(config).encode() if dice.chance(0.9) else dice.damaged(json.dumps(config).encode())
            except ValueError:
                return b"{"
        if dice.chance(0.4):
            return dice.damaged(_good()["cache"])
        shape = [dice.pick((0, 1, 8, 20)) for _ in range(dice.number(0, 4))]
        dtype = dice.pick((torch.bfloat16, torch.float32, torch.int8, torch.float64))
        names = [f"layer.{index}.{kind}" for index in range(2) for kind in ("keys", "values")]
        names = names[: dice.number(0, 4)] + dice.pick(([], ["layer.9.keys"]))
        start = dice.pick(("3", "-1", "", "9" * 30, "٣", "0x1", "4294967295"))
        return save({name: torch.zeros(shape, dtype=dtype) for name in names}, {"start": start})

    def check(self, data: bytes) -> str:
        """Run the command: it must exit with 0, or with 1 and an error line."""
        command, files = _split(data)
        folder = scratch()
        paths = {}
        for kind, file in zip(_COMMANDS[command], files, strict=True):
            paths[kind] = folder / {"config": "config.json", "cache": "cache.safetensors"}.get(kind, f"a.{kind}")
            paths[kind].write_bytes(file)
        target = folder / "out"
        if target.is_dir():
            shutil.rmtree(target)
        target.unlink(missing_ok=True)
        verb = command.removesuffix("-config")
        arguments = ["profile", "show"] if command == "show" else [verb]
        arguments.append(str(next(iter(paths.values()))))
        if verb in ("encode", "decode"):
            arguments += [str(target), "--config" if "config" in paths else "--profile", str(list(paths.values())[1])]
        if verb == "decode":
            arguments += ["--max-tokens", "4096"]
        as_json = len(data) % 2 and verb in ("show", "inspect")
        if as_json:
            arguments.append("--json")
        out, err = io.StringIO(), io.StringIO()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                app(arguments, prog_name="cuvee", standalone_mode=True)
            code: Any = 0
        except SystemExit as stop:
            code = stop.code or 0
        lines = err.getvalue().strip().splitlines()
        if code == 1:
            if not lines or not lines[-1].startswith("error: "):
                raise Finding(f"{command} exits with 1 and prints {err.getvalue()!r}")
        elif code != 0:
            raise Finding(f"{command} exits with {code!r}: {err.getvalue()!r}")
        elif as_json and not json.loads(out.getvalue()):
            raise Finding(f"{command} --json prints nothing")
        return f"{command}: {'done' if code == 0 else 'error'}"
