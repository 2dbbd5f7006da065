"""The lm-eval model `cuvee`: HFLM in which the KV of every context goes through a method before anything is scored.

    request = context | continuation

    tokens   c0 c1 … c(n-2)  |  c(n-1) t0 … t(m-2)          what the model reads
                  |                     |
               prefill                  |                    once a context, whatever the number of continuations
                  |                     |
         chunks --method--> chunks      |
                  |                     |
             decoded cache  --------> forward -------------> log P(t0 … t(m-1))

lm-eval's own model scores context and continuation in one pass without a cache, so no codec would be exercised.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.dtypes import TORCH_DTYPES
from cuvee.codec.errors import InputError, UnsupportedModel
from cuvee.codec.fingerprint import model_fingerprint
from cuvee.codec.layout import KVLayout
from cuvee.codec.model import empty_cache
from cuvee.codec.profile import Profile
from cuvee.eval.corpus import model_path
from cuvee.eval.quality import CHUNK_TOKENS, CodecMethod, Method, spans
from cuvee.eval.tasks import TASKS_PATH

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows
    from tqdm import tqdm
except ImportError as missing:
    raise ImportError("the lm-eval model needs lm-eval: install cuvee[eval]") from missing

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import CacheHook
    from transformers import PreTrainedModel

__all__ = ["CuveeLM", "Statistics", "method_identity", "run_cli"]

_CONFIGURATION = "cuvee-configuration"  # entries of a response cache; lm-eval's own names are hex digests
_TASK = "cuvee-task "
_UNNAMED = "an unnamed task"

_Tokens = tuple[int, ...]
_Cached = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values `[H, T, D]` of each layer of one sequence, in the dtype and on the device of the model's cache."""


@dataclass(slots=True)
class Statistics:
    """What went through the method since it was set.

    Attributes:
        contexts: caches coded; the continuations of a context share one.
        cached_tokens: tokens of these.
        bits: all-in, as the method counts them.
        uncached_requests: requests scored exactly, for want of two context tokens: the last one is never cached.
        truncated_requests: requests whose left end was cut off to fit the model.
    """

    contexts: int = 0
    cached_tokens: int = 0
    bits: float = 0.0
    uncached_requests: int = 0
    truncated_requests: int = 0


@dataclass(frozen=True, slots=True)
class _Read:
    """One thing to score: the last `len(targets)` predictions of a model that reads `tokens`.

    Attributes:
        tokens: everything the model reads, without the last target.
        split: the cache of `tokens[:split]` goes through the method. Predictions made before come from the exact
            cache, those after from the decoded one.
        targets: the true tokens.
    """

    tokens: _Tokens
    split: int
    targets: _Tokens

    @property
    def cached(self) -> _Tokens:
        return self.tokens[: self.split]

    @property
    def tail(self) -> _Tokens:
        return self.tokens[self.split :]

    @property
    def exact_targets(self) -> _Tokens:
        """Those predicted by the prefill itself."""
        return self.targets[: max(0, len(self.targets) - len(self.tail))]


def method_identity(method: Method) -> dict[str, Any]:
    """What tells a method from every other one, JSON-ready: for digests and reports.

    A codec is its profile and its step; another method may offer an attribute `identity`, and is its `repr` otherwise.

    Raises:
        InputError: a method whose `repr` does not tell its contents (tensors, plain objects).
    """
    given = getattr(method, "identity", None)
    if given is not None:
        return dict(given)
    if isinstance(method, CodecMethod):
        codec = method.codec
        return {
            "method": "cuvee",
            "profile": codec.profile.id.hex(),
            "source": codec.profile.source,
            "step": codec.step,
            "lossless": codec.lossless,
        }
    text = repr(method)
    if re.search(r"\b(tensor|array)\(| at 0x", text):
        raise InputError(
            f"method: the repr of {type(method).__name__} does not name its contents: make it a dataclass of plain "
            "values, or give it an attribute `identity`, a dict"
        )
    return {"method": text}


