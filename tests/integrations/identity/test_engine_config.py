"""Which options of an engine are part of the identity of its caches."""

from __future__ import annotations

import copy
import dataclasses
import enum
import fnmatch
import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import huggingface_hub
import pytest
import torch
from tests.integrations.vllm.engines import need_vllm
from transformers import LlamaConfig

from cuvee.calibration.bundled import bundled_model_path
from cuvee.codec.errors import InputError, UnsupportedModelError
from cuvee.integrations.identity.engine_config import SGLANG, VLLM, set_options, sglang_options, vllm_options
from cuvee.integrations.identity.engine_environment import VLLM_VARIABLES


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


@dataclass
class Inner:
    depth: int = 3
    port: int = 0


@dataclass
class Outer:
    kind: Kind = Kind.ONE
    dtype: Any = "auto"
    names: Any = None
    inner: Inner = field(default_factory=Inner)
    path: str = "a"
    required: Any = field(kw_only=True)


LISTED = {"Inner": {"an address": "port"}}


def options(named: bool = False, **changes: Any) -> dict[str, Any]:
    return set_options(Outer(**{"required": 0, **changes}), LISTED, {}, named=named)


def test_options_that_differ_from_their_defaults_belong_to_the_identity() -> None:
    plain = {"required": 0}
    assert options() == plain, "what has no default"
    assert options(inner=Inner(port=7)) == plain, "it is listed"
    values: list[dict[str, Any]] = [
        {"kind": Kind.TWO}, {"dtype": torch.bfloat16}, {"dtype": "torch.bfloat16x"}, {"names": ["a", "b"]},
        {"names": ["b", "a"]}, {"names": {"a": 1}}, {"names": {"a": True}}, {"names": {1: "a"}}, {"names": {"1": "a"}},
        {"names": {"a", "b"}}, {"names": b"a"}, {"names": 1}, {"names": 1.0}, {"names": True}, {"names": int},
        {"names": Path("x")}, {"names": Inner()}, {"names": Inner(depth=4)}, {"inner": Inner(depth=4)}, {"path": "b"},
        {"names": LlamaConfig(vocab_size=7)}, {"names": LlamaConfig(vocab_size=8)}, {"required": 1},
    ]  # fmt: skip
    found = [written(options(**each)) for each in values]
    silent = [each for each, said in zip(values, found, strict=True) if said == written(plain)]
    assert silent == [{"names": Inner()}], "a record with its defaults says nothing"
    assert len(set(found)) == len(found)
    assert options(names={"b", "a"}) == options(names={"a", "b"})
    assert options(names={"b": 1, "a": 2}) == options(names={"a": 2, "b": 1})
    volatile = LlamaConfig(vocab_size=7)
    volatile._name_or_path = "/elsewhere"
    assert options(names=volatile) == options(names=LlamaConfig(vocab_size=7)), "copies are found at other paths"


def test_what_a_later_version_adds_belongs_to_the_identity_once_it_is_set() -> None:
    later = make_dataclass("Inner", [("depth", int, 3), ("port", int, 0), ("new", bool, False)])
    assert set_options(later(port=1), LISTED, {}) == {}
    assert set_options(later(new=True), LISTED, {}) == {"new": True}


@pytest.mark.parametrize(
    "value", [lambda: 0, object(), [object()], {"a": print}, torch.nn.Linear(1, 1), Inner.__init__]
)
def test_a_value_that_processes_write_differently_is_refused(value: Any) -> None:
    with pytest.raises(InputError, match=r"^names: must be a value .* set option 'model_id'"):
        options(names=value)
    with pytest.raises(InputError, match=r"^inner\.depth: must"):
        options(inner=Inner(depth=value))
    assert options(named=True, names=value, path="b") == {"required": 0, "path": "b"}, "the user answers for it"


# vLLM ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vllm() -> Any:
    """vLLM's configuration of a model that reads images and serves adapters."""
    need_vllm()
    from tests.integrations.vllm_tier.real_tiers import engine_config, real

    made = copy.deepcopy(engine_config())
    made.lora_config = real("vllm.config").LoRAConfig(lora_dtype=made.model_config.dtype)
    made.model_config.multimodal_config = real("vllm.config").MultiModalConfig()
    return made


