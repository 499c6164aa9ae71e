"""The pods' logs in CloudWatch, which keeps them for `cluster.logRetentionDays`: Fluent Bit on every node.

aws logs tail /llama-trainium/STACK/pods --follow --log-stream-name-prefix llama-trainium
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pulumi
import pulumi_aws as aws

from infra.charts import release
from infra.iam import PodIdentity
from infra.policies import Policy, allow, document
from infra.settings import PROJECT, Settings
from infra.versions import FLUENT_BIT

if TYPE_CHECKING:
    from infra.cluster import Cluster

ACCOUNT = "fluent-bit"

INPUTS = """\
[INPUT]
    Name tail
    Path /var/log/containers/*.log
    multiline.parser docker, cri
    Tag kube.*
    DB /var/log/fluent-bit.db
    Mem_Buf_Limit 16MB
    Skip_Long_Lines On
    Refresh_Interval 10
"""
# For the names in the stream's: those of namespace, pod and container are in the file's.
FILTERS = """\
[FILTER]
    Name kubernetes
    Match kube.*
    Merge_Log Off
    Keep_Log On
    Labels Off
    Annotations Off
"""


class PodLogs(pulumi.ComponentResource):
    """The log group, Fluent Bit, and its leave to write there."""

    def __init__(
        self,
        name: str,
        settings: Settings,
        cluster: Cluster,
        namespace: str,
        after: Sequence[pulumi.Resource],
        opts: pulumi.ResourceOptions,
    ) -> None:
        """`after` has the namespace, and what its pods need: the agent of Pod Identity among it."""
        super().__init__("llama-trainium:infra:PodLogs", name, None, opts)
        child = pulumi.ResourceOptions(parent=self)
        group = aws.cloudwatch.LogGroup(
            f"{name}-group",
            name=f"/{PROJECT}/{pulumi.get_stack()}/pods",
            retention_in_days=settings.cluster.log_retention_days,
            opts=child,
        )
        policy = group.arn.apply(write_logs)
        identity = PodIdentity(name, cluster.place, ACCOUNT, policy, cluster.name, child, namespace)
        release(
            f"{name}-fluent-bit",
            FLUENT_BIT,
            {
                "fullnameOverride": ACCOUNT,
                "serviceAccount": {"name": ACCOUNT},
                # On every node, whatever its taints.
                "tolerations": [{"operator": "Exists"}],
                # The chart's own also has Docker's folder, which nodes with containerd lack.
                "daemonSetVolumes": [{"name": "varlog", "hostPath": {"path": "/var/log"}}],
                "daemonSetVolumeMounts": [{"name": "varlog", "mountPath": "/var/log"}],
                "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
                "config": {
                    "inputs": INPUTS,
                    "filters": FILTERS,
                    "outputs": group.name.apply(lambda found: output(settings.region, found)),
                },
                "testFramework": {"enabled": False},
            },
            namespace,
            settings.charts.mirror,
            pulumi.ResourceOptions(parent=self, provider=cluster.k8s, depends_on=[*after, identity]),
        )
        self.register_outputs({})


def write_logs(log_group_arn: str) -> Policy:
    """Write into the log group, which exists: a stream for each container."""
    actions = ["logs:CreateLogStream", "logs:DescribeLogStreams", "logs:PutLogEvents"]
    return document([allow(actions, [log_group_arn, f"{log_group_arn}:*"])])


def output(region: str, group: str) -> str:
    """Fluent Bit's output: a stream for each container, NAMESPACE.POD.CONTAINER, of its lines as they are."""
    return f"""\
[OUTPUT]
    Name cloudwatch_logs
    Match kube.*
    region {region}
    log_group_name {group}
    log_key log
    log_stream_template $kubernetes['namespace_name'].$kubernetes['pod_name'].$kubernetes['container_name']
    log_stream_prefix fallback-
    auto_create_group Off
    Retry_Limit 5
"""
