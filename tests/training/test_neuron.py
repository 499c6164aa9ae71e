"""The Neuron backend on neuronx-distributed's public source, on CPU: tensor parallel 1 and 2 train as a plain process.

The runs are the command line's own, by the interpreter of NXD_PYTHON with NXD_CPU_MODE=1 (neuron_python.py).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from makers import SettingsMaker, TokenStoreMaker
from neuron_python import NEEDS_NXD, NXD_PYTHON
from safetensors.torch import load_file

from training.config import Settings
from training.export import export
from training.metrics import read_metrics
from training.progress import Progress

pytestmark = [pytest.mark.neuron, NEEDS_NXD, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]
STEPS = 20
TOKENS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]]

Runs = Callable[..., Settings]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, token_store: TokenStoreMaker) -> Path:
    """The tokens of all runs."""
    folder = tmp_path_factory.mktemp("neuron")
    token_store(folder / "data")
    (folder / "data" / "tokenizer").mkdir()
    (folder / "data" / "tokenizer" / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def runs(store: Path, small_settings: SettingsMaker) -> Runs:
    """`runs(name, **overrides)`: settings of the run `name`, 20 steps with a checkpoint every 5."""

    def settings(name: str, **overrides: object) -> Settings:
        every = {"train__steps": STEPS, "train__eval_every": 5, "checkpoint__every": 5, "run__backend": "neuron"}
        return small_settings(store, **every | {"run__dir": store / name} | overrides)

    return settings


def begin(settings: Settings) -> subprocess.Popen[str]:
    """`python -m training train` under NxD's interpreter."""
    settings.run.dir.mkdir(parents=True, exist_ok=True)
    file = settings.run.dir.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(settings.resolved()))
    environment = os.environ | {"NXD_CPU_MODE": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [NXD_PYTHON, "-m", "training", "train", "--config", str(file)]
    return subprocess.Popen(
        command, cwd=settings.run.dir, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def done(settings: Settings) -> Settings:
    """The same settings, when the run has ended well."""
    child = begin(settings)
    output, _ = child.communicate()
    assert child.returncode == 0, output
    return settings


def numbers(settings: Settings, kind: str = "train") -> dict[int, tuple[float, ...]]:
    """Loss, and the norm of the gradient, by step."""
    records = [r for r in read_metrics(settings.run.dir / "metrics.jsonl") if r["type"] == kind]
    return {r["step"]: (r["loss"], *([r["grad_norm"]] if kind == "train" else [])) for r in records}


def assert_close(ours: dict[int, tuple[float, ...]], plain: dict[int, tuple[float, ...]]) -> None:
    assert ours.keys() == plain.keys()
    for step, values in plain.items():
        assert ours[step] == pytest.approx(values, abs=1e-4), step


SHAPES: dict[str, dict[str, Any]] = {
    "": {},
    # One key/value head for two ranks: each holds half of it.
    "few-heads": {"model__num_key_value_heads": 1},
    "tied": {"model__tie_word_embeddings": True},
}


@pytest.fixture(scope="module")
def plain(runs: Runs) -> Callable[[str], Settings]:
    """The run of a shape on the plain backend, trained once."""
    trained: dict[str, Settings] = {}

    def run(shape: str) -> Settings:
        if shape not in trained:
            trained[shape] = done(runs(f"plain-{shape}", run__backend="cpu", **SHAPES[shape]))
        return trained[shape]

    return run


VARIANTS: list[tuple[str, str, dict[str, Any]]] = [
    ("tp1", "", {}),
    ("tp2", "", {"parallel__workers": 2, "parallel__tensor_parallel_size": 2}),
    (
        "tp2-whole-sequence-selective",
        "",
        {
            "parallel__workers": 2,
            "parallel__tensor_parallel_size": 2,
            "parallel__sequence_parallel": False,
            "train__activation_checkpointing": "selective",
        },
    ),
    (
        "tp2-few-heads-full",
        "few-heads",
        {"parallel__workers": 2, "parallel__tensor_parallel_size": 2, "train__activation_checkpointing": "full"},
    ),
    (
        "tp2-dp2-tied",
        "tied",
        {"parallel__workers": 4, "parallel__tensor_parallel_size": 2, "train__micro_batch_size": 1},
    ),
]


@pytest.fixture(scope="module")
def trained(runs: Runs) -> Callable[[str], Settings]:
    """The run of a variant, trained once."""
    ended: dict[str, Settings] = {}

    def run(name: str) -> Settings:
        if name not in ended:
            [(shape, overrides)] = [(shape, overrides) for other, shape, overrides in VARIANTS if other == name]
            ended[name] = done(runs(name, **SHAPES[shape], **overrides))
        return ended[name]

    return run


@pytest.mark.parametrize(("name", "shape"), [(name, shape) for name, shape, _ in VARIANTS])
def test_it_trains_as_the_plain_backend_does(
    trained: Callable[[str], Settings],
    plain: Callable[[str], Settings],
    figure: Callable[[str], None],
    name: str,
    shape: str,
) -> None:
    ours, theirs = trained(name), plain(shape)
    assert_close(numbers(ours), numbers(theirs))
    assert_close(numbers(ours, "valid"), numbers(theirs, "valid"))
    assert len(numbers(ours)) == STEPS
    largest = max(abs(numbers(ours)[step][0] - loss) for step, (loss, _) in numbers(theirs).items())
    figure(f"neuron, {name}: in {STEPS} steps the loss is at most {largest:.1e} from the plain backend's")


@pytest.mark.parametrize("name", ["tp2", "tp2-few-heads-full", "tp2-dp2-tied"])
def test_transformers_computes_from_an_export_what_the_ranks_compute(
    trained: Callable[[str], Settings], name: str
) -> None:
    settings = trained(name)
    folder = export(settings, None, Progress("export"))
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = theirs(torch.tensor(TOKENS)).logits
    for logits in logits_of_ranks(settings):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


LOGITS = """
import json, os, sys
from pathlib import Path
import torch, torch.distributed as dist
from training.backends import World, make_backend
from training.checkpoint import latest
from training.config import load_settings

config, rank = Path(sys.argv[1]), int(sys.argv[2])
settings = load_settings(config=config)
size = settings.parallel.workers
dist.init_process_group("gloo", store=dist.FileStore(str(config) + ".store", size), rank=rank, world_size=size)
backend = make_backend(settings, World(rank, size, rank, size))
model = backend.build_model()
path = latest(settings.checkpoint_dir, on_skip=print)
backend.restore(path, model, backend.optimizer(model))
with torch.no_grad():
    logits = model.logits(torch.tensor(json.loads(sys.argv[3])))
torch.save(logits, str(config) + f".{rank}.logits")
os._exit(0)
"""


def logits_of_ranks(settings: Settings) -> Iterator[torch.Tensor]:
    """Logits of TOKENS by the newest checkpoint, as each rank of the run has them."""
    config = settings.run.dir.with_suffix(".yaml")
    environment = os.environ | {"NXD_CPU_MODE": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    children = [
        subprocess.Popen([NXD_PYTHON, "-c", LOGITS, str(config), str(rank), json.dumps(TOKENS)], env=environment)
        for rank in range(settings.parallel.workers)
    ]
    assert [child.wait() for child in children] == [0] * len(children)
    return (torch.load(f"{config}.{rank}.logits") for rank in range(len(children)))


def parts_of(settings: Settings) -> dict[str, Any]:
    """Every tensor of the newest checkpoint's files, by file."""
    folder = max(settings.checkpoint_dir.glob("step-*"))
    return {str(p.relative_to(folder)): torch.load(p, weights_only=True) for p in folder.glob("nxd/*/*.pt")}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def test_a_run_that_is_killed_goes_on_as_if_it_were_not(runs: Runs, trained: Callable[[str], Settings]) -> None:
    straight = trained("tp2")
    killed = runs("killed", parallel__workers=2, parallel__tensor_parallel_size=2)
    child = begin(killed)
    until(lambda: (killed.checkpoint_dir / "step-00000010").exists(), child)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert done(killed) == killed
    starts = [r["step"] for r in read_metrics(killed.run.dir / "metrics.jsonl") if r["type"] == "start"]
    assert starts[0] == 0
    assert starts[-1] >= 10
    assert numbers(killed) == numbers(straight)
    ours, theirs = parts_of(killed), parts_of(straight)
    assert len(ours) == 4  # weights and optimizer of two ranks
    assert same(ours, theirs)


def until(condition: Callable[[], bool], child: subprocess.Popen[str]) -> None:
    """Wait for `condition`, at most while the child lives."""
    while not condition():
        time.sleep(0.001)
        assert child.poll() is None, child.communicate()


def test_weights_are_shared_out_when_training_starts_from_a_folder(
    runs: Runs, trained: Callable[[str], Settings]
) -> None:
    source = export(trained("tp2"), None, Progress("export"))
    more = {"model__init_from": source, "train__steps": 3, "train__warmup_steps": 0}
    plain = done(runs("plain-from", run__backend="cpu", **more))
    ours = done(runs("from", parallel__workers=2, parallel__tensor_parallel_size=2, **more))
    assert_close(numbers(ours), numbers(plain))
    first = load_file(source / "model.safetensors")["lm_head.weight"]
    assert numbers(ours)[1][0] < numbers(trained("tp2"))[1][0] - 0.1, "it starts where the other one ended"
    assert first.shape == (ours.model.vocab_size, ours.model.hidden_size)


REFUSED = [
    ({"parallel__workers": 1}, "parallel.tensor_parallel_size: 1, but "),
    (
        {"parallel__workers": 2, "parallel__tensor_parallel_size": 2, "train__dtype": "bfloat16"},
        "train.dtype: bfloat16",
    ),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=[message[:20] for _, message in REFUSED])
def test_what_cannot_go_on_is_refused_in_one_line(
    runs: Runs, trained: Callable[[str], Settings], overrides: dict[str, Any], message: str
) -> None:
    trained("tp2")
    child = begin(runs("tp2", **overrides | {"train__steps": STEPS + 1}))
    output, _ = child.communicate()
    assert child.returncode == 2, output
    assert f"error: {message}" in output
    assert "Traceback" not in output


def test_graphs_are_traced_by_the_code_that_trains(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a Trainium nothing is computed then; here every step is, and nothing is written but the outcome."""
    monkeypatch.setenv("NEURON_EXTRACT_GRAPHS_ONLY", "1")
    settings = runs("graphs", parallel__workers=2, parallel__tensor_parallel_size=2)
    done(settings)
    assert not settings.checkpoint_dir.exists()
    assert "traced" in json.loads((settings.run.dir / "outcome.json").read_text())["message"]


TRACED = """
import os, sys
from pathlib import Path
from training.backends import World
from training.config import load_settings
from training.precompile import extract_graphs
from training.trainer import train

settings = load_settings(config=Path(sys.argv[1]))
half = settings.model_copy(update={"train": settings.train.model_copy(update={"steps": 10})})
straight = settings.model_copy(update={"run": settings.run.model_copy(update={"dir": Path(sys.argv[2])})})
for run in (settings, straight):
    run.run.dir.mkdir(parents=True, exist_ok=True)
extract_graphs(settings, World())
from torch_xla.debug import metrics
print("compiled", metrics.metric_data("CompileTime")[0])
for run in (half, settings, straight):
    train(run, World())
    print("compiled", metrics.metric_data("CompileTime")[0], flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    "schedule",
    [
        # A learning rate that does not depend on the number of steps, so that half a run is a half of the whole one.
        # AdamW's corrections of its means reach 1, a number that others in the graph have too, before the end.
        {"train__warmup_steps": STEPS, "train__beta1": 0.2, "train__beta2": 0.3},
        # From so small a rate that the decay of a weight is lost in float32, to 0.
        {"train__warmup_steps": 2, "train__learning_rate": 1e-6, "train__min_learning_rate": 0},
    ],
    ids=["constants", "rates"],
)
def test_training_compiles_nothing_that_was_not_traced(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, figure: Callable[[str], None], schedule: dict[str, Any]
) -> None:
    """On an XLA device, which here is the CPU: bfloat16, ZeRO-1, float32 master weights and accumulation, as on Trn1.

    The graphs are traced and compiled; then a run is trained to its half, saved, resumed, and once more in one go.
    """
    name = f"device-{schedule['train__warmup_steps']}"
    settings = runs(name, train__dtype="bfloat16", **schedule)
    config = settings.run.dir.with_suffix(".yaml")
    config.write_text(yaml.safe_dump(settings.resolved()))
    monkeypatch.delenv("NXD_CPU_MODE", raising=False)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "1"}
    environment |= {"PJRT_DEVICE": "CPU", "XLA_NO_SPECIAL_SCALARS": "1"}
    straight = settings.run.dir.with_name(f"{name}-straight")
    child = subprocess.run(
        [NXD_PYTHON, "-c", TRACED, str(config), str(straight)], env=environment, capture_output=True, text=True
    )
    assert child.returncode == 0, child.stderr
    counts = [line for line in child.stdout.splitlines() if line.startswith("compiled")]
    figure(f"neuron, {name}: traced, trained to the half, resumed, trained in one go: {', '.join(counts)} graphs")
    assert len(counts) == 4
    assert len(set(counts)) == 1, counts
    in_one_go = numbers(settings.model_copy(update={"run": settings.run.model_copy(update={"dir": straight})}))
    if schedule["train__warmup_steps"] == STEPS:
        assert numbers(settings) == in_one_go, "resumed from the half, with the master weights, it is the same"
    theirs = done(runs(f"{name}-plain", run__backend="cpu", **schedule))
    for step, (loss, _) in numbers(theirs).items():
        assert in_one_go[step][0] == pytest.approx(loss, abs=0.05), step  # bfloat16 against float32
