"""What a stack costs: quantities as the program registers them, sums as worked out by hand."""

from __future__ import annotations

import datetime
import json
from typing import Any

import pytest
from botocore.exceptions import NoCredentialsError
from stack_configs import changed, raw_config, read_raw

from infra import cost, estimate
from infra.prices import Price, Prices, read_prices
from infra.quantities import Use
from stack_files import read_stack_file
from stack_settings import AwsStack
from training.config import load_settings
from training.metrics import flops_per_token
from training.trainium import CORE_PEAK_FLOPS

# Prices that are easy to reckon with: a month is 730 hours, so 7.30 a month is 0.01 an hour.
TABLE = Prices(
    sources={"hand": "made up"},
    regions={
        "us-west-2": {
            key: Price(usd=usd, date=datetime.date(2026, 1, day), source="hand")
            for day, (key, usd) in enumerate(
                {
                    "eks-cluster": 0.5,
                    "m7i.2xlarge": 2.0,
                    "trn1.32xlarge": 10.0,
                    "trn2.48xlarge": 100.0,
                    "trn1.2xlarge": 1.0,
                    "nat-gateway": 0.25,
                    "public-ipv4": 0.05,
                    "interface-endpoint": 0.01,
                    "load-balancer": 0.03,
                    "gp3": 0.073,
                    "fsx-125": 0.73,
                    "fsx-250": 1.46,
                    "kms-key": 7.3,
                    "secret": 0.73,
                }.items(),
                start=2,
            )
        }
    },
)


def settings(changes: dict[str, Any] | None = None) -> AwsStack:
    found = read_raw(raw_config(changed({"observability": "none", **(changes or {})})))
    assert isinstance(found, AwsStack)
    return found


def reported(changes: dict[str, Any] | None = None, use: Use | None = None) -> estimate.Report:
    return estimate.report("dev", settings(changes), use or Use(), TABLE)


def test_the_sums_by_hand() -> None:
    # 2 zones; 1 NAT gateway; ecr (2 services), sts, ec2, logs: 5 services x 2 zones; 2 core nodes of 100 GiB; 1200 GiB.
    fixed = 0.5 + 2 * 2.0 + 200 * 0.0001 + 1200 * 0.001 + 0.25 + 0.05 + 10 * 0.01 + 0.01
    # Training: 2 nodes of 200 GiB each.
    found = reported()
    assert found.zero == pytest.approx(fixed) == pytest.approx(6.13)
    assert found.idle == pytest.approx(fixed)
    assert found.training == pytest.approx(fixed + 2 * 10.0 + 400 * 0.0001) == pytest.approx(26.17)


