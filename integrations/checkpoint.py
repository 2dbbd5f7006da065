"""Identities of checkpoints, tokenizers and adapters on disk, layouts of their caches, and whether a profile belongs to
a checkpoint.

    folder ─┬─ config.json …       canonical JSON without volatile entries ─┐
            ├─ *.safetensors       header, and pages spread over each tensor ├─> BLAKE2b
            └─ *.bin, *.gguf …     size, and pages spread over the file      ┘   (only without safetensors)

Paths and times are left out, so replicas with copies at other paths find each other's entries.

**Covered**: any tensor name, shape, dtype, order or entry of the configuration; any bit of a file of up to 2 MiB; of a
larger file any bit of 2 MiB, at least one page of 4 KiB from each tensor (with over 512 tensors in one file, from 512
of them). A fine-tune changes nearly every value, and so the identity. **Not covered**: a few values changed outside the
sampled pages; set the adapter's option `model_id` after such an edit.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cuvee.codec.errors import InputError, ProfileMismatchError
from cuvee.codec.layout import KVLayout
from cuvee.codec.models.fingerprint import fingerprint_samples, sampled_positions
from cuvee.codec.models.kimi import as_deepseek_v3, is_deepseek_v3
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.support.plain_json import parse_json
from cuvee.naming.identity import Identity, canonical

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from cuvee.codec.codec import Codec

logger = logging.getLogger(__name__)

_PAGE = 4096
_PAGES = 512  # read of one file
_MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf")
# Files besides the weights that determine a token's KV, including a checkpoint's code.
_CONFIGS = (
    "config.json", "params.json", "quantize_config.json", "hf_quant_config.json", "adapter_config.json", "*.py",
    "*processor_config.json",
)  # fmt: skip
# Entries about a file's writer and origin, and the path of an adapter's base model.
VOLATILE = {
    "transformers_version", "_name_or_path", "_commit_hash", "peft_version", "base_model_name_or_path", "revision",
}  # fmt: skip
# Files that map text to token ids. Not tokenizer_config.json: a chat template changes which tokens a prompt has, which
# are in the key, but not what a token is.
_TOKENIZERS = (
    "tokenizer.json", "*.model", "tokenizer.model.v*", "*.tiktoken", "tekken.json", "vocab.json", "vocab.txt",
    "merges.txt",
)  # fmt: skip
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def checkpoint_identity(path: str | Path, *, revision: str | None = None) -> str:
    """Return the identity of a checkpoint's weights and configuration: 32 hex digits.

    Reads 2 MiB of each weight file (see above), in milliseconds per file from the page cache.

    Args:
        path: a local folder (of a model or an adapter), a single weight file, or a hub id (`org/name`), which is looked
            up in the local cache of huggingface_hub and never on the network.
        revision: of a hub id.

    Raises:
        InputError: the path does not exist, holds no weights, or holds a damaged file.
    """
    root = _resolve(path, revision)
    digest = hashlib.blake2b(digest_size=16, person=b"cuvee-weights")
    digest.update(canonical(b"1"))
    _add_configs(digest, root)
    weights = _weights(root)
    if not weights:
        raise InputError(
            f"model: must hold weights ({', '.join(('*.safetensors', *_OTHER_WEIGHTS))}), got {path} without any: set "
            "option 'model_id' to a name of your own that changes with the weights"
        )
    for file in weights:
        # A single file is identified by its content alone, because the user chooses its name.
        name = file.name.encode() if root.is_dir() else b""
        digest.update(canonical(b"weights", name, _sampled_digest(file)))
    return digest.hexdigest()


def configuration_identity(path: str | Path, *, revision: str | None = None) -> str:
    """Return the identity of a folder's configuration and code, without weights: 32 hex digits.

    Args and Raises as `checkpoint_identity`, weights apart.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"cuvee-config")
    _add_configs(digest, _resolve(path, revision))
    return digest.hexdigest()


def file_identity(path: str | Path) -> str:
    """Return the identity of a small file, byte for byte: 32 hex digits.

    Raises:
        InputError: it cannot be read.
    """
    try:
        return hashlib.blake2b(Path(path).read_bytes(), digest_size=16, person=b"cuvee-file1").hexdigest()
    except OSError as error:
        raise InputError(f"model: must name files that can be read, got {path} ({error.strerror})") from error


