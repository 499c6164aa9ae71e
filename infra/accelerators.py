"""Trainium nodes: a managed node group of one instance type in one zone, with our own launch template.

pulumi-eks does not know the Neuron AMI type and gives EFA interfaces no security group of their own, so the launch
template is ours. What it says of interfaces, capacity and disks is what EC2 and EKS require of each other:
https://docs.aws.amazon.com/eks/latest/userguide/launch-templates.html
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.mime.multipart import MIMEMultipart
from email.mime.nonmultipart import MIMENonMultipart

import pulumi
import pulumi_aws as aws

from infra import settings
from infra.catalog import GROUP_LABEL, NEURON_KEY
from infra.cluster import Cluster
from infra.iam import Role
from infra.network import Network, cluster_name
from infra.nodes import metadata_options, root_volume, tag_specifications
from infra.versions import AMI_RELEASE


@dataclass(frozen=True)
class Taint:
    """A node's taint, in Kubernetes' words."""

    key: str
    effect: str

    @property
    def eks_effect(self) -> str:
        """The effect in the words of the EKS API: NO_SCHEDULE for NoSchedule."""
        return {"NoSchedule": "NO_SCHEDULE", "NoExecute": "NO_EXECUTE"}[self.effect]


NEURON_TAINT = Taint(NEURON_KEY, "NoSchedule")
"""Keeps everything off these nodes that does not ask for them."""

FSX_TAINT = Taint("fsx.csi.aws.com/agent-not-ready", "NoExecute")
"""On a node until the FSx driver runs there and takes it away: a pod that came earlier could not mount its volume."""

CAPACITY_TYPES = {
    "on-demand": "ON_DEMAND",
    "spot": "SPOT",
    "reservation": "ON_DEMAND",
    "capacity-block": "CAPACITY_BLOCK",
}

NODE_TEMPLATE = "k8s.io/cluster-autoscaler/node-template/"
"""What the keys of the tags begin with by which cluster-autoscaler knows the nodes of an empty group."""

_NODE_CONFIG = """\
apiVersion: node.eks.aws/v1alpha1
kind: NodeConfig
spec:
  instance:
    localStorage:
      strategy: RAID0
