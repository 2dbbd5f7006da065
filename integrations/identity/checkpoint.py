"""Identities of checkpoints, tokenizers and adapters on disk, layouts of their caches, and whether a profile belongs to
a checkpoint.

    folder ─┬─ config.json …       canonical JSON without volatile entries ─┐
            ├─ *.safetensors       SHA-256 of the whole file               ├─> BLAKE2b
            └─ *.bin, *.gguf …     likewise; not beside safetensors        ┘

Paths and times are left out, so replicas with copies at other paths find each other's entries.

**Covered**: every byte of every file that an engine may read its weights from, in the folder and in the folders in it;
the configuration, without entries about its origin; code beside it, or in the repository that it names. Each file is
read once: `file_digests`.
**Not covered**: files that an engine reads from elsewhere, so these ways to load are refused; what changes in memory
after the files were read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from cuvee.codec.errors import InputError, ProfileMismatchError
from cuvee.codec.layout import KVLayout
from cuvee.codec.models.fingerprint import PREFIX, SAMPLED, canonical_config
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.support.plain_json import parse_json
from cuvee.integrations.identity.checkpoint_files import load_config, open_file, read_header, resolve
from cuvee.integrations.identity.file_digests import file_digests, file_state
from cuvee.integrations.identity.weight_fingerprints import reading_fingerprints
from cuvee.integrations.identity.weights_name import Make
from cuvee.naming.identity import canonical

logger = logging.getLogger(__name__)

_SAFETENSORS = ("*.safetensors", "*/*.safetensors")  # some models have towers in folders of their own
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*/*.bin", "*/*.pt", "*/*.pth", "*/*.gguf")
# The files that engines read, by their names of load formats: safetensors if there are any, or others. What is not here
# reads weights from elsewhere: other hosts and processes, object stores, converted copies, a user's own loader.
_EITHER = (
    "auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "runai_streamer", "sharded_state",
    "runai_streamer_sharded", "bitsandbytes", "layered",
)  # fmt: skip
_FORMATS = {
    **dict.fromkeys(_EITHER, (_SAFETENSORS, _OTHER_WEIGHTS)),
    "pt": (_OTHER_WEIGHTS,),
    "gguf": (("*.gguf", "*/*.gguf"),),
    "dummy": (),  # values without files
}
# Files besides the weights that determine a token's KV, including a checkpoint's code.
_CONFIGS = (
    "config.json", "params.json", "quant_config.json", "quantize_config.json", "quantization_config.json",
    "hf_quant_config.json", "adapter_config.json", "*.py",
    "*processor_config.json", "*.safetensors.index.json",
)  # fmt: skip
_REPOSITORY = re.compile('"([^"]+?)--')  # whose code an entry of auto_map names
_NANOSECONDS = 19  # digits of a time in nanoseconds, until the year 2286
# Files that map text to token ids. Not tokenizer_config.json: a chat template changes which tokens a prompt has, which
# are in the key, but not what a token is.
_TOKENIZERS = (
    "tokenizer.json", "*.model", "tokenizer.model.v*", "*.tiktoken", "tekken.json", "vocab.json", "vocab.txt",
    "merges.txt",
)  # fmt: skip


class Checkpoint:
    """The files of a checkpoint, which are listed now, and named later.

    Args:
        path: as in `checkpoint_identity`.
        revision: of a hub id.
        load_format: by which vLLM or SGLang reads them.

    Raises:
        InputError: the path does not exist, holds no weights, or holds a damaged file; or the engine reads its weights
            from elsewhere.
    """

    def __init__(self, path: str | Path, *, revision: str | None = None, load_format: str = "auto") -> None:
        if load_format not in _FORMATS:
            raise InputError(
                f"load_format: must be {', '.join(_FORMATS)}, got {load_format}, whose weights are not named by the "
                "checkpoint's files: set option 'model_id' to a name of your own that changes with the weights"
            )
        self._root = resolve(path, revision)
        if place := _elsewhere(self._root):
            raise InputError(
                f"model: must hold all of its weights, got {path}, whose configuration names {place} for a part of "
                "them: set option 'model_id' to a name of your own that changes with the weights"
            )
        self._format = load_format
        self._files = _weights(self._root, load_format)
        if not self._files and load_format != "dummy":
            raise InputError(
                f"model: must hold weights ({', '.join(('*.safetensors', *_OTHER_WEIGHTS[:4]))}), got {path} without "
                "any: set option 'model_id' to a name of your own that changes with the weights"
            )
        for file in self._files:
            if file.suffix == ".safetensors":
                with open_file(file) as stream:
                    read_header(file, stream)
        self._states = [file_state(file) for file in self._files]

    def identity(self, stop: threading.Event | None = None) -> str:
        """Return `checkpoint_identity`. Takes as long as reading the files, unless their digests are kept.

        Args:
            stop: once it is set, this raises an InputError soon.

        Raises:
            InputError: files that cannot be read, or have changed since they were listed.
        """
        digest = hashlib.blake2b(digest_size=16, person=b"cuvee-weights")
        digest.update(canonical(b"2"))
        _add_configs(digest, self._root)
        for file, content in zip(self._files, file_digests(self._files, stop), strict=True):
            # A single file is identified by its content alone, because the user chooses its name.
            name = file.relative_to(self._root).as_posix().encode() if self._root.is_dir() else b""
            digest.update(canonical(b"weights", name, content))
        files = _weights(self._root, self._format)
        if files != self._files or [file_state(file) for file in files] != self._states:
            raise InputError(f"model: must not change while it is read, got {self._root}: start again")
        return digest.hexdigest()


def checkpoint_identity(path: str | Path, *, revision: str | None = None, load_format: str = "auto") -> str:
    """Return the identity of a checkpoint's weights and configuration: 32 hex digits.

    Reads every byte of every weight file once, at about 2 GB/s for each core; later calls take milliseconds.

    Args:
        path: a local folder (of a model or an adapter), a single weight file, or a hub id (`org/name`), which is looked
            up in the local cache of huggingface_hub and never on the network.
        revision: of a hub id.
        load_format: by which vLLM or SGLang reads it.

    Raises:
        InputError: as `Checkpoint` and `Checkpoint.identity`.
    """
    return Checkpoint(path, revision=revision, load_format=load_format).identity()


def configuration_identity(path: str | Path, *, revision: str | None = None) -> str:
    """Return the identity of a folder's configuration and code, without weights: 32 hex digits.

    Args and Raises as `checkpoint_identity`, weights apart.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"cuvee-config")
    _add_configs(digest, resolve(path, revision))
    return digest.hexdigest()


