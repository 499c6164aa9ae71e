"""The core nodes, and what nodes of every kind have in common."""

from __future__ import annotations

import json

from base_platform import TAGS, ZONES
from mocks import Recorded

from infra.versions import AMI_RELEASE

GROUP, TEMPLATE = "aws:eks/nodeGroup:NodeGroup", "aws:ec2/launchTemplate:LaunchTemplate"


def test_the_group(base: Recorded) -> None:
    group = base.one(GROUP)
    inputs = group.inputs
    assert (inputs["amiType"], inputs["releaseVersion"]) == ("AL2023_x86_64_STANDARD", AMI_RELEASE)
    assert (inputs["instanceTypes"], inputs["capacityType"]) == (["m7i.2xlarge"], "ON_DEMAND")
    assert inputs["scalingConfig"] == {"minSize": 2, "desiredSize": 2, "maxSize": 4}
    assert inputs["subnetIds"] == [base.one("aws:ec2/subnet:Subnet", f"private-{zone}").id for zone in ZONES]
    assert inputs["nodeRepairConfig"] == {"enabled": True}
    assert inputs["updateConfig"] == {"maxUnavailable": 1}
    assert inputs["labels"] == {"llama-trainium/group": "core"}
    assert "taints" not in inputs  # system pods tolerate none
    # The autoscaler changes the number later, and an `up` must not change it back.
    assert list(group.request.ignoreChanges) == ["scalingConfig.desiredSize"]


def test_the_ami_is_of_the_clusters_version(base: Recorded) -> None:
    version = base.one("eks:index:Cluster").inputs["version"]
    assert base.one(GROUP).inputs["releaseVersion"].startswith(f"{version}.")


def test_the_template(base: Recorded) -> None:
    template = base.one(TEMPLATE)
    assert base.one(GROUP).inputs["launchTemplate"] == {"id": template.id, "version": "1"}
    # No pod reaches the node's credentials.
    assert template.inputs["metadataOptions"] == {
        "httpEndpoint": "enabled",
        "httpTokens": "required",
        "httpPutResponseHopLimit": 1,
    }
    (disk,) = template.inputs["blockDeviceMappings"]
    assert disk["deviceName"] == "/dev/xvda"
    assert disk["ebs"] == {"volumeSize": 100, "volumeType": "gp3", "encrypted": "true", "deleteOnTermination": "true"}
    # EKS refuses a template with an instance profile or a type, and puts in its own image and security group.
    assert not {"imageId", "instanceType", "iamInstanceProfile", "vpcSecurityGroupIds"} & set(template.inputs)


def test_what_ec2_makes_from_the_template_is_tagged(base: Recorded) -> None:
    tagged = {each["resourceType"]: each["tags"] for each in base.one(TEMPLATE).inputs["tagSpecifications"]}
    assert set(tagged) == {"instance", "volume", "network-interface"}
    assert all(tags == {**TAGS, "Name": "llama-trainium-dev-core"} for tags in tagged.values())


def test_the_role(base: Recorded) -> None:
    arn = base.one(GROUP).inputs["nodeRoleArn"]
    role = next(each for each in base.of("aws:iam/role:Role") if each.outputs["arn"] == arn)
    (statement,) = json.loads(role.inputs["assumeRolePolicy"])["Statement"]
    assert statement["Principal"] == {"Service": "ec2.amazonaws.com"}
    attached = base.of("aws:iam/rolePolicyAttachment:RolePolicyAttachment")
    assert {each.inputs["policyArn"].rpartition("/")[2] for each in attached if each.inputs["role"] == role.id} == {
        "AmazonEKSWorkerNodePolicy",
        "AmazonEC2ContainerRegistryPullOnly",
        "AmazonSSMManagedInstanceCore",
    }
    # A node that starts without them neither joins nor pulls; one that loses them on destroy cannot drain.
    assert all(base.waits_for(base.one(GROUP), each) for each in attached)


def test_nodes_have_a_way_out_for_as_long_as_they_live(base: Recorded) -> None:
    group = base.one(GROUP)
    for zone in ZONES:
        assert base.waits_for(group, base.one("aws:ec2/route:Route", f"private-{zone}"))
        association = base.one("aws:ec2/routeTableAssociation:RouteTableAssociation", f"private-{zone}")
        assert base.waits_for(group, association)
    for kind in ("natGateway:NatGateway", "vpcEndpoint:VpcEndpoint"):
        assert all(base.waits_for(group, each) for each in base.of(f"aws:ec2/{kind}"))
    # The control plane takes the longest and needs none of it.
    cluster = base.one("eks:index:Cluster")
    assert not any(base.waits_for(cluster, each) for each in base.of("aws:ec2/natGateway:NatGateway"))
