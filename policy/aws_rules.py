"""Rules about AWS: who gets in, what is encrypted, what is tagged. Each yields a line for every violation."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterator
from typing import Any

from policy.named_exceptions import MOVING_TAGS
from policy.plain_resource import UNKNOWN, Resource, entries, section

BUCKETS = ("aws:s3/bucket:Bucket", "aws:s3/bucketV2:BucketV2")
BUCKET_ACLS = (*BUCKETS, "aws:s3/bucketAcl:BucketAcl", "aws:s3/bucketAclV2:BucketAclV2")
BLOCKS = (
    "aws:s3/bucketPublicAccessBlock:BucketPublicAccessBlock",
    "aws:s3/accountPublicAccessBlock:AccountPublicAccessBlock",
)
SECURITY_GROUPS = ("aws:ec2/securityGroup:SecurityGroup", "aws:ec2/defaultSecurityGroup:DefaultSecurityGroup")
CLUSTER = "aws:eks/cluster:Cluster"
TEMPLATE, INSTANCE = "aws:ec2/launchTemplate:LaunchTemplate", "aws:ec2/instance:Instance"
NODE_CLASS = "kubernetes:karpenter.k8s.aws/v1:EC2NodeClass"
STORAGE_CLASS = "kubernetes:storage.k8s.io/v1:StorageClass"
QUEUE, TOPIC = "aws:sqs/queue:Queue", "aws:sns/topic:Topic"

ENCRYPTED_BY = {
    "aws:ebs/volume:Volume": "encrypted",
    "aws:efs/fileSystem:FileSystem": "encrypted",
    "aws:rds/instance:Instance": "storageEncrypted",
    "aws:rds/cluster:Cluster": "storageEncrypted",
}
"""Types that one input encrypts."""

YES = (True, "true", UNKNOWN)
"""What counts as yes; what is not known yet is judged when it is."""

REQUIRED_TAGS = ("project", "stack", "cost-centre")
TAGGED_BY_TEMPLATE = ("instance", "volume")
"""What EC2 makes from a launch template and bills for: the provider's default tags do not reach it."""

WIDEST = {4: 8, 6: 16}
"""The shortest prefix of a range that is somebody's; a shorter one is a part of the world."""


def public_bucket(resource: Resource) -> Iterator[str]:
    """Access control lists, policies and public access blocks that let anyone in."""
    props = resource.props
    if resource.type in BUCKET_ACLS:
        acl = props.get("acl")
        if isinstance(acl, str) and (acl.startswith("public") or acl == "authenticated-read"):
            yield f"acl: {acl}, expected private"
        for grant in entries(section(props, "accessControlPolicy", "grants")) + entries(props.get("grants")):
            uri = section(grant, "grantee", "uri") or grant.get("uri")
            if isinstance(uri, str) and uri.endswith(("/AllUsers", "/AuthenticatedUsers")):
                yield f"grants: {uri}, expected none to a group of everyone"
    if resource.type in BLOCKS:
        for key in ("blockPublicAcls", "blockPublicPolicy", "ignorePublicAcls", "restrictPublicBuckets"):
            if props.get(key) not in YES:
                yield f"{key}: {props.get(key)}, expected true"
    if resource.type in (*BUCKETS, "aws:s3/bucketPolicy:BucketPolicy"):
        for statement in _statements(props.get("policy")):
            anyone = statement.get("Principal") in ("*", {"AWS": "*"}, {"AWS": ["*"]})
            if statement.get("Effect") == "Allow" and anyone and not statement.get("Condition"):
                yield f"policy: {statement.get('Action')} allowed to everyone, expected a principal or a condition"


def _statements(policy: Any) -> list[dict[str, Any]]:
    read = json.loads(policy) if isinstance(policy, str) and policy else policy
    found = entries(section(read, "Statement"))
    return [statement for statement in found if isinstance(statement, dict)]


def open_security_group(resource: Resource) -> Iterator[str]:
    """Rules that let a part of the world in, in all three forms that AWS's provider has for them."""
    props = resource.props
    rules = entries(props.get("ingress")) if resource.type in SECURITY_GROUPS else []
    alone = resource.type == "aws:ec2/securityGroupRule:SecurityGroupRule" and props.get("type") == "ingress"
    if alone or resource.type == "aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule":
        rules = [props]
    for each in rules:
        for key in ("cidrBlocks", "ipv6CidrBlocks", "cidrIpv4", "cidrIpv6"):
            for cidr in entries(each.get(key)):
                if is_world(cidr):
                    yield f"{key}: {cidr}, expected the networks or the security group that need it"


def is_world(cidr: str) -> bool:
    """Whether a range holds a part of the internet that belongs to nobody in particular."""
    try:
        network = ipaddress.ip_network(cidr, strict=False)
    except ValueError:  # AWS refuses it
        return False
    return network.prefixlen < WIDEST[network.version]


def public_eks_endpoint(resource: Resource) -> Iterator[str]:
    """An endpoint that is public by AWS's defaults counts too: it is, for everyone, where nothing is said."""
    if resource.type != CLUSTER:
        return
    config = section(resource.props, "vpcConfig")
    if config is UNKNOWN or config.get("endpointPublicAccess", True) is False:
        return
    networks = config.get("publicAccessCidrs")
    if networks is UNKNOWN or config.get("endpointPublicAccess") is UNKNOWN:
        return
    for cidr in entries(networks) or ["0.0.0.0/0"]:
        if is_world(cidr):
            yield f"vpcConfig.publicAccessCidrs: {cidr}, expected networks of yours, or endpointPublicAccess: false"


