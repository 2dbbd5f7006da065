"""The command line: what it writes, what it prints, and how it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

import cuvee
from cuvee.cli import app
from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.layout import KVLayout
from cuvee.codec.profile import Profile
from cuvee.eval.data import bundled_model_path
from cuvee.eval.mixture import KINDS

TOKENS = 150
START = 20
RUN = CliRunner(env={"COLUMNS": "200"})


def run(*args: str | Path, code: int = 0) -> Result:
    done = RUN.invoke(app, [str(arg) for arg in args])
    assert done.exit_code == code, (done.output, done.exception)
    return done


def fails(*args: str | Path, match: str) -> str:
    """Exit code 1, nothing on standard output, one line on standard error."""
    done = run(*args, code=1)
    assert done.stdout == "" and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.output
    assert match in done.stderr and "Traceback" not in done.stderr
    return done.stderr


def save_cache(chunk: KVChunk, path: Path) -> Path:
    tensors = {f"layer.{i}.keys": k.contiguous() for i, k in enumerate(chunk.keys)}
    tensors |= {f"layer.{i}.values": v.contiguous() for i, v in enumerate(chunk.values)}
    save_file(tensors, path, {"start": str(chunk.start)})
    return path


def start_of(path: Path) -> str:
    with safe_open(path, "pt") as file:
        start: str = file.metadata()["start"]
        return start


@dataclass(frozen=True)
class Files:
    """A folder with a profile and a cache of its model."""

    folder: Path
    profile: Path
    cache: Path
    chunk: KVChunk


@pytest.fixture
def files(
    tmp_path: Path,
    fitted: Callable[[str, str], Profile],
    make_chunk: Callable[..., KVChunk],
    layouts: dict[str, KVLayout],
) -> Files:
    chunk = make_chunk(layouts["bfloat16"], TOKENS, start=START)
    fitted("bfloat16", "layer").save(tmp_path / "p")
    return Files(tmp_path, tmp_path / "p", save_cache(chunk, tmp_path / "cache.safetensors"), chunk)


def assert_same(path: Path, chunk: KVChunk) -> None:
    tensors = load_file(path)
    assert len(tensors) == 2 * chunk.layout.num_layers
    for i, (keys, values) in enumerate(zip(chunk.keys, chunk.values, strict=True)):
        assert torch.equal(tensors[f"layer.{i}.keys"].view(torch.int16), keys.contiguous().view(torch.int16))
        assert torch.equal(tensors[f"layer.{i}.values"].view(torch.int16), values.contiguous().view(torch.int16))


# --- encode and decode


def test_lossless_comes_back_bit_for_bit(files: Files) -> None:
    out, back = files.folder / "blobs", files.folder / "back.safetensors"
    options = ("--profile", files.profile)
    done = run("encode", files.cache, out, *options, "--quality", "lossless", "--chunk-tokens", "64", "--json")
    report = json.loads(done.stdout)
    assert sorted(p.name for p in out.iterdir()) == ["00000.cuvee", "00001.cuvee", "00002.cuvee"]
    size = sum(p.stat().st_size for p in out.iterdir())
    assert report == {
        "out": str(out),
        "chunks": 3,
        "tokens": TOKENS,
        "start": START,
        "raw_bytes": files.chunk.nbytes,
        "bytes": size,
        "bits_per_value": pytest.approx(8 * size / (TOKENS * files.chunk.layout.values_per_token)),
        "ratio": pytest.approx(files.chunk.nbytes / size),
    }
    run("decode", out, back, *options)
    assert_same(back, files.chunk)
    assert start_of(back) == str(START)


def test_lossless_needs_no_profile_but_the_config(tmp_path: Path, make_chunk: Callable[..., KVChunk]) -> None:
    config = json.loads((bundled_model_path() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    from transformers import AutoConfig

    chunk = make_chunk(KVLayout.from_config(AutoConfig.from_pretrained(tmp_path), dtype="float16"), 9)
    cache = save_cache(chunk, tmp_path / "c")
    for where in (tmp_path, tmp_path / "config.json"):
        blob = tmp_path / f"{where.name}.cuvee"
        run("encode", cache, blob, "--config", where, "--quality", "lossless")
        run("decode", blob, tmp_path / "back", "--config", where, "--force")
        assert_same(tmp_path / "back", chunk)
    run("encode", cache, tmp_path / "small.cuvee", "--config", tmp_path, "--quality", "small")
    assert cuvee.inspect((tmp_path / "small.cuvee").read_bytes()).scheme == "generic"
    run("decode", tmp_path / "small.cuvee", tmp_path / "lossy", "--config", tmp_path)
    fails("encode", cache, tmp_path / "x", "--config", tmp_path / "none.json", match="none.json")


def test_a_lossy_cache_is_the_codecs_and_moves(files: Files) -> None:
    blob, back = files.folder / "x.cuvee", files.folder / "back"
    done = run("encode", files.cache, blob, "--profile", files.profile, "--step", "0.25")
    assert f"{blob}: 150 tokens" in done.stdout and "1 chunk\n" in done.stdout
    codec = Codec(Profile.load(files.profile), step=0.25)
    assert blob.read_bytes() == codec.encode(files.chunk)
    run("decode", blob, back, "--profile", files.profile, "--start", "7")
    assert_same(back, codec.decode(blob.read_bytes(), start=7))
    fails("decode", blob, back, "--profile", files.profile, "--max-tokens", "3", "--force", match="max_tokens=3")
    assert start_of(back) == "7"


def test_chunks_move_together(files: Files) -> None:
    out, back = files.folder / "blobs", files.folder / "back"
    run("encode", files.cache, out, "--profile", files.profile, "--quality", "high", "--chunk-tokens", "100")
    report = json.loads(run("decode", out, back, "--profile", files.profile, "--start", "0", "--json").stdout)
    assert report == {"out": str(back), "chunks": 2, "tokens": TOKENS, "start": 0}


@pytest.mark.parametrize("quality", [("--bits", "2"), ("--ratio", "8"), ("--quality", "small"), ()])
def test_every_way_to_ask_for_quality(files: Files, quality: tuple[str, ...]) -> None:
    learned = Profile.load(files.profile)
    learned.with_curve(
        [cuvee.codec.profile.CurvePoint(-320, 6.0, 1e-4), cuvee.codec.profile.CurvePoint(64, 0.5, 0.5)]
    ).save(files.profile)
    run("encode", files.cache, files.folder / "o", "--profile", files.profile, *quality)


def test_nothing_is_replaced_without_force(files: Files) -> None:
    out, back = files.folder / "blobs", files.folder / "back"
    encode = ("encode", files.cache, out, "--profile", files.profile, "--quality", "lossless")
    run(*encode, "--chunk-tokens", "50")
    fails(*encode, match="--force")
    assert len(list(out.iterdir())) == 3
    run(*encode, "--force")
    assert [p.name for p in out.iterdir()] == ["00000.cuvee"]
    back.write_text("mine")
    fails("decode", out, back, "--profile", files.profile, match="--force")
    assert back.read_text() == "mine"
    run("decode", out, back, "--profile", files.profile, "--force")
    assert_same(back, files.chunk)
    assert not [p for p in files.folder.iterdir() if p.name.startswith(".")]


def test_force_spares_a_folder_of_other_things(files: Files) -> None:
    out = files.folder / "home"
    out.mkdir()
    (out / "thesis.tex").write_text("x")
    fails("encode", files.cache, out, "--profile", files.profile, "--quality", "lossless", "--force", match="leaves it")
    assert (out / "thesis.tex").read_text() == "x"


def test_one_file_holds_one_chunk(files: Files) -> None:
    out = files.folder / "x.cuvee"
    args = ("encode", files.cache, out, "--profile", files.profile, "--chunk-tokens", "64")
    fails(*args, match="--chunk-tokens 150")
    assert not out.exists()


def test_missing_and_damaged_files_are_one_line(files: Files) -> None:
    blob, none = files.folder / "x.cuvee", files.folder / "none"
    profile = ("--profile", files.profile)
    run("encode", files.cache, blob, *profile, "--quality", "lossless")
    fails("decode", none, files.folder / "b", *profile, match="none: No such file")
    fails("encode", none, files.folder / "b", *profile, match="none")
    fails("encode", files.cache, files.folder / "b", "--profile", none, match="no profile at")
    fails("encode", files.profile, files.folder / "b", *profile, match="mixes dtypes")
    fails("encode", blob, files.folder / "b", *profile, match="not a safetensors file")
    fails("inspect", none, match="none: No such file")
    fails("inspect", files.folder, blob, files.cache, match="cache.safetensors: not a cuvee blob")
    whole = blob.read_bytes()
    blob.write_bytes(whole[:-1])
    assert "truncated" in fails("inspect", blob, match="x.cuvee: the blob has")
    fails("decode", blob, files.folder / "b", *profile, match="x.cuvee: the blob has")
    blob.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    fails("decode", blob, files.folder / "b", *profile, match="checksum")
    assert not (files.folder / "b").exists()


def test_a_missing_chunk_is_noticed(files: Files) -> None:
    out = files.folder / "blobs"
    run("encode", files.cache, out, "--profile", files.profile, "--quality", "small", "--chunk-tokens", "50")
    (out / "00001.cuvee").unlink()
    fails("decode", out, files.folder / "b", "--profile", files.profile, match="adjacent")
    empty = files.folder / "empty"
    empty.mkdir()
    fails("decode", empty, files.folder / "b", "--profile", files.profile, match="holds no .cuvee files")


def test_a_cache_of_another_model_is_refused(files: Files) -> None:
    tensors = load_file(files.cache)
    profile = ("--profile", files.profile)
    save_file({**tensors, "layer.9.keys": tensors["layer.0.keys"].clone()}, files.folder / "c")
    fails("encode", files.folder / "c", files.folder / "b", *profile, match="layer.9.keys")
    save_file({**tensors, "layer.0.keys": tensors["layer.0.keys"][:, :1].clone()}, files.folder / "c")
    fails("encode", files.folder / "c", files.folder / "b", *profile, match="c: keys of layer 0 must have shape")
    save_file({**tensors, "layer.0.keys": tensors["layer.0.keys"].float()}, files.folder / "c")
    fails("encode", files.folder / "c", files.folder / "b", *profile, match="mixes dtypes")
    save_file(tensors, files.folder / "c", {"start": "-1"})
    fails("encode", files.folder / "c", files.folder / "b", *profile, match="start='-1'")


# --- usage


def test_wrong_usage_is_exit_code_two(files: Files) -> None:
    out = files.folder / "o"
    encode = ("encode", files.cache, out)
    for args in (
        ("nonsense",),
        ("encode", files.cache),
        encode,
        (*encode, "--profile", files.profile, "--config", files.folder),
        (*encode, "--profile", files.profile, "--bits", "2", "--kl", "0.1"),
        (*encode, "--profile", files.profile, "--chunk-tokens", "0"),
        ("decode", files.cache, out),
        ("inspect",),
        ("bench", "--device", "abacus"),
        ("bench", "--store", "memory://"),
        ("bench", "--engine", "--device", "cuda"),
    ):
        done = run(*args, code=2)
        assert done.stdout == "" and "Traceback" not in done.stderr
    assert not out.exists()


def test_debug_shows_the_traceback(files: Files) -> None:
    done = RUN.invoke(app, ["--debug", "inspect", str(files.cache)])
    assert isinstance(done.exception, cuvee.FormatError)
    fails("inspect", files.cache, match="not a cuvee blob")  # … and only where asked


@pytest.mark.parametrize(
    "command", ["demo", "profile learn", "profile show", "encode", "decode", "inspect", "bench", "report", "kernels"]
)
def test_every_command_explains_itself(command: str) -> None:
    assert "Usage: " in run(*command.split(), "--help").stdout


# --- inspect and profile


def test_inspect_prints_what_the_library_says(files: Files) -> None:
    out = files.folder / "blobs"
    run("encode", files.cache, out, "--profile", files.profile, "--step", "0.5", "--chunk-tokens", "100")
    data = json.loads(run("inspect", out, "--json").stdout)
    assert [(entry["tokens"], entry["start"]) for entry in data] == [(100, START), (50, START + 100)]
    for entry, path in zip(data, sorted(out.iterdir()), strict=True):
        info = cuvee.inspect(path.read_bytes())
        assert entry["file"] == str(path) and entry["ratio"] == info.ratio and entry["step"] == 0.5
        assert entry["profile_id"] == Profile.load(files.profile).id.hex()
        assert sum(entry["section_bytes"]) + entry["header_bytes"] == entry["total_bytes"] == path.stat().st_size
    text = run("inspect", out).stdout
    assert "20 … 119" in text and "2 blobs:" in text and "transform" in text


def test_profile_show(files: Files) -> None:
    profile = Profile.load(files.profile)
    data = json.loads(run("profile", "show", files.profile, "--json").stdout)
    assert data["id"] == profile.id.hex() and data["group"] == "layer" and len(data["sections"]) == 3
    assert data["bytes"] == files.profile.stat().st_size and len(data["curve"]) == len(profile.curve)
    assert profile.id.hex() in run("profile", "show", files.profile).stdout
    fails("profile", "show", files.cache, match="not a cuvee profile")


def test_a_profile_is_learned_from_text_and_token_ids(tmp_path: Path, books: Any) -> None:
    rows = [{"input_ids": row} for row in books.harbour[:10].tolist()]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n" + json.dumps(rows[0]["input_ids"]))
    (tmp_path / "b.txt").write_text("It rained. " * 300)
    out = tmp_path / "profile"
    args = ("profile", "learn", bundled_model_path(), tmp_path / "a.jsonl", tmp_path / "b.txt", "-o", out)
    options = ("--length", "128", "--sequences", "20", "--group", "unit", "--dtype", "float32")
    data = json.loads(run(*args, *options, "--json").stdout)
    profile = Profile.load(out)
    assert data["id"] == profile.id.hex() and profile.group == "unit" and profile.source == "calibrated"
    assert all(point["kl"] is not None for point in data["curve"])
    text = run("profile", "show", out).stdout
    assert "±" in text and "6 layers 2 x 64" in text
    fails(*args, *options, match="--force")
    fails(*args[:-1], tmp_path / "q", "--length", "4096", match="no sequence of 4096 tokens")
    fails("profile", "learn", tmp_path / "nowhere", tmp_path / "b.txt", "-o", tmp_path / "q", match="nowhere")
    fails("profile", "learn", bundled_model_path(), tmp_path / "none", "-o", tmp_path / "q", match="none: no such text")
    (tmp_path / "bad.jsonl").write_text('{"text": 3}')
    fails("profile", "learn", bundled_model_path(), tmp_path / "bad.jsonl", "-o", tmp_path / "q", match="bad.jsonl:1")


def test_a_profile_is_learned_without_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the mixture and a text of one's own, kind by kind."""
    monkeypatch.setattr("cuvee.codec.learning.calibrate.CURVE_STEPS", (-256, -128, 0))  # a few, for speed
    (tmp_path / "own.txt").write_text("It rained. " * 300)
    out = tmp_path / "profile"
    options = ("--length", "64", "--sequences", "24", "--group", "unit", "--text", f"{tmp_path / 'own.txt'}=0.5")
    data = json.loads(run("profile", "learn", bundled_model_path(), "-o", out, *options, "--json").stdout)
    profile = Profile.load(out)
    assert profile.group == "unit" and profile.source == "calibrated" and data["id"] == profile.id.hex()
    assert tuple(profile.curves) == (*KINDS, "own.txt") == tuple(data["curves"])
    assert [p["kl"] for p in data["curves"]["code"]] == [p.kl for p in profile.curves["code"]]
    shown = run("profile", "show", out).stdout
    assert "by the worst" in shown
    table = shown[shown.index("kind of text") :].splitlines()
    for kind in (*KINDS, "own.txt"):
        (row,) = (line.split() for line in table if line.split()[:1] == [kind])
        assert len(row) == 4 and all(float(kl) < 100 for kl in row[1:])


