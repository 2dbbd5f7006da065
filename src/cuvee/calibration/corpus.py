"""Models and texts by name, as on the command line, and token sequences cut from the texts.

MODEL   a folder or hub name that transformers can load; "books-3m" for the bundled model; "smollm2" for a real model
        that is downloaded once (see `cuvee.calibration.real_model`)
TEXT    the name of a bundled text
        FILE.txt (or any suffix except .jsonl): one document
        FILE.jsonl: one document per line, either a list of token ids or an object with input_ids or text
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from cuvee.calibration.bundled import TEXTS, bundled_model_path, bundled_text
from cuvee.calibration.real_model import REAL_MODEL, smollm2_path
from cuvee.codec.errors import InputError
from cuvee.codec.models.forward import coded_layout
from cuvee.codec.support.devices import usable_device
from cuvee.codec.support.plain_json import parse_json
from cuvee.codec.support.suggest import suggestion

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "BUNDLED_MODEL",
    "Corpus",
    "as_input_error",
    "leading_ids",
    "learning_dtype",
    "load_bundled_model",
    "load_model",
    "load_tokenizer",
    "model_path",
    "pick_evenly",
    "read_corpus",
    "sequences_by_text",
    "spread_sequences",
    "text_ids",
    "token_ids",
    "with_leading",
    "without_repeats",
]  # fmt: skip

T = TypeVar("T")

BUNDLED_MODEL = "books-3m"
_SMALL = 10**9  # bytes of a model in float32, which is learned in it


@dataclass(frozen=True, slots=True)
class Corpus:
    """One text, tokenized.

    Attributes:
        name: the name it was given by.
        sha256: SHA-256, in hex, of the token ids of all documents in order.
        documents: token ids of each document, int64 `[n]`, without `leading`.
        leading: the tokens that the tokenizer puts before every text (BOS); every sequence must begin with them. Empty
            if the documents were given as token ids.
    """

    name: str
    sha256: str
    documents: tuple[torch.Tensor, ...]
    leading: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """The number of tokens in all documents."""
        return sum(map(len, self.documents))


def model_path(name: str) -> str:
    """Return the argument of `from_pretrained` for a model name. "smollm2" is downloaded unless it is cached.

    Raises:
        CorruptError, ImportError, ModelUnavailableError: "smollm2" is not available, see `smollm2_path`.
        FileNotFoundError: the name is the path of a folder that does not exist.
    """
    if name == BUNDLED_MODEL:
        return str(bundled_model_path())
    if name == REAL_MODEL:
        return str(smollm2_path())
    if (name.startswith((".", "/", "~")) or name.count("/") > 1) and not Path(name).exists():
        raise FileNotFoundError(errno.ENOENT, "no such model folder", name)
    return name


def load_model(name: str, dtype: str = "auto", device: torch.device | str = "cpu") -> PreTrainedModel:
    """Load a causal language model whose caches cuvee can compress, in eval mode.

    Args:
        name: a folder, a hub name, "books-3m" or "smollm2".
        dtype: of the parameters: "auto" (as the files say), "bfloat16", "float16" or "float32".
        device: the device to load the model to.

    Raises:
        CorruptError, ModelUnavailableError: "smollm2" is not available, see `smollm2_path`.
        ImportError: transformers is not installed.
        InputError: transformers cannot read the files, or torch does not know the device.
        OSError: the model does not exist.
        UnsupportedModelError: see `KVLayout.from_config`; raised before any weights are read.
    """
    usable = usable_device(device)
    transformers = _transformers("a model")
    path = model_path(name)
    coded_layout(load_config(path))  # refuses before any weights are read
    with as_input_error(name), _no_progress_bar() if name in (BUNDLED_MODEL, REAL_MODEL) else nullcontext():
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, trust_remote_code=False, local_files_only=_only_local(path)
        )
    loaded: PreTrainedModel = model.to(usable).eval()
    return loaded


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
        >>> from cuvee.calibration.corpus import load_bundled_model
        >>> model, tokenizer = load_bundled_model()
        >>> f"{model.num_parameters():,}", model.config.num_hidden_layers
        ('3,443,136', 6)
    """
    if not dtype.is_floating_point:
        raise InputError(f"dtype: must be a floating-point type, got {dtype}")
    return load_model(BUNDLED_MODEL, str(dtype).removeprefix("torch.")), load_tokenizer(BUNDLED_MODEL)


def learning_dtype(name: str, device: str = "cpu") -> tuple[str, str]:
    """Choose the dtype to learn a model's profile in, an argument of `load_model`; return it, and why.

    On a CPU with instructions for bfloat16 a model of 1.5 B parameters takes 3.6 times as long in float32, on others
    bfloat16 takes longer. Sums and logits are float32 or wider in any dtype. The rounding of bfloat16 adds to the KL
    that is measured, of which the finest steps have little, so small models are learned in float32 anywhere.
    """
    stored = str(load_config(name).get_text_config().dtype).removeprefix("torch.")
    if torch.device(device).type != "cpu" or stored not in ("bfloat16", "float16"):
        return "auto", "that of its files"
    size = 2 * sum(file.stat().st_size for file in Path(model_path(name)).glob("*.safetensors"))
    if 0 < size <= _SMALL:
        return "float32", "the model is small"
    if stored == "bfloat16" and _multiplies_bfloat16():
        return stored, "that of its files, for which this CPU has instructions"
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size + size // 2 > memory:
        return stored, f"that of its files, since float32 takes {size / 1e9:.0f} GB of {memory / 1e9:.0f} GB of memory"
    return "float32", f"this CPU has no instructions for {stored}"


