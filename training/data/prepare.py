"""The stage `prepare`: a source of text becomes a token store (store.py), shard by shard.

    manifest = prepare(settings, report)

Order of events: the source is cut into shards (sources.py), the tokenizer is made or loaded (tokenizer.py), the encoder
is checked against its reference on the input, each shard is encoded (encode.py), and `manifest.json` is written last.
All of it can be killed at any moment: the next call makes what is missing, and the bytes are the same.

A document is for validation when the hash of its text is below `data.validation_fraction` of all hashes. Where that
leaves one part without a document (a tiny corpus), the document with the least hash is moved to validation, or the one
with the greatest to training; so two different documents or more always give both parts one.
"""

from __future__ import annotations

import errno
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from training.config import Data, Settings
from training.data import encode, spool
from training.data import tokenizer as tokenizers
from training.data.encode import HASH_END, ShardJob, content_hash
from training.data.shards import Report, make_shards
from training.data.sources import Source, open_source
from training.data.store import MANIFEST, SPLITS, TEMPORARY, damaged_file, dtype_for, read_manifest, write_json
from training.errors import UserError

FORMAT = 1  # of the manifest; a store of another one is made anew
CHECK_SAMPLE = 256 << 10  # bytes of the input on which the encoders are compared
# The settings that determine the bytes of a store.
KEYS = ("source", "text_key", "tokenizer", "validation_fraction", "append_eod", "skip_bad", "shard_mb")


def prepare(settings: Settings, report: Report) -> dict[str, Any]:
    """Make the token store of `settings` in `settings.data_dir` and return its manifest.

    Does nothing when it is there already. `UserError` for bad input, for a store made with other settings, for a
    tokenizer larger than the model's vocabulary, and for a full disk.
    """
    from filelock import FileLock, Timeout

    folder = settings.data_dir.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "prepare.lock", timeout=0):
            return _finished(settings, folder, report) or _prepare(settings, folder, report)
    except Timeout:
        raise UserError(f"data.output: {folder} is being prepared by another process, expected to be alone") from None
    except OSError as error:
        _remove_temporary(folder)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"{folder}: the disk is full, expected room for the token store (data.output)") from None
        if isinstance(error, (PermissionError, FileExistsError, NotADirectoryError)):
            raise UserError(f"{error.filename or folder}: {error.strerror}, expected a folder to write to") from None
        raise


def _finished(settings: Settings, folder: Path, report: Report) -> dict[str, Any] | None:
    """The manifest of a whole store of these settings; None when there is work to do."""
    manifest = read_manifest(folder)
    if manifest is None or manifest.get("format") != FORMAT:
        return None
    wanted = _determining(settings.data)
    for key in KEYS:
        if manifest["settings"].get(key) != wanted[key]:
            raise UserError(
                f"data.{key}: {wanted[key]}, but the store in {folder} was made with {manifest['settings'].get(key)}: "
                "choose another data.output or delete it"
            )
    changed = tokenizers.tokenizer_file_hash(settings.data.tokenizer)
    if changed is not None and changed != manifest["tokenizer_sha256"]:
        raise UserError(
            f"data.tokenizer: {settings.data.tokenizer} has changed since the store in {folder} was made: "
            "choose another data.output or delete it"
        )
    _check_vocabulary(settings, manifest["vocab_size"])
    problem = damaged_file(folder, [shard for split in SPLITS for shard in manifest["splits"][split]["shards"]])
    if problem is not None:
        report.note(f"{problem}: preparing it again")
        (folder / MANIFEST).unlink()
        return None
    report.update(manifest["text_bytes"] / 1e6, manifest["text_bytes"] / 1e6)
    report.note(f"nothing to do: {folder} holds {manifest['tokens']:,} tokens of {settings.data.source}")
    return manifest


def _prepare(settings: Settings, folder: Path, report: Report) -> dict[str, Any]:
    started = time.time()
    _remove_temporary(folder)
    data = settings.data
    parts, skipped = spool.spool(data, folder, report) if spool.is_spooled(data) else (None, 0)
    source = open_source(data, parts)
    _begin(folder, {"format": FORMAT, "settings": _determining(data), "input": source.fingerprint()}, data)
    tokenizer = tokenizers.make_tokenizer(
        data, folder, lambda size: (text for text in _sample(source, size) if content_hash(text) >= _threshold(data))
    )
    _check_vocabulary(settings, tokenizer.vocab_size)
    if data.append_eod and tokenizer.eod_id is None:
        raise UserError(
            f"data.append_eod: true, but the tokenizer {data.tokenizer} names no end-of-document token, expected an "
            "eos_token in its tokenizer_config.json, or data.append_eod false"
        )
    sample = list(_sample(source, CHECK_SAMPLE))
    encoder, why = tokenizers.choose_encoder(tokenizer, sample)
    report.note(f"encoding with {encoder}: {why}")
    many = len(source.shards) > 1
    jobs = [
        ShardJob(folder, n, f"-{n:05d}" if many else "", pieces, encoder, data.append_eod, _threshold(data))
        for n, pieces in enumerate(source.shards)
    ]
    records = make_shards(jobs, source, tokenizer, settings.run.launcher, report)
    if not any(record[split] for record in records for split in SPLITS):
        raise UserError(f"data.source: {data.source} holds no text, expected one document at least")
    manifest = _manifest(settings, tokenizer, encoder, jobs, records, skipped)
    manifest["seconds"] = round(time.time() - started, 3)
    write_json(folder / MANIFEST, manifest)
    for left in (encode.FOLDER, spool.FOLDER):
        shutil.rmtree(folder / left, ignore_errors=True)
    return manifest