def test_what_the_options_of_learning_mean(tmp_path: Path, books: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, str, dict[str, Any]]] = []

    def calibrate(cls: type[Profile], /, model: Any, tokens: Any, group: str, **arguments: Any) -> Profile:
        calls.append((tokens, group, arguments | {"dtype": model.dtype}))
        return books.profile  # type: ignore[no-any-return]

    monkeypatch.setattr(Profile, "calibrate", classmethod(calibrate))
    (tmp_path / "prose").write_text("It rained. " * 3000)
    (tmp_path / "a=b").write_text("It snowed. " * 3000)
    learn = ("profile", "learn", bundled_model_path(), "--length", "64")
    number = iter(range(100))

    def learned(*options: str | Path) -> tuple[Any, str, dict[str, Any]]:
        run(*learn, "-o", tmp_path / f"p{next(number)}", *options)
        return calls[-1]

    # The default: the mixture, whose kinds an added one of the same name replaces.
    tokens, group, arguments = learned("--sequences", "40", "--text", tmp_path / "prose", "--text", tmp_path / "a=b")
    assert list(tokens) == [*KINDS, "a=b"] and group == "auto"
    defaults = {"prefix": None, "batch_size": 4, "seed": 0, "flops": None, "distributed": False}
    assert arguments == {**defaults, "dtype": torch.float32}
    assert {kind: len(tokens[kind]) for kind in ("prose", "code", "a=b")} == {"prose": 10, "code": 8, "a=b": 10}
    assert len({tuple(row[4:8].tolist()) for row in tokens["prose"]}) <= 4, "one sentence over and over"
    for share, count in (("=0.5", 20), ("=0.01", 3), ("=1", 40)):
        tokens, _, _ = learned("--sequences", "40", "--text", f"{tmp_path / 'prose'}{share}")
        assert len(tokens["prose"]) == count
    _, group, arguments = learned(
        "--sequences", "24", "--flops", "4096", "--group", "layers:2", "--prefix", "40", "--dtype", "bfloat16"
    )
    assert (group, arguments["flops"], arguments["prefix"], arguments["dtype"]) == (
        "layers:2", 4096.0, 40, torch.bfloat16,
    )  # fmt: skip
    # Texts take the mixture's place, as one kind.
    tokens, _, _ = learned(tmp_path / "prose", "--sequences", "12")
    assert tokens.shape == (12, 64)
    for bad, match in (
        ((tmp_path / "prose", "--text", tmp_path / "prose"), "give one of them"),
        (("--text", f"{tmp_path / 'prose'}=0"), "the share must lie above 0"),
        (("--text", f"{tmp_path / 'prose'}=101"), "the share must lie above 0"),
        (("--text", f"{tmp_path / 'none'}=1"), "no such text"),
    ):
        fails(*learn, "-o", tmp_path / "q", *bad, match=match)
    # Before a model is looked for.
    missing = ("profile", "learn", tmp_path / "none", "-o", tmp_path / "q")
    few = run(*missing, "--sequences", "23", "--length", "64", code=1)
    assert few.stderr.endswith("error: sequences must be at least 24 and length 8, got 23 and 64\n")