def code_identity(path: str | Path, revision: str | None, code_revision: str) -> str:
    """Return the identity of the code that an engine runs at a `code_revision`, which may be a branch: 32 hex digits.

    Args:
        path: of the configuration that names the code, as in `checkpoint_identity`.
        revision: of a hub id, for the configuration.
        code_revision: of the repositories that its `auto_map` names, and of the hub id's own. Returned if none is on
            this machine: then no engine runs their code.
    """
    with contextlib.suppress(InputError):
        digest = hashlib.blake2b(digest_size=16, person=b"cuvee-code")
        own = [] if Path(path).exists() else [str(path)]
        if _add_code(digest, resolve(path, revision), own, code_revision):
            return digest.hexdigest()
    return code_revision


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
    files = _files(resolve(path, revision), _TOKENIZERS)
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
        config = load_config(path, revision)
    except (OSError, ValueError) as error:
        raise InputError(
            f"model: must be a folder or hub id with a configuration that transformers reads, got {path}: "
            "give the checkpoint's folder in option 'model'"
        ) from error
    config.update(dict(overrides or {}))
    return config.get_text_config(decoder=True)


def name_of_weights(weights: str, dtype: torch.dtype, options: Mapping[str, Any] | None = None) -> str:
    """Name the weights as an engine uses them: `Identity.model` of its blobs.

    Args:
        weights: `checkpoint_identity` of the model, or the user's name for it.
        dtype: of its computation.
        options: the engine's, as JSON values (`engine_config`).
    """
    return json.dumps({"weights": weights, "dtype": str(dtype), "options": options or {}}, sort_keys=True)


