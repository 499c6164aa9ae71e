"""The stage `prepare`: the right ids, the same bytes after any death, one line for each kind of bad input."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from training.config import Settings, parse_settings
from training.data import encode, prepare, tokenizer
from training.data.store import ShardWriter, TokenStore
from training.errors import UserError

WORDS = ["the", "of", "and", "to", "in", "is", "that", "for", "it", "was", "language", "measure", "reading", "slowly"]


class Report:
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.seen: list[tuple[float, float | None]] = []

    def update(self, done: float, total: float | None = None, **fields: Any) -> None:
        self.seen.append((done, total))

    def note(self, text: str) -> None:
        self.notes.append(text)


def corpus(folder: Path, documents: int = 300, words: int = 60, seed: int = 0) -> list[str]:
    """A JSONL file of different documents; returns their texts."""
    random_ = random.Random(seed)
    texts = [f"{i} é " + " ".join(random_.choices(WORDS, k=random_.randint(1, 2 * words))) for i in range(documents)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return texts


def settings(tmp_path: Path, out: str = "out", model: int = 8192, **data: Any) -> Settings:
    values = {"source": f"jsonl:{tmp_path}/in/*", "tokenizer": "train:400", "validation_fraction": 0.1, **data}
    return parse_settings({"data": {**values, "output": str(tmp_path / out)}, "model": {"vocab_size": model}})


def _with_vocabulary(values: Settings, size: int) -> Settings:
    return values.model_copy(update={"model": values.model.model_copy(update={"vocab_size": size})})


def files(folder: Path) -> dict[str, bytes]:
    """Every file of a store but its manifest, which holds seconds."""
    found = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    return {name: content for name, content in found.items() if name != "manifest.json"}


def small_units(monkeypatch: pytest.MonkeyPatch, unit: int = 4096) -> None:
    """Shards and batches of a few KiB: `shard_mb` counts units then."""
    for module in ("readers", "sources"):
        for name in ("MIB", "UNIT", "BATCH"):
            monkeypatch.setattr(f"training.data.{module}.{name}", unit)


def read_by_megatron(folder: Path, manifest: dict[str, Any], split: str) -> list[list[int]]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    found = []
    for shard in manifest["splits"][split]["shards"]:
        dataset = IndexedDataset(str(folder / shard["name"]))
        found += [dataset[i].tolist() for i in range(len(dataset))]
    return found


def test_megatron_reads_what_tokenizers_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenizers import Tokenizer

    small_units(monkeypatch)
    texts = corpus(tmp_path / "in")
    manifest = prepare.prepare(settings(tmp_path, shard_mb=3), Report())
    folder = tmp_path / "out"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    eod = tokenizer.token_to_id("<|endoftext|>")
    threshold = int(0.1 * encode.HASH_END)
    expected: dict[str, list[list[int]]] = {"train": [], "valid": []}
    for text in texts:
        split = "valid" if encode.content_hash(text) < threshold else "train"
        expected[split].append([*tokenizer.encode(text, add_special_tokens=False).ids, eod])
    assert len(manifest["splits"]["train"]["shards"]) > 3
    assert manifest["encoder"] == "gigatoken"
    for split in ("train", "valid"):
        part = manifest["splits"][split]
        assert read_by_megatron(folder, manifest, split) == expected[split]
        flat = [token for document in expected[split] for token in document]
        store = TokenStore.open(folder, split)
        assert store.read(0, store.num_tokens).tolist() == flat
        assert (part["documents"], part["tokens"], part["bytes"]) == (len(expected[split]), len(flat), 2 * len(flat))
        p = np.unique(flat, return_counts=True)[1] / len(flat)
        if split == "train":
            assert manifest["unigram_entropy"] == pytest.approx(-(p * np.log(p)).sum(), rel=1e-12)
        for shard in part["shards"]:
            for kind in ("bin", "idx"):
                content = (folder / f"{shard['name']}.{kind}").read_bytes()
                assert shard[kind] == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert not [p.name for p in folder.iterdir() if p.name in ("shards", "source") or p.suffix == ".tmp"]


def test_the_cut_changes_neither_documents_nor_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_units(monkeypatch)
    corpus(tmp_path / "in")
    one = prepare.prepare(settings(tmp_path, "one", shard_mb=1000), Report())
    many = prepare.prepare(settings(tmp_path, "many", shard_mb=1), Report())
    assert [shard["name"] for shard in one["splits"]["train"]["shards"]] == ["train"]
    assert len(many["splits"]["train"]["shards"]) > 10
    for split in ("train", "valid"):
        assert read_by_megatron(tmp_path / "one", one, split) == read_by_megatron(tmp_path / "many", many, split)
    assert one["unigram_entropy"] == many["unigram_entropy"]


def test_a_second_call_does_nothing_and_other_settings_are_refused(tmp_path: Path) -> None:
    corpus(tmp_path / "in")
    first = prepare.prepare(settings(tmp_path), Report())
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*.*")}
    report = Report()
    assert prepare.prepare(settings(tmp_path), report) == first
    assert "nothing to do" in report.notes[0]
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*.*")} == before
    with pytest.raises(UserError, match=r"data\.append_eod: False, but .* with True: choose another data\.output or"):
        prepare.prepare(settings(tmp_path, append_eod=False), Report())
    with pytest.raises(UserError, match=r"model\.vocab_size: 300, expected at least 400"):
        prepare.prepare(_with_vocabulary(settings(tmp_path), 300), Report())
    (tmp_path / "out" / "train.bin").write_bytes(b"")
    report = Report()
    assert prepare.prepare(settings(tmp_path), report)["splits"] == first["splits"]
    assert "train.bin: 0 bytes" in report.notes[0]


def test_a_changed_tokenizer_file_is_noticed(tmp_path: Path) -> None:
    corpus(tmp_path / "in")
    prepare.prepare(settings(tmp_path, "a"), Report())
    file = tmp_path / "a" / "tokenizer" / "tokenizer.json"
    prepare.prepare(settings(tmp_path, "b", tokenizer=str(file)), Report())
    file.write_text(file.read_text() + "\n")
    with pytest.raises(UserError, match=r"data\.tokenizer: .* has changed since"):
        prepare.prepare(settings(tmp_path, "b", tokenizer=str(file)), Report())


KILLED = """
import os, sys
from pathlib import Path
from training.data import encode, prepare, readers, sources, shards
from training.config import parse_settings
for module in (readers, sources):
    for name in ("MIB", "UNIT", "BATCH"):
        if hasattr(module, name):
            setattr(module, name, 4096)
