"""EKS's managed add-ons that need nodes to run on: CoreDNS, the CSI drivers, the metrics server; and the default disks.

The drivers' agents run on every node, whatever its taints: that is the pinned versions' default (tolerateAllTaints).
The FSx agent takes the start-up taint `fsx.csi.aws.com/agent-not-ready` off its node itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pulumi
import pulumi_aws as aws
import pulumi_kubernetes as k8s

from infra import policies
from infra.iam import pod_role
from infra.versions import EKS_ADDONS

if TYPE_CHECKING:
    from infra.cluster import Cluster
    from infra.nodes import CoreNodes


def addon(
    name: str,
    addon_name: str,
    cluster_name: pulumi.Input[str],
    opts: pulumi.ResourceOptions,
    configuration: pulumi.Input[Mapping[str, Any]] | None = None,
    roles: Mapping[str, pulumi.Input[str]] | None = None,
) -> aws.eks.Addon:
    """The add-on `addon_name` at its pinned version. `roles` are the roles' ARNs of its service accounts."""
    return aws.eks.Addon(
        name,
        addon_name=addon_name,
        addon_version=EKS_ADDONS[addon_name],
        cluster_name=cluster_name,
        configuration_values=None if configuration is None else pulumi.Output.json_dumps(configuration),
        pod_identity_associations=[
            aws.eks.AddonPodIdentityAssociationArgs(service_account=account, role_arn=arn)
            for account, arn in (roles or {}).items()
        ],
        # What is written here wins over what someone changed in the cluster.
        resolve_conflicts_on_create="OVERWRITE",
        resolve_conflicts_on_update="OVERWRITE",
        opts=opts,
    )


class AddOns(pulumi.ComponentResource):
    """The add-ons that wait for the core nodes, all at once, and the StorageClass `gp3`."""

    dns: aws.eks.Addon
    """Names inside the cluster: what is installed from a chart waits for it."""
    storage: list[aws.eks.Addon]
    """The EBS and FSx drivers: what mounts a volume waits for them."""

    def __init__(
        self,
        name: str,
        cluster: Cluster,
        core_nodes: CoreNodes,
        tags: Mapping[str, str],
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        """`tags` are those of the volumes that the EBS driver makes."""
        super().__init__("llama-trainium:infra:AddOns", name, None, opts)
        child = pulumi.ResourceOptions(parent=self)
        on_nodes = pulumi.ResourceOptions(parent=self, depends_on=[core_nodes.node_group])

        self.dns = addon(f"{name}-coredns", "coredns", cluster.name, on_nodes)
        addon(f"{name}-metrics-server", "metrics-server", cluster.name, on_nodes)

        ebs_account = "ebs-csi-controller-sa"
        ebs_role = pod_role(f"{name}-ebs-csi", cluster.place, ebs_account, cluster.place.apply(policies.ebs_csi), child)
        ebs = addon(
            f"{name}-ebs-csi",
            "aws-ebs-csi-driver",
            cluster.name,
            on_nodes,
            configuration={"controller": {"extraVolumeTags": dict(tags)}},
            roles={ebs_account: ebs_role.arn},
        )
        fsx_account = "fsx-csi-controller-sa"
        fsx_role = pod_role(f"{name}-fsx-csi", cluster.place, fsx_account, policies.fsx_csi(), child)
        fsx = addon(f"{name}-fsx-csi", "aws-fsx-csi-driver", cluster.name, on_nodes, roles={fsx_account: fsx_role.arn})
        self.storage = [ebs, fsx]

        # EKS's own class gp2 is not the default one since 1.30, so that this is the only default.
        k8s.storage.v1.StorageClass(
            f"{name}-gp3",
            metadata=k8s.meta.v1.ObjectMetaArgs(
                name="gp3", annotations={"storageclass.kubernetes.io/is-default-class": "true"}
            ),
            provisioner="ebs.csi.aws.com",
            parameters={"type": "gp3", "encrypted": "true"},
            # A volume is made in the zone of the pod that first uses it.
            volume_binding_mode="WaitForFirstConsumer",
            allow_volume_expansion=True,
            reclaim_policy="Delete",
            opts=pulumi.ResourceOptions(parent=self, provider=cluster.k8s),
        )
        self.register_outputs({})
