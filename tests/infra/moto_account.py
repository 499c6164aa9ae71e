"""Hands what a program registered to boto3, against moto: what AWS refuses is refused here.

    account = Account("us-west-2")
    account.create(recorded)          # raises botocore's ClientError or ParamValidationError

A translator per type turns Pulumi's inputs into the call that its provider makes. Ids and ARNs that the tests' engine
made up are replaced by moto's as they come, so a reference to what is not there fails too.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import boto3
import moto_network  # noqa: F401 - registers its translators
import moto_services  # noqa: F401
from moto_translators import TRANSLATORS
from recorded import Recorded, Registered

ATTACHMENT = "aws:iam/rolePolicyAttachment:RolePolicyAttachment"

# Of the services below, what moto (5.2) has no such call for.
NOT_IN_MOTO = {
    "aws:fsx/dataRepositoryAssociation:DataRepositoryAssociation",
}
SERVICES = ("ecr", "fsx", "iam", "kms", "s3", "sqs", "vpc")
NETWORK = ("vpc", "subnet", "route", "securityGroup", "internetGateway", "natGateway", "eip", "flowLog", "defaultSec")


class Account:
    """An account of moto's in one region."""

    def __init__(self, region: str, aws_policies: bool = False) -> None:
        """Policies that AWS manages are attached only where moto was told to load them (`aws_policies`)."""
        self.region, self.aws_policies = region, aws_policies
        self.real: dict[str, str] = {}
        """Ids and ARNs of the tests' engine -> moto's."""
        self.client = cache(lambda service: boto3.client(service, region_name=self.region))

    def create(self, resources: Recorded | Iterable[Registered]) -> list[Registered]:
        """Create all resources that have a translator, in the order of the program; gives them back."""
        created = []
        for resource in resources:
            translate = TRANSLATORS.get(resource.type)
            if translate is None or (resource.type == ATTACHMENT and not self.aws_policies):
                continue
            try:
                made = translate(self, self._with_real_ids(resource.inputs), resource)
            except Exception as error:
                error.add_note(f"creating {resource}")
                raise
            self.real.update(made or {})
            created.append(resource)
        return created

    def _with_real_ids(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._with_real_ids(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self._with_real_ids(inner) for inner in value]
        if isinstance(value, str):
            for made_up, real in self.real.items():
                value = value.replace(made_up, real)
        return value


def of_moto(resource: Registered) -> bool:
    """Whether a resource belongs to the services that are created here."""
    package, _, rest = resource.type.partition(":")
    service, _, kind = rest.partition("/")
    return package == "aws" and (service in SERVICES or (service == "ec2" and kind.startswith(NETWORK)))
