"""The table of list prices, `infra/prices.yaml`: read, looked up, written again.

    table = read_prices()
    table.price("us-west-2", "trn1.32xlarge")       # Price(usd=21.5, date=..., source=...)

A key is an EC2 instance type, or one of `UNITS`. Each price has the day on which it was seen, and where. The file is
written by `python -m infra.cost STACK --refresh` (infra/price_refresh.py) from AWS's pricing API; who changes it by
hand says the source.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from training.errors import UserError
from training.messages import explain, location

TABLE = Path(__file__).parent / "prices.yaml"
HOURS_PER_MONTH = 730
"""What AWS itself turns prices per month into prices per hour with (its pricing calculator)."""

Unit = Literal["hour", "month"]
UNITS: dict[str, Unit] = {
    "eks-cluster": "hour",  # the control plane, in standard support
    "nat-gateway": "hour",
    "interface-endpoint": "hour",  # in one zone
    "public-ipv4": "hour",
    "load-balancer": "hour",  # an application load balancer, without its capacity units
    "gp3": "month",  # per GiB
    "fsx-125": "month",  # per GiB of PERSISTENT_2 SSD, by its MB/s per TiB
    "fsx-250": "month",
    "fsx-500": "month",
    "fsx-1000": "month",
    "kms-key": "month",
    "secret": "month",  # in Secrets Manager
}
"""What a price is for, of the keys that are no instance types: those are by the hour."""

HEAD = """\
# List prices in US dollars, before taxes, discounts and savings plans: by the hour; by the month for gp3 and fsx-* (of
# a GiB), kms-key and secret. `date` is the day that `source` is of. Written by: python -m infra.cost STACK --refresh
"""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Price(_Strict):
    """One list price, per hour or month (`unit_of`)."""

    usd: float = Field(gt=0)
    date: datetime.date
    source: str


class Prices(_Strict):
    """The whole table."""

    sources: dict[str, str]
    """What the short names of sources stand for."""
    regions: dict[str, dict[str, Price]]

    def price(self, region: str, key: str) -> Price:
        """The price of `key` in `region`. Raises `UserError` where the table has none."""
        found = self.regions.get(region, {}).get(key)
        if found is None:
            raise UserError(
                f"{TABLE.name}: no price of {key} in {region}, expected one: python -m infra.cost STACK --refresh"
            )
        return found


def unit_of(key: str) -> Unit:
    """What the price of `key` is for."""
    return UNITS.get(key, "hour")


def read_prices(path: Path = TABLE) -> Prices:
    """The table in a file. Raises `UserError` with one line per mistake."""
    try:
        return Prices.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        lines = [explain(location(item["loc"]), item) for item in error.errors()]
        raise UserError("\n".join(f"{path.name}: {line}" for line in lines)) from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path.name}: {str(error).partition(chr(10))[0]}, expected the table of prices") from None


def write_prices(table: Prices, path: Path = TABLE) -> None:
    """Write the table, sorted: the same table is the same file."""
    lines = [HEAD + yaml.safe_dump({"sources": table.sources}, width=120) + "regions:"]
    for region, prices in sorted(table.regions.items()):
        lines.append(f"  {region}:")
        for key, price in sorted(prices.items()):
            lines.append(f"    {key}: {{usd: {price.usd!r}, date: {price.date}, source: {price.source}}}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
