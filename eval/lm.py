"""The lm-eval model `cuvee`: HFLM, but the cache of every context goes through a method before anything is scored.

    request = context | continuation

    tokens   c0 c1 … c(n-2)  |  c(n-1) t0 … t(m-2)          what the model reads
                  |                     |
               prefill                  |                    once per context, however many continuations it has
                  |                     |
         chunks --method--> chunks      |
                  |                     |
             decoded cache  --------> forward -------------> log P(t0 … t(m-1))

The model that comes with lm-eval scores context and continuation in one pass without a cache, so it would not exercise
any codec.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
import torch.nn.functional as F

from cuvee.calibration.corpus import leading_ids, model_path, without_repeats
from cuvee.codec.codec import Codec
from cuvee.codec.dtypes import TORCH_DTYPES, value_bits
from cuvee.codec.errors import InputError
from cuvee.codec.models.fingerprint import function_digest, model_fingerprint, warn_of_others
from cuvee.codec.models.forward import cache_argument, coded_layout
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.quality import Limits, Quality
from cuvee.codec.profiles.setting import Setting
from cuvee.codec.support.devices import usable_device
from cuvee.codec.support.suggest import suggestion
from cuvee.eval.cached_reading import CachedReader, ExactCaches, Read, Statistics
from cuvee.eval.methods import baseline, method_identity
from cuvee.eval.quality import CHUNK_TOKENS, CodecMethod, Method
from cuvee.eval.tasks import facts_of

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows
    from tqdm import tqdm
except ImportError as missing:
    raise ImportError("the lm-eval model needs lm-eval: pip install 'cuvee[eval]'") from missing

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import CacheHook
    from transformers import PreTrainedModel

__all__ = ["CuveeLM"]

_UNNAMED = "an unnamed task"
# What `generate` does after a cache that is already filled as it does without one.
_GENERATION = frozenset({
    "bad_words_ids", "begin_suppress_tokens", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty", "eos_token_id", "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty",
    "forced_bos_token_id", "forced_eos_token_id", "length_penalty", "max_gen_toks", "max_length", "max_time",
    "min_length", "min_new_tokens", "min_p", "no_repeat_ngram_size", "num_beams", "remove_invalid_values",
    "renormalize_logits", "repetition_penalty", "sequence_bias", "suppress_tokens", "temperature", "top_k", "top_p",
    "typical_p", "until",
})  # fmt: skip
# What a checkpoint may ask for to be faster: none changes a text, and none works with such a cache.
_FASTER = ("assistant_early_exit", "cache_implementation", "prefill_chunk_size", "prompt_lookup_num_tokens", "use_mtp")


@register_model("cuvee")
class CuveeLM(HFLM):  # type: ignore[misc]
    """A transformers model that remembers its contexts through a method.

    - `loglikelihood`: the cache of all context tokens but the last goes through the method. The last one and the
      continuation are read after it. Requests with the same context share a prefill and a round trip. A request with
      a single context token has no cache: it is scored exactly, and counted.
    - `loglikelihood_rolling`: lm-eval's windows have one token of context, so nothing would be cached. Here the
      first half of each window is scored exactly, and the second half after the decoded cache of the first.
    - `generate_until`: generates after the decoded cache of all prompt tokens but the last. Arguments of `generate`
      that do not work with such a cache, as prompt lookup, are refused.

    If the method changes nothing, the results are those of HFLM with the same `softmax_dtype`, but for BOS: no text
    begins with two, whether the tokenizer, the text or a window of `loglikelihood_rolling` puts it there. HFLM scores
    the second as a token of the text.

    Args:
        pretrained: see HFLM; a path may be a `Path`, and "books-3m" is the bundled model.
        method: a `Method`, or the name of a baseline (`cuvee.eval.methods.baseline`). Instead of a method you can give:
        profile: a calibrated profile or its path, with at most one of the qualities (default: balanced);
        quality, kl, bits, ratio, step: see `Codec`. Without a profile, `quality="lossless"` is the only one.
        chunk_tokens: tokens coded together; the last chunk of a context may hold fewer.
        cache_dtype: the dtype in which chunks are coded; default: the model's.
        softmax_dtype: of likelihoods, float32 or float64, whatever dtype the model has. They are summed in float64.
        batch_size: rows of a forward pass; `"auto"` is refused.
        truncation: cut contexts that are too long for the model at the left, as HFLM does without being asked. Without
            this option they are errors here.
        kwargs: any other arguments of HFLM.

    Raises:
        InputError: arguments are out of range, contradict each other or do not say what to do with the cache; or the
            model would run in a way that is not supported (sequence-to-sequence, several processes).
        UnsupportedModelError: see `KVLayout.from_config`.
        ProfileMismatchError: the profile is of another model.
        ProfileError: see `Codec`.

    Example:
        >>> lm = CuveeLM("books-3m", quality="lossless", device="cpu")
        >>> lm.configuration["method"]["method"], lm.chunk_tokens
        ('cuvee', 256)
    """

    last_summary: ClassVar[str] = ""  # of the last evaluation that ended in this process

    def __init__(
        self,
        pretrained: str | os.PathLike[str] | PreTrainedModel,
        *,
        method: Method | str | None = None,
        profile: str | os.PathLike[str] | Profile | None = None,
        quality: str | None = None,
        kl: float | None = None,
        bits: float | None = None,
        ratio: float | None = None,
        step: float | None = None,
        chunk_tokens: int = CHUNK_TOKENS,
        cache_dtype: str | None = None,
        softmax_dtype: str | torch.dtype = "float32",
        batch_size: int | str = 1,
        **kwargs: Any,
    ) -> None:
        qualities = {"quality": quality, "kl": kl, "bits": bits, "ratio": ratio, "step": step}
        asked: dict[str, Any] = {name: value for name, value in qualities.items() if value is not None}
        _check_choice(method, profile, asked)
        self.chunk_tokens = _at_least_one("chunk_tokens", chunk_tokens)
        if cache_dtype is not None and cache_dtype not in TORCH_DTYPES:
            raise InputError(f"cache_dtype: must be one of {', '.join(TORCH_DTYPES)}, got {cache_dtype!r}")
        _check_dtypes(kwargs)
        softmax = str(softmax_dtype).removeprefix("torch.")
        if softmax not in ("float32", "float64"):  # a narrower one adds a loss of its own to that of the method
            raise InputError(f"softmax_dtype: must be float32 or float64, got {softmax}")
        if kwargs.get("tp_plan") is not None:
            raise InputError("tp_plan: every process would hold a part of each cache: run the model in one process")
        # Loaded before the model, which takes longer, and checked against its config before any weights are read.
        if isinstance(method, str):
            method = baseline(method)
        limits = cast(Limits, {name: value for name, value in asked.items() if name != "quality"})
        self._quality = None if method is not None else Quality.of(quality, limits, default="balanced")
        self._profile = Profile.load(profile) if isinstance(profile, str | os.PathLike) else profile
        asked_dtype = cache_dtype or kwargs.get("dtype")
        self._dtype = None if asked_dtype == "auto" else asked_dtype  # of caches; None: that of the model's files
        self._unread = isinstance(pretrained, str | os.PathLike)
        self._tasks: dict[Any, set[str]] = {}  # which tasks ask each request in progress; two may ask the same one
        if isinstance(pretrained, str | os.PathLike):
            pretrained = model_path(os.fspath(pretrained))
        if kwargs.get("device") is not None:
            usable_device(kwargs["device"])
        if str(batch_size).startswith("auto"):
            raise InputError("batch_size: 'auto' is not supported, because caches take memory too: give a number")
        rows = _at_least_one("batch_size", batch_size)
        try:
            super().__init__(pretrained, batch_size=rows, softmax_dtype=softmax, **kwargs)
        except TypeError as error:  # HFLM passes on what it does not know, and a model's class refuses it
            if unknown := [name for name in kwargs if f"'{name}'" in str(error)]:
                ours, theirs = (signature(one.__init__).parameters for one in (CuveeLM, HFLM))
                raise InputError(f"{unknown[0]}: is no argument; {suggestion(unknown[0], [*ours, *theirs])}") from error
            raise
        if self.world_size > 1:
            raise InputError("accelerate: several processes are not supported: start one, or use parallelize=True")
        layout = replace(coded_layout(self.model.config), dtype=str(self.model.dtype).removeprefix("torch."))
        if layout.states and self.batch_size_per_gpu > 1:
            raise InputError(
                f"batch_size: must be 1 for {layout.model_type}, whose layers keep states that padding would change, "
                f"got {self.batch_size_per_gpu}"
            )
        if layout.max_positions is not None and self.max_length > layout.max_positions:
            raise InputError(f"max_length: the model has {layout.max_positions} positions, got {self.max_length}")
        self.layout = layout if cache_dtype is None else replace(layout, dtype=cache_dtype)
        self.exact_caches = ExactCaches()  # that the next methods share; by default none are kept
        self._fingerprint = model_fingerprint(self.model)
        self._leading = leading_ids(self.tokenizer)
        if method is None:
            source = Profile.unlearned(self.layout) if self._profile is None else self._profile
            sized: dict[str, Any] = {"dtype": self.layout.dtype} if "ratio" in asked else {}
            method = CodecMethod(Codec(source, **asked, **sized))
        self.use(method)

    def _get_backend(self, *args: Any, **kwargs: Any) -> None:
        """Refuse what cannot work as soon as the config is known, because the weights may take minutes to load."""
        super()._get_backend(*args, **kwargs)
        if self.backend != "causal":
            raise InputError(f"backend: {self.backend} models are not supported, only decoders (causal)")
        layout = coded_layout(self.config)
        if self._profile is not None:
            self._profile.check_layout(layout)
        quality, dtype = self._quality, str(self._dtype or self.config.dtype).removeprefix("torch.")
        if quality is not None and quality.ratio is not None:
            quality = replace(quality, dtype=dtype) if self._unread and dtype in TORCH_DTYPES else None
        if quality is not None:
            Setting.choose(Profile.unlearned(layout) if self._profile is None else self._profile, quality)

    # Configuration ---------------------------------------------------------------------------------------------

    @property
    def method(self) -> Method:
        """The method that caches go through."""
        return self._method

    @property
    def statistics(self) -> Statistics:
        """Counts since the method was set."""
        return self._statistics

    @property
    def bits_per_value(self) -> float | None:
        """Bits per value of the caches coded so far, everything included; None before the first."""
        values = self._statistics.cached_tokens * self.layout.values_per_token
        return self._statistics.bits / values if values else None

    @property
    def summary(self) -> str:
        """One line for people: what happened to the caches so far, and what size they had."""
        bits, counted = self.bits_per_value, self._statistics
        size = "nothing was cached"
        if bits:
            ratio = value_bits(self.layout.dtype) / bits
            size = f"{bits:.2f} bits per value, {ratio:.1f}x smaller than caches in {self.layout.dtype}"
        method = self._method
        name = method.codec.described_quality if isinstance(method, CodecMethod) else repr(method)
        return f"cuvee: {name}: {size} ({counted.contexts:,} contexts of {counted.cached_tokens:,} cached tokens)"

    @property
    def configuration(self) -> dict[str, Any]:
        """Everything that decides how a request is answered, as a dict for JSON."""
        vocabulary = json.dumps(sorted(self.tokenizer.get_vocab().items()))
        return {
            "model": self._fingerprint,
            "function": function_digest(self.model),
            "dtype": str(self.model.dtype),
            "mixed_precision_dtype": str(self.mixed_precision_dtype),
            "softmax_dtype": str(self.softmax_dtype),
            "method": method_identity(self._method),
            "chunk_tokens": self.chunk_tokens,
            "cache_dtype": self.layout.dtype,
            "tokenizer": hashlib.blake2b(vocabulary.encode(), digest_size=16).hexdigest(),
            "add_bos_token": self.add_bos_token,
            "prefix_token_id": self.prefix_token_id,
            "max_length": self.max_length,
            "truncation": bool(self.truncation),
            "think_end_token": self.think_end_token,
        }

    def use(self, method: Method | str) -> None:
        """Continue with another method. The model stays loaded, and the statistics start from zero.

        Args:
            method: as in the constructor.

        Raises:
            InputError: the name is not known, or the method has no identity.
            ProfileMismatchError: the codec is for another model.
        """
        if isinstance(method, str):
            method = baseline(method)
        method_identity(method)  # better to find out now that it has none than after hours of work
        if isinstance(method, CodecMethod):
            method.codec.profile.check_layout(self.layout)
            warn_of_others(method.codec.profile.model, self._fingerprint)
        self._method: Method = method
        self._statistics = Statistics()
        self._reader = CachedReader(
            self._forward, self.model, self.layout, method, self.chunk_tokens, self._statistics, self.exact_caches
        )

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Refuse a response cache of lm-eval (`use_cache`).

        The keys of its responses depend on the requests alone, so one method would get the scores of another.

        Raises:
            InputError: always, for a hook with a file.
        """
        if cache_hook.dbdict is not None:
            name = cache_hook.dbdict.filename
            cache_hook.dbdict.close()
            raise InputError(
                f"use_cache: must be left out, got {name}: lm-eval's responses do not say which method made them"
            )
        super().set_cache_hook(cache_hook)

    def get_model_info(self) -> dict[str, Any]:
        """What HFLM says, and under `cuvee` the configuration and the statistics, as a dict for JSON."""
        if isinstance(self.pretrained, str) and not Path(self.pretrained).exists():
            info = cast(dict[str, Any], super().get_model_info())
        else:  # HFLM would ask the hub about the revision of a local folder
            info = {
                "model_num_parameters": self.model.num_parameters(),
                "model_dtype": self.model.dtype,
                "model_revision": self.revision,
                "model_sha": "",
            }
        type(self).last_summary = self.summary  # lm-eval's command asks for this once, when all is done
        figures = asdict(self._statistics)
        del figures["bits"]
        return {**info, "cuvee": {**self.configuration, "bits_per_value": self.bits_per_value, **figures}}

    # Requests --------------------------------------------------------------------------------------------------

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation after the decoded cache of its context, and whether it is the likeliest.

        Raises:
            InputError: a task has no context, a request is too long, or a continuation is empty.
        """
        self._remember((request.args, request) for request in requests)
        return cast(list[tuple[float, bool]], super().loglikelihood(requests, disable_tqdm=disable_tqdm))

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """See `loglikelihood`. HFLM gives `override_bs` for batches whose size it found automatically."""
        reads = []
        for strings, context, continuation in requests:
            tasks = self._asking(strings)
            if not continuation:
                raise InputError(f"tasks: {_listed(tasks)} has an empty continuation, which has no likelihood")
            tokens = (*context, *continuation)
            if len(tokens) > self.max_length + 1:
                # There must be at least one token left to predict the continuation from.
                self._too_long(tasks, len(tokens) - 1, self.max_length, cut=len(continuation) <= self.max_length)
                tokens = tokens[-(self.max_length + 1) :]
            reads.append(Read(tokens[:-1], len(tokens) - len(continuation) - 1, tuple(continuation)))
        self._check_contexts((self._asking(asked[0]), read) for asked, read in zip(requests, reads, strict=True))
        with tqdm(total=len(reads), disable=disable_tqdm, desc="Running loglikelihood requests") as bar:
            return self._reader.score(reads, self.batch_size, bar)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts in lm-eval's windows. The second half of each is read after a decoded cache.

        If the method changes nothing, the value is that of HFLM. If it destroys the cache, half the tokens are spoiled.

        Raises:
            InputError: no window of a task has two tokens.
        """
        reads, owners = [], []
        for index, request in enumerate(requests):
            text = self.tok_encode(request.args[0])
            windows = get_rolling_token_windows(
                # The first window puts it before the text.
                token_list=text[1:] if text[:1] == [self.prefix_token_id] else text,
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for tokens, targets in windows:
                reads.append(Read(tuple(tokens), len(tokens) // 2, tuple(targets)))
                owners.append(index)
        self._check_contexts(({_name(requests[owner])}, read) for owner, read in zip(owners, reads, strict=True))
        with tqdm(total=len(reads), disable=disable_tqdm, desc="Running loglikelihood_rolling requests") as bar:
            answers = self._reader.score(reads, self.batch_size, bar)
        totals = [0.0] * len(requests)
        for owner, (value, _) in zip(owners, answers, strict=True):
            totals[owner] += value
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue each prompt after the decoded cache of all its tokens but the last.

        Raises:
            InputError: a task has no context, a prompt is too long, there is no room left to generate, or a task asks
                for a way of generating that does not work after a filled cache.
        """
        reads = []
        for request in requests:
            prompt, arguments = request.args
            given = normalize_gen_kwargs(arguments, self.max_gen_toks)
            others = sorted(name for name, value in given.items() if value is not None and name not in _GENERATION)
            if others:
                raise InputError(
                    f"gen_kwargs: must work after a filled cache, got {', '.join(others)} from {_name(request)}: leave "
                    f"it out ({', '.join(sorted(_GENERATION))} work)"
                )
            wanted = given["max_gen_toks"]
            if wanted >= self.max_length:
                raise InputError(
                    f"tasks: {_name(request)} generates up to {wanted} tokens, the model reads "
                    f"{self.max_length}: lower max_gen_toks (gen_kwargs)"
                )
            tokens = tuple(self.tok_encode(prompt))
            reads.append(({_name(request)}, Read(tokens, max(0, len(tokens) - 1), ())))
        self._check_contexts(reads)
        self._remember((request.args[0], request) for request in requests)
        return cast(list[str], super().generate_until(requests, disable_tqdm=disable_tqdm))

    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,
        left_truncate_len: int | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids, with the tokens that begin a text (BOS) once, also if the text spells them out as templates do."""
        tokens = super().tok_encode(string, add_special_tokens, **kwargs)
        if add_special_tokens is None:
            tokens = without_repeats(tokens, self._leading)
        return cast(list[int], tokens[-left_truncate_len:] if left_truncate_len else tokens)

    def tok_batch_encode(
        self,
        strings: list[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and mask `[B, T]` of `tok_encode`, cut at the left if that is allowed.

        The argument `truncation` is ignored: it would let the tokenizer cut the right end as well.
        """
        rows = [self.tok_encode(string) for string in strings]
        for string, row in zip(strings, rows, strict=True):
            if left_truncate_len is not None and len(row) > left_truncate_len:
                self._too_long(self._asking(string), len(row), left_truncate_len)
        rows = [row[-left_truncate_len:] if left_truncate_len else row for row in rows]
        width = max(map(len, rows))
        tokens = torch.full((len(rows), width), self.tokenizer.pad_token_id)
        mask = torch.zeros_like(tokens)
        for at, row in enumerate(rows):
            first = width - len(row) if padding_side == "left" else 0
            tokens[at, first : first + len(row)] = torch.tensor(row)
            mask[at, first : first + len(row)] = 1
        return tokens, mask

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> torch.Tensor:
        """Generate after `context [B, T]`, whose padding on the left the keyword `attention_mask` marks."""
        mask = generation_kwargs["attention_mask"]
        cached = [tuple(row[kept.bool()][:-1].tolist()) for row, kept in zip(context, mask, strict=True)]
        self._statistics.uncached_requests += sum(not tokens for tokens in cached)
        decoded, _ = self._reader.round_trip([*dict.fromkeys(tokens for tokens in cached if tokens)])
        cache = self._reader.build_cache([decoded.get(tokens) for tokens in cached], context.shape[1] - 1)
        if cache is not None:
            beams = generation_kwargs.get("num_beams", self.model.generation_config.num_beams)
            if beams and beams > 1:  # generate() repeats its other inputs, but not the cache
                cache.batch_repeat_interleave(beams)
            generation_kwargs |= cache_argument(self.model, cache)
            config = self.model.generation_config
            generation_kwargs |= {name: None for name in _FASTER if getattr(config, name, None)}
        return cast(
            torch.Tensor,
            super()._model_generate(context=context, max_length=max_length, stop=stop, **generation_kwargs),
        )

    def _remember(self, requests: Iterable[tuple[Any, Instance]]) -> None:
        """Keep the names of the tasks under what HFLM passes on of each request."""
        self._tasks = {}
        for key, request in requests:
            self._tasks.setdefault(key, set()).add(_name(request))

    def _asking(self, key: Any) -> set[str]:
        return self._tasks.get(key, {_UNNAMED})

    def _check_contexts(self, reads: Iterable[tuple[set[str], Read]]) -> None:
        """Refuse tasks that never cache anything: they do not exercise the method, so their scores say nothing."""
        some: dict[str, bool] = {}
        for tasks, read in reads:
            for task in tasks:
                some[task] = some.get(task, False) or read.split > 0
        for task, exercised in some.items():
            if not exercised:
                raise InputError(
                    f"tasks: {task} has no context of two tokens or more: nothing is cached, so its score would say "
                    "nothing about a method; leave it out, or give it examples (num_fewshot)"
                )

    def _too_long(self, tasks: set[str], tokens: int, limit: int, cut: bool = True) -> None:
        """Count a request that has to be cut, or refuse it."""
        if not (self.truncation and cut):
            remedy = (
                "only with truncation=True is its left end cut off" if cut else "its continuation alone is too long"
            )
            settings = {facts.shorter for task in tasks if (facts := facts_of(task)) and facts.shorter}
            if cut and settings:
                remedy = f"give it less context, as with --metadata {' '.join(sorted(settings))}; {remedy}"
            raise InputError(
                f"tasks: {_listed(tasks)} has a request of {tokens} tokens, the model reads {limit}: {remedy}"
            )
        self._statistics.truncated_requests += 1

    def _forward(self, tokens: torch.Tensor, cache: Any = None, **arguments: Any) -> torch.Tensor:
        """Log-probabilities `[B, T, V]` as HFLM computes them."""
        precision = self.mixed_precision_dtype
        cached = {} if cache is None else cache_argument(self.model, cache)
        with torch.no_grad(), torch.autocast(self.device.type, precision, enabled=precision is not None):
            logits = self.model(input_ids=tokens, **cached, **arguments).logits
        return F.log_softmax(logits, dim=-1, dtype=self.softmax_dtype)


def _check_choice(method: Any, profile: Any, asked: dict[str, Any]) -> None:
    """Make sure that there is exactly one answer to what happens to the cache."""
    others = {"profile": profile, **asked}
    if method is not None and any(value is not None for value in others.values()):
        given = ", ".join(f"{name}=" for name, value in others.items() if value is not None)
        raise InputError(f"method: already says what happens to the cache; leave {given} out, or method=")
    if method is None and profile is None and not asked:
        raise InputError("method: nothing says what happens to the cache: give profile=, quality= or method=")
    if len(asked) > 1:
        raise InputError(f"quality: give at most one of quality=, kl=, bits=, ratio=, step=; got {', '.join(asked)}")
    for name, value in asked.items():
        if not isinstance(value, str if name == "quality" else int | float):
            raise InputError(f"{name}: must be {'a name' if name == 'quality' else 'a number'}, got {value!r}")


def _check_dtypes(options: Mapping[str, Any]) -> None:
    """Refuse dtypes of the model that no cache is coded from."""
    for name in ("dtype", "mixed_precision_dtype"):
        given = options.get(name)
        if given not in (None, "auto") and str(given).removeprefix("torch.") not in TORCH_DTYPES:
            raise InputError(f"{name}: must be one of {', '.join(TORCH_DTYPES)}, got {given!r}")


def _at_least_one(name: str, value: Any) -> int:
    """A count, which may come from a command line as text."""
    number = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value
    if type(number) is not int or number < 1:
        raise InputError(f"{name}: must be a whole number of at least 1, got {value!r}")
    return number


def _name(request: Instance) -> str:
    return request.task_name or _UNNAMED


def _listed(tasks: set[str]) -> str:
    return ", ".join(sorted(tasks))
