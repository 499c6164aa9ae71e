"""Every stack with a real Kubernetes API server behind its cluster, through the real Kubernetes provider.

Every object of the program meets the server's own schemas, defaults and controllers, and is gone after destroy. Charts
are stubs (apiserver.py), so what the operators would do is not shown here.
"""

from __future__ import annotations

import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path

import apiserver
import pytest
import stack
import stub_charts
from apiserver import ApiServer
from cloud import Props
from operators import operating
from stack import STACKS, Stack

from workloads.settings import STAGES

REASON = stack.missing() or apiserver.missing()
pytestmark = [pytest.mark.skipif(REASON is not None, reason=str(REASON)), pytest.mark.timeout(1200)]

PACKAGES = tuple(package for package in stack.PACKAGES if package != "kubernetes")
NAMESPACE = "llama-trainium"
RELEASE = "kubernetes:helm.sh/v3:Release"
# Where the server lists each kind that the program makes: a new one has its line here.
PATHS = {
    "kubernetes:apiextensions.k8s.io/v1:CustomResourceDefinition": (
        "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    ),
    "kubernetes:apps/v1:Deployment": "/apis/apps/v1/deployments",
    "kubernetes:core/v1:ConfigMap": "/api/v1/configmaps",
    "kubernetes:core/v1:Namespace": "/api/v1/namespaces",
    "kubernetes:core/v1:PersistentVolume": "/api/v1/persistentvolumes",
    "kubernetes:core/v1:PersistentVolumeClaim": "/api/v1/persistentvolumeclaims",
    "kubernetes:core/v1:Secret": "/api/v1/secrets",
    "kubernetes:core/v1:Service": "/api/v1/services",
    "kubernetes:core/v1:ServiceAccount": "/api/v1/serviceaccounts",
    "kubernetes:karpenter.k8s.aws/v1:EC2NodeClass": "/apis/karpenter.k8s.aws/v1/ec2nodeclasses",
    "kubernetes:karpenter.sh/v1:NodePool": "/apis/karpenter.sh/v1/nodepools",
    "kubernetes:networking.k8s.io/v1:NetworkPolicy": "/apis/networking.k8s.io/v1/networkpolicies",
    "kubernetes:ray.io/v1:RayJob": "/apis/ray.io/v1/rayjobs",
    "kubernetes:rbac.authorization.k8s.io/v1:ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "kubernetes:rbac.authorization.k8s.io/v1:ClusterRoleBinding": (
        "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"
    ),
    "kubernetes:rbac.authorization.k8s.io/v1:Role": "/apis/rbac.authorization.k8s.io/v1/roles",
    "kubernetes:rbac.authorization.k8s.io/v1:RoleBinding": "/apis/rbac.authorization.k8s.io/v1/rolebindings",
    "kubernetes:scheduling.k8s.io/v1:PriorityClass": "/apis/scheduling.k8s.io/v1/priorityclasses",
    "kubernetes:scheduling.volcano.sh/v1beta1:Queue": "/apis/scheduling.volcano.sh/v1beta1/queues",
    "kubernetes:storage.k8s.io/v1:StorageClass": "/apis/storage.k8s.io/v1/storageclasses",
}
# How the names begin of what the server makes by itself.
OWN = ("kube-", "kubernetes", "system", "default")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with apiserver.serving(tmp_path_factory.mktemp("kubernetes")) as running:
        yield running


@pytest.mark.parametrize("name", STACKS)
def test_a_stack_comes_up_and_goes_on_a_real_api_server(
    name: str, server: ApiServer, tmp_path: Path, new_stack: Callable[..., Stack], figure: Callable[[str], None]
) -> None:
    before = objects(server)
    with stub_charts.charts(tmp_path / "charts") as mirror, operating(server, NAMESPACE):
        made = on_server(name, server, mirror, tmp_path, new_stack)
        up = made.up().ok()
        inside = [r for r in made.resources() if r.get("custom") and r["type"].startswith("kubernetes:")]
        added = objects(server) - before
        again = made.up("--expect-no-changes").ok()
        destroy = made.destroy().ok()
    missing = {path_of(resource) for resource in inside} - added
    assert missing == set(), "every object of the state is on the server"
    assert objects(server) - before == set(), "destroy leaves nothing on the server"
    version = server.request("/version")["gitVersion"]
    figure(
        f"{name} on Kubernetes {version}: {len(inside)} objects; up {up.seconds:.1f} s, "
        f"second up {again.seconds:.1f} s, destroy {destroy.seconds:.1f} s"
    )


def test_a_larger_file_system_runs_no_stage_again(
    server: ApiServer, tmp_path: Path, new_stack: Callable[..., Stack]
) -> None:
    with stub_charts.charts(tmp_path / "charts") as mirror, operating(server, NAMESPACE) as there:
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


def path_of(resource: Props) -> str:
    """Where the server has a resource of the state; of a release, the stub that its chart brings."""
    if resource["type"] == RELEASE:
        chart = resource["inputs"]["chart"].rsplit("/", 1)[-1]
        return f"/api/v1/configmaps/{resource['inputs']['namespace']}/{chart}-stub"
    namespace, _, name = resource["id"].rpartition("/")
    return f"{PATHS[resource['type']]}/{namespace}/{name}"


def objects(server: ApiServer) -> set[str]:
    """Paths of what the server has of the program's kinds, but for what it makes by itself and what charts keep."""
    found = set()
    for path in PATHS.values():
        try:
            items = server.request(path)["items"]
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            continue  # the kind of a chart that is not installed
        for item in items:
            meta = item["metadata"]
            kept = meta.get("annotations", {}).get("helm.sh/resource-policy") == "keep"  # Volcano's own definitions
            if not kept and not meta["name"].startswith(OWN):
                found.add(f"{path}/{meta.get('namespace', '')}/{meta['name']}")
    return found
