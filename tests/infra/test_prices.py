"""The checked-in table of prices: whole, dated, with sources, and the same file when it is written again."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from infra.prices import HOURS_PER_MONTH, TABLE, UNITS, Price, Prices, read_prices, unit_of, write_prices
from training.errors import UserError


def test_every_price_has_a_known_source_and_a_day_that_has_been() -> None:
    table = read_prices()
    prices = [price for region in table.regions.values() for price in region.values()]
    assert {price.source for price in prices} == set(table.sources)
    assert all(datetime.date(2024, 1, 1) < price.date <= datetime.datetime.now(datetime.UTC).date() for price in prices)


def test_every_region_of_the_table_has_all_that_is_no_instance() -> None:
    for region, prices in read_prices().regions.items():
        assert not UNITS.keys() - prices.keys(), region


def test_the_file_is_as_the_command_writes_it(tmp_path: Path) -> None:
    write_prices(read_prices(), tmp_path / "prices.yaml")
    assert (tmp_path / "prices.yaml").read_text(encoding="utf-8") == TABLE.read_text(encoding="utf-8")


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    price = Price(usd=0.0123456, date=datetime.date(2026, 1, 2), source="a")
    table = Prices(sources={"a": "x: y # z, " + "w" * 200}, regions={"eu-north-1": {"gp3": price, "m7i.large": price}})
    write_prices(table, tmp_path / "prices.yaml")
    assert read_prices(tmp_path / "prices.yaml") == table


def test_units_are_by_the_hour_unless_said() -> None:
    assert (unit_of("trn1.32xlarge"), unit_of("nat-gateway"), unit_of("fsx-250")) == ("hour", "hour", "month")
    assert HOURS_PER_MONTH == 8760 / 12


def test_a_price_that_is_missing_is_named_with_what_gets_it() -> None:
    with pytest.raises(UserError, match=r"^prices.yaml: no price of m7i.large in eu-north-1, expected one: python -m"):
        read_prices().price("eu-north-1", "m7i.large")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "sources: {}\nregions: {r: {gp3: {usd: -1, date: 2026-01-01, source: a}}}",
            "regions.r.gp3.usd: -1, expected more",
        ),
        ("sources: {}\nregions: {r: {gp3: {usd: 1, date: soon, source: a}}}", "regions.r.gp3.date: soon, expected"),
        ("sources: {", "expected the table of prices"),
    ],
)
def test_a_broken_table_is_refused_in_one_line(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        read_prices(tmp_path / "prices.yaml")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
