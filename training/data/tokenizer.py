"""Which token ids stand for the text: a tokenizer trained here or loaded, and the encoder that applies it.

    tokenizer = make_tokenizer(settings.data, folder, sample)     # writes folder/tokenizer/
    name, why = choose_encoder(tokenizer, texts)
    ids, lengths = Encoder(tokenizer, name).encode(texts)

`gigatoken` encodes many times faster than `tokenizers` and is meant to give the same ids; `choose_encoder` checks
that on the very input before a run trusts it. No encoder adds special tokens.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from training.config import Data
from training.data.store import write_json
from training.errors import UserError

FOLDER = "tokenizer"
END_OF_TEXT = "<|endoftext|>"
TRAINING_SAMPLE = 64 << 20  # bytes of the source that `train:N` learns from, evenly spaced over it
_END_NAMES = ("</s>", "<|end_of_text|>", END_OF_TEXT)
# The split of Llama-3's tokenizer (the `pre_tokenizer` of its tokenizer.json): contractions, words with the one
# character before them, up to three digits, punctuation, line ends, spaces.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer.json and what the store needs to know of it."""

    json_text: str
    vocab_size: int  # the largest id and one
    eod_id: int | None

    @property
    def sha256(self) -> str:
        """Of the bytes of tokenizer.json."""
        return hashlib.sha256(self.json_text.encode()).hexdigest()


def make_tokenizer(data: Data, folder: Path, sample: Callable[[int], Iterator[str]]) -> TextTokenizer:
    """The tokenizer that `data.tokenizer` names, saved as `folder/tokenizer/` for `transformers.AutoTokenizer`.

    `sample(n)` gives about n bytes of training text, for `train:N`. A tokenizer that is there already is used as it
    is: the caller has made sure that it is of these settings. `UserError` when it cannot be loaded.
    """
    target = folder / FOLDER
    if not (target / "tokenizer_config.json").exists():
        if data.trained_vocab_size:
            json_text, config = _train(data.trained_vocab_size, sample(TRAINING_SAMPLE)), _config(END_OF_TEXT)
        else:
            json_text, found = _load(data.tokenizer)
            config = found or _config(_usual_end(_vocabulary(json_text, data.tokenizer)))
        _vocabulary(json_text, data.tokenizer)
        target.mkdir(parents=True, exist_ok=True)
        temporary = target / "tokenizer.json.tmp"
        temporary.write_text(json_text, encoding="utf-8")
        os.replace(temporary, target / "tokenizer.json")
        write_json(target / "tokenizer_config.json", config)  # last: with it the tokenizer is whole
    return read_tokenizer(target, data.tokenizer)


def read_tokenizer(folder: Path, name: str) -> TextTokenizer:
    """The tokenizer in `folder`; `name` is what a `UserError` calls it."""
    json_text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    vocabulary = _vocabulary(json_text, name)
    end = config.get("eos_token") or _usual_end(vocabulary)
    end = end["content"] if isinstance(end, dict) else end
    return TextTokenizer(json_text, max(vocabulary.values()) + 1, vocabulary.get(end) if end else None)


def tokenizer_file_hash(name: str) -> str | None:
    """sha256 of the tokenizer.json that a local path names, else None: whether it changed since a store was made."""
    path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def choose_encoder(tokenizer: TextTokenizer, texts: list[str]) -> tuple[str, str]:
    """("gigatoken" or "tokenizers", why): gigatoken where it is installed and gives the same ids on `texts`."""
    reference = Encoder(tokenizer, "tokenizers").encode(texts)
    try:
        ids, lengths = Encoder(tokenizer, "gigatoken").encode(texts)
    except ImportError:
        return "tokenizers", "gigatoken is not installed"
    except Exception as error:  # noqa: BLE001 - whatever it cannot do, tokenizers can
        return "tokenizers", f"gigatoken cannot use this tokenizer ({str(error).partition(chr(10))[0]})"
    if not np.array_equal(lengths, reference[1]) or not np.array_equal(ids, reference[0]):
        ours, theirs = _rows(ids, lengths), _rows(*reference)
        differing = next(text for text, a, b in zip(texts, ours, theirs, strict=True) if not np.array_equal(a, b))
        return "tokenizers", f"gigatoken gives other ids than tokenizers for {differing[:60]!r}"
    return "gigatoken", f"gigatoken gives the ids of tokenizers on {len(texts)} documents of the input"


def _rows(ids: npt.NDArray[np.uint32], lengths: npt.NDArray[np.int64]) -> list[npt.NDArray[np.uint32]]:
    return np.split(ids, np.cumsum(lengths)[:-1])