def records(config: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """The records inside a configuration, by their places; none inside what is listed as a whole."""
    yield where, config
    listed = _listed(config)
    for each in dataclasses.fields(config):
        value = getattr(config, each.name, None)
        if dataclasses.is_dataclass(value) and not hasattr(value, "to_dict") and each.name not in listed:
            yield from records(value, f"{where}{each.name}.")


def _listed(record: Any, lists: Any = VLLM) -> set[str]:
    return {name for names in lists.get(type(record).__name__, {}).values() for name in names.split()}


def another(value: Any, kind: Any, dice: random.Random) -> Any:
    """A value that an option may have, other than this one."""
    choices = [each for part in (kind, *get_args(kind)) for each in get_args(part) if isinstance(each, str | int)]
    choices = [each for each in choices if each != value]
    if isinstance(value, bool):
        return not value
    if isinstance(value, enum.Enum):
        return dice.choice([each for each in type(value) if each is not value])
    if choices:
        return dice.choice(choices)
    if isinstance(value, int | float):
        return value + dice.randint(1, 9)
    if isinstance(value, list | tuple):
        return [*value, f"x{dice.random()}"]
    if isinstance(value, dict):
        return {**value, f"x{dice.random()}": dice.random()}
    return f"{value or ''}x{dice.random()}"


# Their readers want a file, or compare them with another option: they have tests of their own.
READ = {
    "dtype", "hf_config_path", "max_model_len", "mm_encoder_fp8_scale_path", "lora_dtype", "worker_cls", "load_format",
    "hf_overrides", "model_loader_extra_config",
}  # fmt: skip


def written(options: Any) -> str:
    return json.dumps(options, sort_keys=True)


def test_every_option_of_vllm_changes_the_identity_unless_it_is_listed(vllm: Any) -> None:
    dice, plain = random.Random(0), written(vllm_options(vllm))
    drawn, wrong = {True: 0, False: 0}, []
    for where, record in records(vllm):
        for each in dataclasses.fields(record):
            value = getattr(record, each.name, None)
            if each.name in READ or (dataclasses.is_dataclass(value) and each.name not in _listed(record)):
                continue
            listed = each.name in _listed(record)
            object.__setattr__(record, each.name, another(value, each.type, dice))
            try:
                changed = written(vllm_options(vllm)) != plain
            finally:
                object.__setattr__(record, each.name, value)
            drawn[listed] += 1
            if changed is listed:
                wrong.append(f"{where}{each.name} is {'' if listed else 'not '}listed")
    assert not wrong
    assert drawn[True] > 150 and drawn[False] > 50


def test_the_lists_name_options_that_there_are(vllm: Any) -> None:
    """Of the version that they were written for."""
    from tests.integrations.vllm_tier.real_tiers import real

    if not real("vllm").__version__.startswith("0.32."):
        pytest.skip("another version of vLLM")
    config = real("vllm.config")
    for name in VLLM:
        fields = {each.name for each in dataclasses.fields(getattr(config, name))}
        unknown = _listed(object.__new__(getattr(config, name))) - fields
        assert not unknown, name


def test_a_plain_engine_has_the_identity_of_its_checkpoint(vllm: Any) -> None:
    from tests.integrations.vllm_tier.real_tiers import engine_config

    assert vllm_options(engine_config()) == vllm_options(vllm) == {}


def test_a_configuration_from_elsewhere_counts_by_its_content(vllm: Any, tmp_path: Path) -> None:
    model = vllm.model_config
    found = []
    for name, size in (("one", 1), ("two", 2), ("copy", 1)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"rms_norm_eps": size, "_name_or_path": name}))
        model.hf_config_path = str(tmp_path / name)
        found.append(vllm_options(vllm))
    model.hf_config_path = str(tmp_path / "none")
    with pytest.raises(InputError, match="model: must be a local folder"):
        vllm_options(vllm)
    model.hf_config_path = model.model
    assert vllm_options(vllm) == {}
    model.hf_config_path = None
    assert found[0] == found[2] != found[1] and found[0] != {}


