"""Sources: what a document is does not depend on the cut, and each kind of bad input is one clear line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.config import Data
from training.data import readers, spool
from training.data.sources import Source, open_source
from training.errors import UserError

# No lone surrogates, which UTF-8 does not have.
words = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)


def documents(source: Source, pieces: Any = None) -> list[str]:
    """The documents of some pieces, or of all shards one after another."""
    found = [pieces] if pieces is not None else source.shards
    return [text for shard in found for batch in source.read(shard) for text in batch.texts]


def data(source: str, **values: Any) -> Data:
    return Data(source=source, **values)


def many_shards(source: Source) -> Source:
    """The same source, a shard a unit."""
    return Source(source.kind, source.files, source.text_key, source.skip_bad, 1)


class Notes:
    def update(self, done: float, total: float | None = None, **fields: Any) -> None: ...

    def note(self, text: str) -> None: ...


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(words, max_size=30),
    unit=st.integers(1, 80),
    batch=st.integers(1, 200),
    blank=st.booleans(),
    last=st.booleans(),
)
def test_jsonl_gives_each_line_once_wherever_it_is_cut(
    tmp_path_factory: Any, texts: list[str], unit: int, batch: int, blank: bool, last: bool
) -> None:
    file = tmp_path_factory.mktemp("jsonl") / "a.jsonl"
    lines = [json.dumps({"id": i, "text": t}, ensure_ascii=i % 2 == 0) for i, t in enumerate(texts)]
    joined = ("\n\n" if blank else "\n").join(lines) + ("\n" if last else "")
    file.write_text(joined, encoding="utf-8", newline="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "BATCH", batch)
        patch.setattr("training.data.sources.BATCH", batch)
        patch.setattr(readers, "UNIT", unit)
        patch.setattr("training.data.sources.UNIT", unit)
        source = open_source(data(f"jsonl:{file}"))
        assert documents(source) == [text for text in texts if text]
        assert documents(many_shards(source)) == [text for text in texts if text]


@settings(max_examples=60, deadline=None)
@given(text=words.flatmap(lambda w: st.lists(st.sampled_from(["\n\n", "\n", "é", "x y", w]), max_size=40)))
def test_big_text_files_lose_nothing_and_split_alike(tmp_path_factory: Any, text: list[str]) -> None:
    content = "".join(text).replace("\0", "")
    file = tmp_path_factory.mktemp("text") / "a.txt"
    file.write_bytes(content.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "UNIT", 7)
        patch.setattr("training.data.sources.UNIT", 7)
        source = open_source(data(f"text:{file}"))
        parts = documents(source)
        assert "".join(parts) == content
        assert documents(many_shards(source)) == parts


def test_big_text_files_split_after_blank_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("one two\nthree\n\nfour five six\n\nseven")
    monkeypatch.setattr(readers, "UNIT", 14)
    monkeypatch.setattr("training.data.sources.UNIT", 14)
    assert documents(open_source(data(f"text:{tmp_path}/*"))) == ["one two\nthree\n\n", "four five six\n\n", "seven"]


def test_a_text_file_is_a_document_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("b/2.txt", "a.txt", "b/1.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"this is {name}")
    assert documents(open_source(data(f"text:{tmp_path}/**/*.txt"))) == [
        "this is a.txt",
        "this is b/1.txt",
        "this is b/2.txt",
    ]


def test_compressed_jsonl(tmp_path: Path) -> None:
    lines = b"".join(json.dumps({"text": f"document {i}"}).encode() + b"\n" for i in range(100))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "b.jsonl.zst").write_bytes(pa.Codec("zstd").compress(lines, asbytes=True))
    assert documents(open_source(data(f"jsonl:{tmp_path}/*"))) == [f"document {i}" for i in range(100)] * 2
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines)[:-20])
    with pytest.raises(UserError, match=r"a\.jsonl\.gz: cannot be read"):
        documents(open_source(data(f"jsonl:{tmp_path}/*")))


def test_parquet_row_groups(tmp_path: Path) -> None:
    texts = [f"row {i}" * (i % 7) for i in range(100)]
    pq.write_table(pa.table({"n": range(100), "body": texts}), tmp_path / "a.parquet", row_group_size=9)
    source = open_source(data(f"parquet:{tmp_path}/*", text_key="body"))
    assert documents(source) == [text for text in texts if text]
    assert len(many_shards(source).shards) == 12
    assert documents(many_shards(source)) == [text for text in texts if text]


def test_the_cut_is_a_function_of_the_sizes(tmp_path: Path) -> None:
    for name, size in (("a", 3), ("b", 5), ("c", 1)):
        (tmp_path / name).write_bytes(b"x" * (size << 20))
    source = open_source(data(f"text:{tmp_path}/*", shard_mb=4))
    assert [[(Path(p.path).name, p.start, p.end) for p in shard] for shard in source.shards] == [
        [("a", 0, 3), ("b", 0, 1)],
        [("b", 1, 5)],
        [("c", 0, 1)],
    ]
    assert sum(source.piece_bytes(shard) for shard in source.shards) == source.num_bytes == 9 << 20


BAD = [
    ("jsonl", b'{"text": "a"}\n\n{"text": \n', r"a:3: not JSON"),
    ("jsonl", b'{"text": "a"}\n{"txt": "b"}\n', r"a:2: no text in the field 'text'"),
    ("jsonl", b'{"text": "a"}\n{"text": null}\n', r"a:2: no text in the field 'text'"),
    ("jsonl", b'{"text": "a"}\n["text"]\n', r"a:2: no text in the field"),
    ("jsonl", b'{"text": "a"}{"text": "b"}\n', r"a:1: not JSON"),
    ("jsonl", b'{"text": "a\xff"}\n', r"a:1: not JSON"),
    ("jsonl", b'{"text": "\\ud800"}\n', r"a:1: not JSON"),
    ("text", b"some\0thing", r"a: a NUL byte at byte 4"),
    ("text", b"caf\xe9 au lait", r"a: not UTF-8 at byte 3"),
    ("parquet", b"PAR1 or not", r"a: not readable as Parquet"),
]


@pytest.mark.parametrize(("kind", "content", "message"), BAD)
def test_bad_input_is_one_line(tmp_path: Path, kind: str, content: bytes, message: str) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        documents(open_source(data(f"{kind}:{tmp_path}/*")))
    assert "\n" not in str(caught.value)


def test_the_line_number_counts_from_the_start_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "BATCH", 64)
    monkeypatch.setattr(readers, "UNIT", 100)
    monkeypatch.setattr("training.data.sources.UNIT", 100)
    (tmp_path / "a").write_bytes(b'{"text": "a"}\n' * 99 + b"oops\n" + b'{"text": "a"}\n' * 9)
    with pytest.raises(UserError, match="a:100: not JSON"):
        documents(many_shards(open_source(data(f"jsonl:{tmp_path}/a"))))


def test_skip_bad_counts(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b'{"text": "a"}\n{"tex\n{"b": 1}\n{"text": "c"}\n')
    source = open_source(data(f"jsonl:{tmp_path}/a", skip_bad=True))
    assert documents(source) == ["a", "c"]
    assert sum(batch.skipped for shard in source.shards for batch in source.read(shard)) == 2


def test_parquet_says_column_and_row(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", None], "n": [1, 2]}), tmp_path / "a.parquet")
    for key, message in (("text", "row 2: no text"), ("n", "is int64, expected string"), ("x", "found text, n")):
        with pytest.raises(UserError, match=message):
            documents(open_source(data(f"parquet:{tmp_path}/*", text_key=key)))
    with pytest.raises(UserError, match="matches no file"):
        open_source(data(f"parquet:{tmp_path}/nothing*"))


def test_pydocs_is_the_librarys_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "lib"
    (library / "test").mkdir(parents=True)
    (library / "a.py").write_text(
        '"""Module."""\nif True:\n    def f():\n        """In an if."""\n'
        'class C:\n    """Class."""\n    def m(self):\n        """Method."""\n'
        'def g():\n    """Function."""\n    x = """no docstring"""\n'
    )
    (library / "b.py").write_text("this is not python")
    (library / "test" / "c.py").write_text('"""A test."""')
    monkeypatch.setattr(spool.sysconfig, "get_path", lambda _: str(library))
    files, skipped = spool.spool(data("pydocs"), tmp_path / "out", Notes())
    assert documents(open_source(data("pydocs"), files)) == ["Module.", "In an if.", "Class.\n\nMethod.", "Function."]
    assert skipped == 0


def test_a_hub_data_set_is_streamed_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"record {i} " + "word " * 1000 for i in range(1000)]
    repository = tmp_path / "set"
    repository.mkdir()
    (repository / "train.jsonl").write_text("".join(json.dumps({"body": t}) + "\n" for t in texts))
    settings = data(f"hub:{repository}", text_key="body", shard_mb=1)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    whole, _ = spool.spool(settings, tmp_path / "whole", Notes())
    assert documents(open_source(settings, whole)) == texts
    assert len(whole) == 5

    class Stop(Notes):
        def note(self, text: str) -> None:
            if "records" in text:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        spool.spool(settings, tmp_path / "cut", Stop())
    assert len(list((tmp_path / "cut" / spool.FOLDER).glob("part-*"))) == 1
    again, _ = spool.spool(settings, tmp_path / "cut", Notes())
    assert [Path(f).read_bytes() for f in again] == [Path(f).read_bytes() for f in whole]


def test_hub_errors_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def gated(*_: Any, **__: Any) -> Any:
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'x/y' is a gated dataset on the Hub.\nMore")

    monkeypatch.setattr(datasets, "load_dataset", gated)
    with pytest.raises(UserError, match=r"hub:x/y cannot be loaded .*HF_TOKEN") as caught:
        spool.spool(data("hub:x/y"), tmp_path / "a", Notes())
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: iter([{"text": "a"}, {"body": "b"}]))
    with pytest.raises(UserError, match="record 2 has no text in the field 'text'"):
        spool.spool(data("hub:x/y"), tmp_path / "b", Notes())
    assert spool.spool(data("hub:x/y", skip_bad=True), tmp_path / "c", Notes())[1] == 1


def test_a_data_set_with_a_loading_script_is_read_from_its_parquet_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    calls = []

    def load(*args: Any, **named: Any) -> Any:
        calls.append((args, named))
        if "revision" not in named:
            raise RuntimeError("Dataset scripts are no longer supported, but found wikicorpus.py")
        return iter([{"text": "a"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    spool.spool(data("hub:wikicorpus/raw_en"), tmp_path, Notes())
    assert calls[0][0] == ("wikicorpus", "raw_en")
    assert calls[1][1]["revision"] == "refs/convert/parquet"
    assert calls[1][1]["data_dir"] == "raw_en"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("wikicorpus/raw_en", ("wikicorpus", "raw_en")),
        ("togethercomputer/RedPajama-Data-1T-Sample", ("togethercomputer/RedPajama-Data-1T-Sample", None)),
        ("allenai/c4/en", ("allenai/c4", "en")),
        ("imdb", ("imdb", None)),
    ],
)
def test_hub_names(name: str, expected: tuple[str, str | None]) -> None:
    assert spool.split_hub_name(name) == expected
