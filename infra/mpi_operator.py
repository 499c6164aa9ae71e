"""The MPI operator: its definition of MPIJob, its permissions and its Deployment. It has no chart.

Permissions are what pkg/controller of 0.8.2 calls, and no more: it reads through watches, makes the objects of a job,
and deletes pods and PodGroups. Kubernetes collects the rest when the MPIJob goes.
"""

from __future__ import annotations

from collections.abc import Sequence

import pulumi
import pulumi_kubernetes as k8s

from infra.versions import MPI_OPERATOR

NAME = "mpi-operator"
LABELS = {"app.kubernetes.io/name": NAME}
HEALTH_PORT = 8080  # fixed in cmd/mpi-operator/app/server.go

DEFINITION = (
    f"https://raw.githubusercontent.com/kubeflow/mpi-operator/v{MPI_OPERATOR}/manifests/base/kubeflow.org_mpijobs.yaml"
)

READ = ["get", "list", "watch"]
CLUSTER_RULES: list[tuple[str, list[str], list[str]]] = [
    ("", ["configmaps", "secrets", "services"], [*READ, "create", "update"]),
    ("", ["pods"], [*READ, "create", "delete"]),
    ("", ["events"], ["create", "patch"]),
    ("batch", ["jobs"], [*READ, "create", "update"]),
    ("batch", ["jobs/status"], ["update"]),  # of a launcher that is suspended and resumed
    ("kubeflow.org", ["mpijobs"], READ),
    ("kubeflow.org", ["mpijobs/status", "mpijobs/finalizers"], ["update"]),
    ("scheduling.volcano.sh", ["podgroups"], [*READ, "create", "update", "delete"]),
    ("scheduling.k8s.io", ["priorityclasses"], READ),
]
"""API group, resources, verbs, in every namespace."""
OWN_RULES = [("coordination.k8s.io", ["leases"], ["get", "create", "update"])]
"""In its own namespace: the lease of the leader."""


class MpiOperator(pulumi.ComponentResource):
    """The operator with gang scheduling by Volcano."""

    def __init__(
        self, name: str, mirror: str | None, after: Sequence[pulumi.Resource], opts: pulumi.ResourceOptions
    ) -> None:
        """`mirror` as in `infra.charts.release`; `opts.provider` is the cluster; `after` has PodGroups defined."""
        super().__init__("llama-trainium:infra:MpiOperator", name, None, opts)
        child = pulumi.ResourceOptions(parent=self, provider=opts.provider)
        meta = k8s.meta.v1.ObjectMetaArgs
        cluster_wide = meta(name=NAME, labels=LABELS)

        definition = k8s.yaml.v2.ConfigFile(f"{name}-definition", file=definition_url(mirror), opts=child)
        namespace = k8s.core.v1.Namespace(f"{name}-namespace", metadata=cluster_wide, opts=child)
        own = meta(name=NAME, namespace=namespace.metadata.name, labels=LABELS)
        account = k8s.core.v1.ServiceAccount(f"{name}-account", metadata=own, opts=child)
        subject = k8s.rbac.v1.SubjectArgs(
            kind="ServiceAccount", name=account.metadata.name, namespace=namespace.metadata.name
        )
        cluster_role = k8s.rbac.v1.ClusterRole(
            f"{name}-cluster-role", metadata=cluster_wide, rules=_rules(CLUSTER_RULES), opts=child
        )
        cluster_binding = k8s.rbac.v1.ClusterRoleBinding(
            f"{name}-cluster-binding",
            metadata=cluster_wide,
            role_ref=_role_ref("ClusterRole", cluster_role.metadata.name),
            subjects=[subject],
            opts=child,
        )
        role = k8s.rbac.v1.Role(f"{name}-role", metadata=own, rules=_rules(OWN_RULES), opts=child)
        binding = k8s.rbac.v1.RoleBinding(
            f"{name}-binding",
            metadata=own,
            role_ref=_role_ref("Role", role.metadata.name),
            subjects=[subject],
            opts=child,
        )
        k8s.apps.v1.Deployment(
            f"{name}-operator",
            metadata=own,
            spec=k8s.apps.v1.DeploymentSpecArgs(
                replicas=1,
                selector=k8s.meta.v1.LabelSelectorArgs(match_labels=LABELS),
                template=k8s.core.v1.PodTemplateSpecArgs(
                    metadata=meta(labels=LABELS), spec=_pod(account.metadata.name)
                ),
            ),
            # It exits where MPIJob is not defined, and waits for ever where PodGroup is not. On destroy it goes before
            # its permissions.
            opts=pulumi.ResourceOptions.merge(
                child, pulumi.ResourceOptions(depends_on=[definition, cluster_binding, binding, *after])
            ),
        )
        self.register_outputs({})


def definition_url(mirror: str | None) -> str:
    """Where the definition of MPIJob comes from. A registry (oci://) holds charts, not files: then from its release."""
    if mirror and not mirror.startswith("oci://"):
        return f"{mirror.rstrip('/')}/{NAME}-{MPI_OPERATOR}.yaml"
    return DEFINITION


def _pod(account: pulumi.Input[str]) -> k8s.core.v1.PodSpecArgs:
    health = k8s.core.v1.HTTPGetActionArgs(path="/healthz", port="health")
    return k8s.core.v1.PodSpecArgs(
        service_account_name=account,
        security_context=k8s.core.v1.PodSecurityContextArgs(
            run_as_non_root=True,
            run_as_user=65532,
            seccomp_profile=k8s.core.v1.SeccompProfileArgs(type="RuntimeDefault"),
        ),
        containers=[
            k8s.core.v1.ContainerArgs(
                name=NAME,
                image=f"docker.io/mpioperator/mpi-operator:{MPI_OPERATOR}",
                args=["--gang-scheduling=volcano", f"--lock-namespace={NAME}"],
                ports=[k8s.core.v1.ContainerPortArgs(name="health", container_port=HEALTH_PORT)],
                liveness_probe=k8s.core.v1.ProbeArgs(http_get=health, initial_delay_seconds=30, period_seconds=20),
                readiness_probe=k8s.core.v1.ProbeArgs(http_get=health, period_seconds=5),
                resources=k8s.core.v1.ResourceRequirementsArgs(
                    requests={"cpu": "50m", "memory": "64Mi"}, limits={"memory": "256Mi"}
                ),
                security_context=k8s.core.v1.SecurityContextArgs(
                    allow_privilege_escalation=False,
                    read_only_root_filesystem=True,
                    capabilities=k8s.core.v1.CapabilitiesArgs(drop=["ALL"]),
                ),
            )
        ],
    )


def _rules(rules: Sequence[tuple[str, list[str], list[str]]]) -> list[k8s.rbac.v1.PolicyRuleArgs]:
    return [
        k8s.rbac.v1.PolicyRuleArgs(api_groups=[group], resources=resources, verbs=verbs)
        for group, resources, verbs in rules
    ]


def _role_ref(kind: str, name: pulumi.Input[str]) -> k8s.rbac.v1.RoleRefArgs:
    return k8s.rbac.v1.RoleRefArgs(api_group="rbac.authorization.k8s.io", kind=kind, name=name)
