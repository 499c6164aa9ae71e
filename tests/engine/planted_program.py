"""A Pulumi program that registers every planted resource, the good ones and the bad: test_policies.py runs it.

The name of each says which it is: RULE/NUMBER/WHAT, with `good` for what breaks no rule.
"""

import json
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), *(str(TESTS / room) for room in ("infra", "policy"))]

import pulumi  # noqa: E402 (after the path)
from planted import TAGS  # noqa: E402
from planted_pods import CASES  # noqa: E402
from pulumi_policy import Secret  # noqa: E402


def as_input(value: object) -> object:
    """Props as the SDK takes them: planted secrets are Pulumi's."""
    if isinstance(value, Secret):
        return pulumi.Output.secret(value.value)
    if isinstance(value, dict):
        return {key: as_input(each) for key, each in value.items()}
    return [as_input(each) for each in value] if isinstance(value, list) else value


tagged = pulumi.ProviderResource("aws", "tagged", {"defaultTags": json.dumps({"tags": TAGS})})
untagged = pulumi.ProviderResource("aws", "untagged", {})
others = {package: pulumi.ProviderResource(package, package, {}) for package in ("kubernetes", "docker-build")}

for number, case in enumerate(CASES):
    provider = others.get(case.type.split(":")[0], tagged if case.default_tags else untagged)
    for what, props in {"good": case.good, **case.broken()}.items():
        pulumi.CustomResource(
            case.type,
            f"{case.rule}/{number}/{what}",
            {key: as_input(value) for key, value in props.items()},
            pulumi.ResourceOptions(provider=provider),
        )
