"""MPIJobs: whole gangs on the right nodes, what the operator takes, and an sshd that needs no rights. See stages.py."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from schemas import Definitions, definitions, mistakes
from stages import CORE, LAPTOP, NAMES, TRN1, platform, some_workloads, training, workloads

from training import environment
from workloads import mpi_worker
from workloads.checks import quantity
from workloads.labels import STAGE_LABEL
from workloads.mpijob import SSH, SSH_KEYS, SSH_PORT, mpi_job_spec
from workloads.platform import NodeShape, Platform
from workloads.pods import STOP_GRACE
from workloads.rayjob import ray_job_metadata
from workloads.settings import StageName, Workloads

Spec = dict[str, Any]
WORKER = Path(mpi_worker.__file__)
MPI: Any = {"engine": "mpi"}


@pytest.fixture(scope="module")
def crds() -> Definitions:
    return definitions()


def job(
    stage: StageName = "train",
    nodes: int = 2,
    on: Platform | None = None,
    given: Workloads | None = None,
    cores: int = 32,
) -> Spec:
    """The MPIJob of a stage as it goes to the API server."""
    settings = given or workloads(**MPI)
    spec = mpi_job_spec(stage, on or platform(), settings, NAMES, nodes, training(nodes * cores))
    metadata = ray_job_metadata(stage, f"dev-{stage}-01234567", NAMES)
    return {"apiVersion": "kubeflow.org/v2beta1", "kind": "MPIJob", "metadata": metadata, "spec": spec}


def template(made: Spec, role: str) -> Spec:
    found: Spec = made["spec"]["mpiReplicaSpecs"][role]["template"]
    return found


def container(made: Spec, role: str) -> Spec:
    (found,) = template(made, role)["spec"]["containers"]
    return dict(found)


@pytest.mark.parametrize("stage", ["precompile", "train"])
@pytest.mark.parametrize("shape", [TRN1, LAPTOP, NodeShape("one", 1, 7, 28, neuron=1, neuron_cores=2)])
def test_the_api_server_takes_it(crds: Definitions, stage: StageName, shape: NodeShape) -> None:
    made = job(stage, 1, platform(shape))
    assert mistakes(made, crds) == []
    for role in ("Launcher", "Worker"):
        pod = template(made, role)
        assert (
            mistakes({"apiVersion": "v1", "kind": "Pod", **pod, "metadata": {"name": "p", **pod["metadata"]}}, crds)
            == []
        )


def test_a_worker_has_a_trainium_node_to_itself() -> None:
    pod, worker = template(job(), "Worker")["spec"], container(job(), "Worker")
    assert worker["resources"]["limits"]["aws.amazon.com/neuron"] == "16"
    assert worker["resources"]["limits"]["vpc.amazonaws.com/efa"] == "8"
    assert worker["resources"]["limits"] == worker["resources"]["requests"]
    assert pod["nodeSelector"] == {"llama-trainium/group": "trn1"}
    assert pod["tolerations"] == [dict(each) for each in TRN1.tolerations]
    (term,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    labels = template(job(), "Worker")["metadata"]["labels"] | {"training.kubeflow.org/job-role": "worker"}
    assert term["labelSelector"]["matchLabels"].items() <= labels.items()


def test_the_launcher_is_on_a_core_node_and_holds_no_device() -> None:
    pod, launcher = template(job(), "Launcher")["spec"], container(job(), "Launcher")
    assert set(launcher["resources"]["limits"]) == {"cpu", "memory"}
    assert (pod["nodeSelector"], pod["tolerations"]) == ({}, [])
    assert launcher["command"][-3:] == ["/etc/llama-trainium/settings.yaml", "--launcher", "mpi"]


@given(nodes=st.integers(1, 64), neuron=st.sampled_from([0, 1, 16]), efa=st.sampled_from([0, 8, 16]))
def test_no_part_of_a_gang_is_let_in(nodes: int, neuron: int, efa: int) -> None:
    """The operator's own sum of what a gang needs is one worker short when the launcher comes later."""
    shape = NodeShape("any", 64, 7, 28, neuron=neuron, neuron_cores=2 * neuron, efa=efa)
    made = job("train", nodes, platform(shape), cores=2)
    policy = made["spec"]["runPolicy"]["schedulingPolicy"]
    worker, launcher = (container(made, role)["resources"]["requests"] for role in ("Worker", "Launcher"))
    assert set(policy["minResources"]) == set(worker)
    for name, text in policy["minResources"].items():
        needed = nodes * quantity(worker[name]) + quantity(launcher.get(name, "0"))
        assert quantity(text) == pytest.approx(needed, abs=nodes * (0.001 if name == "cpu" else 2**20))
    # WaitForWorkersReady never makes a launcher for a gang that counts it.
    assert made["spec"]["launcherCreationPolicy"] == "WaitForWorkersReady"
    assert policy["minAvailable"] == made["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"] == nodes
    assert (policy["queue"], policy["priorityClass"]) == ("dev", "dev-stages")


