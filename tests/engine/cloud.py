"""The cloud that the engine's tests talk to: what exists in it, what it answers, how long it takes.

It holds no behaviour of its own beyond identity: a resource echoes its inputs and gets the id, the ARN and the computed
outputs that later resources read. What AWS and Kubernetes refuse because of order is in `order.py`. Everything that
happens is kept as an event with its time, by the clock of the test.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from clock import RealClock
from mock_cloud import ID_PREFIXES

Props = dict[str, Any]

ACCOUNT = "111122223333"
PASSWORD = "made-by-random-for-the-engine-tests"


class Refused(Exception):
    """What the cloud answers instead of doing it: AWS's code, then why."""


@dataclass(frozen=True)
class Resource:
    """One thing that exists."""

    urn: str
    type: str
    id: str
    inputs: Props
    outputs: Props


@dataclass(frozen=True)
class Event:
    """One create, update or delete, its times in seconds; `error` is what was answered when it was refused."""

    op: str
    urn: str
    type: str
    started: float
    ended: float
    error: str | None = None


# Types whose id is their name, which must be unique; the input that holds it. Those that are left out have an
# id as EC2 makes them: a prefix (ID_PREFIXES) and 17 hexadecimal digits.
NAMES = {
    "aws:cloudwatch/eventRule:EventRule": "name",
    "aws:cloudwatch/logGroup:LogGroup": "name",
    "aws:ec2/placementGroup:PlacementGroup": "name",
    "aws:ecr/repository:Repository": "name",
    "aws:eks/addon:Addon": "addonName",
    "aws:eks/cluster:Cluster": "name",
    "aws:eks/nodeGroup:NodeGroup": "nodeGroupName",
    "aws:iam/instanceProfile:InstanceProfile": "name",
    "aws:iam/policy:Policy": "name",
    "aws:iam/role:Role": "name",
    "aws:s3/bucket:Bucket": "bucket",
    "aws:sqs/queue:Queue": "name",
}