# --- report and eval


@pytest.mark.filterwarnings("ignore")  # lm-eval's
def test_report_measures_and_the_gate_compares(tmp_path: Path) -> None:
    out = tmp_path / "report"
    options = ("--quick", "--length", "128", "--sequences", "4", "--calibration-sequences", "24", "--group", "layer")
    shown = run("report", "-o", out, *options, "--tasks", "none").stdout
    assert "How much smaller at equal KL" in shown and str(out / "report.html") in shown
    path = out / "report.json"
    data = json.loads(path.read_text())
    assert data["configuration"]["quick"] and data["configuration"]["groups"] == ["layer"] and data["tasks"] == []
    assert json.loads(run("report", "-o", out, *options, "--tasks", "none", "--json").stdout)["quality"]
    done = run("report", "-o", out, *options, "--tasks", "none", "--chunk-tokens", "32", code=1)
    assert "differs in chunk_tokens" in done.stderr.splitlines()[-1]  # behind the bar of loading the model

    run("report", "--compare", path, path, "--fail-if", "kl>1%", "--fail-if", "bits>0@cuvee/*")
    for entry in data["quality"]:
        if entry["key"] == "cuvee/layer@balanced":
            entry["kl"] *= 1.5
    worse = tmp_path / "worse.json"
    worse.write_text(json.dumps(data))
    done = run("report", "--compare", path, worse, "--fail-if", "kl>5%@cuvee/*", code=1)
    assert "cuvee/layer@balanced" in done.stdout
    failures = json.loads(run("report", "--compare", path, worse, "--fail-if", "kl>5%", "--json", code=1).stdout)
    assert [f["key"] for f in failures["failures"]] == ["cuvee/layer@balanced"]
    fails("report", "--compare", path, worse, "--fail-if", "speed>5%", match="speed")
    fails("report", "--compare", path, tmp_path / "none.json", match="none.json")


