"""What AWS offers: instance types, regions, and the rule by which zone ids are made."""

from __future__ import annotations

import pytest

from infra.catalog import INSTANCE_TYPES, REGIONS, is_zone_of, zone_prefix

# As DescribeAvailabilityZones answers for these regions.
PREFIXES = {
    "us-east-1": "use1",
    "us-west-2": "usw2",
    "eu-north-1": "eun1",
    "ap-south-1": "aps1",
    "ap-northeast-1": "apne1",
    "ap-southeast-4": "apse4",
    "ca-central-1": "cac1",
}


@pytest.mark.parametrize(("region", "prefix"), PREFIXES.items())
def test_zone_ids_begin_with_the_regions_initials(region: str, prefix: str) -> None:
    assert zone_prefix(region) == prefix


def test_no_two_regions_share_a_prefix() -> None:
    assert len({zone_prefix(region) for region in REGIONS}) == len(REGIONS)


@pytest.mark.parametrize("zone", ["us-west-2a", "use1-az4", "usw2-az0", "usw2-az10", "usw2-lax1-az1", "usw2-az4 ", ""])
def test_what_is_no_zone_of_us_west_2(zone: str) -> None:
    assert is_zone_of("usw2-az4", "us-west-2")
    assert not is_zone_of(zone, "us-west-2")


def test_the_types_that_the_issue_names_and_what_they_have() -> None:
    has = {name: (kind.devices, kind.cores, kind.efa_interfaces, kind.vcpus) for name, kind in INSTANCE_TYPES.items()}
    assert has == {
        "trn1.2xlarge": (1, 2, 0, 8),
        "trn1.32xlarge": (16, 32, 8, 128),
        "trn1n.32xlarge": (16, 32, 16, 128),
        "trn2.48xlarge": (16, 64, 16, 192),
    }
    for name, kind in INSTANCE_TYPES.items():
        assert kind.name == name
        assert kind.efa_interfaces in (0, kind.network_cards)  # EFA: one interface a card
        assert kind.cores % kind.devices == 0
