"""The embedded AWS as a Pulumi provider: a gRPC server that the engine uses for package `aws` instead of the plugin.
The variable PULUMI_DEBUG_PROVIDERS=aws:PORT tells the engine to use it, so that it need not be named in Pulumi.yaml or
in the program. The protocol is pulumi/proto/pulumi/provider.proto; methods that are not implemented answer
UNIMPLEMENTED, which the engine takes as "not offered".
"""

# ruff: noqa: N802 - the protocol names the methods
from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import wraps
from typing import Any

import grpc
from botocore.exceptions import BotoCoreError, ClientError
from google.protobuf import empty_pb2, json_format, struct_pb2
from pulumi.runtime.proto import plugin_pb2, provider_pb2, provider_pb2_grpc

from gpufleet.rehearsal.handlers import HANDLERS, handler, table
from gpufleet.rehearsal.handlers.table import Aws, Properties, UnsupportedError

_MESSAGE_BYTES = 64 * 1024 * 1024  # larger than gRPC's default of 4 MiB, because objects are sent inside of messages


def plain(message: struct_pb2.Struct) -> Properties:
    """A Struct as JSON values, with whole numbers as int for boto3."""
    return dict(_with_integers(json_format.MessageToDict(message)))


def struct(properties: Mapping[str, Any]) -> struct_pb2.Struct:
    message = struct_pb2.Struct()
    message.update(dict(properties))
    return message


def _with_integers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_integers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_integers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _explained(method: Any) -> Any:
    """Passes the resource's type token to the method, and turns refusals into one sentence for the user. Any other
    error is a mistake of this project, and keeps its traceback.
    """

    @wraps(method)
    def call(self: Provider, request: Any, context: grpc.ServicerContext) -> Any:
        kind = request.urn.split("::")[2].split("$")[-1]  # of urn:pulumi:stack::project::parent$type::name
        try:
            return method(self, request, context, kind)
        except (ClientError, BotoCoreError, UnsupportedError) as error:
            context.abort(grpc.StatusCode.UNKNOWN, str(error))

    return call