class Report:
    calls = 0
    def note(self, text): pass
    def update(self, *args, **fields):
        Report.calls += 1
        if Report.calls == int(sys.argv[1]):
            os._exit(9)
prepare.prepare(parse_settings(eval(sys.argv[2])), Report())
"""


@pytest.mark.parametrize("moment", [1, 12, 18])
def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int) -> None:
    small_units(monkeypatch)
    corpus(tmp_path / "in")
    prepare.prepare(settings(tmp_path, "whole", shard_mb=2), Report())
    values = settings(tmp_path, "killed", shard_mb=2).model_dump(mode="json")
    ended = subprocess.run([sys.executable, "-c", KILLED, str(moment), repr(values)], check=False)
    assert ended.returncode == 9
    assert not (tmp_path / "killed" / "manifest.json").exists()
    report = Report()
    prepare.prepare(settings(tmp_path, "killed", shard_mb=2), report)
    assert any("going on" in note for note in report.notes) == (moment > 1)
    assert files(tmp_path / "killed") == files(tmp_path / "whole")


def test_what_is_there_of_other_settings_or_input_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_units(monkeypatch)
    corpus(tmp_path / "in")

    class Stop(Report):
        def update(self, done: float, total: float | None = None, **fields: Any) -> None:
            if total and done > total / 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare.prepare(settings(tmp_path, shard_mb=2), Stop())
    assert not list((tmp_path / "out").rglob("*.tmp"))
    corpus(tmp_path / "in", seed=1)
    report = Report()
    prepare.prepare(settings(tmp_path, shard_mb=3), report)
    assert not any("going on" in note for note in report.notes)
    prepare.prepare(settings(tmp_path, "fresh", shard_mb=3), Report())
    assert files(tmp_path / "out") == files(tmp_path / "fresh")


@pytest.mark.parametrize(
    ("documents", "fraction"), [(1, 0.5), (2, 0.0001), (2, 0.5), (5, 0.0001), (3, 0.5), (40, 0.0001)]
)
def test_tiny_corpora_have_both_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, documents: int, fraction: float
) -> None:
    small_units(monkeypatch, 256)
    corpus(tmp_path / "in", documents)
    manifest = prepare.prepare(settings(tmp_path, validation_fraction=fraction, shard_mb=1), Report())
    train, valid = (manifest["splits"][split]["documents"] for split in ("train", "valid"))
    assert train + valid == documents
    assert train >= 1
    assert (valid >= 1) == (documents >= 2)


def test_all_documents_for_validation_by_chance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xxhash.xxh3_64_intdigest", lambda text: len(text))
    corpus(tmp_path / "in", 10)
    manifest = prepare.prepare(settings(tmp_path), Report())
    assert manifest["splits"]["train"]["documents"] == 1


def test_no_validation_part_when_none_is_asked_for(tmp_path: Path) -> None:
    corpus(tmp_path / "in", 10)
    manifest = prepare.prepare(settings(tmp_path, validation_fraction=0), Report())
    assert manifest["splits"]["valid"] == {"documents": 0, "tokens": 0, "bytes": 0, "shards": []}
    assert TokenStore.open(tmp_path / "out", "valid").num_tokens == 0


def test_without_eod_and_with_tokenizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus(tmp_path / "in")
    with_eod = prepare.prepare(settings(tmp_path, "a"), Report())
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    tokenizer._gigatoken.cache_clear()
    without = prepare.prepare(settings(tmp_path, "b", append_eod=False), Report())
    assert (with_eod["encoder"], without["encoder"]) == ("gigatoken", "tokenizers")
    eod = with_eod["eod_id"]
    for split in ("train", "valid"):
        rows = read_by_megatron(tmp_path / "a", with_eod, split)
        assert [[*row, eod] for row in read_by_megatron(tmp_path / "b", without, split)] == rows


def test_skipped_records_are_counted(tmp_path: Path) -> None:
    corpus(tmp_path / "in")
    with (tmp_path / "in" / "a.jsonl").open("a") as file:
        file.write('{"text": 1}\n{oops\n')
    with pytest.raises(UserError, match=r"a\.jsonl:301: no text"):
        prepare.prepare(settings(tmp_path), Report())
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert not list((tmp_path / "out").glob("*.bin"))
    manifest = prepare.prepare(settings(tmp_path, skip_bad=True), Report())
    assert (manifest["skipped_records"], manifest["documents"]) == (2, 300)


@pytest.mark.parametrize("content", ["", "\n\n", '{"text": ""}\n'])
def test_an_empty_corpus(tmp_path: Path, content: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text(content)
    with pytest.raises(UserError, match=r"data\.source: .* holds no text"):
        prepare.prepare(settings(tmp_path), Report())
    assert not list((tmp_path / "out").glob("*.bin"))


def test_a_tokenizer_that_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus(tmp_path / "in")
    prepare.prepare(settings(tmp_path, "a"), Report())
    loaded = tmp_path / "a" / "tokenizer"
    monkeypatch.setattr(prepare, "make_shards", lambda *_: pytest.fail("encoded"))
    with pytest.raises(UserError, match=r"model\.vocab_size: 300, expected at least 400"):
        prepare.prepare(settings(tmp_path, "b", model=300, tokenizer=str(loaded)), Report())
    content = json.loads((loaded / "tokenizer_config.json").read_text())
    content["eos_token"] = "nowhere"
    (loaded / "tokenizer_config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"data\.append_eod: true, but the tokenizer .* names no end-of-document token"):
        prepare.prepare(settings(tmp_path, "c", tokenizer=str(loaded)), Report())


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus(tmp_path / "in")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "add", full)
        with pytest.raises(UserError, match="the disk is full"):
            prepare.prepare(settings(tmp_path), Report())
    left = {path.name for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert left <= {"prepare.lock", "plan.json", "tokenizer.json", "tokenizer_config.json"}
    assert prepare.prepare(settings(tmp_path), Report())["documents"] == 300


def test_two_at_one_time(tmp_path: Path) -> None:
    from filelock import FileLock

    corpus(tmp_path / "in")
    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out" / "prepare.lock"):
        with pytest.raises(UserError, match="is being prepared by another process"):
            prepare.prepare(settings(tmp_path), Report())


def test_ray_gives_the_same_bytes_and_errors(tmp_path: Path) -> None:
    import ray

    random_ = random.Random(0)
    (tmp_path / "in").mkdir()
    with (tmp_path / "in" / "a.jsonl").open("w") as file:
        for i in range(5000):
            file.write(json.dumps({"text": f"{i} " + " ".join(random_.choices(WORDS, k=100))}) + "\n")
    here = settings(tmp_path, "here", shard_mb=1)
    values = settings(tmp_path, "ray", shard_mb=1)
    on_ray = values.model_copy(update={"run": values.run.model_copy(update={"launcher": "ray"})})
    try:
        manifest = prepare.prepare(here, Report())
        assert len(manifest["splits"]["train"]["shards"]) > 1
        report = Report()
        assert prepare.prepare(on_ray, report)["splits"] == manifest["splits"]
        assert files(tmp_path / "ray") == files(tmp_path / "here")
        done, total = report.seen[-1]
        assert done == total
        with (tmp_path / "in" / "a.jsonl").open("a") as file:
            file.write("oops\n")
        bad = on_ray.model_copy(update={"data": on_ray.data.model_copy(update={"output": tmp_path / "bad"})})
        with pytest.raises(UserError, match=r"a\.jsonl:5001: not JSON"):
            prepare.prepare(bad, Report())
    finally:
        ray.shutdown()


PEAK = """
import sys
from training.config import parse_settings
from training.data import readers, sources
from training.data.prepare import prepare
readers.BATCH = sources.BATCH = 1 << 18  # of 2 MiB, so that a small input fills all batches that are held at one time
class Report:
    def note(self, text): pass
    def update(self, *args, **fields): pass
