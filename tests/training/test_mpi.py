"""The MPI launcher by the real mpirun, two ranks on this machine: a killed one, the losses, what mpirun says."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from makers import SettingsMaker, TokenStoreMaker, TrainingCommand
from processes import launch, losses_of, rank_of, records_of, start, steps_of, weights_of, while_running

from training.errors import RunFailed, UserError
from training.launchers import mpi
from training.launchers.group import address_towards
from training.watch import HANG_EXIT_CODE

ROOT = Path(__file__).parents[2]


def test_a_killed_rank_ends_the_job_and_the_rerun_goes_on_as_if_nothing_had_been(
    tmp_path: Path, token_store: TokenStoreMaker, small_settings: SettingsMaker, mpi_command: TrainingCommand
) -> None:
    token_store(tmp_path / "data")
    shape = {"parallel__workers": 2, "train__steps": 200, "checkpoint__every": 10, "train__eval_every": 100}
    settings = small_settings(tmp_path, **shape, train__hang_timeout=60)
    process = mpi_command(settings)
    while_running(process, lambda: list(settings.checkpoint_dir.glob("step-*")))
    rank_of(process, 1).kill()
    _, errors = process.communicate(timeout=settings.train.hang_timeout)
    assert process.returncode == 1
    [line] = errors.splitlines()
    assert line.startswith("error: rank 1, step ")
    assert "the worker was lost (SIGKILL on " in line
    assert line.endswith("the same command goes on from the last checkpoint")
    [failure] = records_of(settings, "failure")  # and not what the lost rank did to the other one
    assert failure["rank"] == 1
    lost_at = max(steps_of(settings))
    assert lost_at < 200, "it was over before the rank was killed"

    process = mpi_command(settings)
    output, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (0, "")
    assert "train: done" in output
    again = records_of(settings, "start")[1]["step"]
    assert 10 <= again <= lost_at
    assert lost_at - again <= 2 * settings.checkpoint.every  # the last one may still have been on its way

    local = small_settings(tmp_path, **shape, run__dir=tmp_path / "local")
    child = start(launch, local)
    child.join(300)
    assert child.exitcode == 0
    assert losses_of(settings) == losses_of(local)
    (_, one), (_, other) = weights_of(settings), weights_of(local)
    assert all(torch.equal(one[name], other[name]) for name in one)


# Read by Python before anything else: rank 1 is on a node that has another image.
ANOTHER_IMAGE = """
import os
from importlib import metadata
version = metadata.version
if os.environ.get("OMPI_COMM_WORLD_RANK") == "1":
    metadata.version = lambda name: "0.1" if name == "numpy" else version(name)
"""


def test_a_rank_with_another_image_ends_the_run_before_its_first_step(
    tmp_path: Path,
    token_store: TokenStoreMaker,
    small_settings: SettingsMaker,
    mpi_command: TrainingCommand,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    token_store(tmp_path / "data")
    (tmp_path / "sitecustomize.py").write_text(ANOTHER_IMAGE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    settings = small_settings(tmp_path, parallel__workers=2, run__max_failures=3)
    process = mpi_command(settings)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 2
    [line] = errors.splitlines()
    assert line.startswith("error: numpy: 0.1 for rank 1 on ")
    assert line.endswith("; expected the same image on all nodes")
    assert steps_of(settings) == []
    assert records_of(settings, "failure") == []  # a restart would find the same


def test_precompile_runs_on_a_rank(tmp_path: Path, small_settings: SettingsMaker, mpi_command: TrainingCommand) -> None:
    process = mpi_command(small_settings(tmp_path, parallel__workers=2), "precompile")
    output, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (0, "")
    assert "nothing to compile: train.compile is false" in output


# Stands for mpirun and a rank that cannot compile with these settings on its machine.
REFUSES = """
import sys
from training.launchers.group import connect
connect(sys.argv[1]).set("refused", "run.backend: cuda, but torch sees no GPU")
sys.exit(2)
"""


def test_what_a_rank_refuses_is_one_line(
    tmp_path: Path, small_settings: SettingsMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = small_settings(tmp_path)
    settings.run.dir.mkdir()
    monkeypatch.setattr(mpi, "command", lambda count, words: [sys.executable, "-c", REFUSES, *words])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with pytest.raises(UserError, match=r"^run.backend: cuda, but torch sees no GPU$"):
        mpi.precompile_on_mpi(settings)


HOSTS = """
# made by the operator
10.0.0.7 slots=32
10.0.0.8 slots=32
"""


def test_on_hosts_of_a_hostfile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is handed over to other hosts, and that mpirun is left to find them itself."""
    found = {"mpirun": "/opt/amazon/openmpi/bin/mpirun", "setpriv": "/usr/bin/setpriv"}
    monkeypatch.setattr(shutil, "which", found.get)
    for name in list(os.environ):
        if name.startswith(("NEURON_", "OMP_", "PYTHON")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NEURON_FUSE_SOFTMAX", "1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a secret")
    monkeypatch.delenv(mpi.HOSTFILE, raising=False)
    words = mpi.command(64, ["10.0.0.5:4000/abc", "train"])
    assert words[:4] == ["/usr/bin/setpriv", "--pdeathsig", "TERM", "/opt/amazon/openmpi/bin/mpirun"]
    assert words[words.index("--host") + 1] == "localhost:64"
    assert words[words.index("-x") + 1] == "NEURON_FUSE_SOFTMAX"
    assert not any("AWS" in word or "secret" in word for word in words)
    assert words[-4:] == ["-m", "training.launchers.mpi_rank", "10.0.0.5:4000/abc", "train"]
    assert mpi._own_address() == "127.0.0.1"

    hostfile = tmp_path / "hostfile"
    hostfile.write_text(HOSTS)
    monkeypatch.setenv(mpi.HOSTFILE, str(hostfile))
    assert "--host" not in mpi.command(64, [])
    assert mpi._own_address() == address_towards("10.0.0.7")
    hostfile.write_text("# none\n")
    with pytest.raises(UserError, match=rf"^{mpi.HOSTFILE}: .*hostfile, expected a file of hosts"):
        mpi._own_address()

    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UserError, match=r"^run.launcher: mpi, but there is no mpirun on PATH, expected Open MPI 4.1"):
        mpi.command(2, [])


