"""For each rule of the pack a resource that keeps it and some that break it: judged by the rules alone
(test_rules.py), and registered in the real engine (tests/engine/test_policies.py).

Keys are the engine's (camelCase). `Secret` (planted_pods.py) stands for a Pulumi secret.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stack_configs import changed

from policy.aws_rules import REQUIRED_TAGS

Props = dict[str, Any]

TAGS = dict.fromkeys(REQUIRED_TAGS, "x")


@dataclass(frozen=True)
class Case:
    """A good resource, and by what is wrong with it, the changes that make it a bad one."""

    rule: str
    type: str
    good: Props
    bad: Mapping[str, Props]
    """Changes as `stack_configs.changed` takes them: paths and values."""
    default_tags: bool = True
    """Whether its AWS provider gives it the required tags."""

    def broken(self) -> dict[str, Props]:
        """The bad resources, by what is wrong."""
        return {what: changed(changes, self.good) for what, changes in self.bad.items()}


def allow(principal: Any, **more: Any) -> str:
    """A bucket's policy, as text."""
    statement = {"Effect": "Allow", "Principal": principal, "Action": "s3:GetObject", "Resource": "*", **more}
    return json.dumps({"Version": "2012-10-17", "Statement": [statement]})


BLOCK = dict.fromkeys(("blockPublicAcls", "blockPublicPolicy", "ignorePublicAcls", "restrictPublicBuckets"), True)
TEMPLATE: Props = {
    "blockDeviceMappings": [{"deviceName": "/dev/xvda", "ebs": {"encrypted": "true", "volumeSize": 100}}],
    "metadataOptions": {"httpTokens": "required"},
    "tagSpecifications": [{"resourceType": kind, "tags": TAGS} for kind in ("instance", "volume")],
}
NODE_CLASS: Props = {
    "apiVersion": "karpenter.k8s.aws/v1",
    "kind": "EC2NodeClass",
    "metadata": {"name": "planted"},
    "spec": {
        "blockDeviceMappings": [{"deviceName": "/dev/xvda", "ebs": {"encrypted": True}}],
        "metadataOptions": {"httpTokens": "required"},
        "tags": TAGS,
    },
}
CLUSTER: Props = {
    "vpcConfig": {"endpointPublicAccess": True, "publicAccessCidrs": ["203.0.113.0/24"]},
    "encryptionConfig": {"provider": {"keyArn": "arn:aws:kms:us-west-2:111122223333:key/x"}, "resources": ["secrets"]},
}

