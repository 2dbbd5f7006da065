"""Learn a profile from a model (`calibrate`) or from samples of its cache (`fit`)."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.errors import InputError, ProfileMismatchError
from cuvee.codec.layout import KVLayout
from cuvee.codec.models.fingerprint import PREFIX, model_fingerprint
from cuvee.codec.models.forward import check_tokens, coded_layout, prefill
from cuvee.codec.models.frozen import frozen
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.quality import CurvePoint
from cuvee.codec.profiles.sections import partition
from cuvee.codec.support.steps import step_value
from cuvee.codec.support.torch_modes import without_modes
from cuvee.learning.curve import CURVE_STEP_INDICES, MEASURE_BATCH, by_kind, default_step_indices, measure, round_trip
from cuvee.learning.gradients import sample_gradients
from cuvee.learning.learned_sections import build_profile
from cuvee.learning.moments import (
    SINKS,
    Moments,
    add_cache,
    held_out_count,
    need_tokens,
    new_moments,
    tokens_needed,
)
from cuvee.learning.rereading import reread, without_shared
from cuvee.learning.run import Run, key_of
from cuvee.learning.token_model import TOKENS_PER_FEATURE, TokenModel, TokenSums, learn_token_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)

_Text = tuple[Sequence[tuple[torch.Tensor, int]], Sequence[torch.Tensor]]  # with gradients, and more without

# Share of the components coded at a KL of 0.003, mean over tokens. SmolLM2-135M: 0.39 in layers:4, 0.32 in layers:10.
CODED_SHARE = 0.39
CPU_FLOPS, GPU_FLOPS = 1536.0, 4096.0  # per decoded value: the budgets of `group="auto"` by the model's device
# What the stages of a run cost beside forward passes, for estimates of its time: fitted to a model of 1.5 B parameters.
CODING_FLOPS = 6000.0  # of one value of a cache, coded and decoded
BASES_FLOPS = 2e8  # likewise, to learn its bases
HEAD_TIMES = 5.0  # what a head costs in float32 with the comparison of its predictions, over a head alone
_PLAIN, _REREAD = "text", "reread"  # kinds of text on the curve, if the caller names none
# Text that repeats its cache loses the most, so presets go by it, but its KL varies between sequences: the mean of
# two had a standard error of 40% on SmolLM2's curve, and a novel lost 1.8 times as much.
_REREAD_ROWS = 12  # at least
CARRIED_TOKENS = 8  # per value, required by `group="auto"`: bases learned from the minimum fit no other text


@torch.inference_mode(mode=False)
@without_modes
def calibrate(
    model: PreTrainedModel,
    token_ids: torch.Tensor | Mapping[str, torch.Tensor],
    group: str = "auto",
    *,
    more_text: torch.Tensor | None = None,
    predict_tokens: bool = True,
    prefix: int | None = None,
    batch_size: int = 4,
    seed: int = 0,
    flops: float | None = None,
    tensor_parallel: bool = False,
    step_indices: Sequence[int] | None = None,
    progress: bool | Run = True,
) -> Profile:
    """Learn a profile in the loss metric: the Fisher information of the cache. Needs a backward pass.

    Args:
        model: a transformers causal language model, in eval mode, on any device, or spread over several by
            `device_map=`.
        token_ids: `[N, T]` int64, N sequences as the model will see them; or a dict of several kinds of text by name,
            whose shapes may differ (see `cuvee.calibration.mixture`). An eighth of the sequences of each kind (2 to 32)
            is held out to measure the curve, kind by kind, and so are other sequences that share text with them. The
            curve has a kind "reread", whether or not there is one of that name: at least twelve held-out sequences
            whose ends repeat a part of what is cached. It, and kinds longer than the shortest, are measured at a
            quarter of the steps, and are not among the points of all kinds.
            Presets go by the worst kind, and promise their KL up to the longest T.
        group: the layers or heads that share one basis: `"head"`, `"unit"`, `"layer"`, `"layers:n"`, `"heads:n"`,
            `"all"`, or `"auto"`: as many layers as `flops` and the number of tokens allow (`choose_group`), or with
            little text a unit or a head.
        more_text: `[N, T]` int64, more sequences for what needs a forward pass only: prediction from tokens, and
            covariances (`cuvee.calibration.more_text`). Sequences that are held out are left out.
        predict_tokens: learn to predict the cache from its tokens, if there is enough text: 32 tokens per number of
            the model's embedding.
        prefix: number of leading tokens per sequence that count as cached; the metric measures the loss of the tokens
            after them. Default: three quarters of T.
        flops: with `"auto"` alone, the most floating-point operations per decoded value for the inverse transform;
            default 1536 for a model on a CPU, else 4096.
        tensor_parallel: with `"auto"` alone, choose a group `"heads:n"`, which `Profile.shard` cuts for any number of
            ranks.
        step_indices: the steps at which most kinds of text are measured, in 1/64 octave, apart from those that are too
            fine for the profile. Default: every half octave.
        batch_size: sequences per forward pass, at most.
        seed: seed of the sampled targets; the same arguments give the same profile on the same machine.
        progress: show a progress bar on standard error, with the time that all stages still take; or a
            `cuvee.learning.run.Run`, which may also keep what was read in a file, to go on after an interruption.

    Raises:
        InputError: `token_ids` has the wrong shape, dtype or range; `flops` or `tensor_parallel` with a group that is
            not `"auto"`.
        ProfileError: too few tokens for the group; the message gives the number it needs.
        UnsupportedModelError: see `KVLayout.from_config`.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        ...                      num_attention_heads=4, max_position_embeddings=128)
        >>> model = LlamaForCausalLM(config).eval()
        >>> profile = calibrate(model, torch.randint(64, (16, 64)), "layer", progress=False)
        >>> profile.source, len(profile.learned)
        ('calibrated', 2)
    """
    for option, is_set in (("flops", flops is not None), ("tensor_parallel", tensor_parallel)):
        if is_set and group != "auto":
            raise InputError(f"{option}: must come with group='auto', which it is for, got {group!r}: leave one out")
    fingerprint = model_fingerprint(model)
    layout = coded_layout(model)
    testing: dict[str, torch.Tensor] = {}
    learning, kinds = [], by_kind(model, token_ids, prefix)
    for name, (tokens, _) in kinds.items():
        held_out = held_out_count(len(tokens))
        if len(tokens) <= held_out:
            argument = "token_ids" if name is None else f"token_ids[{name!r}]"
            raise InputError(
                f"{argument}: must hold at least three sequences, got {len(tokens)}: two are held out to measure the "
                "curve"
            )
        testing[_PLAIN if name is None else name] = tokens[len(tokens) - held_out :]
    for tokens, cached in kinds.values():
        unshared = without_shared(tokens[: len(tokens) - held_out_count(len(tokens))], testing.values())
        learning += [(batch, cached) for batch in unshared.split(batch_size) if len(batch)]
    if not learning:
        raise InputError("token_ids: must hold different sequences, got none that shares no text with those held out")
    if more_text is not None:
        check_tokens(model, more_text, None)
        more_text = without_shared(more_text, testing.values())
    reading = () if more_text is None or not len(more_text) else more_text.split(batch_size)
    cached_tokens = sum(len(batch) * max(cached - SINKS, 0) for batch, cached in learning)
    if group == "auto":
        budget = flops or (CPU_FLOPS if model.device.type == "cpu" else GPU_FLOPS)
        group, why = choose_group(layout, cached_tokens, budget, tensor_parallel)
        for smaller in ("head",) if tensor_parallel else ("unit", "head"):
            if cached_tokens < (need := tokens_needed(layout, group)):
                group, why = smaller, f"{group} needs {need} cached tokens to learn from, the text has {cached_tokens}"
        _log.info("group=%r: %s", group, why)
    need_tokens(layout, group, cached_tokens, sum(len(batch) for batch, _ in learning))
    lengths = [rows.shape[1] for rows in testing.values()]
    # At few steps, since how much more these lose than other text changes slowly with the step.
    extra = {name: rows for name, rows in testing.items() if rows.shape[1] > min(lengths)}
    main = {name: rows for name, rows in testing.items() if name not in extra}
    if len(main) > 1 or _REREAD not in main:
        again = _rereading(main, prefix)
        main.pop(_REREAD, None)
        if len(again):
            extra[_REREAD] = again
    text = [*(batch for batch, _ in learning), *reading] if predict_tokens else []
    run = progress if isinstance(progress, Run) else Run(progress)
    texts = (learning, text, reading, list(testing.items()))
    run.begin("learning", key_of(model, fingerprint, group, prefix, seed, texts, step_indices))
    steps = len(step_indices or CURVE_STEP_INDICES)
    run.expect(*stage_costs(model, layout, learning, (text, reading), (main, extra), steps))
    if (kept := run.value("profile")) is not None:
        profile = _unpacked(kept)
    else:
        token_model = _learn_tokens(model, layout, group, text, run)
        profile = _learn(model, layout, group, fingerprint, (learning, reading), token_model, seed, run)
        del token_model
        run.put("profile", _packed(profile) if run.keeps else None)
    served = default_step_indices(profile)
    wanted = [step for step in step_indices or served if step >= served[0]]
    profile = measure(profile, model, main, prefix=prefix, step_indices=wanted, batch_size=MEASURE_BATCH, progress=run)
    if not extra:
        return profile
    few = _few_steps(served)
    points = measure(
        profile, model, extra, prefix=prefix, step_indices=few, batch_size=MEASURE_BATCH, progress=run
    ).points
    return profile.with_curve([*profile.points, *(point for point in points if point.kind)], lengths)


def _learn(
    model: PreTrainedModel,
    layout: KVLayout,
    group: str,
    fingerprint: str,
    text: _Text,
    tokens: TokenModel | None,
    seed: int,
    run: Run,
) -> Profile:
    """Learn a profile without a curve. Its sums, which take gigabytes, end here."""
    gathered = _Gathered(new_moments(layout, group, _device_of_moments(model, layout, group)), seed)
    gathered.read(model, layout, text, tokens, run)
    metrics = Moments.loss_metrics
    return build_profile(layout, group, "calibrated", gathered.moments, metrics, fingerprint, tokens, run)


def _few_steps(steps: Sequence[int]) -> set[int]:
    return {steps[0], *steps[::-4]}


class _Gathered:
    """The sums over a text, and the generator of its targets."""

    def __init__(self, moments: list[Moments], seed: int) -> None:
        self.moments, self._generator = moments, torch.Generator().manual_seed(seed)

    def state(self) -> list[Any]:
        """See `Run`."""
        return [self._generator.get_state(), *(section.state() for section in self.moments)]

    def restore(self, state: list[Any]) -> None:
        """See `Run`."""
        self._generator.set_state(state[0])
        for section, section_state in zip(self.moments, state[1:], strict=True):
            section.restore(section_state)

    def read(self, model: PreTrainedModel, layout: KVLayout, text: _Text, tokens: TokenModel | None, run: Run) -> None:
        """Add text to learn from, with gradients, and more text, without."""
        predicted = None if tokens is None else tokens.predicted
        device = self.moments[0].total.device
        with frozen(model):
            for batch, cached in run.stage("calibrating", text[0], self, "moments"):
                filled, gradients = sample_gradients(model, layout, batch.to(model.device), cached, self._generator)
                ids = batch[:, :cached]
                for chunk, gradient in zip(filled.chunks(ids, device), gradients.chunks(ids, device), strict=True):
                    add_cache(self.moments, chunk, predicted, gradient)
            for batch in run.stage("adding text", text[1], self, "moments"):
                with torch.no_grad():
                    chunks = prefill(model, batch.to(model.device), layout, device)
                for chunk in chunks:
                    add_cache(self.moments, chunk, predicted, sampled=False)


def stage_costs(
    model: PreTrainedModel,
    layout: KVLayout,
    learning: Sequence[tuple[torch.Tensor, int]],
    text: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
    tested: tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]],
    steps: int = len(CURVE_STEP_INDICES),
) -> list[tuple[str, float]]:
    """Return what each stage of a run takes, as the forward passes of so many tokens through the model's layers."""
    embedding = cast(torch.nn.Embedding, model.get_input_embeddings()).weight
    head: Any = getattr(model.get_output_embeddings(), "weight", None)
    outside = embedding.numel() + (0 if head is None or head is embedding else head.numel())
    layers = max(sum(parameter.numel() for parameter in model.parameters()) - outside, 1)
    share = embedding.numel() / layers  # of the head
    coding = CODING_FLOPS * layout.values_per_token / layers
    reading, adding = (float(sum(batch.numel() for batch in part)) for part in text)
    if reading < TOKENS_PER_FEATURE * embedding.shape[1]:
        reading = 0.0
    gradients = sum(len(rows) * (cached + (rows.shape[1] - cached) * (2 + 3 * share)) for rows, cached in learning)
    out = [("reading", reading), ("calibrating", gradients), ("adding text", adding)]
    out.append(("learning bases", BASES_FLOPS * layout.values_per_token / layers))
    for kinds, count in zip(tested, (steps, len(_few_steps(CURVE_STEP_INDICES))), strict=True):
        ways = 1.5 * count if reading else count
        rows = sum(tokens.numel() for tokens in kinds.values())
        out.append(("measuring", ways * rows * ((1 + HEAD_TIMES * share) / 4 + coding)))
    return [(stage, cost) for stage, cost in out if cost]


