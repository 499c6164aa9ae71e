"""All stages one after the other, from text files to a folder that transformers loads."""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path

import yaml
from processes import context
from transformers import AutoTokenizer, LlamaForCausalLM

from training.cli import main
from training.metrics import read_metrics

TEXT = "the a small large red old cat dog model cluster reads writes trains sees stage node loss token"
WORDS = TEXT.split()


def write_text(folder: Path) -> None:
    """Sixty files of sentences in which each word tells something of the next."""
    folder.mkdir()
    chooser = random.Random(1)
    for number in range(60):
        words, at = [], chooser.randrange(len(WORDS))
        for _ in range(300):
            words.append(WORDS[at])
            at = (at * 3 + chooser.randrange(3)) % len(WORDS)
        (folder / f"{number}.txt").write_text(" ".join(words) + ".")


def arguments(folder: Path, steps: int) -> list[str]:
    settings = {
        "data.source": f"text:{folder}/text/*.txt",
        "data.tokenizer": "train:300",
        "data.validation_fraction": 0.1,
        "model.hidden_size": 64,
        "model.intermediate_size": 128,
        "model.num_hidden_layers": 2,
        "model.vocab_size": 300,
        "train.seq_length": 64,
        "train.global_batch_size": 8,
        "train.micro_batch_size": 8,
        "train.steps": steps,
        "train.learning_rate": 5e-3,
        "train.eval_every": 20,
        "train.compile": "false",
        "checkpoint.every": 20,
        "run.dir": folder / "run",
        "run.backend": "cpu",
    }
    return ["run", *(part for key, value in settings.items() for part in (f"--{key}", str(value)))]


def in_a_process(terminal: Path, *argv: str) -> str:
    """The command line in a process of its own: nothing is left of one command when the next starts.

    What it prints, by way of the file `terminal`: the children's server may be older than this test, and then its
    standard output is not the one that pytest captures here.
    """
    child = context.Process(target=_exit_with_main, args=(terminal, list(argv)))
    child.start()
    child.join(300)
    assert child.exitcode == 0
    return terminal.read_text()


def _exit_with_main(terminal: Path, argv: list[str]) -> None:
    with terminal.open("w") as file:
        os.dup2(file.fileno(), 1)
    raise SystemExit(main(argv))


def test_from_text_to_a_model_that_transformers_loads(tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    out = in_a_process(tmp_path / "terminal", *arguments(tmp_path, 60))
    run = tmp_path / "run"
    for name in (
        "settings.yaml",
        "manifest.json",
        "metrics.jsonl",
        "loss.png",
        "report.html",
        "checkpoints",
        "tensorboard",
    ):
        assert (run / name).exists(), name
    assert [path.name for path in (run / "checkpoints").glob("step-*")].count("step-00000060") == 1
    assert {name: stage["status"] for name, stage in json.loads((run / "stages.json").read_text()).items()} == {
        "prepare": "done",
        "precompile": "done",
        "train": "done",
        "report": "done",
    }
    valid = [record["loss"] for record in read_metrics(run / "metrics.jsonl") if record["type"] == "valid"]
    entropy = json.loads((run / "manifest.json").read_text())["unigram_entropy"]
    assert len(valid) == 3
    assert valid[-1] < entropy - 0.5
    assert re.search(r"validation loss +\d\.\d+ nats, \d\.\d+ below the unigram entropy", out)
    assert f"--logdir {run / 'tensorboard'}" in out
    assert f"--config {run / 'settings.yaml'} --train.steps 120" in out.replace("\n", "")
    assert yaml.safe_load((run / "settings.yaml").read_text())["train"]["steps"] == 60

    store = {path.name: path.stat().st_mtime_ns for path in (run / "data").glob("*.bin")}
    in_a_process(tmp_path / "terminal", *arguments(tmp_path, 80))  # trains on; what is prepared stays as it is
    assert {path.name: path.stat().st_mtime_ns for path in (run / "data").glob("*.bin")} == store
    starts = [record["step"] for record in read_metrics(run / "metrics.jsonl") if record["type"] == "start"]
    assert starts == [0, 60]

    in_a_process(tmp_path / "terminal", "export", "--run.dir", str(run))
    model = LlamaForCausalLM.from_pretrained(run / "export")
    tokenizer = AutoTokenizer.from_pretrained(run / "export")
    inputs = tokenizer((tmp_path / "text" / "0.txt").read_text(), return_tensors="pt")
    ids = inputs.input_ids[:, :64]
    assert model(input_ids=ids, labels=ids).loss.item() < entropy - 0.5
