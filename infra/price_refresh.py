"""The table of prices from AWS's pricing API (`pricing:GetProducts`).

What is asked for follows the price list: https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/price-changes.html.
Usage types have a prefix in every region but the first (USW2-NatGateway-Hours), so they are told by their ends. For FSx
the throughput is an attribute of its own; that its value begins with the number is an assumption, so a price that is
not found stays as it was, and is named.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import boto3

from infra.prices import UNITS, Price, Prices

API_REGION = "us-east-1"
"""One of the few regions that the pricing API has; it knows the prices of all."""
SOURCE, SOURCE_TEXT = "aws", "AWS's pricing API (pricing:GetProducts)"
_PREFIX = r"([A-Z]{2,4}\d-|EU-|[a-z]{2}-[a-z]+-\d-)?"
"""Of usage types in a region: USE2-, or us-east-2- for KMS. Not TS- and the like, which are other things."""


@dataclass(frozen=True)
class Query:
    """What to ask for, and which of the answers are meant."""

    service: str
    usage_type: str = ""
    """A pattern behind the region's prefix; empty: any."""
    filters: Mapping[str, str] = field(default_factory=dict)
    throughput: str = ""
    """Of FSx, MB/s per TiB."""

    def means(self, attributes: Mapping[str, str]) -> bool:
        """Whether a product is what was asked for."""
        if self.usage_type and not re.fullmatch(_PREFIX + self.usage_type, attributes.get("usagetype", "")):
            return False
        return not self.throughput or _number(attributes.get("throughputCapacity", "")) == self.throughput


_QUERIES = {
    "eks-cluster": Query("AmazonEKS", "AmazonEKS-Hours:perCluster"),
    "nat-gateway": Query("AmazonEC2", "NatGateway-Hours", {"productFamily": "NAT Gateway"}),
    "interface-endpoint": Query("AmazonVPC", "VpcEndpoint-Hours", {"productFamily": "VpcEndpoint"}),
    "public-ipv4": Query("AmazonVPC", "PublicIPv4:InUseAddress"),
    "load-balancer": Query("AWSELB", "LoadBalancerUsage", {"productFamily": "Load Balancer-Application"}),
    "gp3": Query("AmazonEC2", r"EBS:VolumeUsage\.gp3", {"volumeApiName": "gp3"}),
    "kms-key": Query("awskms", "KMS-Keys"),
    "secret": Query("AWSSecretsManager", filters={"productFamily": "Secret"}),
}
_INSTANCE = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "preInstalledSw": "NA",
    "capacitystatus": "Used",
    "marketoption": "OnDemand",
}


def query_of(key: str) -> Query:
    """How AWS is asked for the price of `key`."""
    if key in _QUERIES:
        return _QUERIES[key]
    if key in UNITS:
        return Query(
            "AmazonFSx", filters={"fileSystemType": "Lustre", "storageType": "SSD"}, throughput=key.removeprefix("fsx-")
        )
    return Query("AmazonEC2", filters={"instanceType": key, **_INSTANCE})


def refreshed(
    table: Prices, region: str, keys: Iterable[str], client: Any = None, today: datetime.date | None = None
) -> tuple[Prices, list[str]]:
    """The table with today's prices of `keys` in `region`, and those that it has for the region already.

    Also a line for each price that AWS did not name, or not clearly; what the table had for it stays. Raises botocore's
    errors. `client` is boto3's of the service `pricing`.
    """
    client = client or boto3.client("pricing", region_name=API_REGION)
    today = today or datetime.datetime.now(datetime.UTC).date()
    known = dict(table.regions.get(region, {}))
    not_found = []
    for key in sorted({*keys, *known}):
        answers = set(_prices(client, region, query_of(key)))
        if len(answers) == 1:
            known[key] = Price(usd=answers.pop(), date=today, source=SOURCE)
        else:
            found = f"{len(answers)} prices" if answers else "no price"
            stays = "the table keeps its own" if key in known else "the table has none"
            not_found.append(f"{key} in {region}: {found} in AWS's answer, expected one: {stays}")
    sources = {**table.sources, SOURCE: SOURCE_TEXT}
    regions = {**table.regions, region: known}
    used = {price.source for prices in regions.values() for price in prices.values()}
    return Prices(sources={name: sources[name] for name in sources if name in used}, regions=regions), not_found


def _prices(client: Any, region: str, query: Query) -> Iterator[float]:
    """On-demand prices of the products that a query means; of a price in tiers, the first."""
    asked = {"regionCode": region, **query.filters}
    filters = [{"Type": "TERM_MATCH", "Field": name, "Value": value} for name, value in asked.items()]
    for page in client.get_paginator("get_products").paginate(ServiceCode=query.service, Filters=filters):
        for text in page["PriceList"]:
            product = json.loads(text)
            if not query.means(product["product"]["attributes"]):
                continue
            for term in product.get("terms", {}).get("OnDemand", {}).values():
                for dimension in term["priceDimensions"].values():
                    usd = float(dimension["pricePerUnit"].get("USD", 0))
                    if usd and dimension.get("beginRange", "0") == "0":
                        yield usd


def _number(text: str) -> str:
    found = re.match(r"\d+", text)
    return found[0] if found else ""
