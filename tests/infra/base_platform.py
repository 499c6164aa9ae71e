"""The platform without accelerators: network, cluster, core nodes and add-ons, for the tests of these."""

from __future__ import annotations

import pulumi
import pulumi_aws as aws

from infra import settings
from infra.addons import AddOns
from infra.cluster import Cluster
from infra.network import Network
from infra.nodes import CoreNodes

ZONES = ["usw2-az4", "usw2-az1"]
ADMINS = ["arn:aws:iam::123456789012:role/Admin", "arn:aws:iam::210987654321:role/Admin"]
TAGS = {"project": "llama-trainium", "stack": "dev", "cost-centre": "research"}


def build_base(
    network: settings.Network | None = None, cluster: settings.Cluster | None = None
) -> tuple[Network, Cluster, CoreNodes, AddOns]:
    """Network, cluster, core nodes and add-ons, put together as __main__.py does."""
    opts = pulumi.ResourceOptions(providers=[aws.Provider("aws", region="us-west-2")])
    made_network = Network("network", network or settings.Network(zones=ZONES), "us-west-2", 30, opts)
    made_cluster = Cluster("cluster", cluster or settings.Cluster(admins=ADMINS), made_network, TAGS, opts)
    nodes = CoreNodes("core", settings.CoreNodes(), made_cluster, made_network, TAGS, opts)
    return made_network, made_cluster, nodes, AddOns("addons", made_cluster, nodes, TAGS, opts)
