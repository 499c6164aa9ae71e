"""What the tests of the platform share: a platform without accelerators, made once."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from base_platform import ZONES, build_base
from mocks import PROJECT, ROOT, Recorded, load_stack, run, run_program

from infra import settings

STACKS = sorted({path.name.split(".")[1] for path in ROOT.glob("Pulumi.*.yaml")} - {"local"})  # those on AWS
SECRETS = {f"{PROJECT}:huggingFaceToken": "hf_" + "x" * 34}


@pytest.fixture(scope="session")
def base() -> Recorded:
    """What `build_base` registers with the default settings, flow logs and two admins."""

    def program() -> None:
        build_base(settings.Network(zones=ZONES, flow_logs=True))

    return run(program)


@pytest.fixture(scope="session", params=STACKS)
def stack(request: pytest.FixtureRequest) -> Recorded:
    """What __main__.py registers for a stack file, for each of them."""
    return run_program(load_stack(request.param), SECRETS, request.param)


@pytest.fixture(scope="session")
def everything() -> Recorded:
    """What __main__.py registers for the smallest stack with everything switched on."""
    more = {
        "autoscaler": "karpenter",
        "cluster": {"loadBalancerController": True},
        "network": {"zones": ["usw2-az4", "usw2-az1"], "nat": "per-zone", "flowLogs": True},
        "neuron": {"nodeProblemDetector": True, "nodeRecovery": True},
    }
    changed = {f"{PROJECT}:{key}": value for key, value in more.items()}
    return run_program({**load_stack("dev"), **changed}, SECRETS, "dev")


@pytest.fixture(scope="session")
def prometheus_programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `prometheus` and `promtool`: that on PATH or, where apt can be asked, of Debian's package, which is
    unpacked and not installed."""
    found = shutil.which("promtool")
    if found is not None and shutil.which("prometheus"):
        return Path(found).parent
    folder = tmp_path_factory.mktemp("prometheus")
    programs = folder / "usr" / "bin"
    if shutil.which("apt-get") and shutil.which("dpkg-deb"):
        for command in (["apt-get", "update"], ["apt-get", "download", "prometheus"]):
            subprocess.run(command, cwd=folder, capture_output=True, check=False)
        for package in folder.glob("prometheus_*.deb"):
            subprocess.run(["dpkg-deb", "-x", str(package), str(folder)], capture_output=True, check=False)
    if not (programs / "promtool").exists():
        pytest.skip("there is no prometheus on PATH, and no package of Debian or Ubuntu to be had: prometheus")
    return programs
