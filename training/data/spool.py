"""Sources that are not files yet: written once as JSONL parts under the store's folder, then read like any files.

- `pydocs`: the documentation of Python itself, a few MB of English that lie on every machine with Python: the
  docstrings of the standard library's modules, classes and functions (a document is a module's own docstring, a
  top-level function's, or those of a top-level class and of what is in it), and the language reference's topics that
  `help()` shows.
- `hub:NAME[/CONFIG]`: a data set of the Hugging Face Hub (or a local folder that `datasets.load_dataset` takes), its
  split `train`, streamed. A part holds `data.shard_mb` of text; a killed run goes on after the last whole part.

`NAME` is an owner and a name where the part before the first slash is not one of the Hub's few data sets without an
owner: `hub:wikicorpus/raw_en` is `wikicorpus`, configuration `raw_en`; `hub:togethercomputer/RedPajama-Data-1T-Sample`
is one name; `hub:allenai/c4/en` has both.
"""

from __future__ import annotations

import ast
import itertools
import json
import os
import shutil
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from training.config import Data
from training.data.store import TEMPORARY, write_json
from training.errors import UserError

FOLDER = "source"
_NOT_DOCUMENTATION = {"test", "tests", "idle_test", "idlelib", "lib2to3", "site-packages", "dist-packages"}
# Data sets from before the Hub had owners: a name of two parts is then NAME/CONFIG. All others are OWNER/NAME.
_OWNERLESS = {"wikicorpus", "wikitext", "wikipedia", "bookcorpus", "openwebtext", "c4", "oscar", "pg19", "cc_news"}
_OWNERLESS |= {"ag_news", "imdb", "lambada", "ptb_text_only", "the_pile", "tiny_shakespeare", "squad", "cnn_dailymail"}


def is_spooled(data: Data) -> bool:
    """Whether `data.source` has to be written out before it can be read."""
    return data.source == "pydocs" or data.source.startswith("hub:")


def spool(data: Data, folder: Path, report: Any) -> tuple[list[str], int]:
    """Write the source as `folder/source/part-*.jsonl`, or finish what a killed run began.

    Returns the parts' paths and the number of records skipped. `UserError` when the source cannot be loaded, or for
    the first record without text unless `data.skip_bad`.
    """
    target = folder / FOLDER
    state = target / "parts.json"
    settings = data.model_dump(mode="json", include={"source", "text_key", "skip_bad", "shard_mb"})
    done: dict[str, Any] = {"settings": settings, "parts": [], "records": 0, "skipped": 0, "whole": False}
    if state.exists():
        found = json.loads(state.read_text(encoding="utf-8"))
        if found["settings"] == settings:
            done = found
        else:
            shutil.rmtree(target)
    target.mkdir(parents=True, exist_ok=True)
    if not done["whole"]:
        report.note(f"reading {data.source}")
        records = _pydocs() if data.source == "pydocs" else _hub(data, skip=done["records"])
        if data.source == "pydocs":
            records = itertools.islice(records, done["records"], None)
        while _write_part(records, data, target, done):
            write_json(state, done)
            report.note(f"{data.source}: {done['records']} records")
        done["whole"] = True
        write_json(state, done)
    return [str((target / name).resolve()) for name in done["parts"]], done["skipped"]


def _write_part(records: Iterator[Any], data: Data, target: Path, done: dict[str, Any]) -> bool:
    """One part of up to `shard_mb`; counts it in `done`. False when there were no records left."""
    name = f"part-{len(done['parts']):05d}.jsonl"
    temporary = target / (name + TEMPORARY)
    size, before = 0, done["records"]
    with temporary.open("w", encoding="utf-8") as file:
        for text in records:
            done["records"] += 1
            if not isinstance(text, str) or not _is_unicode(text):
                if not data.skip_bad:
                    raise UserError(
                        f"data.source: {data.source}: record {done['records']} has no text in the field "
                        f"{data.text_key!r} (data.text_key), expected a string"
                    )
                done["skipped"] += 1
                continue
            size += file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            if size >= data.shard_mb << 20:
                break
        file.flush()
        os.fsync(file.fileno())
    if done["records"] == before:
        temporary.unlink()
        return False
    temporary.replace(target / name)
    done["parts"].append(name)
    return True


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def _pydocs() -> Iterator[str]:
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).parts
        if _NOT_DOCUMENTATION.intersection(parts[:-1]):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the library's own escapes
                module = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # files that are broken on purpose
            continue
        if parts == ("pydoc_data", "topics.py"):
            strings = [node.value for node in ast.walk(module) if isinstance(node, ast.Constant)]
            yield from (text for text in strings if isinstance(text, str) and len(text) > 100)
            continue
        texts = [ast.get_docstring(module) or ""]
        texts += ["\n\n".join(_docstrings(node)) for node in module.body]
        yield from (text for text in texts if text and _is_unicode(text))


def _docstrings(node: ast.AST) -> Iterator[str]:
    """The docstrings in a statement, in source order; expressions hold none and are not walked."""
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        text = ast.get_docstring(node)
        if text:
            yield text
    for field in ("body", "handlers", "orelse", "finalbody"):
        children = getattr(node, field, [])
        for child in children if isinstance(children, list) else []:
            yield from _docstrings(child)


def split_hub_name(name: str) -> tuple[str, str | None]:
    """(data set, configuration or None) of `NAME[/CONFIG]`; see the module's text."""
    if Path(name).is_dir():
        return name, None
    parts = name.split("/")
    if parts[0] in _OWNERLESS or len(parts) == 1:
        return parts[0], "/".join(parts[1:]) or None
    return "/".join(parts[:2]), "/".join(parts[2:]) or None


def _hub(data: Data, skip: int) -> Iterator[Any]:
    """The text of each record from record `skip` on (None where the field is missing)."""
    import datasets

    name, config = split_hub_name(data.source.partition(":")[2])
    where = f"data.source: {data.source}"
    try:
        try:
            stream = datasets.load_dataset(name, config, split="train", streaming=True)
        except NotImplementedError:  # an archive that can only be unpacked as a whole
            stream = datasets.load_dataset(name, config, split="train")
        except RuntimeError as error:
            if "scripts are no longer supported" not in str(error):
                raise
            # Published as a loading script, as wikicorpus and RedPajama are: read the Hub's own Parquet copy of it.
            stream = datasets.load_dataset(
                name, data_dir=config, split="train", streaming=True, revision="refs/convert/parquet"
            )
        for record in stream.skip(skip) if skip else stream:
            yield record.get(data.text_key)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - datasets and what is below it raise a dozen kinds
        reason = str(error).partition("\n")[0] or type(error).__name__
        if "gated" in str(error).lower() or "401" in str(error) or "403" in str(error):
            reason += "; for a gated data set set HF_TOKEN to a token that may read it"
        raise UserError(f"{where} cannot be loaded ({reason}), expected hub:NAME[/CONFIG]") from None
