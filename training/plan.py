"""A run on Trainium on paper: memory of a core, time of a step, checkpoints, for a number of nodes.

    python -m training plan --preset llama2-7b --nodes 16

Nothing is started and nothing is written. Memory is the sum of `training.footprint`, time is model FLOPs over the
nodes' peak at the MFU of a run that AWS published, a checkpoint's time is its size over the file system's throughput.
What does not fit is refused in one line with the settings that mend it, which were tried. `training.plan_table` shows
it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from pydantic import Field, field_validator

from training.config import Count, Section, Settings, load_settings
from training.errors import UserError
from training.footprint import Footprint, checkpoint_bytes, footprint
from training.metrics import flops_per_token, mfu
from training.trainium import CORE_BYTES, CORE_PEAK_FLOPS, CORES_PER_NODE, PUBLISHED_RUNS, PublishedRun

NODES = (1, 2, 4, 16, 32)

RESERVED_BYTES = 2**30
"""Left to the runtime and the compiler, whose share only a device tells: code (96 MiB a core by AWS's page on device
memory), DMA rings, collectives' buffers (NxD's are of 130 MB), scratch space. A choice."""

_FSX_THROUGHPUTS = (125, 250, 500, 1000)


class Place(Section):
    """Where a planned run is to be: what no setting of the run says."""

    nodes: int | None = Field(None, ge=1, le=1024, description="trn1.32xlarge nodes [default: 1, 2, 4, 16, 32]")
    mfu: float | None = Field(
        None, gt=0, le=1, description="share of the peak that is reached [default: that of a run AWS published]"
    )
    storage_gib: Count = Field(1200, ge=1200, description="size of the file system, a stack's storage.sizeGib")
    storage_throughput: Count = Field(125, description="its MB/s per TiB, a stack's storage.throughput")

    @field_validator("storage_throughput")
    @classmethod
    def _offered(cls, value: int) -> int:
        if value not in _FSX_THROUGHPUTS:
            raise ValueError(f"expected one of {', '.join(map(str, _FSX_THROUGHPUTS))}, which FSx offers")
        return value

    @property
    def storage_bytes_per_second(self) -> float:
        """What the file system takes in: the throughput of FSx for Lustre is in proportion to its size."""
        return self.storage_throughput * 1e6 * self.storage_gib / 1024


@dataclass(frozen=True)
class Plan:
    """One run on one number of nodes."""

    settings: Settings
    place: Place

    @cached_property
    def footprint(self) -> Footprint:
        """Memory of one core, but for `RESERVED_BYTES`."""
        return footprint(self.settings)

    @property
    def core_bytes(self) -> int:
        """Memory of one core."""
        return self.footprint.total + RESERVED_BYTES

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return self.settings.train.global_batch_size * self.settings.train.seq_length

    @cached_property
    def mfu(self) -> float:
        """Share of the peak that the run is taken to reach."""
        return self.place.mfu or published_mfu(published_run(self.settings.parallel.tensor_parallel_size))

    @property
    def step_seconds(self) -> float:
        """Model FLOPs of a step over what the cores do a second."""
        flops = flops_per_token(self.settings.model, self.settings.train.seq_length) * self.tokens_per_step
        return flops / (self.settings.parallel.workers * CORE_PEAK_FLOPS * self.mfu)

    @property
    def run_seconds(self) -> float:
        """All steps; evaluations and restarts are not in it."""
        return self.step_seconds * self.settings.train.steps

    @cached_property
    def checkpoint_bytes(self) -> int:
        """One checkpoint."""
        return checkpoint_bytes(self.settings)

    @property
    def checkpoint_seconds(self) -> float:
        """To write one, in the background of the training."""
        return self.checkpoint_bytes / self.place.storage_bytes_per_second

    @property
    def layout_problem(self) -> str | None:
        """Why the run does not fit onto the cores, as `key: value, ...`; None when it does."""
        if CORES_PER_NODE % (size := self.settings.parallel.tensor_parallel_size):
            cores = f"{CORES_PER_NODE}, the cores of a node"
            return f"parallel.tensor_parallel_size: {size}, expected a divisor of {cores}"
        return self.memory_problem

    @property
    def memory_problem(self) -> str | None:
        """Why a core of Trn1 has too little memory, as `key: value, ...`; None when it has enough."""
        if self.core_bytes <= CORE_BYTES:
            return None
        return f"memory: {self.core_bytes / 2**30:.1f} GiB a core, expected at most {CORE_BYTES / 2**30:.0f}"

    @property
    def storage_problem(self) -> str | None:
        """Why the checkpoints do not fit into the file system; None when they do."""
        keep = self.settings.checkpoint.keep
        needed = (keep + 1) * self.checkpoint_bytes / 2**30  # one is written while `keep` are there
        if needed <= self.place.storage_gib:
            return None
        file_system = f"the file system's {self.place.storage_gib:,}"
        return f"checkpoint.keep: {keep}, which with the one being written takes {needed:,.0f} GiB of {file_system}"


def published_run(tensor_parallel_size: int) -> PublishedRun:
    """The published run to reckon with: of those with no more tensor parallelism than this the one with the most."""
    near = [run for run in PUBLISHED_RUNS if run.tensor_parallel_size <= tensor_parallel_size]
    return max(near or PUBLISHED_RUNS[:1], key=lambda run: run.tensor_parallel_size)


def published_mfu(run: PublishedRun) -> float:
    """Model FLOPs of a published run over the peak of its cores, by `training.metrics.mfu`."""
    tokens_per_second = run.sequences_per_second * run.seq_length
    model = load_settings(run.preset).model
    return mfu(model, run.seq_length, tokens_per_second, CORE_PEAK_FLOPS, run.nodes * CORES_PER_NODE)


Load = Callable[[dict[str, str]], Settings]
"""Settings from where the user said, with these overrides on top. Raises `UserError`."""


def make_plan(load: Load, place: Place, nodes: int) -> tuple[Plan | None, str | None]:
    """The plan for `nodes` nodes (None where the settings do not go together on so many), and why it does not fit.

    The reason is one line; a layout that does not fit is told with the fewest settings that make it fit, if any do.
    Raises `UserError` for settings that are wrong on any number of nodes.
    """
    one = {"parallel.workers": "1", "parallel.tensor_parallel_size": "1"}
    asked = load(one)
    made, problem = _attempt(load, place, nodes, {})
    if problem is None:
        return made, made.storage_problem if made is not None else None
    for changes in _turns(asked):
        if _attempt(load, place, nodes, changes)[1] is None:
            return made, f"{problem}; fits with {' and '.join(f'{key} {value}' for key, value in changes.items())}"
    return made, problem


def _attempt(load: Load, place: Place, nodes: int, changes: dict[str, str]) -> tuple[Plan | None, str | None]:
    try:
        made = Plan(load(changes | {"parallel.workers": str(nodes * CORES_PER_NODE)}), place)
    except UserError as error:
        return None, str(error).partition("\n")[0]
    return made, made.layout_problem


def _turns(asked: Settings) -> Iterator[dict[str, str]]:
    """Dials to turn: one, then several, in each case the one first that costs less speed.

    None changes what is trained: batch, length, model and schedule stay.
    """
    dials = {
        "train.micro_batch_size": _halves(asked.train.micro_batch_size),
        "train.activation_checkpointing": ["selective", "full"],
        "parallel.tensor_parallel_size": [str(2**n) for n in range(1, CORES_PER_NODE.bit_length())],
    }
    for count in range(1, len(dials) + 1):
        for chosen in itertools.combinations(dials, count):
            for values in itertools.product(*(dials[key] for key in reversed(chosen))):  # the last dial slowest
                yield dict(zip(chosen, reversed(values), strict=True))


def _halves(number: int) -> list[str]:
    """Half of it, a quarter, ... down to 1."""
    found = []
    while number := number // 2:
        found.append(str(number))
    return found
