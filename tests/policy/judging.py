"""Asks every rule of the pack about a resource, as the engine does."""

from __future__ import annotations

from typing import Any

from pulumi_policy import (
    PolicyCustomTimeouts,
    PolicyProviderResource,
    PolicyResourceOptions,
    ResourceValidationArgs,
)
from pulumi_policy.deserialize import deserialize_properties
from pulumi_policy.proxy import unknown_checking_proxy

from policy.rules import POLICIES


def violations(kind: str, wire: Any, provider: dict[str, Any]) -> dict[str, list[str]]:
    """The rules that a resource breaks, each with what they say.

    `wire` are its inputs as the engine sends them, with secrets marked; `provider` are those of its provider.
    """
    options = PolicyResourceOptions(False, [], None, [], PolicyCustomTimeouts(0, 0, 0), [])
    behind = PolicyProviderResource("pulumi:providers:aws", unknown_checking_proxy(provider), "urn", "aws")

    def args(secrets: bool) -> ResourceValidationArgs:
        given = unknown_checking_proxy(deserialize_properties(wire, secrets))
        return ResourceValidationArgs(kind, given, f"urn:pulumi:dev::planted::{kind}::x", "x", options, behind)

    found: dict[str, list[str]] = {}
    for policy in POLICIES:
        said: list[str] = []
        policy.remediate(args(secrets=True))  # the engine's order
        policy.validate(args(secrets=False), lambda line, urn=None, said=said: said.append(line))
        if said:
            found[policy.name] = said
    return found