def strings(value: object) -> Iterator[str]:
    """Every string in a property value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)


@dataclass
class Cloud:
    """The resources of one account, region and cluster.

    `delays` are seconds by type, spent inside create; `fault` is matched with the URN of what is created; `refusals`
    holds the rules of order.py; `endpoint` and `ca` (base64) put a real API server behind the EKS cluster.
    """

    region: str = "us-west-2"
    delays: dict[str, float] = field(default_factory=dict)
    fault: re.Pattern[str] | None = None
    endpoint: str = "https://127.0.0.1:1"
    ca: str = "Q0E="
    refusals: Callable[[Cloud, str, Resource], str | None] | None = None
    live: dict[tuple[str, str], Resource] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    issued: set[str] = field(default_factory=set)  # ARNs and machine-made ids that were ever given out
    clock: RealClock = field(default_factory=RealClock)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, kind: str) -> list[Resource]:
        """What exists of a type."""
        return [resource for resource in list(self.live.values()) if resource.type == kind]

    def create(self, urn: str, kind: str, inputs: Props) -> Resource:
        """Make a resource, or raise Refused."""
        started = self.clock.now()
        try:
            with self.lock:
                resource = self._made(urn, kind, inputs)
                self._refuse("create", resource)
            self.clock.wait(self.delays.get(kind, 0))
            if self.fault and self.fault.search(urn):
                raise Refused(f"InternalFailure: injected fault at {urn}")
            with self.lock:
                # Again: another may have come first during the delay.
                self._refuse("create", resource)
                self.live[kind, resource.id] = resource
                if kind.startswith("aws:"):
                    # A name that the program chose may be a tag's value too; what has digits of ours is a reference.
                    self.issued |= {resource.outputs["arn"]} | ({resource.id} if kind not in NAMES else set())
        except Refused as refused:
            self.events.append(Event("create", urn, kind, started, self.clock.now(), str(refused)))
            raise
        self.events.append(Event("create", urn, kind, started, self.clock.now()))
        return resource

    def update(self, urn: str, kind: str, key: str, inputs: Props) -> Resource:
        """Give a resource new inputs."""
        started = self.clock.now()
        with self.lock:
            if (kind, key) not in self.live:
                raise Refused(f"ResourceNotFoundException: {kind} {key} does not exist")
            resource = Resource(urn, kind, key, inputs, self._outputs(kind, key, inputs))
            self.live[kind, key] = resource
        self.events.append(Event("update", urn, kind, started, self.clock.now()))
        return resource

    def delete(self, urn: str, kind: str, key: str) -> None:
        """Remove a resource, or raise Refused. One that is gone already stays gone."""
        started = self.clock.now()
        error = None
        with self.lock:
            resource = self.live.get((kind, key))
            if resource:
                try:
                    self._refuse("delete", resource)
                    del self.live[kind, key]
                except Refused as refused:
                    error = refused
        self.events.append(Event("delete", urn, kind, started, self.clock.now(), str(error) if error else None))
        if error:
            raise error

    def _refuse(self, op: str, resource: Resource) -> None:
        why = self.refusals(self, op, resource) if self.refusals else None
        if why:
            raise Refused(why)

    def _made(self, urn: str, kind: str, inputs: Props) -> Resource:
        label = urn.rsplit("::", 1)[-1]
        digest = hashlib.sha256(f"{urn} {len(self.events)} {len(self.live)}".encode()).hexdigest()
        if kind.startswith("kubernetes:"):
            metadata = {"name": f"{label}-{digest[:8]}", **(inputs.get("metadata") or {})}
            if kind == "kubernetes:helm.sh/v3:Release":
                metadata = {"name": inputs.get("name") or label, "namespace": inputs.get("namespace") or "default"}
            key = "/".join(filter(None, [metadata.get("namespace"), metadata["name"]]))
            outputs = {**inputs, "status": {"status": "deployed", "name": metadata["name"]}}
            if kind == "kubernetes:ray.io/v1:RayJob":
                times = {"startTime": "2026-11-21T10:00:00Z", "endTime": "2026-11-21T11:00:00Z"}
                outputs["status"] = {"jobStatus": "SUCCEEDED", "jobDeploymentStatus": "Complete", **times}
            if kind != "kubernetes:helm.sh/v3:Release":
                outputs["metadata"] = metadata
            return Resource(urn, kind, key, inputs, outputs)
        name = f"{label}-{digest[:7]}"
        prefix = ID_PREFIXES.get(kind, re.sub(r"[^a-z]", "", kind.split(":")[-1].lower()))
        key = f"{prefix}-0{digest[:16]}"
        if kind in NAMES:
            given = NAMES[kind]
            key = name = inputs.get(given) or (
                inputs[f"{given}Prefix"] + digest[:8] if f"{given}Prefix" in inputs else name
            )
            if kind in ("aws:eks/addon:Addon", "aws:eks/nodeGroup:NodeGroup"):
                key = f"{inputs['clusterName']}:{name}"
        outputs = self._outputs(kind, key, {**inputs, NAMES.get(kind) or "name": inputs.get("name") or name})
        return Resource(urn, kind, outputs["arn"] if kind == "aws:iam/policy:Policy" else key, inputs, outputs)

    def _outputs(self, kind: str, key: str, inputs: Props) -> Props:
        """The inputs, and what AWS adds to them: only what resources of this project read."""
        name = key.rsplit(":", 1)[-1]
        service, short = kind.split(":")[1].split("/")[0], kind.split(":")[-1].lower()
        arn = f"arn:aws:{service}:{self.region}:{ACCOUNT}:{short}/{name}"
        match kind:
            case "aws:ec2/vpc:Vpc":
                added: Props = {"defaultSecurityGroupId": f"sg-default-{key}", "mainRouteTableId": f"rtb-main-{key}"}
            case "aws:ec2/subnet:Subnet":
                zone = inputs.get("availabilityZoneId") or self.zones()[0]
                added = {"availabilityZone": self.zone_name(zone), "availabilityZoneId": zone}
            case "aws:ec2/eip:Eip":
                added = {"allocationId": key, "publicIp": "203.0.113.7"}
            case "aws:ec2/launchTemplate:LaunchTemplate":
                added = {"latestVersion": 1, "defaultVersion": 1}
            case "aws:eks/cluster:Cluster":
                vpc = {**(inputs.get("vpcConfig") or {}), "clusterSecurityGroupId": f"sg-cluster-{key}"}
                authority = {"data": self.ca}
                issuer = {"oidcs": [{"issuer": f"https://oidc.eks.{self.region}.amazonaws.com/id/ABCDEF"}]}
                added = {"endpoint": self.endpoint, "certificateAuthority": authority, "vpcConfig": vpc}
                added |= {"certificateAuthorities": [authority], "identities": [issuer], "status": "ACTIVE"}
            case "aws:eks/nodeGroup:NodeGroup":
                added = {"resources": [{"autoscalingGroups": [{"name": f"eks-{name}-0a1b2c"}]}], "status": "ACTIVE"}
            case "aws:ecr/repository:Repository":
                added = {"repositoryUrl": f"{ACCOUNT}.dkr.ecr.{self.region}.amazonaws.com/{key}", "registryId": ACCOUNT}
            case "aws:fsx/lustreFileSystem:LustreFileSystem":
                added = {"dnsName": f"{key}.fsx.{self.region}.amazonaws.com", "mountName": "abcdefgh"}
            case "aws:iam/role:Role":
                added = {
                    "arn": f"arn:aws:iam::{ACCOUNT}:role{inputs.get('path') or '/'}{key}",
                    "uniqueId": f"AROA{key}",
                }
            case "aws:s3/bucket:Bucket":
                domain = f"{key}.s3.{self.region}.amazonaws.com"
                added = {"arn": f"arn:aws:s3:::{key}", "bucketRegionalDomainName": domain}
            case "aws:sqs/queue:Queue":
                added = {"url": f"https://sqs.{self.region}.amazonaws.com/{ACCOUNT}/{key}"}
            case "aws:kms/key:Key":
                added = {"keyId": key}
            case "docker-build:index:Image":
                digest = "sha256:" + hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
                tags = inputs.get("tags") or ["image"]
                added = {"digest": digest, "ref": f"{tags[0]}@{digest}", "contextHash": digest}
            case "random:index/randomPassword:RandomPassword":
                added = {"result": PASSWORD}
            case _:
                added = {}
        return {"arn": arn, "tagsAll": inputs.get("tags") or {}, "region": self.region, **inputs, **added}

    def zones(self) -> list[str]:
        """Ids of the region's zones, by AWS's rule: us-west-2 has usw2-az1 to usw2-az4."""
        area, direction, number = self.region.split("-")
        return [
            f"{area}{direction[0]}{number}-az{i}"
            for i in range(1, {"us-east-1": 7, "us-east-2": 4}.get(self.region, 5))
        ]

    def zone_name(self, zone: str) -> str:
        """The account's name of a zone: another order than that of the ids, as in real accounts."""
        zones = self.zones()
        if zone not in zones:
            raise Refused(f"InvalidParameterValue: {zone} is not a zone of {self.region}")
        return self.region + "abcdef"[(zones.index(zone) + 1) % len(zones)]

    def answer(self, token: str, args: Props) -> Props:
        """What a data source gives; one that nobody thought of is refused rather than invented."""
        zones = self.zones()
        names = [self.zone_name(zone) for zone in zones]
        match token.split(":")[-1]:
            case "getCallerIdentity":
                found: Props = {
                    "accountId": ACCOUNT,
                    "arn": f"arn:aws:iam::{ACCOUNT}:user/tester",
                    "userId": "AIDATESTER",
                }
            case "getRegion":
                found = {"name": self.region, "region": self.region}
            case "getPartition":
                found = {"partition": "aws", "dnsSuffix": "amazonaws.com", "reverseDnsPrefix": "com.amazonaws"}
            case "getAvailabilityZones":
                found = {"names": names, "zoneIds": zones}
            case "getInstanceTypeOfferings":
                found = {"locations": zones, "instanceTypes": ["trn1.32xlarge"] * len(zones)}
                found["locationTypes"] = ["availability-zone-id"] * len(zones)
            case "getAuthorizationToken":
                found = {"userName": "AWS", "password": "not-a-password", "authorizationToken": "bm90LWEtcGFzc3dvcmQ="}
                found["proxyEndpoint"] = f"https://{ACCOUNT}.dkr.ecr.{self.region}.amazonaws.com"
            case other:
                raise Refused(f"the stand-in has no answer for {other} (tests/engine/cloud.py)")
        return {"id": self.region, **args, **found}


def network(cidr: str) -> ipaddress.IPv4Network:
    """A CIDR as AWS reads it, or Refused."""
    try:
        return ipaddress.IPv4Network(cidr)
    except ValueError as error:
        raise Refused(f"InvalidParameterValue: {error}") from error
