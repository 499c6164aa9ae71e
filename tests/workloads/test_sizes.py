"""What pods ask for, and quantities as Kubernetes reads them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.checks import quantity
from workloads.platform import NodeShape
from workloads.settings import STAGES, StageName, Workloads
from workloads.sizes import Size, gang_sizes, head_size, in_words, mebibytes, millis, worker_size

CORE = NodeShape("core", 4, 7, 28)
TRN1 = NodeShape("trn1", 16, 112, 448, neuron=16, neuron_cores=32, efa=8)


@pytest.mark.parametrize(
    ("text", "number"),
    [("32", 32), ("500m", 0.5), ("1.5", 1.5), ("2k", 2000), ("1Ki", 1024), ("512Gi", 512 * 2**30), ("1Ti", 2**40)],
)
def test_a_quantity_is_read_as_kubernetes_reads_it(text: str, number: float) -> None:
    assert quantity(text) == number
    assert Workloads.model_validate({"queue": {"capability": {"cpu": text}}}).queue.capability["cpu"] == text


@given(st.integers(1, 2**31))
def test_a_quantity_is_written_as_kubernetes_writes_it(count: int) -> None:
    """As `Quantity.String` in k8s.io/apimachinery: no fraction, and the largest unit that leaves none."""
    assert quantity(millis(count)) * 1000 == pytest.approx(count)
    assert millis(count).endswith("m") == bool(count % 1000)
    memory = mebibytes(count)
    assert quantity(memory) == count * 2**20
    assert int(memory[:-2]) % 1024 or memory.endswith("Ti")


def test_a_worker_has_its_node() -> None:
    assert worker_size(Workloads(), TRN1).resources() == {
        "cpu": "112",
        "memory": "448Gi",
        "aws.amazon.com/neuron": "16",
        "vpc.amazonaws.com/efa": "8",
    }


def test_a_gang_in_words() -> None:
    worker = "112 CPUs, 448 GiB, 16 aws.amazon.com/neuron, 8 vpc.amazonaws.com/efa"
    assert in_words(gang_sizes(Workloads(), "prepare", 2, CORE, TRN1)) == "a pod of 3.5 CPUs, 14 GiB"
    expected = f"a pod of 1.75 CPUs, 7 GiB, and 2 pods of {worker}"
    assert in_words(gang_sizes(Workloads(), "train", 2, CORE, TRN1)) == expected


def test_a_worker_on_cpus_asks_for_no_device() -> None:
    assert set(worker_size(Workloads(), CORE).resources()) == {"cpu", "memory"}


def test_what_is_asked_for_counts() -> None:
    settings = Workloads.model_validate({"resources": {"head": {"cpu": 0.3}, "worker": {"memoryGib": 100}}})
    assert head_size(settings, CORE) == Size(0.3, 7)
    assert (worker_size(settings, TRN1).cpu, worker_size(settings, TRN1).memory_gib) == (112, 100)


@given(st.sampled_from(STAGES), st.integers(1, 16))
def test_a_gang_is_a_head_and_its_workers_or_one_pod(stage: StageName, nodes: int) -> None:
    sizes = gang_sizes(Workloads(), stage, nodes, CORE, TRN1)
    assert len(sizes) == 1 + (0 if stage == "prepare" else nodes)
    neuron = sum(size.devices.get("aws.amazon.com/neuron", 0) for size in sizes)
    assert neuron == (0 if stage == "prepare" else 16 * nodes)


@given(st.floats(0.01, 1024), st.floats(0.05, 32768))
def test_resources_are_the_sizes_to_a_thousandth(cpu: float, memory_gib: float) -> None:
    said = Size(cpu, memory_gib).resources()
    assert abs(quantity(said["cpu"]) - cpu) <= 0.001
    assert abs(quantity(said["memory"]) - memory_gib * 2**30) <= 2**20
