"""Bases and refinements on the device: every kernel against its reference and the codec's, both ways, and forged."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from tests import conftest
from tests.classed import with_classes
from tests.codec.forging import HEADER, reseal_header, sections_of, with_section
from tests.conftest import decoded_layers
from tests.kernels.naive import rans_by_class, refinements, symbols_by_class
from tests.kernels.test_classes import BACK, Pages, assert_close, on, predicting
from tests.kernels.test_hostile import (
    BY_CHANCE,
    ESCAPES,
    ROUNDING,
    STREAMS,
    Coded,
    Outcome,
    class_stream,
    learned,
    smooth_chunk,
)
from tests.kernels.test_hostile import LAYOUT as TINY
from tests.predicting import VOCABULARY, with_sinks
from tests.predicting import predicting as with_token_table

from cuvee.codec.backends import Coding, EncodeRequest, get_backend
from cuvee.codec.codec import Codec, OpenBlob
from cuvee.codec.entropy import coefficients
from cuvee.codec.entropy.coding_plan import MAX_LEVEL, Escapes
from cuvee.codec.entropy.nested import ESCAPED, NestedFamily
from cuvee.codec.entropy.token_classes import NEUTRAL
from cuvee.codec.errors import CorruptError, CuveeError, FormatError, InputError
from cuvee.codec.format.container import Scheme, header_digest, read_header
from cuvee.codec.layout import KVLayout
from cuvee.codec.profiles.nested_coding import NestedSection
from cuvee.codec.stages.reference.refinements import to_refinements
from cuvee.kernels import transform_scheme
from cuvee.kernels.jobs import I64, JobField, PlanField, Status
from cuvee.kernels.plans import TransformPlan

# NumPy warns where damaged numbers overflow.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid):RuntimeWarning")

STEP = 0.25
# Layout, group, refinements, and what classes depend on; without any of these all tokens are of one class.
CASES = [
    ("irregular", "unit", 2, "position"), ("mqa", "head", 1, "predictor"), ("bfloat16", "layer", 2, "nothing"),
    ("gqa", "layer", 1, "tokens"),
]  # fmt: skip


def codecs(profile: Any, refinements: int, step: float = STEP) -> tuple[Codec, Codec]:
    """The CPU's and the kernels'."""
    cpu, triton = (
        Codec(profile, step=step, refinements=refinements, backend=backend, threads=1)
        for backend in ("numba", "triton")
    )
    return cpu, triton


# --- all of it


@pytest.mark.parametrize(("name", "group", "count", "kind"), CASES)
def test_both_backends_read_what_the_other_wrote(
    device: torch.device, layouts: dict[str, KVLayout], make_chunk: Any, fitted: Any, name: str, group: str, count: int,
    kind: str, request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    if name != "irregular":
        request.getfixturevalue("plain_coder")
    profile = fitted(name, group)
    if kind == "position":
        profile = with_classes(profile)
    elif kind == "predictor":
        profile = predicting(profile, (0,))
    elif kind == "tokens":
        profile = with_sinks(with_token_table(profile))
    cpu, triton = codecs(profile, count)
    chunk = make_chunk(layouts[name], 20, start=2)
    ids = np.arange(20) % VOCABULARY if kind == "tokens" else None
    blobs = cpu.encode_parts(chunk, tokens=ids)
    mine = triton.encode_parts(on(device, chunk), tokens=ids)
    for own, expected in zip(mine, blobs, strict=True):
        assert abs(len(own) - len(expected)) <= 0.01 * len(expected) + 8
    rounding = BACK[layouts[name].dtype]
    errors = []
    for known in range(count + 1):
        want = cpu.decode(mine[0], 500, refinements=mine[1 : known + 1])
        assert_close(triton.decode(mine[0], 500, refinements=mine[1 : known + 1], device=device), want, rounding)
        kept = cpu.decode(mine[0], refinements=mine[1 : known + 1])
        errors.append(float((kept.values[0].float() - chunk.values[0].float()).square().mean()))
        opened = [codec.open(blobs[0], refinements=blobs[1 : known + 1]) for codec in (cpu, triton)]
        assert_close(
            triton.decode(opened[1], tokens=range(3, 9), device=device),
            cpu.decode(opened[0], tokens=range(3, 9)), rounding,
        )  # fmt: skip
    assert all(finer < 0.6 * coarser for coarser, finer in pairwise(errors))
    there, here = (
        decoded_layers(cpu, opened[0], range(1, 2)),
        decoded_layers(triton, opened[1], range(1, 2), device=device),
    )
    for a, b in zip([*here[0], *here[1]], [*there[0], *there[1]], strict=True):
        assert float((a.cpu().float() - b.float()).abs().max()) <= rounding * float(b.float().abs().max())


@pytest.mark.usefixtures("plain_coder")
def test_pages_hold_chunks_of_any_number_of_parts(
    device: torch.device, layouts: dict[str, KVLayout], make_chunk: Any, fitted: Any
) -> None:
    """In one call: bases alone, bases with one refinement and with two, and blobs of one quality at a base's step."""
    layout, profile = layouts["gqa"], with_classes(fitted("gqa", "head"))
    cpu, triton = codecs(profile, 2)
    single = Codec(profile, step=4 * STEP, threads=1)
    sizes = [5, 9, 14, 3, 7]
    chunks = [make_chunk(layout, tokens, seed) for seed, tokens in enumerate(sizes)]
    parts = [cpu.encode_parts(chunk) for chunk in chunks[:4]]
    parts.append((single.encode(chunks[4]),))
    mixed = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    slots = list(mixed[: sum(sizes)].split(sizes))
    got, want = Pages(layout, device), Pages(layout, torch.device("cpu"))
    for codec, pages in ((triton, got), (cpu, want)):
        opened: list[bytes | memoryview | OpenBlob] = [
            codec.open(own[0], refinements=own[1 : 1 + known])
            for own, known in zip(parts, (2, 0, 2, 1, 0), strict=True)
        ]
        codec.decode_paged(opened, pages.cache, [at.to(pages.cache.device) for at in slots], [9, 0, 100, 7, 0]).check()
    for x, y in zip(got.memory, want.memory, strict=True):
        assert float((x.cpu() - y).abs().max()) <= BACK["float32"] * float(y.abs().max())
        assert bool(((x.cpu() == 7) == (y == 7)).all())