def test_there_are_slots_for_every_process() -> None:
    assert job(nodes=2)["spec"]["slotsPerWorker"] == 32
    assert mpi_job_spec("train", platform(LAPTOP), workloads(**MPI), NAMES, 2, training(3))["slotsPerWorker"] == 2


def test_accelerators_are_given_back_and_the_log_stays() -> None:
    policy = job()["spec"]["runPolicy"]
    assert policy["cleanPodPolicy"] == "All"
    assert "ttlSecondsAfterFinished" not in policy  # it deletes the launcher, and its log


def test_limits_are_the_settings() -> None:
    policy = job("train")["spec"]["runPolicy"]
    assert "activeDeadlineSeconds" not in policy  # training has none of its own
    told = workloads(engine="mpi", precompile={"activeDeadlineSeconds": 7200, "backoffLimit": 2})
    policy = job("precompile", given=told)["spec"]["runPolicy"]
    assert (policy["activeDeadlineSeconds"], policy["backoffLimit"]) == (7200, 2)


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(settings=some_workloads(), stage=st.sampled_from(["precompile", "train"]), nodes=st.integers(1, 16))
def test_the_operator_takes_what_can_be_made(
    crds: Definitions, settings: Workloads, stage: StageName, nodes: int
) -> None:
    """pkg/apis/kubeflow/validation of the MPI operator 0.8."""
    made = job(stage, nodes, given=settings)
    spec = made["spec"]
    assert mistakes(made, crds) == []
    # The longest host name that it makes is a label of DNS.
    longest = f"{'x' * 47}-worker-{nodes - 1}"
    assert len(longest) <= 63
    for role, replicas in (("Launcher", 1), ("Worker", nodes)):
        part = spec["mpiReplicaSpecs"][role]
        assert part["replicas"] == replicas
        assert part["restartPolicy"] in ("Never", "OnFailure")
    assert spec["runPolicy"]["backoffLimit"] >= 0
    assert spec["runPolicy"].get("activeDeadlineSeconds", 1) > 0
    assert spec["sshAuthMountPath"] == SSH_KEYS


