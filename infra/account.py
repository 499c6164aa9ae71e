"""An AWS account as the commands ask it: boto3's clients of one region, and what is the stack's own in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import boto3
from botocore.config import Config

from infra.settings import PROJECT

Clients = Callable[[str], Any]
"""boto3's client of a service, by its name."""

_CONFIG = Config(connect_timeout=10, read_timeout=30, retries={"mode": "standard", "max_attempts": 5})


def clients_of(region: str) -> Clients:
    """Clients in a region, with the credentials of the environment."""
    session = boto3.Session(region_name=region)
    return cache(lambda service: session.client(service, config=_CONFIG))


def pages(client: Any, operation: str, **asked: Any) -> Iterator[dict[str, Any]]:
    """All pages of an answer."""
    yield from client.get_paginator(operation).paginate(**asked)


def cluster_of(stack: str) -> str:
    """The name of the stack's EKS cluster (infra.network.cluster_name, which asks Pulumi)."""
    return f"{PROJECT}-{stack}"


def tag_filters(stack: str) -> list[dict[str, Any]]:
    """EC2's filters for what has the tags of the stack."""
    return [{"Name": "tag:project", "Values": [PROJECT]}, {"Name": "tag:stack", "Values": [stack]}]


def is_own(resource: Mapping[str, Any], stack: str) -> bool:
    """Whether a resource, as AWS describes it, has the tags of the stack."""
    tags = {tag["Key"]: tag["Value"] for tag in resource.get("Tags") or []}
    return tags.get("project") == PROJECT and tags.get("stack") == stack
