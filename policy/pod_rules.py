"""Rules about pods of ours, wherever a pod is described: a Deployment, a RayJob, an MPIJob, a kind still unknown.

A pod is what has a list `containers`. Those that a Helm chart makes are not seen: the engine registers the release, and
Helm makes the rest. Charts are pinned (infra/versions.py), and their values are looked at for :latest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from policy.named_exceptions import PRIVILEGED_DAEMONS, UNPINNED_IMAGES
from policy.plain_resource import UNKNOWN, Props, Resource, entries, everything, section

BY_DIGEST = re.compile(r".+@sha256:[0-9a-f]{64}")
IMAGE = re.compile(r"[\w.-]+(:\d+)?(/[\w.-]+)*(:[\w.-]+)?(@sha256:[0-9a-f]{64})?")
CONTAINERS = ("initContainers", "containers", "ephemeralContainers")
HOST = ("hostNetwork", "hostPID", "hostIPC")

BASELINE_CAPABILITIES = frozenset(
    {
        "AUDIT_WRITE",
        "CHOWN",
        "DAC_OVERRIDE",
        "FOWNER",
        "FSETID",
        "KILL",
        "MKNOD",
        "NET_BIND_SERVICE",
        "SETFCAP",
        "SETGID",
        "SETPCAP",
        "SETUID",
        "SYS_CHROOT",
    }
)
"""What a container may add without being more than a pod, by the profile `baseline` of Kubernetes' Pod Security
Standards (https://kubernetes.io/docs/concepts/security/pod-security-standards/, read 2026-11-21)."""


def pods(resource: Resource) -> Iterator[tuple[str, Props]]:
    """The specs of pods in an object, each with its path."""
    if resource.in_kubernetes:
        for path, value in everything(resource.props):
            if isinstance(value, dict) and isinstance(value.get("containers"), list):
                yield path, value


def containers(resource: Resource) -> Iterator[tuple[str, Props]]:
    """The containers of an object's pods, each with its path."""
    for path, pod in pods(resource):
        for key in CONTAINERS:
            for each in entries(pod.get(key)):
                yield f"{path}.{key}[{each.get('name')}]", each


def images_without_digest(resource: Resource) -> Iterator[str]:
    """Images that may be another tomorrow, but for those that policy/named_exceptions.py names."""
    for path, each in containers(resource):
        image = each.get("image")
        if image is UNKNOWN or image in UNPINNED_IMAGES:
            continue
        if not isinstance(image, str) or not BY_DIGEST.fullmatch(image):
            yield f"{path}.image: {image}, expected NAME@sha256:..."


def latest_images(resource: Resource) -> Iterator[str]:
    """The tag latest in pods, in the values of charts and in image builds; an image without a tag means it."""
    for path, each in containers(resource):
        image = each.get("image")
        if isinstance(image, str) and "@" not in image and ":" not in image.rpartition("/")[2]:
            yield f"{path}.image: {image}, which means :latest, expected a digest"
    if not resource.type.startswith(("kubernetes:", "docker-build:")):
        return
    for path, value in everything(resource.props):
        key = re.sub(r"\[\d+\]$", "", path).rpartition(".")[2].lower()
        is_tag = value == "latest" and key in ("tag", "imagetag", "tags")
        if is_tag or (isinstance(value, str) and IMAGE.fullmatch(value) and ":latest" in value):
            yield f"{path}: {value}, expected a version or a digest"


def unbounded(resource: Resource) -> Iterator[str]:
    """Containers without requests for CPU and memory, or without a limit of memory.

    A limit of CPU is not asked for: without one a container has what others leave, with one it waits beside idle cores.
    Memory that is taken is not given back, and without a limit the node pays.
    """
    for path, each in containers(resource):
        for kind, names in (("requests", ("cpu", "memory")), ("limits", ("memory",))):
            given = section(each, "resources", kind)
            if given is not UNKNOWN and (missing := [name for name in names if not given.get(name)]):
                yield f"{path}.resources.{kind}: without {' and '.join(missing)}, expected it"


def privileged(resource: Resource) -> Iterator[str]:
    """Pods that are root on their node, or near it, but for the DaemonSets that policy/named_exceptions.py names."""
    if resource.type.endswith(":DaemonSet") and _is_named(section(resource.props, "metadata")):
        return
    for path, pod in pods(resource):
        for key in HOST:
            if pod.get(key) is True:
                yield f"{path}.{key}: true, expected it only in a DaemonSet of policy/named_exceptions.py"
        for volume in entries(pod.get("volumes")):
            if volume.get("hostPath") is not None:
                yield f"{path}.volumes[{volume.get('name')}].hostPath: a folder of the node, expected a claim"
    for path, each in containers(resource):
        context = section(each, "securityContext")
        if context is UNKNOWN:
            continue
        if context.get("privileged") is True:
            yield f"{path}.securityContext.privileged: true, expected a device plugin, or policy/named_exceptions.py"
        added: list[Any] = entries(section(context, "capabilities", "add"))
        if beyond := sorted(set(added) - BASELINE_CAPABILITIES):
            yield f"{path}.securityContext.capabilities.add: {', '.join(beyond)}, expected none beyond `baseline`"


def _is_named(metadata: Any) -> bool:
    """Whether a DaemonSet is one of policy/named_exceptions.py; one whose namespace is not known yet may be."""
    found = metadata if isinstance(metadata, dict) else {}
    return any(
        found.get("name") == name and found.get("namespace") in (namespace, UNKNOWN)
        for namespace, name in PRIVILEGED_DAEMONS
    )
