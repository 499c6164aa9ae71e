"""The real program keeps the rules, with every stack file and with all that a stack can have switched on.

What the engine would be asked for, the rules are asked about here; tests/engine/test_policies.py has the engine too.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from google.protobuf import json_format
from judging import violations
from mocks import ROOT, Recorded, load_stack, run_program

TOKEN = {"llama-trainium:huggingFaceToken": "hf_" + "x" * 34}
PASSWORDS = {f"llama-trainium:{page}Password": "opensesame" for page in ("tensorboard", "dashboard")}
REDIS = {"llama-trainium:redisPassword": "opensesame"}
PAGE = {
    "host": "x.example.com",
    "certificateArn": "arn:aws:acm:us-west-2:111122223333:certificate/0a1b2c3d-0000-4000-8000-000000000000",
}
EVERYTHING: dict[str, dict[str, Any]] = {
    "us-west-2": {
        "cluster": {"loadBalancerController": True, "publicAccessCidrs": ["203.0.113.7/32"]},
        "autoscaler": "karpenter",
        "neuron": {"nodeRecovery": True},
        "workloads": {
            "toolbox": True,
            "redisAddress": "redis.example.com:6379",
            "rayCluster": {"enabled": True},
            "tensorboard": PAGE,
            "dashboard": PAGE | {"host": "y.example.com"},
        },
    },
    "dev": {"workloads": {"engine": "mpi"}},
    "local": {"workloads": {"engine": "mpi", "toolbox": True}},
}
"""Beyond the stack file."""
STACKS = sorted(path.name.split(".")[1] for path in ROOT.glob("Pulumi.*.yaml"))


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A kubeconfig whose cluster takes connections: the stack `local` looks."""
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.MonkeyPatch.context() as patch:
        file = tmp_path_factory.mktemp("kube") / "config"
        here = {"cluster": {"server": f"http://127.0.0.1:{server.getsockname()[1]}"}, "name": "here"}
        context = {"name": "here", "context": {"cluster": "here", "user": "here"}}
        file.write_text(yaml.safe_dump({"clusters": [here], "contexts": [context], "current-context": "here"}))
        patch.setenv("KUBECONFIG", str(file))
        yield


def broken(made: Recorded) -> dict[str, dict[str, list[str]]]:
    """The rules that a program breaks, by resource."""
    providers = {each.urn: each.inputs for each in made if each.type.startswith("pulumi:providers:")}
    found = {
        str(each): violations(
            each.type, json_format.MessageToDict(each.request.object), providers.get(each.provider, {})
        )
        for each in made
    }
    return {name: rules for name, rules in found.items() if rules}


@pytest.mark.parametrize("name", STACKS)
def test_a_stack_file_keeps_the_rules(name: str) -> None:
    made = run_program(load_stack(name), secrets=TOKEN, stack=name)
    assert len(list(made)) > 20
    assert broken(made) == {}


@pytest.mark.parametrize("name", EVERYTHING)
def test_everything_switched_on_keeps_them_too(name: str) -> None:
    config: dict[str, Any] = load_stack(name)
    for key, value in EVERYTHING[name].items():
        before = config.get(f"llama-trainium:{key}")
        config[f"llama-trainium:{key}"] = before | value if isinstance(before, dict) else value
    config["llama-trainium:workloads"] |= {"stages": ["prepare", "precompile", "train"]}
    redis = REDIS if "redisAddress" in EVERYTHING[name]["workloads"] else {}
    made = run_program(config, secrets=TOKEN | PASSWORDS | redis, stack=name, preview=True)
    assert broken(made) == {}
    kinds = {each.type.rpartition(":")[2] for each in made}
    assert {"Deployment", "Secret", "RayJob"} <= kinds
    assert ("MPIJob" in kinds) == (EVERYTHING[name]["workloads"].get("engine") == "mpi")


def test_a_program_that_breaks_a_rule_is_caught() -> None:
    config: dict[str, Any] = load_stack("dev")
    world = {"publicAccessCidrs": ["0.0.0.0/0"], "iKnowTheApiIsOpenToTheWorld": True}
    config["llama-trainium:cluster"] = world
    (found,) = broken(run_program(config, stack="dev")).values()
    assert list(found) == ["no-public-eks-endpoint"]
