"""Token classes on the device: tables, class streams, sorted columns, predictors; and the whole backend both ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.classed import with_classes
from tests.conftest import decoded_layers
from tests.kernels.naive.transform import analyze_reference
from tests.kernels.world import FAMILY, LAYOUT, STEP, make_world, mix, plan_of, profile_of
from tests.predicting import VOCABULARY, with_sinks
from tests.predicting import predicting as with_token_table

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.entropy.token_classes import CLASSES, class_frequencies, class_table
from cuvee.codec.errors import CorruptError, FormatError, ProfileError
from cuvee.codec.format.container import read_header, read_section
from cuvee.codec.format.streams import WINDOW
from cuvee.codec.layout import KVLayout, LayerLayout
from cuvee.codec.paged import PagedCache
from cuvee.codec.paged_chunks import PagedChunks
from cuvee.codec.profiles.class_predictor import Predictor, finer_near_end
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.stages.reference import rans
from cuvee.codec.stages.reference.sections import read_part
from cuvee.codec.stages.reference.token_order import coding_order
from cuvee.codec.support.arrays import U8
from cuvee.kernels.centers import SentArrays, TokenRun
from cuvee.kernels.class_predictor import DevicePredictor
from cuvee.kernels.class_streams import read_classes, sort_columns, write_classes
from cuvee.kernels.jobs import JobField, PlanField
from cuvee.kernels.ops.analyze import analyze
from cuvee.kernels.ops.arguments import ChunkBatch, TokenOrder
from cuvee.kernels.plans import TransformPlan
from cuvee.kernels.workspace import running_offsets

CPU = torch.device("cpu")


def test_the_tables_of_classes(device: torch.device) -> None:
    for group in ("head", "unit", "layer"):
        plan = plan_of(group, device)
        arrays = plan.arrays
        assert plan.finest[0, 0] > 0 and (plan.planes[0, 0, : plan.finest[0, 0]] == 0).all()
        for section, own in enumerate(plan.coding[0]):
            for k in range(CLASSES):
                row = arrays.plans[plan.rows(section, k)]
                expected = own.classed.plans[k]
                count = 0 if expected is None else len(expected.shift)
                assert row[PlanField.ROWS] == count == own.classed.rows[k]
                assert row[PlanField.PLANES] == own.classed.planes[k]
                if expected is not None:
                    table = arrays.tables[row[PlanField.TABLES] :][: row[PlanField.PLANES]]
                    assert np.array_equal(table, own.classed.tables[k, : row[PlanField.PLANES]])
                assert arrays.steps[plan.rows(section, k)] == own.classed.steps[k]
                extent = row[PlanField.EXTENT]
                places = arrays.row_maps[row[PlanField.ROW_MAP] :][: sum(own.class_ranks[own.classed.finest])]
                assert (places[extent:] == -1).all() and sorted(places[places >= 0]) == list(range(count))
                assert extent == 0 or places[extent - 1] == count - 1
                ints = arrays.row_ints[row[PlanField.ROW] :][:count]
                assert np.array_equal(places[ints[:, 2]], np.arange(count))
    assert len(plan_of("head", device).coding[0][0].class_ranks[0]) > 1
    assert (plan_of("head", device).arrays.row_maps < 0).any()


def test_components_must_fall_with_the_class() -> None:
    scale = (-100 + 40 * np.arange(CLASSES)).astype(np.int16)
    rising = [replace(section, class_scale=scale) for section in profile_of("layer", top=6).learned]
    profile = Profile(LAYOUT, "layer", "fitted", FAMILY, tuple(rising), min_step_index=-640)
    with pytest.raises(ProfileError, match="coarser"):
        TransformPlan(profile, STEP, CPU, torch.float32)


# --- classes on the host


@pytest.mark.parametrize("kind", ["one", "each", "mixed"])
def test_class_streams_are_those_of_the_codec(kind: str, device: torch.device) -> None:
    plan = plan_of("unit", device)
    sizes = np.array([1, 63, 256, 257, 700])
    sections = np.arange(len(sizes)) % 2
    finest = plan.finest[0, sections]
    classes = [mix(size, kind, int(least), size) for size, least in zip(sizes.tolist(), finest, strict=True)]
    first, _ = running_offsets(sizes)
    words, fields = write_classes(np.concatenate(classes), first, sizes, plan.freq, sections)
    for job, (section, own) in enumerate(zip(sections, classes, strict=True)):
        want = rans.encode_classes(own, class_table(profile_of("unit").learned[section].class_freq))
        at = fields["class_words"][job]
        assert np.array_equal(words[at : at + fields["class_word_count"][job]], want.words)
        assert fields["class_state"][job] == want.states[0]
    names = [f"job {i}" for i in range(len(sizes))]
    back = read_classes(words.view(np.uint8), fields, first, sizes, plan.slots, sections, finest, names)
    assert np.array_equal(back, np.concatenate(classes))
    columns, order, counts = sort_columns(back, first, sizes)
    for begin, own, count in zip(first, classes, counts, strict=True):
        at = slice(begin, begin + len(own))
        want_order = coding_order(own)
        assert np.array_equal(order[at] + np.arange(len(own)) // WINDOW * WINDOW, want_order)
        assert np.array_equal(columns[at], own[want_order])
        assert np.array_equal(count, np.bincount(own, minlength=CLASSES))


@pytest.mark.parametrize(
    "change",
    [
        lambda fields, words: fields["class_state"].__setitem__(1, fields["class_state"][1] ^ 1),
        lambda fields, words: fields["class_word_count"].__setitem__(1, 0),
        lambda fields, words: fields["class_word_count"].__setitem__(1, fields["class_word_count"][1] + 1),
        lambda fields, words: words.__setitem__(slice(None), 0xFFFF),
    ],
)
def test_class_streams_that_lie(change: Callable[..., None], device: torch.device) -> None:
    plan, sections = plan_of("unit", device), np.zeros(3, np.int64)
    first, tokens, finest = np.array([0, 80, 160]), np.full(3, 80), plan.finest[0, sections]
    classes = np.concatenate([mix(80, "mixed", int(finest[0]), seed) for seed in range(3)])
    words, fields = write_classes(classes, first, tokens, plan.freq, sections)
    words = np.append(words, np.zeros(4, np.uint16))
    change(fields, words)
    names = ["job 0", "job 1", "job 2"]
    with pytest.raises(CorruptError, match="class stream of job"):
        read_classes(words.view(np.uint8), fields, first, tokens, plan.slots, sections, finest, names)


def test_a_class_that_is_not_served(device: torch.device) -> None:
    plan, one = plan_of("unit", device), np.zeros(1, np.int64)
    tokens, finest = np.full(1, 9), plan.finest[0, one]
    words, fields = write_classes(np.full(9, finest[0] - 1, np.uint8), one, tokens, plan.freq, one)
    with pytest.raises(FormatError, match=rf"job 0: must have token classes {finest[0]} … 15"):
        read_classes(words.view(np.uint8), fields, one, tokens, plan.slots, one, finest, ["job 0"])


# --- the linear maps


@pytest.mark.parametrize("group", ["head", "layers:2"])
def test_analyze_in_the_order_of_columns(device: torch.device, group: str) -> None:
    plan = plan_of(group, device)
    sections = len(plan.learned)
    world = make_world(device, [(s, 70, "each" if s else "mixed") for s in range(sections)], group)
    x = torch.randn(70, plan.geometry.tiles.columns, generator=torch.Generator().manual_seed(0)).to(device)
    chunks = torch.tensor([[70, 0, 0, 0]], device=device)
    order_of = TokenOrder(world.tensor(world.columns), world.tensor(world.order), plan.block_ranks)
    status = torch.zeros(sections, dtype=torch.int32, device=device)
    batch = ChunkBatch(chunks, status, sections, 0, 70)
    maps = plan.maps
    out = []
    for run in (analyze, analyze_reference):
        y = torch.full((world.sizes[1],), float("nan"), device=device)
        run(
            x, world.tensor(world.jobs), maps.device_blocks, maps.forward, batch, y,
            max_rank=int(maps.blocks[:, 2].max()), order=order_of,
        )  # fmt: skip
        out.append(y)
    assert torch.equal(out[0].isnan(), out[1].isnan())
    torch.testing.assert_close(out[0].nan_to_num(), out[1].nan_to_num(), rtol=1e-5, atol=1e-5)
    own = world.own(0)
    at = int(world.jobs[0, JobField.COEFFICIENTS])
    stride = int(world.jobs[0, JobField.STRIDE])
    order = torch.from_numpy(world.order[:70].astype(np.int64)).to(device)
    coefficients = _section_coefficients(plan, x, 0)
    for k in np.unique(own):
        columns_of = torch.from_numpy(np.flatnonzero(own == k)).to(device)
        wanted = plan.coding[0][0].class_ranks[int(k)]
        first = 0
        for row, (rank, block) in enumerate(zip(wanted, coefficients, strict=True)):
            deepest = plan.coding[0][0].class_ranks[plan.coding[0][0].classed.finest][row]
            got = out[0][at + first * stride :][: rank * stride].view(rank, stride)[:, columns_of]
            torch.testing.assert_close(got, block[:rank, order[columns_of]], rtol=1e-4, atol=1e-4)
            first += deepest


def _section_coefficients(plan: TransformPlan, x: torch.Tensor, section: int) -> list[torch.Tensor]:
    """All coefficients of each block, by the profile's own bases."""
    tiles = plan.geometry.tiles
    first, end = tiles.bounds[section], tiles.bounds[section + 1]
    order = torch.from_numpy(tiles.order[first:end]).long().to(x.device)
    basis = plan.profile.learned[section].basis
    values = torch.zeros(len(x), len(basis.mean), device=x.device)
    values[:, order[order >= 0]] = x[:, first:end][:, order >= 0]
    parts, column = [], 0
    for matrix in basis.forward:
        size = matrix.shape[1]
        parts.append(matrix.to(x.device) @ values[:, column : column + size].T)
        column += size
    return parts


