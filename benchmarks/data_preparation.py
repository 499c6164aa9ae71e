"""How fast text becomes a token store, against the published blueprint's way and against the encoder alone.

    python -m benchmarks.data_preparation [--quick]

The corpus is English that lies on the machine: docstrings of the standard library and of site-packages, and
/usr/share/doc, a document a source file, about 64 MB as JSONL. Two tokenizers of 32,000 ids are trained on a part of
it, of Llama-3's kind (byte-level) and of Llama-2's (SentencePiece-style). Both lie under ./bench/ afterwards.

- ours: `prepare` from JSONL to a whole store (load the tokenizer, read, check the encoder, encode, write, sha256,
  fsync).
- `datasets.map`: the blueprint's way: `load_dataset("json")`, `map` the tokenizer in batches, `map` to blocks of 2,048
  tokens, `save_to_disk`, at its best `num_proc`. It is measured on a part of the corpus, for it is slow, and compared
  by MB/s; the corpus's start favours neither, the documents are shuffled.
- raw gigatoken: one `encode_batch` of the texts, already in memory as a list.

Every repetition runs all of them, one after another, in processes of their own; a ratio is the median over the
repetitions of the ratio within one. Imports are done before the clock starts, in each of them.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BENCH = Path("bench") / "data_preparation"
REPETITIONS = 3
_DOCSTRING = re.compile(rb'"""(.{80,}?)"""', re.S)


def run(quick: bool) -> list[dict[str, Any]]:
    """The rows of the table; `quick` takes a tenth of the corpus and one repetition."""
    corpus = _corpus(6 if quick else 64)
    part = _head(corpus, 2 if quick else 8)
    repetitions = 1 if quick else REPETITIONS
    rows = []
    for kind, goal in (("byte-level", 25.0), ("sentencepiece", 8.0)):
        tokenizer = _tokenizer(corpus, kind)
        cores = len(os.sched_getaffinity(0))
        maps = [f"map {processes}" for processes in sorted({1, cores, 2 * cores})]
        speeds: dict[str, list[float]] = {name: [] for name in ("ours", "raw", *maps)}
        for _ in range(repetitions):
            speeds["ours"].append(_child("ours", corpus, tokenizer)["mb_per_second"])
            speeds["raw"].append(_child("raw", corpus, tokenizer)["mb_per_second"])
            for name in maps:
                speeds[name].append(_child(name, part, tokenizer)["mb_per_second"])
        best = max(
            (name for name in speeds if name.startswith("map")), key=lambda name: statistics.median(speeds[name])
        )
        rows.append(_row(f"prepare, {kind}, against datasets.map ({best})", speeds["ours"], speeds[best], goal))
        rows.append(_row(f"prepare, {kind}, against raw gigatoken", speeds["ours"], speeds["raw"], 0.6))
    rows.append(_memory_row(corpus, _tokenizer(corpus, "byte-level")))
    return rows


def _row(name: str, ours: list[float], peer: list[float], goal: float) -> dict[str, Any]:
    ratios = [a / b for a, b in zip(ours, peer, strict=True)]
    return {
        "name": name,
        "ours": round(statistics.median(ours), 1),
        "peer": round(statistics.median(peer), 1),
        "unit": "MB/s",
        "ratio": round(statistics.median(ratios), 2),
        "spread": f"{min(ratios):.2f} to {max(ratios):.2f}",
        "goal": f">= {goal:g}",
        "ok": statistics.median(ratios) >= goal,
    }


def _memory_row(corpus: Path, tokenizer: Path) -> dict[str, Any]:
    once, four = BENCH / "once", BENCH / "four"
    for folder, times in ((once, 1), (four, 4)):
        folder.mkdir(exist_ok=True)
        for copy in range(times):
            shutil.copyfile(corpus, folder / f"{copy}.jsonl")
    small, large = (_child("ours", folder / "*.jsonl", tokenizer)["peak_mib"] for folder in (once, four))
    shutil.rmtree(once)
    shutil.rmtree(four)
    return {
        "name": "peak memory of prepare, 4x the input against 1x",
        "ours": round(large),
        "peer": round(small),
        "unit": "MiB",
        "ratio": round(large / small, 2),
        "spread": "",
        "goal": "<= 1.25 and under 2048 MiB",
        "ok": large <= 1.25 * small and large < 2048,
    }


def _child(what: str, source: Path, tokenizer: Path) -> dict[str, float]:
    """Measure in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.data_preparation", "--child", what, str(source), str(tokenizer)]
    ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return result


def _measure(what: str, source: str, tokenizer: str) -> dict[str, float]:
    out = BENCH / "out"
    shutil.rmtree(out, ignore_errors=True)
    try:
        if what == "ours":
            return _measure_ours(source, tokenizer, out)
        texts = [json.loads(line)["text"] for line in Path(source).read_bytes().splitlines()]
        size = sum(len(text.encode()) for text in texts) / 1e6
        if what == "raw":
            import gigatoken

            importlib.import_module("awkward")  # which gigatoken does when it is first asked for something
            encoder = gigatoken.Tokenizer.from_json((Path(tokenizer) / "tokenizer.json").read_text())
            started = time.perf_counter()
            encoder.encode_batch(texts)
        else:
            import datasets  # noqa: F401
            from transformers import PreTrainedTokenizerFast  # noqa: F401

            del texts
            started = time.perf_counter()
            _map(source, tokenizer, out, int(what.split()[1]))
        return {"mb_per_second": size / (time.perf_counter() - started)}
    finally:
        shutil.rmtree(out, ignore_errors=True)