AWS_CASES = [
    Case(
        "no-public-bucket",
        "aws:s3/bucket:Bucket",
        {"acl": "private"},
        {"its list lets all read": {"acl": "public-read"}, "its policy lets all in": {"policy": allow("*")}},
    ),
    Case(
        "no-public-bucket",
        "aws:s3/bucketAcl:BucketAcl",
        {"acl": "private", "accessControlPolicy": {"grants": [{"grantee": {"type": "CanonicalUser", "id": "x"}}]}},
        {
            "all may write": {"acl": "public-read-write"},
            "a grant to all": {
                "accessControlPolicy/grants/0/grantee/uri": "http://acs.amazonaws.com/groups/global/AllUsers"
            },
        },
    ),
    Case(
        "no-public-bucket",
        "aws:s3/bucketPublicAccessBlock:BucketPublicAccessBlock",
        BLOCK,
        {f"without {key}": {key: "REMOVED"} for key in BLOCK} | {"one is off": {"blockPublicPolicy": False}},
    ),
    Case(
        "no-public-bucket",
        "aws:s3/bucketPolicy:BucketPolicy",
        {"policy": allow("*", Condition={"StringEquals": {"aws:PrincipalOrgID": "o-1"}})},
        {"to all": {"policy": allow("*")}, "to all of AWS": {"policy": allow({"AWS": "*"})}},
    ),
    Case(
        "no-open-security-group",
        "aws:ec2/securityGroup:SecurityGroup",
        {
            "ingress": [{"cidrBlocks": ["10.0.0.0/8"], "protocol": "tcp", "fromPort": 443, "toPort": 443}],
            "egress": [{"cidrBlocks": ["0.0.0.0/0"], "protocol": "-1", "fromPort": 0, "toPort": 0}],
        },
        {
            "the world": {"ingress/0/cidrBlocks/0": "0.0.0.0/0"},
            "half of it": {"ingress/0/cidrBlocks/0": "128.0.0.0/1"},
            "by IPv6": {"ingress/0/ipv6CidrBlocks": ["::/0"]},
        },
    ),
    Case(
        "no-open-security-group",
        "aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule",
        {"cidrIpv4": "203.0.113.7/32", "ipProtocol": "tcp"},
        {"the world": {"cidrIpv4": "0.0.0.0/0"}, "by IPv6": {"cidrIpv6": "::/0"}},
    ),
    Case(
        "no-open-security-group",
        "aws:ec2/securityGroupRule:SecurityGroupRule",
        {"type": "ingress", "cidrBlocks": ["10.0.0.0/8"]},
        {"the world": {"cidrBlocks": ["0.0.0.0/0"]}},
    ),
    Case(
        "no-public-eks-endpoint",
        "aws:eks/cluster:Cluster",
        CLUSTER,
        {
            "to the world": {"vpcConfig/publicAccessCidrs": ["203.0.113.0/24", "0.0.0.0/0"]},
            "by AWS's default": {"vpcConfig/publicAccessCidrs": "REMOVED"},
            "nothing is said": {"vpcConfig": {"subnetIds": ["subnet-1"]}},
        },
    ),
    Case(
        "encrypted-at-rest",
        "aws:ec2/launchTemplate:LaunchTemplate",
        TEMPLATE,
        {
            "a plain disk": {"blockDeviceMappings/0/ebs/encrypted": "false"},
            "nothing is said": {"blockDeviceMappings/0/ebs/encrypted": "REMOVED"},
            "the image's disk": {"blockDeviceMappings": "REMOVED"},
        },
    ),
    Case(
        "encrypted-at-rest",
        "aws:ec2/instance:Instance",
        {"rootBlockDevice": {"encrypted": True}, "metadataOptions": {"httpTokens": "required"}},
        {"root": {"rootBlockDevice": "REMOVED"}, "another": {"ebsBlockDevices": [{"encrypted": False}]}},
    ),
    Case(
        "encrypted-at-rest",
        "kubernetes:karpenter.k8s.aws/v1:EC2NodeClass",
        NODE_CLASS,
        {"a plain disk": {"spec/blockDeviceMappings/0/ebs/encrypted": False}},
    ),
    Case(
        "encrypted-at-rest",
        "kubernetes:storage.k8s.io/v1:StorageClass",
        {"metadata": {"name": "planted"}, "provisioner": "ebs.csi.aws.com", "parameters": {"encrypted": "true"}},
        {"nothing is said": {"parameters": {"type": "gp3"}}, "plain": {"parameters/encrypted": "false"}},
    ),
    Case("encrypted-at-rest", "aws:eks/cluster:Cluster", CLUSTER, {"plain secrets": {"encryptionConfig": "REMOVED"}}),
    Case(
        "encrypted-at-rest",
        "aws:sqs/queue:Queue",
        {"sqsManagedSseEnabled": True},
        {"plain": {"sqsManagedSseEnabled": False}},
    ),
    Case("encrypted-at-rest", "aws:sns/topic:Topic", {"kmsMasterKeyId": "alias/x"}, {"plain": {"kmsMasterKeyId": ""}}),
    *(
        Case("encrypted-at-rest", kind, {key: True}, {"plain": {key: False}, "nothing is said": {key: "REMOVED"}})
        for kind, key in {
            "aws:ebs/volume:Volume": "encrypted",
            "aws:efs/fileSystem:FileSystem": "encrypted",
            "aws:rds/instance:Instance": "storageEncrypted",
            "aws:rds/cluster:Cluster": "storageEncrypted",
        }.items()
    ),
    Case(
        "imds-v2",
        "aws:ec2/launchTemplate:LaunchTemplate",
        TEMPLATE,
        {"both": {"metadataOptions/httpTokens": "optional"}, "nothing is said": {"metadataOptions": "REMOVED"}},
    ),
    Case(
        "imds-v2",
        "aws:ec2/instance:Instance",
        {"rootBlockDevice": {"encrypted": True}, "metadataOptions": {"httpTokens": "required"}},
        {"both": {"metadataOptions/httpTokens": "optional"}},
    ),
    Case(
        "imds-v2",
        "kubernetes:karpenter.k8s.aws/v1:EC2NodeClass",
        NODE_CLASS,
        {"both": {"spec/metadataOptions/httpTokens": "optional"}},
    ),
    Case(
        "immutable-image-tags",
        "aws:ecr/repository:Repository",
        {
            "imageTagMutability": "IMMUTABLE_WITH_EXCLUSION",
            "imageTagMutabilityExclusionFilters": [{"filter": "layers", "filterType": "WILDCARD"}],
        },
        {
            "all move": {"imageTagMutability": "MUTABLE"},
            "nothing is said": {"imageTagMutability": "REMOVED"},
            "some move": {"imageTagMutabilityExclusionFilters/0/filter": "v*"},
        },
    ),
    Case(
        "required-tags",
        "aws:ec2/vpc:Vpc",
        {"cidrBlock": "10.0.0.0/16", "tags": TAGS},
        {
            "no tags": {"tags": "REMOVED"},
            "one missing": {"tags/cost-centre": "REMOVED"},
            "one empty": {"tags/stack": ""},
        },
        default_tags=False,
    ),
    Case(
        "required-tags",
        "aws:ec2/launchTemplate:LaunchTemplate",
        TEMPLATE,
        {
            "its instances": {"tagSpecifications/0/tags": {}},
            "its volumes": {"tagSpecifications/1/tags/project": "REMOVED"},
        },
    ),
    Case(
        "required-tags",
        "kubernetes:karpenter.k8s.aws/v1:EC2NodeClass",
        NODE_CLASS,
        {"its instances": {"spec/tags": "REMOVED"}},
    ),
]
