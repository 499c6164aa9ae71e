"""What the rules let pass by name, each with its reason: the one place to look for, and to argue about."""

from __future__ import annotations

from collections.abc import Mapping

PRIVILEGED_DAEMONS: Mapping[tuple[str, str], str] = {
    ("monitoring", "neuron-monitor"): "it reads the devices of all pods of a node, which a device plugin hands to one",
}
"""Namespace and name of a DaemonSet of ours that may be privileged. The others (device plugins of Neuron and EFA, node
problem detector, CNI, CSI, node-exporter, Fluent Bit) come with pinned charts and EKS add-ons, not as objects of the
program, so that no rule sees them."""

_NO_DIGEST_YET = (
    "its registry could not be asked for the digest where this was written (docs/pull-requests.md); "
    "the name has the version, so that the next one has to be argued for again"
)

UNPINNED_IMAGES: Mapping[str, str] = {
    "llama-trainium:local": "made by `make image` and loaded into the nodes of a local cluster: a digest is what a "
    "registry gives, and it has been in none",
    "docker.io/mpioperator/mpi-operator:0.8.2": _NO_DIGEST_YET,
    "public.ecr.aws/neuron/neuron-monitor:1.3.0": _NO_DIGEST_YET,
}
"""Images that pods may name without a digest, by their whole name."""

MOVING_TAGS: Mapping[str, str] = {
    "layers": "the build cache, which every build replaces: no pod runs it, and a build checks each layer's digest",
}
"""Tags that an ECR repository may leave mutable (imageTagMutabilityExclusionFilters)."""
