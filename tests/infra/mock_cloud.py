"""What AWS and Kubernetes would compute: ids, ARNs, outputs and answers, for tests/infra/mocks.py."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

ACCOUNT = "123456789012"
DIGEST = "sha256:" + "ab" * 32
PASSWORD = "made-by-random-for-the-tests"

# How AWS begins its ids; other types are known by their name.
ID_PREFIXES = {
    "aws:ec2/eip:Eip": "eipalloc",
    "aws:ec2/flowLog:FlowLog": "fl",
    "aws:ec2/internetGateway:InternetGateway": "igw",
    "aws:ec2/launchTemplate:LaunchTemplate": "lt",
    "aws:ec2/natGateway:NatGateway": "nat",
    "aws:ec2/routeTable:RouteTable": "rtb",
    "aws:ec2/securityGroup:SecurityGroup": "sg",
    "aws:ec2/subnet:Subnet": "subnet",
    "aws:ec2/vpc:Vpc": "vpc",
    "aws:ec2/vpcEndpoint:VpcEndpoint": "vpce",
    "aws:fsx/lustreFileSystem:LustreFileSystem": "fs",
}

# ARNs that do not follow the usual `arn:aws:SERVICE:REGION:ACCOUNT:KIND/ID`.
ARNS: dict[str, Callable[[str, str], str]] = {
    "aws:cloudwatch/logGroup:LogGroup": lambda name, region: f"arn:aws:logs:{region}:{ACCOUNT}:log-group:{name}",
    "aws:iam/policy:Policy": lambda name, region: f"arn:aws:iam::{ACCOUNT}:policy/{name}",
    "aws:iam/role:Role": lambda name, region: f"arn:aws:iam::{ACCOUNT}:role/{name}",
    "aws:iam/instanceProfile:InstanceProfile": lambda name, region: f"arn:aws:iam::{ACCOUNT}:instance-profile/{name}",
    "aws:s3/bucket:Bucket": lambda name, region: f"arn:aws:s3:::{name}",
    "aws:sqs/queue:Queue": lambda name, region: f"arn:aws:sqs:{region}:{ACCOUNT}:{name}",
    "aws:eks/cluster:Cluster": lambda name, region: f"arn:aws:eks:{region}:{ACCOUNT}:cluster/{name}",
}


def identity_of(kind: str, name: str, inputs: Mapping[str, Any]) -> str:
    """The id of a new resource: AWS's form where it has one, otherwise its name."""
    digest = hashlib.sha256(f"{kind} {name}".encode()).hexdigest()
    if kind in ID_PREFIXES:
        return f"{ID_PREFIXES[kind]}-{digest[:17]}"
    if kind == "aws:kms/key:Key":
        return f"{digest[:8]}-{digest[8:12]}-{digest[12:16]}-{digest[16:20]}-{digest[20:32]}"
    return str(inputs.get("name") or inputs.get("bucket") or f"{name}-{digest[:7]}")


def outputs_of(kind: str, name: str, identity: str, inputs: Mapping[str, Any], region: str) -> dict[str, Any]:
    """The outputs of a new resource: its inputs, and what the cloud adds to them."""
    outputs = dict(inputs)
    package, _, rest = kind.partition(":")
    if package == "aws":
        service, _, thing = rest.partition("/")
        own_name = str(inputs.get("name") or identity)
        usual = f"arn:aws:{service}:{region}:{ACCOUNT}:{thing.partition(':')[0].lower()}/{identity}"
        outputs.setdefault("arn", ARNS[kind](own_name, region) if kind in ARNS else usual)
        outputs.setdefault("name", own_name)
        outputs |= _computed(kind, identity, inputs, region)
    elif package == "kubernetes":
        metadata = inputs.get("metadata") or {}
        outputs["metadata"] = {"name": f"{name}-{'0' * 8}", **metadata}
        if kind == "kubernetes:helm.sh/v3:Release":
            outputs["status"] = {"name": inputs.get("name", name), "namespace": inputs.get("namespace", "default")}
        if kind == "kubernetes:ray.io/v1:RayJob":
            times = {"startTime": "2026-11-21T10:00:00Z", "endTime": "2026-11-21T11:00:00Z"}
            outputs["status"] = {"jobStatus": "SUCCEEDED", "jobDeploymentStatus": "Complete", **times}
    elif package == "random":
        outputs["result"] = PASSWORD
    elif package == "docker-build":
        outputs |= {"ref": f"{(inputs.get('tags') or ['image'])[0]}@{DIGEST}", "digest": DIGEST}
    return outputs


