"""Every stack with a real Kubernetes API server behind its cluster, through the real Kubernetes provider.

Every object of the program meets the server's own schemas, defaults and controllers, and is gone after destroy. Charts
are stubs (apiserver.py), so what the operators would do is not shown here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import apiserver
import pytest
import stack
from apiserver import ApiServer
from operators import operating
from stack import STACKS, Stack

from workloads.settings import STAGES

REASON = stack.missing() or apiserver.missing()
pytestmark = [pytest.mark.skipif(REASON is not None, reason=str(REASON)), pytest.mark.timeout(1200)]

PACKAGES = tuple(package for package in stack.PACKAGES if package != "kubernetes")
NAMESPACE = "llama-trainium"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with apiserver.serving(tmp_path_factory.mktemp("kubernetes")) as running:
        yield running


@pytest.mark.parametrize("name", STACKS)
def test_a_stack_comes_up_and_goes_on_a_real_api_server(
    name: str, server: ApiServer, tmp_path: Path, new_stack: Callable[..., Stack], figure: Callable[[str], None]
) -> None:
    before = objects(server)
    with apiserver.charts(tmp_path / "charts") as mirror, operating(server, NAMESPACE):
        made = on_server(name, server, mirror, tmp_path, new_stack)
        up = made.up().ok()
        inside = [r for r in made.resources() if r.get("custom") and r["type"].startswith("kubernetes:")]
        added = objects(server) - before
        again = made.up("--expect-no-changes").ok()
        destroy = made.destroy().ok()
    assert len(added) >= len(inside), "every object of the state is on the server"
    assert objects(server) - before == set(), "destroy leaves nothing on the server"
    version = server.request("/version")["gitVersion"]
    figure(
        f"{name} on Kubernetes {version}: {len(inside)} objects; up {up.seconds:.1f} s, "
        f"second up {again.seconds:.1f} s, destroy {destroy.seconds:.1f} s"
    )


def test_a_larger_file_system_runs_no_stage_again(
    server: ApiServer, tmp_path: Path, new_stack: Callable[..., Stack]
) -> None:
    with apiserver.charts(tmp_path / "charts") as mirror, operating(server, NAMESPACE) as there:
        made = on_server("dev", server, mirror, tmp_path, new_stack)
        made.change({"workloads": {"stages": list(STAGES)}})
        made.up().ok()
        assert [job.stage for job in there.jobs] == list(STAGES)
        claim = f"/api/v1/namespaces/{NAMESPACE}/persistentvolumeclaims/data"
        bound = server.request(claim)
        made.change({"storage": {"retainOnDelete": False, "sizeGib": 2400}})
        made.up().ok()
        assert server.request(claim)["metadata"]["uid"] == bound["metadata"]["uid"]
        assert server.request(claim)["status"]["phase"] == "Bound"
        made.up("--expect-no-changes").ok()
        assert len(there.jobs) == 3
        made.destroy().ok()


def on_server(name: str, server: ApiServer, mirror: str, folder: Path, new_stack: Callable[..., Stack]) -> Stack:
    """A stack on AWS whose cluster's API server is `server`."""
    aws = folder / "aws"
    aws.mkdir()
    apiserver.aws_command(aws)
    made = new_stack(name, packages=PACKAGES, config={"charts": {"mirror": mirror}}, path=aws)
    made.cloud.endpoint, made.cloud.ca = server.endpoint, server.ca
    return made


def objects(server: ApiServer) -> set[str]:
    """Paths of what the server has of the program's kinds, but for what it makes by itself."""
    found = set()
    for path in (
        "/api/v1/namespaces",
        "/api/v1/persistentvolumes",
        "/api/v1/configmaps",
        "/api/v1/secrets",
        "/apis/apps/v1/deployments",
        "/apis/rbac.authorization.k8s.io/v1/clusterroles",
        "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
        "/apis/rbac.authorization.k8s.io/v1/roles",
        "/apis/storage.k8s.io/v1/storageclasses",
    ):
        for item in server.request(path)["items"]:
            meta = item["metadata"]
            if not meta["name"].startswith(("kube-", "system:")):
                found.add(f"{path}/{meta.get('namespace', '')}/{meta['name']}")
    return found
