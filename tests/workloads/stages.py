"""Settings, clusters and runs for the tests of the stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pulumi
import pulumi_kubernetes as k8s
from hypothesis import strategies as st

from training.config import Settings as TrainingSettings
from training.config import load_settings, parse_settings
from workloads.platform import NodeShape, Platform, VolumeSource, on_volume
from workloads.pods import Names
from workloads.settings import STAGES, Workloads

IMAGE = "registry.example.com/training@sha256:" + "a" * 64
TRN1 = NodeShape(
    "trn1",
    16,
    112,
    448,
    neuron=16,
    neuron_cores=32,
    efa=8,
    node_selector={"llama-trainium/group": "trn1"},
    tolerations=[{"key": "aws.amazon.com/neuron", "operator": "Exists", "effect": "NoSchedule"}],
    instance_type="trn1.32xlarge",
)
CORE = NodeShape("core", 4, 7, 28, instance_type="m7i.2xlarge")
LAPTOP = NodeShape("nodes", 1, 2, 6)
NAMES = Names("llama", "data", "workloads", "dev", "dev-stages", settings="settings-0")


def platform(workers: NodeShape = TRN1, core: NodeShape = CORE, image: pulumi.Input[str] = IMAGE) -> Platform:
    """A platform as the pure functions need it: plain values, and no provider."""
    backend: Any = "neuron" if workers.neuron else "cpu"
    nothing: Any = None
    return Platform(nothing, image, VolumeSource("1200Gi", host_path="/srv"), workers, core, backend=backend)


def live_platform(workers: NodeShape = TRN1, core: NodeShape = CORE, capacity: str = "1200Gi") -> Platform:
    """A platform inside a program."""
    provider = k8s.Provider("k8s", kubeconfig="{}")
    volume = VolumeSource(capacity, host_path="/srv/llama")
    return Platform(provider, pulumi.Output.from_input(IMAGE), volume, workers, core)


def training(workers: int = 64, **overrides: str) -> TrainingSettings:
    """The tiny preset as pods have it. Overrides have `__` for the dot: `train__seed="5"`."""
    given = {key.replace("__", "."): value for key, value in overrides.items()}
    batch = {"train.global_batch_size": str(16 * workers), "parallel.workers": str(workers)}
    return on_volume(load_settings("tiny", overrides={"run.dir": "runs/t", **batch, **given}))


def workloads(**given: Any) -> Workloads:
    """Settings by their names in the stack file, with their derived values."""
    return Workloads.model_validate(given).with_derived("dev", given.get("nodes", 2), has_password=False)


@st.composite
def some_workloads(draw: st.DrawFn) -> Workloads:
    """Settings of the workloads that are valid on their own."""
    gang = draw(st.booleans())
    given: dict[str, Any] = {"gang": gang, "stages": draw(st.sampled_from([list(STAGES), ["prepare"], ["train"]]))}
    for stage in STAGES:
        waiting = draw(st.integers(1, 10_000))
        given[stage] = {
            "preRunningDeadlineSeconds": waiting,
            "activeDeadlineSeconds": draw(st.none() | st.integers(waiting, 10**6)),
            "backoffLimit": draw(st.integers(0, 3)) if gang else 0,
        }
    if draw(st.booleans()):
        given["redisAddress"] = "redis.example.com:6379"
    if not gang or draw(st.booleans()):
        most = draw(st.integers(1, 16))
        given["rayCluster"] = {"enabled": True, "maxNodes": most, "minNodes": draw(st.integers(0, most))}
    if draw(st.booleans()):
        given["resources"] = {"worker": {"cpu": draw(st.floats(0.01, 2)), "memoryGib": draw(st.floats(0.05, 4))}}
    given["name"] = draw(st.from_regex(r"[a-z]([a-z0-9-]{0,25}[a-z0-9])?", fullmatch=True))
    return Workloads.model_validate(given).with_derived("dev", 2, has_password=False)


@st.composite
def some_training(draw: st.DrawFn) -> TrainingSettings:
    """Settings of a run that are valid together, with as little of the defaults as can be."""
    heads = draw(st.sampled_from([2, 4, 8]))
    workers = draw(st.sampled_from([1, 2, 32, 64]))
    sharing = draw(st.sampled_from([1, min(2, workers)]))
    vocab = draw(st.integers(257, 40_000)) * sharing
    seq = draw(st.integers(8, 4096)) * sharing
    micro = draw(st.integers(1, 4))
    steps = draw(st.integers(1, 10_000))
    rate = draw(st.floats(1e-6, 1e-2))
    values = {
        "data": {
            "tokenizer": draw(st.sampled_from([f"train:{vocab}", "train:257", "meta-llama/Llama-2-7b-hf"])),
            "output": draw(st.none() | st.just("tokens/abc")),
            "validation_fraction": draw(st.floats(0, 0.5)),
        },
        "model": {
            "hidden_size": heads * 2 * draw(st.integers(1, 32)),
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "vocab_size": vocab,
            "max_position_embeddings": seq + draw(st.integers(0, 100)),
            "init_from": draw(st.none() | st.just("models/start")),
        },
        "train": {
            "seq_length": seq,
            "micro_batch_size": micro,
            "global_batch_size": micro * workers * draw(st.integers(1, 4)),
            "steps": steps,
            "warmup_steps": draw(st.integers(0, steps)),
            "learning_rate": rate,
            "min_learning_rate": rate * draw(st.floats(0, 1)),
            "seed": draw(st.integers(0, 2**31)),
        },
        "parallel": {"workers": workers, "tensor_parallel_size": sharing},
        "run": {"dir": draw(st.sampled_from(["runs/one", "it's a/folder", "/data/x"]))},
    }
    return on_volume(parse_settings(values))


def write_settings(folder: Path, values: Any) -> Path:
    """A file as a stage's ConfigMap has it."""
    import yaml

    path = folder / "settings.yaml"
    path.write_text(yaml.safe_dump(values))
    return path