# --- every kernel


def held_to(reference: Callable[..., None], launcher: Callable[..., None], calls: Counter[str]) -> Callable[..., None]:
    """A launcher that fails unless its reference, given the same, leaves the same bytes."""

    def call(*args: Any, **named: Any) -> None:
        given = inspect.signature(launcher).bind(*args, **named).arguments
        copies = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in given.items()}
        launcher(**given)
        reference(**copies)
        for name, value in given.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value.view(torch.uint8), copies[name].view(torch.uint8)), name
        calls[launcher.__name__] += 1

    return call


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Every launch of these kernels is held to its reference; how often that was."""
    calls: Counter[str] = Counter()
    for home, name in (
        (refinements, "quantize_refinements"), (refinements, "place_levels"), (refinements, "reconstruct"),
        (rans_by_class, "rans_refine"), (symbols_by_class, "list_escapes_classes"),
    ):  # fmt: skip
        reference = getattr(home, f"{name}_reference")
        monkeypatch.setattr(transform_scheme, name, held_to(reference, getattr(transform_scheme, name), calls))
    return calls


def planes_by_the_codec(y: torch.Tensor, row: I64, columns: Any, section: NestedSection, family: NestedFamily) -> Any:
    """Planes of the refinements of one job, from its coefficients."""
    last = section.parts[-1]
    stride, at = int(row[JobField.STRIDE]), int(row[JobField.LEVELS])
    rows = int(last.components[columns.min()].max(initial=-1)) + 1
    laid = y[at : at + rows * stride].view(rows, stride)[:, : len(columns)].cpu().numpy()
    dense = np.zeros((int(last.classed.rows[columns].max(initial=0)), len(columns)), np.float32)
    for k in np.unique(columns):
        own = last.components[k]
        dense[np.ix_(np.arange(len(own)), columns == k)] = laid[np.ix_(own, columns == k)]
    return to_refinements(dense, columns, section, family)


@pytest.mark.parametrize(("group", "count"), [("head", 2), ("layer", 1)])
def test_kernels_leave_the_bytes_of_the_references(
    device: torch.device, held: Counter[str], monkeypatch: pytest.MonkeyPatch, fitted: Any, group: str, count: int
) -> None:
    """A batch of chunks, of which one is longer than a window; and the codec's own stages, given the coefficients."""
    layout = conftest.LAYOUTS["gqa"]
    profile = predicting(fitted("gqa", group), (0, 2))
    cpu, triton = codecs(profile, count)
    chunks = [conftest.synthetic_chunk(layout, tokens, seed, 5) for seed, tokens in enumerate((37, 270, 1))]
    for chunk in chunks[:2]:
        chunk.values[0][chunk.tokens // 2, 0] += 3000.0  # values that escape, in every component
    coding = Coding(profile, Scheme.TRANSFORM, triton.step_index, layout.dtype, False, count)
    plan = TransformPlan(profile, triton.step_index, device, torch.float32, False, count)
    assert plan.nested is not None
    sections, family = plan.nested.sections, plan.nested.family
    checked: list[int] = []
    listed: dict[int, Escapes] = {}
    held_quantize, held_list = (
        vars(transform_scheme)[name] for name in ("quantize_refinements", "list_escapes_classes")
    )

    def list_escapes(*args: Any) -> None:
        held_list(*args)
        starts, index, value = args[5:8]
        for job, escapes in listed.items():
            own = slice(int(starts[job, 0]), int(starts[job, 0]) + len(escapes.index))
            assert np.array_equal(index[own].cpu().numpy(), escapes.index)
            assert np.array_equal(value[own].cpu().numpy(), escapes.value)

    def quantize(*args: Any) -> None:
        held_quantize(*args)
        listed.clear()
        y, jobs, plans, _, _, classes, planes, counts, _, parts, *_ = args
        table, of_part = jobs.cpu().numpy(), len(jobs) // parts
        for index, row in enumerate(table[:of_part]):
            columns = classes[row[JobField.COLUMNS] :][: row[JobField.TOKENS]].cpu().numpy()
            section = sections[index % len(sections)]
            for part, (wanted, escapes) in enumerate(planes_by_the_codec(y, row, columns, section, family), 1):
                finer = table[index + part * of_part]
                shape = (int(plans.plans[finer[JobField.PLAN], PlanField.PLANES]), len(columns))
                at = int(finer[JobField.PLANES])
                got = planes[at : at + shape[0] * shape[1]].view(shape).cpu().numpy()
                own = np.arange(shape[0])[:, None] < section.parts[part].classed.rows[columns]
                assert wanted.shape == shape and np.array_equal(got[own], wanted[own])
                by_row = np.bincount(escapes.index // len(columns), minlength=counts.shape[1])
                assert np.array_equal(counts[index + part * of_part].cpu().numpy(), by_row)
                checked.append(len(escapes.index))
                listed[index + part * of_part] = escapes

    monkeypatch.setattr(transform_scheme, "quantize_refinements", quantize)
    monkeypatch.setattr(transform_scheme, "list_escapes_classes", list_escapes)
    pages = conftest.dense_pages(layout, [on(device, chunk) for chunk in chunks])
    slots = list(torch.arange(308, device=device).split([37, 270, 1]))
    requests = [EncodeRequest(pages, at, chunk.tokens, 5) for at, chunk in zip(slots, chunks, strict=True)]
    together = get_backend("triton", device.type).encode(coding, requests)
    assert held["quantize_refinements"] == 1 and len(checked) == 3 * len(sections) * count and any(checked)
    opened = []
    for chunk, coded in zip(chunks, together, strict=True):
        parts = triton.encode_parts(on(device, chunk))
        assert [section for part in parts for section in sections_of(part)] == coded
        opened.append(triton.open(parts[0], refinements=parts[1:]))
        assert_close(cpu.decode(parts[0], refinements=parts[1:]), triton.decode(opened[-1], device=device), 2**-15)
    assert held["list_escapes_classes"] > 0
    before = Counter(held)
    triton.decode_paged(opened, pages, slots, [7, 400, 50]).check()
    made = {name: held[name] - before[name] for name in ("rans_refine", "place_levels", "reconstruct")}
    assert made == {"rans_refine": count, "place_levels": count, "reconstruct": 1}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("size", [0.999999, 1.0, -1.0, float("inf"), float("nan")])
def test_coefficients_too_large_for_a_refinement(
    size: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a component that the base does not code, so nothing else finds it. Planes then mean nothing."""
    triton = codecs(learned(), 2, 2.0)[1]
    plan = TransformPlan(learned(), triton.step_index, device, torch.float32, False, 2)
    assert plan.nested is not None
    base, _, finer = plan.nested.sections[0].parts
    new = np.setdiff1d(finer.components[NEUTRAL], base.components[NEUTRAL])
    launcher = vars(transform_scheme)["quantize_refinements"]
    found = []

    def quantize(y: torch.Tensor, jobs: torch.Tensor, *args: Any) -> None:
        row = jobs[0].tolist()
        at = row[JobField.LEVELS] + int(new[0]) * row[JobField.STRIDE]
        y[at] = size * MAX_LEVEL * float(base.classed.steps[NEUTRAL])
        copies: list[Any] = [each.clone() if isinstance(each, torch.Tensor) else each for each in args]
        refinements.quantize_refinements_reference(y, jobs, *copies)
        launcher(y, jobs, *args)
        found.extend([args[6].tolist(), copies[6].tolist()])

    monkeypatch.setattr(transform_scheme, "quantize_refinements", quantize)
    chunk = on(device, smooth_chunk(TINY, 7, 50))
    if size == 0.999999:
        triton.encode_parts(chunk)
        assert found == [[0, 0]] * 2
    else:
        with pytest.raises(InputError, match="too many quantizer steps"):
            triton.encode_parts(chunk)
        assert found == [[int(Status.TOO_LARGE), 0]] * 2


# --- forged parts

FORGED_STEP = 0.3  # of the last part: every part of a few tokens has escapes


@cache
def forgeable(per_stream: int = 4, seed: int = 50) -> tuple[bytes, ...]:
    """A base and two refinements, all with escapes; two streams per section."""
    chunk = smooth_chunk(TINY, 7, seed, outlier=300.0)
    for unit in (chunk.keys[0], chunk.values[0]):
        unit[1:6] += 40 * torch.randn(unit[1:6].shape, generator=torch.Generator().manual_seed(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coefficients, "tokens_per_stream", lambda *_: per_stream)
        chosen = with_classes(learned(), 2.0 ** torch.arange(7), chunk.start, keep_id=True)
        return codecs(chosen, 2, FORGED_STEP)[0].encode_parts(chunk)


def linked(parts: Sequence[bytes]) -> list[bytes]:
    """The parts, of which each names the one before it as it is now."""
    out = [parts[0]]
    for part in parts[1:]:
        named = part[:48] + header_digest(out[-1], read_header(out[-1])) + part[64:]
        out.append(reseal_header(named, (read_header(part).header_bytes - HEADER) // 12))
    return out


def forged(part: int, change: Callable[[Coded], None]) -> list[bytes]:
    """The parts with another first section in one of them."""
    parts = list(forgeable())
    coded = Coded.of("transform", parts[part])
    change(coded)
    parts[part] = with_section(parts[part], coded.section())
    return linked(parts)


def decoded(codec: Codec, parts: Sequence[bytes], device: torch.device | str = "cpu") -> list[torch.Tensor]:
    """The tensors of the first layer."""
    opened = codec.open(parts[0], refinements=parts[1:])
    keys, values = decoded_layers(codec, opened, range(1), device=device)
    return [keys[0].cpu(), values[0].cpu()]


def outcome(codec: Codec, parts: Sequence[bytes], device: torch.device) -> Outcome:
    """The tensors of the first layer, or None for an error of ours. Any other error fails the test."""
    try:
        return decoded(codec, parts, device)
    except CuveeError:
        return None


def assert_agree(parts: Sequence[bytes], device: torch.device) -> Outcome:
    """Both backends refuse the parts, or both decode them to the same tensors; returns what the CPU says."""
    want, got = (
        outcome(codec, parts, where)
        for codec, where in zip(codecs(learned(), 2, FORGED_STEP), (torch.device("cpu"), device), strict=True)
    )
    assert (got is None) == (want is None)
    for a, b in zip(got or [], want or [], strict=True):
        if bool(b.isfinite().all()):
            assert float((a.double() - b.double()).abs().max()) <= ROUNDING * float(b.double().abs().max())
    return want


@pytest.mark.parametrize("part", [1, 2])
def test_streams_of_a_refinement_that_lie_are_refused(part: int, device: torch.device, held: Counter[str]) -> None:
    assert Coded.of("transform", forgeable()[part]).section() == sections_of(forgeable()[part])[0]
    assert len(Coded.of("transform", forgeable()[part]).states) == 2
    assert assert_agree(forgeable(), device) is not None
    for name, forge in STREAMS.items():
        found = assert_agree(forged(part, forge), device)
        assert found is None or name in BY_CHANCE, name
    assert held["rans_refine"] > 20


def _classes(coded: Coded) -> None:
    coded.reserved = 1
    coded.class_state, coded.class_words = class_stream([11] * 7)
    coded.counted()


def _no_classes(coded: Coded) -> None:
    coded.reserved, coded.class_words = 0, []
    coded.counted()


SHAPES: dict[str, tuple[Callable[[], Sequence[bytes]], str, str]] = {
    "classes of its own": (partial(forged, 1, _classes), "refinement 1 of blob 0", "has token classes"),
    "a base without classes": (partial(forged, 0, _no_classes), "section 0 of blob 0", "must have token classes"),
    "other tokens per stream": (
        lambda: linked([forgeable()[0], *forgeable(2)[1:]]), "refinement 1 of blob 0", "must have 4 tokens per stream",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_parts_of_another_shape_are_refused(name: str, device: torch.device) -> None:
    make, where, what = SHAPES[name]
    cpu, triton = codecs(learned(), 2, FORGED_STEP)
    parts = make()
    with pytest.raises(FormatError):
        decoded(cpu, parts)
    with pytest.raises(FormatError, match=f"{where}.*{what}"):
        decoded(triton, parts, device)


def test_a_refinement_of_another_base_is_refused(device: torch.device) -> None:
    """Its symbols have other contexts, so the streams do not end where they must."""
    triton = codecs(learned(), 2, FORGED_STEP)[1]
    mixed = [forgeable(seed=51)[0], *forgeable()[1:]]
    with pytest.raises(CorruptError, match="part before it"):
        decoded(triton, mixed, device)
    with pytest.raises(CorruptError, match="streams do not end"):
        decoded(triton, linked(mixed), device)


@pytest.mark.parametrize("part", [0, 1, 2])
def test_escapes_that_lie_are_refused(part: int, device: torch.device, held: Counter[str]) -> None:
    assert Coded.of("transform", forgeable()[part]).escape_count > 1
    for name, forge in ESCAPES.items():
        assert assert_agree(forged(part, forge), device) is None, name
    assert held["place_levels"] > 0


def test_an_escape_of_a_component_that_the_base_codes_is_refused(
    device: torch.device, held: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its level may be that of an escape without being one."""
    held_place = vars(transform_scheme)["place_levels"]

    def place(data: torch.Tensor, jobs: torch.Tensor, *args: Any) -> None:
        row, levels = jobs[0].tolist(), args[3]
        words = data.view(torch.uint32)
        column = int(words[row[JobField.ESCAPES]]) % row[JobField.TOKENS]
        words[row[JobField.ESCAPES]] = column  # of the first component, in place of the first escape
        levels[row[JobField.LEVELS] + column] = ESCAPED
        held_place(data, jobs, *args)

    monkeypatch.setattr(transform_scheme, "place_levels", place)
    with pytest.raises(CorruptError, match="escapes do not match"):
        decoded(codecs(learned(), 2, FORGED_STEP)[1], forgeable()[:2], device)
    assert held["place_levels"] == 1


@pytest.mark.parametrize("part", [0, 1, 2])
def test_levels_beyond_the_largest_are_refused(part: int, device: torch.device, held: Counter[str]) -> None:
    """Levels double with each refinement, and must not overflow. Others are decoded alike."""
    found = []
    for value in (-(2**31), -(2**31) + 1, 2**31 - 1, -(2**30), (1 << 24) + 1, 1 << 24, -(1 << 14), 4, -128):

        def change(coded: Coded, value: int = value) -> None:
            coded.value = [value] * len(coded.value)

        found.append(assert_agree(forged(part, change), device) is not None)
    assert any(found) and not any(found[:4])
    assert held["place_levels"] == 18