def naming_of_weights(
    path: str | Path,
    dtype: torch.dtype,
    options: Mapping[str, Any] | None = None,
    *,
    model_id: str | None = None,
    revision: str | None = None,
    load_format: str = "auto",
    drafter: tuple[str, str | None] | None = None,
) -> Make:
    """Return what makes `name_of_weights`, which may take as long as reading the checkpoint's files.

    Args:
        path: of the checkpoint, as in `checkpoint_identity`.
        dtype: as in `name_of_weights`.
        options: as in `name_of_weights`.
        model_id: the user's name for the weights, if there is one; then no file is read.
        revision: of a hub id.
        load_format: by which the engine reads the checkpoint.
        drafter: path and revision of a drafter's checkpoint, whose layers lie in the same pages; None: there is none,
            or its weights are in the model's own.

    Raises:
        InputError: as `Checkpoint`.
    """
    if model_id is not None:
        return lambda stop: name_of_weights(model_id, dtype, options)
    checkpoint = Checkpoint(path, revision=revision, load_format=load_format)
    if drafter is None or drafter == (str(path), revision):
        return lambda stop: name_of_weights(checkpoint.identity(stop), dtype, options)
    drafts = Checkpoint(drafter[0], revision=drafter[1])
    return lambda stop: name_of_weights(
        checkpoint.identity(stop), dtype, {**(options or {}), "drafter": drafts.identity(stop)}
    )


def checkpoint_files(path: str | Path) -> tuple[Path, list[Path]]:
    """Return the folder of a checkpoint, or its single file, and the files that make its identity.

    Args and Raises as `checkpoint_identity`, which also raises where there are no weights.
    """
    root = resolve(path, None)
    return root, [*_files(root, _CONFIGS), *_weights(root)]


def files_changed_since(path: str | Path, time_ns: int, load_format: str = "auto") -> Path | None:
    """Return a file of a checkpoint that was written or put there since a time.

    Args:
        path: as in `checkpoint_identity`. The files of a hub id never change.
        time_ns: nanoseconds since the epoch.
        load_format: by which the engine reads it.
    """
    root = Path(path)
    if not root.exists():
        return None
    files = [*_files(root, _CONFIGS), *_weights(root, load_format if load_format in _FORMATS else "auto")]
    return next((file for file in files if file.stat().st_ctime_ns > time_ns), None)


def refuse_other_copies(names: Iterable[str | None], features: Mapping[str, Any]) -> None:
    """Refuse hub ids whose files an engine reads from elsewhere than the hub's usual cache, where they are named.

    Args:
        names: of checkpoints: folders or hub ids.
        features: what has the engine read other copies, by name, if it is set.

    Raises:
        InputError: one is set, and a name is a hub id.
    """
    for name in names:
        for feature, value in features.items():
            if name and value and not Path(name).exists():
                raise InputError(
                    f"{feature}: must not be set where the hub id {name} names the weights, because the engine reads "
                    "another copy: give it the folder instead, or set option 'model_id' to a name of your own that "
                    "changes with the weights"
                )


def changed_while_loading(vllm_config: Any, path: str | Path) -> bool:
    """Return, and log, whether the files of a checkpoint may be others than those that vLLM has read: some were written
    or put there since its configuration was made.
    """
    began = str(vllm_config.instance_id)  # a time
    if not began.isdecimal() or len(began) != _NANOSECONDS:
        return False
    file = files_changed_since(path, int(began), str(vllm_config.load_config.load_format))
    if file is not None:
        logger.warning(
            "cuvee: nothing is stored or loaded, because %s changed while the engine started: its weights may be "
            "others than those in %s now; restart it", file, path,
        )  # fmt: skip
    return file is not None


def checking_profile(profile: Profile, path: str | Path, revision: str | None) -> Callable[[threading.Event], str]:
    """Return what says, on any thread, whether a profile was calibrated on the weights of a checkpoint: "match",
    "mismatch", or "unknown: " and the reason, as the profile names no model, or the fingerprints are not known.
    """
    if profile.model is None:
        return lambda stop: f"unknown: the profile ({profile.source}) names no model"
    if not profile.model.startswith(PREFIX):
        return lambda stop: f"unknown: {SAMPLED}"
    read = reading_fingerprints(path, revision=revision)

    def check(stop: threading.Event) -> str:
        weights = read(stop)
        if not weights.found:
            return f"unknown: {weights.unknown}"
        return "match" if profile.model in weights.found else "mismatch"

    return check


