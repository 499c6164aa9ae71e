"""Where the text comes from: files cut into shards, and read in batches of a few MiB.

    source = open_source(settings.data, files=None)     # `text:`, `jsonl:` and `parquet:` name their files by a glob
    for batch in source.read(source.shards[0]):
        batch.texts, batch.skipped

A file is a row of units: 1 MiB of a text or JSONL file, a row group of a Parquet file, the whole of a compressed
file. A shard is a run of units with about `data.shard_mb` of file, so the cut is a function of the names and sizes of
the files alone; what a document is never depends on the cut:

- JSONL: a line belongs to the unit in which its first byte lies.
- text: a file is a document, and a file of more than 1 MiB (one unit) is split into documents of about 1 MiB: after
  the first blank line of each unit, else after its first line end, else at its first character.
"""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from training.config import Data
from training.data.readers import BATCH, MIB, UNIT, Batch, Piece, Reader, is_compressed, open_parquet
from training.errors import UserError


@dataclass(frozen=True)
class Source:
    """Files of one kind ("text", "jsonl", "parquet") and how they are read; plain values, so that it can be sent."""

    kind: str
    files: list[str]
    text_key: str
    skip_bad: bool
    shard_bytes: int

    @cached_property
    def _units(self) -> list[list[int]]:
        """Bytes of each unit of each file."""
        return [_units(self.kind, path) for path in self.files]

    @cached_property
    def num_bytes(self) -> int:
        """Size of all units."""
        return sum(map(sum, self._units))

    @cached_property
    def shards(self) -> list[list[Piece]]:
        """The pieces of each shard, in the order of the files; one shard at least."""
        shards: list[list[Piece]] = [[]]
        filled = 0
        for path, sizes in zip(self.files, self._units, strict=True):
            start = 0
            for unit, size in enumerate(sizes):
                if filled and filled + size > self.shard_bytes:
                    if unit > start:
                        shards[-1].append(Piece(path, start, unit))
                    shards.append([])
                    start, filled = unit, 0
                filled += size
            if len(sizes) > start:
                shards[-1].append(Piece(path, start, len(sizes)))
        return shards

    def sample_pieces(self, max_bytes: int) -> list[Piece]:
        """Single units, evenly spaced over the source, of about `max_bytes` together (all units if they are fewer)."""
        units = [(p, n, s) for p, sizes in zip(self.files, self._units, strict=True) for n, s in enumerate(sizes)]
        count = max(1, min(len(units), len(units) * max_bytes // max(1, self.num_bytes)))
        chosen = [units[len(units) * i // count] for i in range(count)] if units else []
        return [Piece(path, unit, unit + 1) for path, unit, _ in chosen]

    def fingerprint(self) -> str:
        """A digest of the files' names, sizes and times: whether shards made earlier are of this input."""
        stats = [(path, Path(path).stat()) for path in self.files]
        names = json.dumps([(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats])
        return hashlib.sha256(names.encode()).hexdigest()

    def piece_bytes(self, pieces: list[Piece]) -> int:
        """Size of `pieces`."""
        sizes = dict(zip(self.files, self._units, strict=True))
        return sum(sum(sizes[piece.path][piece.start : piece.end]) for piece in pieces)

    def read(self, pieces: list[Piece]) -> Iterator[Batch]:
        """The documents of `pieces` in batches of about `BATCH` bytes (a longer document is a batch of its own).

        `UserError` naming file and line (row, byte) of the first record that cannot be read, unless `skip_bad`.
        """
        reader = Reader(self.text_key, self.skip_bad)
        read_piece = {"text": reader.text, "jsonl": reader.jsonl, "parquet": reader.parquet}[self.kind]
        texts: list[str] = []
        size = skipped = 0
        for piece in pieces:
            for batch in read_piece(piece):  # pieces of small files make small batches: gather them
                texts += batch.texts
                skipped += batch.skipped
                size += sum(map(len, batch.texts))
                if size >= BATCH or len(texts) >= 65_536:
                    yield Batch(texts, skipped)
                    texts, size, skipped = [], 0, 0
        if texts or skipped:
            yield Batch(texts, skipped)


def open_source(data: Data, files: list[str] | None = None) -> Source:
    """The source that `data.source` names; `files` are the JSONL files to read where it names none itself (spool.py).

    `UserError` when its pattern matches no file.
    """
    if files is not None:
        return Source("jsonl", files, "text", data.skip_bad, data.shard_mb * MIB)
    kind, _, pattern = data.source.partition(":")
    found = [Path(name) for name in glob.glob(pattern, recursive=True)]
    files = sorted(str(path.resolve()) for path in found if path.is_file())
    if not files:
        raise UserError(f"data.source: {data.source} matches no file, expected {kind}:GLOB with files to read")
    return Source(kind, files, data.text_key, data.skip_bad, data.shard_mb * MIB)


def _units(kind: str, path: str) -> list[int]:
    if kind == "parquet":
        with open_parquet(path) as file:
            groups = range(file.metadata.num_row_groups)
            return [file.metadata.row_group(group).total_byte_size for group in groups]
    size = Path(path).stat().st_size
    if kind == "jsonl" and is_compressed(path):
        return [size]
    return [min(UNIT, size - start) for start in range(0, size, UNIT)]
