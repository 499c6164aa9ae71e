"""The token store: what is written is what Megatron and our own reader read, and nothing half-written is left."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.data.store import ShardWriter, TokenStore, dtype_for, write_json
from training.errors import UserError

documents = st.lists(st.lists(st.integers(0, 65_499), max_size=20), max_size=12)


def write_store(folder: Path, shards: list[list[list[int]]], vocab_size: int = 65_499) -> dict[str, Any]:
    """A store with `shards` as its training split and no validation split."""
    records = []
    for number, shard in enumerate(shards):
        with ShardWriter(folder, f"train-{number:05d}", dtype_for(vocab_size)) as writer:
            for half in (shard[: len(shard) // 2], shard[len(shard) // 2 :]):  # two batches
                tokens = np.array([t for document in half for t in document], np.int64)
                writer.add(tokens, np.array([len(document) for document in half], np.int64))
            records.append(writer.finish())
    kept = [record for record in records if record]
    splits = {
        "train": {
            "documents": sum(r["documents"] for r in kept),
            "tokens": sum(r["tokens"] for r in kept),
            "shards": kept,
        },
        "valid": {"documents": 0, "tokens": 0, "shards": []},
    }
    manifest = {"dtype": dtype_for(vocab_size).name, "splits": splits}
    write_json(folder / "manifest.json", manifest)
    return manifest


@settings(max_examples=40, deadline=None)
@given(shards=st.lists(documents.filter(lambda ds: any(ds)), max_size=4), wide=st.booleans(), data=st.data())
def test_what_is_written_is_read(tmp_path_factory: Any, shards: Any, wide: bool, data: Any) -> None:
    folder = tmp_path_factory.mktemp("store")
    write_store(folder, shards, 128_000 if wide else 65_499)
    store = TokenStore.open(folder, "train")
    flat = [token for shard in shards for document in shard for token in document]
    assert (store.num_tokens, store.num_documents) == (len(flat), sum(map(len, shards)))
    start = data.draw(st.integers(0, len(flat)))
    length = data.draw(st.integers(0, len(flat) - start))
    window = store.read(start, length)
    assert window.dtype == (np.int32 if wide else np.uint16)
    assert window.tolist() == flat[start : start + length]
    with pytest.raises(AssertionError):
        store.read(start, len(flat) - start + 1)


@pytest.mark.parametrize("vocab_size", [300, 65_499, 65_500, 128_256])
def test_megatron_reads_it(tmp_path: Path, vocab_size: int) -> None:
    from megatron.core.datasets.indexed_dataset import DType, IndexedDataset

    assert dtype_for(vocab_size) == DType.optimal_dtype(vocab_size)
    shard = [[1, 2, 299], [7], [], [vocab_size - 1] * 5]
    write_store(tmp_path, [shard], vocab_size)
    dataset = IndexedDataset(str(tmp_path / "train-00000"))
    assert [dataset[i].tolist() for i in range(len(dataset))] == shard
    assert dataset.document_indices.tolist() == [0, 1, 2, 3, 4]


def test_reading_copies(tmp_path: Path) -> None:
    write_store(tmp_path, [[[1, 2, 3]]])
    store = TokenStore.open(tmp_path, "train")
    store.read(0, 3)[:] = 9
    assert store.read(0, 3).tolist() == [1, 2, 3]


def test_an_unfinished_shard_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), ShardWriter(tmp_path, "train", dtype_for(300)) as writer:
        writer.add(np.array([1, 2]), np.array([2]))
        assert [p.name for p in tmp_path.iterdir()] == ["train.bin.tmp"]
        raise RuntimeError
    assert not list(tmp_path.iterdir())


def test_an_empty_shard_is_not_written(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, "valid", dtype_for(300)) as writer:
        assert writer.finish() is None
    assert not list(tmp_path.iterdir())


def test_a_failed_write_keeps_the_old_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(tmp_path / "a.json", {"old": 1})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_json(tmp_path / "a.json", {"new": 1})
    assert json.loads((tmp_path / "a.json").read_text()) == {"old": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_opening_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="run `prepare` first"):
        TokenStore.open(tmp_path, "train")
    write_store(tmp_path, [[[1, 2, 3]], [[4]]])
    with (tmp_path / "train-00001.bin").open("ab") as file:
        file.write(b"x")
    with pytest.raises(UserError, match=r"train-00001\.bin: 3 bytes, expected 2"):
        TokenStore.open(tmp_path, "train")
    (tmp_path / "train-00000.idx").unlink()
    with pytest.raises(UserError, match=r"train-00000\.idx: missing"):
        TokenStore.open(tmp_path, "train")
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="manifest.json: cannot be read"):
        TokenStore.open(tmp_path, "train")
    (tmp_path / "manifest.json").write_text("[]")
    with pytest.raises(UserError, match="not a manifest"):
        TokenStore.open(tmp_path, "train")