def _multiplies_bfloat16() -> bool:
    """Return whether the CPU has instructions for bfloat16, as far as torch tells (from 2.10 on)."""
    capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def load_config(name: str) -> PreTrainedConfig:
    """Load the configuration of a model, from any of the names of `load_model` or from a file. Errors: see there."""
    transformers = _transformers("a model")
    path = model_path(name)
    with as_input_error(name):
        config: PreTrainedConfig = transformers.AutoConfig.from_pretrained(
            path, trust_remote_code=False, local_files_only=_only_local(path)
        )
    return config


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model. Errors: see `load_model`."""
    transformers = _transformers("a tokenizer")
    path = model_path(name)
    with as_input_error(name):
        tokenizer: PreTrainedTokenizerBase = transformers.AutoTokenizer.from_pretrained(
            path, trust_remote_code=False, local_files_only=_only_local(path)
        )
    return tokenizer


def _only_local(path: str) -> bool:
    """Whether to look for a model on this machine alone: it is in a folder, or the hub does not answer.

    Without this, huggingface_hub asks a hub that is down six times, in half a minute, for what is not in its cache.
    """
    if Path(path).exists():
        return True
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    try:
        get_hf_file_metadata(hf_hub_url(path, "config.json"))
    except HfHubHTTPError:  # an answer
        return False
    except Exception:  # of huggingface_hub's HTTP client, which is another one in each of its versions
        return True
    return False


def _transformers(what: str) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"{what} needs transformers: pip install 'cuvee[transformers]'") from error
    return transformers


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Hide the progress bar of a load that takes a fraction of a second; restore the setting afterwards."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def as_input_error(what: str) -> Iterator[None]:
    """Turn a library's ValueError about unreadable files into an InputError, and have its OSErrors name the files."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{what}: {error}") from error
    except OSError as error:
        near = suggestion(what, (BUNDLED_MODEL, REAL_MODEL))
        hint = f" ({near})" if near.startswith("did") else ""
        if error.errno is not None or (what in str(error) and not hint):
            raise
        raise OSError(f"{what}{hint}: {error}") from error


def read_corpus(name: str, model_name: str) -> Corpus:
    """Read a text (see the top of this file) and tokenize it with a model's tokenizer.

    The tokenizer is loaded only if there is something to tokenize.

    Raises:
        FileNotFoundError: the file does not exist.
        InputError: the content of the file does not match its name.

    Example:
        >>> from cuvee.calibration.corpus import read_corpus, spread_sequences
        >>> orchard = read_corpus("orchard", "books-3m")
        >>> spread_sequences([orchard], length=512, count=8).shape
        torch.Size([8, 512])
    """
    items = list(_documents(name))
    tokenizer = load_tokenizer(model_name) if any(isinstance(item, str) for item in items) else None
    # Documents given as token ids already contain BOS where it belongs.
    leading = leading_ids(tokenizer) if tokenizer and all(isinstance(item, str) for item in items) else []
    documents = []
    digest = hashlib.sha256()
    for item in items:
        if tokenizer is not None and isinstance(item, str):
            ids = text_ids(tokenizer, item, leading)
        else:
            ids = torch.tensor(item, dtype=torch.int64)
        digest.update(f"{len(ids)} ".encode() + ids.numpy().tobytes())
        documents.append(ids)
    return Corpus(name, digest.hexdigest(), tuple(documents), tuple(leading))


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool) -> torch.Tensor:
    """Tokenize a text, int64 `[n]`; with `special`, including the tokens that the tokenizer puts around every text."""
    # verbose=False: a text longer than the model's context is cut later and needs no warning.
    return torch.tensor(tokenizer(text, add_special_tokens=special, verbose=False).input_ids, dtype=torch.int64)


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str, leading: Sequence[int]) -> torch.Tensor:
    """Tokenize a text without `leading`, also if the text itself (of a chat template, say) spells it out, int64 `[n]`.

    If `leading` is empty, the tokens that the tokenizer puts around every text are included, once.
    """
    ids = token_ids(tokenizer, text, special=not leading).tolist()
    kept = without_repeats(ids, leading or leading_ids(tokenizer))
    if leading and kept[: len(leading)] == list(leading):
        kept = kept[len(leading) :]
    return torch.tensor(kept, dtype=torch.int64)


def without_repeats(ids: list[int], leading: Sequence[int]) -> list[int]:
    """Return a text's tokens with `leading` at most once at their beginning, whether or not the text spells it out."""
    size = len(leading)
    while leading and ids[: 2 * size] == [*leading, *leading]:
        ids = ids[size:]
    return ids