"""


def instance_store_user_data() -> str:
    """User data, in base64, that makes the NVMe disks one RAID0 for containerd, kubelet and the logs of pods.

    EKS adds a part of its own for joining the cluster, and nodeadm merges the two; for that it has to be MIME:
    https://awslabs.github.io/amazon-eks-ami/nodeadm/doc/examples/
    """
    part = MIMENonMultipart("application", "node.eks.aws")
    part.set_payload(_NODE_CONFIG)
    # With a boundary of Python's choosing the template would change at every run.
    message = MIMEMultipart(boundary="NODECONFIG", _subparts=[part])
    return base64.b64encode(message.as_bytes()).decode()


def efa_interfaces(
    count: int, layout: str, security_groups: Sequence[pulumi.Input[str]]
) -> list[aws.ec2.LaunchTemplateNetworkInterfaceArgs]:
    """One EFA interface on each of `count` network cards: device 0 on card 0, the node's own, device 1 on the others.

    `layout` is the interface type beyond the first: "efa", or "efa-only", which takes no address of the subnet. None
    says whether it has a public address: EC2 refuses that beside a second interface, and the subnets give out none.
    """
    return [
        aws.ec2.LaunchTemplateNetworkInterfaceArgs(
            network_card_index=card,
            device_index=1 if card else 0,
            interface_type=layout if card else "efa",
            security_groups=list(security_groups),
            delete_on_termination="true",
        )
        for card in range(count)
    ]


def node_template(section: settings.AcceleratorGroup, labels: Mapping[str, str]) -> dict[str, str]:
    """Tags of an Auto Scaling group from which cluster-autoscaler knows the nodes of a group that has none.

    Of itself it knows vCPUs, memory, architecture and zone, but neither devices nor disks:
    https://github.com/kubernetes/autoscaler/blob/master/cluster-autoscaler/cloudprovider/aws/README.md
    It would also ask EKS for labels and taints, but only until the group has had its first node.
    """
    resources = {
        "aws.amazon.com/neuron": str(section.type.devices),
        "aws.amazon.com/neuroncore": str(section.type.cores),
        # Kubelet keeps back a tenth and 1 GiB, the file system a little. With an instance store there is far more: its
        # size is not promised here, so a pod that asks for more than the root volume has does not bring up a node.
        "ephemeral-storage": f"{section.disk_gib * 85 // 100}Gi",
    }
    if section.efa_interfaces:
        resources["vpc.amazonaws.com/efa"] = str(section.efa_interfaces)
    return {
        **{f"{NODE_TEMPLATE}label/{key}": value for key, value in labels.items()},
        **{f"{NODE_TEMPLATE}taint/{taint.key}": f":{taint.effect}" for taint in (NEURON_TAINT, FSX_TAINT)},
        **{f"{NODE_TEMPLATE}resources/{key}": value for key, value in resources.items()},
    }


class AcceleratorGroup(pulumi.ComponentResource):
    """A group of Trainium nodes and what their interfaces need.

    A capacity block has its nodes only between its begin and its end: until then `desired` has to be 0, or EKS gives up
    on the group. A reservation is targeted: EC2 starts nodes inside it or not at all, never beside it at full price.
    """

    section: settings.AcceleratorGroup
    labels: dict[str, str]
    security_group_ids: list[pulumi.Output[str]]
    """The cluster's, and with EFA the group's own."""
    placement_group: aws.ec2.PlacementGroup | None
    node_group: aws.eks.NodeGroup
    ready: list[pulumi.Resource]
    """What pods for these nodes wait for: an autoscaler reads the tags."""

    def __init__(
        self,
        name: str,
        section: settings.AcceleratorGroup,
        cluster: Cluster,
        network: Network,
        role: Role,
        tags: Mapping[str, str],
        autoscaler: str,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        """`role` is the nodes', `tags` are for what AWS makes from the launch template, `autoscaler` is the setting."""
        super().__init__("llama-trainium:infra:AcceleratorGroup", name, None, opts)
        self._name, self.section = name, section
        self._child = pulumi.ResourceOptions(parent=self)
        self.labels = {GROUP_LABEL: section.name}
        self.security_group_ids = [cluster.security_group_id]
        waits_for: list[pulumi.Resource] = list(cluster.ready_for_nodes)
        if section.efa_interfaces:
            waits_for += self._make_efa_group(network)
        self.placement_group = None
        if section.placement_group:
            self.placement_group = aws.ec2.PlacementGroup(
                f"{name}-placement", strategy=aws.ec2.PlacementStrategy.CLUSTER, opts=self._child
            )
        template = self._make_template(tags)

        # An autoscaler changes the number of nodes all the time; where there is none, the setting is what counts.
        scaled_elsewhere = ["scalingConfig.desiredSize"] if autoscaler == "cluster-autoscaler" else []
        self.node_group = aws.eks.NodeGroup(
            f"{name}-nodes",
            cluster_name=cluster.name,
            node_role_arn=role.arn,
            subnet_ids=[network.private_subnets[section.zone].id],
            ami_type="AL2023_x86_64_NEURON",
            release_version=AMI_RELEASE,
            capacity_type=CAPACITY_TYPES[section.capacity],
            launch_template=aws.eks.NodeGroupLaunchTemplateArgs(
                id=template.id, version=template.latest_version.apply(str)
            ),
            scaling_config=aws.eks.NodeGroupScalingConfigArgs(
                min_size=section.min, desired_size=section.desired, max_size=section.max
            ),
            # A run needs all its nodes: replacing them one by one would interrupt it as often as there are nodes. And
            # there is seldom capacity for a second set of nodes, so the old ones go first.
            update_config=aws.eks.NodeGroupUpdateConfigArgs(max_unavailable_percentage=100, update_strategy="MINIMAL"),
            node_repair_config=aws.eks.NodeGroupNodeRepairConfigArgs(enabled=True),
            labels=self.labels,
            taints=[
                aws.eks.NodeGroupTaintArgs(key=taint.key, effect=taint.eks_effect)
                for taint in (NEURON_TAINT, FSX_TAINT)
            ],
            opts=pulumi.ResourceOptions(parent=self, depends_on=waits_for, ignore_changes=scaled_elsewhere),
        )
        self.ready = [self.node_group]
        if autoscaler == "cluster-autoscaler":
            self.ready += self._make_node_template_tags()
        self.register_outputs({"node_group": self.node_group.node_group_name})

    def _make_efa_group(self, network: Network) -> list[pulumi.Resource]:
        """The security group that EFA asks for: all traffic from and to itself, named as a group and not by addresses.

        No huge pages are set aside beside it: the AMI has none, and libfabric falls back to ordinary ones.
        """
        group = aws.ec2.SecurityGroup(
            f"{self._name}-efa",
            vpc_id=network.vpc_id,
            description="EFA between the nodes of one group",
            tags={"Name": f"{cluster_name()}-{self.section.name}-efa"},
            opts=self._child,
        )
        self.security_group_ids.append(group.id)
        return [
            aws.vpc.SecurityGroupIngressRule(
                f"{self._name}-efa-in",
                security_group_id=group.id,
                description="EFA from this group",
                ip_protocol="-1",
                referenced_security_group_id=group.id,
                opts=self._child,
            ),
            aws.vpc.SecurityGroupEgressRule(
                f"{self._name}-efa-out",
                security_group_id=group.id,
                description="EFA to this group",
                ip_protocol="-1",
                referenced_security_group_id=group.id,
                opts=self._child,
            ),
            aws.vpc.SecurityGroupEgressRule(
                f"{self._name}-out",
                security_group_id=group.id,
                description="Registries, AWS services and storage",
                ip_protocol="-1",
                cidr_ipv4="0.0.0.0/0",
                opts=self._child,
            ),
        ]

    def _make_template(self, tags: Mapping[str, str]) -> aws.ec2.LaunchTemplate:
        section = self.section
        reserved = market = None
        if section.reservation_id:
            reserved = aws.ec2.LaunchTemplateCapacityReservationSpecificationArgs(
                capacity_reservation_target=(
                    aws.ec2.LaunchTemplateCapacityReservationSpecificationCapacityReservationTargetArgs(
                        capacity_reservation_id=section.reservation_id
                    )
                )
            )
        if section.capacity == "capacity-block":
            market = aws.ec2.LaunchTemplateInstanceMarketOptionsArgs(market_type="capacity-block")
        return aws.ec2.LaunchTemplate(
            f"{self._name}-template",
            # Here and not in the node group: a capacity block wants it so, and the interfaces are the type's.
            instance_type=section.instance_type,
            network_interfaces=efa_interfaces(section.efa_interfaces, section.efa_layout, self.security_group_ids),
            # EC2 takes security groups in one of the two places only.
            vpc_security_group_ids=None if section.efa_interfaces else self.security_group_ids,
            block_device_mappings=[root_volume(section.disk_gib)],
            metadata_options=metadata_options(),
            placement=(
                aws.ec2.LaunchTemplatePlacementArgs(group_name=self.placement_group.name)
                if self.placement_group
                else None
            ),
            capacity_reservation_specification=reserved,
            instance_market_options=market,
            user_data=instance_store_user_data() if section.instance_store and section.type.instance_store else None,
            tag_specifications=tag_specifications(tags, section.name),
            update_default_version=True,
            opts=self._child,
        )

    def _make_node_template_tags(self) -> list[pulumi.Resource]:
        """The tags for scaling from zero, on the group's Auto Scaling group: EKS hands no tags on to it."""
        scaling_group = self.node_group.resources.apply(_scaling_group)
        return [
            aws.autoscaling.Tag(
                f"{self._name}-{key.removeprefix(NODE_TEMPLATE).replace('/', '-')}",
                autoscaling_group_name=scaling_group,
                tag=aws.autoscaling.TagTagArgs(key=key, value=value, propagate_at_launch=False),
                opts=self._child,
            )
            for key, value in node_template(self.section, self.labels).items()
        ]


def _scaling_group(made: Sequence[aws.eks.outputs.NodeGroupResource]) -> str:
    """The name of the one Auto Scaling group that EKS makes for a node group."""
    (group,) = made[0].autoscaling_groups or []
    assert group.name
    return group.name