# Stands for ssh: the second host is back when it has been asked three times.
BACK_AT_THE_THIRD = """#!/bin/sh
echo "$@" >> "$0.log"
test "$3" = 10.0.0.7 || test "$(grep -c 10.0.0.8 "$0.log")" -ge 3 || { echo "ssh: no route to $3" >&2; exit 255; }
"""


def test_a_restart_waits_for_a_lost_host_to_come_back(
    tmp_path: Path, small_settings: SettingsMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = small_settings(tmp_path, run__max_failures=1)
    settings.run.dir.mkdir()
    ssh, hostfile = tmp_path / "ssh", tmp_path / "hostfile"
    ssh.write_text(BACK_AT_THE_THIRD)
    ssh.chmod(0o755)
    hostfile.write_text(HOSTS)
    monkeypatch.setenv(mpi.HOSTFILE, str(hostfile))
    for name, words in zip(mpi.REMOTE_SHELL, (f"{ssh} -p", "2222"), strict=True):
        monkeypatch.setenv(name, words)
    monkeypatch.setattr(mpi, "HOST_SECONDS", 0.0)
    monkeypatch.setattr(mpi, "_own_address", lambda: "127.0.0.1")
    # The first mpirun loses the host, the one behind it may begin again only when it is back.
    monkeypatch.setattr(mpi, "command", lambda count, words: ["sh", "-c", f"echo mpirun >> {ssh}.log; exit 1"])
    with pytest.raises(RunFailed, match=r"^mpirun ended with exit code 1 .* goes on from the last checkpoint$"):
        mpi.train_on_mpi(settings)
    asked = Path(f"{ssh}.log").read_text().splitlines()
    assert asked == ["mpirun", "-p 2222 10.0.0.7 true", *["-p 2222 10.0.0.8 true"] * 3, "mpirun"]


def test_a_host_that_stays_away_ends_the_run_with_its_name(
    tmp_path: Path, small_settings: SettingsMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = small_settings(tmp_path, train__hang_timeout=0.1)
    hostfile = tmp_path / "hostfile"
    hostfile.write_text(HOSTS)
    monkeypatch.setenv(mpi.HOSTFILE, str(hostfile))
    monkeypatch.setenv(mpi.REMOTE_SHELL[0], "sh -c 'echo ssh: no route to $1 >&2; exit 255' --")
    monkeypatch.setattr(mpi, "HOST_SECONDS", 0.0)
    with pytest.raises(RunFailed, match=r"^10.0.0.7 did not answer within train.hang_timeout \(ssh: no route to 10.0"):
        mpi._wait_for_hosts(settings)


@pytest.mark.parametrize(
    ("said", "told", "recorded"),
    [
        ("mpirun noticed that process rank 7 with PID 0 on node w-1 exited on signal 11 (Segmentation fault).",
         "rank 7: the worker was lost (SIGSEGV on w-1)", 7),
        ("The first process to do so was:\n\n  Process name: [[60,1],5]\n  Exit code:    137\n",
         "rank 5: the worker was lost (exit code 137)", 5),
        (f"  Process name: [[60,1],5]\n  Exit code:    {HANG_EXIT_CODE}\n", "rank 5: the worker was lost", None),
        ("ORTE has lost communication with a remote daemon.\n\n  HNP daemon   : [[60,0],0] on node launcher\n"
         "  Remote daemon: [[60,0],2] on node 10.0.0.8\n\nThis is usually due to either a failure of the TCP network\n",
         "rank 32: the host was lost (10.0.0.8)", 32),
        ("-----\nThere are not enough slots available in the system\n-----\n",
         "mpirun ended with exit code 1 (There are not enough slots available in the system); see ", None),
        ("", "mpirun ended with exit code 1 (it said nothing); see ", None),
    ],
)  # fmt: skip
def test_what_mpirun_says_becomes_one_line(
    tmp_path: Path,
    small_settings: SettingsMaker,
    monkeypatch: pytest.MonkeyPatch,
    said: str,
    told: str,
    recorded: int | None,
) -> None:
    settings = small_settings(tmp_path)
    hostfile = tmp_path / "hostfile"
    hostfile.write_text(HOSTS)
    monkeypatch.setenv(mpi.HOSTFILE, str(hostfile))
    settings.run.dir.mkdir()
    log = settings.run.dir / "mpi.log"
    log.write_text(said)
    assert str(mpi._why(settings, log, 1)).startswith(told)
    assert [record["rank"] for record in records_of(settings, "failure")] == ([] if recorded is None else [recorded])
