"""Test `cuvee encode` and `cuvee decode`: their files, output and errors."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.conftest import synthetic_chunk
from tests.package.cli.running import Files, fails, run, save_cache
from tests.predicting import VOCABULARY, predicting

import cuvee
from cuvee.calibration.bundled import bundled_model_path
from cuvee.cli.files import write_folder
from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.layout import KVLayout
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.quality import CurvePoint

TOKENS, START = 150, 20  # of the cache of `files`


def start_of(path: Path) -> str:
    with safe_open(path, "pt") as file:
        start: str = file.metadata()["start"]
        return start


def assert_same(path: Path, chunk: KVChunk) -> None:
    tensors = load_file(path)
    assert len(tensors) == 2 * chunk.layout.num_layers
    for i, (keys, values) in enumerate(zip(chunk.keys, chunk.values, strict=True)):
        assert torch.equal(tensors[f"layer.{i}.keys"].view(torch.int16), keys.contiguous().view(torch.int16))
        assert torch.equal(tensors[f"layer.{i}.values"].view(torch.int16), values.contiguous().view(torch.int16))


def test_lossless_comes_back_bit_for_bit(files: Files) -> None:
    out, back = files.folder / "blobs", files.folder / "back.safetensors"
    options = ("--profile", files.profile)
    done = run("encode", files.cache, out, *options, "--quality", "lossless", "--chunk-tokens", "64")
    assert sorted(p.name for p in out.iterdir()) == [f"0000{i}-of-00003.cuvee" for i in range(3)]
    size = sum(p.stat().st_size for p in out.iterdir())
    raw, bits = files.chunk.nbytes, 8 * size / (TOKENS * files.chunk.layout.values_per_token)
    assert done.stdout == (
        f"{out}: {TOKENS} tokens, {raw:,} -> {size:,} bytes, {raw / size:.2f}x, {bits:.3f} bits per value, 3 chunks\n"
    )
    run("decode", out, back, *options)
    assert_same(back, files.chunk)
    assert start_of(back) == str(START)


def test_lossless_needs_no_profile_but_the_config(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = json.loads((bundled_model_path() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    from transformers import AutoConfig

    chunk = synthetic_chunk(KVLayout.from_config(AutoConfig.from_pretrained(tmp_path), dtype="float16"), 9)
    cache = save_cache(chunk, tmp_path / "c")
    for where in (tmp_path, tmp_path / "config.json"):
        blobs = tmp_path / f"blobs of {where.name}"
        run("encode", cache, blobs, "--config", where, "--quality", "lossless")
        run("decode", blobs, tmp_path / "back", "--config", where, "--force")
        assert_same(tmp_path / "back", chunk)
    # Lossless is the default without a profile; with a profile it is balanced.
    run("encode", cache, tmp_path / "default", "--config", tmp_path)
    assert cuvee.inspect((tmp_path / "default" / "00000-of-00001.cuvee").read_bytes()).scheme == "lossless"
    small = ("encode", cache, tmp_path / "x", "--config", tmp_path, "--quality", "small")
    fails(*small, match="learn a profile with `cuvee profile")
    fails("encode", cache, tmp_path / "x", "--config", tmp_path / "none.json", match="none.json")
    # A configuration that names code, which is not run, and one without layers.
    for change in ({"model_type": "other", "auto_map": {"AutoConfig": "evil.Config"}}, {"num_hidden_layers": None}):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        fails("decode", tmp_path / "default", tmp_path / "y", "--config", tmp_path, match="error: ")


def test_a_lossy_cache_is_the_codecs_and_moves(files: Files) -> None:
    out, back = files.folder / "blobs", files.folder / "back"
    done = run("encode", files.cache, out, "--profile", files.profile, "--step", "0.25")
    blob = out / "00000-of-00001.cuvee"
    assert f"{out}: 150 tokens" in done.stdout and "1 chunk\n" in done.stdout
    learned = Profile.load(files.profile)
    codec = Codec(learned, step=0.25)
    assert blob.read_bytes() == codec.encode(files.chunk)
    run("decode", blob, back, "--profile", files.profile, "--start", "7")
    assert_same(back, codec.decode(blob.read_bytes(), start=7))
    decode = ("decode", blob, back, "--profile", files.profile, "--force")
    fails(*decode, "--max-tokens", "3", match="max_tokens: must be at least")
    assert start_of(back) == "7"
    learned.with_curve([CurvePoint(-320, 6.0, 1e-4), CurvePoint(64, 0.5, 0.5)]).save(files.profile)
    for quality in (("--bits", "2"), ("--ratio", "8"), ()):
        run("encode", files.cache, out, "--profile", files.profile, *quality, "--force")


def test_token_ids_go_into_the_blobs_and_come_back(files: Files) -> None:
    out, back = files.folder / "blobs", files.folder / "back"
    predicting(Profile.load(files.profile)).save(files.profile)
    ids = torch.arange(TOKENS) % VOCABULARY
    save_file({**load_file(files.cache), "token_ids": ids}, files.cache, {"start": str(START)})
    encode = ("encode", files.cache, out, "--profile", files.profile, "--step", "0.25", "--chunk-tokens", "100")
    run(*encode)
    assert [info["token_id_bytes"] for info in json.loads(run("inspect", out, "--json").stdout)] == [200, 100]
    assert "200 bytes" in run("inspect", out).stdout
    run("decode", out, back, "--profile", files.profile)
    assert load_file(back)["token_ids"].equal(ids)
    # Without them, there are none in the file either.
    save_cache(files.chunk, files.cache)
    run(*encode, "--force")
    run("decode", out, back, "--profile", files.profile, "--force")
    assert "token_ids" not in load_file(back)
    save_file({**load_file(files.cache), "token_ids": ids + 1}, files.cache, {"start": str(START)})
    fails(*encode, "--force", match=f"cache.safetensors: token_ids: must be below {VOCABULARY}, the vocabulary")


def test_nothing_is_replaced_without_force(files: Files) -> None:
    out, back = files.folder / "blobs", files.folder / "back"
    encode = ("encode", files.cache, out, "--profile", files.profile, "--quality", "lossless")
    run(*encode, "--chunk-tokens", "50")
    fails(*encode, match="--force")
    assert len(list(out.iterdir())) == 3
    run(*encode, "--force")
    assert [p.name for p in out.iterdir()] == ["00000-of-00001.cuvee"]
    back.write_text("mine")
    fails("decode", out, back, "--profile", files.profile, match="--force")
    assert back.read_text() == "mine"
    run("decode", out, back, "--profile", files.profile, "--force")
    assert_same(back, files.chunk)
    assert not [p for p in files.folder.iterdir() if p.name.startswith(".")]


def test_what_force_does_not_replace_is_said_before_the_work(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    def works(*_: object, **__: object) -> None:
        raise AssertionError("it worked first")

    monkeypatch.setattr("cuvee.cli.encode.read_profile", works)
    profile, mine = ("--profile", files.profile), files.folder / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    fails("encode", files.cache, mine, *profile, "--force", match="must hold only .cuvee files")
    monkeypatch.setattr("cuvee.cli.decode.blob_files", works)
    fails("decode", mine, mine, *profile, "--force", match="must be a file, got a folder")
    assert (mine / "notes.txt").read_text() == "mine"


def test_missing_and_damaged_files_are_one_line(files: Files) -> None:
    out, none = files.folder / "blobs", files.folder / "none"
    blob, profile = out / "00000-of-00001.cuvee", ("--profile", files.profile)
    run("encode", files.cache, out, *profile, "--quality", "lossless")
    fails("decode", none, files.folder / "b", *profile, match="none: No such file")
    fails("encode", none, files.folder / "b", *profile, match="none")
    fails("encode", files.cache, files.folder / "b", "--profile", none, match="no profile at")
    fails("encode", files.profile, files.folder / "b", *profile, match="must hold tensors of one dtype")
    tensors = load_file(files.cache)
    save_file({**tensors, "layer.0.keys": tensors["layer.0.keys"][:, :1].clone()}, files.folder / "c")
    fails("encode", files.folder / "c", files.folder / "b", *profile, match="c: keys[0]: must have shape")
    fails("inspect", out, blob, files.cache, match="cache.safetensors: not a cuvee blob")
    whole = blob.read_bytes()
    blob.write_bytes(whole[:-1])
    assert "truncated" in fails("inspect", blob, match="00000-of-00001.cuvee: blob: has")
    fails("decode", blob, files.folder / "b", *profile, match="00000-of-00001.cuvee: blob: has")
    blob.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    fails("decode", blob, files.folder / "b", *profile, match="checksum")
    assert not (files.folder / "b").exists()


def test_a_missing_chunk_is_noticed(files: Files) -> None:
    out = files.folder / "blobs"
    run("encode", files.cache, out, "--profile", files.profile, "--quality", "small", "--chunk-tokens", "50")
    back = ("decode", out, files.folder / "b", "--profile", files.profile)
    blobs = {path: path.read_bytes() for path in sorted(out.iterdir())}
    assert len(blobs) == 3
    for path, data in blobs.items():
        path.unlink()
        fails(*back, match=f"must hold all 3 blobs of a cache, but {path.name} is missing")
        path.write_bytes(data)
    for name in ("00003-of-00003.cuvee", "00000-of-00002.cuvee", "mine.cuvee"):
        (out / name).write_bytes(data)
        fails(*back, match=f"got also {name}: move it elsewhere")
        (out / name).unlink()
    first, second, _ = blobs
    first.write_bytes(blobs[second])
    second.write_bytes(blobs[first])
    fails(*back, match="adjacent")
    empty = files.folder / "empty"
    empty.mkdir()
    fails("decode", empty, files.folder / "b", "--profile", files.profile, match="must hold .cuvee files")


@pytest.mark.parametrize("moved", ["blobs", "new"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_folder_is_replaced_or_stays(
    tmp_path: Path, error: BaseException, moved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C is raised as the system's call returns, which has moved the folder."""
    folder, usual, interrupted = tmp_path / "blobs", Path.rename, isinstance(error, KeyboardInterrupt)
    write_folder(folder, {"0.cuvee": b"old"}, force=False)

    def rename(self: Path, target: Path) -> Path:
        if self.name != moved:
            return usual(self, target)
        monkeypatch.undo()
        if interrupted:
            usual(self, target)
        raise error

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(type(error)):
        write_folder(folder, {"0.cuvee": b"new"}, force=True)
    assert [file.name for file in tmp_path.iterdir()] == ["blobs"]
    assert (folder / "0.cuvee").read_bytes() == (b"new" if interrupted and moved == "new" else b"old")


def test_a_folder_that_is_killed_while_it_is_replaced_is_named(files: Files) -> None:
    blobs, back, profile = files.folder / "[blobs]", files.folder / "back.safetensors", ("--profile", files.profile)
    run("encode", files.cache, blobs, *profile)
    killed = (
        "import os, pathlib, sys\nfrom cuvee.cli.files import write_folder\nusual = pathlib.Path.rename\n"
        "pathlib.Path.rename = lambda self, to: os.kill(os.getpid(), 9) if self.name == 'new' else usual(self, to)\n"
        "write_folder(pathlib.Path(sys.argv[1]), {'00000-of-00001.cuvee': b'new'}, force=True)\n"
    )
    assert subprocess.run([sys.executable, "-c", killed, blobs], check=False).returncode == -signal.SIGKILL
    (old,) = files.folder.glob(".[[]blobs].*/old")
    fails("inspect", blobs, match=f"move back what it held, {old}, or move what it should hold")
    fails("decode", blobs, back, *profile, match=str(old))
    assert (old.with_name("new") / "00000-of-00001.cuvee").read_bytes() == b"new"
    old.rename(blobs)
    run("decode", blobs, back, *profile)
