"""Names of checkpoints and tokenizers on disk, and whether a profile belongs to a checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.conftest import tiny_model

from cuvee.codec.errors import InputError, UnsupportedModelError
from cuvee.codec.layout import KVLayout
from cuvee.codec.models.fingerprint import PREFIX, are_others, function_digest, model_fingerprint
from cuvee.codec.profiles.profile import Profile
from cuvee.integrations.identity import file_digests
from cuvee.integrations.identity import weight_fingerprints as weight_fingerprints_module
from cuvee.integrations.identity.checkpoint import (
    Checkpoint,
    checking_profile,
    checkpoint_identity,
    code_identity,
    read_layout,
    tokenizer_identity,
)
from cuvee.integrations.identity.weight_fingerprints import weight_fingerprints


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    tiny_model("llama").save_pretrained(path)
    (path / "tokenizer.json").write_text('{"model": {}}')
    (path / "tokenizer_config.json").write_text('{"chat_template": "a"}')
    return path


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A hub cache of the test's own; whoever goes online fails."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    monkeypatch.setattr("socket.socket.connect", refuse)


def check_profile(profile: Profile, path: str | Path) -> str:
    return checking_profile(profile, path, None)(Event())


def edit_json(file: Path, **changes: Any) -> None:
    data = json.loads(file.read_text())
    for key, value in changes.items():
        if value is None:
            data.pop(key, None)
        else:
            data[key] = value
    file.write_text(json.dumps(data))


def change_tensor(file: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = load_file(file)
    tensors[name] = change(tensors[name])
    save_file(tensors, file, {"format": "pt"})


def write_safetensors(file: Path, tensors: list[tuple[str, int]]) -> int:
    """A file of zeros, tensors of so many bytes; returns where the first begins."""
    header: dict[str, Any] = {}
    at = 0
    for name, size in tensors:
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(raw)) + raw)
        stream.truncate(8 + len(raw) + at)
    return 8 + len(raw)


def overwrite(file: Path, at: int, data: bytes) -> None:
    with file.open("r+b") as stream:
        stream.seek(at)
        stream.write(data)


def watch_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    read: list[int] = []
    pread = os.pread

    def counted(descriptor: int, size: int, at: int) -> bytes:
        read.append(size)
        return pread(descriptor, size, at)

    monkeypatch.setattr(os, "pread", counted)
    return read


# Identity of a checkpoint ----------------------------------------------------------------------------------------


def test_copies_agree_whatever_their_place_and_time(folder: Path, tmp_path: Path) -> None:
    name = checkpoint_identity(folder)
    assert len(name) == 32 and int(name, 16) >= 0
    other = tmp_path / "elsewhere" / "renamed"
    shutil.copytree(folder, other)
    for file in other.iterdir():
        os.utime(file, (1, 1))
    assert checkpoint_identity(other) == checkpoint_identity(str(other)) == name
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in folder.iterdir():
        (linked / file.name).symlink_to(file)
    assert checkpoint_identity(linked) == name
    (other / "README.md").write_text("hello")
    (other / "generation_config.json").write_text("{}")
    assert checkpoint_identity(other) == name


def test_the_name_is_pinned(tmp_path: Path) -> None:
    """It enters the keys of stored entries: another value orphans them all."""
    (tmp_path / "config.json").write_text('{"b": 1, "torch_dtype": "bfloat16", "transformers_version": "5"}')
    write_safetensors(tmp_path / "model.safetensors", [("a", 100), ("b", 5000)])
    (tmp_path / "tokenizer.json").write_text("{}")
    assert checkpoint_identity(tmp_path) == "62d8f45c8095465f7c4bfd3f2c2e6586"
    assert tokenizer_identity(tmp_path) == "a0f454161fbae78d2662e4a3783dfc86"


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"dtype": "bfloat16"},
        {"hidden_act": None},
    ],
    ids=str,
)
def test_configuration_counts(folder: Path, change: dict[str, Any]) -> None:
    before = checkpoint_identity(folder)
    edit_json(folder / "config.json", **change)
    assert checkpoint_identity(folder) != before


def test_volatile_entries_and_spelling_of_the_configuration_do_not_count(folder: Path) -> None:
    before = checkpoint_identity(folder)
    file = folder / "config.json"
    edit_json(file, transformers_version="1.0", _name_or_path="/elsewhere", _commit_hash="abc")
    data = json.loads(file.read_text())
    data["torch_dtype"] = data.pop("dtype")
    file.write_text(json.dumps(dict(reversed(data.items())), indent=7))
    assert checkpoint_identity(folder) == before
    edit_json(file, text_config={"a": 1, "torch_dtype": "float16"})
    nested = checkpoint_identity(folder)
    edit_json(file, text_config={"dtype": "float16", "_name_or_path": "x", "a": 1})
    assert checkpoint_identity(folder) == nested != before
    edit_json(file, dtype="float16", torch_dtype="float32")  # where both are, transformers reads dtype
    assert checkpoint_identity(folder) != nested


@pytest.mark.parametrize("name", ["params.json", "quantize_config.json", "hf_quant_config.json", "modeling_x.py"])
def test_other_files_that_decide_the_cache_count(folder: Path, name: str) -> None:
    names = {checkpoint_identity(folder)}
    for content in ('{"a": 1}', '{"a": 2}'):
        (folder / name).write_text(content)
        names.add(checkpoint_identity(folder))
    assert len(names) == 3


def test_sharded_checkpoints(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    names = {checkpoint_identity(tmp_path)}
    for file in shards:
        original = file.read_bytes()
        overwrite(file, len(original) - 1, bytes([original[-1] ^ 1]))
        names.add(checkpoint_identity(tmp_path))
        file.write_bytes(original)
    shards[0].rename(tmp_path / "swap")
    shards[1].rename(shards[0])
    (tmp_path / "swap").rename(shards[1])
    names.add(checkpoint_identity(tmp_path))
    shards[1].unlink()
    names.add(checkpoint_identity(tmp_path))
    assert len(names) == len(shards) + 3


@pytest.mark.parametrize("tensors", [1, 1200])
def test_every_bit_of_a_large_file_counts(tmp_path: Path, tensors: int) -> None:
    file = tmp_path / "model.safetensors"
    write_safetensors(file, [*((f"t{index}", 4100) for index in range(tensors)), ("large", 5_000_000), ("last", 1)])
    names, size = {checkpoint_identity(tmp_path)}, file.stat().st_size
    for at in (size - 1, size - 2, size // 2 + 1, size - 5_000_001, size - 5_000_001 - 4100 * tensors // 2):
        overwrite(file, at, b"\x80")
        names.add(checkpoint_identity(tmp_path))
        overwrite(file, at, b"\0")
    assert len(names) == 6 and checkpoint_identity(tmp_path) in names


def test_weights_in_a_folder_of_their_own_count(folder: Path) -> None:
    names = {checkpoint_identity(folder)}
    (folder / "tower").mkdir()
    for size in (3, 4):
        write_safetensors(folder / "tower" / "model.safetensors", [("a", size)])
        names.add(checkpoint_identity(folder))
    assert len(names) == 3


@pytest.mark.parametrize(
    ("beside", "read"),
    [
        ("checkpoint-500/model.safetensors", "pytorch_model.bin"),
        ("tower/model.safetensors", "model-rank-0-part-0.pt"),
        ("checkpoint-500/adapter_model.safetensors", "adapter_model.bin"),
        ("new_embeddings.safetensors", "adapter_model.bin"),
        ("new_embeddings.safetensors", "adapter_model.pt"),
    ],
)
def test_safetensors_hide_no_file_that_an_engine_reads(beside: str, read: str, tmp_path: Path) -> None:
    """A model is read from the folder itself, an adapter from `adapter_model.bin` whatever other files there are."""
    if read.startswith("adapter"):
        (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / beside).parent.mkdir(exist_ok=True)
    write_safetensors(tmp_path / beside, [("a", 3)])
    (tmp_path / read).write_bytes(bytes(100))
    name = checkpoint_identity(tmp_path)
    overwrite(tmp_path / read, 50, b"\1")
    assert checkpoint_identity(tmp_path) != name


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.gguf", "consolidated.00.pth", "model-rank-0-part-0.pt"])
def test_every_byte_counts_in_every_format(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_bytes(bytes(3 << 20))
    names = {checkpoint_identity(tmp_path)}
    overwrite(file, (3 << 20) - 4097, b"\1")
    names.add(checkpoint_identity(tmp_path))
    assert len(names) == 2


@pytest.mark.parametrize("load_format", ["tensorizer", "npcache", "ipc_cache", "modelexpress", "remote", "mine"])
def test_weights_from_elsewhere_are_refused_by_name(load_format: str, folder: Path) -> None:
    with pytest.raises(InputError, match=rf"^load_format: must be auto, .*got {load_format}, .*set option 'model_id'"):
        checkpoint_identity(folder, load_format=load_format)


@pytest.mark.parametrize("part", ["text_model_id", "audio_model_id"])
def test_a_part_of_the_weights_from_elsewhere_is_refused(part: str, folder: Path) -> None:
    edit_json(folder / "config.json", **{part: "org/tower"})
    with pytest.raises(InputError, match=r"^model: must hold all of its weights, .* names org/tower .* 'model_id'"):
        checkpoint_identity(folder)


def test_the_files_that_are_read_count(folder: Path) -> None:
    """`pt` reads no safetensors, and `dummy` reads nothing."""
    (folder / "model.pt").write_bytes(b"abc")
    names = {name: checkpoint_identity(folder, load_format=name) for name in ("auto", "pt", "dummy")}
    assert len({*names.values()}) == 3
    overwrite(folder / "model.pt", 0, b"b")
    after = {name: checkpoint_identity(folder, load_format=name) for name in names}
    assert {name for name in names if after[name] != names[name]} == {"pt"}
    edit_json(folder / "config.json", rms_norm_eps=0.25)
    assert checkpoint_identity(folder, load_format="dummy") != names["dummy"]


def test_a_single_file_is_a_checkpoint(tmp_path: Path) -> None:
    one, other = tmp_path / "a.gguf", tmp_path / "b.gguf"
    one.write_bytes(b"GGUF weights")
    shutil.copy(one, other)
    assert checkpoint_identity(one) == checkpoint_identity(other)
    other.write_bytes(b"GGUF weightz")
    assert checkpoint_identity(one) != checkpoint_identity(other)
    assert tokenizer_identity(one) == ""


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"^model: must hold weights .* without any: set option 'model_id'"):
        checkpoint_identity(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:7],
        lambda data: data[:40],
        lambda data: data[:-1],
        lambda data: struct.pack("<Q", 2**63) + data[8:],
        lambda data: data[:8] + b"[" + data[9:],
        lambda data: struct.pack("<Q", 2) + b"[]",
        lambda data: struct.pack("<Q", 100_000) + b'{"a":' * 20_000,
        lambda data: struct.pack("<Q", 8) + b'{"a": 1}',
        lambda data: struct.pack("<Q", 9) + b'{"a": {}}',
        lambda data: data.replace(b'"data_offsets":[', b'"data_offsets":[99999999', 1),
        lambda data: data.replace(b'"data_offsets":[0,', b'"data_offsets":["",', 1)[:-1],
    ],
)
def test_a_damaged_file_is_named(folder: Path, damage: Callable[[bytes], bytes]) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    profile = profile_of(None, folder)
    profile.model = "w2-00"
    calls: list[Callable[[], str]] = [lambda: checkpoint_identity(folder), lambda: check_profile(profile, folder)]
    for call in calls:
        with pytest.raises(
            InputError, match=r"^model: must hold complete safetensors files, got .*model\.safetensors .*again"
        ):
            call()


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: os.utime(folder / "model.safetensors", (0, 0)),  # as if it was written
        lambda folder: shutil.copy(folder / "model.safetensors", folder / "more.safetensors"),
        lambda folder: (folder / "model.safetensors").unlink(),
    ],
)
def test_files_that_change_before_they_are_read_are_not_those_of_the_engine(
    change: Callable[[Path], object], folder: Path
) -> None:
    """They are listed when an engine starts, and may be read much later."""
    listed = Checkpoint(folder)
    change(folder)
    with pytest.raises(InputError, match=r"^model: must (not change|name files)"):
        listed.identity()


@pytest.mark.parametrize("content", [b'{"a": ', b'{"a":' * 1000 + b"1" + b"}" * 1000, b'{"a":' * 100_000, b"1" * 5000])
def test_a_damaged_configuration_is_named(content: bytes, folder: Path) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(InputError, match=r"^model: must hold valid JSON in .*config\.json"):
        checkpoint_identity(folder)


# Hub ids ---------------------------------------------------------------------------------------------------------


def cached(tmp_path: Path, folder: Path, revision: str = "main") -> str:
    """Put a folder into the local cache as `org/name`."""
    base = tmp_path / "hub" / "models--org--name"
    commit = revision.ljust(40, "0")
    (base / "refs").mkdir(parents=True, exist_ok=True)
    (base / "refs" / revision).write_text(commit)
    shutil.copytree(folder, base / "snapshots" / commit)
    return "org/name"


def test_a_hub_id_is_looked_up_in_the_local_cache(folder: Path, tmp_path: Path) -> None:
    hub_id = cached(tmp_path, folder)
    assert checkpoint_identity(hub_id) == checkpoint_identity(folder)
    assert tokenizer_identity(hub_id) == tokenizer_identity(folder)
    assert check_profile(profile_of(tiny_model("llama"), folder), hub_id) == "match"
    before = checkpoint_identity(folder)
    edit_json(folder / "config.json", rms_norm_eps=0.5)
    (folder / "tokenizer.json").write_text("{}")
    cached(tmp_path, folder, "v2")
    assert checkpoint_identity(hub_id) == before
    assert checkpoint_identity(hub_id, revision="v2") == checkpoint_identity(folder) != before
    assert tokenizer_identity(hub_id, revision="v2") == tokenizer_identity(folder) != tokenizer_identity(hub_id)


def test_code_in_another_repository_counts(folder: Path, tmp_path: Path) -> None:
    """A fine-tune's configuration names the original's code, of which the hub's cache has the newest."""
    edit_json(folder / "config.json", auto_map={"AutoModel": "org/name--modeling.A", "AutoTokenizer": ["x.B", None]})
    found = [checkpoint_identity(folder)]
    code = tmp_path / "code"
    code.mkdir()
    for number in range(2):
        (code / "modeling.py").write_text(f"scale = {number}")
        cached(tmp_path, code)
        found.append(checkpoint_identity(folder))
        shutil.rmtree(tmp_path / "hub" / "models--org--name")
    assert len(set(found)) == 3
    assert checkpoint_identity(folder) == found[0]
    for name in ("x" * 5000, "org/\0name", "/", ""):
        edit_json(folder / "config.json", auto_map={"AutoModel": f"{name}--modeling.A"})
        assert checkpoint_identity(folder)


