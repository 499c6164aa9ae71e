"""The environment of Neuron and EFA: one table, what is set already wins, a worker's place as torch_xla reads it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from makers import SettingsMaker, TokenStoreMaker
from processes import start

from training import cli, environment, precompile
from training.backends import World
from training.config import Settings
from training.launchers import group, note_once, ray
from training.metrics import read_metrics
from training.rundir import RunDir


def test_efa_is_used_where_the_container_was_given_any(tmp_path: Path) -> None:
    assert environment.of_node(1, tmp_path / "none") == {"NEURON_RT_VISIBLE_CORES": "0"}
    (tmp_path / "uverbs0").touch()
    assert environment.of_node(32, tmp_path) == {"NEURON_RT_VISIBLE_CORES": "0-31", **environment.EFA}


def test_a_place_is_that_of_torchrun() -> None:
    world = World(33, 64, 1, 32, "10.0.0.5:4000/abc")
    assert environment.place_of_rank(world, "10.0.0.7:5000") == {
        "RANK": "33",
        "WORLD_SIZE": "64",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "32",
        "MASTER_ADDR": "10.0.0.5",
        "MASTER_PORT": "4000",
        "TORCHELASTIC_RUN_ID": "abc",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "NEURON_RT_ROOT_COMM_ID": "10.0.0.7:5000",
    }


def test_what_is_set_wins_and_is_told_once(
    tmp_path: Path, small_settings: SettingsMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(environment.os.environ):
        if environment.ours(name):
            monkeypatch.delenv(name)
    monkeypatch.setenv("CCOM_SOCKET_IFNAME", "ens5")
    monkeypatch.setenv("NEURON_RT_ROOT_COMM_ID", "10.0.0.7:5000")  # another at each attempt
    monkeypatch.setattr(environment.os, "environ", dict(environment.os.environ))
    environment.set_defaults(environment.NEURON)
    assert environment.in_force() == (
        "environment: CCOM_SOCKET_IFNAME=ens5 MALLOC_ARENA_MAX=64 NEURON_CC_FLAGS='--model-type transformer' "
        "NEURON_FUSE_SOFTMAX=1 NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS=3 NEURON_RT_STOCHASTIC_ROUNDING_EN=1 "
        "XLA_NO_SPECIAL_SCALARS=1"
    )
    settings = small_settings(tmp_path)
    settings.run.dir.mkdir()
    for _ in range(2):
        note_once(settings, environment.in_force())
    assert [r["message"] for r in read_metrics(settings.run.dir / "metrics.jsonl")] == [environment.in_force()]


def test_ray_is_started_before_graphs_are_asked_for(
    tmp_path: Path, small_settings: SettingsMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers would extract graphs again when they are to train: they inherit from what is started first."""
    seen: list[tuple[str, str | None]] = []

    def look(what: str) -> Callable[..., str]:
        return lambda *_: seen.append((what, os.environ.get("NEURON_EXTRACT_GRAPHS_ONLY"))) or what

    monkeypatch.setattr(ray, "connect", look("connect"))
    monkeypatch.setattr(ray, "precompile_on_ray", look("compile"))
    monkeypatch.setattr(cli, "launch_train", look("trace"))
    monkeypatch.setattr(precompile, "asks_for_graphs", lambda settings: True)
    settings = small_settings(tmp_path, run__launcher="ray")
    settings.run.dir.mkdir()
    cli.precompile_stage(settings, RunDir(settings.run.dir))
    assert seen == [("connect", None), ("trace", "1"), ("compile", None)]


def _as_neuron(settings: Settings, world: World, folder: Path) -> None:
    """A worker that takes its device for a NeuronCore, up to the first step."""
    group.backend_name = lambda _: "neuron"  # type: ignore[assignment]
    group.process_group = lambda _: "gloo"  # type: ignore[assignment]
    os.environ["NXD_CPU_MODE"] = "1"  # no device is asked for
    with group.joined(settings, world):
        (folder / str(world.rank)).write_text(json.dumps(dict(os.environ)))


def test_workers_on_neuron_have_one_root_and_a_place_each(
    tmp_path: Path, small_settings: SettingsMaker, token_store: TokenStoreMaker
) -> None:
    settings = small_settings(tmp_path)
    token_store(settings.data_dir)
    settings.run.dir.mkdir()
    meeting = group.Meeting("127.0.0.1")
    attempt = meeting.of_attempt()
    children = [start(_as_neuron, settings, World(rank, 2, rank, 2, attempt), tmp_path) for rank in range(2)]
    for child in children:
        child.join(120)
        assert child.exitcode == 0
    one, other = (json.loads((tmp_path / str(rank)).read_text()) for rank in range(2))
    for rank, found in enumerate((one, other)):
        assert found.items() >= environment.NEURON.items()
        assert (found["RANK"], found["LOCAL_RANK"], found["WORLD_SIZE"]) == (str(rank), str(rank), "2")
        assert found["NEURON_RT_VISIBLE_CORES"] == "0-1"
        assert found["TORCHELASTIC_RUN_ID"] == attempt.partition("/")[2]
        assert f"{found['MASTER_ADDR']}:{found['MASTER_PORT']}" == meeting.address
    host, _, port = one["NEURON_RT_ROOT_COMM_ID"].rpartition(":")
    assert one["NEURON_RT_ROOT_COMM_ID"] == other["NEURON_RT_ROOT_COMM_ID"]
    assert host == "127.0.0.1"
    assert port != one["MASTER_PORT"]
    [note] = read_metrics(settings.run.dir / "metrics.jsonl")
    assert note["message"].startswith("environment: CCOM_SOCKET_IFNAME=eth0 ")
