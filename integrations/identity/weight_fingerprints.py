"""Fingerprints of the weights in a checkpoint's files, which tell whether a profile was calibrated on them."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

import torch

from cuvee.codec.errors import InputError
from cuvee.codec.models.fingerprint import PREFIX, WeightHash, stored_tensors
from cuvee.integrations.identity.checkpoint_files import Tensor, load_config, open_file, read_header, resolve
from cuvee.integrations.identity.file_digests import recalled, remembered

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_READ = 1 << 21  # bytes that are read at a time: whole values of every dtype


@dataclass(frozen=True, slots=True)
class WeightFingerprints:
    """What `model_fingerprint` may be of a checkpoint's model, by the dtype that its weights are loaded in.

    Attributes:
        found: distinct fingerprints, that of the files' dtype first; empty if they cannot be known.
        unknown: why they cannot; empty if they are.
    """

    found: tuple[str, ...] = ()
    unknown: str = ""


def weight_fingerprints(path: str | Path, *, revision: str | None = None) -> WeightFingerprints:
    """Return the fingerprints that a calibration of a checkpoint may record, without loading its weights.

    Computes `model_fingerprint` of the transformers model from names and shapes of its skeleton, built on the meta
    device from the configuration, and the values in the files. That is kept, as long as these are the same: the first
    call reads all of them, about a second for each GB. The calibration may have loaded the
    weights in the files' dtype, or as float32, bfloat16 or float16. They are not known of a checkpoint that is not
    stored under the names that transformers gives its parameters (quantized, fused experts, no safetensors).

    Args:
        path: of the checkpoint, as in `checkpoint_identity`.
        revision: of a hub id.

    Raises:
        InputError: the path does not exist, or holds a damaged file.
    """
    return reading_fingerprints(path, revision=revision)(Event())


def reading_fingerprints(path: str | Path, *, revision: str | None = None) -> Callable[[Event], WeightFingerprints]:
    """Return what computes `weight_fingerprints`, which may be called on another thread, and is given an event: once
    that is set, it raises an InputError soon.

    The model's skeleton is built before this returns, because transformers sets torch's default dtype meanwhile.

    Args and Raises as `weight_fingerprints`.
    """
    root = resolve(path, revision)
    files = sorted(root.glob("*.safetensors"))
    if not files:
        return lambda stop: WeightFingerprints(unknown="the checkpoint holds no safetensors files")
    import transformers

    kind = f"fingerprints {PREFIX} {transformers.__version__}"
    sources = [*sorted(root.glob("*.json")), *files]
    if known := recalled(kind, sources):
        return lambda stop: WeightFingerprints(tuple(known))
    try:
        model = _skeleton(root)
    except _Unknown as reason:
        unknown = WeightFingerprints(unknown=str(reason))
        return lambda stop: unknown

    def read(stop: Event) -> WeightFingerprints:
        try:
            return WeightFingerprints(tuple(remembered(kind, sources, lambda: _fingerprints(model, files, stop))))
        except _Unknown as reason:
            return WeightFingerprints(unknown=str(reason))

    return read


class _Unknown(Exception):
    """Why it is unknown whether a profile belongs to a checkpoint."""


def _skeleton(root: Path) -> PreTrainedModel:
    """Return the transformers model of a checkpoint, without storage."""
    try:
        from transformers import AutoModelForCausalLM

        config = load_config(root)
        if getattr(config, "quantization_config", None) is not None:
            raise _Unknown("the checkpoint is quantized")
        if config.get_text_config() is not config:
            raise _Unknown("the checkpoint is of a multimodal model")
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except _Unknown:
        raise
    except Exception as error:  # transformers raises many kinds of errors for an unknown configuration
        raise _Unknown(f"transformers does not build the model ({error})") from error
    return model


def _fingerprints(model: PreTrainedModel, files: list[Path], stop: Event) -> list[str]:
    """Return the fingerprint in each dtype, that of the files first."""
    with ExitStack() as stack:
        found: dict[str, tuple[Path, FileIO, Tensor]] = {}
        for file in files:
            stream = stack.enter_context(open_file(file))
            for name, tensor in read_header(file, stream)[1].items():
                if name in found:
                    raise _Unknown(f"{name} is in {found[name][0].name} and in {file.name}")
                found[name] = file, stream, tensor
        wanted = []
        for name, parameter in stored_tensors(model):
            # Checkpoints of the bare model leave out the prefix (GPT-2's).
            here = found.get(name) or found.get(name.removeprefix(f"{model.base_model_prefix}."))
            if here is None:
                raise _Unknown(f"the checkpoint holds no {name}: its weights are stored in another form")
            file, stream, tensor = here
            if tensor.shape != tuple(parameter.shape) or tensor.dtype not in _DTYPES:
                raise _Unknown(f"{name} is stored as {tensor.dtype} {list(tensor.shape)}")
            if tensor.end - tensor.begin != _DTYPES[tensor.dtype].itemsize * parameter.numel():
                raise InputError(f"model: must hold whole tensors, got another size of {name} in {file}: copy again")
            wanted.append((name, stream, tensor))
        stored = {_DTYPES[tensor.dtype] for _, _, tensor in wanted}
        others = [dtype for dtype in (torch.bfloat16, torch.float16) if stored != {dtype}]
        dtypes = (None, *others)  # None: the files' dtype; float32 keeps its values
        hashes = [WeightHash() for _ in dtypes]
        for name, stream, tensor in wanted:
            for each in hashes:
                each.begin(name, tensor.shape)
            for at in range(tensor.begin, tensor.end, _READ):
                if stop.is_set():
                    raise InputError("model: must be read to its end to be compared with the profile, got a stop")
                data = os.pread(stream.fileno(), min(_READ, tensor.end - at), at)
                values = torch.frombuffer(bytearray(data), dtype=_DTYPES[tensor.dtype])
                for dtype, each in zip(dtypes, hashes, strict=True):
                    each.add(values if dtype is None else values.to(dtype))
    return list(dict.fromkeys(each.fingerprint for each in hashes))