def test_a_code_revision_counts_by_the_code_that_it_names(folder: Path, tmp_path: Path) -> None:
    """A branch moves, under one name. Of a hub id it names the checkpoint's own code as well."""
    assert code_identity(folder, None, "dev") == code_identity("org/name", None, "dev") == "dev"
    hub_id, found = cached(tmp_path, folder), []
    edit_json(folder / "config.json", auto_map={"AutoModel": "org/name--modeling.A"})
    for number in (0, 1, 0):
        (folder / "modeling.py").write_text(f"scale = {number}")
        cached(tmp_path, folder, "dev")
        own, named = code_identity(hub_id, None, "dev"), code_identity(folder, None, "dev")
        assert own == named != code_identity(folder, None, "main")
        found.append(own)
        shutil.rmtree(tmp_path / "hub" / "models--org--name" / "snapshots" / "dev".ljust(40, "0"))
    assert found[0] == found[2] != found[1] and "dev" not in found


@pytest.mark.parametrize("name", ["org/other", "/no/such/folder", "s3://bucket/model", "org/name:Q4"])
def test_what_is_not_there_is_refused(name: str) -> None:
    for call in (checkpoint_identity, tokenizer_identity):
        with pytest.raises(InputError, match=r"^model: must be a local folder or .*: give a folder"):
            call(name)