@pytest.mark.parametrize(
    ("changes", "use", "idle", "training", "zero"),
    [
        # One NAT gateway and one address more.
        ({"network/nat": "per-zone"}, Use(), 6.43, 26.47, 6.43),
        ({"network/endpoints": []}, Use(), 6.03, 26.07, 6.03),
        # 1200 GiB more, each at twice the price: 2400 x 0.002 in place of 1200 x 0.001.
        ({"storage/sizeGib": 2400, "storage/throughput": 250}, Use(), 9.73, 29.77, 9.73),
        ({}, Use(load_balancers=1), 6.16, 26.20, 6.16),
        # A secret; and with it Prometheus' 50 GiB.
        ({"observability": "basic"}, Use(), 6.131, 26.171, 6.131),
        ({"observability": "full"}, Use(), 6.136, 26.176, 6.136),
        # A RayCluster that holds one node, 10 and 200 GiB of disk: beside the run's two, or one of them.
        ({}, Use(held_nodes=1), 16.15, 36.19, 6.13),
        ({}, Use(held_nodes=1, trains_on_held=True), 16.15, 26.17, 6.13),
        # One node is kept by the settings: cluster-autoscaler goes down to `min`.
        ({"accelerators/0/min": 1, "accelerators/0/desired": 2}, Use(), 16.15, 26.17, 6.13),
        # Without cluster-autoscaler the nodes are `desired`, with it the core nodes go down to `min`.
        ({"autoscaler": "none", "accelerators/0/desired": 2}, Use(), 26.17, 26.17, 6.13),
        ({"coreNodes/min": 1}, Use(), 6.13 - 2.01, 26.17, 6.13 - 2.01),
        ({"coreNodes/min": 1, "autoscaler": "karpenter"}, Use(), 6.13, 26.17, 6.13),
        # A reservation of `max` nodes is billed used or not, the disks of its nodes while they are there.
        (
            {"accelerators/0/capacity": "reservation", "accelerators/0/reservationId": "cr-0123456789abcdef0"},
            Use(),
            26.13,
            26.17,
            26.13,
        ),
        (
            {"accelerators/0/capacity": "capacity-block", "accelerators/0/reservationId": "cr-0123456789abcdef0"},
            Use(),
            6.13,
            6.17,
            6.13,
        ),
        ({"accelerators/0/capacity": "spot"}, Use(), 6.13, 26.17, 6.13),
        # A second group that does not train keeps what its settings say: one of trn1.2xlarge with 50 GiB.
        (
            {
                "accelerators/1": {
                    "name": "small",
                    "instanceType": "trn1.2xlarge",
                    "min": 1,
                    "desired": 1,
                    "max": 4,
                    "diskGib": 50,
                }
            },
            Use(),
            7.135,
            27.175,
            6.13,
        ),
        # Half of the group's nodes train.
        ({"training/nodes": 1}, Use(), 6.13, 16.15, 6.13),
    ],
)
def test_what_a_setting_costs(changes: dict[str, Any], use: Use, idle: float, training: float, zero: float) -> None:
    found = reported(changes, use)
    assert (found.idle, found.training, found.zero) == pytest.approx((idle, training, zero))


def test_what_workloads_add() -> None:
    certificate = "arn:aws:acm:us-west-2:123456789012:certificate/12345678-1234-1234-1234-123456789012"
    page = {"host": "x.example.org", "certificateArn": certificate}
    exposed = {"cluster/loadBalancerController": True, "workloads/dashboard": page}
    secrets = {"llama-trainium:dashboardPassword": "p", "llama-trainium:tensorboardPassword": "p"}

    def use(changes: dict[str, Any]) -> Use:
        found = read_raw(raw_config(changed(changes)) | secrets, list(secrets))
        assert isinstance(found, AwsStack)
        return cost.use_of(found)

    assert use({}) == Use()
    assert use(exposed) == Use(load_balancers=1)
    assert use({**exposed, "workloads/tensorboard": {**page, "host": "y.example.org"}}) == Use(load_balancers=1)
    staying = {"enabled": True, "minNodes": 1, "maxNodes": 2}
    assert use({"workloads/rayCluster": staying, "accelerators/0/max": 3, "training/nodes": 2}) == Use(held_nodes=1)
    shared = use({"workloads/rayCluster": staying, "workloads/gang": False})
    assert shared == Use(held_nodes=1, trains_on_held=True)
    unused = {**staying, "enabled": False}
    assert use({"workloads/rayCluster": unused}) == Use()


def test_a_run_by_hand() -> None:
    run = reported().run
    assert run is not None
    model, train = load_settings("tiny").model, load_settings("tiny").train
    flops = flops_per_token(model, train.seq_length) * train.seq_length * train.global_batch_size * train.steps
    # 64 cores at the MFU of the published run of Llama-2-7B.
    seconds = flops / (64 * CORE_PEAK_FLOPS * run.plan.mfu)
    assert run.hours == pytest.approx(seconds / 3600)
    assert run.cost == pytest.approx(26.17 * seconds / 3600)


