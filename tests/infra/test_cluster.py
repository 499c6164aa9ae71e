"""The cluster: who reaches it, what it keeps, what runs on its nodes before any pod, and in which order it all goes."""

from __future__ import annotations

import json
from ipaddress import IPv4Network
from typing import Any

import pytest
from base_platform import ADMINS, TAGS, ZONES, build_base
from mock_cloud import ACCOUNT, zone_name
from mocks import Recorded, Registered, run

from infra import settings
from infra.network import cluster_name
from infra.versions import EKS_ADDONS

CLUSTER, ADDON, GROUP = "eks:index:Cluster", "aws:eks/addon:Addon", "aws:eks/nodeGroup:NodeGroup"
ROLE, POLICY = "aws:iam/role:Role", "aws:iam/rolePolicy:RolePolicy"
SECURITY_GROUP = "sg-0c105e70000000000"  # the one that EKS makes


def make(**section: Any) -> Recorded:
    """What the base registers with these settings of the cluster."""

    def program() -> None:
        build_base(cluster=settings.Cluster.model_validate(section))

    return run(program)


def addon(recorded: Recorded, name: str) -> Registered:
    """The add-on of that (EKS's) name."""
    return next(each for each in recorded.of(ADDON) if each.inputs["addonName"] == name)


def test_the_cluster(base: Recorded) -> None:
    inputs = base.one(CLUSTER).inputs
    assert inputs["name"] == "llama-trainium-dev"
    assert inputs["version"] == "1.35"
    assert inputs["authenticationMode"] == "API"
    assert inputs["kubernetesServiceIpAddressRange"] == "172.20.0.0/16"
    assert inputs["upgradePolicy"] == {"supportType": "STANDARD"}
    assert inputs["deletionProtection"] is False
    assert inputs["subnetIds"] == [base.one("aws:ec2/subnet:Subnet", f"private-{zone}").id for zone in ZONES]
    # Pod Identity instead, nodes of our own, and no add-on that is not pinned.
    assert inputs["createOidcProvider"] is False
    assert inputs["skipDefaultNodeGroup"] is inputs["skipDefaultSecurityGroups"] is True
    assert inputs["bootstrapSelfManagedAddons"] is False
    assert inputs["useDefaultVpcCni"] is True
    assert inputs["kubeProxyAddonOptions"]["enabled"] is inputs["corednsAddonOptions"]["enabled"] is False


def test_private_unless_networks_are_named() -> None:
    inputs = make().one(CLUSTER).inputs
    assert (inputs["endpointPrivateAccess"], inputs["endpointPublicAccess"]) == (True, False)
    assert "publicAccessCidrs" not in inputs
    inputs = make(public_access_cidrs=[IPv4Network("203.0.113.0/24")]).one(CLUSTER).inputs
    assert (inputs["endpointPrivateAccess"], inputs["endpointPublicAccess"]) == (True, True)
    assert inputs["publicAccessCidrs"] == ["203.0.113.0/24"]


def test_secrets_are_encrypted_with_a_key_that_rotates(base: Recorded) -> None:
    key = base.one("aws:kms/key:Key")
    assert base.one(CLUSTER).inputs["encryptionConfigKeyArn"] == key.outputs["arn"]
    assert key.inputs["enableKeyRotation"] is True
    assert base.one("aws:kms/alias:Alias").inputs["name"] == "alias/llama-trainium-dev-secrets"


def test_logs_go_into_a_group_that_ends_and_outlives_the_cluster(base: Recorded) -> None:
    group = base.one("aws:cloudwatch/logGroup:LogGroup", "cluster-logs")
    assert group.inputs["name"] == "/aws/eks/llama-trainium-dev/cluster"
    assert group.inputs["retentionInDays"] == 30
    cluster = base.one(CLUSTER)
    assert cluster.inputs["enabledClusterLogTypes"] == ["api", "audit", "authenticator"]
    # Through an input: what `depends_on` says does not reach into a remote component, so not to the cluster on destroy.
    behind = cluster.request.propertyDependencies["enabledClusterLogTypes"].urns
    assert group.urn in behind


def test_no_logs_no_group() -> None:
    recorded = make(logs=[])
    assert not recorded.of("aws:cloudwatch/logGroup:LogGroup")
    assert "enabledClusterLogTypes" not in recorded.one(CLUSTER).inputs


def test_admins(base: Recorded) -> None:
    entries = base.of("aws:eks/accessEntry:AccessEntry")
    assert [each.inputs["principalArn"] for each in entries] == ADMINS  # same role name in two accounts
    for each in base.of("aws:eks/accessPolicyAssociation:AccessPolicyAssociation"):
        assert each.inputs["policyArn"].endswith("/AmazonEKSClusterAdminPolicy")
        assert each.inputs["accessScope"] == {"type": "cluster"}
        entry = next(entry for entry in entries if entry.inputs["principalArn"] == each.inputs["principalArn"])
        assert base.waits_for(each, entry)


def test_what_eks_makes_itself_is_tagged(base: Recorded) -> None:
    tags = base.of("aws:ec2/tag:Tag")
    assert {each.inputs["key"]: each.inputs["value"] for each in tags} == TAGS
    assert {each.inputs["resourceId"] for each in tags} == {SECURITY_GROUP}


def test_the_kubeconfig_is_a_secret(base: Recorded) -> None:
    provider = base.one("pulumi:providers:kubernetes")
    assert "kubeconfig" in provider.secrets
    assert base.waits_for(provider, base.one("aws:eks/cluster:Cluster"))