prepare(parse_settings(eval(sys.argv[1])), Report())
# Not ru_maxrss, which a process inherits from the one that started it.
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    random_ = random.Random(0)
    words = ["".join(random_.choices("abcdefghijklmnopqrstuvwxyz", k=random_.randint(2, 9))) for _ in range(5000)]
    block = [json.dumps({"text": f"{i} " + " ".join(random_.choices(words, k=300))}) + "\n" for i in range(2000)]
    peaks = []
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "a.txt").write_text(" ".join(words))
    trained = settings(tmp_path, "t-out", source=f"text:{tmp_path}/t/*")
    prepare.prepare(trained, Report())
    for times in (4, 16):  # 14 and 56 MB
        (tmp_path / f"{times}").mkdir()
        (tmp_path / f"{times}" / "a.jsonl").write_text("".join(block * times))
        values = settings(
            tmp_path,
            f"out-{times}",
            source=f"jsonl:{tmp_path}/{times}/*",
            tokenizer=str(tmp_path / "t-out" / "tokenizer"),
        ).model_dump(mode="json")
        ended = subprocess.run(
            [sys.executable, "-c", PEAK, repr(values)], check=True, capture_output=True, text=True, env=dict(os.environ)
        )
        peaks.append(int(ended.stdout) / 1024)
    assert peaks[1] < peaks[0] + 24, peaks  # MiB; the input grows by 42
