"""The command line: what is refused, in one line each and with nothing left behind; how a run goes on; `--help`."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner
from makers import SettingsMaker, TokenStoreMaker

from training.cli import cli, main
from training.config import load_settings, preset_names, setting_fields
from training.data.store import write_json
from training.rundir import RunDir

ROOT = Path(__file__).parents[2]
Refused = Callable[..., str]

HOLD = """
import sys
from pathlib import Path
from training.rundir import RunDir
with RunDir(Path(sys.argv[1])).lock():
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test starts in an empty folder, so that the default `runs/default` is its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """`refused("train", "--train.steps", "x")`: the one line on standard error, without `error: `."""

    def run(*argv: object) -> str:
        code = main([str(arg) for arg in argv])
        out, err = capsys.readouterr()
        assert code == 2
        assert "Traceback" not in err + out
        lines = err.splitlines()
        assert len(lines) == 1, err
        assert lines[0].startswith("error: ")
        return lines[0].removeprefix("error: ")

    return run


@pytest.fixture
def small(tmp_path: Path, small_settings: SettingsMaker, token_store: TokenStoreMaker) -> Path:
    """A file of settings for a run in `run/` that has a store in `data/`."""
    settings = small_settings(tmp_path, train__steps=4, train__eval_every=4, checkpoint__every=2)
    token_store(settings.data_dir)
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(settings.resolved()))
    return file


