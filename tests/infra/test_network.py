"""The VPC: how it is cut, which ways lead out of it, what is there before what."""

from __future__ import annotations

from ipaddress import IPv4Network
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mocks import Recorded, Registered, run

from infra import settings
from infra.network import Network
from infra.subnets import SERVICE_CIDR, pod_subnet_cidrs, subnet_cidrs

ZONES = ["usw2-az4", "usw2-az1", "usw2-az2"]
SUBNET, ROUTE, ENDPOINT = "aws:ec2/subnet:Subnet", "aws:ec2/route:Route", "aws:ec2/vpcEndpoint:VpcEndpoint"


def make(**section: object) -> Recorded:
    """What a network of three zones registers."""
    chosen = settings.Network.model_validate({"zones": ZONES, **section})

    def program() -> None:
        Network("network", chosen, "us-west-2", 30)

    return run(program)


@pytest.fixture(scope="module")
def network() -> Recorded:
    return make(flow_logs=True)


def networks(longest: int) -> st.SearchStrategy[IPv4Network]:
    """Ranges from /16 to /`longest`, anywhere."""
    return st.builds(
        lambda address, length: IPv4Network((address >> (32 - length) << (32 - length), length)),
        st.integers(0, 2**32 - 1),
        st.integers(16, longest),
    )


@given(networks(22), networks(18), st.integers(2, 4))
def test_subnets_are_inside_apart_and_large_enough(cidr: IPv4Network, pod_cidr: IPv4Network, zones: int) -> None:
    cut = subnet_cidrs(cidr, zones)
    nodes = [subnet for zone in cut for subnet in (zone.private, zone.public)]
    pods = pod_subnet_cidrs(pod_cidr, zones)
    assert len(cut) == len(pods) == zones
    assert all(subnet.subnet_of(cidr) for subnet in nodes)
    assert all(subnet.subnet_of(pod_cidr) for subnet in pods)
    assert not any(one.overlaps(other) for one, other in combinations(nodes, 2))
    assert not any(one.overlaps(other) for one, other in combinations(pods, 2))
    assert all(zone.public.prefixlen <= 27 for zone in cut)  # a load balancer's least


@given(networks(22), networks(18), st.integers(2, 3))
def test_a_new_zone_renumbers_nothing(cidr: IPv4Network, pod_cidr: IPv4Network, zones: int) -> None:
    assert subnet_cidrs(cidr, zones + 1)[:zones] == subnet_cidrs(cidr, zones)
    assert pod_subnet_cidrs(pod_cidr, zones + 1)[:zones] == pod_subnet_cidrs(pod_cidr, zones)


def test_what_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="^expected at least a /22 for 2 zones$"):
        subnet_cidrs(IPv4Network("10.0.0.0/23"), 2)
    with pytest.raises(ValueError, match="^expected at least a /18 for 2 zones$"):
        pod_subnet_cidrs(IPv4Network("100.64.0.0/19"), 2)
    with pytest.raises(ValueError, match="^expected at most 4 zones$"):
        subnet_cidrs(IPv4Network("10.0.0.0/16"), 5)


def test_every_zone_has_three_subnets_by_its_id(network: Recorded) -> None:
    placed = {
        (each.inputs["availabilityZoneId"], each.name.split("-")[1]): IPv4Network(each.inputs["cidrBlock"])
        for each in network.of(SUBNET)
    }
    assert set(placed) == {(zone, kind) for zone in ZONES for kind in ("public", "private", "pods")}
    vpc, pods = IPv4Network("10.40.0.0/20"), IPv4Network("100.64.0.0/16")
    assert all(cidr.subnet_of(pods if kind == "pods" else vpc) for (_, kind), cidr in placed.items())
    assert not any(cidr.overlaps(SERVICE_CIDR) for cidr in placed.values())
    assert not any(each.inputs["mapPublicIpOnLaunch"] for each in network.of(SUBNET))


def test_load_balancers_find_their_subnets(network: Recorded) -> None:
    for kind, role in (("public", "kubernetes.io/role/elb"), ("private", "kubernetes.io/role/internal-elb")):
        for zone in ZONES:
            tags = network.one(SUBNET, f"{kind}-{zone}").inputs["tags"]
            assert tags[role] == "1"
            assert tags["kubernetes.io/cluster/llama-trainium-dev"] == "shared"
    # A load balancer in a pods' subnet would use up what pods need.
    assert not any("role" in key for zone in ZONES for key in network.one(SUBNET, f"pods-{zone}").inputs["tags"])


