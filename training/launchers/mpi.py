"""Workers as ranks of Open MPI's mpirun: on the hosts of its hostfile (an MPIJob's launcher has one), else right here.

mpirun only starts the processes and ends them all when one is lost; no message of MPI's is ever sent. Ranks fill one
host after the other, and the n-th rank of a host has its n-th core. What mpirun and the ranks say is in the run's
`mpi.log`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from torch.distributed.distributed_c10d import Store

from training import environment
from training.config import Settings
from training.errors import RunFailed, UserError
from training.launchers import gave_up, record_failure
from training.launchers.group import Meeting, address_towards, started_environment
from training.messages import ranks
from training.rundir import RunDir
from training.start_checks import Roll
from training.watch import HANG_EXIT_CODE

HOSTFILE = "OMPI_MCA_orte_default_hostfile"
"""The MPI operator names its hostfile by this variable, which mpirun reads by itself."""

REMOTE_SHELL = ("OMPI_MCA_plm_rsh_agent", "OMPI_MCA_plm_rsh_args")
"""What mpirun reaches the hosts with, if not by a plain ssh: the command, and more words for it."""

HANDED_OVER = ("OMP_", "PYTHON", "TORCH", "NCCL_", "GLOO_")
"""Beginnings of variables that ranks on other hosts have as the launcher has them, beside Neuron's and EFA's."""

LOST_HOST = {
    # Seconds of silence, between two questions, and questions, after which a host is given up: mpirun's own 8 minutes
    # are longer than a run should stand still.
    "oob_tcp_keepalive_time": "10",
    "oob_tcp_keepalive_intvl": "5",
    "oob_tcp_keepalive_probes": "4",
}
HOST_SECONDS = 2.0  # between two questions to a host that does not answer
ANSWER_SECONDS = 30.0  # for a host to answer one
START_SLACK_SECONDS = 15.0  # that ranks which are there get, beyond the time-out, to say themselves who is not
END_SECONDS = 10.0  # from asking mpirun to end all ranks to killing it
RANK_SAID_IT = (1, HANG_EXIT_CODE)  # exit codes of a rank that has recorded its failure itself


def train_on_mpi(settings: Settings) -> None:
    """Train on `parallel.workers` ranks, starting all of them again after a fault.

    Raises `RunFailed` after `run.max_failures` restarts.
    """
    settings = settings.absolute()
    since = time.time()
    for attempt in range(settings.run.max_failures + 1):
        try:
            if attempt:
                _wait_for_hosts(settings)
            _mpirun(settings, settings.parallel.workers, "train")
            return
        except RunFailed as error:
            run = RunDir(settings.run.dir)
            if run.outcome():  # it ended, and a worker was lost on its way out
                return
            if attempt == settings.run.max_failures or run.stop_requested():
                raise gave_up(settings, since, str(error)) from error


def precompile_on_mpi(settings: Settings) -> str:
    """`precompile` on the first host, which has the device that the launcher has not."""
    return _mpirun(settings.absolute(), 1, "precompile")


def _mpirun(settings: Settings, count: int, task: str) -> str:
    """Run a task of `training.launchers.mpi_rank` on `count` ranks; returns what rank 0 leaves as summary."""
    meeting = Meeting(_own_address())
    attempt = meeting.of_attempt()
    store = meeting.store(attempt)
    store.set("settings", settings.model_dump_json())
    log = settings.run.dir / "mpi.log"
    started_environment(settings)
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command(count, [attempt, task]),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            # A signal from the terminal is the launcher's alone to act on.
            start_new_session=True,
        )
        try:
            _wait(process, store, settings, count)
        finally:
            _end(process)
    if store.check(["refused"]):
        raise UserError(store.get("refused").decode())
    if process.returncode:
        raise _why(settings, log, process.returncode)
    return store.get("summary").decode() if store.check(["summary"]) else ""


def command(count: int, rank_arguments: list[str]) -> list[str]:
    """The mpirun that starts `count` ranks of `training.launchers.mpi_rank`."""
    mpirun, setpriv = shutil.which("mpirun"), shutil.which("setpriv")
    if mpirun is None:
        raise UserError(
            "run.launcher: mpi, but there is no mpirun on PATH, expected Open MPI 4.1 (Debian: openmpi-bin)"
        )
    # A launcher that is killed takes mpirun along, and mpirun its ranks, or they see that it is gone.
    words = [setpriv, "--pdeathsig", "TERM"] if setpriv is not None else []
    # By its whole path mpirun looks for its other half in the same place on the other hosts.
    words += [mpirun, "-np", str(count), "--map-by", "slot", "--bind-to", "none", "--tag-output"]
    if os.geteuid() == 0:
        words += ["--allow-run-as-root"]
    if HOSTFILE not in os.environ:
        words += ["--host", f"localhost:{count}"]
    for name, value in LOST_HOST.items():
        words += ["--mca", name, value]
    for name in sorted(os.environ):
        if environment.ours(name) or name.startswith(HANDED_OVER):
            words += ["-x", name]
    return [*words, sys.executable, "-m", "training.launchers.mpi_rank", *rank_arguments]


def _own_address() -> str:
    """Where the ranks reach this process."""
    if HOSTFILE not in os.environ:
        return "127.0.0.1"
    try:
        return address_towards(_hosts()[0][0])
    except (OSError, IndexError) as error:
        wanted = f"expected a file of hosts that can be found ({error})"
        raise UserError(f"{HOSTFILE}: {os.environ[HOSTFILE]}, {wanted}") from None


def _hosts() -> list[tuple[str, int]]:
    """The hosts of the hostfile, each with its first rank; none where all are started right here. Raises OSError."""
    if HOSTFILE not in os.environ:
        return []
    found, first = [], 0
    for line in Path(os.environ[HOSTFILE]).read_text().splitlines():
        if words := line.split("#")[0].split():
            found.append((words[0], first))
            slots = re.search(r"\bslots *= *(\d+)", line)
            first += int(slots[1]) if slots else 1
    return found


def _wait_for_hosts(settings: Settings) -> None:
    """Return when every host takes commands again, by what mpirun reaches it with.

    mpirun itself gives up at once where a host does not answer, and the pod or node that comes in place of a lost one
    takes minutes: all restarts would be used up before. Raises `RunFailed` after `train.hang_timeout`.
    """
    shell, more = (shlex.split(os.environ.get(name, "")) for name in REMOTE_SHELL)
    ask = [*(shell or ["ssh"]), *more]
    deadline = time.monotonic() + settings.train.hang_timeout
    for host, _ in _hosts():
        while refusal := _refusal([*ask, host, "true"]):
            if RunDir(settings.run.dir).stop_requested():
                raise RunFailed(f"stopped while {host} did not answer")
            if time.monotonic() > deadline:
                raise RunFailed(f"{host} did not answer within train.hang_timeout ({refusal})")
            time.sleep(HOST_SECONDS)


def _refusal(command: list[str]) -> str:
    """Why a command did not go well, in one line; "" if it did."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=ANSWER_SECONDS
        )
    except subprocess.TimeoutExpired:
        return "it said nothing"
    said = done.stderr.strip().splitlines()
    return (said[-1] if said else f"exit code {done.returncode}") if done.returncode else ""


