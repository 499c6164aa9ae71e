"""Kinds of values that settings have, each with the words that refuse the others.

A validator's message goes behind the key and the value: `llama-trainium:network.cidr: 10.0.0.1/8, expected ...`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from ipaddress import IPv4Network
from typing import Annotated, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from infra.catalog import INSTANCE_TYPES, REGIONS
from infra.versions import KUBERNETES_VERSIONS
from training.messages import expected_one_of, matching

T = TypeVar("T")

PRIVATE_RANGES = tuple(map(IPv4Network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")))
CARRIER_RANGE = IPv4Network("100.64.0.0/10")
"""Shared address space of carriers (RFC 6598), which a VPC of any private range may take as a second one."""

LOG_RETENTION_DAYS = (
    1,
    3,
    5,
    7,
    14,
    30,
    60,
    90,
    120,
    150,
    180,
    365,
    400,
    545,
    731,
    1096,
    1827,
    2192,
    2557,
    2922,
    3288,
    3653,
)
"""What CloudWatch's PutRetentionPolicy takes."""


def not_shown(message: str) -> PydanticCustomError:
    """An error whose message stands without the value, which may hold a secret."""
    return PydanticCustomError("not_shown", "{message}", {"message": message})


def private_range(network: IPv4Network) -> IPv4Network | None:
    """The RFC 1918 range that holds `network`; None for one that is public or in CARRIER_RANGE."""
    return next((wide for wide in PRIVATE_RANGES if network.subnet_of(wide)), None)


def plain(value: object, field: FieldInfo) -> object:
    """Refuse what pydantic would take and no one means: YAML's `yes` as 1, text that is empty or cannot be shown."""
    if isinstance(value, bool) and field.annotation is int:
        raise ValueError("expected a whole number")
    if isinstance(value, str) and (not value.isprintable() or not (value.strip() or field.default == "")):
        raise ValueError("expected printable text")
    return value


def _cidr(value: object) -> object:
    if isinstance(value, IPv4Network):
        return value
    if not isinstance(value, str) or not re.fullmatch(r"[\d.]+/\d+", value):
        raise ValueError("expected a network such as 10.40.0.0/20")
    try:
        network = IPv4Network(value, strict=False)
    except ValueError:
        raise ValueError("expected a network such as 10.40.0.0/20") from None
    if str(network) != value:
        raise ValueError(f"expected {network}: a network begins where its prefix ends")
    return network


def _one_of(values: Sequence[T]) -> Callable[[T], T]:
    def check(value: T) -> T:
        if value not in values:
            known = [str(one) for one in values]
            near = "" if isinstance(value, int) else str(value)  # 31 is not a misspelt 731
            raise ValueError(expected_one_of(near, known).removeprefix(", "))
        return value

    return check


def _distinct(values: list[T]) -> list[T]:
    if twice := [value for value, count in Counter(map(str, values)).items() if count > 1]:
        raise ValueError(f"expected each once, found {twice[0]} twice")
    return values


def _mirror(value: str) -> str:
    try:
        parts = urlsplit(value)
        has_password = "@" in parts.netloc
        known = (parts.scheme in ("https", "oci") or _on_this_machine(parts.scheme, parts.hostname)) and parts.hostname
    except ValueError:  # such as an address with half of an IPv6 host
        has_password, known = "@" in value, None
    if has_password:
        raise not_shown("has a user in it, expected an address without one: it would be in every release's state")
    if not known or parts.query or parts.fragment:
        raise ValueError("expected https://HOST/PATH or oci://HOST/PATH (http:// on a loopback address only)")
    return value.rstrip("/")


def _on_this_machine(scheme: str, host: str | None) -> bool:
    return scheme == "http" and (host == "localhost" or re.fullmatch(r"127(\.\d{1,3}){3}", host or "") is not None)


def _x86(value: str) -> str:
    form = re.fullmatch(
        r"([a-z]+)(\d+)([a-z0-9-]*)\.(metal|[a-z0-9-]*(?:small|medium|large|xlarge|micro|nano|metal))", value
    )
    if not form:
        raise ValueError("expected an instance type such as m7i.2xlarge")
    if "g" in form[3] or form[1] + form[2] == "a1":  # Graviton's families say so behind their number: m7g, c7gn, t4g
        raise ValueError("expected an x86 type such as m7i.2xlarge: images and AMIs are built for x86")
    return value


def _token(value: SecretStr) -> SecretStr:
    if not re.fullmatch("[!-~]+", value.get_secret_value()):
        raise ValueError("expected one word of ASCII characters")
    return value


def _version(value: object) -> object:
    """YAML reads an unquoted 1.35 as a number."""
    return str(value) if isinstance(value, float) else value


Cidr = Annotated[IPv4Network, BeforeValidator(_cidr)]
Distinct = AfterValidator(_distinct)
Region = Annotated[str, AfterValidator(_one_of(REGIONS))]
KubernetesVersion = Annotated[str, BeforeValidator(_version), AfterValidator(_one_of(KUBERNETES_VERSIONS))]
LogRetention = Annotated[int, AfterValidator(_one_of(LOG_RETENTION_DAYS))]
AcceleratorType = Annotated[str, AfterValidator(_one_of(tuple(INSTANCE_TYPES)))]
X86Type = Annotated[str, AfterValidator(_x86)]
Throughput = Annotated[int, AfterValidator(_one_of((125, 250, 500, 1000)))]
Mirror = Annotated[str, AfterValidator(_mirror)]
GroupName = Annotated[
    str,
    AfterValidator(
        matching(r"[a-z]([a-z0-9-]{0,18}[a-z0-9])?", "at most 20 of a-z, 0-9 and -, a letter first and no - last")
    ),
]
ReservationId = Annotated[
    str, AfterValidator(matching(r"cr-([0-9a-f]{8}|[0-9a-f]{17})", "an id such as cr-0123456789abcdef0"))
]
Admin = Annotated[
    str,
    AfterValidator(
        matching(
            r"arn:aws:iam::\d{12}:(role|user)/[\w+=,.@/-]{1,512}",
            "the ARN of an IAM role or user, such as arn:aws:iam::123456789012:role/Admin",
        )
    ),
]
ByDigest = Annotated[
    str,
    AfterValidator(
        matching(r"[a-z0-9][\w.:/-]*@sha256:[0-9a-f]{64}", "a reference by digest: REGISTRY/NAME@sha256:...")
    ),
]
ByTag = Annotated[
    str,
    AfterValidator(
        matching(
            r"[a-z0-9][\w./-]*(:\d+/[\w./-]+)?(:(?!latest$)[\w.-]+|(:[\w.-]+)?@sha256:[0-9a-f]{64})",
            "a reference with a tag other than latest, or with a digest",
        )
    ),
]
TagValue = Annotated[
    str,
    AfterValidator(
        matching(r"[\w .:/=+@-]{0,256}", "at most 256 letters, digits, spaces and _.:/=+-@, as AWS takes", re.UNICODE)
    ),
]
Token = Annotated[SecretStr, AfterValidator(_token)]
