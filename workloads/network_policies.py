"""Who may talk to the pods of the namespace: the namespace itself, KubeRay's operator, and who looks at the pages.

What is enforced is up to the cluster's network plugin (infra/ switches it on in the VPC CNI). `kubectl port-forward`
goes through the kubelet into the pod and is not a matter of these policies, nor are the kubelet's probes.
"""

from __future__ import annotations

from typing import Any

from workloads.labels import DASHBOARD_PORT

Spec = Any  # of a NetworkPolicy, as plain data

RAY_HEAD = {"ray.io/node-type": "head"}
KUBERAY = {"app.kubernetes.io/name": "kuberay-operator"}
"""A label of the operator's pod, by its chart."""


def network_policies() -> dict[str, Spec]:
    """Name -> spec of the policies that every namespace of ours has.

    Ray runs whatever it is sent by whoever reaches it (its token is the second lock), and MPI's sshd listens too. What
    pods call is not limited: data and tokenizers come from anywhere, and EFA does not pass through IP.
    """
    return {
        # All pods of the namespace are selected, so whatever no policy names is refused.
        "within-the-namespace": {
            "podSelector": {},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": {}}]}],
        },
        # The operator asks the dashboard how a job is. With `operators: present` its namespace is anyone's choice.
        "operator-to-ray": {
            "podSelector": {"matchLabels": RAY_HEAD},
            "policyTypes": ["Ingress"],
            "ingress": [
                {
                    "from": [{"namespaceSelector": {}, "podSelector": {"matchLabels": KUBERAY}}],
                    "ports": [{"protocol": "TCP", "port": DASHBOARD_PORT}],
                }
            ],
        },
    }


def open_to_load_balancers(selector: dict[str, str], port: int) -> Spec:
    """Spec of the policy of a page that has an ingress: load balancers come from addresses of the VPC, not from pods.

    The page asks for a password; what may reach the load balancer itself is the ingress's matter.
    """
    return {
        "podSelector": {"matchLabels": selector},
        "policyTypes": ["Ingress"],
        "ingress": [{"ports": [{"protocol": "TCP", "port": port}]}],
    }
