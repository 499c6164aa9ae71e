"""A page by HTTPS: an ingress of the AWS load balancer controller, and the network policy that lets it in."""

from __future__ import annotations

import json

import pulumi
import pulumi_kubernetes as k8s

from workloads.labels import PART_OF
from workloads.network_policies import open_to_load_balancers
from workloads.settings import Web

TLS_POLICY = "ELBSecurityPolicy-TLS13-1-2-2021-06"
"""TLS 1.2 and 1.3 only."""


def expose(
    name: str,
    web: Web,
    namespace: pulumi.Input[str],
    service: k8s.core.v1.Service,
    selector: dict[str, str],
    health: str,
    opts: pulumi.ResourceOptions,
) -> None:
    """Reach `service`, whose pods have the labels `selector`, as https://`web.host`/.

    The load balancer is internal: it is reached from within the VPC's reach, as the API server is. `health` is a path
    that answers without a password.
    """
    port = service.spec.ports[0].port
    made = pulumi.Output.from_input(namespace)
    k8s.networking.v1.NetworkPolicy(
        f"{name}-from-load-balancers",
        metadata=k8s.meta.v1.ObjectMetaArgs(name=f"{name}-from-load-balancers", namespace=made, labels=PART_OF),
        spec=port.apply(lambda number: open_to_load_balancers(selector, number)),
        opts=opts,
    )
    k8s.networking.v1.Ingress(
        f"{name}-ingress",
        metadata=k8s.meta.v1.ObjectMetaArgs(
            name=name,
            namespace=made,
            labels=PART_OF,
            annotations=made.apply(lambda group: _annotations(web, group, health)),
        ),
        spec=k8s.networking.v1.IngressSpecArgs(
            ingress_class_name="alb",
            rules=[
                k8s.networking.v1.IngressRuleArgs(
                    host=web.host,
                    http=k8s.networking.v1.HTTPIngressRuleValueArgs(
                        paths=[
                            k8s.networking.v1.HTTPIngressPathArgs(
                                path="/",
                                path_type="Prefix",
                                backend=k8s.networking.v1.IngressBackendArgs(
                                    service=k8s.networking.v1.IngressServiceBackendArgs(
                                        name=service.metadata.name,
                                        port=k8s.networking.v1.ServiceBackendPortArgs(number=port),
                                    )
                                ),
                            )
                        ]
                    ),
                )
            ],
        ),
        opts=opts,
    )


def _annotations(web: Web, group: str, health: str) -> dict[str, str]:
    """What the controller reads: https://kubernetes-sigs.github.io/aws-load-balancer-controller/ (Ingress annotations).
    One load balancer for all pages of the namespace."""
    prefix = "alb.ingress.kubernetes.io"
    return {
        f"{prefix}/group.name": group,
        f"{prefix}/scheme": "internal",
        f"{prefix}/target-type": "ip",
        f"{prefix}/listen-ports": json.dumps([{"HTTPS": 443}]),
        f"{prefix}/certificate-arn": str(web.certificate_arn),
        f"{prefix}/ssl-policy": TLS_POLICY,
        f"{prefix}/healthcheck-path": health,
        # Pulumi would wait for pods behind the service, and Ray's dashboard has them only while a stage runs.
        "pulumi.com/skipAwait": "true",
    }