def test_pods_subnets_wait_for_their_range(network: Recorded) -> None:
    added = network.one("aws:ec2/vpcIpv4CidrBlockAssociation:VpcIpv4CidrBlockAssociation")
    assert added.inputs["cidrBlock"] == "100.64.0.0/16"
    for zone in ZONES:
        assert network.waits_for(network.one(SUBNET, f"pods-{zone}"), added)
        # Nodes' subnets need not: the cluster starts earlier.
        assert not network.waits_for(network.one(SUBNET, f"private-{zone}"), added)


def nat_of(recorded: Recorded, zone: str) -> Registered:
    """The NAT gateway that a zone's private subnet sends to."""
    target = recorded.one(ROUTE, f"private-{zone}").inputs["natGatewayId"]
    return next(each for each in recorded.of("aws:ec2/natGateway:NatGateway") if each.id == target)


@pytest.mark.parametrize(("nat", "gateways"), [("single", ZONES[:1] * 3), ("per-zone", ZONES)])
def test_nat_gateways(nat: str, gateways: list[str]) -> None:
    recorded = make(nat=nat)
    assert len(recorded.of("aws:ec2/natGateway:NatGateway")) == len(set(gateways))
    for zone, home in zip(ZONES, gateways, strict=True):
        gateway = nat_of(recorded, zone)
        assert gateway.inputs["subnetId"] == recorded.one(SUBNET, f"public-{home}").id
        assert recorded.waits_for(gateway, recorded.one("aws:ec2/internetGateway:InternetGateway"))
    # The switch from one to the other only changes routes.
    tables = [each.name for each in recorded.of("aws:ec2/routeTable:RouteTable")]
    assert tables == ["network-public", *[f"network-private-{zone}" for zone in ZONES]]


def test_every_subnet_has_a_route_table(network: Recorded) -> None:
    tables = {each.id: each.name for each in network.of("aws:ec2/routeTable:RouteTable")}
    subnets = {each.id: each.name for each in network.of(SUBNET)}
    pairs = {
        subnets[each.inputs["subnetId"]]: tables[each.inputs["routeTableId"]]
        for each in network.of("aws:ec2/routeTableAssociation:RouteTableAssociation")
    }
    for zone in ZONES:
        assert pairs[f"network-public-{zone}"] == "network-public"
        assert pairs[f"network-private-{zone}"] == pairs[f"network-pods-{zone}"] == f"network-private-{zone}"


def test_endpoints(network: Recorded) -> None:
    services = {each.inputs["serviceName"].split("us-west-2.")[1]: each for each in network.of(ENDPOINT)}
    assert set(services) == {"s3", "ecr.api", "ecr.dkr", "sts", "ec2", "logs"}
    gateway = services.pop("s3")
    assert gateway.inputs["vpcEndpointType"] == "Gateway"
    assert set(gateway.inputs["routeTableIds"]) == {each.id for each in network.of("aws:ec2/routeTable:RouteTable")}
    group = network.one("aws:ec2/securityGroup:SecurityGroup")
    for each in services.values():
        assert each.inputs["privateDnsEnabled"] is True
        assert each.inputs["securityGroupIds"] == [group.id]
        assert each.inputs["subnetIds"] == [network.one(SUBNET, f"private-{zone}").id for zone in ZONES]
    (rule,) = group.inputs["ingress"]
    assert (rule["protocol"], rule["fromPort"], rule["toPort"]) == ("tcp", 443, 443)
    assert rule["cidrBlocks"] == ["10.40.0.0/20", "100.64.0.0/16"]  # pods keep their address within the VPC


def test_no_endpoints_but_s3() -> None:
    recorded = make(endpoints=[])
    assert [each.name for each in recorded.of(ENDPOINT)] == ["network-s3"]
    assert not recorded.of("aws:ec2/securityGroup:SecurityGroup")


def test_flow_logs(network: Recorded) -> None:
    log = network.one("aws:ec2/flowLog:FlowLog")
    group = network.one("aws:cloudwatch/logGroup:LogGroup")
    assert (log.inputs["logDestination"], group.inputs["retentionInDays"]) == (group.outputs["arn"], 30)
    # Logs that come before the role's policy are lost.
    assert network.waits_for(log, network.one("aws:iam/rolePolicy:RolePolicy"))
    assert not make(flow_logs=False).of("aws:ec2/flowLog:FlowLog")


def test_the_default_group_lets_nothing_through(network: Recorded) -> None:
    inputs = network.one("aws:ec2/defaultSecurityGroup:DefaultSecurityGroup").inputs
    assert not inputs.get("ingress")
    assert not inputs.get("egress")
