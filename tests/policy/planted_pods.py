"""What breaks the rules about pods and secrets, and what keeps them; the rest is in planted.py."""

from __future__ import annotations

from planted import AWS_CASES, Case, Props
from pulumi_policy import Secret
from stack_configs import changed

IMAGE = "registry.example/training@sha256:" + "0" * 64
CONTAINER: Props = {
    "name": "main",
    "image": IMAGE,
    "resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "1Gi"}},
    "securityContext": {"capabilities": {"drop": ["ALL"], "add": ["CHOWN"]}},
}
DEPLOYMENT: Props = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "planted", "namespace": "planted"},
    "spec": {"template": {"spec": {"initContainers": [CONTAINER], "containers": [CONTAINER], "volumes": []}}},
}
RAY_JOB: Props = {
    "apiVersion": "ray.io/v1",
    "kind": "RayJob",
    "metadata": {"name": "planted", "namespace": "planted"},
    "spec": {
        "rayClusterSpec": {
            "headGroupSpec": {"template": {"spec": {"containers": [CONTAINER]}}},
            "workerGroupSpecs": [{"groupName": "workers", "template": {"spec": {"containers": [CONTAINER]}}}],
        }
    },
}
RELEASE: Props = {"chart": "x", "version": "1.2.3", "values": {"image": {"repository": "x", "tag": "1.2.3"}}}
POD = "spec/template/spec"
WORKER = "spec/rayClusterSpec/workerGroupSpecs/0/template/spec/containers/0"
DEPLOYED, JOB = "kubernetes:apps/v1:Deployment", "kubernetes:ray.io/v1:RayJob"

POD_CASES = [
    Case(
        "images-by-digest",
        DEPLOYED,
        DEPLOYMENT,
        {
            "by a tag": {f"{POD}/containers/0/image": "registry.example/training:1.0"},
            "the first container": {f"{POD}/initContainers/0/image": "registry.example/training:1.0"},
        },
    ),
    Case("images-by-digest", JOB, RAY_JOB, {"a worker": {f"{WORKER}/image": "registry.example/training:1.0"}}),
    Case(
        "no-latest",
        DEPLOYED,
        DEPLOYMENT,
        {
            "said": {f"{POD}/containers/0/image": "registry.example/training:latest"},
            "said beside a digest": {f"{POD}/containers/0/image": IMAGE.replace("@", ":latest@")},
            "unsaid": {f"{POD}/containers/0/image": "registry.example:5000/training"},
        },
    ),
    Case(
        "no-latest",
        "kubernetes:helm.sh/v3:Release",
        RELEASE,
        {"a tag": {"values/image/tag": "latest"}, "an image": {"values/sidecar": {"image": "x/y:latest"}}},
    ),
    Case(
        "no-latest",
        "docker-build:index:Image",
        {"tags": ["registry.example/training:1.0"], "buildArgs": {"BASE_IMAGE": "python:3.12"}},
        {
            "the base": {"buildArgs/BASE_IMAGE": "python:latest"},
            "the result": {"tags/0": "registry.example/training:latest"},
        },
    ),
    Case(
        "pods-have-requests-and-limits",
        DEPLOYED,
        DEPLOYMENT,
        {
            "no limit": {f"{POD}/containers/0/resources/limits": "REMOVED"},
            "no memory asked for": {f"{POD}/containers/0/resources/requests/memory": "REMOVED"},
            "the first container": {f"{POD}/initContainers/0/resources": "REMOVED"},
        },
    ),
    Case("pods-have-requests-and-limits", JOB, RAY_JOB, {"a worker": {f"{WORKER}/resources": "REMOVED"}}),
    Case(
        "no-privileged-pods",
        DEPLOYED,
        DEPLOYMENT,
        {
            "privileged": {f"{POD}/containers/0/securityContext/privileged": True},
            "a capability": {f"{POD}/containers/0/securityContext/capabilities/add": ["SYS_ADMIN"]},
            "the host's network": {f"{POD}/hostNetwork": True},
            "a folder of the host": {f"{POD}/volumes": [{"name": "host", "hostPath": {"path": "/"}}]},
        },
    ),
    Case(
        "no-privileged-pods",
        "kubernetes:apps/v1:DaemonSet",
        DEPLOYMENT | {"kind": "DaemonSet"},
        {"one that nobody named": {f"{POD}/containers/0/securityContext/privileged": True}},
    ),
    Case("no-privileged-pods", JOB, RAY_JOB, {"a worker": {f"{WORKER}/securityContext": {"privileged": True}}}),
    Case(
        "no-plain-secrets",
        "kubernetes:core/v1:Secret",
        {"metadata": {"name": "planted"}, "stringData": {"key": Secret("opensesame")}},
        {"data of a Secret": {"stringData/key": "opensesame"}},
    ),
    Case(
        "no-plain-secrets",
        "aws:secretsmanager/secretVersion:SecretVersion",
        {"secretId": "x", "secretString": Secret("opensesame")},
        {"a credential by its name": {"secretString": "opensesame"}},
    ),
    Case(
        "no-plain-secrets",
        "kubernetes:core/v1:ConfigMap",
        {"metadata": {"name": "planted"}, "data": {"a": "b"}},
        {
            "an AWS access key": {"data/a": "id=AKIAIOSFODNN7EXAMPLE"},
            "a private key": {"data/a": "-----BEGIN RSA PRIVATE KEY-----\nx"},
            "a Hugging Face token": {"data/a": "hf_" + "x" * 34},
            "a GitHub token": {"data/a": "ghp_" + "x" * 36},
        },
    ),
    Case(
        "no-plain-secrets",
        "kubernetes:helm.sh/v3:Release",
        RELEASE | {"values": {"adminPassword": Secret("opensesame"), "existingSecret": "grafana"}},
        {"a credential by its name": {"values/adminPassword": "opensesame"}},
    ),
    Case(
        "no-plain-secrets",
        DEPLOYED,
        changed({f"{POD}/containers/0/env": [{"name": "HF_TOKEN", "value": Secret("opensesame")}]}, DEPLOYMENT),
        {"the variable HF_TOKEN": {f"{POD}/containers/0/env/0/value": "opensesame"}},
    ),
]

CASES = [*AWS_CASES, *POD_CASES]