def test_hub_ids_need_huggingface_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match="hub ids need huggingface_hub"):
        checkpoint_identity("org/other")


# Tokenizers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "spiece.model", "tekken.json", "vocab.json"])
def test_vocabulary_files_count_and_nothing_else(tmp_path: Path, name: str) -> None:
    assert tokenizer_identity(tmp_path) == ""
    names = set()
    for content in ("{}", '{"a": 1}'):
        (tmp_path / name).write_text(content)
        names.add(tokenizer_identity(tmp_path))
        (tmp_path / "tokenizer_config.json").write_text(content)  # a chat template
        names.add(tokenizer_identity(tmp_path))
    assert len(names) == 2 and "" not in names


# Profiles ----------------------------------------------------------------------------------------------------------


def profile_of(model: Any, folder: Path) -> Profile:
    profile = Profile.unlearned(KVLayout.from_config(transformers.AutoConfig.from_pretrained(folder), "float32"))
    profile.model = None if model is None else model_fingerprint(model)
    return profile


@pytest.mark.parametrize(
    "family",
    ["cohere2", "deepseek_v3", "gemma3-full-first", "gpt2", "gpt_neox", "gpt_oss", "mixtral", "phi3", "smollm3"],
)
def test_a_profile_is_of_every_kind_of_checkpoint(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    verdict = check_profile(profile_of(model, tmp_path), tmp_path)
    # transformers renames and fuses these while it loads them.
    converted = family in ("deepseek_v3", "gpt_neox", "mixtral")
    assert verdict.startswith("unknown: the checkpoint holds no ") if converted else verdict == "match"
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "layers.1" in n or "h.1" in n).add_(1e-2)
    assert check_profile(profile_of(model, tmp_path), tmp_path) == (verdict if converted else "mismatch")


