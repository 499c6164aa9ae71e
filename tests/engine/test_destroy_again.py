"""`infra.destroy` around the real engine: what a controller left holds the network, is swept, and all goes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cloud import Cloud, Resource
from left_behind import LOGS, OF_CONTROLLER, REGION, Network, client, cluster, empty_account, log_group
from order import refusals
from stack import Stack, missing

from infra.account import clients_of
from infra.destroy import destroy
from infra.leftovers import leftovers

pytestmark = [pytest.mark.skipif(missing() is not None, reason=str(missing())), pytest.mark.timeout(1800)]


def test_what_holds_the_network_is_swept_between_two_destroys(new_stack: Callable[..., Stack]) -> None:
    with empty_account():
        stack, network = new_stack("dev"), Network()
        stack.up().ok()
        cluster(network)
        balancer = network.load_balancer("of-an-ingress", OF_CONTROLLER)
        interface = network.interface()

        def in_the_way(cloud: Cloud, op: str, resource: Resource) -> str | None:
            """Of AWS: an interface holds its subnet; the account that is swept is moto's."""
            if op == "delete" and resource.type == "aws:ec2/subnet:Subnet":
                found = client("ec2").describe_network_interfaces()["NetworkInterfaces"]
                if any(each["NetworkInterfaceId"] == interface for each in found):
                    return f"DependencyViolation: {resource.id} has dependencies and cannot be deleted"
            return refusals(cloud, op, resource)

        stack.cloud.refusals = in_the_way
        runs = []

        def pulumi() -> int:
            runs.append(stack.destroy())
            if len(runs) == 1:
                assert not stack.cloud.of("aws:eks/cluster:Cluster"), "the cluster goes before the network"
                client("eks").delete_cluster(name="llama-trainium-dev")
                log_group(LOGS)  # the control plane's last lines
            return runs[-1].code

        pauses: list[int] = []
        assert destroy("dev", clients_of(REGION), pulumi, lambda: pauses.append(1)) == 0
        assert [run.code == 0 for run in runs] == [False, True]
        assert "DependencyViolation" in runs[0].output
        assert len(pauses) == 1
        assert stack.resources() == []
        assert not stack.cloud.live, "dev keeps nothing"
        left = [each.arn for each in leftovers(clients_of(REGION), "dev", keeps_bucket=False)]
        assert left == [f"arn:aws:ec2:{REGION}:123456789012:vpc/{network.vpc}"], "moto's own network is no stack's"
        assert balancer not in left
