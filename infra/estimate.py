"""The cost of a stack: its quantities times their prices, and the run that its settings plan.

    report("us-west-2", settings, Use(), read_prices())

`infra.cost` is the command.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from infra.prices import HOURS_PER_MONTH, Price, Prices, unit_of
from infra.quantities import Item, Use, items
from infra.settings import Settings
from training.plan import Place, Plan


@dataclass(frozen=True)
class Line:
    """One item with its price."""

    item: Item
    price: Price | None
    """None: the item costs nothing by the hour."""

    def per_hour(self, quantity: float) -> float:
        """Dollars an hour of so many."""
        if self.price is None or self.item.key is None:
            return 0.0
        hourly = self.price.usd / (HOURS_PER_MONTH if unit_of(self.item.key) == "month" else 1)
        return quantity * hourly

    @property
    def idle(self) -> float:
        """Dollars an hour while no job runs."""
        return self.per_hour(self.item.idle)

    @property
    def training(self) -> float:
        """Dollars an hour while the stack trains."""
        return self.per_hour(self.item.training)

    @property
    def zero(self) -> float:
        """Dollars an hour without any accelerator node."""
        return self.per_hour(self.item.zero)


@dataclass(frozen=True)
class Run:
    """The run of the stack's settings, as training.plan predicts it."""

    plan: Plan
    per_hour: float
    """Dollars."""

    @property
    def hours(self) -> float:
        """All steps; starts, compilation, evaluations and restarts are not in it."""
        return self.plan.run_seconds / 3600

    @property
    def cost(self) -> float:
        """Dollars."""
        return self.hours * self.per_hour


@dataclass(frozen=True)
class Report:
    """What a stack costs."""

    stack: str
    region: str | None
    """None: the stack has no resource on AWS."""
    lines: list[Line] = field(default_factory=list)
    run: Run | None = None
    no_run: str = ""
    """Why no run is predicted."""

    @property
    def idle(self) -> float:
        """Dollars an hour while no job runs."""
        return sum(line.idle for line in self.lines)

    @property
    def training(self) -> float:
        """Dollars an hour while the stack trains."""
        return sum(line.training for line in self.lines)

    @property
    def zero(self) -> float:
        """Dollars an hour without any accelerator node."""
        return sum(line.zero for line in self.lines)

    @property
    def prices(self) -> list[Price]:
        """The prices that were reckoned with, oldest first."""
        return sorted((line.price for line in self.lines if line.price), key=lambda price: price.date)


def report(stack: str, settings: Settings, use: Use, table: Prices) -> Report:
    """What the stack costs by the prices of the table. Raises `UserError` for a price that is not in it."""
    lines = [Line(item, table.price(settings.region, item.key) if item.key else None) for item in items(settings, use)]
    found = Report(stack, settings.region, lines)
    plan, why_not = predicted(settings)
    run = Run(plan, found.training) if plan else None
    return Report(stack, settings.region, lines, run, why_not)


def predicted(settings: Settings) -> tuple[Plan | None, str]:
    """The plan of the stack's run, or why there is none."""
    kind = settings.training_group.instance_type
    if not kind.startswith("trn1"):
        return None, f"the time of a step is known for Trn1, not for {kind}"
    storage = settings.storage
    place = Place(nodes=settings.training.nodes, storage_gib=storage.size_gib, storage_throughput=storage.throughput)
    plan = Plan(settings.training_settings(), place)
    problem = plan.layout_problem or plan.storage_problem
    return (None, f"it does not fit: {problem}") if problem else (plan, "")