def tokenizer_identity(path: str | Path, *, revision: str | None = None) -> str:
    """Return the identity of a tokenizer's vocabulary files, byte for byte: 32 hex digits; `""` if there are none.

    Args and Raises as `checkpoint_identity`, weights apart.
    """
    files = _files(_resolve(path, revision), _TOKENIZERS)
    if not files:
        return ""
    digest = hashlib.blake2b(digest_size=16, person=b"cuvee-tokens")
    for file in files:
        digest.update(canonical(file.name.encode(), file.read_bytes()))
    return digest.hexdigest()


def read_layout(
    path: str, dtype: torch.dtype | None, *, revision: str | None = None, overrides: Mapping[str, Any] | None = None
) -> KVLayout:
    """Read the layout of a model's cache from the configuration of its checkpoint.

    Args:
        path: as in `checkpoint_identity`.
        dtype: of the cache; None: that of the configuration.
        revision: of a hub id.
        overrides: changes to the configuration.

    Raises:
        InputError: there is no such checkpoint on this machine.
        UnsupportedModelError: cuvee does not handle this kind of attention or positions.
    """
    return KVLayout.from_config(read_config(path, revision=revision, overrides=overrides), dtype)


def read_config(path: str, *, revision: str | None = None, overrides: Mapping[str, Any] | None = None) -> Any:
    """Read the configuration of a checkpoint's text decoder, a transformers `PreTrainedConfig`.

    Args:
        path: as in `checkpoint_identity`.
        revision: of a hub id.
        overrides: changes to the configuration.

    Raises:
        InputError: there is no such checkpoint on this machine.
        UnsupportedModelError: a model type that stands for DeepSeek-V3, with another architecture or other entries.
    """
    try:
        config = _load_config(path, revision)
    except (OSError, ValueError) as error:
        raise InputError(
            f"model: must be a folder or hub id with a configuration that transformers reads, got {path}: "
            "give the checkpoint's folder in option 'model'"
        ) from error
    config.update(dict(overrides or {}))
    return config.get_text_config(decoder=True)


def _load_config(path: str | Path, revision: str | None = None) -> Any:
    """Read the configuration of a checkpoint on this machine. Code beside it is not run, and nobody is asked to."""
    from transformers import AutoConfig, PreTrainedConfig

    entries, _ = PreTrainedConfig.get_config_dict(path, revision=revision, local_files_only=True)
    if is_deepseek_v3(entries):
        return as_deepseek_v3(entries)
    return AutoConfig.from_pretrained(path, revision=revision, local_files_only=True, trust_remote_code=False)


def name_of_weights(weights: str, dtype: torch.dtype, options: Mapping[str, Any] | None = None) -> str:
    """Name the weights as an engine uses them: `Identity.model` of its blobs.

    Args:
        weights: `checkpoint_identity` of the model, or the user's name for it.
        dtype: of its computation.
        options: the engine's, as JSON values (`engine_config`).
    """
    return json.dumps({"weights": weights, "dtype": str(dtype), "options": options or {}}, sort_keys=True)


def engine_identity(path: str | Path, codec: Codec, *, model_id: str | None = None, tokenizer: bool = True) -> Identity:
    """Return the identity of the blobs of an engine on one rank, whose options that matter have their defaults.

    With it, `cuvee.blend.ChunkCache` and the connector find each other's segments in one store.

    Args:
        path: of the checkpoint, as in `checkpoint_identity`.
        codec: with the engine's profile and quality; its layout's dtype is the engine's dtype of computation and
            cache.
        model_id: the option of the connector, if it is set.
        tokenizer: False if the engine has none (`skip_tokenizer_init`).

    Raises:
        InputError: as `checkpoint_identity`.
    """
    layout = codec.profile.layout
    return Identity(
        model=name_of_weights(model_id or checkpoint_identity(path), layout.torch_dtype),
        tokenizer=tokenizer_identity(path) if tokenizer else "",
        layout=layout.fingerprint,
        profile=b"" if codec.lossless else codec.profile.id,
        quality=codec.quality_name,
    )


def checkpoint_files(path: str | Path) -> tuple[Path, list[Path]]:
    """Return the folder of a checkpoint, or its single file, and the files that make its identity.

    Args and Raises as `checkpoint_identity`, which also raises where there are no weights.
    """
    root = _resolve(path, None)
    return root, [*_files(root, _CONFIGS), *_weights(root)]


def changed_since(path: str | Path, time: int) -> Path | None:
    """Return a file of a checkpoint that was written or put there since a time, in nanoseconds since the epoch.

    None: none was, or the path is a hub id, whose files never change.
    """
    if not Path(path).exists():
        return None
    return next((file for file in checkpoint_files(path)[1] if file.stat().st_ctime_ns > time), None)


