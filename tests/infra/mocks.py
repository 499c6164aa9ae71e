"""An engine and a cloud that exist in memory only: they run the real program and keep every registration it makes.

    recorded = run_program(load_stack("dev"))            # __main__.py with a stack file's settings
    recorded = run(lambda: Network("network", ...))      # a component of its own
    recorded.one("aws:ec2/vpc:Vpc").inputs["cidrBlock"]

Pulumi's own mocks show a resource's type, name and inputs. Order, parents and options are what half of the tests are
about, so this is a monitor of its own that keeps the whole request. It refuses what the real engine refuses too: the
same name twice. What it gives back is what AWS would compute, as far as the program reads it (mock_cloud.py).
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import runpy
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pulumi
import yaml
from google.protobuf import empty_pb2, json_format, struct_pb2
from mock_cloud import answer, identity_of, outputs_of
from pulumi.runtime import mocks, rpc, settings
from pulumi.runtime.proto import resource_pb2
from pulumi.runtime.stack import run_in_stack
from recorded import Recorded, Registered

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "llama-trainium"
RESOURCE, SECRET = rpc._special_resource_sig, rpc._special_secret_sig


class Monitor(mocks.MockMonitor):
    """The engine's side of a program's calls."""

    def __init__(self, recorded: Recorded, project: str, stack: str, region: str) -> None:
        super().__init__(_NoMocks())
        self.recorded, self.project, self.stack, self.region = recorded, project, stack, region

    def make_urn(self, parent: str, type_: str, name: str) -> str:
        """The URN the engine would give: with the types of all parents but the stack."""
        inherited = parent.split("::")[2] + "$" if parent and "pulumi:pulumi:Stack" not in parent else ""
        return f"urn:pulumi:{self.stack}::{self.project}::{inherited}{type_}::{name}"

    def Invoke(self, request: Any) -> Any:  # noqa: N802
        """Answer a function call, or look up a resource that a component returned."""
        arguments = _plain(request.args)
        if request.tok == "pulumi:pulumi:getResource":
            found = self.recorded.by_urn(arguments["urn"])
            result = {"urn": found.urn, "id": found.id, "state": found.outputs}
        else:
            result = answer(request.tok, arguments, self.region)
        return resource_pb2.ResourceInvokeResponse(**{"return": _struct(result)})

    def RegisterResource(self, request: Any) -> Any:  # noqa: N802
        """Keep the request and answer as the engine would."""
        urn = self.make_urn(request.parent, request.type, request.name)
        if request.type == "pulumi:pulumi:Stack":
            return resource_pb2.RegisterResourceResponse(urn=urn)
        if any(each.urn == urn for each in self.recorded):
            raise AssertionError(f"duplicate resource URN: {urn}")
        registered = self._record(request, urn)
        if request.type == "eks:index:Cluster":
            self._construct_cluster(registered)
        outputs = _struct(registered.outputs)
        return resource_pb2.RegisterResourceResponse(urn=urn, id=registered.id, object=outputs)

    def RegisterResourceOutputs(self, request: Any) -> Any:  # noqa: N802
        """Keep the stack's exports."""
        if "pulumi:pulumi:Stack" in request.urn:
            self.recorded.exports.update(_plain(request.outputs))
        return empty_pb2.Empty()

    def _record(self, request: Any, urn: str) -> Registered:
        raw = json_format.MessageToDict(request.object)
        inputs = _plain(request.object)
        made = request.custom or request.remote
        identity = identity_of(request.type, request.name, inputs) if request.custom else ""
        dependencies = set(request.dependencies)
        for behind in request.propertyDependencies.values():
            dependencies |= set(behind.urns)
        registered = Registered(
            type=request.type,
            name=request.name,
            urn=urn,
            id=identity,
            inputs=inputs,
            outputs=outputs_of(request.type, request.name, identity, inputs, self.region) if made else {},
            custom=request.custom,
            remote=request.remote,
            parent=request.parent,
            provider=request.provider.rpartition("::")[0],
            dependencies=dependencies,
            secrets={key for key, value in raw.items() if SECRET in json.dumps(value)},
            request=request,
        )
        self.recorded.resources.append(registered)
        return registered

    def _construct_cluster(self, component: Registered) -> None:
        """What pulumi-eks makes inside its component, as far as the program can tell: the cluster itself."""
        given = component.inputs
        inner = {
            "name": given["name"],
            "version": given.get("version"),
            "vpcConfig": {
                "subnetIds": given.get("subnetIds"),
                "endpointPrivateAccess": given.get("endpointPrivateAccess"),
                "endpointPublicAccess": given.get("endpointPublicAccess"),
                "publicAccessCidrs": given.get("publicAccessCidrs"),
            },
            "encryptionConfig": {"provider": {"keyArn": given.get("encryptionConfigKeyArn")}, "resources": ["secrets"]},
        }
        request = resource_pb2.RegisterResourceRequest(
            type="aws:eks/cluster:Cluster",
            name=f"{component.name}-eksCluster",
            parent=component.urn,
            custom=True,
            object=_struct(inner),
            provider=component.request.providers.get("aws", ""),
            dependencies=component.dependencies,
        )
        cluster = self._record(request, self.make_urn(component.urn, request.type, request.name))
        component.outputs |= {
            "eksCluster": {rpc._special_sig_key: RESOURCE, "urn": cluster.urn, "id": cluster.id},
            "clusterSecurityGroupId": cluster.outputs["vpcConfig"]["clusterSecurityGroupId"],
            "kubeconfigJson": json.dumps({"apiVersion": "v1", "kind": "Config", "clusters": [given["name"]]}),
        }


