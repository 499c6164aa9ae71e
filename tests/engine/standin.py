"""A Pulumi provider over gRPC that stands in for whole packages (aws, docker-build, ...) in front of a Cloud.

The engine attaches to it by port (PULUMI_DEBUG_PROVIDERS), so one server in the test's own process serves every package
and every run, and a test sees what the engine asked for as Python objects.
"""
# ruff: noqa: N802 (the methods are the protocol's)

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
from cloud import Cloud, Props, Refused
from google.protobuf import empty_pb2, json_format, struct_pb2
from pulumi.runtime import rpc
from pulumi.runtime.proto import plugin_pb2, provider_pb2, provider_pb2_grpc, resource_pb2, resource_pb2_grpc

SECRET = {rpc._special_sig_key: rpc._special_secret_sig}
CONFIG_FILE = "kubernetes:yaml/v2:ConfigFile"
DEFINITION = "kubernetes:apiextensions.k8s.io/v1:CustomResourceDefinition"


def type_of(urn: str) -> str:
    """The type of a resource: the last of the types in its URN."""
    return urn.split("::")[2].split("$")[-1]


def props(struct: struct_pb2.Struct) -> Props:
    """Property values as Python has them, secrets opened; `__defaults` is the SDKs' own."""
    found: Props = opened(json_format.MessageToDict(struct))
    return {key: value for key, value in found.items() if key != "__defaults"}


def opened(value: Any) -> Any:
    """A value without the marks of the secrets in it."""
    if isinstance(value, dict):
        return opened(value["value"]) if SECRET.items() <= value.items() else {k: opened(v) for k, v in value.items()}
    return [opened(item) for item in value] if isinstance(value, list) else value


def struct(values: Props, like: struct_pb2.Struct | None = None) -> struct_pb2.Struct:
    """Property values as the engine reads them; what is a secret in `like`, or holds one, is a secret again."""
    given = json_format.MessageToDict(like) if like else {}
    secret = {key for key, value in given.items() if opened(value) != value}
    marked = {key: {**SECRET, "value": value} if key in secret else value for key, value in values.items()}
    made = struct_pb2.Struct()
    json_format.ParseDict(json.loads(json.dumps(marked)), made)
    return made


class StandIn(provider_pb2_grpc.ResourceProviderServicer):
    """Answers the engine from a Cloud. What it leaves out of the protocol the engine goes without."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud

    def Handshake(self, request: Any, context: Any) -> Any:
        """The oldest protocol that has components: with secrets, without outputs and resources as values."""
        return provider_pb2.ProviderHandshakeResponse(accept_secrets=True)

    def Attach(self, request: Any, context: Any) -> Any:
        """The engine's address, which the stand-in has no use for."""
        return empty_pb2.Empty()

    def GetPluginInfo(self, request: Any, context: Any) -> Any:
        """No version: the engine attached to this port whatever version the program asked for."""
        return plugin_pb2.PluginInfo(version="0.0.0")

    def GetSchema(self, request: Any, context: Any) -> Any:
        """An empty schema."""
        return provider_pb2.GetSchemaResponse(schema=json.dumps({"name": "standin", "version": "0.0.0"}))

    def CheckConfig(self, request: Any, context: Any) -> Any:
        """Any provider configuration will do."""
        return provider_pb2.CheckResponse(inputs=request.news)

    def DiffConfig(self, request: Any, context: Any) -> Any:
        """A changed configuration changes no resource."""
        return provider_pb2.DiffResponse(changes=provider_pb2.DiffResponse.DIFF_NONE)

    def Configure(self, request: Any, context: Any) -> Any:
        """Previews are answered without making anything."""
        return provider_pb2.ConfigureResponse(supportsPreview=True, acceptSecrets=True)

    def Check(self, request: Any, context: Any) -> Any:
        """Inputs are taken as they are."""
        self.cloud.clock.touch()
        return provider_pb2.CheckResponse(inputs=request.news)

    def Diff(self, request: Any, context: Any) -> Any:
        """Compare the inputs, key by key."""
        old, new = props(request.old_inputs), props(request.news)
        changed = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
        answer = provider_pb2.DiffResponse
        return answer(changes=answer.DIFF_SOME if changed else answer.DIFF_NONE, diffs=changed)

    def Create(self, request: Any, context: Any) -> Any:
        """Make it in the cloud; in a preview the computed outputs are left out, so the SDK takes them as unknown."""
        if request.preview:
            return provider_pb2.CreateResponse(id="", properties=request.properties)
        with told(context):
            made = self.cloud.create(request.urn, type_of(request.urn), props(request.properties))
            return provider_pb2.CreateResponse(id=made.id, properties=struct(made.outputs, request.properties))

    def Read(self, request: Any, context: Any) -> Any:
        """A refresh finds what exists; what does not has no id."""
        exists = (type_of(request.urn), request.id) in self.cloud.live
        return provider_pb2.ReadResponse(
            id=request.id if exists else "", properties=request.properties, inputs=request.inputs
        )

    def Update(self, request: Any, context: Any) -> Any:
        """New inputs."""
        if request.preview:
            return provider_pb2.UpdateResponse(properties=request.news)
        with told(context):
            made = self.cloud.update(request.urn, type_of(request.urn), request.id, props(request.news))
            return provider_pb2.UpdateResponse(properties=struct(made.outputs, request.news))

    def Delete(self, request: Any, context: Any) -> Any:
        """Remove it from the cloud."""
        with told(context):
            self.cloud.delete(request.urn, type_of(request.urn), request.id)
            return empty_pb2.Empty()

    def Invoke(self, request: Any, context: Any) -> Any:
        """A data source."""
        with told(context):
            found = struct(self.cloud.answer(request.tok, props(request.args)))
            return provider_pb2.InvokeResponse(**{"return": found})

    def Construct(self, request: Any, context: Any) -> Any:
        """A file of manifests: taken for one definition, named as the component, without reading the file."""
        if request.type != CONFIG_FILE:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, f"the stand-in makes no {request.type}")
        with grpc.insecure_channel(request.monitorEndpoint) as channel:
            monitor = resource_pb2_grpc.ResourceMonitorStub(channel)
            register = resource_pb2.RegisterResourceRequest
            component = monitor.RegisterResource(
                register(type=request.type, name=request.name, parent=request.parent, acceptSecrets=True)
            )
            child = register(type=DEFINITION, name=request.name, parent=component.urn, custom=True, acceptSecrets=True)
            child.object.CopyFrom(struct({"metadata": {"name": request.name}}))
            child.provider = request.providers.get("kubernetes", "")
            child.dependencies.extend(request.dependencies)
            monitor.RegisterResource(child)
        return provider_pb2.ConstructResponse(urn=component.urn)

    def Cancel(self, request: Any, context: Any) -> Any:
        """The run ends; the cloud goes on."""
        return empty_pb2.Empty()


@contextmanager
def told(context: Any) -> Iterator[None]:
    """What the cloud refuses, told to the engine as a provider tells it."""
    try:
        yield
    except Refused as refused:
        context.abort(grpc.StatusCode.UNKNOWN, str(refused))


@contextmanager
def serving(cloud: Cloud) -> Iterator[int]:
    """The port on which a stand-in answers while the block runs."""
    # A thread for every resource that may be under way at once: each sleeps through its delay.
    server = grpc.server(futures.ThreadPoolExecutor(128), options=[("grpc.max_receive_message_length", -1)])
    provider_pb2_grpc.add_ResourceProviderServicer_to_server(StandIn(cloud), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield port
    finally:
        server.stop(grace=None)