def test_no_run_is_predicted_where_the_plan_knows_none() -> None:
    small: dict[str, Any] = {
        "training/settings": {"parallel": {"tensor_parallel_size": 4}, "train": {"micro_batch_size": 1}}
    }
    small |= {"workloads/stages": ["prepare"]}  # the image's SDK does not train on Trn2
    trn2 = reported({"accelerators/0/instanceType": "trn2.48xlarge", "accelerators/0/max": 1, **small})
    assert trn2.run is None
    assert trn2.no_run == "the time of a step is known for Trn1, not for trn2.48xlarge"
    assert cost.as_json(trn2)["run"] is None
    wide = {"hidden_size": 16384, "intermediate_size": 65536, "num_attention_heads": 128, "num_key_value_heads": 128}
    big = reported({"training/settings/model": wide, "workloads/stages": ["prepare"]})
    assert big.run is None
    assert big.no_run.startswith("it does not fit: memory: ")


def run_cli(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cost.main(argv)
    said = capsys.readouterr()
    return code, said.out, said.err


def test_json_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_cli(capsys, "us-west-2", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["stack"] == "us-west-2"
    assert found["currency"] == "USD"
    assert found["date"] == min(item["date"] for item in found["items"] if item["date"])
    for state in ("idle_per_hour", "training_per_hour", "zero_per_hour"):
        assert found[state] == pytest.approx(sum(item[state] for item in found["items"]))
    assert found["training_per_hour"] - found["zero_per_hour"] == pytest.approx(16 * 21.5 + 16 * 200 * 0.08 / 730)
    assert found["run"]["cost"] == pytest.approx(found["run"]["hours"] * found["training_per_hour"])


def test_the_table_says_all_three_and_what_scale_to_zero_saves(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_cli(capsys, "us-west-2")
    assert (code, err) == (0, "")
    rows = {line.split("  ")[0]: line.split() for line in out.splitlines() if line.strip()}
    assert rows["trn1 nodes, trn1.32xlarge"][-3:] == ["0.00", "344.00", "0.00"]
    found = estimate.report("x", read_stack_file("us-west-2").settings(), Use(), read_prices())
    assert rows["an hour"][-3:] == [f"{value:,.2f}" for value in (found.idle, found.training, found.zero)]
    assert f"Scale-to-zero saves {found.training - found.zero:,.2f} dollars (99%) of every hour" in out
    assert "A run of 500,000 steps takes " in out
    assert "as-us-east-1, 2024-07-01 to " in out


def test_a_stack_without_aws_costs_nothing_there(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_cli(capsys, "local", "--json")
    found = json.loads(out)
    assert (code, found["training_per_hour"], found["items"], found["run"]) == (0, 0, [], None)
    assert "without resources on AWS" in run_cli(capsys, "local")[1]


def test_a_bad_stack_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(capsys, "us-west-1") == (2, "", "error: STACK: us-west-1, did you mean us-west-2?\n")
    assert run_cli(capsys) == (2, "", "error: Missing argument 'STACK'.\n")


def test_a_refresh_asks_and_writes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[tuple[str, set[str]]] = []

    def refreshed(table: Prices, region: str, keys: set[str]) -> tuple[Prices, list[str]]:
        asked.append((region, keys))
        twice = {key: price.model_copy(update={"usd": 2 * price.usd}) for key, price in table.regions[region].items()}
        return table.model_copy(update={"regions": {**table.regions, region: twice}}), ["gp3 in us-west-2: no price"]

    written: list[Prices] = []
    monkeypatch.setattr(cost, "refreshed", refreshed)
    monkeypatch.setattr(cost, "write_prices", written.append)
    before = json.loads(run_cli(capsys, "dev", "--json")[1])
    code, out, err = run_cli(capsys, "dev", "--json", "--refresh")
    assert (code, err) == (0, "gp3 in us-west-2: no price\n")
    assert json.loads(out)["training_per_hour"] == pytest.approx(2 * before["training_per_hour"])
    (region, keys), (table,) = asked[0], written
    assert region == "us-west-2"
    assert {"trn1.2xlarge", "m7i.xlarge", "fsx-125", "gp3"} <= keys
    assert table.regions["us-west-2"]["gp3"].usd == 0.16


def test_without_credentials_a_refresh_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*arguments: object) -> None:
        raise NoCredentialsError

    monkeypatch.setattr(cost, "refreshed", refuse)
    assert run_cli(capsys, "dev", "--refresh") == (1, "", "error: AWS: Unable to locate credentials\n")
