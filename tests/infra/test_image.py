"""The training image: how it is built, pushed and named; and what its context and its Dockerfile hold."""

from __future__ import annotations

import fnmatch
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pulumi
import pulumi_aws as aws
import pytest
from mock_cloud import DIGEST
from mocks import ROOT, Recorded, run

from infra.image import TrainingImage
from infra.settings import Image
from infra.versions import TRAINING_BASE_IMAGE

BUILD, REPOSITORY = "docker-build:index:Image", "aws:ecr/repository:Repository"
LIFECYCLE = "aws:ecr/lifecyclePolicy:LifecyclePolicy"


def make(**settings: Any) -> tuple[Recorded, dict[str, str]]:
    """What the image registers, and its reference."""
    seen: dict[str, str] = {}

    def program() -> None:
        provider = aws.Provider("aws", region="us-west-2")
        opts = pulumi.ResourceOptions(providers=[provider])
        image = TrainingImage("image", Image.model_validate(settings), opts)
        pulumi.export("ref", image.ref)

    recorded = run(program)
    seen["ref"] = recorded.exports["ref"]
    return recorded, seen


@pytest.fixture(scope="module")
def image() -> tuple[Recorded, dict[str, str]]:
    return make()


def test_the_reference_is_the_repository_and_the_digest(image: tuple[Recorded, dict[str, str]]) -> None:
    recorded, seen = image
    url = recorded.one(REPOSITORY, "image").outputs["repositoryUrl"]
    assert seen["ref"] == f"{url}@{DIGEST}"


def test_the_push_needs_no_tag(image: tuple[Recorded, dict[str, str]]) -> None:
    """A registry of immutable tags refuses the second build of one tag, and Pulumi deletes by tags."""
    recorded, _ = image
    build = recorded.one(BUILD).inputs
    url = recorded.one(REPOSITORY, "image").outputs["repositoryUrl"]
    assert not build.get("tags")
    assert not build.get("push")
    (export,) = build["exports"]
    assert export["registry"]["names"] == [url]
    assert export["registry"]["pushByDigest"] is True


def test_the_build_is_of_the_repository_on_the_pinned_base(image: tuple[Recorded, dict[str, str]]) -> None:
    build = image[0].one(BUILD).inputs
    # Relative: an absolute path is another one on each machine, and so a rebuild.
    assert build["context"] == {"location": "."}
    assert build["dockerfile"] == {"location": "./training/Dockerfile"}
    assert build["buildArgs"] == {"BASE_IMAGE": TRAINING_BASE_IMAGE}
    assert build["platforms"] == ["linux/amd64"]
    assert build["buildOnPreview"] is False


def test_the_cache_is_a_tag_that_moves_in_a_repository_of_its_own(image: tuple[Recorded, dict[str, str]]) -> None:
    recorded, _ = image
    build = recorded.one(BUILD).inputs
    ref = recorded.one(REPOSITORY, "image-cache").outputs["repositoryUrl"] + ":layers"
    (source,), (target,) = build["cacheFrom"], build["cacheTo"]
    assert source["registry"]["ref"] == target["registry"]["ref"] == ref
    assert target["registry"]["mode"] == "max"
    assert target["registry"]["imageManifest"] is True
    assert target["registry"]["ignoreError"] is True


def test_repositories_are_scanned_encrypted_and_go_with_the_stack(image: tuple[Recorded, dict[str, str]]) -> None:
    recorded, _ = image
    mutability = {each.name: each.inputs["imageTagMutability"] for each in recorded.of(REPOSITORY)}
    assert mutability == {"image": "IMMUTABLE", "image-cache": "IMMUTABLE_WITH_EXCLUSION"}
    moving = recorded.one(REPOSITORY, "image-cache").inputs["imageTagMutabilityExclusionFilters"]
    assert moving == [{"filter": "layers", "filterType": "WILDCARD"}]
    for repository in recorded.of(REPOSITORY):
        assert repository.inputs["imageScanningConfiguration"] == {"scanOnPush": True}
        assert repository.inputs["encryptionConfigurations"] == [{"encryptionType": "AES256"}]
        assert repository.inputs["forceDelete"] is True


def test_lifecycles_keep_the_newest_images_and_drop_old_layers(image: tuple[Recorded, dict[str, str]]) -> None:
    rules = {}
    for policy in image[0].of(LIFECYCLE):
        (rules[policy.name],) = json.loads(policy.inputs["policy"])["rules"]
    # Images have no tags: a rule about untagged ones would delete the one in use.
    assert rules["image-lifecycle"]["selection"] == {
        "tagStatus": "any",
        "countType": "imageCountMoreThan",
        "countNumber": 20,
    }
    assert rules["image-cache-lifecycle"]["selection"]["tagStatus"] == "untagged"


