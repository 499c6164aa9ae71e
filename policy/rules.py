"""The rules of the pack by name, as policies of the Pulumi SDK. All are mandatory: a violation ends `preview` and `up`.

What AWS encrypts by itself and cannot be told not to has no rule: S3 (since 2023-01-05), FSx for Lustre, ECR,
CloudWatch Logs, Secrets Manager.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pulumi_policy import ReportViolation, ResourceValidationArgs, ResourceValidationPolicy

from policy import aws_rules, pod_rules
from policy.plain_resource import Resource
from policy.plain_secrets import NoPlainSecrets

Check = Callable[[Resource], Iterable[str]]


def rule(name: str, description: str, check: Check) -> ResourceValidationPolicy:
    """A policy from a check, which yields a line for each violation: where, what is there, what is expected."""

    def validate(args: ResourceValidationArgs, report: ReportViolation) -> None:
        for line in check(Resource.of(args)):
            report(line, None)

    return ResourceValidationPolicy(name, description, validate)


POLICIES: tuple[ResourceValidationPolicy, ...] = (
    rule("no-public-bucket", "No S3 bucket is open to the world.", aws_rules.public_bucket),
    rule("no-open-security-group", "No security group lets the world in.", aws_rules.open_security_group),
    rule("no-public-eks-endpoint", "No EKS API server is reached from the whole world.", aws_rules.public_eks_endpoint),
    rule("encrypted-at-rest", "What is stored is encrypted.", aws_rules.unencrypted),
    rule("imds-v2", "Instance metadata answer to session tokens only (IMDSv2).", aws_rules.imds_v1),
    rule("immutable-image-tags", "A tag in ECR never becomes another image.", aws_rules.mutable_tags),
    rule("images-by-digest", "Pods name their images by digest.", pod_rules.images_without_digest),
    rule("no-latest", "No image is :latest, said or unsaid.", pod_rules.latest_images),
    rule("pods-have-requests-and-limits", "Containers ask for CPU and memory, and have a limit.", pod_rules.unbounded),
    rule("no-privileged-pods", "No pod has more than a pod's rights on its node.", pod_rules.privileged),
    rule("required-tags", "Everything on AWS says whose it is and who pays.", aws_rules.untagged),
    NoPlainSecrets(),
)
