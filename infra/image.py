"""The training image: built from `training/`, pushed to a registry of the stack, referred to by digest."""

from __future__ import annotations

import json
from typing import Any

import pulumi
import pulumi_aws as aws
import pulumi_docker_build as docker_build

from infra.settings import Image
from infra.versions import TRAINING_BASE_IMAGE

KEPT_IMAGES = 20
"""Newest images that the registry keeps; each is several GB, of which most layers are shared."""
CACHE_DAYS = 14
"""For how long a build's layers stay once a newer build has replaced them."""

CACHE_TAG = "layers"
"""The one tag that moves (policy/named_exceptions.py names it)."""


class TrainingImage(pulumi.ComponentResource):
    """The image that every stage runs. Nothing here waits for the cluster: a build takes as long as a control plane."""

    ref: pulumi.Output[str]
    """NAME@sha256:..., for a pod's `image`."""
    repository: aws.ecr.Repository | None
    """The registry of the images; None where `image.prebuilt` names one."""

    def __init__(self, name: str, settings: Image, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("llama-trainium:infra:TrainingImage", name, None, opts)
        if settings.prebuilt:
            self.repository = None
            self.ref = pulumi.Output.from_input(settings.prebuilt)
        else:
            self.repository = _repository(name, _newest_images(KEPT_IMAGES), self)
            # The cache is one tag that every build moves, which the registry of the images does not allow.
            cache = _repository(f"{name}-cache", _untagged(CACHE_DAYS), self, moving_tag=CACHE_TAG)
            self.ref = self._build(name, settings, self.repository, cache)
        self.register_outputs({"ref": self.ref})

    def _build(
        self, name: str, settings: Image, repository: aws.ecr.Repository, cache: aws.ecr.Repository
    ) -> pulumi.Output[str]:
        token = aws.ecr.get_authorization_token_output(opts=pulumi.InvokeOutputOptions(parent=self))
        # Relative to the project's folder: an absolute path would be another one on each machine, and so a rebuild.
        context = settings.context or "."
        layers = cache.repository_url.apply(lambda url: f"{url}:{CACHE_TAG}")
        image = docker_build.Image(
            name,
            context=docker_build.BuildContextArgs(location=context),
            dockerfile=docker_build.DockerfileArgs(location=f"{context}/training/Dockerfile"),
            build_args={"BASE_IMAGE": settings.base or TRAINING_BASE_IMAGE},
            platforms=[docker_build.Platform.LINUX_AMD64],
            # Without a tag. Two builds of one content differ in their digests (times of files), and a registry of
            # immutable tags refuses the second: after an `up` that was interrupted between push and state, say. And an
            # image without a tag is not deleted by Pulumi, which would need credentials that have expired by then.
            push=False,  # by tag, that is
            exports=[
                docker_build.ExportArgs(
                    registry=docker_build.ExportRegistryArgs(
                        names=[repository.repository_url], push_by_digest=True, oci_media_types=True
                    )
                )
            ],
            cache_from=[
                docker_build.CacheFromArgs(registry=docker_build.CacheFromRegistryArgs(ref=layers)),
            ],
            cache_to=[
                docker_build.CacheToArgs(
                    registry=docker_build.CacheToRegistryArgs(
                        ref=layers,
                        mode=docker_build.CacheMode.MAX,
                        # ECR takes a cache in the form of an image only.
                        image_manifest=True,
                        oci_media_types=True,
                        ignore_error=True,  # an image is no worse for a cache that could not be written
                    )
                )
            ],
            registries=[
                docker_build.RegistryArgs(
                    address=token.proxy_endpoint,
                    username=token.user_name,
                    password=pulumi.Output.secret(token.password),
                )
            ],
            # A preview neither needs a Docker daemon nor takes as long as a build.
            build_on_preview=False,
            opts=pulumi.ResourceOptions(parent=self),
        )
        return pulumi.Output.format("{0}@{1}", repository.repository_url, image.digest)


def _repository(
    name: str, rule: dict[str, Any], parent: pulumi.Resource, moving_tag: str | None = None
) -> aws.ecr.Repository:
    """A registry that goes with the stack, images and all: they can be built again. No tag but `moving_tag` moves."""
    moving = None
    if moving_tag is not None:
        moving = [aws.ecr.RepositoryImageTagMutabilityExclusionFilterArgs(filter=moving_tag, filter_type="WILDCARD")]
    repository = aws.ecr.Repository(
        name,
        image_tag_mutability="IMMUTABLE_WITH_EXCLUSION" if moving else "IMMUTABLE",
        image_tag_mutability_exclusion_filters=moving,
        image_scanning_configuration=aws.ecr.RepositoryImageScanningConfigurationArgs(scan_on_push=True),
        encryption_configurations=[aws.ecr.RepositoryEncryptionConfigurationArgs(encryption_type="AES256")],
        force_delete=True,
        opts=pulumi.ResourceOptions(parent=parent),
    )
    aws.ecr.LifecyclePolicy(
        f"{name}-lifecycle",
        repository=repository.name,
        policy=json.dumps({"rules": [rule]}),
        opts=pulumi.ResourceOptions(parent=parent),
    )
    return repository


def _newest_images(count: int) -> dict[str, Any]:
    return {
        "rulePriority": 1,
        "description": f"the newest {count} images",
        "selection": {"tagStatus": "any", "countType": "imageCountMoreThan", "countNumber": count},
        "action": {"type": "expire"},
    }


def _untagged(days: int) -> dict[str, Any]:
    return {
        "rulePriority": 1,
        "description": f"layers that no tag has had for {days} days",
        "selection": {
            "tagStatus": "untagged",
            "countType": "sinceImagePushed",
            "countUnit": "days",
            "countNumber": days,
        },
        "action": {"type": "expire"},
    }