def _measure_ours(source: str, tokenizer: str, out: Path) -> dict[str, float]:
    from training.config import parse_settings
    from training.data.prepare import prepare

    class Report:
        def update(self, done: float, total: float | None = None, **fields: Any) -> None:
            """Not shown."""

        def note(self, text: str) -> None:
            print(text, file=sys.stderr)

    data = {"source": f"jsonl:{source}", "tokenizer": tokenizer, "output": str(out)}
    settings = parse_settings({"data": data, "model": {"vocab_size": 32_000}})
    for module in ("awkward", "gigatoken", "msgspec", "tokenizers", "xxhash"):
        importlib.import_module(module)
    started = time.perf_counter()
    manifest = prepare(settings, Report())
    seconds = time.perf_counter() - started
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))
    return {"mb_per_second": manifest["text_bytes"] / 1e6 / seconds, "peak_mib": peak}


def _map(source: str, tokenizer: str, out: Path, processes: int) -> None:
    import itertools

    import datasets
    from transformers import PreTrainedTokenizerFast

    datasets.disable_progress_bars()
    encoder = PreTrainedTokenizerFast(tokenizer_file=str(Path(tokenizer) / "tokenizer.json"))
    block = 2048

    def tokenize(batch: dict[str, list[str]]) -> dict[str, Any]:
        return {"input_ids": encoder(batch["text"], add_special_tokens=False)["input_ids"]}

    def group(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        ids = list(itertools.chain.from_iterable(batch["input_ids"]))
        return {"input_ids": [ids[i : i + block] for i in range(0, len(ids) // block * block, block)]}

    os.environ["TOKENIZERS_PARALLELISM"] = "true" if processes == 1 else "false"
    texts = datasets.load_dataset("json", data_files=source, split="train", cache_dir=str(out / "cache"))
    tokens = texts.map(tokenize, batched=True, remove_columns=texts.column_names, num_proc=processes)
    tokens.map(group, batched=True, num_proc=processes).save_to_disk(str(out / "saved"), num_proc=processes)


def _texts() -> Iterator[str]:
    """A document a file: its docstrings, or its text."""
    roots = [Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib")), Path("/usr/share/doc")]
    for root in roots:
        for path in sorted(root.rglob("*")):
            if path.suffix not in (".py", ".md", ".txt", ".rst") or not path.is_file():
                continue
            data = path.read_bytes()
            if path.suffix == ".py":
                data = b"\n\n".join(_DOCSTRING.findall(data))
            text = data.decode("utf-8", errors="ignore").replace("\0", "")
            if len(text) > 200:
                yield text[:200_000]


def _corpus(megabytes: int) -> Path:
    """About `megabytes` of the machine's English, repeated only if there is less."""
    BENCH.mkdir(parents=True, exist_ok=True)
    path = BENCH / f"corpus-{megabytes}.jsonl"
    if not path.exists():
        texts = list(_texts())
        random.Random(0).shuffle(texts)
        temporary, size = path.with_suffix(".tmp"), 0
        with temporary.open("w", encoding="utf-8") as file:
            while size < megabytes * 1e6:
                for text in texts:
                    size += file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                    if size >= megabytes * 1e6:
                        break
        temporary.replace(path)
    return path


def _head(corpus: Path, megabytes: int) -> Path:
    path = corpus.with_name(f"{corpus.stem}-head-{megabytes}.jsonl")
    if not path.exists():
        with corpus.open("rb") as file:
            path.write_bytes(file.read(megabytes * 1_000_000) + file.readline())
    return path


def _tokenizer(corpus: Path, kind: str) -> Path:
    """A folder with a tokenizer of 32,000 ids, trained on 4 MB of the corpus."""
    folder = BENCH / f"{corpus.stem}-{kind}"
    if not (folder / "tokenizer_config.json").exists():
        folder.mkdir(exist_ok=True)
        lines = _head(corpus, 4).read_bytes().splitlines()
        texts = [json.loads(line)["text"] for line in lines]
        (folder / "tokenizer.json").write_text(_train(texts, kind))
        end = "</s>" if kind == "sentencepiece" else "<|endoftext|>"
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    return folder


def _train(texts: list[str], kind: str) -> str:
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers

    from training.data import tokenizer as ours

    if kind == "byte-level":
        return ours._train(32_000, iter(texts))
    # As Llama-2's: no pre-tokenizer, "▁" for a space and before the text, unknown characters as bytes. Pieces are
    # learned word by word, as SentencePiece does; with whole documents as words, training would not end.
    special, letters = ["<unk>", "<s>", "</s>"], [f"<0x{value:02X}>" for value in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    words = (["▁" + word for word in text.split()] for text in texts)
    trainer = trainers.BpeTrainer(
        vocab_size=32_000,
        special_tokens=special + letters,
        limit_alphabet=1000,
        max_token_length=16,
        show_progress=False,
    )
    tokenizer.train_from_iterator((word for text in words for word in text), trainer)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = content["added_tokens"][: len(special)]  # the bytes are letters, not special tokens
    return json.dumps(content, ensure_ascii=False)


def main() -> None:
    """Print the table, or one measurement for `_child`."""
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(_measure(*sys.argv[2:5])))
        return
    for row in run(quick="--quick" in sys.argv):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
