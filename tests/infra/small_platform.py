"""The platform as far as its nodes, for tests of accelerator groups and autoscalers."""

from __future__ import annotations

import functools
import json
from typing import Any

import pulumi
import pulumi_aws as aws
from base_platform import TAGS, ZONES
from mocks import Recorded, run

from infra.accelerators import AcceleratorGroup
from infra.addons import AddOns
from infra.autoscaler import Autoscaler
from infra.cluster import Cluster
from infra.network import Network
from infra.nodes import CoreNodes
from infra.settings import Settings


def group(instance_type: str = "trn1.32xlarge", **given: Any) -> dict[str, Any]:
    """Settings of a group called trn1, up to four nodes in the first zone."""
    return {"name": "trn1", "instance_type": instance_type, "max": 4, **given}


def platform(*groups: dict[str, Any], autoscaler: str = "cluster-autoscaler", **given: Any) -> Recorded:
    """What the program registers for these groups (by default one of trn1.32xlarge); `given` are more settings.

    The same for the same settings: a test only reads it.
    """
    settings = {
        "region": "us-west-2",
        "cost_centre": "research",
        "network": {"zones": ZONES},
        "accelerators": list(groups) or [group()],
        "autoscaler": autoscaler,
        **given,
    }
    return _run(json.dumps(settings))


@functools.cache
def _run(settings: str) -> Recorded:
    section = Settings.model_validate(json.loads(settings)).with_derived()

    def program() -> None:
        provider = aws.Provider("aws", region=section.region)
        opts = pulumi.ResourceOptions(providers=[provider])
        network = Network("network", section.network, section.region, 30, opts)
        cluster = Cluster("cluster", section.cluster, network, TAGS, opts)
        core = CoreNodes("core", section.core_nodes, cluster, network, TAGS, opts)
        addons = AddOns("addons", cluster, core, TAGS, opts)
        made = [
            AcceleratorGroup(each.name, each, cluster, network, core.role, TAGS, section.autoscaler, opts)
            for each in section.accelerators
        ]
        after = [core.node_group, addons.dns]
        Autoscaler("autoscaler", section, cluster, network, core.role, made, TAGS, after, opts)

    return run(program)
