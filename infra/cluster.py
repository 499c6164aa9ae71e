"""The EKS cluster, the add-ons that nodes need to join it, and the Kubernetes provider.

Pods get addresses from the secondary range by VPC CNI's custom networking: the add-on itself makes an ENIConfig for
each zone, named as the zone, and a node finds its own by its zone label. Chosen over subnet discovery (the tag
`kubernetes.io/role/cni`), which by default gives pods addresses of the node's first interface too, so of the small
range, and whose tag to leave that out is new in 1.22.1. The first interface, an EFA on accelerator nodes, stays the
host's. The ENIConfigs are there before the first node: one that joined before them would have to be replaced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pulumi
import pulumi_aws as aws
import pulumi_eks
import pulumi_kubernetes

from infra import policies, settings
from infra.addons import addon
from infra.iam import find_place, pod_role
from infra.network import Network, cluster_name
from infra.policies import Place
from infra.subnets import SERVICE_CIDR

CLUSTER_ADMIN = "arn:aws:eks::aws:cluster-access-policy/AmazonEKSClusterAdminPolicy"


class Cluster(pulumi.ComponentResource):
    """The control plane with what nodes need, and the way in for Kubernetes resources."""

    name: pulumi.Output[str]
    place: pulumi.Output[Place]
    """Region, account and cluster name, for policies; known before the cluster is."""
    eks: pulumi_eks.Cluster
    security_group_id: pulumi.Output[str]
    """The group that EKS makes: control plane, nodes and pods, all traffic among themselves."""
    k8s: pulumi_kubernetes.Provider
    ready_for_nodes: list[pulumi.Resource]
    """What nodes wait for, and must be gone before."""

    def __init__(
        self,
        name: str,
        section: settings.Cluster,
        network: Network,
        tags: Mapping[str, str],
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        """`tags` are those of what EKS and the CNI make themselves: the security group, the pods' interfaces."""
        super().__init__("llama-trainium:infra:Cluster", name, None, opts)
        self._name, self._section, self._network, self._tags = name, section, network, tags
        self._child = pulumi.ResourceOptions(parent=self)
        self.place = find_place(network.region, cluster_name(), pulumi.InvokeOutputOptions(parent=self))

        self.eks = self._make_cluster()
        self.name = self.eks.eks_cluster.apply(lambda cluster: cluster.name)
        self.security_group_id = self.eks.cluster_security_group_id
        for key, value in tags.items():
            aws.ec2.Tag(
                f"{name}-group-{key}", resource_id=self.security_group_id, key=key, value=value, opts=self._child
            )
        for arn in section.admins:
            self._make_admin(arn)
        kubeconfig: pulumi.Output[str] = pulumi.Output.secret(self.eks.kubeconfig_json)
        self.k8s = pulumi_kubernetes.Provider(
            f"{name}-k8s",
            kubeconfig=kubeconfig,
            enable_server_side_apply=True,
            # A cluster out of reach is mostly a network that is, or a private endpoint seen from outside. Dropping its
            # objects from the state would leave behind the load balancers and nodes that controllers made for them.
            delete_unreachable=False,
            opts=self._child,
        )
        self.ready_for_nodes = [*network.ready, *self._make_addons()]
        self.register_outputs({"name": self.name})

    def _make_cluster(self) -> pulumi_eks.Cluster:
        key = aws.kms.Key(
            f"{self._name}-secrets",
            description=f"Kubernetes secrets of {cluster_name()}",
            # Without a policy of ours AWS's default holds: IAM policies of this account say who uses the key.
            enable_key_rotation=True,
            deletion_window_in_days=7,
            opts=self._child,
        )
        aws.kms.Alias(
            f"{self._name}-secrets", name=f"alias/{cluster_name()}-secrets", target_key_id=key.id, opts=self._child
        )
        logs: pulumi.Input[list[str]] | None = None
        if self._section.logs:
            # EKS would make this group itself, without an end to its logs, and leave it behind. Made first, and deleted
            # last because the types of logs come by way of it: `depends_on` does not reach into a remote component.
            group = aws.cloudwatch.LogGroup(
                f"{self._name}-logs",
                name=f"/aws/eks/{cluster_name()}/cluster",
                retention_in_days=self._section.log_retention_days,
                opts=self._child,
            )
            logs = group.name.apply(lambda _: list(self._section.logs))
        public = [str(network) for network in self._section.public_access_cidrs]
        return pulumi_eks.Cluster(
            self._name,
            name=cluster_name(),
            version=self._section.version,
            vpc_id=self._network.vpc_id,
            # Where EKS puts the API server's interfaces; load balancers find the public subnets by their tags.
            subnet_ids=[subnet.id for subnet in self._network.private_subnets.values()],
            kubernetes_service_ip_address_range=str(SERVICE_CIDR),
            authentication_mode=pulumi_eks.AuthenticationMode.API,
            endpoint_private_access=True,
            endpoint_public_access=bool(public),
            public_access_cidrs=public or None,
            encryption_config_key_arn=key.arn,
            enabled_cluster_log_types=logs,
            # STANDARD: EKS upgrades a version at the end of its support instead of billing six times the price for it.
            upgrade_policy=aws.eks.ClusterUpgradePolicyArgs(support_type="STANDARD"),
            deletion_protection=False,
            # Pods have Pod Identity. The OIDC provider would also fetch a certificate over the network in a preview.
            create_oidc_provider=False,
            # Nodes are infra/nodes.py's and infra/accelerators.py's, in the group that EKS makes.
            skip_default_node_group=True,
            skip_default_security_groups=True,
            # Add-ons are all of one kind here, pinned and with Pod Identity (infra/addons.py), so none comes by itself.
            bootstrap_self_managed_addons=False,
            use_default_vpc_cni=True,
            kube_proxy_addon_options=pulumi_eks.KubeProxyAddonOptionsArgs(enabled=False),
            coredns_addon_options=pulumi_eks.CoreDnsAddonOptionsArgs(enabled=False),
            opts=self._child,
        )

    def _make_admin(self, arn: str) -> None:
        # The part after the partition tells any two principals apart: 111122223333-role-Admin.
        who = re.sub(r"[^\w]+", "-", arn.split("::", 1)[-1])
        entry = aws.eks.AccessEntry(
            f"{self._name}-admin-{who}", cluster_name=self.name, principal_arn=arn, opts=self._child
        )
        aws.eks.AccessPolicyAssociation(
            f"{self._name}-admin-{who}",
            cluster_name=self.name,
            principal_arn=entry.principal_arn,
            policy_arn=CLUSTER_ADMIN,
            access_scope=aws.eks.AccessPolicyAssociationAccessScopeArgs(type="cluster"),
            opts=self._child,
        )

    def _make_addons(self) -> list[pulumi.Resource]:
        """The add-ons that are on a node before any pod can be: they need no node themselves."""
        pods = list(self._network.pod_subnets.values())
        policy = pulumi.Output.all(self.place, self._network.vpc.arn, [subnet.arn for subnet in pods]).apply(
            lambda found: policies.vpc_cni(*found)
        )
        role = pod_role(f"{self._name}-vpc-cni", self.place, "aws-node", policy, self._child)
        configuration = pulumi.Output.all(
            self.security_group_id, *[pulumi.Output.all(subnet.availability_zone, subnet.id) for subnet in pods]
        ).apply(lambda found: self._cni_configuration(found[0], dict(found[1:])))
        return [
            # All at once: what starts on a node starts after all three. The agent hands the CNI's pods their role.
            addon(f"{self._name}-pod-identity", "eks-pod-identity-agent", self.name, self._child),
            addon(f"{self._name}-kube-proxy", "kube-proxy", self.name, self._child),
            addon(
                f"{self._name}-vpc-cni",
                "vpc-cni",
                self.name,
                self._child,
                configuration=configuration,
                roles={"aws-node": role.arn},
            ),
        ]

    def _cni_configuration(self, security_group: str, subnets: Mapping[str, str]) -> dict[str, Any]:
        """VPC CNI's values; `subnets` are the pods' subnets by the name (not id) of their zone."""
        return {
            "enableNetworkPolicy": "true",
            "env": {
                "AWS_VPC_K8S_CNI_CUSTOM_NETWORK_CFG": "true",
                "ENI_CONFIG_LABEL_DEF": "topology.kubernetes.io/zone",
                # Addresses by blocks of 16: more pods than a node's interfaces have single addresses.
                "ENABLE_PREFIX_DELEGATION": "true",
                "ADDITIONAL_ENI_TAGS": json.dumps(dict(self._tags)),
            },
            "eniConfig": {
                "create": True,
                "region": self._network.region,
                "subnets": {
                    zone: {"id": subnet, "securityGroups": [security_group]} for zone, subnet in subnets.items()
                },
            },
        }