def naming_with_profile(
    make: Make, profile: Profile, shown: str, path: str | Path, *, revision: str | None = None
) -> Make:
    """Return a `Make` that first refuses a profile that was calibrated on other weights than those of a checkpoint, and
    logs if that is unknown.

    Args:
        make: makes the name.
        profile: any.
        shown: path of the profile, for messages.
        path: of the checkpoint, as in `checkpoint_identity`.
        revision: of a hub id.

    Returns:
        raises a ProfileMismatchError if the profile was calibrated on other weights, and an InputError if a file of the
        checkpoint is damaged.

    Raises:
        InputError: the path does not exist.
    """
    check = checking_profile(profile, path, revision)

    def checked(stop: threading.Event) -> str:
        verdict = check(stop)
        if verdict == "mismatch":
            raise ProfileMismatchError(
                f"profile: must be of the model's weights, got {shown}, calibrated on other weights than {path}; "
                "calibrate one for this model, or set check_model to false if it is the same model quantized or "
                "converted"
            )
        if verdict != "match":
            logger.info("cuvee: %s: calibrated on these weights? %s", shown, verdict)
        return make(stop)

    return checked


def _files(root: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted({file for pattern in patterns for file in root.glob(pattern) if file.is_file()})


def _weights(root: Path, load_format: str = "auto") -> list[Path]:
    """Return the files that an engine may read weights from. Other formats count beside safetensors that lie in
    subfolders alone, or belong to an adapter, of which engines read `adapter_model.bin` if that is there.
    """
    if root.is_file():
        return [root] if load_format != "dummy" else []
    kinds = [_files(root, patterns) for patterns in _FORMATS[load_format]]
    alone = any(file.parent == root for file in kinds[0]) if kinds else False
    if alone and not (root / "adapter_config.json").is_file():
        return kinds[0]
    return sorted(file for files in kinds for file in files)


def _entries(root: Path) -> dict[str, Any]:
    """Return what a folder's config.json holds; damage is found when it is read for the identity."""
    try:
        config = parse_json((root / "config.json").read_bytes(), constants=True)
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _elsewhere(root: Path) -> str | None:
    """Return another checkpoint that vLLM reads a part of the weights from, as it does for Ultravox."""
    config = _entries(root)
    found = (config.get(f"{part}_model_id") for part in ("text", "audio"))
    return next((str(place) for place in found if place), None)


def _add_code(digest: Any, root: Path, names: Iterable[str] = (), revision: str | None = None) -> int:
    """Add to a digest the code of hub ids: of some, and of those in `auto_map` (`org/name--module.Class`). Return the
    number of files. Those that are not on this machine are left out: engines run no code that is not.
    """
    files = []
    for name in sorted({*names, *_REPOSITORY.findall(json.dumps(_entries(root).get("auto_map")))}):
        with contextlib.suppress(InputError, OSError, ImportError):  # none is there, by whatever name
            files += [(name, file) for file in _files(resolve(name, revision), ("*.py",))]
    for name, file in files:
        digest.update(canonical(b"code", name.encode(), file.name.encode(), file.read_bytes()))
    return len(files)


def _add_configs(digest: Any, root: Path) -> None:
    """Add the files besides the weights to a digest."""
    for file in _files(root, _CONFIGS):
        data = file.read_bytes()
        digest.update(
            canonical(b"config", file.name.encode(), _canonical_json(file, data) if file.suffix == ".json" else data)
        )
    _add_code(digest, root)


def _canonical_json(file: Path, data: bytes) -> bytes:
    """Return JSON in one spelling, without entries that differ between copies of a checkpoint."""
    try:
        return canonical_config(parse_json(data, constants=True)).encode()
    except ValueError as error:
        raise InputError(f"model: must hold valid JSON in {file}, got {error}: copy the checkpoint again") from error