# --- all of it


BACK = {"bfloat16": 2**-6, "float16": 2**-9, "float32": 2**-15}


def on(device: torch.device, chunk: KVChunk) -> KVChunk:
    return KVChunk([k.to(device) for k in chunk.keys], [v.to(device) for v in chunk.values], chunk.layout, chunk.start)


def assert_close(got: KVChunk, want: KVChunk, rounding: float) -> None:
    for a, b in zip([*got.keys, *got.values], [*want.keys, *want.values], strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert float((a.cpu().float() - b.float()).abs().max()) <= rounding * float(b.float().abs().max())


def classes_of(blob: bytes, profile: Profile, codec: Codec) -> list[U8]:
    """Of each section the classes of the tokens."""
    header = read_header(blob)
    out = []
    for index, learned in enumerate(profile.learned):
        part = read_part(read_section(blob, header, index), learned.classed_plan(codec.step_index), header.tokens)
        out.append(rans.decode_classes(part.classes, class_table(learned.class_freq), header.tokens))
    return out


CASES = [
    ("bfloat16", "layer"), ("irregular", "unit"), ("mqa", "head"), ("interleaved", "all"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "group"), CASES)
def test_both_backends_read_what_the_other_wrote(
    device: torch.device, layouts: dict[str, KVLayout], make_chunk: Any, fitted: Any, name: str, group: str,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    if name != "irregular":
        request.getfixturevalue("plain_coder")
    profile = with_classes(fitted(name, group))
    cpu, triton = Codec(profile, step=1.0), Codec(profile, step=1.0, backend="triton")
    chunk = make_chunk(layouts[name], 8, start=2)
    blob, mine = cpu.encode(chunk), triton.encode(on(device, chunk))
    assert all(len(np.unique(own)) > 3 for own in classes_of(blob, profile, cpu))
    for own, expected in zip(classes_of(mine, profile, cpu), classes_of(blob, profile, cpu), strict=True):
        assert np.array_equal(own, expected)
    assert abs(len(mine) - len(blob)) <= 0.01 * len(blob)
    rounding = BACK[layouts[name].dtype]
    assert_close(triton.decode(mine, 500, device=device), cpu.decode(mine, 500), rounding)
    if name != "irregular":
        assert_close(
            triton.decode(blob, tokens=range(3, 7), device=device), cpu.decode(blob, tokens=range(3, 7)), rounding
        )
        return
    want, got = decoded_layers(cpu, blob, range(1, 2)), decoded_layers(triton, blob, range(1, 2), device=device)
    for a, b in zip([*got[0], *got[1]], [*want[0], *want[1]], strict=True):
        assert float((a.cpu().float() - b.float()).abs().max()) <= rounding * float(b.float().abs().max())


@pytest.mark.usefixtures("plain_coder")
def test_more_than_a_window(device: torch.device) -> None:
    profile = with_classes(profile_of("unit"))
    cpu, triton = Codec(profile, step=1.0), Codec(profile, step=1.0, backend="triton")
    noise = torch.Generator().manual_seed(0)
    units = [[40 * torch.randn(300, n.kv_heads, d, generator=noise) for n, d in sizes] for sizes in sizes_of(LAYOUT)]
    chunk = KVChunk(units[0], units[1], LAYOUT, 0)
    blob, mine = cpu.encode(chunk), triton.encode(on(device, chunk))
    assert abs(len(mine) - len(blob)) <= 0.01 * len(blob)
    assert_close(triton.decode(mine, device=device), cpu.decode(mine), BACK["float32"])


def sizes_of(layout: KVLayout) -> list[list[tuple[LayerLayout, int]]]:
    return [[(layer, getattr(layer, name)) for layer in layout.layers] for name in ("head_dim", "value_dim")]


def predicting(profile: Profile, sections: Sequence[int] | None = None) -> Profile:
    """The profile with predictors in some of its sections."""
    rng = np.random.default_rng(0)
    learned = []
    for index, section in enumerate(profile.learned):
        if sections is not None and index not in sections:
            learned.append(section)
            continue
        count = min(7 + index, len(section.scale))
        chosen = np.sort(rng.permutation(len(section.scale))[:count]).astype(np.int32)
        scale = np.exp2(section.scale[chosen] / 64).astype(np.float32)
        weights = rng.normal(0, 0.4, (2, count)).astype(np.float32)
        predictor = Predictor(
            chosen, scale, weights[0], weights[1], 0.05, 0.3, np.array([-1.5, -0.5, 0.1][: 2 + index % 2], np.float32),
            np.zeros(count + 1, np.float32), np.array([2.0, 1.5, 0.5, 0.0][index % 2 :], np.float32),
        )  # fmt: skip
        freq = class_frequencies(np.exp2(-np.abs(np.arange(CLASSES) - 7.0)))
        learned.append(replace(section, predictor=predictor, class_freq=freq))
    return Profile(
        profile.layout,
        profile.group,
        profile.source,
        profile.family,
        tuple(learned),
        min_step_index=profile.min_step_index,
        token_table=profile.token_table,
    )


@pytest.mark.usefixtures("plain_coder")
@pytest.mark.parametrize("group", ["head", "layer"])
def test_the_predictor_of_the_profile(
    device: torch.device, layouts: dict[str, KVLayout], make_chunk: Any, fitted: Any, group: str
) -> None:
    """Sections that predict, and one that does not, in one batch."""
    layout = layouts["gqa"]
    profile = predicting(fitted("gqa", group), (0, 2))
    cpu, triton = Codec(profile, step=1.0), Codec(profile, step=1.0, backend="triton")
    chunks = [make_chunk(layout, tokens, seed, start) for seed, (tokens, start) in enumerate(((5, 1), (8, 0), (4, 7)))]
    device_chunks = [on(device, chunk) for chunk in chunks]
    pages = Pages(layout, device)
    mixed = torch.randperm(64, generator=torch.Generator().manual_seed(0)).to(device)
    slots = [mixed[:5], mixed[20:28], mixed[40:44]]
    for chunk, at in zip(device_chunks, slots, strict=True):
        pages.cache.write(chunk.keys, chunk.values, at)
    blobs = triton.encode(PagedChunks(pages.cache, slots, [1, 0, 7]))
    wanted = [cpu.encode(chunk) for chunk in chunks]
    for mine, theirs in zip(blobs, wanted, strict=True):
        own, expected = classes_of(mine, profile, cpu), classes_of(theirs, profile, cpu)
        assert [len(np.unique(c)) > 1 for c in own] == [True, False, True]
        for a, b in zip(own, expected, strict=True):
            assert np.abs(a.astype(int) - b.astype(int)).sum() <= 1  # an offset between two classes
        assert abs(len(mine) - len(theirs)) <= 0.01 * len(theirs) + 8
        assert_close(cpu.decode(mine), cpu.decode(theirs), 0.1)
    target, expected_pages = Pages(layout, device), Pages(layout, CPU)
    starts = [100, 0, 2000]
    triton.decode_paged(wanted, target.cache, slots, starts).check()
    cpu.decode_paged(wanted, expected_pages.cache, [at.cpu() for at in slots], starts).check()
    for x, y in zip(target.memory, expected_pages.memory, strict=True):
        assert float((x.cpu() - y).abs().max()) <= BACK["float32"] * float(y.abs().max())
        assert bool(((x.cpu() == 7) == (y == 7)).all())


class Pages:
    """A cache of sevens, blocks of 16 tokens."""

    def __init__(self, layout: KVLayout, device: torch.device, dtype: torch.dtype | None = None) -> None:
        layer = layout.layers[0]
        shape = (4, 16, layer.kv_heads, 2 * layer.head_dim)
        self.memory = [torch.full(shape, 7.0).to(dtype or layout.torch_dtype).to(device) for _ in layout.layers]
        scales = [0.5] * layout.num_layers if dtype else None
        halves = [memory.chunk(2, 3) for memory in self.memory]
        self.cache = PagedCache(layout, [k for k, _ in halves], [v for _, v in halves], scales, scales)


def test_offsets_are_those_of_the_predictor(device: torch.device, fitted: Any, layouts: dict[str, KVLayout]) -> None:
    profile = predicting(fitted("gqa", "head"), (0, 2))
    plan = TransformPlan(profile, STEP, device, torch.float32)
    predictor = DevicePredictor(plan.coding[0], plan.geometry.tiles, device)
    x = 3 * torch.randn(12, plan.geometry.tiles.columns, generator=torch.Generator().manual_seed(1)).to(device)
    chunks = np.array([[7, 0, 0, 0], [5, 7, 1, 1]], np.int64)
    jobs, positions, levels = (torch.from_numpy(array.copy()).to(device) for array in predictor.place(chunks, [0, 30]))
    status = torch.zeros(len(jobs), dtype=torch.int32, device=device)
    batch = ChunkBatch(torch.from_numpy(chunks).to(device), status, len(profile.learned), 0, 7)
    found = predictor.offsets(x, jobs, batch, positions, levels)
    for row, section in enumerate(predictor.sections):
        own = profile.learned[section].predictor
        assert own is not None
        y = torch.cat(_section_coefficients(plan, x, int(section)))[torch.from_numpy(own.components).long()].cpu()
        first, second = finer_near_end(own.recency, 0, 7, 0), finer_near_end(own.recency, 1, 5, 30)
        assert float(first[-1]) > float(second[-1]) > 0
        want = torch.cat([own.offsets(y[:, :7], 0, 0, first), own.offsets(y[:, 7:], 1, 0, second)])
        torch.testing.assert_close(found[row].cpu(), want, rtol=1e-4, atol=1e-4)


def test_offsets_are_those_of_values_with_their_predictions(
    device: torch.device, fitted: Any, layouts: dict[str, KVLayout]
) -> None:
    profile = predicting(with_sinks(with_token_table(fitted("gqa", "head"))), (0, 2))
    plan = TransformPlan(profile, STEP, device, torch.float32, True)
    predictor = DevicePredictor(plan.coding[0], plan.geometry.tiles, device)
    x = 3 * torch.randn(12, plan.geometry.tiles.columns, generator=torch.Generator().manual_seed(1)).to(device)
    ids, sections = np.random.default_rng(0).integers(0, VOCABULARY, 12), range(len(profile.learned))
    assert plan.token_centers is not None
    arrays = plan.token_centers.lay_out([TokenRun(ids[:7], 0), TokenRun(ids[7:], 1)])
    sent = SentArrays(*(torch.from_numpy(array).to(device) for array in arrays))
    centers = plan.token_centers.centers(sent, sections)
    chunks = np.array([[7, 0, 0, 0], [5, 7, 1, 1]], np.int64)
    jobs, positions, levels = (torch.from_numpy(array.copy()).to(device) for array in predictor.place(chunks, [0, 0]))
    status = torch.zeros(len(jobs), dtype=torch.int32, device=device)
    batch = ChunkBatch(torch.from_numpy(chunks).to(device), status, len(sections), 0, 7)
    # Not rounded to bfloat16, as on the CPU.
    predicted = torch.zeros(len(arrays.position), plan.geometry.tiles.columns)
    for index, section in enumerate(plan.learned):
        own = slice(int(plan.geometry.tiles.bounds[index]), int(plan.geometry.tiles.bounds[index + 1]))
        token_map = section.token_map
        assert token_map is not None
        embedding = torch.from_numpy(arrays.embedding * arrays.row_scale[:, None])
        exact = embedding @ (token_map.weights * token_map.scale)
        exact[torch.from_numpy(arrays.position) < len(section.basis.sinks)] = 0
        predicted[:, own] = plan.geometry.tiles.pack(exact, index)
    whole = x + predicted.to(device)[centers.rows.long()]
    found = predictor.offsets(x, jobs, batch, positions, levels, centers)
    plain = predictor.offsets(x, jobs, batch, positions, levels)
    torch.testing.assert_close(found, predictor.offsets(whole, jobs, batch, positions, levels), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found, plain, atol=1e-2)


@pytest.mark.usefixtures("plain_coder")
@pytest.mark.parametrize("predictor", [False, True])
def test_classes_of_tokens_that_are_predicted(
    device: torch.device, layouts: dict[str, KVLayout], make_chunk: Any, fitted: Any, predictor: bool
) -> None:
    profile = with_sinks(with_token_table(fitted("gqa", "layer")))
    profile = predicting(profile) if predictor else with_classes(profile)
    cpu, triton = Codec(profile, step=1.0), Codec(profile, step=1.0, backend="triton")
    chunk, ids = make_chunk(layouts["gqa"], 70, start=1), np.random.default_rng(0).integers(0, VOCABULARY, 70)
    blob = cpu.encode(chunk, tokens=ids)
    mine = triton.encode(on(device, chunk), tokens=ids)
    for own, expected in zip(classes_of(mine, profile, cpu), classes_of(blob, profile, cpu), strict=True):
        assert len(own) == 70 and len(np.unique(own)) > 3
        assert np.abs(own.astype(int) - expected.astype(int)).sum() <= 1  # an offset between two classes
    assert abs(len(mine) - len(blob)) <= 0.01 * len(blob) + 8
    for each in (blob, mine):
        assert_close(triton.decode(each, 500, device=device), cpu.decode(each, 500), BACK["float32"])


@pytest.mark.usefixtures("plain_coder")
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, None])
def test_caches_of_other_dtypes(
    device: torch.device, layouts: dict[str, KVLayout], make_chunk: Any, fitted: Any, dtype: torch.dtype | None
) -> None:
    layout = layouts["bfloat16"]
    profile = with_classes(fitted("bfloat16", "layer"))
    cpu, triton = Codec(profile, step=0.25), Codec(profile, step=0.25, backend="triton")
    blob = cpu.encode(make_chunk(layout, 11))
    got, want = Pages(layout, device, dtype), Pages(layout, CPU, dtype)
    at = torch.randperm(64, generator=torch.Generator().manual_seed(3))[:11]
    triton.decode_paged([blob], got.cache, [at.to(device)]).check()
    cpu.decode_paged([blob], want.cache, [at]).check()
    for a, b in zip(got.memory, want.memory, strict=True):
        limit = (2**-3 if dtype else 2**-6) * float(b.float().abs().max())
        assert float((a.cpu().float() - b.float()).abs().max()) <= limit


