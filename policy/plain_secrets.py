"""No secret in plain: what looks like a credential, or is where credentials go, must be a Pulumi secret.

The SDK hands a policy's `validate` every value opened, and does not say which was a secret. `remediate` is handed the
same resource before, with its secrets marked. So this policy looks there, changes nothing, and says in `validate` what
it saw; a violation of a policy of the level `remediate` is reported as a mandatory one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pulumi_policy import (
    EnforcementLevel,
    ReportViolation,
    ResourceValidationArgs,
    ResourceValidationPolicy,
)
from pulumi_policy import proxy as sdk

UNKNOWN = frozenset(value for name, value in vars(sdk).items() if name.startswith("UNKNOWN_"))
"""What stands for a value that a preview does not know: whether it is a secret is not known either."""

LOOKS_LIKE = {
    "an AWS access key": re.compile(r"\b(AKIA|ASIA)[0-9A-Z]{16}\b"),
    "a private key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
    "a Hugging Face token": re.compile(r"\bhf_[A-Za-z0-9]{20,}\b"),
    "a GitHub token": re.compile(r"\b(gh[pousr]_[A-Za-z0-9]{36}|github_pat_\w{40,})\b"),
}
GOES_IN = re.compile(
    r"(?i)(password|passwd|passphrase|(secret|private|api|access)_?key|(access|auth)_?token|secret_?string)$"
)
"""Names of inputs that hold a credential and nothing else."""
VARIABLE = re.compile(r"(TOKEN|PASSWORD|SECRET|_KEY)$")
"""Names of environment variables that do."""
KUBERNETES_SECRET, DATA = "kubernetes:core/v1:Secret", ("data", "stringData")


class NoPlainSecrets(ResourceValidationPolicy):
    """The policy; see the module."""

    def __init__(self) -> None:
        super().__init__(
            "no-plain-secrets",
            "No secret is in a resource's inputs in plain, and so in the state.",
            enforcement_level=EnforcementLevel.REMEDIATE,
        )
        self._found: dict[str, list[str]] = {}

    def remediate(self, args: ResourceValidationArgs) -> None:
        """Look, and leave the resource as it is."""
        inside = args.resource_type == KUBERNETES_SECRET
        self._found[args.urn] = list(plain_secrets(args.props, secret_data=inside))

    def validate(self, args: ResourceValidationArgs, report_violation: ReportViolation) -> None:
        """Say what was seen."""
        for line in self._found.pop(args.urn, []):
            report_violation(line, None)


def plain_secrets(props: Any, path: str = "", secret_data: bool = False) -> Iterator[str]:
    """A line, without the value, for each plain secret in a resource's inputs as `remediate` gets them.

    `secret_data`: they are those of a Kubernetes Secret, whose data are all meant to be secret.
    """
    raw = props if isinstance(props, dict | list) else props["__target"]  # the SDK's own mappings open secrets
    for key, value in raw.items() if isinstance(raw, dict) else enumerate(raw):
        where = f"{path}[{key}]" if isinstance(raw, list) else f"{path}.{key}".lstrip(".")
        if isinstance(value, str):
            why = None if value in UNKNOWN else _why(str(key), value, raw, secret_data and path in DATA)
            if why:
                yield f"{where}: {why} in plain, expected a Pulumi secret (pulumi.Output.secret)"
        elif isinstance(value, Mapping | list):
            yield from plain_secrets(value, where, secret_data)


def _why(key: str, value: str, around: Any, data_of_secret: bool) -> str | None:
    """What a plain text is taken for; None where it may be plain."""
    if not value:
        return None
    if data_of_secret:
        return "data of a Secret"
    for what, pattern in LOOKS_LIKE.items():
        if pattern.search(value):
            return what
    if GOES_IN.search(key):
        return "a credential by its name"
    if key == "value" and isinstance(around, dict) and VARIABLE.search(str(around.get("name", ""))):
        return f"the variable {around['name']}"
    return None
