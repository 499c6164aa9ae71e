"""`make destroy`: what it says and asks, how often it tries, and how it ends."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from left_behind import CLAIMS, KARPENTERS, OTHER, OWN, REGION, Network, bucket, client, empty_account, volume

from infra import destroy
from infra.account import clients_of


@pytest.fixture(autouse=True)
def account() -> Iterator[None]:
    with empty_account():
        yield


def run_with(codes: Sequence[int], each_time: Callable[[], object] = lambda: None) -> tuple[int, int, int]:
    """Exit code of destroy, how often Pulumi ran, and how often it was waited."""
    left, pauses = list(codes), []

    def pulumi() -> int:
        each_time()
        return left.pop(0)

    code = destroy.destroy("dev", clients_of(REGION), pulumi, lambda: pauses.append(1))
    return code, len(codes) - len(left), len(pauses)


def test_a_destroy_that_succeeds_runs_once() -> None:
    assert run_with([0, 9]) == (0, 1, 0)


def test_a_destroy_that_fails_for_a_reason_of_its_own_is_not_tried_again() -> None:
    assert run_with([255, 9]) == (255, 1, 0)


def test_a_destroy_that_something_was_in_the_way_of_is_tried_again() -> None:
    Network().interface()
    assert run_with([255, 0, 9]) == (0, 2, 1)


def test_a_destroy_is_not_tried_for_ever() -> None:
    network = Network()
    assert run_with([255] * 9, network.interface) == (255, destroy.ATTEMPTS, destroy.ATTEMPTS - 1)


def test_after_success_it_waits_for_what_aws_lets_go_late() -> None:
    Network().instance(KARPENTERS)
    assert run_with([0, 9]) == (0, 1, 1)


def test_ctrl_c_ends_it() -> None:
    Network().interface()
    assert run_with([130, 9]) == (130, 1, 0)


@pytest.fixture
def pulumi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """A `pulumi` on PATH that succeeds, and what it was called with."""
    script, said = tmp_path / "pulumi", tmp_path / "said"
    script.write_text(f'#!/bin/sh\necho "$@" >> {said}\n', encoding="utf-8")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return lambda: said.read_text(encoding="utf-8") if said.exists() else ""


def command(*arguments: str, typed: str = "") -> tuple[Any, str]:
    result = CliRunner().invoke(destroy.cli, arguments, input=typed, standalone_mode=False)
    return result.exception or result.return_value, result.output


def test_it_says_what_stays_and_asks(pulumi: Callable[[], str]) -> None:
    name = volume(CLAIMS)
    refusal, said = command("dev", typed="yes\n")
    assert str(refusal) == "answer: yes, expected dev: nothing was destroyed"
    assert pulumi() == ""
    assert "dev, in account 123456789012, us-west-2:" in said
    assert "goes:  the S3 bucket with every version of every object" in said  # dev keeps nothing
    assert f"goes:  volume {name}, 8 GiB, of a claim" in said
    assert "make stop STACK=dev writes a checkpoint first" in said
    assert "stays: the S3 bucket, with all that was exported" in command("us-west-2", typed="\n")[1]


def test_when_told_it_destroys_and_lists(pulumi: Callable[[], str]) -> None:
    code, said = command("dev", typed="dev\n")
    assert (code, pulumi()) == (0, "destroy --stack dev --yes\n")
    assert said.endswith("0 left behind of dev, 0 kept or going\n")


def test_what_is_left_is_exit_code_1(pulumi: Callable[[], str]) -> None:
    network = Network()
    bucket(OWN)
    code, said = command("dev", "--yes")
    assert code == 1
    assert f"left: arn:aws:ec2:us-west-2:123456789012:vpc/{network.vpc}\n" in said
    assert said.endswith("2 left behind of dev, 0 kept or going\n")


def test_listing_changes_nothing(pulumi: Callable[[], str]) -> None:
    network = Network(OTHER)
    bucket(OTHER)
    interface = network.interface()
    code, said = command("us-west-2", "--list")
    assert code == 1
    assert "kept: arn:aws:s3:::llama-data (the data; storage.retainOnDelete)\n" in said
    assert said.endswith("1 left behind of us-west-2, 1 kept or going\n")
    assert pulumi() == ""
    found = client("ec2").describe_network_interfaces()["NetworkInterfaces"]
    assert interface in {each["NetworkInterfaceId"] for each in found}


def test_a_stack_on_an_existing_cluster_is_pulumis_alone(pulumi: Callable[[], str]) -> None:
    code, said = command("local", "--yes")
    assert (code, pulumi()) == (0, "destroy --stack local --yes\n")
    assert "stays: the namespace, the claim with the data" in said
    assert str(command("local", "--list")[0]).startswith("--list: local has platform: existing, expected")


def test_bad_input_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert destroy.main(["usw2"]) == 2
    assert capsys.readouterr().err.startswith("error: STACK: usw2, did you mean us-west-2?")
    assert destroy.main([]) == 2
    assert capsys.readouterr().err == "error: Missing argument 'STACK'.\n"
    monkeypatch.setenv("PATH", "")
    assert destroy.main(["dev", "--yes"]) == 2
    assert "error: pulumi: not found, expected it on PATH" in capsys.readouterr().err
