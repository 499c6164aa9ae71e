"""The token store: tokens on disk, as Megatron-LM's memory-mapped `.bin`/`.idx` pairs.

    with ShardWriter(folder, "train", dtype_for(vocab_size)) as shard:
        shard.add(tokens, lengths)
        record = shard.finish()
    store = TokenStore.open(folder, "train")
    window = store.read(start=0, length=257)

The format is the one of `megatron.core.datasets.indexed_dataset` (`_IndexWriter`, `_IndexReader`), which Megatron-LM,
NeMo and NxD Training read. `.bin` is the token ids of all documents, one after another, little-endian. `.idx` is:

    9 bytes            b"MMIDIDX\\0\\0"
    uint64             version, 1
    uint8              dtype of `.bin`: 4 int32, 8 uint16 (Megatron's `DType` enum)
    uint64             S, number of sequences
    uint64             D + 1, number of document boundaries
    int32[S]           tokens of each sequence
    int64[S]           byte offset of each sequence in `.bin`
    int64[D + 1]       first sequence of each document, and S

Here a sequence is a document (S = D). This module needs numpy alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from training.errors import UserError

SPLITS = ("train", "valid")
MANIFEST = "manifest.json"
TEMPORARY = ".tmp"  # ends the name of every file that is not whole yet

_HEADER = b"MMIDIDX\x00\x00"
_DTYPE_CODES = {"int32": 4, "uint16": 8}
_UINT16_LIMIT = 65_500  # Megatron's `DType.optimal_dtype`: uint16 below this vocabulary size


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """The narrowest dtype of the format that holds ids below `vocab_size`."""
    return np.dtype("<u2") if vocab_size < _UINT16_LIMIT else np.dtype("<i4")


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that `path` is either absent, what it was before, or whole."""
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(value, file, indent=1, ensure_ascii=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class ShardWriter:
    """Streams one `.bin/.idx` pair to disk; neither name exists before `finish`.

    Holds four bytes of memory per document and no tokens. Leaving the `with` block without `finish` removes the
    temporary files.
    """

    def __init__(self, folder: Path, name: str, dtype: np.dtype[Any]) -> None:
        self.folder, self.name, self.dtype = folder, name, dtype
        self._bin = folder / f"{name}.bin{TEMPORARY}"
        self._idx = folder / f"{name}.idx{TEMPORARY}"
        self._file = self._bin.open("wb")
        self._sha256 = hashlib.sha256()
        self._lengths: list[npt.NDArray[np.int32]] = []

    def add(self, tokens: npt.NDArray[Any], lengths: npt.NDArray[np.integer[Any]]) -> None:
        """Append documents: `tokens` is their ids end to end, `lengths` the tokens of each (sums to `len(tokens)`)."""
        assert int(lengths.sum()) == len(tokens)
        data = np.ascontiguousarray(tokens, self.dtype).view(np.uint8).data
        self._sha256.update(data)
        self._file.write(data)
        self._lengths.append(lengths.astype(np.int32))

    def finish(self) -> dict[str, Any] | None:
        """Give the files their names; returns the shard's record, or None when there is not one document.

        An empty pair is not written: Megatron cannot map an empty `.bin`.
        """
        lengths = np.concatenate([np.empty(0, np.int32), *self._lengths])
        if not len(lengths):
            self._discard()
            return None
        self._sync(self._file)
        ends = np.cumsum(lengths, dtype=np.int64)
        parts = [
            _HEADER + struct.pack("<QBQQ", 1, _DTYPE_CODES[self.dtype.name], len(lengths), len(lengths) + 1),
            lengths.astype("<i4").tobytes(),
            ((ends - lengths) * self.dtype.itemsize).astype("<i8").tobytes(),
            np.arange(len(lengths) + 1, dtype="<i8").tobytes(),
        ]
        index_sha256 = hashlib.sha256()
        with self._idx.open("wb") as file:
            for part in parts:
                index_sha256.update(part)
                file.write(part)
            self._sync(file)
        os.replace(self._bin, self.folder / f"{self.name}.bin")
        os.replace(self._idx, self.folder / f"{self.name}.idx")
        sync_folder(self.folder)
        return {
            "name": self.name,
            "documents": len(lengths),
            "tokens": int(ends[-1]),
            "bin": {"bytes": int(ends[-1]) * self.dtype.itemsize, "sha256": self._sha256.hexdigest()},
            "idx": {"bytes": sum(map(len, parts)), "sha256": index_sha256.hexdigest()},
        }

    @staticmethod
    def _sync(file: Any) -> None:
        file.flush()
        os.fsync(file.fileno())
        file.close()

    def _discard(self) -> None:
        with contextlib.suppress(OSError):  # closing flushes, which a full disk refuses
            self._file.close()
        self._bin.unlink(missing_ok=True)
        self._idx.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._discard()


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The store's manifest, or None when there is none. `UserError` when it is not one of ours."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}), expected the manifest that `prepare` writes") from None
    if not isinstance(manifest, dict) or not all(split in manifest.get("splits", {}) for split in SPLITS):
        raise UserError(f"{path}: not a manifest of a token store, expected the one that `prepare` writes")
    return manifest


def damaged_file(folder: Path, shards: list[dict[str, Any]]) -> str | None:
    """What is wrong with the first file of `shards` that is missing or of another size; None when all are right."""
    for shard in shards:
        for kind in ("bin", "idx"):
            path, expected = folder / f"{shard['name']}.{kind}", shard[kind]["bytes"]
            size = path.stat().st_size if path.exists() else None
            if size is None:
                return f"{path}: missing, expected {expected} bytes"
            if size != expected:
                return f"{path}: {size} bytes, expected {expected}"
    return None


class TokenStore:
    """One split of a store as one long stream of tokens, read through memory maps.

    `num_tokens`, `num_documents` (ints), `manifest` (the whole store's). Opening and reading take O(shards) and
    O(length) memory, whatever the size of the store.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], split: str) -> None:
        part = manifest["splits"][split]
        self.manifest = manifest
        self.num_tokens: int = part["tokens"]
        self.num_documents: int = part["documents"]
        self.dtype = np.dtype(manifest["dtype"]).newbyteorder("<")
        self._maps = [np.memmap(folder / f"{s['name']}.bin", dtype=self.dtype, mode="r") for s in part["shards"]]
        self._starts = np.cumsum([0, *(s["tokens"] for s in part["shards"])])  # of each shard, and num_tokens

    @classmethod
    def open(cls, data_dir: Path, split: str) -> TokenStore:
        """The split ("train" or "valid") of the store in `data_dir`; a split may have no tokens.

        `UserError` when the store is not there, not whole, or a file's size is not the manifest's.
        """
        assert split in SPLITS
        manifest = read_manifest(data_dir)
        if manifest is None:
            raise UserError(f"{data_dir / MANIFEST}: not found, expected a prepared token store: run `prepare` first")
        problem = damaged_file(data_dir, manifest["splits"][split]["shards"])
        if problem is not None:
            raise UserError(f"{problem}: run `prepare` again")
        return cls(data_dir, manifest, split)

    def read(self, start: int, length: int) -> npt.NDArray[Any]:
        """Tokens `start` to `start + length` of the stream, across documents and shards: a copy, shape (length,)."""
        assert 0 <= start <= start + length <= self.num_tokens, (start, length, self.num_tokens)
        tokens = np.empty(length, self.dtype)
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        done = 0
        while done < length:
            offset = start + done - int(self._starts[shard])
            count = min(length - done, int(self._starts[shard + 1] - self._starts[shard]) - offset)
            tokens[done : done + count] = self._maps[shard][offset : offset + count]
            done, shard = done + count, shard + 1
        return tokens