def expected_costs(
    model: PreTrainedModel, kinds: Mapping[str, torch.Tensor], more_text: torch.Tensor | None
) -> list[tuple[str, float]]:
    """Return about what the stages of `calibrate` take with these arguments, before all of its text is there."""
    layout = coded_layout(model)
    cut = {name: len(rows) - held_out_count(len(rows)) for name, rows in kinds.items()}
    learning = [(rows[: cut[name]], 3 * rows.shape[1] // 4) for name, rows in kinds.items()]
    adding = [] if more_text is None else [more_text]
    reading = [*(rows for rows, _ in learning), *adding]
    main = {name: rows[cut[name] :] for name, rows in kinds.items()}
    return stage_costs(model, layout, learning, (reading, adding), (main, {}))


def _packed(profile: Profile) -> torch.Tensor:
    """Return a profile's file, uint8 `[n]`."""
    with tempfile.TemporaryDirectory() as folder:
        profile.save(file := Path(folder, "profile"))
        return torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)


def _unpacked(data: torch.Tensor) -> Profile:
    with tempfile.TemporaryDirectory() as folder:
        (file := Path(folder, "profile")).write_bytes(data.numpy().tobytes())
        return Profile.load(file)


def _rereading(kinds: Mapping[str, torch.Tensor], prefix: int | None) -> torch.Tensor:
    """Return the rows `[N, T]` that repeat a part of their cached tokens at their ends: of the kind of that name, and
    as many of the others, changed and taken evenly, as are missing; none if the prefix leaves no room for it.

    Text that repeats what is cached loses up to 2.7 times the KL of other text (a Qwen2.5 of 1.5 B parameters).
    """
    existing = kinds.get(_REREAD)
    others = torch.cat([rows for name, rows in kinds.items() if name != _REREAD])
    length = others.shape[1]
    cached = 3 * length // 4 if prefix is None else prefix
    wanted = _REREAD_ROWS - (0 if existing is None else len(existing))
    made = others[:0]
    if 2 * cached >= length + 2 and wanted > 0:
        # A row is taken several times, with other parts, where there are few.
        chosen = others[torch.arange(wanted) * len(others) // wanted]
        made = reread(chosen.repeat_interleave(2, dim=0), cached)[::2]
    return made if existing is None else torch.cat([existing, made])


def _learn_tokens(
    model: PreTrainedModel, layout: KVLayout, group: str, text: Sequence[torch.Tensor], run: Run
) -> TokenModel | None:
    """Learn to predict from tokens; None if there is too little text, or none."""
    if not text:
        return None
    sums = TokenSums(model, layout)
    count, need = sum(batch.numel() for batch in text), TOKENS_PER_FEATURE * len(sums.gram)
    if count < need:
        _log.info("no prediction from tokens: it needs %d tokens of text, and there are %d", need, count)
        return None
    sums.add_text(model, text, run)
    return learn_token_model(sums, partition(layout, group))


def _device_of_moments(model: PreTrainedModel, layout: KVLayout, group: str) -> torch.device:
    """Return the device of the sums: the model's, if they take at most half of its free memory, else the CPU."""
    device = model.device
    if device.type != "cuda":
        return torch.device("cpu")
    sizes = [size for section in partition(layout, group) for size in section.blocks]
    # Two float64 matrices per block, and eight more while the largest block is processed.
    needed = 16 * sum(size * size for size in sizes) + 64 * max(sizes) ** 2
    free, _ = torch.cuda.mem_get_info(device)
    if 2 * needed <= free:
        return device
    _log.warning("second moments take %.1f GB, %s has %.1f GB free: they are kept on the CPU, which is slower",
              needed / 1e9, device, free / 1e9)  # fmt: skip
    return torch.device("cpu")


def choose_group(layout: KVLayout, tokens: int, flops: float, tensor_parallel: bool = False) -> tuple[str, str]:
    """Choose the largest group of layers, or of heads, that decodes within a budget and that this many tokens can
    support.

    A decoded value takes two operations per coded component of its group; at a KL of 0.003, about two fifths of the
    components are coded (CODED_SHARE). Returns the group, at least `"layer"` or `"heads:1"`, and why it is not larger.
    """
    least = best = "heads:1" if tensor_parallel else "layer"
    if len({layer.sliding_window for layer in layout.layers}) > 1:
        return least, "tokens that have left a window are coded without its layers"
    sizes: dict[int, str] = {}
    alike = len({layer.kv_heads for layer in layout.layers}) == 1
    for count in range(1, layout.num_layers + 1 if alike or not tensor_parallel else 2):
        if tensor_parallel:
            name = f"heads:{count}"
        else:
            name = "layer" if count == 1 else "all" if count == layout.num_layers else f"layers:{count}"
        sizes[max(size for section in partition(layout, name) for size in section.blocks)] = name
    for values, name in sorted(sizes.items()):
        cost = 2 * CODED_SHARE * values
        if cost > flops and name != least:
            why = f"{name} would take about {cost:.0f} operations per value to decode, the budget is {flops:.0f}"
            break
        if tokens < CARRIED_TOKENS * values and name != least:
            why = f"{name} needs {CARRIED_TOKENS * values} cached tokens to learn from, the text has {tokens}"
            break
        best = name
    else:
        why = "it spans all layers"
    return best, why


@without_modes
def fit(layout: KVLayout, chunks: Iterable[KVChunk], group: str = "layer", *, model: str | None = None) -> Profile:
    """Learn a profile from KV samples, without a model: principal components, with the variance of units equalized.

    Args:
        layout: the layout of all chunks.
        chunks: samples, read once and in order, so a generator will do. Like the chunks to be coded, they should begin
            at various positions of various sequences.
        group: as in `calibrate`.
        model: fingerprint of the weights that computed the samples, which the profile then names
            (`cuvee.codec.models.fingerprint.model_fingerprint`).

    Raises:
        InputError: `model` is no fingerprint.
        ProfileError: too few tokens for the group; the message gives the number it needs.
        ProfileMismatchError: a chunk has another layout.

    Example:
        >>> import torch
        >>> from cuvee import KVChunk, KVLayout, LayerLayout
        >>> layout = KVLayout("mine", (LayerLayout(2, 8, 8, None),) * 3, "float32", max_positions=None)
        >>> samples = (KVChunk(torch.randn(3, 64, 2, 8), torch.randn(3, 64, 2, 8), layout) for _ in range(8))
        >>> fit(layout, samples).source
        'fitted'
    """
    layout.need_layers()
    if model is not None and not str(model).startswith(PREFIX):
        raise InputError(f"model: must be a fingerprint as of model_fingerprint(model), got {model!s:.40}")
    moments = new_moments(layout, group)
    held_out: list[KVChunk] = []
    for number, chunk in enumerate(chunks):
        if replace(chunk.layout, dtype=layout.dtype).fingerprint != layout.fingerprint:
            raise ProfileMismatchError(f"chunks[{number}]: must have the given layout, got another one")
        if number % 8 == 7 and len(held_out) < 16:
            held_out.append(chunk)
            continue
        add_cache(moments, chunk)
    need_tokens(layout, group, moments[0].count)
    profile = build_profile(layout, group, "fitted", moments, Moments.variance_metrics, model)
    if not held_out:
        return profile
    points = []
    for step in default_step_indices(profile):
        coded = round_trip(Codec(profile, step=step_value(step)), held_out)
        points.append(CurvePoint(step, coded.bits_per_value, coded.error))
    return profile.with_curve(points)
