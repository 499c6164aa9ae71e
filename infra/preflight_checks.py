"""What `infra.preflight` looks at, quotas apart: each check asks the account, and says what it found and what mends it.

A check is a function from a `Subject` to its findings. What AWS does not answer for want of a permission is a warning:
the stack may be deployed by another identity. Any other refusal is a failure.
"""

from __future__ import annotations

import datetime
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from botocore.exceptions import BotoCoreError, ClientError

from infra.account import Clients, pages
from infra.run_settings import GATED, from_hub
from infra.settings import AcceleratorGroup, Settings
from infra.versions import AMI_RELEASE, TRAINING_BASE_IMAGE

HUB = "https://huggingface.co"
REACH_SECONDS = 5
DENIED = ("AccessDenied", "AccessDeniedException", "UnauthorizedOperation")
ECR = re.compile(
    r"(?P<account>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com/(?P<name>[^@]+)@(?P<digest>.+)"
)

Status = Literal["pass", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """What one check found about one thing."""

    check: str
    status: Status
    detail: str
    fix: str = ""


@dataclass(frozen=True)
class Subject:
    """The stack that is looked at, and what answers for its account."""

    stack: str
    settings: Settings
    """With derived values."""
    clients: Clients
    token_given: bool
    """Whether the stack has the secret huggingFaceToken."""
    unreachable: Callable[[str], str | None]
    """Why a URL gives no answer; None when it does."""


Check = Callable[[Subject], Iterable[Finding]]


def no_answer(url: str) -> str | None:
    """Why an HTTPS server gives no answer; None when it does, be it a refusal: then it is reached."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=REACH_SECONDS):
            return None
    except urllib.error.HTTPError:
        return None
    except OSError as error:
        return str(getattr(error, "reason", error))


def run_check(name: str, check: Check, subject: Subject) -> list[Finding]:
    """The findings of a check, or one about AWS's refusal to answer it."""
    try:
        return list(check(subject))
    except ClientError as error:
        said = error.response.get("Error", {})
        if said.get("Code") in DENIED:
            action = f"{error.operation_name} is not allowed for these credentials"
            return [Finding(name, "warn", f"not asked: {action}", "allow it, or ask with other credentials")]
        return [Finding(name, "fail", f"{error.operation_name}: {said.get('Code')}: {said.get('Message')}")]
    except BotoCoreError as error:
        return [Finding(name, "fail", str(error), "see that AWS is reached from here")]


def credentials(subject: Subject) -> Iterator[Finding]:
    """Who asks, in which account; the cluster's maker must not be among its admins."""
    try:
        who = subject.clients("sts").get_caller_identity()
    except (BotoCoreError, ClientError) as error:
        yield Finding(
            "credentials", "fail", str(error), "aws sso login, AWS_PROFILE, or AWS_ACCESS_KEY_ID and its secret"
        )
        return
    yield Finding("credentials", "pass", f"account {who['Account']}, {who['Arn']}")
    for arn in subject.settings.cluster.admins:
        if _same_identity(who["Arn"], arn):
            fix = (
                "leave it out, if these credentials make the cluster: EKS enters its maker itself, and refuses it twice"
            )
            yield Finding("credentials", "warn", f"cluster.admins names {arn}, who asks here", fix)


def _same_identity(asks: str, admin: str) -> bool:
    """Whether the ARN that STS gives is of the role or user `admin`; a role's path is not in it."""
    kind, _, rest = asks.rpartition(":")[2].partition("/")
    kind, name = ("role", rest.partition("/")[0]) if kind == "assumed-role" else (kind, rest.rpartition("/")[2])
    of_admin, _, admins_name = admin.rpartition(":")[2].partition("/")
    same_account = asks.split(":")[4] == admin.split(":")[4]
    return same_account and (of_admin, admins_name.rpartition("/")[2]) == (kind, name)


def offered(subject: Subject) -> Iterator[Finding]:
    """Zones that the account has, and instance types in them."""
    ec2, settings = subject.clients("ec2"), subject.settings
    found = ec2.describe_availability_zones()["AvailabilityZones"]
    there = {zone["ZoneId"] for zone in found if zone["State"] == "available"}
    for zone in settings.network.zones:
        if zone not in there:
            yield Finding("zones", "fail", f"{zone} is not in this account", f"network.zones: some of {_listed(there)}")
    if there >= set(settings.network.zones):
        yield Finding("zones", "pass", _listed(settings.network.zones))
    for group in settings.accelerators:
        having = _zones_with(ec2, group.instance_type)
        what = f"{group.instance_type} of group {group.name}"
        if group.zone in having:
            yield Finding("instance type", "pass", f"{what} is offered in {group.zone}")
        else:
            fix = f"network.zones and the group's zone: one of {_listed(having)}" if having else "another region"
            yield Finding("instance type", "fail", f"{what} is not offered in {group.zone}", fix)
    core = settings.core_nodes.instance_type
    missing = set(settings.network.zones) - _zones_with(ec2, core)
    if not missing:
        yield Finding("instance type", "pass", f"{core} of the core nodes is offered in every zone")
    elif missing == set(settings.network.zones):
        yield Finding(
            "instance type", "fail", f"{core} is in no zone of network.zones", "another coreNodes.instanceType"
        )
    else:
        yield Finding(
            "instance type", "warn", f"{core} is not offered in {_listed(missing)}: core nodes are in the others"
        )


def reservations(subject: Subject) -> Iterator[Finding]:
    """The reservation or capacity block of each group that names one."""
    for index, group in enumerate(subject.settings.accelerators):
        if group.reservation_id is None:
            continue
        key = f"accelerators[{index}].reservationId"
        try:
            answer = subject.clients("ec2").describe_capacity_reservations(
                CapacityReservationIds=[group.reservation_id]
            )
        except ClientError as error:
            if error.response["Error"]["Code"] != "InvalidCapacityReservationId.NotFound":
                raise
            answer = {"CapacityReservations": []}
        if not (found := answer["CapacityReservations"]):
            yield Finding("reservation", "fail", f"{group.reservation_id} is not in {subject.settings.region}", key)
        else:
            yield _reservation(group, index, found[0])


def _reservation(group: AcceleratorGroup, index: int, found: dict[str, Any]) -> Finding:
    name, state, count = group.reservation_id, found["State"], found["TotalInstanceCount"]
    is_block = found.get("ReservationType") == "capacity-block"
    here = f"accelerators[{index}]"
    wrong = {
        f"it is for {found['InstanceType']}": (found["InstanceType"] != group.instance_type, "instanceType"),
        f"it is in {found.get('AvailabilityZoneId')}": (found.get("AvailabilityZoneId") != group.zone, "zone"),
        f"it is {'a capacity block' if is_block else 'no capacity block'}": (
            is_block != (group.capacity == "capacity-block"),
            "capacity",
        ),
    }
    for what, (is_wrong, key) in wrong.items():
        if is_wrong:
            return Finding("reservation", "fail", f"{name}: {what}", f"{here}.{key}, or another reservationId")
    span = f"{_day(found.get('StartDate'))} to {_day(found.get('EndDate'))}"
    if state == "scheduled":
        return Finding("reservation", "warn", f"{name} has not begun: {span}", "jobs wait for its nodes until then")
    if state != "active":
        return Finding("reservation", "fail", f"{name} is {state}, expected active", f"another {here}.reservationId")
    if count < group.max:
        fix = f"{here}.max: {count}: EC2 starts no node beside it"
        return Finding("reservation", "warn", f"{name} has {count} instances for max {group.max}", fix)
    return Finding("reservation", "pass", f"{name} is active: {count} x {group.instance_type}, {group.zone}, {span}")


def amis(subject: Subject) -> Iterator[Finding]:
    """The release of the AMIs that infra/versions.py pins, for both kinds of node."""
    kubernetes, _, release = AMI_RELEASE.partition("-")
    minor = ".".join(kubernetes.split(".")[:2])
    for variant in ("standard", "neuron"):
        name = f"amazon-eks-node-al2023-x86_64-{variant}-{minor}-v{release}"
        images = subject.clients("ec2").describe_images(
            Owners=["amazon"], Filters=[{"Name": "name", "Values": [name]}, {"Name": "state", "Values": ["available"]}]
        )["Images"]
        if images:
            yield Finding("AMI", "pass", f"{name}: {images[0]['ImageId']}")
        else:
            fix = "AMI_RELEASE in infra/versions.py: a release of github.com/awslabs/amazon-eks-ami"
            yield Finding("AMI", "fail", f"{name} is not in {subject.settings.region}", fix)


def images(subject: Subject) -> Iterator[Finding]:
    """Where the training image comes from: ECR, and the registry of its base."""
    image = subject.settings.image
    ecr = ECR.fullmatch(image.prebuilt or "")
    if image.prebuilt and ecr and ecr["region"] == subject.settings.region:
        try:
            subject.clients("ecr").describe_images(
                registryId=ecr["account"], repositoryName=ecr["name"], imageIds=[{"imageDigest": ecr["digest"]}]
            )
            yield Finding("image", "pass", f"{ecr['name']} is in ECR")
        except ClientError as error:
            if error.response["Error"]["Code"] not in ("ImageNotFoundException", "RepositoryNotFoundException"):
                raise
            yield Finding(
                "image", "fail", f"{image.prebuilt} is not in ECR", "image.prebuilt: the digest of one that is"
            )
        return
    if not image.prebuilt:
        subject.clients("ecr").get_authorization_token()
        yield Finding("image", "pass", "ECR gives a token to push with")
    reference = image.prebuilt or image.base or TRAINING_BASE_IMAGE
    yield _reached(
        subject, "image", f"https://{_registry(reference)}/v2/", "fail", "a proxy or a firewall is in the way"
    )


def hub(subject: Subject) -> Iterator[Finding]:
    """The Hugging Face Hub, and the token for what is gated there."""
    named = from_hub(subject.settings.training_settings().data)
    if not named:
        yield Finding("Hugging Face", "pass", "nothing is read from the Hub")
        return
    # It is pods that read it, by way of NAT: that this machine does not reach it proves little.
    yield _reached(subject, "Hugging Face", HUB, "warn", "see that nodes reach it, or name files in data.*")
    gated = {key: name for key, name in named.items() if name.startswith(GATED)}
    if subject.token_given:
        yield Finding("Hugging Face", "pass", "huggingFaceToken is set")
    elif gated:
        what = ", ".join(f"data.{key} {name}" for key, name in gated.items())
        fix = f"pulumi config set --secret huggingFaceToken --stack {subject.stack}"
        yield Finding("Hugging Face", "fail", f"huggingFaceToken is not set, and {what} is gated", fix)
    else:
        yield Finding("Hugging Face", "pass", "no token, and nothing is gated")


def _reached(subject: Subject, check: str, url: str, otherwise: Status, fix: str) -> Finding:
    why = subject.unreachable(url)
    return Finding(check, otherwise, f"{url}: {why}", fix) if why else Finding(check, "pass", f"{url} answers")


def _registry(reference: str) -> str:
    """The host of an image reference, by Docker's rule: a first part with a dot, a colon, or localhost."""
    first, slash, _ = reference.partition("/")
    return first if slash and ("." in first or ":" in first or first == "localhost") else "registry-1.docker.io"


def _zones_with(ec2: Any, instance_type: str) -> set[str]:
    filters = [{"Name": "instance-type", "Values": [instance_type]}]
    asked = {"LocationType": "availability-zone-id", "Filters": filters}
    found = pages(ec2, "describe_instance_type_offerings", **asked)
    return {each["Location"] for page in found for each in page["InstanceTypeOfferings"]}


def _listed(zones: Iterable[str]) -> str:
    return ", ".join(sorted(zones)) or "none"


def _day(when: datetime.datetime | None) -> str:
    return when.strftime("%Y-%m-%d %H:%M UTC") if when else "no end"