@pytest.mark.usefixtures("plain_coder")
def test_a_shard_codes_classes(
    device: torch.device, layouts: dict[str, KVLayout], make_chunk: Any, fitted: Any
) -> None:
    profile = with_classes(fitted("gqa", "head"), every=True).shard(1, 2)
    cpu, triton = Codec(profile, step=0.25), Codec(profile, step=0.25, backend="triton")
    whole = make_chunk(layouts["gqa"], 10)
    chunk = KVChunk([k[:, 1:] for k in whole.keys], [v[:, 1:] for v in whole.values], profile.layout, 0)
    mine = triton.encode(on(device, chunk))
    assert abs(len(mine) - len(cpu.encode(chunk))) <= 8
    assert_close(triton.decode(mine, device=device), cpu.decode(mine), BACK["float32"])


def test_coarsest_and_finest_of_all(device: torch.device) -> None:
    """Weights of zero make a token as coarse as there is, where nothing may be coded of it."""
    plain = profile_of("head", top=3)
    noise = torch.Generator().manual_seed(0)
    units = [[torch.randn(20, n.kv_heads, d, generator=noise) for n, d in sizes] for sizes in sizes_of(LAYOUT)]
    chunk = KVChunk(units[0], units[1], LAYOUT, 5)
    for weights in (torch.tensor([1.0] + [0.0] * 19), torch.tensor([1.0, 1e9] * 10)):
        profile = with_classes(plain, weights, 5)
        cpu, triton = Codec(profile, step=1.0), Codec(profile, step=1.0, backend="triton")
        blob, mine = cpu.encode(chunk), triton.encode(on(device, chunk))
        assert mine == blob
        assert_close(triton.decode(blob, device=device), cpu.decode(blob), BACK["float32"])