def test_a_branch_of_code_counts_by_what_it_is_now(vllm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM resolves the other revisions, and hands this one on."""
    config, found = copy.deepcopy(vllm), []
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "org/code--modeling.A"}}))
    config.model_config.model, config.model_config.code_revision = str(tmp_path), "dev"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    base = tmp_path / "hub" / "models--org--code"
    for commit in ("1" * 40, "2" * 40):
        code = base / "snapshots" / commit / "modeling.py"
        code.parent.mkdir(parents=True)
        code.write_text(f"commit = {commit}")
        (base / "refs").mkdir(exist_ok=True)
        (base / "refs" / "dev").write_text(commit)
        found.append(vllm_options(config)["model_config"]["code_revision"])
    assert len({*found, "dev"}) == 3


@pytest.mark.parametrize("field", ["download_dir", "VLLM_USE_MODELSCOPE"])
def test_a_hub_id_whose_files_are_read_from_elsewhere_is_refused(
    vllm: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, field: str
) -> None:
    config = copy.deepcopy(vllm)
    if field == "download_dir":
        config.load_config.download_dir = str(tmp_path)
    else:
        monkeypatch.setenv(field, "True")
    vllm_options(config)  # of a folder
    config.model_config.model = "org/name"
    with pytest.raises(InputError, match=rf"^{field}: must not be set where the hub id org/name .*'model_id'"):
        vllm_options(config)
    vllm_options(config, named=True)


def test_codes_of_fp8_are_those_of_the_device(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """AMD's devices give one name to two kinds."""
    from vllm.platforms import current_platform

    config, found = copy.deepcopy(vllm), []
    config.cache_config.cache_dtype = "fp8_e4m3"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    for dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):
        monkeypatch.setattr(current_platform, "fp8_dtype", lambda dtype=dtype: dtype, raising=False)
        found.append(vllm_options(config))
    assert found[0] != found[1]
    config.cache_config.cache_dtype = "auto"
    assert vllm_options(config) == vllm_options(vllm)


def test_a_function_that_changes_the_configuration_counts_by_what_it_makes(vllm: Any) -> None:
    model = vllm.model_config
    plain = model.hf_config
    try:
        found = []
        for eps in (1.0, 2.0, 1.0):
            model.hf_overrides = lambda config: config
            model.hf_config = copy.deepcopy(plain)
            model.hf_config.rms_norm_eps = eps
            found.append(vllm_options(vllm))
        assert found[0] == found[2] != found[1] and found[0] != {}
        model.hf_config.helper = object()
        with pytest.raises(InputError, match=r"^model_config\.hf_overrides: .* an object of type object.*'model_id'"):
            vllm_options(vllm)
        assert vllm_options(vllm, named=True) == {}
        model.hf_overrides = {"rms_norm_eps": 1.0, "rope": {"factor": 2}}
        assert vllm_options(vllm) == {"model_config": {"hf_overrides": model.hf_overrides}}
    finally:
        model.hf_overrides, model.hf_config = {}, plain


def test_options_that_are_compared_with_others(vllm: Any, tmp_path: Path) -> None:
    def changed(record: Any, name: str, *values: Any) -> list[dict[str, Any]]:
        before, found = getattr(record, name), []
        for value in values:
            object.__setattr__(record, name, value)
            found.append(vllm_options(vllm))
        object.__setattr__(record, name, before)
        return found

    model = vllm.model_config
    assert changed(model, "max_model_len", 256) == [{}]
    rope = model.hf_text_config.rope_parameters
    model.hf_text_config.rope_parameters = {**rope, "rope_type": "longrope"}
    short, long = changed(model, "max_model_len", 4096, 131072)
    assert short != long, "vLLM chooses the factors by it"
    model.hf_text_config.rope_parameters = rope
    assert changed(vllm.lora_config, "lora_dtype", torch.float32) == [{"lora_config": {"lora_dtype": "torch.float32"}}]
    assert changed(vllm.parallel_config, "worker_cls", "vllm.v1.worker.gpu_worker.Worker") == [{}]
    assert changed(vllm.parallel_config, "worker_cls", "mine.Worker") != [{}]
    files = ("safetensors", "runai_streamer")
    assert changed(vllm.load_config, "load_format", *files) == [{}, {}]
    assert changed(vllm.load_config, "load_format", "sharded_state") != [{}]
    assert changed(vllm.load_config, "load_format", "dummy") == [{"dummy": model.seed}]
    scales = []
    for value in ("1", "2"):
        (tmp_path / "scales.json").write_text(value)
        scales += changed(model.multimodal_config, "mm_encoder_fp8_scale_path", str(tmp_path / "scales.json"))
    assert scales[0] != scales[1]
    with pytest.raises(InputError, match="must name files that can be read"):
        changed(model.multimodal_config, "mm_encoder_fp8_scale_path", str(tmp_path / "none"))
    model.multimodal_config.mm_encoder_fp8_scale_path = None