@register_model("cuvee")
class CuveeLM(HFLM):  # type: ignore[misc]
    """A transformers model whose contexts are remembered through a method.

    - `loglikelihood`: the cache of all context tokens but the last goes through the method; the last one and the
      continuation are read after it. Requests of one context share a prefill and a round trip. A request with a
      single context token has no cache: it is scored exactly, and counted.
    - `loglikelihood_rolling`: lm-eval's windows have one token of context, so nothing would be cached. Here the
      first half of each window is scored exactly, the second half after the decoded cache of the first.
    - `generate_until`: generates after the decoded cache of all prompt tokens but the last.

    With a method that changes nothing the results are HFLM's.

    Args:
        pretrained: see HFLM; a path may be a `Path`, and "books-3m" is the bundled model.
        method: a `Method`, or the name of a baseline (`cuvee.eval.methods.baseline`). Instead of a method:
        profile: a calibrated profile or its path, with at most one of the qualities (default: balanced);
        quality, kl, bits, ratio, step: see `Codec`. Without a profile: the generic one, which needs no calibration.
        codec_backend: `backend` of the codec (HFLM has a `backend` of its own).
        chunk_tokens: tokens coded together; the last chunk of a context may hold fewer.
        cache_dtype: the dtype in which chunks are coded; default: the model's.
        batch_size: rows of a forward pass; `"auto"` is refused.
        truncation: cut contexts that the model cannot read from the left, as HFLM does without being asked. Here they
            are errors otherwise.
        kwargs: HFLM's own arguments.

    Raises:
        InputError: an argument out of range, contradictory ones, none that says what to do with the cache, or a way
            of running the model that is not supported (sequence-to-sequence, several processes).
        UnsupportedModel: see `KVLayout.from_config`.
        ProfileMismatch: a profile of another model.
        ProfileError: see `Codec`.
    """

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
        codec_backend: str = "auto",
        chunk_tokens: int = CHUNK_TOKENS,
        cache_dtype: str | None = None,
        batch_size: int | str = 1,
        **kwargs: Any,
    ) -> None:
        qualities = {"quality": quality, "kl": kl, "bits": bits, "ratio": ratio, "step": step}
        asked: dict[str, Any] = {name: value for name, value in qualities.items() if value is not None}
        _check_choice(method, profile, asked)
        self.chunk_tokens = _at_least_one("chunk_tokens", chunk_tokens)
        if cache_dtype is not None and cache_dtype not in TORCH_DTYPES:
            raise InputError(f"cache_dtype: must be one of {', '.join(TORCH_DTYPES)}, got {cache_dtype!r}")
        if str(batch_size).startswith("auto"):
            raise InputError("batch_size: 'auto' is not supported, because caches take memory too: give a number")
        if kwargs.get("tp_plan") is not None:
            raise InputError("tp_plan: every process would hold a part of each cache: run the model in one process")
        # Loaded before the model, which takes longer, and checked against its config before its weights are read.
        self._profile = Profile.load(profile) if isinstance(profile, str | os.PathLike) else profile
        self._tasks: dict[Any, set[str]] = {}  # that ask the requests in progress: two tasks may ask the same
        if isinstance(pretrained, str | os.PathLike):
            pretrained = model_path(os.fspath(pretrained))
        super().__init__(pretrained, batch_size=_at_least_one("batch_size", batch_size), **kwargs)
        if self.world_size > 1:
            raise InputError("accelerate: several processes are not supported: start one, or use parallelize=True")
        layout = KVLayout.from_config(self.model.config, dtype=self.model.dtype)
        if layout.max_positions is not None and self.max_length > layout.max_positions:
            raise InputError(f"max_length: the model has {layout.max_positions} positions, got {self.max_length}")
        self.layout = layout if cache_dtype is None else replace(layout, dtype=cache_dtype)
        self._fingerprint = model_fingerprint(self.model)
        if method is None:
            source = Profile.generic(self.layout) if self._profile is None else self._profile
            method = CodecMethod(Codec(source, backend=codec_backend, **asked))
        self.use(method)

    def _get_backend(self, *args: Any, **kwargs: Any) -> None:
        """Refuse what cannot work as soon as the config is known: the weights may take minutes to load."""
        super()._get_backend(*args, **kwargs)
        if self.backend != "causal":
            raise InputError(f"backend: {self.backend} models are not supported, only decoders (causal)")
        layout = KVLayout.from_config(self.config, dtype="float32")  # the dtype plays no part in these checks
        if self._profile is not None:
            self._profile.check_layout(layout)

    # Configuration ---------------------------------------------------------------------------------------------

    @property
    def method(self) -> Method:
        """What the caches go through."""
        return self._method

    @property
    def statistics(self) -> Statistics:
        """Of what was done since the method was set. Responses out of a response cache do not count."""
        return self._statistics

    @property
    def bits_per_value(self) -> float | None:
        """All-in bits of the caches coded so far; None before the first."""
        values = self._statistics.cached_tokens * self.layout.values_per_token
        return self._statistics.bits / values if values else None

    @property
    def configuration(self) -> dict[str, Any]:
        """Everything that decides the response to a request, JSON-ready."""
        vocabulary = json.dumps(sorted(self.tokenizer.get_vocab().items()))
        return {
            "model": self._fingerprint,
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
        """Go on with another method. The model stays loaded; the statistics begin anew.

        A response cache that is attached is closed: its responses belong to the method before.

        Args:
            method: as in the constructor.

        Raises:
            InputError: an unknown name, or a method without an identity.
            ProfileMismatch: a codec of another model.
        """
        if isinstance(method, str):
            from cuvee.eval.methods import baseline

            method = baseline(method)
        method_identity(method)  # a method without one must fail before it has worked for hours
        if isinstance(method, CodecMethod):
            method.codec.profile.check_layout(self.layout)
        database = self.cache_hook.dbdict
        if database is not None:
            self.cache_hook.dbdict = None
            database.close()
        self._method: Method = method
        self._statistics = Statistics()

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Attach a response cache of lm-eval (`use_cache`), if it belongs to this very configuration.

        lm-eval names responses after their requests alone, so the scores of one method would come back for another.

        Raises:
            InputError: the file holds responses of another configuration, or of a model without this check.
        """
        database = cache_hook.dbdict
        if database is not None:
            now = json.loads(json.dumps(self.configuration))
            known = database.get(_CONFIGURATION)
            if known is None and len(database) == 0:
                database[_CONFIGURATION] = json.dumps(now)
                database.commit()
            elif known is None or json.loads(known) != now:
                then = {} if known is None else json.loads(known)
                what = ", ".join(name for name in now if then.get(name) != now[name]) if then else "unknown origin"
                name = database.filename
                database.close()
                raise InputError(
                    f"use_cache: {name} holds the responses of another configuration ({what}): "
                    "name a file of its own for each configuration"
                )
        super().set_cache_hook(cache_hook)

    def get_model_info(self) -> dict[str, Any]:
        """HFLM's facts, and under `cuvee` the configuration and the statistics, JSON-ready."""
        if isinstance(self.pretrained, str) and not Path(self.pretrained).exists():
            info = cast(dict[str, Any], super().get_model_info())
        else:  # HFLM would ask the hub for the revision of a local folder
            info = {
                "model_num_parameters": self.model.num_parameters(),
                "model_dtype": self.model.dtype,
                "model_revision": self.revision,
                "model_sha": "",
            }
        figures = asdict(self._statistics)
        del figures["bits"]
        return {**info, "cuvee": {**self.configuration, "bits_per_value": self.bits_per_value, **figures}}

    # Requests --------------------------------------------------------------------------------------------------

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation after the decoded cache of its context, and whether it is the likeliest.

        Raises:
            InputError: a task without context, a request that is too long, or an empty continuation.
        """
        self._remember((request.args, request) for request in requests)
        return cast(list[tuple[float, bool]], super().loglikelihood(requests, disable_tqdm=disable_tqdm))

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """See `loglikelihood`. `override_bs` is HFLM's, for batches of a size found automatically."""
        reads = []
        for strings, context, continuation in requests:
            tasks = self._asking(strings)
            if not continuation:
                raise InputError(f"tasks: {_listed(tasks)} has an empty continuation, which has no likelihood")
            tokens = (*context, *continuation)
            if len(tokens) > self.max_length + 1:
                # At least one token must remain to predict the continuation from.
                self._too_long(tasks, len(tokens) - 1, self.max_length, cut=len(continuation) <= self.max_length)
                tokens = tokens[-(self.max_length + 1) :]
            reads.append(_Read(tokens[:-1], len(tokens) - len(continuation) - 1, tuple(continuation)))
        self._check_contexts((self._asking(asked[0]), read) for asked, read in zip(requests, reads, strict=True))

        def keep(index: int, answer: tuple[float, bool]) -> None:
            self.cache_hook.add_partial("loglikelihood", requests[index][0], answer)

        with tqdm(total=len(reads), disable=disable_tqdm, desc="Running loglikelihood requests") as bar:
            return self._score(reads, keep, bar)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in lm-eval's windows, the second half of each after a decoded cache.

        The value of a method that changes nothing is HFLM's; one that destroys the cache spoils half of the tokens.

        Raises:
            InputError: a task none of whose windows has two tokens.
        """
        reads, owners = [], []
        for index, request in enumerate(requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for tokens, targets in windows:
                reads.append(_Read(tuple(tokens), len(tokens) // 2, tuple(targets)))
                owners.append(index)
        self._check_contexts(({_name(requests[owner])}, read) for owner, read in zip(owners, reads, strict=True))
        totals = [0.0] * len(requests)
        waiting = Counter(owners)

        def keep(index: int, answer: tuple[float, bool]) -> None:
            owner = owners[index]
            totals[owner] += answer[0]
            waiting[owner] -= 1
            if not waiting[owner]:
                self.cache_hook.add_partial("loglikelihood_rolling", requests[owner].args, totals[owner])

        with tqdm(total=len(reads), disable=disable_tqdm, desc="Running loglikelihood_rolling requests") as bar:
            self._score(reads, keep, bar)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue each prompt after the decoded cache of all its tokens but the last.

        Raises:
            InputError: a task without context, a prompt that is too long, or no room left to generate.
        """
        reads = []
        for request in requests:
            prompt, arguments = request.args
            wanted = normalize_gen_kwargs(arguments, self.max_gen_toks)["max_gen_toks"]
            if wanted >= self.max_length:
                raise InputError(
                    f"tasks: {_name(request)} generates up to {wanted} tokens, the model reads "
                    f"{self.max_length}: lower max_gen_toks (gen_kwargs)"
                )
            tokens = tuple(self.tok_encode(prompt))
            reads.append(({_name(request)}, _Read(tokens, max(0, len(tokens) - 1), ())))
        self._check_contexts(reads)
        self._remember((request.args[0], request) for request in requests)
        return cast(list[str], super().generate_until(requests, disable_tqdm=disable_tqdm))

    def tok_batch_encode(
        self,
        strings: list[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and mask `[B, T]`, cut from the left where that is allowed.

        `truncation` is ignored: it would let the tokenizer cut the right end as well.
        """
        tokens, mask = super().tok_batch_encode(strings, padding_side)
        if left_truncate_len is not None and tokens.shape[1] > left_truncate_len:
            for string, length in zip(strings, mask.sum(1).tolist(), strict=True):
                if length > left_truncate_len:
                    self._too_long(self._asking(string), length, left_truncate_len)
            tokens, mask = tokens[:, -left_truncate_len:], mask[:, -left_truncate_len:]
        return tokens, mask

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> torch.Tensor:
        """Generate after `context [B, T]`, padded on the left as the keyword `attention_mask` says."""
        mask = generation_kwargs["attention_mask"]
        cached = [tuple(row[kept.bool()][:-1].tolist()) for row, kept in zip(context, mask, strict=True)]
        self._statistics.uncached_requests += sum(not tokens for tokens in cached)
        decoded, _ = self._through_method([*dict.fromkeys(tokens for tokens in cached if tokens)])
        cache = self._cache([decoded.get(tokens) for tokens in cached], context.shape[1] - 1)
        if cache is not None:
            beams = generation_kwargs.get("num_beams", self.model.generation_config.num_beams)
            cache.batch_repeat_interleave(beams or 1)  # generate() repeats its other inputs, and not the cache
            generation_kwargs["past_key_values"] = cache
        return cast(
            torch.Tensor,
            super()._model_generate(context=context, max_length=max_length, stop=stop, **generation_kwargs),
        )

    def _remember(self, requests: Iterable[tuple[Any, Instance]]) -> None:
        """Keep the names of tasks by what HFLM hands on of a request."""
        self._tasks = {}
        for key, request in requests:
            self._tasks.setdefault(key, set()).add(_name(request))

    def _asking(self, key: Any) -> set[str]:
        return self._tasks.get(key, {_UNNAMED})

    def _check_contexts(self, reads: Iterable[tuple[set[str], _Read]]) -> None:
        """Refuse tasks of which nothing is ever cached: no method is exercised, so their score says nothing."""
        some: dict[str, bool] = {}
        for tasks, read in reads:
            for task in tasks:
                some[task] = some.get(task, False) or read.split > 0
        database = self.cache_hook.dbdict
        for task, exercised in some.items():
            # With a response cache only the requests that it lacks arrive here: its file remembers the others.
            if exercised and database is not None:
                database[_TASK + task] = True
            elif not exercised and (database is None or _TASK + task not in database):
                raise InputError(
                    f"tasks: {task} has no context of two tokens or more: nothing is cached, so its score would say "
                    "nothing about a method; leave it out, or give it examples (num_fewshot)"
                )

    def _too_long(self, tasks: set[str], tokens: int, limit: int, cut: bool = True) -> None:
        """Count a request that is cut, or refuse it."""
        if not (self.truncation and cut):
            remedy = (
                "only with truncation=True is its left end cut off" if cut else "its continuation alone is too long"
            )
            raise InputError(
                f"tasks: {_listed(tasks)} has a request of {tokens} tokens, the model reads {limit}: {remedy}"
            )
        self._statistics.truncated_requests += 1

    # The model -------------------------------------------------------------------------------------------------

    def _score(
        self, reads: Sequence[_Read], keep: Callable[[int, tuple[float, bool]], None], bar: Any
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of the targets, and whether they are the likeliest, of each read.

        Args:
            reads: in any order.
            keep: called with index and answer as soon as one is known.
            bar: a progress bar.
        """
        contexts: dict[_Tokens, list[int]] = {}
        for index, read in enumerate(reads):
            contexts.setdefault(read.cached, []).append(index)
        answers: list[tuple[float, bool]] = [(0.0, True)] * len(reads)
        # The longest first, as HFLM does: memory runs out at once or never, and the time left is never underestimated.
        ordered = sorted(contexts, key=lambda c: (len(c), max(len(reads[i].tail) for i in contexts[c])), reverse=True)
        rows = self.batch_size
        for first in range(0, len(ordered), rows):
            batch = ordered[first : first + rows]
            members = [index for context in batch for index in contexts[context]]
            self._statistics.uncached_requests += sum(not reads[index].split for index in members)
            exact = {index: reads[index] for index in members if reads[index].exact_targets}
            decoded, predictions = self._through_method([c for c in batch if c], logits=bool(exact))
            for index, read in exact.items():
                targets = read.exact_targets
                answers[index] = _likelihood(predictions[read.cached][read.split - len(targets) : read.split], targets)
            # One row for all continuations that the model reads alike: those of one token.
            alike: dict[tuple[_Tokens, _Tokens], list[int]] = {}
            for index in sorted(members, key=lambda i: len(reads[i].tail), reverse=True):
                alike.setdefault((reads[index].cached, reads[index].tail), []).append(index)
            pairs = list(alike)
            for start in range(0, len(pairs), rows):
                part = pairs[start : start + rows]
                logits = self._read_tails([decoded.get(cached) for cached, _ in part], [tail for _, tail in part])
                for pair, row in zip(part, logits, strict=True):
                    end = len(pair[1])
                    for index in alike[pair]:
                        targets = reads[index].targets[len(reads[index].exact_targets) :]
                        value, likeliest = _likelihood(row[end - len(targets) : end], targets)
                        answers[index] = (answers[index][0] + value, answers[index][1] and likeliest)
                        keep(index, answers[index])
                        bar.update(1)
        return answers

    def _through_method(
        self, contexts: Sequence[_Tokens], logits: bool = False
    ) -> tuple[dict[_Tokens, _Cached], dict[_Tokens, torch.Tensor]]:
        """Prefill contexts, at most a batch of them, and send each one's cache through the method.

        Returns:
            the decoded caches, and with `logits` the log-probabilities `[T, V]` of the prefill; by context.
        """
        if not contexts:
            return {}, {}
        cache = empty_cache()
        tokens = _padded(contexts, self.model.device)
        # No mask: padding is on the right, where no real token sees it. The head is spared where it is not needed.
        predictions = self._forward(tokens, past_key_values=cache, logits_to_keep=0 if logits else 1)
        if any(layer.keys.shape[-2] != tokens.shape[1] for layer in cache.layers):
            raise UnsupportedModel(
                f"the cache does not hold one entry per token ({self.layout.model_type}): virtual tokens?"
            )
        decoded = {tokens: self._round_trip(cache, row, len(tokens)) for row, tokens in enumerate(contexts)}
        return decoded, dict(zip(contexts, predictions, strict=True)) if logits else {}

    def _round_trip(self, cache: Any, row: int, tokens: int) -> _Cached:
        """The first `tokens` tokens of a row of a cache, as they come back from the method."""
        device, dtype = self.model.device, self.layout.torch_dtype

        def tensors(name: str) -> list[torch.Tensor]:
            return [getattr(layer, name)[row, :, :tokens].transpose(0, 1).to(device, dtype) for layer in cache.layers]

        chunk = KVChunk(tensors("keys"), tensors("values"), self.layout)
        back = []
        for span in spans(tokens, self.chunk_tokens):
            piece = chunk.slice(*span)
            stored, bits = self._method.encode(piece)
            back.append(self._method.decode(stored))
            if (back[-1].start, back[-1].tokens) != (piece.start, piece.tokens):
                raise InputError(f"method: {type(self._method).__name__} gave back another chunk than it got")
            self._statistics.bits += bits
        self._statistics.contexts += 1
        self._statistics.cached_tokens += tokens
        whole = KVChunk.concat(back)
        return [
            (keys.transpose(0, 1).to(layer.keys), values.transpose(0, 1).to(layer.values))
            for keys, values, layer in zip(whole.keys, whole.values, cache.layers, strict=True)
        ]

    def _read_tails(self, caches: Sequence[_Cached | None], tails: Sequence[_Tokens]) -> torch.Tensor:
        """Log-probabilities `[B, T, V]` of the model reading each tail after its cache; None stands for no cache."""
        tokens = _padded(tails, self.model.device)
        lengths = torch.tensor([0 if cache is None else cache[0][0].shape[1] for cache in caches])
        width = int(lengths.max())
        cache = self._cache(caches, width)
        if cache is None:
            return self._forward(tokens)
        # Rows end their caches in the same column, so that their tails begin in the same one; positions count from
        # each row's first real token. Those of the padding after a short tail could pass the model's last one.
        last = lengths + torch.tensor([len(tail) for tail in tails]) - 1
        positions = (lengths[:, None] + torch.arange(tokens.shape[1])).minimum(last[:, None])
        mask = None
        if int(lengths.min()) < width:
            mask = (torch.arange(width + tokens.shape[1]) >= width - lengths[:, None]).long().to(tokens.device)
        return self._forward(
            tokens, past_key_values=cache, attention_mask=mask, position_ids=positions.to(tokens.device)
        )

    def _cache(self, rows: Sequence[_Cached | None], width: int) -> Any:
        """A transformers cache of these rows, each padded on the left to `width` tokens; None if all are empty."""
        some = next((row for row in rows if row is not None), None)
        if some is None:
            return None
        cache = empty_cache()
        for index, pair in enumerate(some):
            filled = []
            for side, like in enumerate(pair):
                batch = like.new_zeros(len(rows), like.shape[0], width, like.shape[2])
                for to, row in zip(batch, rows, strict=True):
                    if row is not None:
                        to[:, width - row[index][side].shape[1] :] = row[index][side]
                filled.append(batch)
            cache.update(*filled, index)
        return cache

    def _forward(self, tokens: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """Log-probabilities `[B, T, V]` as HFLM computes them."""
        precision = self.mixed_precision_dtype
        with torch.no_grad(), torch.autocast(self.device.type, precision, enabled=precision is not None):
            logits = self.model(input_ids=tokens, **arguments).logits
        return F.log_softmax(logits, dim=-1, dtype=self.softmax_dtype)


def run_cli(args: list[str]) -> int:
    """Run lm-eval's own command line with the model `cuvee` registered; returns the exit status.

    `run` (which may be left out, as in lm-eval) takes `cuvee` as its model where none is named. All commands look for
    tasks in cuvee's own folder, too, unless `--include_path` names another.

    Args:
        args: without the program's name, such as `["--model_args", "pretrained=…,quality=balanced", "--tasks", "…"]`.
    """
    from lm_eval.__main__ import cli_evaluate

    before = sys.argv
    sys.argv = ["lm-eval", *_complete(args)]
    try:
        cli_evaluate()
    except SystemExit as exit_:
        if isinstance(exit_.code, str):
            print(exit_.code, file=sys.stderr)
            return 1
        return exit_.code or 0
    finally:
        sys.argv = before
    return 0


def _complete(args: list[str]) -> list[str]:
    """Add what `run_cli` promises, in front, so that the user's own arguments override it."""
    if not args or args[0] in ("-h", "--help") or args == ["run"]:
        return args  # which print help
    if args[0] not in ("run", "ls", "validate"):
        args = ["run", *args]
    defaults = {"include_path": str(TASKS_PATH)} | ({"model": "cuvee"} if args[0] == "run" else {})
    decided = _yaml_settings(args)
    added = [word for name, value in defaults.items() if name not in decided for word in (f"--{name}", value)]
    return [args[0], *added, *args[1:]]


def _yaml_settings(args: list[str]) -> set[str]:
    """What the YAML file that the arguments name decides; a command line overrides it."""
    from lm_eval.config.evaluate_config import EvaluatorConfig

    for arg, following in zip(args, [*args[1:], ""], strict=True):
        name, _, value = arg.partition("=")
        if name in ("--config", "-C"):
            return set(EvaluatorConfig.load_yaml_config(value or following))
    return set()


def _check_choice(method: Any, profile: Any, asked: dict[str, Any]) -> None:
    """Exactly one way to say what happens to the cache."""
    if method is not None and (profile is not None or asked):
        others = ", ".join(f"{name}=" for name in (["profile"] if profile is not None else []) + [*asked])
        raise InputError(f"method: says everything about the cache; leave {others} out, or method=")
    if method is None and profile is None and not asked:
        raise InputError("method: nothing says what the cache goes through: give profile=, quality= or method=")
    if len(asked) > 1:
        raise InputError(f"quality: give at most one of quality=, kl=, bits=, ratio=, step=; got {', '.join(asked)}")
    for name, value in asked.items():
        if not isinstance(value, str if name == "quality" else int | float):
            raise InputError(f"{name}: must be {'a name' if name == 'quality' else 'a number'}, got {value!r}")


def _at_least_one(name: str, value: Any) -> int:
    """A count that may come from a command line."""
    number = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value
    if type(number) is not int or number < 1:
        raise InputError(f"{name}: must be a whole number of at least 1, got {value!r}")
    return number


def _name(request: Instance) -> str:
    return request.task_name or _UNNAMED


def _listed(tasks: set[str]) -> str:
    return ", ".join(sorted(tasks))


def _likelihood(log_probabilities: torch.Tensor, targets: _Tokens) -> tuple[float, bool]:
    """Sum of those of the targets, and whether each is the likeliest; `[T, V]` against T targets."""
    chosen = torch.tensor(targets, device=log_probabilities.device)
    likeliest = bool((log_probabilities.argmax(-1) == chosen).all())
    return float(log_probabilities.gather(-1, chosen[:, None]).sum()), likeliest


def _padded(rows: Sequence[_Tokens], device: torch.device) -> torch.Tensor:
    """Token ids `[B, T]`, padded on the right."""
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for to, row in zip(tokens, rows, strict=True):
        to[: len(row)] = torch.tensor(row)
    return tokens.to(device)