@pytest.mark.parametrize(
    ("family", "stored", "tied"),
    [("llama", torch.bfloat16, True), ("qwen3", torch.float32, False), ("llama", torch.float16, False)],
)
def test_whatever_dtype_was_stored_and_calibrated(family: str, stored: torch.dtype, tied: bool, tmp_path: Path) -> None:
    tiny_model(family, stored, tie_word_embeddings=tied).save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    for used in (torch.float32, torch.bfloat16, torch.float16):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=used)
        profile = profile_of(model, tmp_path)
        assert check_profile(profile, tmp_path) == "match"
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1e-2)
        assert check_profile(profile_of(model, tmp_path), tmp_path) == "mismatch"


def test_a_checkpoint_of_the_bare_model(tmp_path: Path) -> None:
    model = tiny_model("gpt2")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    bare = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    save_file(bare, file, {"format": "pt"})
    assert "wte.weight" in bare and check_profile(profile_of(model, tmp_path), tmp_path) == "match"


def test_profiles_that_name_no_model(folder: Path) -> None:
    assert check_profile(profile_of(None, folder), folder) == "unknown: the profile (unlearned) names no model"


def rename_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["other"] = tensors.pop("model.norm.weight")
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "holds no safetensors files"),
        (lambda f: (f / "config.json").unlink(), "transformers does not build the model"),
        (lambda f: edit_json(f / "config.json", model_type="unheard-of"), "transformers does not build the model"),
        (
            lambda f: edit_json(f / "config.json", model_type="x", auto_map={"AutoConfig": "evil.X"}),
            "transformers does not build the model",
        ),
        (lambda f: edit_json(f / "config.json", quantization_config={"quant_method": "gptq", "bits": 4}), "quantized"),
        (lambda f: (f / "config.json").write_text('{"model_type": "gemma3"}'), "multimodal"),
        (rename_tensor, r"holds no model\.norm\.weight"),
        (lambda f: shutil.copy(f / "model.safetensors", f / "copy.safetensors"), "is in copy.safetensors and in model"),
        (
            lambda f: edit_json(f / "config.json", vocab_size=64),
            r"model\.embed_tokens\.weight is stored as F32 \[61, 32",
        ),
        (
            lambda f: change_tensor(f / "model.safetensors", "model.norm.weight", lambda t: t.to(torch.float8_e4m3fn)),
            r"model\.norm\.weight is stored as F8_E4M3 \[32\]",
        ),
    ],
)
def test_what_cannot_be_said_is_not_said(folder: Path, change: Callable[[Path], Any], reason: str) -> None:
    profile = profile_of(tiny_model("llama"), folder)
    assert check_profile(profile, folder) == "match"
    (folder / "evil.py").write_text("raise SystemExit('the code of a checkpoint was run')")
    change(folder)
    verdict = check_profile(profile, folder)
    assert verdict.startswith("unknown: ")
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(verdict)


