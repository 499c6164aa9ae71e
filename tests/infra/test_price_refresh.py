"""`--refresh`: what AWS's pricing API is asked, and what of its answers is taken. The client is botocore's, stubbed."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from botocore.stub import Stubber

from infra.price_refresh import query_of, refreshed
from infra.prices import UNITS, Price, Prices

TODAY = datetime.date(2026, 11, 21)
OLD = Price(usd=9.0, date=datetime.date(2024, 1, 1), source="old")
EMPTY = Prices(sources={"old": "of old", "unused": "x"}, regions={})


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stubber]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    with Stubber(boto3.client("pricing", region_name="us-east-1")) as stubber:
        yield stubber
        stubber.assert_no_pending_responses()


def product(usd: str, usage_type: str = "x", begin: str = "0", **attributes: str) -> str:
    dimension = {"pricePerUnit": {"USD": usd}, "beginRange": begin, "endRange": "Inf"}
    return json.dumps(
        {
            "product": {"attributes": {"usagetype": usage_type, **attributes}},
            "terms": {"OnDemand": {"A.B": {"priceDimensions": {"A.B.C": dimension}}}, "Reserved": {}},
        }
    )


def answer(stub: Stubber, key: str, *products: str, region: str = "us-west-2") -> None:
    query = query_of(key)
    wanted = {"regionCode": region, **query.filters}
    filters = [{"Type": "TERM_MATCH", "Field": name, "Value": value} for name, value in wanted.items()]
    asked = {"ServiceCode": query.service, "Filters": filters}
    stub.add_response("get_products", {"FormatVersion": "aws_v1", "PriceList": list(products)}, asked)


ANSWERS: dict[str, tuple[str, ...]] = {
    "trn1.32xlarge": (product("21.5000000000", "USW2-BoxUsage:trn1.32xlarge"), product("0.0000000000")),
    "eks-cluster": (
        product("0.10", "USW2-AmazonEKS-Hours:perCluster"),
        product("0.60", "USW2-AmazonEKS-Hours:extendedSupport"),
    ),
    "nat-gateway": (product("0.045", "USW2-NatGateway-Hours"), product("0.046", "USW2-NatGateway-Bytes")),
    "interface-endpoint": (product("0.01", "USW2-VpcEndpoint-Hours"), product("0.02", "USW2-VpcEndpoint-GWLBE-Hours")),
    "public-ipv4": (product("0.005", "USW2-PublicIPv4:InUseAddress"), product("0.006", "USW2-PublicIPv4:IdleAddress")),
    "load-balancer": (product("0.0225", "USW2-LoadBalancerUsage"), product("0.0055", "USW2-TS-LoadBalancerUsage")),
    "gp3": (product("0.08", "USW2-EBS:VolumeUsage.gp3"), product("0.04", "USW2-EBS:VolumeP-Throughput.gp3")),
    "kms-key": (product("1.0", "us-west-2-KMS-Keys"), product("0.03", "us-west-2-KMS-Requests")),
    "secret": (product("0.4", "USW2-AWSSecretsManager-Secrets"),),
    "fsx-250": (
        product("0.145", throughputCapacity="125 MB/s/TiB"),
        product("0.21", throughputCapacity="250 MB/s/TiB"),
        product("0.05", throughputCapacity="N/A"),
    ),
}


@pytest.mark.parametrize("key", ANSWERS)
def test_the_right_one_of_the_answers_is_taken(key: str, stub: Stubber) -> None:
    answer(stub, key, *ANSWERS[key])
    table, not_found = refreshed(EMPTY, "us-west-2", [key], stub.client, TODAY)
    usd = float(
        json.loads(ANSWERS[key][-2 if key == "fsx-250" else 0])["terms"]["OnDemand"]["A.B"]["priceDimensions"]["A.B.C"][
            "pricePerUnit"
        ]["USD"]
    )
    assert table.regions == {"us-west-2": {key: Price(usd=usd, date=TODAY, source="aws")}}
    assert not_found == []
    assert set(table.sources) == {"aws"}


def test_every_kind_of_price_has_a_query_that_finds_it() -> None:
    kinds = {key.partition("-")[0] if key.startswith("fsx") else key for key in UNITS}
    assert {key.partition("-")[0] if key.startswith("fsx") else key for key in ANSWERS} - {"trn1.32xlarge"} == kinds


def test_usage_types_of_the_first_region_have_no_prefix(stub: Stubber) -> None:
    answer(
        stub,
        "load-balancer",
        product("0.0225", "LoadBalancerUsage"),
        product("1", "TS-LoadBalancerUsage"),
        region="us-east-1",
    )
    table, _ = refreshed(EMPTY, "us-east-1", ["load-balancer"], stub.client, TODAY)
    assert table.price("us-east-1", "load-balancer").usd == 0.0225


def test_of_a_price_in_tiers_the_first_is_taken(stub: Stubber) -> None:
    answer(stub, "kms-key", product("1.0", "KMS-Keys"), product("0.5", "KMS-Keys", begin="1000"))
    assert refreshed(EMPTY, "us-west-2", ["kms-key"], stub.client, TODAY)[0].price("us-west-2", "kms-key").usd == 1.0


def test_pages_are_read_to_the_end(stub: Stubber) -> None:
    query = query_of("kms-key")
    asked: dict[str, Any] = {
        "ServiceCode": query.service,
        "Filters": [{"Type": "TERM_MATCH", "Field": "regionCode", "Value": "us-west-2"}],
    }
    stub.add_response("get_products", {"PriceList": [product("3", "KMS-Requests")], "NextToken": "n"}, asked)
    stub.add_response("get_products", {"PriceList": [product("1", "KMS-Keys")]}, {**asked, "NextToken": "n"})
    assert refreshed(EMPTY, "us-west-2", ["kms-key"], stub.client, TODAY)[0].price("us-west-2", "kms-key").usd == 1


@pytest.mark.parametrize(
    ("products", "said"),
    [((), "no price"), ((product("1", "KMS-Keys"), product("2", "KMS-Keys")), "2 prices")],
    ids=["none", "two"],
)
def test_an_answer_that_is_not_clear_changes_nothing_and_is_told(
    products: tuple[str, ...], said: str, stub: Stubber
) -> None:
    before = Prices(sources={"old": "of old"}, regions={"us-west-2": {"kms-key": OLD}, "us-east-1": {"kms-key": OLD}})
    answer(stub, "kms-key", *products)
    table, not_found = refreshed(before, "us-west-2", [], stub.client, TODAY)
    assert table == before
    assert not_found == [f"kms-key in us-west-2: {said} in AWS's answer, expected one: the table keeps its own"]
    answer(stub, "kms-key", *products, region="eu-north-1")
    table, not_found = refreshed(before, "eu-north-1", ["kms-key"], stub.client, TODAY)
    assert table.regions["eu-north-1"] == {}
    assert not_found == [f"kms-key in eu-north-1: {said} in AWS's answer, expected one: the table has none"]


def test_other_regions_and_their_sources_stay(stub: Stubber) -> None:
    before = Prices(sources={"old": "of old"}, regions={"us-west-2": {"kms-key": OLD}, "us-east-1": {"kms-key": OLD}})
    answer(stub, "kms-key", product("1", "KMS-Keys"))
    table, _ = refreshed(before, "us-west-2", [], stub.client, TODAY)
    assert table.regions["us-east-1"] == {"kms-key": OLD}
    assert set(table.sources) == {"old", "aws"}
