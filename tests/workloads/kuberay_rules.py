"""What KubeRay 1.7 refuses, beyond what its schema says (ray-operator/controllers/ray/utils/validation.go).

A RayJob that it refuses stays so for ever, and a cluster without these rules at hand would take it: so the tests do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

Spec = Mapping[str, Any]
DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
QUANTITIES = ("num-cpus", "num-gpus", "memory", "resources")


def refused_job(job: Spec) -> list[str]:
    """Why KubeRay would not take a RayJob; empty when it would."""
    return [*_name(job["metadata"]["name"], 47), *_job(job["spec"])]


def refused_cluster(cluster: Spec) -> list[str]:
    """Why KubeRay would not take a RayCluster."""
    return [*_name(cluster["metadata"]["name"], 53), *_cluster(cluster["spec"])]


def _name(name: str, longest: int) -> Iterator[str]:
    if len(name) > longest or not DNS_1035.fullmatch(name):
        yield f"name {name}"


def _job(spec: Spec) -> Iterator[str]:
    selector, cluster = spec.get("clusterSelector"), spec.get("rayClusterSpec")
    mode, shutdown = spec.get("submissionMode", "K8sJobMode"), spec.get("shutdownAfterJobFinishes", False)
    if spec.get("suspend") and (selector or not shutdown):
        yield "suspend without a cluster of its own that is shut down"
    if spec.get("ttlSecondsAfterFinished", 0) < 0 or (spec.get("ttlSecondsAfterFinished", 0) and not shutdown):
        yield "ttlSecondsAfterFinished"
    if "deletionStrategy" in spec:
        yield "deletionStrategy beside shutdownAfterJobFinishes"
    if bool(selector) == bool(cluster):
        yield "one of rayClusterSpec and clusterSelector"
    if selector and (not selector.get("ray.io/cluster") or spec.get("backoffLimit") or mode == "SidecarMode"):
        yield "clusterSelector without a name, or with backoffLimit or SidecarMode"
    if mode == "SidecarMode" and ("submitterPodTemplate" in spec or "submitterConfig" in spec):
        yield "a submitter in SidecarMode"
    for key in ("activeDeadlineSeconds", "preRunningDeadlineSeconds"):
        if key in spec and spec[key] <= 0:
            yield key
    if spec.get("backoffLimit", 0) < 0:
        yield "backoffLimit"
    if cluster:
        yield from _cluster(cluster)
        if cluster.get("authOptions", {}).get("enableK8sTokenAuth"):
            yield "Kubernetes tokens in a RayJob"


def _cluster(spec: Spec) -> Iterator[str]:
    head, workers = spec["headGroupSpec"], spec["workerGroupSpecs"]
    autoscaled = bool(spec.get("enableInTreeAutoscaling"))
    head_env = {each["name"] for each in head["template"]["spec"]["containers"][0].get("env", [])}
    for name, group in [("head", head), *((each["groupName"], each) for each in workers)]:
        params = group["rayStartParams"]
        if not group["template"]["spec"]["containers"]:
            yield f"{name}: no container"
        if group.get("resources") and any(params.get(key) for key in QUANTITIES):
            yield f"{name}: resources twice"
        if "labels" in params:
            yield f"{name}: labels among rayStartParams"
        if autoscaled and group["template"]["spec"].get("restartPolicy", "Never") != "Never":
            yield f"{name}: restartPolicy"
    for each in workers:
        fewest, most = each.get("minReplicas"), each.get("maxReplicas")
        if fewest is None or most is None or not 0 <= fewest <= most:
            yield f"{each['groupName']}: minReplicas and maxReplicas"
        if each.get("suspend") or "idleTimeoutSeconds" in each or "priority" in each:
            yield f"{each['groupName']}: what needs a feature gate or Ray's autoscaler"
    if {"RAY_REDIS_ADDRESS", "REDIS_USERNAME"} & head_env:
        yield "Redis in the environment"
    redis = spec.get("gcsFaultToleranceOptions")
    if redis and ("REDIS_PASSWORD" in head_env or head["rayStartParams"].get("redis-password") or "storage" in redis):
        yield "Redis' password twice"
    if "RAY_enable_autoscaler_v2" in head_env:
        yield "the autoscaler's version in the environment"
    if spec.get("authOptions", {}).get("mode") == "token" and _version(spec.get("rayVersion", "0.0")) < (2, 52):
        yield "tokens with an older Ray"
    for key in ("networkPolicy", "tlsOptions", "historyServerOptions", "upgradeStrategy"):
        if key in spec:
            yield f"{key} needs a feature gate"


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])