def test_a_tensor_shorter_than_its_shape_is_damage(folder: Path) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header["model.norm.weight"]["data_offsets"][1] -= 4
    raw = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + data[8 + length :])
    profile = profile_of(None, folder)
    profile.model = "w2-00"
    with pytest.raises(InputError, match=r"^model: .*another size of model\.norm\.weight"):
        check_profile(profile, folder)


def test_memory_for_the_check_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(weight_fingerprints_module, "_READ", 64)
    read = watch_reads(monkeypatch)
    profile = profile_of(tiny_model("llama"), tmp_path)
    assert check_profile(profile, tmp_path) == "match"
    assert max(sorted(read)[:-1]) <= 64  # the header apart


# The fingerprint -----------------------------------------------------------------------------------------------------


def test_every_value_of_every_parameter_counts() -> None:
    model = tiny_model("llama")
    found = {model_fingerprint(model)}
    count = 1
    for parameter in model.parameters():
        flat = parameter.detach().view(-1)
        for at in range(0, len(flat), 97):
            before = flat[at].clone()
            flat[at] = before + 1e-3
            found.add(model_fingerprint(model))
            flat[at] = before
            count += 1
    assert len(found) == count and model_fingerprint(model) in found


def test_buffers_that_are_stored_count() -> None:
    model = tiny_model("llama")
    found = {model_fingerprint(model)}
    for value in (1, 2**40, 2**40 + 1):
        model.model.layers[0].register_buffer("scale", torch.tensor([value]))
        found.add(model_fingerprint(model))
    model.model.layers[0].register_buffer("scale", torch.tensor([0]), persistent=False)
    assert len(found) == 4 and model_fingerprint(model) in found


