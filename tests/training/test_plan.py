"""`python -m training plan`: its figures, what it refuses and with which dial, and its page."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from infra.catalog import INSTANCE_TYPES
from training import trainium
from training.cli import main
from training.config import load_settings, preset_names
from training.footprint import FORMULAS
from training.plan import NODES, Place, Plan, make_plan, published_mfu, published_run

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def planned(preset: str, nodes: int, place: Place | None = None, **overrides: Any) -> tuple[Plan | None, str | None]:
    fixed = {key.replace("__", "."): str(value) for key, value in overrides.items()}
    return make_plan(lambda more: load_settings(preset, None, fixed | more), place or Place(), nodes)


def fits(preset: str, nodes: int, **overrides: Any) -> Plan:
    made, problem = planned(preset, nodes, **overrides)
    assert problem is None
    assert made is not None
    return made


def refused(preset: str, nodes: int, **overrides: Any) -> str:
    _, problem = planned(preset, nodes, **overrides)
    assert problem is not None
    assert "\n" not in problem
    return problem


def test_the_page_in_the_docs_has_the_plans_of_now() -> None:
    """`python docs/plan_figures.py` writes it, by `make docs`."""
    spec = importlib.util.spec_from_file_location("plan_figures", ROOT / "docs/plan_figures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (ROOT / "docs/trainium.md").read_text(encoding="utf-8")
    assert f"{module.BEGIN}{module.figures()}{module.END}" in page, "run `make docs`"


@pytest.mark.parametrize("name", ["trn1.32xlarge", "trn1n.32xlarge"])
def test_the_node_is_the_platforms(name: str) -> None:
    """training may not import infra, so its figures of a node are compared here."""
    kind = INSTANCE_TYPES[name]
    assert kind.cores == trainium.CORES_PER_NODE
    assert kind.peak_bf16_tflops * 1e12 == pytest.approx(trainium.CORE_PEAK_FLOPS * kind.cores)


@pytest.mark.parametrize("run", trainium.PUBLISHED_RUNS, ids=lambda run: run.preset)
def test_the_published_runs_come_out_at_their_speed(run: trainium.PublishedRun) -> None:
    """The MFU by hand (6 N + 12 L D S a token), and the speed that was published as the plan's."""
    settings = load_settings(run.preset)
    model = settings.model
    n = sum((2 * model.hidden_size**2, 2 * model.hidden_size * model.num_key_value_heads * model.head_dim))
    n = model.num_hidden_layers * (n + 3 * model.hidden_size * model.intermediate_size + 2 * model.hidden_size)
    n += model.hidden_size + model.vocab_size * model.hidden_size
    per_token = 6 * n + 12 * model.num_hidden_layers * model.hidden_size * run.seq_length
    by_hand = per_token * run.sequences_per_second * run.seq_length / (run.nodes * 3040e12)
    assert published_mfu(run) == pytest.approx(by_hand)
    made = fits(run.preset, run.nodes)
    assert made.settings.parallel.tensor_parallel_size == run.tensor_parallel_size
    assert made.settings.train.seq_length == run.seq_length
    assert made.settings.train.global_batch_size / made.step_seconds == pytest.approx(run.sequences_per_second)


def test_published_figures() -> None:
    assert [round(published_mfu(run), 3) for run in trainium.PUBLISHED_RUNS] == [0.393, 0.205]
    assert [published_run(t).preset for t in (1, 8, 16, 32)] == ["llama2-7b"] * 3 + ["llama3-8b"]


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("preset", ["llama2-7b", "llama3-8b"])
def test_the_trainium_presets_fit_on_every_number_of_nodes(preset: str, nodes: int) -> None:
    made = fits(preset, nodes)
    assert made.settings.parallel.workers == 32 * nodes
    assert made.core_bytes <= trainium.CORE_BYTES
    assert made.tokens_per_step == 1024 * made.settings.train.seq_length
    one = fits(preset, 1)
    assert made.step_seconds == pytest.approx(one.step_seconds / nodes)
    assert made.footprint.optimizer == pytest.approx(one.footprint.optimizer / nodes, rel=0.03)  # padded
    assert (made.footprint.weights, made.footprint.activations) == (one.footprint.weights, one.footprint.activations)


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("preset", preset_names())
def test_a_remedy_is_one(preset: str, nodes: int) -> None:
    """What a refusal says to set makes the plan fit, where it says so."""
    _, problem = planned(preset, nodes)
    if problem is None or "; fits with " not in problem:
        return
    changes = dict(change.split(" ") for change in problem.partition("; fits with ")[2].split(" and "))
    fits(preset, nodes, **changes)