class _NoMocks(mocks.Mocks):
    """The base class wants some; this monitor answers itself."""

    def call(self, args: mocks.MockCallArgs) -> Any:
        raise NotImplementedError

    def new_resource(self, args: mocks.MockResourceArgs) -> Any:
        raise NotImplementedError


def run(
    program: Callable[[], None],
    config: Mapping[str, object] | None = None,
    secrets: Mapping[str, str] | None = None,
    stack: str = "dev",
    preview: bool = False,
    recorded: Recorded | None = None,
) -> Recorded:
    """Run `program` as the stack `stack` of the project, and give back what it registered.

    `config` has keys such as `llama-trainium:network` and plain values; `secrets` are config values that are Pulumi
    secrets. Raises what the program raises; what it had registered until then is in `recorded`, if one is given.
    """
    recorded = Recorded() if recorded is None else recorded
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in (config or {}).items()}
    region = values.get(f"{PROJECT}:region", "us-west-2")
    monitor = Monitor(recorded, PROJECT, stack, region)

    def in_thread() -> None:
        features = set(monitor.GetDeploymentInfo(empty_pb2.Empty()).supportedFeatures)
        settings.configure(
            mocks.MockSettings(
                monitor=monitor,
                monitor_features=features,
                engine=mocks.MockEngine(None),
                project=PROJECT,
                stack=stack,
                dry_run=preview,
                organization="tests",
                callbacks=None,
                outputs=set(),
                package_refs={},
                base_providers_by_ref={},
                root_directory=str(ROOT),
            )
        )
        pulumi.runtime.set_all_config({**values, **(secrets or {})}, list(secrets or {}))
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(run_in_stack(program))
        finally:
            # A program that failed leaves what waited for the failure. The failure is raised here, and once is enough:
            # Python would tell of each of them when it finds it unused, at any time, in another test.
            loop.set_exception_handler(lambda *_: None)
            for task in (left := asyncio.all_tasks(loop)):
                task.cancel()
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            loop.close()

    # Pulumi keeps its state in context variables: in a context and a thread of its own a run leaves nothing behind.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(contextvars.Context().run, in_thread).result()
    return recorded


def run_program(
    config: Mapping[str, object],
    secrets: Mapping[str, str] | None = None,
    stack: str = "dev",
    preview: bool = False,
    recorded: Recorded | None = None,
) -> Recorded:
    """Run __main__.py with these settings; see `run`."""

    def program() -> None:
        runpy.run_path(str(ROOT / "__main__.py"), run_name="__main__")

    return run(program, config, secrets, stack, preview, recorded)


def load_stack(stack: str) -> dict[str, object]:
    """The settings in a stack file. A secret in it cannot be read here: give it to `run_program`."""
    return dict(yaml.safe_load((ROOT / f"Pulumi.{stack}.yaml").read_text())["config"])


def _plain(struct: struct_pb2.Struct) -> dict[str, Any]:
    result: dict[str, Any] = _unwrap(json_format.MessageToDict(struct))
    return result


def _unwrap(value: Any) -> Any:
    """A value of the wire as Python data: secrets are opened, whole numbers are int."""
    if isinstance(value, dict):
        if value.get(rpc._special_sig_key) == SECRET:
            return _unwrap(value["value"])
        return {key: _unwrap(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_unwrap(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _struct(value: Mapping[str, Any]) -> struct_pb2.Struct:
    struct = struct_pb2.Struct()
    struct.update(json.loads(json.dumps(value)))
    return struct