def test_weights_are_read_where_they_are(tmp_path: Path) -> None:
    """`device_map=` leaves some of them in memory or in files, and the device meta in their place."""
    accelerate = pytest.importorskip("accelerate")
    expected = model_fingerprint(tiny_model("llama"))
    for move in (accelerate.cpu_offload, lambda model, **more: accelerate.disk_offload(model, str(tmp_path), **more)):
        model = tiny_model("llama")
        move(model, execution_device="cpu", offload_buffers=True)
        assert next(model.parameters()).is_meta and model_fingerprint(model) == expected
        assert function_digest(model) == function_digest(tiny_model("llama"))
    with pytest.raises(InputError, match=r"^model: must hold its weights, got .* on the device meta: load"):
        model_fingerprint(tiny_model("llama").to("meta"))


class ScaledLinear(torch.nn.Linear):
    """A layer that keeps scales as bitsandbytes does: in attributes, which it stores beside its parameters."""

    scales = torch.ones(1)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = self.scales


def test_what_layers_store_beside_parameters_counts() -> None:
    """Twice the weights have the same codes in eight bits, with another scale."""
    found = set()
    for factor in (1.0, 2.0):
        model = tiny_model("llama")
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.mul_(factor)
        with warnings.catch_warnings(action="ignore"):
            found.add(model_fingerprint(torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})))
        scaled = tiny_model("llama")
        scaled.model.layers[0].mlp.up_proj.__class__ = ScaledLinear
        scaled.model.layers[0].mlp.up_proj.scales = torch.full((2,), factor)
        found.add(model_fingerprint(scaled))
    assert len(found) == 4