def test_every_addon_is_pinned_and_there_once(base: Recorded) -> None:
    assert {each.inputs["addonName"]: each.inputs["addonVersion"] for each in base.of(ADDON)} == EKS_ADDONS
    assert len(base.of(ADDON)) == len(EKS_ADDONS) == 7


@pytest.mark.parametrize("name", ["vpc-cni", "kube-proxy", "eks-pod-identity-agent"])
def test_nodes_come_after_what_their_pods_need_and_go_before_it(base: Recorded, name: str) -> None:
    nodes, needed = base.one(GROUP), addon(base, name)
    assert base.waits_for(nodes, needed)
    assert not base.waits_for(needed, nodes)
    # Not one after the other: that would add a minute each to every `up`.
    others = [each for each in base.of(ADDON) if each is not needed]
    assert not any(base.waits_for(needed, other) for other in others)


@pytest.mark.parametrize("name", ["coredns", "metrics-server", "aws-ebs-csi-driver", "aws-fsx-csi-driver"])
def test_addons_with_deployments_come_after_nodes(base: Recorded, name: str) -> None:
    assert base.waits_for(addon(base, name), base.one(GROUP))


def test_pods_have_addresses_of_the_secondary_range(base: Recorded) -> None:
    values = json.loads(addon(base, "vpc-cni").inputs["configurationValues"])
    assert values["env"]["AWS_VPC_K8S_CNI_CUSTOM_NETWORK_CFG"] == "true"
    assert values["env"]["ENI_CONFIG_LABEL_DEF"] == "topology.kubernetes.io/zone"
    assert values["env"]["ENABLE_PREFIX_DELEGATION"] == "true"
    assert json.loads(values["env"]["ADDITIONAL_ENI_TAGS"]) == TAGS
    # By the name of the zone, which nodes have as a label, though the subnets are placed by id.
    assert values["eniConfig"] == {
        "create": True,
        "region": "us-west-2",
        "subnets": {
            zone_name(zone, "us-west-2"): {
                "id": base.one("aws:ec2/subnet:Subnet", f"pods-{zone}").id,
                "securityGroups": [SECURITY_GROUP],
            }
            for zone in ZONES
        },
    }


@pytest.mark.parametrize(
    ("name", "account"),
    [
        ("vpc-cni", "aws-node"),
        ("aws-ebs-csi-driver", "ebs-csi-controller-sa"),
        ("aws-fsx-csi-driver", "fsx-csi-controller-sa"),
    ],
)
def test_an_addon_has_the_role_of_its_service_account(base: Recorded, name: str, account: str) -> None:
    made = addon(base, name)
    (association,) = made.inputs["podIdentityAssociations"]
    role = next(each for each in base.of(ROLE) if each.outputs["arn"] == association["roleArn"])
    assert association["serviceAccount"] == account
    (statement,) = json.loads(role.inputs["assumeRolePolicy"])["Statement"]
    assert statement["Principal"] == {"Service": "pods.eks.amazonaws.com"}
    assert set(statement["Action"]) == {"sts:AssumeRole", "sts:TagSession"}
    assert statement["Condition"]["StringEquals"] == {
        "aws:RequestTag/eks-cluster-arn": f"arn:aws:eks:us-west-2:{ACCOUNT}:cluster/llama-trainium-dev",
        "aws:RequestTag/kubernetes-namespace": "kube-system",
        "aws:RequestTag/kubernetes-service-account": account,
    }
    # What the add-on made in AWS is deleted by the add-on, with its permissions still there.
    policy = next(each for each in base.of(POLICY) if each.inputs["role"] == role.id)
    assert base.waits_for(made, policy)
    # And roles are made while the cluster is, not after it.
    assert not base.waits_for(role, base.one(CLUSTER))


def test_ebs_volumes_are_tagged(base: Recorded) -> None:
    values = json.loads(addon(base, "aws-ebs-csi-driver").inputs["configurationValues"])
    assert values == {"controller": {"extraVolumeTags": TAGS}}


def test_the_default_disk_is_encrypted_gp3(base: Recorded) -> None:
    made = base.one("kubernetes:storage.k8s.io/v1:StorageClass")
    assert made.inputs["metadata"]["annotations"]["storageclass.kubernetes.io/is-default-class"] == "true"
    assert made.inputs["parameters"] == {"type": "gp3", "encrypted": "true"}
    assert made.provider == base.one("pulumi:providers:kubernetes").urn


def test_everything_of_aws_has_the_provider_with_the_tags(base: Recorded) -> None:
    provider = base.one("pulumi:providers:aws")
    managed = [each for each in base if each.type.startswith("aws:") and each.type != "aws:eks/cluster:Cluster"]
    assert {each.provider for each in managed} == {provider.urn}
    assert base.one(CLUSTER).request.providers["aws"].startswith(provider.urn)


def test_every_resource_is_in_a_component(base: Recorded) -> None:
    top = {each.type for each in base if "pulumi:pulumi:Stack" in each.parent or not each.parent}
    names = ("Network", "Cluster", "CoreNodes", "AddOns")
    assert top == {*[f"llama-trainium:infra:{name}" for name in names], "pulumi:providers:aws"}


def test_a_preview_of_nothing_yet_goes_through() -> None:
    def program() -> None:
        assert cluster_name() == "llama-trainium-us-west-2"
        build_base()

    assert run(program, stack="us-west-2", preview=True).of(CLUSTER)