class Encoder:
    """Texts to ids, by `gigatoken` or `tokenizers`. May be used from several threads at one time."""

    def __init__(self, tokenizer: TextTokenizer, name: str) -> None:
        self.name = name
        if name == "gigatoken":
            self._gigatoken = _gigatoken(tokenizer.json_text)
        else:
            self._tokenizers = _tokenizers(tokenizer.json_text)

    def encode(self, texts: list[str]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """(ids of all texts end to end, ids of each), shapes (tokens,) and (texts,)."""
        if not texts:
            return np.empty(0, np.uint32), np.empty(0, np.int64)
        if self.name == "gigatoken":
            # On the calling thread: the caller runs one batch a core. Its own pool needs the interpreter's lock, and
            # waits for it whenever another thread reads or parses.
            layout = self._gigatoken.encode_batch(texts, parallel=False).layout
            offsets = np.asarray(layout.offsets.data)
            ids = np.asarray(layout.content.data)[offsets[0] : offsets[-1]]
            return ids, np.diff(offsets)
        encodings = self._tokenizers.encode_batch_fast(texts, add_special_tokens=False)
        lengths = np.array([len(encoding) for encoding in encodings], np.int64)
        ids = np.empty(int(lengths.sum()), np.uint32)
        for encoding, end, length in zip(encodings, np.cumsum(lengths), lengths, strict=True):
            ids[end - length : end] = encoding.ids
        return ids, lengths


# A tokenizer of a hundred thousand ids takes a second to read, and is asked for at every turn of `prepare`.
@functools.lru_cache(maxsize=1)
def _gigatoken(json_text: str) -> Any:
    import gigatoken

    return gigatoken.Tokenizer.from_json(json_text)


@functools.lru_cache(maxsize=1)
def _tokenizers(json_text: str) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(json_text)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _train(vocab_size: int, texts: Iterator[str]) -> str:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return str(tokenizer.to_str())


def _config(end: str | None) -> dict[str, Any]:
    names = {"bos_token": end, "eos_token": end} if end else {}
    return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names}


def _usual_end(vocabulary: dict[str, int]) -> str | None:
    return next((name for name in _END_NAMES if name in vocabulary), None)


def _vocabulary(json_text: str, name: str) -> dict[str, int]:
    try:
        vocabulary = _tokenizers(json_text).get_vocab(with_added_tokens=True)
    except Exception as error:  # noqa: BLE001 - tokenizers raises plain Exception
        reason = str(error).partition("\n")[0]
        raise UserError(f"data.tokenizer: {name} cannot be loaded ({reason}), expected a tokenizer.json") from None
    if not vocabulary:
        raise UserError(f"data.tokenizer: {name} has an empty vocabulary, expected a trained tokenizer")
    return dict(vocabulary)


def _load(name: str) -> tuple[str, dict[str, Any] | None]:
    """The text of tokenizer.json and the content of tokenizer_config.json, if there is one."""
    path = Path(name)
    if path.exists():
        folder, file = (path, path / "tokenizer.json") if path.is_dir() else (path.parent, path)
        config = folder / "tokenizer_config.json"
    else:
        file, config = _download(name)
    try:
        found = json.loads(config.read_text(encoding="utf-8")) if config.exists() else None
        return file.read_text(encoding="utf-8"), found
    except (OSError, ValueError) as error:
        raise UserError(f"data.tokenizer: {name} cannot be read ({error}), expected a tokenizer.json") from None


def _download(name: str) -> tuple[Path, Path]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HFValidationError, RepositoryNotFoundError

    where = f"data.tokenizer: {name}"
    try:
        file = Path(hf_hub_download(name, "tokenizer.json"))
        try:
            return file, Path(hf_hub_download(name, "tokenizer_config.json"))
        except EntryNotFoundError:
            return file, file.with_name("tokenizer_config.json")
    except GatedRepoError:
        raise UserError(f"{where} is a gated repository, expected HF_TOKEN set to a token that may read it") from None
    except HFValidationError:
        raise UserError(f"{where} is no file or folder, expected train:VOCAB_SIZE, a path or a Hub name") from None
    except RepositoryNotFoundError:
        raise UserError(f"{where} is no file, folder or Hub repository (a private one needs HF_TOKEN)") from None
    except EntryNotFoundError:
        raise UserError(f"{where} has no tokenizer.json, expected a repository with one") from None
    except Exception as error:  # noqa: BLE001 - the network's many kinds
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(f"{where} is no file or folder, and the Hub cannot be reached ({reason})") from None