def test_a_fingerprint_of_samples_is_neither_right_nor_wrong(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Those of cuvee before 0.4."""
    model = tiny_model("llama")
    profile = profile_of(model, folder)
    assert str(profile.model).startswith(PREFIX) and not are_others(profile.model, model)
    profile.model = "ab" * 16
    verdict = check_profile(profile, folder)
    assert verdict.startswith("unknown: it was made by the sampled fingerprint of cuvee before 0.4: learn it again")
    assert not are_others(profile.model, model) and "sampled fingerprint" in caplog.text
    assert are_others(PREFIX + "ab" * 16, model) and not are_others(None, model)


def test_what_a_checkpoint_can_be_is_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUVEE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(file_digests, "_SETTLED", 0)
    path = tmp_path / "model"
    tiny_model("llama").save_pretrained(path)
    found = weight_fingerprints(path)
    computed = weight_fingerprints_module._fingerprints
    monkeypatch.setattr(weight_fingerprints_module, "_fingerprints", lambda *_: ["computed again"])
    assert weight_fingerprints(path) == found and len(found.found) == 3
    change_tensor(path / "model.safetensors", "model.norm.weight", lambda t: t + 1)
    monkeypatch.setattr(weight_fingerprints_module, "_fingerprints", computed)
    assert not set(weight_fingerprints(path).found) & set(found.found)


class Fsdp(torch.nn.Module):
    """A wrapper that names its model as FSDP does."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._fsdp_wrapped_module = model


def compile_layers(model: Any) -> Any:
    model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
    return Fsdp(model)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: torch.compile(model, backend="eager"),
        torch.nn.DataParallel,  # `module.`, as DistributedDataParallel
        Fsdp,
        lambda model: torch.compile(torch.nn.DataParallel(Fsdp(model)), backend="eager"),
        compile_layers,
    ],
)
def test_a_wrapper_does_not_change_the_model(wrap: Callable[[Any], Any]) -> None:
    model = tiny_model("llama")
    before = model_fingerprint(model)
    wrapped = wrap(model)
    assert [name for name, _ in wrapped.named_parameters()] != [
        name for name, _ in tiny_model("llama").named_parameters()
    ]
    assert model_fingerprint(wrapped) == before


