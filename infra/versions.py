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


# Kubernetes: every pin below was chosen for these. Volcano 1.15's matrix ends with 1.35, and the standard support of
# 1.34 ends on 2026-12-02.
KUBERNETES_VERSIONS = ("1.35",)

# EKS's add-ons: the defaults for 1.35 by `aws eks describe-addon-versions` on 2026-08-04, as public stacks of that day
# pin them; the FSx driver's is seen in public stacks without that command.
EKS_ADDONS = {
    "aws-ebs-csi-driver": "v1.63.1-eksbuild.1",
    "aws-fsx-csi-driver": "v1.9.0-eksbuild.1",
    "coredns": "v1.13.2-eksbuild.11",
    "eks-pod-identity-agent": "v1.3.10-eksbuild.3",
    "kube-proxy": "v1.35.3-eksbuild.17",
    "metrics-server": "v0.9.0-eksbuild.5",
    "vpc-cni": "v1.22.3-eksbuild.1",
}

# AMIs of all nodes: a release of github.com/awslabs/amazon-eks-ami has AL2023's STANDARD and NEURON variants alike.
# After v20260714, whose source image got its ENA driver back; before v20261003, which warns of kernel panics (#2845).
AMI_RELEASE = "1.35.6-20260728"

# Autoscalers: cluster-autoscaler's chart brings the image of its own version, 1.35.0, made for Kubernetes 1.35.
CLUSTER_AUTOSCALER = Chart("cluster-autoscaler", "https://kubernetes.github.io/autoscaler", "9.59.0")
KARPENTER = Chart("karpenter", "oci://public.ecr.aws/karpenter", "1.14.1")
KARPENTER_CRD = Chart("karpenter-crd", KARPENTER.repository, KARPENTER.version)

# Operators
KUBERAY = Chart("kuberay-operator", "https://ray-project.github.io/kuberay-helm", "1.7.0")
VOLCANO = Chart("volcano", "https://volcano-sh.github.io/helm-charts", "1.15.1")
MPI_OPERATOR = "0.8.2"

# Devices: NEURON_PLUGIN is the chart of Neuron SDK 2.31.0.
EFA_PLUGIN = Chart("aws-efa-k8s-device-plugin", "https://aws.github.io/eks-charts", "v0.5.30")
NEURON_PLUGIN = Chart("neuron-helm-chart", "oci://public.ecr.aws/neuron", "1.9.0")

# Observability: each chart brings the images of its own release. kube-prometheus-stack: prometheus-operator 0.93,
# Grafana, node-exporter 1.12, kube-state-metrics 2.20. Their metrics are listed in tests/infra/exporters.yaml.
PROMETHEUS = Chart("kube-prometheus-stack", "https://prometheus-community.github.io/helm-charts", "88.5.3")
CLOUDWATCH_EXPORTER = Chart("prometheus-yet-another-cloudwatch-exporter", PROMETHEUS.repository, "0.47.0")
FLUENT_BIT = Chart("fluent-bit", "https://fluent.github.io/helm-charts", "0.58.1")
NEURON_MONITOR = "public.ecr.aws/neuron/neuron-monitor:1.3.0"

# Ingress
LOAD_BALANCER_CONTROLLER = Chart("aws-load-balancer-controller", "https://aws.github.io/eks-charts", "3.5.0")

# Training: the newest Neuron SDK that AWS advises for training on Trn1 (torch-neuronx 2.9.0.2.12, Python 3.12).
TRAINING_BASE_IMAGE = "public.ecr.aws/neuron/pytorch-training-neuronx:2.9.0-neuronx-py312-sdk2.28.0-ubuntu24.04"