def test_options_of_the_report_that_do_not_go_together(tmp_path: Path) -> None:
    run("report", "--fail-if", "kl>1%", code=2)
    run("report", "-o", tmp_path / "r", "--cache-dtype", "auto", code=2)
    fails("report", "-o", tmp_path / "r", "--profile", "a", "--group", "layer", match="groups: are learned")
    fails("report", "-o", tmp_path / "r", "--model", tmp_path / "nowhere", match="nowhere")
    assert not (tmp_path / "r").exists()


def test_eval_hands_everything_to_lm_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def fake(args: list[str]) -> int:
        seen.append(args)
        return 3 if "fail" in args else 0

    monkeypatch.setattr("cuvee.eval.lm.run_cli", fake)
    run("eval", "run", "--tasks", "a,b", "--help", "-x")
    run("eval", "fail", code=3)
    assert seen == [["run", "--tasks", "a,b", "--help", "-x"], ["fail"]]


# --- demo, and the real thing


def test_demo_writes_json_and_keeps_its_report_off_standard_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fake(console: Any, out: Path | None, model: str) -> dict[str, Any]:
        console.print("the report")
        return {"plot": None if out is None else str(out)}

    monkeypatch.setattr("cuvee.eval.demo.run_demo", fake)
    done = run("demo", "--json", "-", "--out", "x.png")
    assert json.loads(done.stdout) == {"plot": "x.png"} and "the report" in done.stderr
    done = run("demo", "--json", tmp_path / "d" / "demo.json", "--no-plot")
    assert "the report" in done.stdout
    assert json.loads((tmp_path / "d" / "demo.json").read_text()) == {"plot": None}


@pytest.mark.parametrize(("columns", "width"), [(None, 120), ("60", 60)])
def test_a_pipe_is_wide_enough_for_tables(columns: str | None, width: int) -> None:
    env = {k: v for k, v in os.environ.items() if k != "COLUMNS"} | ({"COLUMNS": columns} if columns else {})
    code = "from cuvee.cli import _console; print(_console().width)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout == f"{width}\n"


def test_as_a_process(files: Files) -> None:
    def cli(*args: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "cuvee", *map(str, args)], capture_output=True, text=True, check=False
        )

    done = cli("--version")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("cuvee")
    done = cli("inspect", files.cache)
    assert (done.returncode, done.stdout) == (1, "") and done.stderr.startswith("error: ")
    assert cli("encode").returncode == 2


def test_the_command_line_starts_without_torch() -> None:
    code = "import sys, cuvee.cli; print(sorted({'torch', 'numpy', 'numba', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