def test_an_adapter_that_is_not_merged_is_part_of_the_model() -> None:
    """Of each of these models the cache is another one, and so must the fingerprint be."""
    peft = pytest.importorskip("peft")

    def tuned(alpha: int = 8) -> Any:
        torch.manual_seed(1)
        kind = peft.LoraConfig(r=4, lora_alpha=alpha, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return peft.get_peft_model(tiny_model("llama"), kind)

    model = tuned()
    found = {"base": model_fingerprint(tiny_model("llama")), "adapted": model_fingerprint(model)}
    with model.disable_adapter():
        found["disabled"] = model_fingerprint(model)
    model.add_adapter("other", peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    found["two"] = model_fingerprint(model)
    model.set_adapter("other")
    found["the other"] = model_fingerprint(model)
    found["scaled"] = model_fingerprint(tuned(alpha=16))
    merged = tuned().merge_and_unload()
    found["merged"] = model_fingerprint(merged)
    assert len(set(found.values())) == len(found), found
    assert model_fingerprint(tuned()) == found["adapted"]
    compiled: Any = torch.compile(tuned(), backend="eager")
    assert model_fingerprint(compiled) == found["adapted"]
    inner = tuned()
    assert model_fingerprint(inner.base_model.model) == found["adapted"], "the same without PEFT's outer classes"


# Kimi K2's own configuration, with fewer layers. Its code, which must not be run, is absent.
KIMI_K2: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
    "aux_loss_alpha": 0.001, "bos_token_id": 163584, "eos_token_id": 163585, "first_k_dense_replace": 1,
    "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432,
    "kv_lora_rank": 512, "max_position_embeddings": 131072, "model_type": "kimi_k2", "moe_intermediate_size": 2048,
    "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 384, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 3, "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0, "pretraining_tp": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "seq_aux": True,
    "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
    "transformers_version": "4.48.3", "use_cache": True, "v_head_dim": 128, "vocab_size": 163840,
}  # fmt: skip


def test_kimi_k2_is_read_as_deepseek_v3_without_its_code(tmp_path: Path) -> None:
    def layout(entries: dict[str, Any]) -> KVLayout:
        (tmp_path / "config.json").write_text(json.dumps(entries))
        return read_layout(str(tmp_path), None)

    found = layout(KIMI_K2)
    assert (found.model_type, found.dtype, found.num_layers) == ("deepseek_v3", "bfloat16", 3)
    assert found.max_positions == 131072
    layer = found.layers[0]
    assert (layer.kv_heads, layer.head_dim, layer.value_dim) == (1, 64, 512)
    without_code = {name: value for name, value in KIMI_K2.items() if name != "auto_map"}
    assert layout({**without_code, "model_type": "deepseek_v3"}).fingerprint == found.fingerprint
    changed = layout({**KIMI_K2, "rope_theta": 10000.0})
    assert changed.fingerprint != found.fingerprint
    (tmp_path / "config.json").write_text(json.dumps(KIMI_K2))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert weight_fingerprints(tmp_path).unknown == "the checkpoint is quantized"

    class Theirs(transformers.DeepseekV3Config):
        """What Kimi K2's code makes of it, and an engine that trusts the code hands over."""

        model_type = "kimi_k2"

    entries = {name: value for name, value in KIMI_K2.items() if name != "model_type"}
    assert KVLayout.from_config(Theirs(**entries), "bfloat16").fingerprint == found.fingerprint


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["KimiLinearForCausalLM"]}, r"^kimi_k2: must have architectures \['Deepseek.*KimiLinear"),
        ({"architectures": None}, "^kimi_k2: must have architectures .*got None"),
        ({"kv_lora_rank": None}, "^kimi_k2: must have kv_lora_rank, as DeepSeek-V3 does, got None"),
        ({"num_hidden_layers": 0}, "^kimi_k2: must have num_hidden_layers, .*got 0"),
        ({"index_topk": 2048}, "^kimi_k2: must have no other entries than DeepSeek-V3 has, got index_topk"),
    ],
)
def test_what_is_not_deepseek_v3_is_not_read_as_such(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**KIMI_K2, **changes}))
    with pytest.raises(UnsupportedModelError, match=message):
        read_layout(str(tmp_path), None)


def test_code_beside_a_checkpoint_is_not_run_and_nobody_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers asks on the terminal, unless it is told that the code is not trusted."""
    asked: list[object] = []

    def answer(question: object) -> str:
        asked.append(question)
        return "y"

    monkeypatch.setattr("builtins.input", answer)
    (tmp_path / "config.json").write_text(
        json.dumps({**KIMI_K2, "model_type": "unheard_of", "auto_map": {"AutoConfig": "code.Config"}})
    )
    (tmp_path / "code.py").write_text("raise SystemExit('run')")
    with pytest.raises(InputError, match="with a configuration that transformers reads"):
        read_layout(str(tmp_path), None)
    assert not asked


def test_the_fingerprint_of_a_large_tensor() -> None:
    """More than 2**24 values: float32 does not hold the last position."""
    one = torch.nn.Linear(4099, 4096, bias=False, device="meta").to_empty(device="cpu").to(torch.bfloat16)
    with torch.no_grad():
        one.weight.zero_()
        before = model_fingerprint(one)  # type: ignore[arg-type]
        one.weight[-1, -1] = 1
    assert model_fingerprint(one) != before  # type: ignore[arg-type]