def _wait(process: subprocess.Popen[bytes], store: Store, settings: Settings, count: int) -> None:
    """Return when mpirun has ended. Raises `RunFailed` when not even that much of it comes up that a rank could."""
    deadline: float | None = time.monotonic() + settings.train.hang_timeout + START_SLACK_SECONDS
    while process.poll() is None:
        if deadline is not None and time.monotonic() > deadline and count > 1:
            deadline = None
            if missing := Roll(store, count).missing("start"):
                message = f"mpirun did not start {ranks(missing)} within train.hang_timeout"
                record_failure(settings, missing[0], message)
                raise RunFailed(message)
        try:
            process.wait(0.2)
        except subprocess.TimeoutExpired:
            continue


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# What Open MPI 4.1 says of the first rank that ended as it should not have.
_KILLED = re.compile(r"process rank (\d+) with PID \d+ on node (\S+) exited on\s+signal (\d+)")
_EXITED = re.compile(r"Process name: \[\[\d+,\d+\],(\d+)\]\s+Exit code:\s+(\d+)")
_HOST_LOST = re.compile(r"lost communication with a remote daemon.* Remote daemon: \[\[\d+,\d+\],\d+\] on node (\S+)")


def _why(settings: Settings, log: Path, code: int) -> RunFailed:
    """The failure of a rank, recorded if it could not do so itself; else that of mpirun, in its own words."""
    said = log.read_text(encoding="utf-8", errors="replace")
    words = " ".join(said.split())
    if found := _HOST_LOST.search(words):
        rank, message = dict(_hosts()).get(found[1], 0), f"the host was lost ({found[1]})"
    elif found := _KILLED.search(words):
        rank, message = int(found[1]), f"the worker was lost ({signal.Signals(int(found[3])).name} on {found[2]})"
    elif found := _EXITED.search(words):
        rank, message = int(found[1]), f"the worker was lost (exit code {found[2]})"
        if int(found[2]) in RANK_SAID_IT:
            return RunFailed(f"rank {rank}: {message}")
    else:
        lines = [line.strip() for line in said.splitlines() if line.strip(" -")]
        return RunFailed(f"mpirun ended with exit code {code} ({lines[0] if lines else 'it said nothing'}); see {log}")
    record_failure(settings, rank, message)
    return RunFailed(f"rank {rank}: {message}")
