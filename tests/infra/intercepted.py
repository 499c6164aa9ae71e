"""Answers to calls of boto3 that moto has none for, or has another one: given before moto sees the request.

    with intercepted({"DescribeCapacityReservations": {"CapacityReservations": []}, "GetServiceQuota": refused("X")}):

botocore still checks the parameters of the call against its model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import boto3
import botocore.session

Answer = Mapping[str, Any] | Callable[[dict[str, Any]], Mapping[str, Any]]


def refused(code: str, message: str = "no") -> dict[str, Any]:
    """The answer that botocore raises as a ClientError."""
    return {"Error": {"Code": code, "Message": message}}


_one_loader = cache(botocore.session.create_loader)


@contextmanager
def intercepted(answers: Mapping[str, Answer]) -> Iterator[list[str]]:
    """Give these answers to calls of boto3 clients that are made within; yields the operations as they are called.

    An answer may be a function of the call's parameters, as botocore serialises them.
    """
    called: list[str] = []

    def answer(model: Any, params: dict[str, Any], **kwargs: Any) -> tuple[Any, Mapping[str, Any]] | None:
        found = answers.get(model.name)
        if found is None:
            return None
        called.append(model.name)
        said = found(params) if callable(found) else found
        return SimpleNamespace(status_code=400 if "Error" in said else 200, headers={}), said

    original, loader = boto3.Session.client, botocore.session.create_loader

    def client(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(self, *args, **kwargs)
        made.meta.events.register_first("before-call.*.*", answer)
        return made

    boto3.Session.client = client  # type: ignore[method-assign]
    botocore.session.create_loader = _one_loader  # every session would read EC2's 2 MB of descriptions anew
    try:
        yield called
    finally:
        boto3.Session.client = original  # type: ignore[method-assign]
        botocore.session.create_loader = loader
