"""Ray Train over two nodes: two raylets on this machine, of which one is killed while the run is on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from makers import SettingsMaker, TokenStoreMaker
from processes import launch, losses_of, records_of, start, weights_of, while_running

from training.backends import World
from training.launchers import ray_group

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head with one CPU, on addresses of this machine only; `add_node` starts another raylet."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # raylets, and the workers that they start, have it from here
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    made = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, "object_store_memory": 1 << 27}
    )
    monkeypatch.setenv("RAY_ADDRESS", made.address)
    yield made
    made.shutdown()


def test_a_run_over_two_nodes_outlives_one_of_them(
    tmp_path: Path, token_store: TokenStoreMaker, small_settings: SettingsMaker, cluster: Any
) -> None:
    # Steps of many small passes: a checkpoint is on the disk long before the next one. Of them so many that the run goes
    # on for longer than Ray takes to see that a node is gone.
    shape = {"train__global_batch_size": 64, "train__micro_batch_size": 1, "train__steps": 150, "checkpoint__every": 10}
    shape |= {"parallel__workers": 2, "train__eval_every": 50}
    token_store(tmp_path / "data")
    settings = small_settings(tmp_path, **shape, run__max_failures=3)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(settings.resolved()))
    lost = cluster.add_node(num_cpus=1, object_store_memory=1 << 27)
    line = [sys.executable, "-m", "training", "train", "--config", str(file), "--launcher", "ray"]
    process = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while_running(process, lambda: list(settings.checkpoint_dir.glob("step-*")))
        [raylet] = lost.all_processes["raylet"]
        os.kill(raylet.process.pid, signal.SIGKILL)
        cluster.add_node(num_cpus=1, object_store_memory=1 << 27)
        output, errors = process.communicate(timeout=400)
    finally:
        process.kill()
    assert process.returncode == 0, errors  # with what Ray itself logs of a node that is gone
    assert "going on from step" in output

    again = records_of(settings, "start")[-1]["step"]
    failures = records_of(settings, "failure")
    assert again >= 10
    assert any("the worker was lost" in failure["message"] for failure in failures)
    assert max(failure["step"] for failure in failures) - again <= settings.checkpoint.every

    local = small_settings(tmp_path, **shape, run__dir=tmp_path / "local")
    straight = start(launch, local)
    straight.join(300)
    assert straight.exitcode == 0
    assert losses_of(settings) == losses_of(local)
    (_, one), (_, other) = weights_of(settings), weights_of(local)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_every_group_of_workers_meets_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a fault too: nothing that the lost group left is taken for the new one's."""
    import ray.train

    class Workers:
        def execute(self, function: Any, *args: Any) -> None:
            function(*args)

    context = SimpleNamespace(
        get_world_rank=lambda: 33,
        get_world_size=lambda: 64,
        get_local_rank=lambda: 1,
        get_local_world_size=lambda: 32,
    )
    monkeypatch.setattr(ray.train, "get_context", lambda: context)
    monkeypatch.setenv(ray_group.MEETING, "")  # put back afterwards
    config = ray_group.RayGroup("10.0.0.5:4000")
    worlds = []
    for _ in range(2):
        config.backend_cls().on_start(Workers(), config)
        worlds.append(ray_group.world_of_ray())
    assert worlds[0] == World(33, 64, 1, 32, worlds[0].meeting)
    assert all(world.meeting.startswith("10.0.0.5:4000/") for world in worlds)
    assert worlds[0].meeting != worlds[1].meeting
