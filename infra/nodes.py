"""Nodes: the core group for system pods, head nodes and data preparation, and what every node of the platform has."""

from __future__ import annotations

from collections.abc import Mapping

import pulumi
import pulumi_aws as aws

from infra import settings
from infra.catalog import GROUP_LABEL
from infra.cluster import Cluster
from infra.iam import Role
from infra.network import Network, cluster_name
from infra.policies import service_trust
from infra.versions import AMI_RELEASE

# Only the host itself reaches the instance's metadata, so that no pod gets the node's credentials: pods have roles of
# their own through Pod Identity. The CSI drivers' agents ask the Kubernetes API when the metadata are out of reach.
IMDS_HOP_LIMIT = 1


def metadata_options() -> aws.ec2.LaunchTemplateMetadataOptionsArgs:
    """Instance metadata by session tokens only (IMDSv2), from the host only."""
    return aws.ec2.LaunchTemplateMetadataOptionsArgs(
        http_endpoint="enabled", http_tokens="required", http_put_response_hop_limit=IMDS_HOP_LIMIT
    )


def root_volume(size_gib: int) -> aws.ec2.LaunchTemplateBlockDeviceMappingArgs:
    """The root volume of an AL2023 node: encrypted gp3, gone with its node."""
    return aws.ec2.LaunchTemplateBlockDeviceMappingArgs(
        device_name="/dev/xvda",
        ebs=aws.ec2.LaunchTemplateBlockDeviceMappingEbsArgs(
            volume_size=size_gib, volume_type="gp3", encrypted="true", delete_on_termination="true"
        ),
    )


def tag_specifications(tags: Mapping[str, str], group: str) -> list[aws.ec2.LaunchTemplateTagSpecificationArgs]:
    """Tags of what EC2 makes from a launch template, which the provider's default tags do not reach."""
    named = {**tags, "Name": f"{cluster_name()}-{group}"}
    return [
        aws.ec2.LaunchTemplateTagSpecificationArgs(resource_type=kind, tags=named)
        for kind in ("instance", "volume", "network-interface")
    ]


class CoreNodes(pulumi.ComponentResource):
    """A managed node group across all zones, and the role of the platform's nodes, accelerators included.

    EKS itself lets the role's nodes into the cluster (an access entry of type EC2_LINUX) when it makes the first
    managed group; nodes that Karpenter starts with the same role need no entry of their own.
    """

    role: Role
    node_group: aws.eks.NodeGroup

    def __init__(
        self,
        name: str,
        section: settings.CoreNodes,
        cluster: Cluster,
        network: Network,
        tags: Mapping[str, str],
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        """`tags` are those of the instances, volumes and interfaces."""
        super().__init__("llama-trainium:infra:CoreNodes", name, None, opts)
        child = pulumi.ResourceOptions(parent=self)
        self.role = Role(
            name,
            service_trust("ec2.amazonaws.com"),
            # Joining the cluster, pulling images, and a shell through Session Manager instead of SSH. The CNI's own
            # permissions are not among them: its pods have a role (infra/cluster.py).
            ["AmazonEKSWorkerNodePolicy", "AmazonEC2ContainerRegistryPullOnly", "AmazonSSMManagedInstanceCore"],
            opts=child,
        )
        template = aws.ec2.LaunchTemplate(
            f"{name}-template",
            # No image and no security group: EKS puts in the AMI of the release and the cluster's group.
            block_device_mappings=[root_volume(section.disk_gib)],
            metadata_options=metadata_options(),
            tag_specifications=tag_specifications(tags, "core"),
            update_default_version=True,
            opts=child,
        )
        self.node_group = aws.eks.NodeGroup(
            f"{name}-group",
            cluster_name=cluster.name,
            node_role_arn=self.role.arn,
            subnet_ids=[subnet.id for subnet in network.private_subnets.values()],
            ami_type="AL2023_x86_64_STANDARD",
            release_version=AMI_RELEASE,
            capacity_type="ON_DEMAND",
            instance_types=[section.instance_type],
            launch_template=aws.eks.NodeGroupLaunchTemplateArgs(
                id=template.id, version=template.latest_version.apply(str)
            ),
            scaling_config=aws.eks.NodeGroupScalingConfigArgs(
                min_size=section.min, desired_size=section.desired, max_size=section.max
            ),
            update_config=aws.eks.NodeGroupUpdateConfigArgs(max_unavailable=1),
            node_repair_config=aws.eks.NodeGroupNodeRepairConfigArgs(enabled=True),
            labels={GROUP_LABEL: "core"},
            opts=pulumi.ResourceOptions(
                parent=self,
                depends_on=cluster.ready_for_nodes,
                # From then on the number of nodes is the autoscaler's.
                ignore_changes=["scalingConfig.desiredSize"],
            ),
        )
        self.register_outputs({"role_arn": self.role.arn})
