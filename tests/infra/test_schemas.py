"""The checker of Kubernetes objects: it passes what an API server takes, and finds what one would drop or refuse."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from mocks import ROOT, Recorded, load_stack, run_program
from schemas import CRD_DIR, NotDefined, definitions, identity, is_custom, is_object, mistakes

DEPLOYMENT: dict[str, Any] = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "one", "namespace": "two"},
    "spec": {
        "selector": {"matchLabels": {"app": "one"}},
        "template": {
            "metadata": {"labels": {"app": "one"}},
            "spec": {"containers": [{"name": "one", "image": "one:1", "ports": [{"containerPort": 80}]}]},
        },
    },
}
RAY_JOB: dict[str, Any] = {
    "apiVersion": "ray.io/v1",
    "kind": "RayJob",
    "metadata": {"name": "train", "labels": {"volcano.sh/queue-name": "training"}},
    "spec": {
        "entrypoint": "python -m training train",
        "rayClusterSpec": {
            "headGroupSpec": {
                "rayStartParams": {},
                "template": {"spec": {"containers": [{"name": "head", "image": "one:1"}]}},
            }
        },
    },
}
DEFINED = definitions()
STACKS = sorted({path.name.split(".")[1] for path in ROOT.glob("Pulumi.*.yaml")} - {"local"})  # those on AWS
needs_definitions = pytest.mark.skipif(
    not DEFINED, reason=f"no definitions in {CRD_DIR}: set CRD_DIR to a folder of them"
)


def at(manifest: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of `manifest` with `value` at the dotted path."""
    changed = copy.deepcopy(manifest)
    *parents, last = path.split(".")
    place: Any = changed
    for key in parents:
        place = place[int(key)] if key.isdigit() else place[key]
    place[last] = value
    return changed


def test_a_valid_object_of_a_built_in_kind_passes() -> None:
    assert mistakes(DEPLOYMENT, {}) == []


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("spec.replica", 1, "replica"),
        ("spec.template.spec.containers.0.imagePolicy", "Always", "imagePolicy"),
        ("spec.template.spec.containers.0.ports.0.containerPort", "http", "http"),
        ("spec.template.spec.containers", [{"image": "one:1"}], "name"),
        ("metadata.label", {"app": "one"}, "label"),
    ],
)
def test_a_mistake_in_a_built_in_kind_is_found(path: str, value: Any, named: str) -> None:
    found = mistakes(at(DEPLOYMENT, path, value), {})
    assert len(found) == 1
    assert named in found[0]


@needs_definitions
def test_a_valid_custom_resource_passes() -> None:
    assert mistakes(RAY_JOB, DEFINED) == []


@needs_definitions
@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        ("spec.entryPoint", "true", "spec: Additional properties are not allowed ('entryPoint' was unexpected)"),
        ("spec.backoffLimit", "3", "spec.backoffLimit: '3' is not of type 'integer'"),
        (
            "spec.rayClusterSpec.headGroupSpec.template.spec.containers.0.limits",
            {},
            "spec.rayClusterSpec.headGroupSpec.template.spec.containers.0: "
            "Additional properties are not allowed ('limits' was unexpected)",
        ),
        ("metadata.label", {}, "metadata: Additional properties are not allowed ('label' was unexpected)"),
    ],
)
def test_a_mistake_in_a_custom_resource_is_found(path: str, value: Any, line: str) -> None:
    assert mistakes(at(RAY_JOB, path, value), DEFINED) == [line]


@needs_definitions
def test_quantities_may_be_numbers_or_text() -> None:
    where = "spec.rayClusterSpec.headGroupSpec.template.spec.containers.0.resources"
    for quantity in (2, "2", "500m"):
        assert mistakes(at(RAY_JOB, where, {"limits": {"cpu": quantity}}), DEFINED) == []
    assert mistakes(at(RAY_JOB, where, {"limits": {"cpu": "2 cores"}}), DEFINED)


def test_a_custom_resource_without_a_definition_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(NotDefined, match=r"RayJob of ray.io/v1"):
        mistakes(RAY_JOB, definitions(tmp_path))


def test_types_that_are_not_one_object_are_left_out() -> None:
    assert is_object("kubernetes:core/v1:Namespace")
    assert is_object("kubernetes:karpenter.sh/v1:NodePool")
    assert not is_object("kubernetes:helm.sh/v3:Release")
    assert not is_object("kubernetes:yaml/v2:ConfigFile")
    assert not is_object("pulumi:providers:kubernetes")


@pytest.fixture(scope="module", params=STACKS)
def program(request: pytest.FixtureRequest) -> Recorded:
    """The whole program, for each stack file."""
    token = {"llama-trainium:huggingFaceToken": "hf_" + "0" * 34}
    return run_program(load_stack(request.param), token, request.param)


def objects(recorded: Recorded, custom: bool) -> dict[str, dict[str, Any]]:
    """The Kubernetes objects of a program as they go to the API server, by their names in the program."""
    found = {f"{each.type} {each.name}": each.inputs for each in recorded if is_object(each.type)}
    return {name: manifest for name, manifest in found.items() if is_custom(manifest) == custom}


def test_every_built_in_object_of_the_program_is_valid(program: Recorded) -> None:
    made = objects(program, custom=False)
    assert len(made) > 5
    assert {name: mistakes(manifest, {}) for name, manifest in made.items()} == {name: [] for name in made}


@needs_definitions
def test_every_custom_resource_of_the_program_is_valid(program: Recorded) -> None:
    made = objects(program, custom=True)
    undefined = {name for name, manifest in made.items() if identity(manifest) not in DEFINED}
    known = {name: manifest for name, manifest in made.items() if name not in undefined}
    assert {name: mistakes(manifest, DEFINED) for name, manifest in known.items()} == {name: [] for name in known}
    if undefined:
        pytest.skip(f"no definitions in {CRD_DIR} of {', '.join(sorted(undefined))}")
