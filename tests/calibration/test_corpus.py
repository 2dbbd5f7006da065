"""Models and texts by name, and the sequences cut from them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import BOS

from cuvee.calibration.bundled import bundled_model_path
from cuvee.calibration.corpus import (
    BUNDLED_MODEL,
    Corpus,
    learning_dtype,
    load_config,
    load_model,
    load_tokenizer,
    model_path,
    read_corpus,
    sequences_by_text,
    spread_sequences,
)
from cuvee.codec.errors import InputError, UnsupportedModelError


def corpus(*lengths: int) -> Corpus:
    """Documents without a token in common."""
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return Corpus(
        "numbers", "", tuple(torch.arange(end - length, end) for end, length in zip(ends, lengths, strict=True))
    )


def test_sequences_begin_as_the_tokenizer_begins_a_text(tmp_path: Path, with_bos: Any) -> None:
    model = tmp_path / "model"
    shutil.copytree(bundled_model_path(), model)
    with_bos.save_pretrained(model)
    plain, text = read_corpus("orchard", BUNDLED_MODEL), read_corpus("orchard", str(model))
    assert text.leading == (BOS,) and torch.equal(text.documents[0], plain.documents[0])
    rows = spread_sequences([text], 64, 5)
    assert rows.shape == (5, 64) and (rows[:, 0] == BOS).all()
    assert torch.equal(rows[0, 1:], plain.documents[0][:63])
    assert (rows[:, 1:] != BOS).all()
    # Token ids are taken as they are.
    (tmp_path / "ids.jsonl").write_text(json.dumps(list(range(40))) + "\n")
    ids = read_corpus(str(tmp_path / "ids.jsonl"), str(model))
    assert ids.leading == () and spread_sequences([ids], 40).tolist() == [list(range(40))]


def test_the_real_model_goes_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it is kept: its folder stands for the name."""
    fetched = []

    def path() -> Path:
        fetched.append(1)
        return bundled_model_path()

    monkeypatch.setattr("cuvee.calibration.corpus.smollm2_path", path)
    assert model_path("smollm2") == str(bundled_model_path())
    assert load_model("smollm2", "float32").config.model_type == "llama"
    assert read_corpus("orchard", "smollm2").sha256 == read_corpus("orchard", BUNDLED_MODEL).sha256
    assert len(fetched) == 3
    with pytest.raises(FileNotFoundError, match="no such model folder"):
        load_model("./smollm2")


def test_files_are_read_by_their_suffix(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("The wind rose.")
    rose = " rose.\N{LINE SEPARATOR}"  # which JSON may hold as it is, and which ends no line
    lines = [{"text": "The wind"}, [1, 2, 3], {"input_ids": [4]}, rose]
    (tmp_path / "b.jsonl").write_text("\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines))
    tokenizer = load_tokenizer(BUNDLED_MODEL)
    (one,) = read_corpus(str(tmp_path / "a.txt"), BUNDLED_MODEL).documents
    assert one.tolist() == tokenizer("The wind rose.").input_ids
    many = [d.tolist() for d in read_corpus(str(tmp_path / "b.jsonl"), BUNDLED_MODEL).documents]
    assert many == [tokenizer("The wind").input_ids, [1, 2, 3], [4], tokenizer(rose).input_ids]


def test_padding_and_marks_are_no_text(tmp_path: Path, with_bos: Any) -> None:
    model = tmp_path / "model"
    shutil.copytree(bundled_model_path(), model)
    with_bos.save_pretrained(model)
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"input_ids": [0, 0, 5, 6, 7], "attention_mask": [0, 0, 1, 1, 1]}))
    assert read_corpus(str(path), BUNDLED_MODEL).documents[0].tolist() == [5, 6, 7]
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"text": "A quiet harbour."}).encode())
    (expected,) = read_corpus(str(path), str(model)).documents
    path.write_text(json.dumps({"text": f"{with_bos.convert_ids_to_tokens(BOS)}A quiet harbour."}))  # as templates do
    (found,) = read_corpus(str(path), str(model)).documents
    assert BOS not in found.tolist() and torch.equal(found, expected)
    with path.open("a") as out:
        out.write("\n[5, 6]")  # so that every text keeps its BOS
    found, _ = read_corpus(str(path), str(model)).documents
    assert found.tolist() == [BOS, *expected.tolist()]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b'{"text": "\\ud83d abc"}', "got a text with half of a surrogate pair"),
        ("a.jsonl", b'{"input_ids": [5, 6], "attention_mask": [1]}', "a.jsonl:1: must hold"),
        ("a.jsonl", b'{"input_ids": [5, 6], "attention_mask": [1, 2]}', "a.jsonl:1: must hold"),
        ("a.jsonl", b"[1]\n{", "a.jsonl:2: must hold JSON, but"),
        ("a.jsonl", b'{"title": "x"}', "a.jsonl:1: must hold a list of token ids or an object with"),
        ("a.jsonl", b"[1, -2]", "a.jsonl:1: must hold a list of token ids"),
        ("a.jsonl", b"[true]", "a.jsonl:1: must hold a list of token ids"),
        ("a.json", b'[{"text": "abc"}]', "a.json: must be .jsonl"),
        ("A.JSONL", b"[5, x]", "A.JSONL:1: must hold JSON"),
        ("a.txt", b"\xff", "must be UTF-8 text"),
        (".", None, "must be a text file, got a folder"),
    ],
)
def test_what_is_no_document_is_refused(tmp_path: Path, name: str, data: bytes | None, message: str) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=message):
        read_corpus(str(tmp_path / name), BUNDLED_MODEL)


