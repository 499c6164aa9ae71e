"""What a destroy takes away beside Pulumi, what it does not touch, and what is listed as left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from intercepted import intercepted, refused
from left_behind import (
    CLAIMS,
    KARPENTERS,
    LOGS,
    OF_CLUSTER,
    OF_CONTROLLER,
    OTHER,
    OWN,
    REGION,
    Network,
    bucket,
    client,
    cluster,
    empty_account,
    log_group,
    tag_list,
    volume,
)

from infra.account import clients_of
from infra.leftovers import leftovers
from infra.sweep import sweep


@pytest.fixture(autouse=True)
def account() -> Iterator[None]:
    with empty_account():
        yield


def swept() -> tuple[list[str], list[str]]:
    found = sweep(clients_of(REGION), "dev")
    return found.removed, found.waiting


def there(service: str, operation: str, key: str, name: str) -> set[str]:
    return {each[name] for each in getattr(client(service), operation)()[key]}


class Everything:
    """One of each kind of the stack's, and one of each that is another's."""

    def __init__(self) -> None:
        self.network, other = Network(), Network({"Name": "not ours"})
        foreign = {"elbv2.k8s.aws/cluster": "another", "kubernetes.io/cluster/another": "owned"}
        self.own = {
            "load balancer": [
                self.network.load_balancer("ours", OF_CONTROLLER),
                self.network.classic("classic", OF_CLUSTER),
            ],
            "target group": [self.network.target_group("ours", OF_CONTROLLER)],
            "instance": [self.network.instance(KARPENTERS)],
            "volume": [volume(CLAIMS)],
            "network interface": [self.network.interface()],
            "security group": [
                self.network.security_group("k8s-traffic", OF_CONTROLLER),
                self.network.security_group("k8s-elb", OF_CLUSTER),
            ],
            "log group": [LOGS],
        }
        log_group(LOGS)
        log_group(LOGS + "-of-somebody")
        other.load_balancer("theirs", foreign)
        other.classic("theirs", foreign)
        other.target_group("theirs", foreign)
        other.instance({**OTHER, "karpenter.sh/nodepool": "cpu"})
        self.network.instance(OWN)  # somebody's own, for Karpenter has not made it
        other.interface()
        other.security_group("theirs", OF_CLUSTER)  # in a VPC that is not the stack's
        volume(OWN)
        volume({**OTHER, "ebs.csi.aws.com/cluster": "true"})

    def names(self) -> set[str]:
        return {f"{kind} {name}" for kind, names in self.own.items() for name in names}


def census() -> dict[str, set[str]]:
    ec2 = client("ec2")
    instances = [each for group in ec2.describe_instances()["Reservations"] for each in group["Instances"]]
    return {
        "load balancers": there("elbv2", "describe_load_balancers", "LoadBalancers", "LoadBalancerArn")
        | there("elb", "describe_load_balancers", "LoadBalancerDescriptions", "LoadBalancerName"),
        "target groups": there("elbv2", "describe_target_groups", "TargetGroups", "TargetGroupArn"),
        "instances": {each["InstanceId"] for each in instances if each["State"]["Name"] == "running"},
        "volumes": there("ec2", "describe_volumes", "Volumes", "VolumeId"),
        "groups": there("ec2", "describe_security_groups", "SecurityGroups", "GroupId"),
        "log groups": there("logs", "describe_log_groups", "logGroups", "logGroupName"),
    }


def test_all_that_is_the_clusters_is_taken_away_and_nothing_else() -> None:
    made = Everything()
    before = census()
    removed, waiting = swept()
    assert set(removed) == made.names()
    assert waiting == [f"instance {made.own['instance'][0]}"]
    own = {name for names in made.own.values() for name in names}
    disks = before["volumes"] - census()["volumes"] - own  # the root volume that goes with its instance
    assert {kind: names - own - disks for kind, names in before.items()} == census()


def test_a_second_sweep_finds_nothing() -> None:
    Everything()
    swept()
    assert swept() == ([], [])


def test_as_long_as_the_cluster_is_there_nothing_is_touched() -> None:
    made = Everything()
    cluster(made.network)
    before = census()
    assert swept() == ([], [])
    assert census() == before


def test_what_is_held_is_waited_for() -> None:
    network = Network()
    group = network.security_group("k8s-traffic", OF_CONTROLLER)
    interface = network.interface()
    held = {
        "DeleteSecurityGroup": refused("DependencyViolation"),
        "DeleteNetworkInterface": refused("InvalidParameterValue", "is currently in use"),
    }
    with intercepted(held):
        assert swept() == ([], [f"network interface {interface}", f"security group {group}"])


def test_interfaces_that_a_service_of_aws_holds_are_waited_for() -> None:
    network = Network()
    answer = {"NetworkInterfaceId": "eni-1", "Status": "in-use", "RequesterManaged": True, "Description": "ELB app/x"}
    ours = {"NetworkInterfaceId": "eni-2", "Status": "in-use", "RequesterManaged": False}
    assert network.vpc
    with intercepted({"DescribeNetworkInterfaces": {"NetworkInterfaces": [answer, ours]}}):
        assert swept() == ([], ["network interface eni-1 (ELB app/x)"])


def test_a_volume_in_use_is_waited_for_and_one_that_is_gone_is_no_error() -> None:
    network = Network()
    name = volume(CLAIMS)
    client("ec2").attach_volume(VolumeId=name, InstanceId=network.instance(OWN), Device="/dev/sdh")
    assert swept() == ([], [f"volume {name}"])
    free = volume(CLAIMS)
    with intercepted({"DeleteVolume": refused("InvalidVolume.NotFound")}):
        assert swept() == ([], [f"volume {name}"])
    assert swept() == ([f"volume {free}"], [f"volume {name}"])


def listed(keeps_bucket: bool = True) -> dict[str, tuple[str, str]]:
    found = leftovers(clients_of(REGION), "dev", keeps_bucket)
    return {each.arn.split(":", 5)[5].replace("log-group:", ""): (each.state, each.note) for each in found}


def test_the_bucket_is_kept_if_the_settings_say_so() -> None:
    bucket(OWN)
    assert listed() == {"llama-data": ("kept", "the data; storage.retainOnDelete")}
    assert listed(keeps_bucket=False) == {"llama-data": ("left", "")}


def test_a_key_goes_by_itself() -> None:
    kms = client("kms")
    key = kms.create_key(Tags=[{"TagKey": key, "TagValue": value} for key, value in OWN.items()])["KeyMetadata"][
        "KeyId"
    ]
    assert listed() == {f"key/{key}": ("left", "")}
    kms.schedule_key_deletion(KeyId=key, PendingWindowInDays=7)
    ((name, (state, note)),) = listed().items()
    assert (name, state) == (f"key/{key}", "going")
    assert note.startswith("deleted on 20")


def test_a_secret_goes_by_itself() -> None:
    manager = client("secretsmanager")
    made = manager.create_secret(Name="grafana", SecretString="x", Tags=tag_list(OWN))["ARN"]
    assert listed() == {made.split(":", 5)[5]: ("left", "")}
    manager.delete_secret(SecretId=made, RecoveryWindowInDays=7)
    assert [(state, note[:13]) for state, note in listed().values()] == [("going", "deleted on 20")]


def test_what_is_gone_but_still_listed_is_not_told() -> None:
    network = Network(OTHER)
    name = network.instance(OWN)
    assert f"instance/{name}" in listed()
    client("ec2").terminate_instances(InstanceIds=[name])
    account = "123456789012"
    stale = [
        f"arn:aws:ec2:{REGION}:{account}:instance/{name}",
        f"arn:aws:ec2:{REGION}:{account}:volume/vol-00000000000000000",
        "arn:aws:s3:::gone",
        f"arn:aws:kms:{REGION}:{account}:key/00000000-0000-0000-0000-000000000000",
        f"arn:aws:logs:{REGION}:{account}:log-group:/gone",
        f"arn:aws:secretsmanager:{REGION}:{account}:secret:gone-abcdef",
    ]
    answer = {"ResourceTagMappingList": [{"ResourceARN": arn} for arn in stale], "PaginationToken": ""}
    with intercepted({"GetResources": answer}):
        assert listed() == {}
