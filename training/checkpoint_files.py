"""The folder of one checkpoint on disk: what proves it whole, and how it appears and goes in one rename.

`meta.json` in it:

    {"format": 1, "step": 20, "world_size": 2, "meta": {...}, "sha256": digest of this record without this key,
     "files": {".metadata": {"bytes": n, "sha256": "..."}, "__0_0.distcp": {...}, "__1_0.distcp": {...}}}

Beside the checkpoints, `.tmp-*` is what a killed save or pruning left, and `altered-step-*` what failed its checks.
See training/checkpoint.py, which is the only user.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

META = "meta.json"
FORMAT = 1
TEMPORARY = ".tmp-"
ALTERED = "altered-"


def problem(path: Path) -> str | None:
    """What is wrong with the checkpoint at `path`, or None when every byte is as it was written."""
    try:
        files: dict[str, dict[str, Any]] = read_record(path)["files"]
        for name, entry in files.items():  # all sizes first: they cost nothing
            size, whole = (path / name).stat().st_size, entry["bytes"]
            if size != whole:
                return f"{name} is {'truncated' if size < whole else 'altered'} ({size} of {whole} bytes)"
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:  # hashing lets go of the interpreter's lock
            digests = pool.map(lambda name: _sha256(path / name), files)
            for (name, entry), digest in zip(files.items(), digests, strict=True):
                if digest != entry["sha256"]:
                    return f"{name} is altered (not the sha256 that was written)"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        return f"{Path(error.filename or path).name} cannot be read ({error.strerror})"
    except ValueError as error:
        return str(error)
    return None


def read_record(path: Path) -> dict[str, Any]:
    """meta.json as it was written; ValueError says what is wrong with it."""
    try:
        record: Any = json.loads((path / META).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{META} is missing") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{META} cannot be read ({str(error).partition(chr(10))[0]})") from None
    if not isinstance(record, dict) or record.pop("sha256", None) != _digest(record):
        raise ValueError(f"{META} is altered (not the sha256 that was written)")
    if record["format"] != FORMAT:
        raise ValueError(f"{META} has format {record['format']}, expected {FORMAT}")
    return record


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def written_by(rank: int, folder: Path) -> list[str]:
    """Names of the files that `rank` wrote through DCP: its own part, and `.metadata` for rank 0."""
    return sorted(path.name for path in folder.glob(f"__{rank}_*")) + ([".metadata"] if rank == 0 else [])


def checksums(folder: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Size and sha256 of these files."""
    return {name: {"bytes": (folder / name).stat().st_size, "sha256": _sha256(folder / name)} for name in names}


def make_room(temporary: Path, final: Path) -> bool:
    """An empty folder to write to; False when the checkpoint is there already."""
    if final.exists():
        return False
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return True


def publish(temporary: Path, final: Path, record: dict[str, Any]) -> None:
    """Complete the checkpoint in `temporary` with its record and give it its final name."""
    record = json.loads(json.dumps({"format": FORMAT, **record}))  # as it will be read: tuples are lists then
    with (temporary / META).open("w", encoding="utf-8") as file:
        json.dump({**record, "sha256": _digest(record)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync(temporary)
    temporary.rename(final)
    sync(final.parent)


def prune(directory: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints."""
    for path in published(directory)[:-keep]:
        doomed = path.with_name(f"{TEMPORARY}pruned-{path.name}")
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)  # first, so that a kill half-way leaves no half under a final name
        shutil.rmtree(doomed, ignore_errors=True)


def published(directory: Path) -> list[Path]:
    """Checkpoints under final names, oldest first."""
    return sorted(path for path in directory.glob("step-*") if path.is_dir() and path.name[5:].isdecimal())


def remove_temporary(directory: Path) -> None:
    """Remove what killed saves left. Only for the process that owns the run: a save may be under way."""
    for path in directory.glob(f"{TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)


def move_aside(path: Path) -> Path:
    """Rename a damaged checkpoint so that its step can be saved again; returns where it is now."""
    aside, number = path.with_name(f"{ALTERED}{path.name}"), 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{ALTERED}{path.name}.{number}")
    return path.rename(aside)


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