def _determining(data: Data) -> dict[str, Any]:
    return {key: getattr(data, key) for key in KEYS}


def _threshold(data: Data) -> int:
    return int(data.validation_fraction * HASH_END)


def _check_vocabulary(settings: Settings, size: int) -> None:
    if size > settings.model.vocab_size:
        raise UserError(
            f"model.vocab_size: {settings.model.vocab_size}, expected at least {size}, the size of the tokenizer "
            f"{settings.data.tokenizer}"
        )


def _remove_temporary(folder: Path) -> None:
    """What a killed call left half-written."""
    for part in (folder, folder / encode.FOLDER, folder / spool.FOLDER, folder / tokenizers.FOLDER):
        for path in part.glob(f"*{TEMPORARY}"):
            path.unlink(missing_ok=True)


def _begin(folder: Path, plan: dict[str, Any], data: Data) -> None:
    """Keep what an earlier call has made only if it was making this very store."""
    file = folder / encode.FOLDER / "plan.json"
    plan["input"] += tokenizers.tokenizer_file_hash(data.tokenizer) or ""
    if file.exists() and json.loads(file.read_text(encoding="utf-8")) == plan:
        return
    for name in (encode.FOLDER, tokenizers.FOLDER):
        shutil.rmtree(folder / name, ignore_errors=True)
    for split in SPLITS:
        for kind in ("bin", "idx"):
            for path in (folder / f"{split}.{kind}", *folder.glob(f"{split}-[0-9][0-9][0-9][0-9][0-9].{kind}")):
                path.unlink(missing_ok=True)
    file.parent.mkdir(parents=True)
    write_json(file, plan)


def _sample(source: Source, size: int) -> Iterator[str]:
    """About `size` bytes of the source's documents, evenly spaced over it; always the same ones."""
    pieces = source.sample_pieces(max(size, 1 << 20))
    share = max(1, size // max(1, len(pieces)))
    for piece in pieces:
        taken = 0
        for batch in source.read([piece]):
            for text in batch.texts:
                if taken < share:
                    yield text[:size]
                taken += len(text)
            if taken >= share:
                break


def _manifest(
    settings: Settings,
    tokenizer: tokenizers.TextTokenizer,
    encoder: str,
    jobs: list[ShardJob],
    records: list[dict[str, Any]],
    skipped: int,
) -> dict[str, Any]:
    splits: dict[str, dict[str, Any]] = {}
    for split in SPLITS:
        shards = [record[split] for record in records if record[split]]
        splits[split] = {
            "documents": sum(shard["documents"] for shard in shards),
            "tokens": sum(shard["tokens"] for shard in shards),
            "bytes": sum(shard["bin"]["bytes"] for shard in shards),
            "shards": shards,
        }
    counts = sum(np.fromfile(job.counts_path, np.int64) for job in jobs)
    return {
        "format": FORMAT,
        "source": settings.data.source,
        "tokenizer": settings.data.tokenizer,
        "tokenizer_sha256": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
        "eod_id": tokenizer.eod_id,
        "dtype": dtype_for(tokenizer.vocab_size).name,
        "encoder": encoder,
        "documents": sum(part["documents"] for part in splits.values()),
        "tokens": sum(part["tokens"] for part in splits.values()),
        "text_bytes": sum(record["text_bytes"] for record in records),
        "skipped_records": skipped + sum(record["skipped"] for record in records),
        "unigram_entropy": unigram_entropy(np.asarray(counts)),
        "splits": splits,
        "settings": _determining(settings.data),
    }


def unigram_entropy(counts: npt.NDArray[np.int64]) -> float:
    """Entropy in nats of the distribution that `counts` are drawn from: -sum p ln p, with p = counts / sum.

    It is the loss of a model that knows how often each token occurs, and nothing else.
    """
    p = counts[counts > 0] / max(1, counts.sum())
    return float(-(p * np.log(p)).sum())