class Provider(provider_pb2_grpc.ResourceProviderServicer):
    """The provider for one account. Each provider resource has its own connection, and so its own region."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._by_connection: dict[str, Aws] = {}

    def Handshake(self, request: Any, context: Any) -> Any:
        return provider_pb2.ProviderHandshakeResponse()

    def Attach(self, request: Any, context: Any) -> Any:
        return empty_pb2.Empty()

    def GetPluginInfo(self, request: Any, context: Any) -> Any:
        return plugin_pb2.PluginInfo(version=importlib.metadata.version("pulumi-aws"))

    def GetSchema(self, request: Any, context: Any) -> Any:
        """The schema for `pulumi import`. The schema has all types, with properties of any kind."""
        anything = {"$ref": "pulumi.json#/Any"}
        resources = {
            kind: {
                "inputProperties": dict.fromkeys(sorted(handled.required | handled.optional), anything),
                "properties": dict.fromkeys(sorted(handled.required | handled.optional | handled.computed), anything),
                "requiredInputs": sorted(handled.required),
            }
            for kind, handled in HANDLERS.items()
        }
        whole = {"name": "aws", "version": importlib.metadata.version("pulumi-aws"), "resources": resources}
        return provider_pb2.GetSchemaResponse(schema=json.dumps(whole))

    def Cancel(self, request: Any, context: Any) -> Any:
        return empty_pb2.Empty()

    def CheckConfig(self, request: Any, context: Any) -> Any:
        missing = (
            [] if plain(request.news).get("region") else [("region", "an explicit provider with a region is needed")]
        )
        return provider_pb2.CheckResponse(inputs=request.news, failures=_failures(missing))

    def DiffConfig(self, request: Any, context: Any) -> Any:
        changed = plain(request.olds).get("region") != plain(request.news).get("region")
        return _diff_response({"region": True} if changed else {})

    def Configure(self, request: Any, context: Any) -> Any:
        region = str(plain(request.args)["region"])
        self._by_connection[context.peer()] = Aws(environment=self._environment, region=region)
        return provider_pb2.ConfigureResponse(supportsPreview=True)

    @_explained
    def Check(self, request: Any, context: Any, kind: str) -> Any:
        old, new = plain(request.olds), plain(request.news)
        name = request.urn.split("::", 3)[3]
        inputs, failures = table.check(kind, handler(kind), name, old, new, request.randomSeed)
        return provider_pb2.CheckResponse(inputs=struct(inputs), failures=_failures(failures))

    @_explained
    def Diff(self, request: Any, context: Any, kind: str) -> Any:
        changed, ignored = table.diff(handler(kind), plain(request.olds), plain(request.news)), request.ignoreChanges
        reported = {path: change for path, change in changed.items() if not {path, path.split(".")[0]} & set(ignored)}
        return _diff_response(reported)

    @_explained
    def Create(self, request: Any, context: Any, kind: str) -> Any:
        aws, inputs = self._aws(context), plain(request.properties)
        if request.preview:
            return provider_pb2.CreateResponse(properties=struct(table.expected(handler(kind), {}, inputs)))
        resource_id = handler(kind).create(aws, inputs)
        state = table.written(kind, handler(kind), aws, resource_id, inputs)
        return provider_pb2.CreateResponse(id=resource_id, properties=struct(state))

    @_explained
    def Read(self, request: Any, context: Any, kind: str) -> Any:
        old_inputs = plain(request.inputs)
        state = table.state(handler(kind), self._aws(context), request.id, {**plain(request.properties), **old_inputs})
        if state is None:
            # if the answer has no id, the engine removes the resource from the stack's state
            return provider_pb2.ReadResponse()
        inputs = {key: state[key] for key in old_inputs if key in state}
        return provider_pb2.ReadResponse(id=request.id, properties=struct(state), inputs=struct(inputs))

    @_explained
    def Update(self, request: Any, context: Any, kind: str) -> Any:
        aws, old, new = self._aws(context), plain(request.olds), plain(request.news)
        if request.preview:
            return provider_pb2.UpdateResponse(properties=struct(table.expected(handler(kind), old, new)))
        update = handler(kind).update
        if update is None:
            raise UnsupportedError(f"{kind} cannot be updated in place")
        update(aws, request.id, old, new)
        return provider_pb2.UpdateResponse(properties=struct(table.written(kind, handler(kind), aws, request.id, new)))

    @_explained
    def Delete(self, request: Any, context: Any, kind: str) -> Any:
        handler(kind).delete(self._aws(context), request.id, plain(request.properties))
        return empty_pb2.Empty()

    def _aws(self, context: Any) -> Aws:
        return self._by_connection[context.peer()]


@contextmanager
def serve(environment: Mapping[str, str]) -> Iterator[int]:
    """A context with a provider for one embedded AWS, on a loopback port."""
    options = [("grpc.max_receive_message_length", _MESSAGE_BYTES), ("grpc.max_send_message_length", _MESSAGE_BYTES)]
    executor = ThreadPoolExecutor(max_workers=32)
    server = grpc.server(executor, options=options)
    provider_pb2_grpc.add_ResourceProviderServicer_to_server(Provider(environment), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield port
    finally:
        server.stop(grace=None).wait()
        executor.shutdown()  # requests of an engine that has ended are finished before the next engine begins


def _failures(failures: list[tuple[str, str]]) -> list[Any]:
    return [provider_pb2.CheckFailure(property=name, reason=reason) for name, reason in failures]


def _diff_response(changed: Mapping[str, bool]) -> Any:
    """A detailed diff. Without it, the engine would show an update, but not which properties are updated."""
    kinds = {True: provider_pb2.PropertyDiff.Kind.UPDATE_REPLACE, False: provider_pb2.PropertyDiff.Kind.UPDATE}
    return provider_pb2.DiffResponse(
        changes=provider_pb2.DiffResponse.DIFF_SOME if changed else provider_pb2.DiffResponse.DIFF_NONE,
        replaces=[path for path, replaces in changed.items() if replaces],
        diffs=list(changed),
        detailedDiff={path: provider_pb2.PropertyDiff(kind=kinds[replaces]) for path, replaces in changed.items()},
        hasDetailedDiff=True,
    )