_SECRET = "hunter22"
_LOADERS: list[tuple[Any, bool]] = [  # options of a loader, and whether they change weights
    ({"concurrency": 16, "memory_limit": 5}, False),
    ({"s3_access_key_id": _SECRET, "s3_secret_access_key": _SECRET, "s3_endpoint": f"http://u:{_SECRET}@h"}, False),
    ({"tensorizer_config": {"s3_secret_access_key": _SECRET, "stream_kwargs": {"key": _SECRET}}}, False),
    ({"tensorizer_uri": f"s3://user:{_SECRET}@bucket/model.tensors"}, True),
    ({"tensorizer_config": {"tensorizer_uri": "s3://bucket/other.tensors"}}, True),
    ({"deserialization_kwargs": {"dtype": "float16"}}, True),
    ({"a_later_option": _SECRET}, True),
]


@pytest.mark.parametrize(("given", "counts"), _LOADERS)
def test_credentials_of_a_loader_are_neither_in_the_identity_nor_in_the_log(
    vllm: Any, given: dict[str, Any], counts: bool
) -> None:
    vllm.load_config.model_loader_extra_config = given
    try:
        found = vllm_options(vllm)
    finally:
        vllm.load_config.model_loader_extra_config = {}
    assert (found != {}) is counts and _SECRET not in written(found)


def test_another_password_loads_the_same_weights(vllm: Any) -> None:
    found = []
    for password in ("first", "second"):
        vllm.load_config.model_loader_extra_config = {"tensorizer_uri": f"s3://me:{password}@bucket/one"}
        found.append(vllm_options(vllm))
    vllm.load_config.model_loader_extra_config = {}
    assert found[0] == found[1] != {}


# Environment ---------------------------------------------------------------------------------------------------------

_VARIABLES = [  # name, value, and whether it counts
    ("VLLM_MARLIN_INPUT_DTYPE", "fp8", True), ("VLLM_ROCM_QUICK_REDUCE_QUANTIZATION", "INT4", True),
    ("VLLM_CPU_INT4_W4A8", "0", True), ("VLLM_MLA_DISABLE", "1", True),
    ("VLLM_OF_A_LATER_VERSION", _SECRET, True), ("VLLM_PLUGINS", "mine", True),
    ("VLLM_ROCM_QUICK_REDUCE_QUANTIZATION", "NONE", False), ("VLLM_MLA_DISABLE", "0", False),
    ("VLLM_LOGGING_LEVEL", "DEBUG", False), ("VLLM_API_KEY", _SECRET, False), ("HF_TOKEN", _SECRET, False),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "counts"), _VARIABLES)
def test_variables_that_change_values_belong_to_the_identity(
    vllm: Any, monkeypatch: pytest.MonkeyPatch, name: str, value: str, counts: bool
) -> None:
    plain = vllm_options(vllm)
    monkeypatch.setenv(name, value)
    found = vllm_options(vllm)
    assert (found != plain) is counts and value not in found.get("environment", {}).values()
    if counts:
        monkeypatch.setenv(name, value + "x")
        assert vllm_options(vllm) != found