def test_no_container_has_rights_but_the_one_that_gives_the_volume_away() -> None:
    for role in ("Launcher", "Worker"):
        security = container(job(), role)["securityContext"]
        assert (security["runAsNonRoot"], security["capabilities"]) == (True, {"drop": ["ALL"]})
    (owner,) = template(job(), "Launcher")["spec"]["initContainers"]
    assert owner["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}
    assert SSH_PORT > 1024


def test_a_stop_waits_for_the_checkpoint() -> None:
    for role in ("Launcher", "Worker"):
        assert "preStop" in container(job("train"), role)["lifecycle"]
        assert template(job("train"), role)["spec"]["terminationGracePeriodSeconds"] == STOP_GRACE
        assert "lifecycle" not in container(job("precompile"), role)


def test_pods_are_found_by_their_stage_and_stay_on_their_nodes() -> None:
    for role in ("Launcher", "Worker"):
        metadata = template(job(), role)["metadata"]
        assert metadata["labels"][STAGE_LABEL] == "train"
        assert metadata["annotations"]["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
        assert metadata["annotations"]["karpenter.sh/do-not-disrupt"] == "true"


def test_a_core_node_holds_a_launcher() -> None:
    asked = container(job(), "Launcher")["resources"]["requests"]
    assert quantity(asked["cpu"]) <= CORE.vcpus
    assert quantity(asked["memory"]) <= CORE.memory_gib * 2**30


def test_neurons_environment_is_where_training_runs() -> None:
    names = {each["name"] for each in container(job(), "Worker")["env"]}
    assert {*environment.NEURON, *environment.EFA, "SSH_PORT"} <= names
    cpu = {each["name"] for each in container(job(on=platform(LAPTOP), nodes=1, cores=2), "Worker")["env"]}
    assert cpu == {"SSH_PORT", "SSH_KEYS"}


def test_what_the_operator_sets_is_not_set_twice() -> None:
    """It appends its own variables, and the last of two counts."""
    names = {each["name"] for each in container(job(), "Launcher")["env"]}
    assert (
        names & {"OMPI_MCA_plm_rsh_args", "OMPI_MCA_orte_default_hostfile", "OMPI_MCA_orte_set_default_slots"} == set()
    )


# sshd for real, as this user.

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
MISSING = [] if SSHD and shutil.which("ssh") and shutil.which("ssh-keygen") else ["openssh-server, openssh-client"]
if os.getuid() == 0 and not Path("/run/sshd").is_dir():
    MISSING.append("/run/sshd, which root's sshd wants (the image's user is not root)")
ODD = 'a "b" \\c $d #e = f'


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[list[str]]:
    """A worker's sshd; the command that reaches it as a launcher does."""
    if MISSING:
        pytest.skip(f"needs {'; '.join(MISSING)}")
    subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-N", "", "-f", tmp_path / "id_rsa"], check=True)
    (tmp_path / "id_rsa.pub").rename(tmp_path / "authorized_keys")
    tmp_path.chmod(0o1777)  # as a Secret's folder is
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {
        "SSH_PORT": str(port),
        "SSH_KEYS": str(tmp_path),
        "ODD": ODD,
        "LD_LIBRARY_PATH": "/opt/efa",
        "LINES2": "a\nb",
    }
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER.read_text()], env={**os.environ, **own}, stderr=subprocess.PIPE
    )
    command = SSH.replace(str(SSH_PORT), str(port)).replace(SSH_KEYS, str(tmp_path)).split()
    yield [*command, "-o", "ConnectionAttempts=20", "127.0.0.1"]
    process.terminate()
    process.wait(30)


def test_a_session_has_the_environment_of_the_pod(sshd: list[str]) -> None:
    said = subprocess.run([*sshd, "env", "--null"], capture_output=True, text=True, timeout=60, check=True).stdout
    found = dict(line.partition("=")[::2] for line in said.split("\0") if line)
    assert (found["ODD"], found["LD_LIBRARY_PATH"]) == (ODD, "/opt/efa")
    assert set(os.environ["PATH"].split(":")) <= set(found["PATH"].split(":"))  # a shell's own files may add to it
    assert "LINES2" not in found


def test_only_the_jobs_key_opens_it(sshd: list[str], tmp_path: Path) -> None:
    subprocess.run([*sshd, "true"], timeout=60, check=True)
    (tmp_path / "id_rsa").unlink()
    subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-N", "", "-f", tmp_path / "id_rsa"], check=True)
    refused = subprocess.run([*sshd, "true"], timeout=60, capture_output=True, text=True)
    assert refused.returncode == 255
    assert "Permission denied (publickey)" in refused.stderr