def test_what_does_not_fit_names_the_dial() -> None:
    alone = refused("llama2-7b", 1, parallel__tensor_parallel_size=1)
    assert re.fullmatch(
        r"memory: \d+\.\d GiB a core, expected at most 16; fits with parallel.tensor_parallel_size \d+", alone
    )
    batch = refused("llama2-7b", 2, train__micro_batch_size=32)
    assert batch.startswith("memory: ")
    assert re.search(r"; fits with train.micro_batch_size (8|4|2|1)$", batch)


def test_a_batch_that_does_not_divide_names_the_dial() -> None:
    problem = refused("llama-1b", 1)
    assert problem == (
        "train.global_batch_size: 64, expected a multiple of 128 (train.micro_batch_size 4 x data-parallel size 32); "
        "fits with parallel.tensor_parallel_size 4"
    )
    nowhere = refused("tiny", 32)
    assert nowhere.startswith("train.global_batch_size: 16, expected a multiple of 16384 ")
    assert "fits with" not in nowhere


def test_tensor_parallelism_stays_inside_a_node() -> None:
    problem = refused("llama2-7b", 4, parallel__tensor_parallel_size=64, model__num_attention_heads=64)
    assert problem.startswith("parallel.tensor_parallel_size: 64, expected a divisor of 32, the cores of a node")


def test_a_model_that_no_dial_makes_fit() -> None:
    huge = {"model__hidden_size": 16384, "model__intermediate_size": 53248, "model__num_hidden_layers": 126}
    problem = refused("llama3-8b", 32, **huge)
    assert re.fullmatch(r"memory: \d+\.\d GiB a core, expected at most 16", problem)


def test_checkpoints_that_do_not_fit() -> None:
    assert refused("llama2-7b", 16, checkpoint__keep=20).startswith(
        "checkpoint.keep: 20, which with the one being written takes 1,8"
    )
    fast = Place(storage_gib=4800, storage_throughput=1000)
    made, _ = planned("llama2-7b", 16, fast)
    assert made is not None
    assert made.checkpoint_seconds == pytest.approx(made.checkpoint_bytes / (1000e6 * 4800 / 1024))


def test_the_page_of_one_number_of_nodes(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert main(["plan", "--preset", "llama2-7b", "--nodes", "16"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^cores +512 *$", out, re.MULTILINE)
    assert re.search(r"^time per step +10\.1 s *$", out, re.MULTILINE)
    assert re.search(r"^fits +yes *$", out, re.MULTILINE)
    assert all(name in out for name in FORMULAS)
    assert max(map(len, out.splitlines())) <= 80
    assert not list(folder.iterdir())


def test_the_page_of_all_numbers_of_nodes_says_which_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--preset", "llama-1b", "--train.global_batch_size", "128", "--parallel.tensor_parallel_size", "4"]
    assert main(["plan", *options]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^nodes +1 +2 +4 +16 +32 *$", out, re.MULTILINE)
    assert re.search(r"^cores +32 +64 +128 +- +- *$", out, re.MULTILINE)
    assert re.search(r"^fits +yes +yes +yes +no +no *$", out, re.MULTILINE)
    reasons = [line for line in out.splitlines() if "node" in line and ": " in line]
    assert [line.partition(":")[0] for line in reasons] == ["16 nodes", "32 nodes"]


def test_when_nothing_fits_each_number_of_nodes_has_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--preset", "llama-1b"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split(":")[1].strip() for line in err.splitlines()] == [
        *("1 node", "2 nodes", "4 nodes", "16 nodes", "32 nodes"),
    ]


MISTAKES = [
    (["--preset", "llama2-7b", "--nodes", "0"], "--nodes: 0, expected at least 1"),
    (["--preset", "llama2-7b", "--nodes", "x"], "--nodes: x, expected a whole number"),
    (["--preset", "llama2-7b", "--nodes", "2", "--nodes", "4"], "--nodes: given 2 times (2, 4), expected once"),
    (["--storage-gib", "12"], "--storage-gib: 12, expected at least 1200"),
    (
        ["--storage-throughput", "300"],
        "--storage-throughput: 300, expected one of 125, 250, 500, 1000, which FSx offers",
    ),
    (["--mfu", "1.5"], "--mfu: 1.5, expected at most 1"),
    (["--nodez", "2"], "--nodez: unknown option, did you mean --nodes?"),
    (["--workers", "8"], "parallel.workers: 8, expected none: --nodes says how many"),
    (["--model.hidden_sise", "8"], "--model.hidden_sise: unknown option, did you mean --model.hidden_size?"),
    (["--train.warmup_steps", "300"], "train.warmup_steps: 300, expected at most train.steps (200)"),
    (
        ["--preset", "llama2-7b", "--nodes", "1", "--parallel.tensor_parallel_size", "1"],
        "1 node: memory: ",
    ),
]


@pytest.mark.parametrize(("argv", "message"), MISTAKES)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    assert main(["plan", *argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")
