"""One shard of a source to its `.bin/.idx` pairs, `train` and `valid`.

    record = encode_shard(job, source, tokenizer, threads=2)

Batches are read in order by the calling thread, encoded by one thread a core, and written in order, so that the bytes
do not depend on the number of cores. At most two batches a core are held at one time. The shard's record, which says
that the shard is whole, is written last.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from training.data.readers import Batch, Piece
from training.data.sources import Source
from training.data.store import SPLITS, ShardWriter, dtype_for, write_json
from training.data.tokenizer import Encoder, TextTokenizer

FOLDER = "shards"  # records and token counts of the shards that are whole, while others are not
HASH_END = 1 << 64  # hashes are below this


@dataclass(frozen=True)
class ShardJob:
    """What sets one shard apart from the others: with source and tokenizer, all that a worker needs."""

    folder: Path  # of the store
    number: int
    name: str  # "" for the only shard, else "-00017"
    pieces: list[Piece]
    encoder: str
    append_eod: bool
    threshold: int  # documents with a hash below it are for validation

    @property
    def record_path(self) -> Path:
        """Where the shard's record lies once the shard is whole."""
        return self.folder / FOLDER / f"{self.number:05d}.json"

    @property
    def counts_path(self) -> Path:
        """How often each id occurs in the shard's training part: an int64 array of the vocabulary's size."""
        return self.folder / FOLDER / f"{self.number:05d}.counts"


@dataclass(frozen=True)
class _Encoded:
    tokens: npt.NDArray[Any]  # of the training documents, then of the validation documents
    lengths: npt.NDArray[np.int64]  # of each document, in the same order
    documents: dict[str, int]
    counts: npt.NDArray[np.int64]  # of the ids in the training documents
    text_bytes: int
    skipped: int
    hashes: tuple[int, int]  # least and greatest, or (HASH_END, -1)


def content_hash(text: str) -> int:
    """A number in [0, HASH_END) that depends on a document's text alone (XXH3, 64 bits)."""
    import xxhash

    return xxhash.xxh3_64_intdigest(text.encode())


def read_record(job: ShardJob) -> dict[str, Any] | None:
    """The record of a shard that is whole, else None."""
    if not job.record_path.exists():
        return None
    record: dict[str, Any] = json.loads(job.record_path.read_text(encoding="utf-8"))
    return record


def encode_shard(
    job: ShardJob,
    source: Source,
    tokenizer: TextTokenizer,
    threads: int,
    advance: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Make the shard and return its record; `advance` is called with the bytes of text done so far.

    `UserError` for bad input. Leaves no temporary files behind, unless it is killed.
    """
    encoder = Encoder(tokenizer, job.encoder)
    dtype = dtype_for(tokenizer.vocab_size)
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    text_bytes = skipped = 0
    low, high = HASH_END, -1
    job.record_path.unlink(missing_ok=True)
    for split in SPLITS:
        for kind in ("bin", "idx"):
            (job.folder / f"{split}{job.name}.{kind}").unlink(missing_ok=True)
    with (
        ShardWriter(job.folder, f"train{job.name}", dtype) as train,
        ShardWriter(job.folder, f"valid{job.name}", dtype) as valid,
    ):
        work = partial(_encode, job=job, encoder=encoder, tokenizer=tokenizer)
        for part in _in_order(work, source.read(job.pieces), threads):
            documents = part.documents["train"]
            tokens = int(part.lengths[:documents].sum())
            train.add(part.tokens[:tokens], part.lengths[:documents])
            valid.add(part.tokens[tokens:], part.lengths[documents:])
            counts += part.counts
            text_bytes += part.text_bytes
            skipped += part.skipped
            low, high = min(low, part.hashes[0]), max(high, part.hashes[1])
            if advance is not None:
                advance(text_bytes)
        record: dict[str, Any] = {"train": train.finish(), "valid": valid.finish()}
    with job.counts_path.open("wb") as file:
        counts.tofile(file)
    record |= {
        "text_bytes": text_bytes,
        "skipped": skipped,
        "hashes": [low, high],
        "threshold": job.threshold,
    }
    write_json(job.record_path, record)
    return record


def _encode(batch: Batch, job: ShardJob, encoder: Encoder, tokenizer: TextTokenizer) -> _Encoded:
    import xxhash

    digest = xxhash.xxh3_64_intdigest
    data = [text.encode() for text in batch.texts]
    hashes = [digest(text) for text in data]
    train = [text for text, value in zip(batch.texts, hashes, strict=True) if value >= job.threshold]
    valid = [text for text, value in zip(batch.texts, hashes, strict=True) if value < job.threshold]
    ids, lengths = encoder.encode(train + valid)
    tokens = ids.astype(dtype_for(tokenizer.vocab_size))
    if job.append_eod:
        assert tokenizer.eod_id is not None
        tokens = np.insert(tokens, np.cumsum(lengths), tokenizer.eod_id)
        lengths = lengths + 1
    return _Encoded(
        tokens,
        lengths,
        {"train": len(train), "valid": len(valid)},
        np.bincount(tokens[: int(lengths[: len(train)].sum())], minlength=tokenizer.vocab_size),
        sum(map(len, data)),
        batch.skipped,
        (min(hashes, default=HASH_END), max(hashes, default=-1)),
    )


def _in_order(work: Callable[[Batch], _Encoded], batches: Iterator[Batch], threads: int) -> Iterator[_Encoded]:
    """`map`, with `threads` batches at work and one more each at hand."""
    pending: deque[Future[_Encoded]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="encode") as pool:
        try:
            for batch in batches:
                pending.append(pool.submit(work, batch))
                if len(pending) > 2 * threads:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
