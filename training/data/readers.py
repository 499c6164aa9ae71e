"""Documents out of a piece of a text, JSONL or Parquet file, and one clear line for what is none.

    for batch in Reader("text", skip_bad=False).jsonl(Piece("a.jsonl", start=0, end=3)):
        batch.texts, batch.skipped

What a piece is, and which documents belong to it, is said in sources.py.
"""

from __future__ import annotations

import gzip
import itertools
import mmap
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

from training.errors import UserError

MIB = 1 << 20
UNIT = MIB
BATCH = 2 * MIB  # text that is read, encoded and written at one time by one thread


@dataclass(frozen=True)
class Piece:
    """Units `start` to `end` of a file."""

    path: str
    start: int
    end: int


@dataclass(frozen=True)
class Batch:
    """Some documents in order, none of them empty, and how many records among them were skipped as unreadable."""

    texts: list[str]
    skipped: int = 0


@dataclass(frozen=True)
class Reader:
    """Reads pieces. The first record that cannot be read is a `UserError` naming file and place, unless `skip_bad`."""

    text_key: str
    skip_bad: bool

    def _bad(self, message: str) -> None:
        if not self.skip_bad:
            raise UserError(f"{message} (data.skip_bad counts such records and goes on)")

    def text(self, piece: Piece) -> Iterator[Batch]:
        """The documents of a piece of a text file."""
        with open(piece.path, "rb") as file:
            size = file.seek(0, 2)
            if not size:
                return
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                cuts = [_text_cut(data, unit * UNIT) for unit in range(piece.start, piece.end + 1)]
                for start, end in itertools.pairwise(cuts):
                    if end > start:
                        yield self._decode(piece.path, data[start:end], start)

    def _decode(self, path: str, data: bytes, offset: int) -> Batch:
        zero = data.find(b"\0")
        if zero >= 0:
            self._bad(f"{path}: a NUL byte at byte {offset + zero}, expected UTF-8 text")
            return Batch([], 1)
        try:
            return Batch([data.decode("utf-8")])
        except UnicodeDecodeError as error:
            self._bad(f"{path}: not UTF-8 at byte {offset + error.start}, expected UTF-8 text")
            return Batch([], 1)

    def jsonl(self, piece: Piece) -> Iterator[Batch]:
        """The texts of the lines of a piece of a JSONL file (.gz and .zst too)."""
        import msgspec

        record = msgspec.defstruct("Record", [("text", str, msgspec.field(name=self.text_key))])
        decoder: Any = msgspec.json.Decoder(record)
        with _open_lines(piece) as file:
            for offset, data in _line_blocks(file, piece):
                lines = data.count(b"\n") + (not data.endswith(b"\n"))
                try:
                    records = decoder.decode_lines(data)
                    plain = len(records) == lines  # else blank lines, or a line with two values
                except (msgspec.DecodeError, UnicodeDecodeError):
                    plain = False
                if plain:
                    yield Batch([text for r in records if (text := r.text)])
                else:
                    yield self._read_lines(piece, offset, data, decoder)

    def _read_lines(self, piece: Piece, offset: int, data: bytes, decoder: Any) -> Batch:
        """The slow way, line by line, which knows what is wrong and where."""
        import msgspec

        texts, skipped = [], 0
        for number, line in enumerate(data.split(b"\n")):
            if not line.strip():
                continue
            try:
                text = decoder.decode(line).text
            except msgspec.ValidationError as error:
                problem = f"no text in the field {self.text_key!r} ({error}), expected a JSON object with a string"
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                problem = f"not JSON ({error}), expected one JSON object a line"
            else:
                if text:
                    texts.append(text)
                continue
            skipped += 1
            if not self.skip_bad:
                self._bad(f"{piece.path}:{_lines_before(piece, offset) + number + 1}: {problem}")
        return Batch(texts, skipped)

    def parquet(self, piece: Piece) -> Iterator[Batch]:
        """The texts of some row groups of a Parquet file."""
        import pyarrow as pa

        with open_parquet(piece.path) as file:
            if self.text_key not in file.schema_arrow.names:
                found = ", ".join(file.schema_arrow.names)
                raise UserError(f"{piece.path}: no column {self.text_key!r} (data.text_key), found {found}")
            kind = file.schema_arrow.field(self.text_key).type
            if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
                raise UserError(f"{piece.path}: column {self.text_key!r} is {kind}, expected string")
            for group in range(piece.start, piece.end):
                meta = file.metadata.row_group(group)
                rows = max(1, min(65_536, BATCH * meta.num_rows // max(1, meta.total_byte_size)))
                first = sum(file.metadata.row_group(g).num_rows for g in range(group))
                for batch in file.iter_batches(rows, row_groups=[group], columns=[self.text_key]):
                    yield self._column(piece.path, batch.column(0), first)
                    first += batch.num_rows

    def _column(self, path: str, column: Any, first: int) -> Batch:
        texts, skipped = [], 0
        try:
            values = column.to_pylist()
        except UnicodeDecodeError:
            values = [_utf8_or_none(value) for value in column.cast("binary").to_pylist()]
        for row, text in enumerate(values, first + 1):
            if text is None:
                skipped += 1
                self._bad(f"{path}: row {row}: no text in the column {self.text_key!r}, expected a UTF-8 string")
            elif text:
                texts.append(text)
        return Batch(texts, skipped)


@contextmanager
def open_parquet(path: str) -> Iterator[Any]:
    """A `pyarrow.parquet.ParquetFile`; what pyarrow cannot read there is a `UserError`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: not readable as Parquet ({_first_line(error)})") from None


def _text_cut(data: mmap.mmap, near: int) -> int:
    """Where the document that starts in the unit at `near` begins."""
    if near == 0 or near >= len(data):
        return min(near, len(data))
    for mark in (b"\n\n", b"\n"):
        found = data.find(mark, near, near + UNIT)
        if found >= 0:
            return found + len(mark)
    while near < len(data) and data[near] & 0xC0 == 0x80:  # inside a UTF-8 character
        near += 1
    return near


def is_compressed(path: str) -> bool:
    """Whether a JSONL file has to be read from its start."""
    return path.endswith((".gz", ".zst"))


def _open_lines(piece: Piece) -> BinaryIO:
    if piece.path.endswith(".gz"):
        return gzip.open(piece.path, "rb")  # type: ignore[return-value]
    if piece.path.endswith(".zst"):
        import pyarrow as pa

        return pa.input_stream(piece.path, compression="zstd")  # type: ignore[no-any-return]
    return open(piece.path, "rb")


def _line_blocks(file: BinaryIO, piece: Piece) -> Iterator[tuple[int, bytes]]:
    """(offset of its first byte, whole lines) for the lines that belong to `piece`, about `BATCH` bytes each."""
    position, end = (0, sys.maxsize) if is_compressed(piece.path) else (piece.start * UNIT, piece.end * UNIT)
    if position:
        file.seek(position - 1)
        position += len(file.readline()) - 1
    reached = position
    rest: list[bytes] = []  # what was read after the last line end
    while True:
        try:
            data = file.read(max(0, min(BATCH, end - reached)))
            if data and reached + len(data) >= end and not data.endswith(b"\n"):
                data += file.readline()  # the line that lies across the piece's end is this piece's
        except (EOFError, OSError, ValueError, zlib.error) as error:
            raise UserError(f"{piece.path}: cannot be read ({_first_line(error)}), expected JSON lines") from None
        reached += len(data)
        cut = data.rfind(b"\n") + 1
        if data and not cut:
            rest.append(data)
            continue
        block = b"".join([*rest, data[:cut]])
        if block:
            yield position, block
        if not data:
            return
        position += len(block)
        rest = [data[cut:]]


def _lines_before(piece: Piece, offset: int) -> int:
    whole = Piece(piece.path, 0, 1)
    count = 0
    with _open_lines(whole) as file:
        while offset and (data := file.read(min(BATCH, offset))):
            count, offset = count + data.count(b"\n"), offset - len(data)
    return count


def _utf8_or_none(value: bytes | None) -> str | None:
    try:
        return value.decode("utf-8") if value is not None else None
    except UnicodeDecodeError:
        return None


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