def test_the_lists_name_variables_that_there_are(vllm: Any) -> None:
    from tests.integrations.vllm_tier.real_tiers import real

    if not real("vllm").__version__.startswith("0.32."):
        pytest.skip("another version of vLLM")
    known = [*real("vllm.envs").environment_variables, "VLLM_DIST_IDENT"]  # which vLLM sets for its own processes
    for pattern in " ".join(VLLM_VARIABLES.values()).split():
        assert fnmatch.filter(known, pattern), pattern


@pytest.mark.parametrize(
    ("name", "value", "counts"),
    [
        ("SGLANG_ROPE_CACHE_FP32", "1", True), ("SGLANG_ROPE_CACHE_FP32", "0", False),
        ("SGLANG_OF_A_LATER_VERSION", _SECRET, True), ("SGLANG_LOG_MS", "1", False), ("SGLANG_PORT", "1", False),
        ("AITER_FORCE_A8W4", "1", True), ("FLASHINFER_NVFP4_4OVER6", "0", False), ("AITER_LOG_LEVEL", "1", False),
    ],
)  # fmt: skip
def test_variables_of_sglang(
    server_args: Any, monkeypatch: pytest.MonkeyPatch, name: str, value: str, counts: bool
) -> None:
    made = server_args(model_path="folder")
    plain = sglang_options(made)
    monkeypatch.setenv(name, value)
    assert (sglang_options(made) != plain) is counts and _SECRET not in written(sglang_options(made))


# SGLang --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server_args() -> Iterator[Any]:
    pytest.importorskip("sglang")
    from tests.integrations.sglang.real_sglang import real

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("AITER_SITUV2_A4W4", raising=False)  # which vLLM sets for its own kernels
        yield real("sglang.srt.server_args").ServerArgs


_READ_SGLANG = {
    "trust_mm_content_hashes", "lora_paths", "json_model_override_args", "quantization_param_path", "random_seed",
    "load_format", "model_loader_extra_config", "uno_lora_path",
}  # fmt: skip


def test_every_option_of_sglang_changes_the_identity_unless_it_is_listed(server_args: Any) -> None:
    import msgspec

    dice, made = random.Random(0), server_args(model_path="folder")
    assert sglang_options(made) == {}
    listed, wrong = _listed(made, SGLANG), []
    names = {each.name for each in msgspec.structs.fields(server_args)}
    assert listed <= names, "those of the version that the list was written for"
    for name in names - _READ_SGLANG:
        value = getattr(made, name)
        changed = server_args(model_path="folder")
        msgspec.structs.force_setattr(changed, name, another(value, None, dice))
        if (sglang_options(changed) != {}) is (name in listed):
            wrong.append(name)
    assert not wrong


def test_images_that_clients_name_are_refused(server_args: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="--trust-mm-content-hashes"):
        sglang_options(server_args(model_path="folder", trust_mm_content_hashes=True))


def test_what_sglang_reads_from_files(server_args: Any, tmp_path: Path) -> None:
    import msgspec

    def found(**changes: Any) -> dict[str, Any]:
        made = server_args(model_path="folder")
        for name, value in changes.items():
            msgspec.structs.force_setattr(made, name, value)
        return sglang_options(made)

    assert found(json_model_override_args='{"a": 1}') == {"json_model_override_args": {"a": 1}}
    assert found(json_model_override_args='{ "a" : 1 }') == {"json_model_override_args": {"a": 1}}
    assert found(json_model_override_args="") == found(random_seed=1) == {}
    assert found(load_format="dummy", random_seed=1) != found(load_format="dummy", random_seed=2)
    adapter = tmp_path / "adapter"
    shutil.copytree(bundled_model_path(), adapter)
    as_text, as_object = found(lora_paths=[f"sql={adapter}"]), SimpleNamespace(lora_name="sql", lora_path=str(adapter))
    draft = found(uno_lora_path=str(adapter))
    assert draft == found(uno_lora_path=str(shutil.copytree(adapter, tmp_path / "copy"))) != {}
    assert as_text == found(lora_paths=[as_object]) == found(lora_paths={"sql": str(adapter)}) != {}
    (adapter / "config.json").write_text("{}")
    assert found(uno_lora_path=str(adapter)) != draft
    assert found(lora_paths=[f"sql={adapter}"]) != as_text, "SGLang names it by its path"