def test_the_digest_tells_documents_apart(tmp_path: Path) -> None:
    digests = set()
    for lines in ("[1, 2]\n[3]", "[1]\n[2, 3]", "[1, 2, 3]"):
        (tmp_path / "a.jsonl").write_text(lines)
        digests.add(read_corpus(str(tmp_path / "a.jsonl"), "").sha256)
    assert len(digests) == 3


def test_a_missing_text_or_model(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no such text file, nor a bundled text \(harbour, .*garrison\)"):
        read_corpus("nowhere", BUNDLED_MODEL)
    with pytest.raises(FileNotFoundError, match=r"no such model folder: .*nowhere"):
        load_model(str(tmp_path / "nowhere"))
    with pytest.raises(OSError, match=r"^smolm2 \(did you mean 'smollm2'\?\): "):
        load_config("smolm2")
    with pytest.raises(InputError, match=r"^device: must be a device that torch can use here, got 'abacus'"):
        load_model(BUNDLED_MODEL, device="abacus")


def test_an_unsupported_model_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(UnsupportedModelError, match="mamba"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "never-heard-of"}))
    with pytest.raises(InputError, match="never-heard-of"):
        load_model(str(tmp_path))


def test_sequences_are_disjoint_whole_and_spread() -> None:
    cut = spread_sequences([corpus(25, 7, 40)], 10, 3)
    assert cut[:, 0].tolist() == [0, 32, 52] and cut.shape == (3, 10)
    assert len(spread_sequences([corpus(25, 7, 40)], 10)) == 6
    assert len(spread_sequences([corpus(25, 7, 40)], 10, 99)) == 6
    with pytest.raises(InputError, match=r"^text: must hold at least 50 tokens in one document, got 40 in "):
        spread_sequences([corpus(25, 7, 40)], 50)
    with pytest.raises(InputError, match=r"got 0 in empty\.txt: give more"):
        spread_sequences([corpus(90), Corpus("empty.txt", "", ())], 50)


def test_every_text_gives_as_many_sequences_as_the_others() -> None:
    long, short = corpus(400), corpus(25)
    rows, texts = sequences_by_text([long, short, long], 10, 8)
    # The short one has two; the rest is shared, and spread over each text.
    assert texts == [0] * 3 + [1] * 2 + [2] * 3
    assert rows[:, 0].tolist() == [0, 130, 260, 0, 10, 0, 130, 260] and rows.shape == (8, 10)
    assert sequences_by_text([long, short], 10, 3)[1] == [0, 0, 1]
    for given in ([long, short], [short, corpus(29)]):  # a text that was given is not left out silently
        with pytest.raises(InputError, match=r"^text: must hold at least 30 tokens in one document, got 25 in "):
            sequences_by_text(given, 30, 4)


@pytest.mark.parametrize(
    ("own", "instructions", "pages", "chosen", "why"),
    [
        ("bfloat16", ("avx512_bf16",), 1 << 22, "bfloat16", "for which this CPU has instructions"),
        ("bfloat16", ("amx_bf16",), 1 << 22, "bfloat16", "for which this CPU has instructions"),
        ("bfloat16", (), 1 << 22, "float32", "this CPU has no instructions for bfloat16"),
        ("float16", ("avx512_bf16",), 1 << 22, "float32", "this CPU has no instructions for float16"),
        ("bfloat16", (), 2, "bfloat16", "since float32 takes 1 GB of 0 GB of memory"),
        ("float32", ("avx512_bf16",), 1 << 22, "auto", "that of its files"),
        ("small", ("avx512_bf16",), 1 << 22, "float32", "the model is small"),
    ],
)
def test_the_dtype_to_learn_in_goes_by_the_cpu(
    own: str, instructions: tuple[str, ...], pages: int, chosen: str, why: str, tmp_path: Path, monkeypatch: Any
) -> None:
    dtype, size = ("bfloat16", 500_000_000) if own == "small" else (own, 500_000_001)
    config = json.loads((bundled_model_path() / "config.json").read_text()) | {"dtype": dtype, "torch_dtype": dtype}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(size)  # of which nothing is written
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(instructions, True), raising=False)
    told = os.sysconf
    monkeypatch.setattr(os, "sysconf", lambda name: pages if name == "SC_PHYS_PAGES" else told(name))
    got, reason = learning_dtype(str(tmp_path))
    assert got == chosen and why in reason
    assert learning_dtype(str(tmp_path), "cuda") == ("auto", "that of its files")


def test_a_torch_that_tells_nothing_of_the_cpu_learns_in_float32(monkeypatch: Any) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert learning_dtype(BUNDLED_MODEL)[0] == "float32"
