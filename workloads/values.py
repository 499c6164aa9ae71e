"""Kinds of values that settings of workloads have, each with the words that refuse the others."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from training.messages import matching

DIGEST_LENGTH = 8
MAX_JOB_NAME = 47
"""Characters of a RayJob's name that KubeRay takes: it makes the names of clusters, pods and services from it."""
MAX_NAME = MAX_JOB_NAME - len("-precompile-") - DIGEST_LENGTH

Seconds = Annotated[int, Field(ge=1, le=2**31 - 1)]  # the API's int32
Retries = Annotated[int, Field(ge=0, le=100)]
Nodes = Annotated[int, Field(ge=0, le=1000)]
Cpus = Annotated[float, Field(ge=0.01, le=1024)]
Gib = Annotated[float, Field(ge=0.05, le=32768)]
_LABEL = "of a-z, 0-9 and -, a letter first and no - last"
Name = Annotated[str, AfterValidator(matching(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", f"at most 40 {_LABEL}"))]
JobPrefix = Annotated[
    str,
    AfterValidator(
        matching(
            rf"[a-z]([a-z0-9-]{{0,{MAX_NAME - 2}}}[a-z0-9])?",
            f"at most {MAX_NAME} {_LABEL}: with the stage and a digest behind it, it is the name of a RayJob, "
            f"which has at most {MAX_JOB_NAME}",
        )
    ),
]
Host = Annotated[
    str,
    AfterValidator(
        matching(
            r"(?=.{1,253}$)([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z]{2,63}", "a host name such as tb.example.com"
        )
    ),
]
CertificateArn = Annotated[
    str,
    AfterValidator(
        matching(
            r"arn:aws:acm:[a-z0-9-]+:\d{12}:certificate/[0-9a-f-]{36}",
            "the ARN of a certificate, such as arn:aws:acm:us-west-2:123456789012:certificate/...",
        )
    ),
]
RedisAddress = Annotated[
    str,
    AfterValidator(
        matching(
            r"(rediss?://)?[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?:\d{1,5}", "HOST:PORT or rediss://HOST:PORT"
        )
    ),
]
Quantity = Annotated[
    str, AfterValidator(matching(r"\d{1,9}(\.\d{1,3})?(m|[kMGTP]|[KMGTP]i)?", "a quantity such as 64 or 512Gi"))
]
