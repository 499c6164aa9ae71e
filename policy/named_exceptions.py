"""What the rules let pass by name, each with its reason: the one place to look for, and to argue about."""

from __future__ import annotations

from collections.abc import Mapping

PRIVILEGED_DAEMONS: Mapping[tuple[str, str], str] = {}
"""Namespace and name of a DaemonSet of ours that may be privileged. None is: devices come from device plugins, whose
own DaemonSets (Neuron, EFA, node problem detector, CNI, CSI) come with pinned charts and EKS add-ons, not with objects
of the program, so that no rule sees them."""

UNPINNED_IMAGES: Mapping[str, str] = {
    "llama-trainium:local": "made by `make image` and loaded into the nodes of a local cluster: a digest is what a "
    "registry gives, and it has been in none",
    "docker.io/mpioperator/mpi-operator:0.8.2": "no registry could be asked for its digest yet (docs/policy.md); the "
    "name has the version, so that the next one has to be argued for again",
}
"""Images that pods may name without a digest, by their whole name."""

MOVING_TAGS: Mapping[str, str] = {
    "layers": "the build cache, which every build replaces: no pod runs it, and a build checks each layer's digest",
}
"""Tags that an ECR repository may leave mutable (imageTagMutabilityExclusionFilters)."""
