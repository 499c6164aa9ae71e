"""IAM roles: of AWS services and nodes, and of pods through EKS Pod Identity.

A role without its policies is of no use, and a controller that loses its policy first on destroy leaves behind what
it made. So a role is a component whose `arn` is known once its policies are in place: who uses the ARN waits for them
on `up`, and is deleted before them on `destroy`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import pulumi
import pulumi_aws as aws

from infra.policies import Place, Policy, pod_trust


def find_place(region: str, cluster: str, opts: pulumi.InvokeOutputOptions | None = None) -> pulumi.Output[Place]:
    """Where the stack lives: asks AWS for the account of the credentials."""
    account = aws.get_caller_identity_output(opts=opts).account_id
    return account.apply(lambda found: Place(region=region, account=found, cluster=cluster))


class Role(pulumi.ComponentResource):
    """A role with its policies: AWS-managed ones by name, and one of our own."""

    arn: pulumi.Output[str]
    name: pulumi.Output[str]

    def __init__(
        self,
        name: str,
        trust: pulumi.Input[Policy],
        managed_policies: Sequence[str] = (),
        policy: pulumi.Input[Policy] | None = None,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        """`managed_policies` are names below `arn:aws:iam::aws:policy/`, such as AmazonEKSWorkerNodePolicy."""
        super().__init__("llama-trainium:infra:Role", name, None, opts)
        child = pulumi.ResourceOptions(parent=self)
        role = aws.iam.Role(f"{name}-role", assume_role_policy=_json(trust), opts=child)
        attached: list[pulumi.Output[str]] = []
        for managed in managed_policies:
            attachment = aws.iam.RolePolicyAttachment(
                f"{name}-{managed}",
                role=role.name,
                policy_arn=f"arn:aws:iam::aws:policy/{managed}",
                opts=child,
            )
            # An output that is known in a preview: an unknown one would make the ARN unknown, and what uses it would
            # show as replaced.
            attached.append(attachment.policy_arn)
        if policy is not None:
            attached.append(aws.iam.RolePolicy(f"{name}-policy", role=role.name, policy=_json(policy), opts=child).role)
        self.arn = pulumi.Output.all(role.arn, *attached).apply(lambda outputs: outputs[0])
        self.name = pulumi.Output.all(role.name, *attached).apply(lambda outputs: outputs[0])
        self.register_outputs({"arn": self.arn, "name": self.name})


def pod_role(
    name: str,
    place: pulumi.Input[Place],
    service_account: str,
    policy: pulumi.Input[Policy],
    opts: pulumi.ResourceOptions | None = None,
    namespace: str = "kube-system",
) -> Role:
    """The role of one service account's pods. An EKS add-on associates it itself; for others there is `PodIdentity`."""
    trust = pulumi.Output.from_input(place).apply(lambda where: pod_trust(where, namespace, service_account))
    return Role(name, trust, policy=policy, opts=opts)


class PodIdentity(pulumi.ComponentResource):
    """A role and its association with a service account: for pods that come from a chart rather than from an add-on.

    EKS hands out the role to pods that start after the association: a release depends on this component.
    """

    role: Role

    def __init__(
        self,
        name: str,
        place: pulumi.Output[Place],
        service_account: str,
        policy: pulumi.Input[Policy],
        cluster_name: pulumi.Input[str],
        opts: pulumi.ResourceOptions | None = None,
        namespace: str = "kube-system",
    ) -> None:
        """`cluster_name` is the cluster's output, so that the association waits for the cluster."""
        super().__init__("llama-trainium:infra:PodIdentity", name, None, opts)
        child = pulumi.ResourceOptions(parent=self)
        self.role = pod_role(f"{name}-pods", place, service_account, policy, child, namespace)
        aws.eks.PodIdentityAssociation(
            f"{name}-association",
            cluster_name=cluster_name,
            namespace=namespace,
            service_account=service_account,
            role_arn=self.role.arn,
            opts=child,
        )
        self.register_outputs({})


def _json(policy: pulumi.Input[Policy]) -> pulumi.Output[str]:
    return pulumi.Output.from_input(policy).apply(json.dumps)
