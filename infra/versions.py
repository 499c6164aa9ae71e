"""Every version of the platform: charts, operators, images.

Nothing else names a version: an upgrade is a change of this file (docs/operations.md says in which order).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chart:
    """A Helm chart: its name, the repository (https:// or oci://) it is published in, its version."""

    name: str
    repository: str
    version: str


# Kubernetes: every pin below was chosen for these. Volcano 1.15's matrix ends with 1.35, and the standard support of 1.34
# ends on 2026-12-02.
KUBERNETES_VERSIONS = ("1.35",)

# Operators
KUBERAY = Chart("kuberay-operator", "https://ray-project.github.io/kuberay-helm", "1.7.0")
VOLCANO = Chart("volcano", "https://volcano-sh.github.io/helm-charts", "1.15.1")
MPI_OPERATOR = "v0.8.2"

# Devices: NEURON_PLUGIN is the chart of Neuron SDK 2.31.0.
EFA_PLUGIN = Chart("aws-efa-k8s-device-plugin", "https://aws.github.io/eks-charts", "v0.5.30")
NEURON_PLUGIN = Chart("neuron-helm-chart", "oci://public.ecr.aws/neuron", "1.9.0")

# Ingress
LOAD_BALANCER_CONTROLLER = Chart("aws-load-balancer-controller", "https://aws.github.io/eks-charts", "3.5.0")