def leading_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that a tokenizer puts before every text: BOS, or none.

    If there is a BOS, every prompt of the model begins with it, and most heads attend to it by default. A sequence cut
    from the middle of a text must begin with it too: otherwise it is unlike anything that the model will see.
    """
    plain, whole = (token_ids(tokenizer, "a", special=special).tolist() for special in (False, True))
    for start in range(len(whole) - len(plain) + 1):
        if plain and whole[start : start + len(plain)] == plain:
            return whole[:start]
    return []


def with_leading(leading: Sequence[int], rows: torch.Tensor) -> torch.Tensor:
    """Prepend `leading` to each of the rows `[N, t]`, or to one row `[t]`."""
    before = torch.tensor(leading, dtype=rows.dtype)
    return torch.cat([before.expand(*rows.shape[:-1], len(before)), rows], dim=-1)


def pick_evenly(items: Sequence[T], count: int) -> list[T]:
    """Return at most `count` items, evenly spaced.

    Example:
        >>> pick_evenly("abcdefgh", 3)
        ['a', 'c', 'f']
    """
    kept = min(len(items), count)
    return [items[i * len(items) // kept] for i in range(kept)]


def _documents(name: str) -> Iterator[str | list[int]]:
    if name in TEXTS:
        yield bundled_text(name)
        return
    path = Path(name)
    if path.is_dir():
        raise InputError(f"{path}: must be a text file, got a folder: name each of its files")
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, f"no such text file, nor a bundled text ({', '.join(TEXTS)})", name)
    if path.suffix.lower() == ".json":
        raise InputError(f"{path}: must be .jsonl with a document per line, or a text file, got .json: convert it")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: must be UTF-8 text, got {error.reason} at byte {error.start}") from error
    if path.suffix.lower() != ".jsonl":
        yield text
        return
    # Not splitlines(): it splits at U+2028 and other characters that JSON strings may contain.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            item = parse_json(line)
        except ValueError as error:
            raise InputError(f"{path}:{number}: must hold JSON, but {error}") from error
        if isinstance(item, dict):
            item = _unpadded(item) if "input_ids" in item else item.get("text")
        if not _is_document(item):
            half = isinstance(item, str)
            raise InputError(
                f"{path}:{number}: must hold a list of token ids or an object with input_ids or text, got "
                + ("a text with half of a surrogate pair (\\ud800 … \\udfff)" if half else "neither")
            )
        yield item


def _unpadded(item: dict[str, Any]) -> Any:
    """Return the input_ids that the attention_mask of a row keeps; None if the two do not fit."""
    ids, mask = item["input_ids"], item.get("attention_mask")
    if mask is None:
        return ids
    if not isinstance(ids, list) or not isinstance(mask, list) or len(mask) != len(ids) or {*map(str, mask)} - {*"01"}:
        return None
    return [token for token, kept in zip(ids, mask, strict=True) if kept]


def _is_document(item: Any) -> bool:
    if isinstance(item, str):
        return not any("\ud800" <= character <= "\udfff" for character in item)  # half of a pair is no text
    return isinstance(item, list) and all(type(t) is int and 0 <= t < 1 << 31 for t in item)


def spread_sequences(corpora: Sequence[Corpus], length: int, count: int | None = None) -> torch.Tensor:
    """Cut at most `count` disjoint sequences `[N, length]`, spread evenly over the texts; without it, all.

    Raises:
        InputError: a text holds no sequence of this length.
    """
    whole = [piece for of_text in _pieces(corpora, length) for piece in of_text]
    return torch.stack(pick_evenly(whole, count or len(whole)))


def sequences_by_text(corpora: Sequence[Corpus], length: int, count: int) -> tuple[torch.Tensor, list[int]]:
    """Cut at most `count` disjoint sequences, the same number from each text, or all sequences of a shorter text.

    Returns:
        int64 `[N, length]`, text after text, and the index of each sequence's text.

    Raises:
        InputError: a text holds no sequence of this length.
    """
    pieces = _pieces(corpora, length)
    wanted = [0] * len(pieces)
    for _ in range(count):
        short = [index for index, of_text in enumerate(pieces) if wanted[index] < len(of_text)]
        if short:
            wanted[min(short, key=lambda index: wanted[index])] += 1
    chosen = [pick_evenly(of_text, share) for of_text, share in zip(pieces, wanted, strict=True)]
    rows = [row for of_text in chosen for row in of_text]
    return torch.stack(rows), [index for index, of_text in enumerate(chosen) for _ in of_text]


def _pieces(corpora: Sequence[Corpus], length: int) -> list[list[torch.Tensor]]:
    """Return all disjoint sequences of each text."""
    by_text = []
    for corpus in corpora:
        body = max(length - len(corpus.leading), 1)
        pieces = (piece for ids in corpus.documents for piece in ids.split(body) if len(piece) == body)
        by_text.append([with_leading(corpus.leading, piece) for piece in pieces])
        if not by_text[-1]:
            longest = max((len(corpus.leading) + len(ids) for ids in corpus.documents), default=0)
            raise InputError(
                f"text: must hold at least {length} tokens in one document, got {longest} in {corpus.name}: give more "
                "text, or a smaller --length"
            )
    return by_text
