"""What a program registered, as the tests ask about it: resources by type and name, and what comes before what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pulumi.runtime.proto import resource_pb2


@dataclass
class Registered:
    """One resource as the program asked for it. Inputs and outputs have the wire's (camelCase) keys."""

    type: str
    name: str
    urn: str
    id: str
    inputs: dict[str, Any]
    outputs: dict[str, Any]
    custom: bool
    remote: bool
    parent: str
    provider: str
    """URN of the provider; empty for the default one and for components."""
    dependencies: set[str]
    """URNs, those of `depends_on` and those behind the inputs."""
    secrets: set[str]
    """The inputs that hold a secret anywhere in them."""
    request: resource_pb2.RegisterResourceRequest
    """The rest of the options: ignoreChanges, retainOnDelete, deleteBeforeReplace, customTimeouts, ..."""

    def __repr__(self) -> str:
        return f"{self.type} {self.name}"


@dataclass
class Recorded:
    """What a program registered, in order, and what it exported."""

    resources: list[Registered] = field(default_factory=list)
    exports: dict[str, Any] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Registered]:
        return iter(self.resources)

    def of(self, kind: str, name: str | None = None) -> list[Registered]:
        """All resources of a type, whose name ends in `name` if it is given."""
        return [each for each in self if each.type == kind and (name is None or each.name.endswith(name))]

    def one(self, kind: str, name: str | None = None) -> Registered:
        """The only resource of that type and name."""
        found = self.of(kind, name)
        assert len(found) == 1, f"{kind} {name or ''}: {found} of {sorted({each.type for each in self})}"
        return found[0]

    def by_urn(self, urn: str) -> Registered:
        """The resource with a URN."""
        return next(each for each in self if each.urn == urn)

    def before(self, resource: Registered) -> set[str]:
        """URNs of all that must exist before `resource` is made, and are deleted after it: dependencies of
        dependencies, its provider and its parents; for a dependency on a remote component, what is in it."""
        by_urn = {each.urn: each for each in self}
        seen: set[str] = set()
        todo = [resource.urn]
        while todo:
            each = by_urn.get(todo.pop())
            if each is None:  # the stack itself
                continue
            needed = each.dependencies | {each.parent, each.provider}
            if each.remote and each is not resource:
                needed |= {child.urn for child in self if child.parent == each.urn}
            todo += needed - seen
            seen |= needed
        return seen - {"", resource.urn}

    def waits_for(self, resource: Registered, other: Registered) -> bool:
        """Whether `resource` is made after `other` and deleted before it."""
        return other.urn in self.before(resource)

    def inside(self, resource: Registered, kind: str) -> bool:
        """Whether a component of type `kind` is among the resource's parents."""
        return f"{kind}$" in resource.urn.split("::")[2] + "$"