def unencrypted(resource: Resource) -> Iterator[str]:
    """Disks, file systems, databases, queues and Kubernetes secrets in plain."""
    props = resource.props
    if key := ENCRYPTED_BY.get(resource.type):
        if props.get(key) not in YES:
            yield f"{key}: {props.get(key)}, expected true"
    elif resource.type in (TEMPLATE, INSTANCE, NODE_CLASS):
        yield from _disks(resource)
    elif resource.type == STORAGE_CLASS:
        found = section(props, "parameters", "encrypted")
        if props.get("provisioner") == "ebs.csi.aws.com" and found not in YES:
            yield f"parameters.encrypted: {found or 'none'}, expected 'true'"
    elif resource.type == CLUSTER:
        config = section(props, "encryptionConfig")
        if config is not UNKNOWN and "secrets" not in entries(section(config, "resources")):
            yield "encryptionConfig: none for secrets, expected a KMS key"
    elif resource.type == QUEUE:
        if props.get("sqsManagedSseEnabled") not in YES and not props.get("kmsMasterKeyId"):
            yield "sqsManagedSseEnabled: not true, expected true, or a kmsMasterKeyId"
    elif resource.type == TOPIC and not props.get("kmsMasterKeyId"):
        yield "kmsMasterKeyId: none, expected a KMS key"


def _disks(resource: Resource) -> Iterator[str]:
    props = resource.props
    if resource.type == INSTANCE:
        root = section(props, "rootBlockDevice")
        disks = {"rootBlockDevice": root}
        disks |= {f"ebsBlockDevices[{i}]": disk for i, disk in enumerate(entries(props.get("ebsBlockDevices")))}
    else:
        place = props if resource.type == TEMPLATE else section(props, "spec")
        mappings = section(place, "blockDeviceMappings")
        if not mappings:  # the root volume is then as the image has it
            yield "blockDeviceMappings: none, expected the root volume, encrypted"
        disks = {
            f"blockDeviceMappings[{i}].ebs": each["ebs"]
            for i, each in enumerate(entries(mappings))
            if each.get("ebs") is not None
        }
    for path, disk in disks.items():
        if disk is not UNKNOWN and disk.get("encrypted") not in YES:
            yield f"{path}.encrypted: {disk.get('encrypted')}, expected true"


def imds_v1(resource: Resource) -> Iterator[str]:
    """Instances whose metadata, and with them the node's credentials, answer a plain request."""
    if resource.type not in (TEMPLATE, INSTANCE, NODE_CLASS):
        return
    place = section(resource.props, "spec") if resource.type == NODE_CLASS else resource.props
    found = section(place, "metadataOptions")
    if found is not UNKNOWN and found.get("httpTokens") not in ("required", UNKNOWN):
        yield f"metadataOptions.httpTokens: {found.get('httpTokens')}, expected required"


def mutable_tags(resource: Resource) -> Iterator[str]:
    """ECR repositories whose tags move, but for those that policy/named_exceptions.py names."""
    if resource.type != "aws:ecr/repository:Repository":
        return
    found = resource.props.get("imageTagMutability")
    if found not in ("IMMUTABLE", "IMMUTABLE_WITH_EXCLUSION", UNKNOWN):
        yield f"imageTagMutability: {found}, expected IMMUTABLE"
    for each in entries(resource.props.get("imageTagMutabilityExclusionFilters")):
        if (moving := each.get("filter")) not in MOVING_TAGS:
            yield f"imageTagMutabilityExclusionFilters: {moving}, expected one of policy/named_exceptions.py"


def untagged(resource: Resource) -> Iterator[str]:
    """Resources, and what EC2 makes of launch templates and Karpenter of node classes, without the required tags."""
    if resource.type.startswith("aws:"):
        yield from _missing_tags("tags", {**resource.default_tags, **_known(resource.props.get("tags"))})
    specifications = resource.props.get("tagSpecifications")
    if resource.type == TEMPLATE and specifications is not UNKNOWN:
        given = {each.get("resourceType"): _known(each.get("tags")) for each in entries(specifications)}
        for kind in TAGGED_BY_TEMPLATE:
            yield from _missing_tags(f"tagSpecifications of {kind}", given.get(kind, {}))
    if resource.type == NODE_CLASS:
        yield from _missing_tags("spec.tags", _known(section(resource.props, "spec", "tags")))


def _known(tags: Any) -> dict[str, Any]:
    """Tags, or where they are not known yet, such as satisfy the rule."""
    if tags is UNKNOWN:
        return dict.fromkeys(REQUIRED_TAGS, UNKNOWN)
    return tags if isinstance(tags, dict) else {}


def _missing_tags(where: str, tags: dict[str, Any]) -> Iterator[str]:
    if missing := [key for key in REQUIRED_TAGS if not tags.get(key)]:
        yield f"{where}: without {', '.join(missing)}, expected {', '.join(REQUIRED_TAGS)}"
