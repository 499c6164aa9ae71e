"""The environment of Neuron and EFA: one table, what is set already wins, a worker's place as torch_xla reads it."""

from __future__ import annotations

from pathlib import Path

import pytest
from makers import SettingsMaker

from training import environment
from training.backends import World
from training.launchers import note_once
from training.metrics import read_metrics
from workloads import pods


def test_pods_set_nothing_else() -> None:
    """Pods have it before any launcher, for what people run there by hand; it is the same table."""
    assert pods.NEURON_ENV.items() <= environment.NEURON.items()
    assert pods.EFA_ENV == environment.EFA


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
        "environment: CCOM_SOCKET_IFNAME=ens5 MALLOC_ARENA_MAX=64 NEURON_FUSE_SOFTMAX=1 "
        "NEURON_RT_STOCHASTIC_ROUNDING_EN=1 XLA_NO_SPECIAL_SCALARS=1"
    )
    settings = small_settings(tmp_path)
    settings.run.dir.mkdir()
    for _ in range(2):
        note_once(settings, environment.in_force())
    assert [r["message"] for r in read_metrics(settings.run.dir / "metrics.jsonl")] == [environment.in_force()]
