"""TensorBoard on a run's logs, behind a password: reached by `make tensorboard`, or by HTTPS where a host is set."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pulumi
import pulumi_kubernetes as k8s

from workloads.base import Base
from workloads.core_pods import DATA_MOUNT, core_deployment
from workloads.ingress import expose
from workloads.labels import PART_OF, TENSORBOARD, TENSORBOARD_PORT
from workloads.platform import Platform
from workloads.pods import LOCKED
from workloads.settings import Web

SELECTOR = {"app.kubernetes.io/name": TENSORBOARD}
HEALTH = "/healthz"
CODE, SECRET, HASH = "/opt/tensorboard", "/etc/tensorboard", "hash"

# What werkzeug.security makes by default, and checks in the pod: scrypt with 32 MiB.
SCRYPT_N, SCRYPT_R, SCRYPT_P = 2**15, 8, 1


class TensorBoard(pulumi.ComponentResource):
    """The Deployment, its Service, and where `web.host` is set, its ingress."""

    def __init__(
        self,
        name: str,
        web: Web,
        platform: Platform,
        base: Base,
        log_dir: Path,
        password: pulumi.Input[str],
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        """`log_dir` is a run's `tensorboard` folder, as pods have it; it need not exist yet."""
        super().__init__("llama-trainium:workloads:TensorBoard", name, None, opts)
        child = pulumi.ResourceOptions(parent=self, provider=platform.provider, depends_on=[*platform.after])

        def meta(what: str) -> k8s.meta.v1.ObjectMetaArgs:
            return k8s.meta.v1.ObjectMetaArgs(name=what, namespace=base.namespace, labels={**PART_OF, **SELECTOR})

        # Not in the image: another TensorBoard is no reason to run a stage again.
        text = Path(__file__).with_name("tensorboard_server.py").read_text(encoding="utf-8")
        code = k8s.core.v1.ConfigMap(
            f"{name}-code",
            metadata=meta(f"{TENSORBOARD}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"),
            immutable=True,
            data={"server.py": text},
            opts=child,
        )
        salt = f"{pulumi.get_project()}/{pulumi.get_stack()}"
        secret = k8s.core.v1.Secret(
            f"{name}-password",
            metadata=meta(TENSORBOARD),
            string_data={HASH: pulumi.Output.secret(password).apply(lambda text: password_hash(text, salt))},
            opts=child,
        )
        k8s.apps.v1.Deployment(
            f"{name}-deployment",
            metadata=meta(TENSORBOARD),
            spec=_deployment(platform, base, code.metadata.name, secret.metadata.name, log_dir),
            opts=child,
        )
        service = k8s.core.v1.Service(
            f"{name}-service",
            metadata=meta(TENSORBOARD),
            spec=k8s.core.v1.ServiceSpecArgs(
                selector=SELECTOR,
                ports=[k8s.core.v1.ServicePortArgs(name="http", port=TENSORBOARD_PORT, target_port="http")],
            ),
            opts=child,
        )
        if web.host:
            expose(name, web, base.namespace, service, SELECTOR, HEALTH, child)
        self.register_outputs({})


def password_hash(password: str, salt_of: str) -> str:
    """The hash of a password in the form that `werkzeug.security.check_password_hash` reads.

    It is the same at every `up`: its salt is made of `salt_of`, which is public and differs from stack to stack. A salt
    made of the password would let it be guessed without scrypt's cost.
    """
    salt = hashlib.sha256(salt_of.encode()).hexdigest()[:16]
    memory = 132 * SCRYPT_N * SCRYPT_R * SCRYPT_P  # of what OpenSSL allows: the 128 of the algorithm, and some
    digest = hashlib.scrypt(
        password.encode(), salt=salt.encode(), n=SCRYPT_N, r=SCRYPT_R, p=SCRYPT_P, maxmem=memory, dklen=64
    )
    return f"scrypt:{SCRYPT_N}:{SCRYPT_R}:{SCRYPT_P}${salt}${digest.hex()}"


def _deployment(
    platform: Platform, base: Base, code: pulumi.Input[str], secret: pulumi.Input[str], log_dir: Path
) -> Any:
    container = {
        "name": TENSORBOARD,
        "image": platform.image,
        "command": ["python3", f"{CODE}/server.py", "--logdir", str(log_dir)],
        "args": ["--host", "0.0.0.0", "--port", str(TENSORBOARD_PORT)],
        "env": [
            {"name": "PASSWORD_HASH_FILE", "value": f"{SECRET}/{HASH}"},
            {"name": "HEALTH_PATH", "value": HEALTH},
        ],
        "ports": [{"name": "http", "containerPort": TENSORBOARD_PORT}],
        "readinessProbe": {"httpGet": {"path": HEALTH, "port": "http"}, "periodSeconds": 5},
        "livenessProbe": {
            "httpGet": {"path": HEALTH, "port": "http"},
            "initialDelaySeconds": 60,
            "periodSeconds": 20,
        },
        "resources": {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "2Gi"}},
        "securityContext": {**LOCKED, "readOnlyRootFilesystem": True},
        "volumeMounts": [
            {**DATA_MOUNT, "readOnly": True},
            {"name": "code", "mountPath": CODE, "readOnly": True},
            {"name": "password", "mountPath": SECRET, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    volumes = [
        {"name": "code", "configMap": {"name": code}},
        {"name": "password", "secret": {"secretName": secret}},
        {"name": "tmp", "emptyDir": {}},
    ]
    return core_deployment(SELECTOR, platform, base, container, volumes)