def check_profile(profile: Profile, path: str | Path, *, revision: str | None = None) -> str:
    """Check whether a profile was calibrated on the weights of a checkpoint, without loading them.

    Args:
        profile: any.
        path: of the checkpoint, as in `checkpoint_identity`.
        revision: of a hub id.

    Returns:
        `"match"`, `"mismatch"`, or `"unknown: "` and the reason: the profile names no model, or the fingerprints of the
        checkpoint's weights cannot be known (`weight_fingerprints`).

    Raises:
        InputError: the path does not exist, or holds a damaged file.
    """
    if profile.model is None:
        return f"unknown: the profile ({profile.source}) names no model"
    weights = weight_fingerprints(path, revision=revision)
    if not weights.found:
        return f"unknown: {weights.unknown}"
    return "match" if profile.model in weights.found else "mismatch"


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
    device from the configuration, and 256 values of each parameter from the files. The calibration may have loaded the
    weights in the files' dtype, or as float32, bfloat16 or float16. They are not known of a checkpoint that is not
    stored under the names that transformers gives its parameters (quantized, fused experts, no safetensors).

    Args:
        path: of the checkpoint, as in `checkpoint_identity`.
        revision: of a hub id.

    Raises:
        InputError: the path does not exist, or holds a damaged file.
    """
    root = _resolve(path, revision)
    files = sorted(root.glob("*.safetensors"))
    if not files:
        return WeightFingerprints(unknown="the checkpoint holds no safetensors files")
    try:
        model = _skeleton(root)
        samples = _parameters(model, files)
    except _Unknown as reason:
        return WeightFingerprints(unknown=str(reason))
    found = []
    for dtype in (None, torch.bfloat16, torch.float16):  # None: the files' dtype; float32 keeps its values
        cast = ((name, shape, values if dtype is None else values.to(dtype)) for name, shape, values in samples)
        found.append(fingerprint_samples(cast))
    return WeightFingerprints(tuple(dict.fromkeys(found)))


def refuse_other_weights(profile: Profile, shown: str, path: str | Path, *, revision: str | None = None) -> None:
    """Refuse a profile that was calibrated on other weights than those of a checkpoint; log if that is unknown.

    Args:
        profile: any.
        shown: path of the profile, for messages.
        path: of the checkpoint, as in `checkpoint_identity`.
        revision: of a hub id.

    Raises:
        ProfileMismatchError: it was calibrated on other weights.
        InputError: as `check_profile`.
    """
    verdict = check_profile(profile, path, revision=revision)
    if verdict == "mismatch":
        raise ProfileMismatchError(
            f"profile: must be of the model's weights, got {shown}, calibrated on other weights than {path}; calibrate "
            "one for this model, or set check_model to false if it is the same model quantized or converted"
        )
    if verdict != "match":
        logger.info("cuvee: %s: calibrated on these weights? %s", shown, verdict)


class _Unknown(Exception):
    """Why it is unknown whether a profile belongs to a checkpoint."""


def _resolve(path: str | Path, revision: str | None) -> Path:
    """Return the local file or folder of a path or a hub id."""
    local = Path(path)
    if local.exists():
        return local
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise ImportError("hub ids need huggingface_hub: pip install cuvee[transformers]") from error
    try:
        return Path(snapshot_download(str(path), revision=revision, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise InputError(
            f"model: must be a local folder or in the local cache of huggingface_hub, got {path}: give a folder that "
            "exists, or set option 'model_id' to a name of your own that changes with the weights"
        ) from error


def _files(root: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted({file for pattern in patterns for file in root.glob(pattern) if file.is_file()})


def _weights(root: Path) -> list[Path]:
    if root.is_file():
        return [root]
    return _files(root, ("*.safetensors",)) or _files(root, _OTHER_WEIGHTS)


def _add_configs(digest: Any, root: Path) -> None:
    """Add the files besides the weights to a digest."""
    for file in _files(root, _CONFIGS):
        data = file.read_bytes()
        digest.update(
            canonical(b"config", file.name.encode(), _canonical_json(file, data) if file.suffix == ".json" else data)
        )


def _canonical_json(file: Path, data: bytes) -> bytes:
    """Return JSON in one spelling, without entries that differ between copies of a checkpoint."""

    def clean(value: Any) -> Any:
        if isinstance(value, list):
            return [clean(item) for item in value]
        if not isinstance(value, dict):
            return value
        kept = {key: clean(item) for key, item in value.items() if key not in VOLATILE}
        if "torch_dtype" in kept:  # the name until transformers 5
            kept.setdefault("dtype", kept.pop("torch_dtype"))
        return kept

    try:
        return json.dumps(clean(parse_json(data, constants=True)), sort_keys=True).encode()
    except ValueError as error:
        raise InputError(f"model: must hold valid JSON in {file}, got {error}: copy the checkpoint again") from error


def _sampled_digest(file: Path) -> bytes:
    """Return BLAKE2b over a weight file's size, header and pages spread over its tensors."""
    digest = hashlib.blake2b(digest_size=32, person=b"cuvee-file")
    with _open(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        digest.update(struct.pack("<q", size))
        spans = [(0, size)]
        if file.suffix == ".safetensors":
            raw, tensors = _header(file, stream)
            digest.update(canonical(raw))
            spans = sorted((tensor.begin, tensor.end) for tensor in tensors.values())
        pages: Iterable[int] = range(-(-size // _PAGE)) if size <= _PAGES * _PAGE else sorted(set(_spread(spans)))
        for page in pages:
            digest.update(os.pread(stream.fileno(), _PAGE, page * _PAGE))
    return digest.digest()


def _spread(spans: list[tuple[int, int]]) -> Iterator[int]:
    """Yield page numbers, equally many per span, in the middle of equal parts; of too many spans, every n-th."""
    chosen = spans if len(spans) <= _PAGES else [spans[index * len(spans) // _PAGES] for index in range(_PAGES)]
    for begin, end in chosen:
        parts = min(_PAGES // len(chosen), -(-(end - begin) // _PAGE))
        for part in range(parts):
            yield (begin + (2 * part + 1) * (end - begin) // (2 * parts)) // _PAGE


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of a safetensors file: its bytes are `[begin, end)` of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def _header(file: Path, stream: FileIO) -> tuple[bytes, dict[str, _Tensor]]:
    """Return the header of a safetensors file, raw and by tensor."""
    size = os.fstat(stream.fileno()).st_size
    try:
        (length,) = struct.unpack("<Q", os.pread(stream.fileno(), 8, 0))
        if length > min(size - 8, _MAX_HEADER):
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        raw = os.pread(stream.fileno(), length, 8)
        tensors = {
            name: _Tensor(entry["dtype"], tuple(entry["shape"]), *(8 + length + at for at in entry["data_offsets"]))
            for name, entry in parse_json(raw, constants=True).items()
            if name != "__metadata__"
        }
        if not all(8 + length <= tensor.begin <= tensor.end <= size for tensor in tensors.values()):
            raise ValueError("tensors outside of the file")
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise InputError(f"model: must hold complete safetensors files, got {file} ({error}): copy it again") from error
    return raw, tensors


def _open(file: Path) -> FileIO:
    stream = FileIO(file)
    if hasattr(os, "posix_fadvise"):  # reads are scattered: no read-ahead
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
    return stream


def _skeleton(root: Path) -> PreTrainedModel:
    """Return the transformers model of a checkpoint, without storage."""
    try:
        from transformers import AutoModelForCausalLM

        config = _load_config(root)
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


def _parameters(model: PreTrainedModel, files: list[Path]) -> list[tuple[str, tuple[int, ...], torch.Tensor]]:
    """Return name, shape and sampled values of every parameter, in the model's order and the files' dtypes."""
    with ExitStack() as stack:
        found: dict[str, tuple[Path, FileIO, _Tensor]] = {}
        for file in files:
            stream = stack.enter_context(_open(file))
            for name, tensor in _header(file, stream)[1].items():
                if name in found:
                    raise _Unknown(f"{name} is in {found[name][0].name} and in {file.name}")
                found[name] = file, stream, tensor
        samples = []
        for name, parameter in model.named_parameters():
            # Checkpoints of the bare model leave out the prefix (GPT-2's).
            stored = found.get(name) or found.get(name.removeprefix(f"{model.base_model_prefix}."))
            if stored is None:
                raise _Unknown(f"the checkpoint holds no {name}: its weights are stored in another form")
            file, stream, tensor = stored
            if tensor.shape != tuple(parameter.shape) or tensor.dtype not in _DTYPES:
                raise _Unknown(f"{name} is stored as {tensor.dtype} {list(tensor.shape)}")
            dtype = _DTYPES[tensor.dtype]
            width = dtype.itemsize
            if tensor.end - tensor.begin != width * parameter.numel():
                raise InputError(f"model: must hold whole tensors, got another size of {name} in {file}: copy again")
            positions = sampled_positions(parameter.numel()).tolist()
            data = b"".join(os.pread(stream.fileno(), width, tensor.begin + width * at) for at in positions)
            samples.append((name, tensor.shape, torch.frombuffer(bytearray(data), dtype=dtype)))
    return samples
