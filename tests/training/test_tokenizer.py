"""Tokenizers: trained ones are deterministic, gigatoken is believed only where it is right, errors are one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, trainers

from training.config import Data
from training.data import tokenizer as module
from training.data.tokenizer import Encoder, TextTokenizer, choose_encoder, make_tokenizer, tokenizer_file_hash
from training.errors import UserError

TEXTS = [
    "The quick brown fox doesn't jump over 12345 lazy dogs.\n\n  Indented\ttext\r\n",
    "Größe, naïve café — 日本語のテキスト 🙂👍🏽 \u200b end ",
    "x" * 500 + "\n" * 7 + "    def f(self):  # 3.14159e-10",
    "a <|endoftext|> in the text",
    "'S 'LL I'M \u0130 ſ",
]


def sample(_: int) -> Iterator[str]:
    return iter(TEXTS * 20)


def trained(folder: Path, size: int = 400) -> TextTokenizer:
    return make_tokenizer(Data(tokenizer=f"train:{size}"), folder, sample)


def sentencepiece_like() -> str:
    """A BPE of Llama-2's kind: no pre-tokenizer, spaces as a letter, unknown characters as bytes."""
    special = ["<unk>", "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special + bytes_, max_token_length=12)
    tokenizer.train_from_iterator([" ".join(TEXTS[:1])] * 3, trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = content["added_tokens"][: len(special)]  # the bytes are letters, not special tokens
    return json.dumps(content)


def ids_of(tokenizer: TextTokenizer, name: str, texts: list[str]) -> list[list[int]]:
    ids, lengths = Encoder(tokenizer, name).encode(texts)
    return [row.tolist() for row in np.split(ids, np.cumsum(lengths)[:-1])]


def test_training_is_deterministic_and_whole(tmp_path: Path) -> None:
    one, two = trained(tmp_path / "a"), trained(tmp_path / "b")
    assert one == two
    assert one.vocab_size == 400
    assert one.eod_id == Tokenizer.from_str(one.json_text).token_to_id("<|endoftext|>")
    for row, text in zip(ids_of(one, "tokenizers", TEXTS[:3]), TEXTS[:3], strict=True):
        assert Tokenizer.from_str(one.json_text).decode(row) == text


def test_transformers_loads_what_is_saved(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = trained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    assert loaded.eos_token_id == tokenizer.eod_id
    assert loaded(TEXTS, add_special_tokens=False)["input_ids"] == ids_of(tokenizer, "tokenizers", TEXTS)


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_the_encoders_agree(tmp_path: Path, kind: str) -> None:
    if kind == "byte-level":
        tokenizer = trained(tmp_path)
    else:
        (tmp_path / "tokenizer.json").write_text(sentencepiece_like())
        tokenizer = make_tokenizer(Data(tokenizer=str(tmp_path)), tmp_path / "out", sample)
        assert tokenizer.eod_id == 2
    reference = Tokenizer.from_str(tokenizer.json_text)
    expected = [reference.encode(text, add_special_tokens=False).ids for text in TEXTS]
    assert ids_of(tokenizer, "tokenizers", TEXTS) == expected
    assert ids_of(tokenizer, "gigatoken", TEXTS) == expected
    assert choose_encoder(tokenizer, TEXTS)[0] == "gigatoken"


def test_nothing_gives_nothing(tmp_path: Path) -> None:
    tokenizer = trained(tmp_path)
    for name in ("tokenizers", "gigatoken"):
        ids, lengths = Encoder(tokenizer, name).encode([])
        assert len(ids) == len(lengths) == 0


def test_padding_and_truncation_of_a_loaded_tokenizer_are_off(tmp_path: Path) -> None:
    trained(tmp_path)
    padded = Tokenizer.from_file(str(tmp_path / "tokenizer" / "tokenizer.json"))
    padded.enable_padding(length=64)
    padded.enable_truncation(5)
    padded.save(str(tmp_path / "padded.json"))
    tokenizer = make_tokenizer(Data(tokenizer=str(tmp_path / "padded.json")), tmp_path / "out", sample)
    assert ids_of(tokenizer, "tokenizers", TEXTS) == ids_of(trained(tmp_path), "tokenizers", TEXTS)


def test_one_differing_id_means_tokenizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = trained(tmp_path)
    honest = Encoder.encode

    def wrong(self: Encoder, texts: list[str]) -> Any:
        ids, lengths = honest(self, texts)
        if self.name == "gigatoken":
            ids = ids.copy()
            ids[lengths[0]] += 1  # the first id of the second text
        return ids, lengths

    monkeypatch.setattr(Encoder, "encode", wrong)
    name, why = choose_encoder(tokenizer, TEXTS)
    assert name == "tokenizers"
    assert "Größe" in why


def test_without_gigatoken_tokenizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = trained(tmp_path)
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    module._gigatoken.cache_clear()
    assert choose_encoder(tokenizer, TEXTS) == ("tokenizers", "gigatoken is not installed")


def test_the_end_token_is_the_configs_then_a_usual_one(tmp_path: Path) -> None:
    json_text = trained(tmp_path / "a").json_text
    other = Tokenizer.from_str(json_text)
    other.add_special_tokens(["</end>"])
    for config, expected in (
        ({"eos_token": "</end>"}, "</end>"),
        ({"eos_token": {"content": "</end>"}}, "</end>"),
        ({}, "<|endoftext|>"),
        (None, "<|endoftext|>"),
        ({"eos_token": "nowhere"}, None),
    ):
        folder = tmp_path / f"{config}".replace("/", "")
        folder.mkdir()
        other.save(str(folder / "tokenizer.json"))
        if config is not None:
            (folder / "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer = make_tokenizer(Data(tokenizer=str(folder)), folder / "out", sample)
        assert tokenizer.eod_id == (other.token_to_id(expected) if expected else None)
        assert tokenizer.vocab_size == 401
        assert tokenizer_file_hash(str(folder)) == tokenizer.sha256


def test_what_cannot_be_loaded_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError

    (tmp_path / "broken.json").write_text('{"version": "1.0"}')
    (tmp_path / "empty").mkdir()

    def attempt(name: str) -> str:
        with pytest.raises(UserError) as caught:
            make_tokenizer(Data(tokenizer=name), tmp_path / "out", sample)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "out" / "tokenizer" / "tokenizer.json").exists()
        return str(caught.value)

    assert "broken.json cannot be loaded" in attempt(str(tmp_path / "broken.json"))
    assert "empty cannot be read" in attempt(str(tmp_path / "empty"))
    assert "is no file or folder" in attempt("./no/such/tokenizer.json")
    response = Mock(headers={}, status_code=403)
    for error, message in (
        (GatedRepoError("gated", response=response), "gated repository, expected HF_TOKEN"),
        (RepositoryNotFoundError("none", response=response), "is no file, folder or Hub repository"),
        (EntryNotFoundError("none"), "has no tokenizer.json"),
        (ConnectionError("no network"), "the Hub cannot be reached"),
    ):

        def fail(*_: Any, error: Exception = error, **__: Any) -> None:
            raise error

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
        assert message in attempt("org/name")


def test_a_whole_tokenizer_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = trained(tmp_path)
    monkeypatch.setattr(module, "_train", lambda *_: pytest.fail("trained again"))
    assert trained(tmp_path) == tokenizer