@pytest.fixture(scope="module")
def trained_once(
    tmp_path_factory: pytest.TempPathFactory, small_settings: SettingsMaker, token_store: TokenStoreMaker
) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    settings = small_settings(Path(), train__steps=4, train__eval_every=4, checkpoint__every=2)
    (folder / "small.yaml").write_text(yaml.safe_dump(settings.resolved()))
    token_store(folder / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", "--config", "small.yaml"]) == 0
    return folder


@pytest.fixture
def trained(folder: Path, trained_once: Path) -> Path:
    """A copy of a finished run of four steps, its settings, and its store, in the current folder; its run folder."""
    shutil.copytree(trained_once, folder, dirs_exist_ok=True)
    return folder / "run"


@pytest.fixture
def live_run(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A second process that holds the run `run/`."""
    argv = [sys.executable, "-c", HOLD, str(folder / "run")]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        yield holder
        holder.kill()


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below, except the locks'."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".lock"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


WORDS = [
    (["trian"], "trian: unknown stage, did you mean train?"),
    (["--preset", "tiny", "train"], "No such option '--preset', expected STAGE [--preset NAME | --config FILE]"),
    (["train", "--train.stepz", "3"], "--train.stepz: unknown option, did you mean --train.steps?"),
    (["train", "--frobnicate=3"], "--frobnicate: unknown option, expected [--preset NAME | --config FILE]"),
    (["train", "--train.steps"], "--train.steps: no value, expected one after it"),
    (["train", "--train.steps", "--train.seed", "3"], "--train.steps: no value, expected one after it"),
    (["train", "--preset"], "--preset: no value, expected one after it"),
    (["train", "20"], "20: stands alone, expected [--preset NAME | --config FILE]"),
    (["train", "--train.steps", "30", "40"], "40: stands alone, expected [--preset NAME | --config FILE]"),
    (["train", "-s", "3"], "No such option '-s', expected STAGE"),
    (["train", "--train.steps", "30", "--train.steps=40"], "--train.steps: given 2 times (30, 40), expected once"),
    (["train", "--workers", "1", "--parallel.workers", "2"], "--parallel.workers: given 2 times (1, 2), expected once"),
    (["train", "--preset", "tiny", "--preset", "tiny"], "--preset: given 2 times (tiny, tiny), expected once"),
    (["train", "--preset", "tinny"], "--preset: unknown preset 'tinny', did you mean tiny?"),
    (["train", "--preset", "tiny", "--config", "a.yaml"], "--preset and --config: expected one of them, not both"),
    (["train", "--config", "no.yaml"], "no.yaml: cannot be read (No such file or directory), expected a YAML file"),
    (["train", "--config", "."], ".: cannot be read (Is a directory), expected a YAML file"),
    (["train", "--config="], ".: cannot be read (Is a directory), expected a YAML file"),
    (["train", "--train.seed", "-1"], "train.seed: -1, expected at least 0"),
    (["train", "--train.steps="], "train.steps: '', expected printable text"),
    (["train", "--train.steps", "zwölf"], "train.steps: zwölf, expected a whole number"),
    (["train", "--workers", "0"], "parallel.workers: 0, expected at least 1"),
    (["train", "--launcher", "slurm"], "run.launcher: slurm, expected one of 'local', 'ray' or 'mpi'"),
    (["prepare", "--run.dir", "\udcff"], "run.dir: '\\udcff', expected printable text"),
    (["train", "--train.warmup_steps", "300"], "train.warmup_steps: 300, expected at most train.steps (200)"),
    (["train", "--workers", "3"], "train.global_batch_size: 16, expected a multiple of 48"),
    (["run", "--data.tokenizer", "train:9000"], "data.tokenizer: train:9000, expected at most model.vocab_size (8192)"),
    (["report"], "run.dir: runs/default has no settings.yaml, expected the folder of a run"),
    (["report", "--preset", "tiny"], "run.dir: runs/tiny has no settings.yaml, expected the folder of a run"),
    (["export", "--run.dir", "elsewhere"], "run.dir: elsewhere has no settings.yaml, expected the folder of a run"),
]


@pytest.mark.parametrize(("argv", "message"), WORDS, ids=[ascii(" ".join(argv)) for argv, _ in WORDS])
def test_a_bad_command_line_is_one_line(refused: Refused, folder: Path, argv: list[str], message: str) -> None:
    assert refused(*argv).startswith(message)
    assert not list(folder.iterdir())


def test_no_stage_shows_the_stages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert "Stages:" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("stage", ["train", "run", "prepare", "precompile"])
def test_a_run_folder_that_is_no_folder(refused: Refused, folder: Path, stage: str) -> None:
    (folder / "file").write_text("mine")
    for path in ("file", "file/below"):
        assert re.match(
            rf"run.dir: {path} cannot be used \((File exists|Not a directory)\)", refused(stage, "--run.dir", path)
        )
    assert contents(folder) == {"file": b"mine"}


def test_a_run_folder_that_cannot_be_written(refused: Refused, folder: Path) -> None:
    locked = Path("/sys/kernel")  # where root may not write either
    if os.geteuid():
        locked = folder / "locked"
        locked.mkdir(mode=0o500)
    assert refused("train", "--run.dir", locked).startswith(f"run.dir: {locked} cannot be used (Permission denied)")
    assert refused("train", "--run.dir", locked / "new").startswith(f"run.dir: {locked / 'new'} cannot be used (")


@pytest.mark.parametrize("stage", ["train", "run", "prepare", "precompile"])
def test_a_run_in_use_is_refused(
    refused: Refused, small: Path, folder: Path, live_run: subprocess.Popen[str], stage: str
) -> None:
    before = contents(folder)
    message = refused(stage, "--config", small)
    assert message.startswith(f"run.dir: {folder / 'run'} is in use by process {live_run.pid} on ")
    assert contents(folder) == before


def test_a_killed_process_does_not_hold_its_run(
    refused: Refused, folder: Path, live_run: subprocess.Popen[str]
) -> None:
    live_run.kill()
    live_run.wait()
    assert "manifest.json: not found" in refused("train", "--run.dir", folder / "run")


def unsuited(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest of the store in `folder`."""
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    write_json(folder / "manifest.json", manifest)


def test_training_without_a_manifest(refused: Refused, folder: Path, small: Path) -> None:
    (folder / "data/manifest.json").unlink()
    wanted = f"{folder / 'data/manifest.json'}: not found, expected a prepared token store: run `prepare` first"
    assert refused("train", "--config", small) == wanted
    assert set(contents(folder / "run")) == {"settings.yaml"}


def test_training_on_the_store_of_another_tokenizer(refused: Refused, folder: Path, small: Path) -> None:
    message = refused("train", "--config", small, "--data.tokenizer", "train:300")
    assert message.startswith(f"data.tokenizer: train:300, but the store in {folder / 'data'} was made with train:512")


def test_a_vocabulary_larger_than_the_models(refused: Refused, folder: Path, small: Path) -> None:
    unsuited(folder / "data", lambda manifest: manifest.update(vocab_size=513))
    assert refused("train", "--config", small).startswith("model.vocab_size: 512, expected at least 513")


@pytest.mark.parametrize("tokens", [0, 1, 16])
def test_a_sequence_longer_than_the_corpus(
    refused: Refused, folder: Path, small: Path, token_store: TokenStoreMaker, tokens: int
) -> None:
    shutil.rmtree(folder / "data")
    token_store(folder / "data", tokens=tokens)
    message = refused("train", "--config", small)
    assert message.startswith(f"train.seq_length: 16, but the train part of {folder / 'data'} has {tokens} tokens")
    assert set(contents(folder / "run")) == {"settings.yaml"}


def test_a_damaged_store(refused: Refused, folder: Path, small: Path) -> None:
    with (folder / "data/train.bin").open("ab") as file:
        file.truncate(1000)
    message = refused("train", "--config", small)
    assert message == f"{folder / 'data/train.bin'}: 1000 bytes, expected 40000: run `prepare` again"


@pytest.mark.parametrize("stage", ["train", "run", "precompile"])
@pytest.mark.parametrize(
    ("backend", "message"),
    [
        (
            "neuron",
            "run.backend: neuron, but neuronx_distributed is not installed here, expected the image of "
            "training/Dockerfile",
        ),
        ("cuda", "run.backend: cuda, but torch sees no GPU on this machine, expected auto or cpu"),
    ],
)
def test_a_device_that_is_not_here(
    refused: Refused, small: Path, monkeypatch: pytest.MonkeyPatch, stage: str, backend: str, message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("training.backends.neuron.installed", lambda: False)
    monkeypatch.setattr("training.data.prepare.prepare", lambda *args: pytest.fail("before the device was looked for"))
    assert refused(stage, "--config", small, "--run.backend", backend) == message


@pytest.mark.parametrize("stage", ["train", "run", "precompile"])
def test_layers_are_shared_on_neuron_only(refused: Refused, small: Path, stage: str) -> None:
    shared = ("--workers", "2", "--parallel.tensor_parallel_size", "2", "--run.backend", "cpu")
    message = "parallel.tensor_parallel_size: 2, expected 1: the cpu backend has no tensor parallelism"
    assert refused(stage, "--config", small, *shared) == message


CHANGES = [
    ({"model.num_hidden_layers": "3"}, "model.num_hidden_layers: 3, but {checkpoint} was made with 2"),
    ({"model.rope_theta": "500000"}, "model.rope_theta: 500000.0, but {checkpoint} was made with 10000.0"),
    ({"model.tie_word_embeddings": "yes"}, "model.tie_word_embeddings: true, but {checkpoint} was made with false"),
    (
        {"model.vocab_size": "600", "model.hidden_size": "64"},
        "model.hidden_size: 64, but {checkpoint} was made with 32",
    ),
    ({"train.seed": "5"}, "train.seed: 5, but {checkpoint} was made with 1234"),
    ({"train.global_batch_size": "8"}, "train.global_batch_size: 8, but {checkpoint} was made with 4"),
    ({"train.seq_length": "8"}, "train.seq_length: 8, but {checkpoint} was made with 16"),
    ({"train.steps": "3"}, "train.steps: 3, but {checkpoint} is at step 4; expected at least that"),
]


@pytest.mark.parametrize("stage", ["train", "run", "prepare"])
@pytest.mark.parametrize(("change", "message"), CHANGES, ids=[" ".join(change) for change, _ in CHANGES])
def test_a_resume_that_differs_is_refused_and_changes_nothing(
    refused: Refused, folder: Path, trained: Path, stage: str, change: dict[str, str], message: str
) -> None:
    before = contents(folder)
    options = [word for key, value in change.items() for word in (f"--{key}", value)]
    found = refused(stage, "--config", "small.yaml", *options)
    assert found.startswith(message.format(checkpoint="run/checkpoints/step-00000004"))
    assert contents(folder) == before


def test_a_resume_on_another_tokenizer_is_refused_and_changes_nothing(
    refused: Refused, folder: Path, trained: Path
) -> None:
    unsuited(folder / "data", lambda manifest: manifest.update(tokenizer_sha256="another"))
    before = contents(folder)
    assert refused("train", "--config", "small.yaml", "--train.learning_rate", "0.1") == (
        "data.output: the store in data has another tokenizer than the one that run/checkpoints/step-00000004 was "
        "trained with; expected the same, or another run.dir"
    )
    assert contents(folder) == before


def test_training_goes_on_from_the_settings_of_the_run(folder: Path, trained: Path) -> None:
    """`settings.yaml` is a `--config`; what may change on resuming does, and is written down."""
    assert (
        load_settings(config=trained / "settings.yaml").resolved()
        == load_settings(config=Path("small.yaml")).resolved()
    )
    assert main(["train", "--config", "run/settings.yaml", "--train.steps", "6", "--train.learning_rate", "0.01"]) == 0
    records = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if r["type"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert [r["step"] for r in records if r["type"] == "start"] == [0, 4]
    settings = load_settings(config=trained / "settings.yaml")
    assert (settings.train.steps, settings.train.learning_rate) == (6, 0.01)
    stage = RunDir(trained).stages()["train"]
    assert (stage["status"], stage["summary"]) == ("done", "6 steps")


def test_report_reads_the_settings_of_the_run_it_is_given(folder: Path, trained: Path) -> None:
    assert main(["report", "--run.dir", "run"]) == 0
    assert {"report.html", "loss.png"} <= set(contents(trained))
    assert not (folder / "runs").exists()


def test_report_before_training(refused: Refused, folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run/settings.yaml").write_text("run: {dir: run}\n")
    assert refused("report", "--run.dir", "run").startswith("run/metrics.jsonl: no step of training in it")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stop_between_leaves_a_run_that_goes_on(
    folder: Path,
    small: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    code: int,
) -> None:
    def interrupted(*args: object) -> None:
        os.kill(os.getpid(), number)
        signal.pause()

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("training.data.prepare.prepare", interrupted)
    assert main(["run", "--config", str(small)]) == code
    assert capsys.readouterr().err.lstrip() == "stopped: the same command goes on from what is done\n"
    run = RunDir(folder / "run")
    assert {name: stage["status"] for name, stage in run.stages().items()} == {"prepare": "failed"}
    with run.lock():
        assert load_settings(config=run.settings).resolved() == load_settings(config=small).resolved()
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_a_disk_that_takes_no_more_is_one_line(
    refused: Refused, small: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(*args: object) -> None:
        raise OSError(number, os.strerror(number), "/shared/data/train.bin")

    monkeypatch.setattr("training.data.prepare.prepare", full)
    assert refused("prepare", "--config", small).startswith(f"/shared/data/train.bin: {os.strerror(number)}, expected")


def test_a_bug_keeps_its_traceback(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr("training.data.prepare.prepare", broken)
    with pytest.raises(OSError, match="Bad file descriptor"):
        main(["prepare", "--config", str(small)])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["train", "--preset", "tinny"], "error: --preset: unknown preset 'tinny', did you mean tiny?\n"),
        (["train", "--train.steps", "zwölf"], "error: train.steps: zw\\xf6lf, expected a whole number\n"),
        (
            ["train"],
            "error: runs/default/data/manifest.json: not found, expected a prepared token store: run `prepare` first\n",
        ),
    ],
)
def test_python_m_training_ends_with_one_line(folder: Path, argv: list[str], message: str) -> None:
    """In a real process, whose standard error is no terminal and takes ASCII only."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii:backslashreplace"}
    command = [sys.executable, "-m", "training", *argv]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


@pytest.mark.parametrize("width", [80, 120])
def test_help_fits_and_lists_everything(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    pages = {stage: CliRunner().invoke(cli, [stage, "--help"]).output for stage in cli.commands}
    pages[""] = CliRunner().invoke(cli, ["-h"]).output
    for page in pages.values():
        assert max(map(len, page.splitlines())) <= width
    for name in (*cli.commands, *preset_names()):
        assert re.search(rf"^  {name} +\w", pages[""], re.MULTILINE), name
    for name in setting_fields():
        assert re.search(rf"^  --{name}[ ,]", pages["train"], re.MULTILINE), name
    assert len(pages["report"].splitlines()) < 30