def test_the_password_is_a_secret_and_in_no_build_argument(image: tuple[Recorded, dict[str, str]]) -> None:
    build = image[0].one(BUILD)
    (registry,) = build.inputs["registries"]
    assert "registries" in build.secrets
    assert registry["password"]
    assert registry["password"] not in json.dumps(build.inputs["buildArgs"])


def test_the_build_waits_for_its_repositories_alone(image: tuple[Recorded, dict[str, str]]) -> None:
    recorded, _ = image
    behind = {recorded.by_urn(urn).type for urn in recorded.before(recorded.one(BUILD)) if "pulumi:Stack" not in urn}
    assert behind == {REPOSITORY, "llama-trainium:infra:TrainingImage", "pulumi:providers:aws"}


def test_a_prebuilt_image_makes_nothing() -> None:
    ref = "registry.example.com/team/train@sha256:" + "1" * 64
    recorded, seen = make(prebuilt=ref)
    assert seen["ref"] == ref
    assert [each.type for each in recorded if each.custom] == ["pulumi:providers:aws"]


def test_context_and_base_of_the_settings() -> None:
    recorded, _ = make(context="docs", base="registry.example.com/base:1")
    build = recorded.one(BUILD).inputs
    assert build["context"] == {"location": "docs"}
    assert build["dockerfile"] == {"location": "docs/training/Dockerfile"}
    assert build["buildArgs"] == {"BASE_IMAGE": "registry.example.com/base:1"}


def in_context(path: str) -> bool:
    """Whether .dockerignore lets `path` into the build: the last line that matches decides."""
    wanted = True
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!").removeprefix("**/")
        parts = Path(path).parts
        anywhere = line.startswith("**/")
        starts = range(len(parts)) if anywhere else (0,)
        if any(fnmatch.fnmatch("/".join(parts[start:end]), pattern) for start in starts for end in range(1, 9)):
            wanted = line.startswith("!")
    return wanted


def test_the_context_is_the_training_code_and_its_pins() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    inside = {path for path in listed.stdout.splitlines() if in_context(path)}
    assert {path for path in inside if not path.startswith("training/")} == {
        "requirements-training.txt",
        "constraints.txt",
    }
    assert "training/cli.py" in inside
    assert not in_context("training/__pycache__/cli.cpython-311.pyc")
    assert not in_context(".git/config")
    assert not in_context("Pulumi.dev.yaml")


def test_everything_that_the_dockerfile_copies_is_in_the_context() -> None:
    copied = [
        source
        for line in (ROOT / "training" / "Dockerfile").read_text(encoding="utf-8").splitlines()
        if line.startswith("COPY ")
        for source in line.split()[1:-1]
    ]
    assert copied
    for source in copied:
        assert (ROOT / source).exists(), source
        assert in_context(source), source


def test_torch_and_numpy_stay_as_the_base_image_has_them(tmp_path: Path) -> None:
    """Runs the Dockerfile's own step with a `python3` that lists a base image's packages and keeps what it is given."""
    text = (ROOT / "training" / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", "")
    held = next(line for line in text.splitlines() if line.startswith("ARG HELD=")).removeprefix("ARG ")
    step = next(line for line in text.splitlines() if line.startswith("RUN python3 -m pip list")).removeprefix("RUN ")
    for name in ("requirements-training.txt", "constraints.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    base = "numpy==2.1.3\ntorch==2.9.0+cpu\ntorch-neuronx==2.9.0.2.12\nneuronx-cc==2.23.1\npydantic==2.5.0\n"
    (tmp_path / "base.txt").write_text(base)
    fake = tmp_path / "python3"
    fake.write_text(
        '#!/bin/sh\ncase "$3" in list) cat base.txt;; install) cat "$5" > asked; cat "$7" > bounds;; esac\n'
    )
    fake.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run(["sh", "-c", f"{held}; {step}"], cwd=tmp_path, env={"PATH": path}, check=True)
    asked = (tmp_path / "asked").read_text().splitlines()
    bounds = (tmp_path / "bounds").read_text().splitlines()
    names = {line.split("==")[0] for line in asked if "==" in line}
    assert "pydantic" in names
    assert not names & {"torch", "numpy"}
    assert {line for line in bounds if line.startswith(("torch=", "numpy="))} == {"torch==2.9.0+cpu", "numpy==2.1.3"}
    assert "torch-neuronx==2.9.0.2.12" in bounds
    assert "pydantic==2.5.0" not in bounds


def test_the_image_does_not_run_as_root() -> None:
    lines = (ROOT / "training" / "Dockerfile").read_text(encoding="utf-8").splitlines()
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    # A number, so that Kubernetes can tell (runAsNonRoot).
    assert users[-1].split(":")[0].isdigit()
    assert users[-1].split(":")[0] != "0"