def _computed(kind: str, identity: str, inputs: Mapping[str, Any], region: str) -> dict[str, Any]:
    match kind:
        case "aws:ec2/subnet:Subnet":
            return {"availabilityZone": zone_name(inputs["availabilityZoneId"], region)}
        case "aws:ec2/launchTemplate:LaunchTemplate":
            return {"latestVersion": 1, "defaultVersion": 1}
        case "aws:eks/cluster:Cluster":
            vpc = {**inputs["vpcConfig"], "clusterSecurityGroupId": "sg-0c105e70000000000"}
            return {"endpoint": f"https://{identity}.eks.amazonaws.com", "vpcConfig": vpc, "status": "ACTIVE"}
        case "aws:eks/nodeGroup:NodeGroup":
            return {"resources": [{"autoscalingGroups": [{"name": f"eks-{identity}"}]}], "status": "ACTIVE"}
        case "aws:ecr/repository:Repository":
            return {"repositoryUrl": f"{ACCOUNT}.dkr.ecr.{region}.amazonaws.com/{identity}", "registryId": ACCOUNT}
        case "aws:fsx/lustreFileSystem:LustreFileSystem":
            return {"dnsName": f"{identity}.fsx.{region}.amazonaws.com", "mountName": "fsxmount"}
        case "aws:s3/bucket:Bucket":
            return {"bucket": identity, "bucketRegionalDomainName": f"{identity}.s3.{region}.amazonaws.com"}
        case "aws:kms/key:Key":
            return {"keyId": identity}
        case "aws:sqs/queue:Queue":
            return {"url": f"https://sqs.{region}.amazonaws.com/{ACCOUNT}/{identity}"}
    return {}


def zone_name(zone_id: str, region: str) -> str:
    """The name of a zone in this account: usw2-az1 is us-west-2c here, az2 is us-west-2b, so that no test takes the
    number for the letter."""
    return region + "dcbaef"[int(zone_id[-1]) % 6]


def answer(token: str, arguments: Mapping[str, Any], region: str) -> dict[str, Any]:
    """The answer to a function call of the program. Raises for a call that no one thought of."""
    function = token.rpartition("/")[2].rpartition(":")[2] or token
    match function:
        case "getCallerIdentity":
            return {
                "accountId": ACCOUNT,
                "arn": f"arn:aws:iam::{ACCOUNT}:user/tests",
                "userId": "AIDATESTS",
                "id": ACCOUNT,
            }
        case "getPartition":
            return {"partition": "aws", "dnsSuffix": "amazonaws.com", "id": "aws", "reverseDnsPrefix": "com.amazonaws"}
        case "getRegion":
            return {"name": region, "region": region, "id": region, "description": region, "endpoint": ""}
        case "getAuthorizationToken":
            registry = f"https://{ACCOUNT}.dkr.ecr.{region}.amazonaws.com"
            return {
                "userName": "AWS",
                "password": "registry-password",
                "proxyEndpoint": registry,
                "authorizationToken": "QVdTOnJlZ2lzdHJ5LXBhc3N3b3Jk",
                "expiresAt": "2030-01-01T00:00:00Z",
                "id": region,
            }
    raise AssertionError(f"no answer for {token}({dict(arguments)})")
