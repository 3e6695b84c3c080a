"""The gRPC provider as the engine meets it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf import empty_pb2
from pulumi.runtime.proto import provider_pb2, provider_pb2_grpc

from gpufleet.rehearsal.clock import ManualClock
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.handlers import HANDLERS
from gpufleet.rehearsal.provider import plain, serve, struct

URN = "urn:pulumi:s::gpufleet::gpufleet:infra:Network$aws:ec2/vpc:Vpc::network-vpc"


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Iterator[provider_pb2_grpc.ResourceProviderStub]:
    folder: Path = tmp_path_factory.mktemp("cloud")
    with (
        Cloud(folder, clock=ManualClock()) as cloud,
        serve(cloud.environment()) as port,
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub = provider_pb2_grpc.ResourceProviderStub(channel)
        stub.Configure(provider_pb2.ConfigureRequest(args=struct({"region": "us-east-2"})))
        yield stub


def test_the_methods_that_the_engine_begins_with_answer(provider: provider_pb2_grpc.ResourceProviderStub) -> None:
    assert provider.Handshake(provider_pb2.ProviderHandshakeRequest()) is not None
    assert provider.GetPluginInfo(empty_pb2.Empty()).version


def test_a_method_that_is_not_offered_answers_unimplemented(
    provider: provider_pb2_grpc.ResourceProviderStub,
) -> None:
    with pytest.raises(grpc.RpcError) as error:
        provider.Call(provider_pb2.CallRequest())
    assert error.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_a_schema_has_every_type_for_pulumi_import(provider: provider_pb2_grpc.ResourceProviderStub) -> None:
    schema = json.loads(provider.GetSchema(provider_pb2.GetSchemaRequest()).schema)
    assert (schema["name"], set(schema["resources"])) == ("aws", set(HANDLERS))
    assert schema["resources"]["aws:s3/bucketPolicy:BucketPolicy"]["requiredInputs"] == ["bucket", "policy"]


def test_a_provider_without_a_region_is_refused(provider: provider_pb2_grpc.ResourceProviderStub) -> None:
    answer = provider.CheckConfig(provider_pb2.CheckRequest(news=struct({})))
    assert [failure.property for failure in answer.failures] == ["region"]


def test_another_region_means_other_resources(provider: provider_pb2_grpc.ResourceProviderStub) -> None:
    regions = {"olds": struct({"region": "us-east-2"}), "news": struct({"region": "us-west-2"})}
    assert provider.DiffConfig(provider_pb2.DiffRequest(**regions)).replaces == ["region"]


def test_an_unknown_type_is_one_sentence_and_no_traceback(provider: provider_pb2_grpc.ResourceProviderStub) -> None:
    urn = "urn:pulumi:s::gpufleet::aws:sqs/queue:Queue::q"
    with pytest.raises(grpc.RpcError) as error:
        provider.Check(provider_pb2.CheckRequest(urn=urn, news=struct({})))
    assert error.value.details().startswith("the embedded AWS has no resource type aws:sqs/queue:Queue")


def test_a_preview_creates_nothing(provider: provider_pb2_grpc.ResourceProviderStub) -> None:
    inputs = struct({"cidrBlock": "10.0.0.0/16"})
    answer = provider.Create(provider_pb2.CreateRequest(urn=URN, properties=inputs, preview=True))
    assert answer.id == ""
    assert plain(answer.properties)["cidrBlock"] == "10.0.0.0/16"


def test_a_difference_says_of_what_and_whether_it_replaces(provider: provider_pb2_grpc.ResourceProviderStub) -> None:
    change = {"olds": struct({"cidrBlock": "10.0.0.0/16"}), "news": struct({"cidrBlock": "10.1.0.0/16"})}
    answer = provider.Diff(provider_pb2.DiffRequest(urn=URN, **change))
    assert answer.changes == provider_pb2.DiffResponse.DIFF_SOME
    assert answer.detailedDiff["cidrBlock"].kind == provider_pb2.PropertyDiff.UPDATE_REPLACE
    same = provider_pb2.DiffRequest(urn=URN, olds=change["olds"], news=change["olds"])
    assert provider.Diff(same).changes == provider_pb2.DiffResponse.DIFF_NONE


def test_a_read_of_what_is_gone_answers_without_an_id(provider: provider_pb2_grpc.ResourceProviderStub) -> None:
    inputs = struct({"cidrBlock": "10.0.0.0/16"})
    made = provider.Create(provider_pb2.CreateRequest(urn=URN, properties=inputs))
    asked = provider_pb2.ReadRequest(urn=URN, id=made.id, properties=made.properties, inputs=inputs)
    assert plain(provider.Read(asked).inputs) == {"cidrBlock": "10.0.0.0/16"}
    provider.Delete(provider_pb2.DeleteRequest(urn=URN, id=made.id, properties=made.properties))
    assert provider.Read(asked).id == ""


def test_aws_s_refusal_arrives_as_its_own_words(provider: provider_pb2_grpc.ResourceProviderStub) -> None:
    with pytest.raises(grpc.RpcError) as error:
        provider.Delete(provider_pb2.DeleteRequest(urn=URN, id="vpc-00000000", properties=struct({})))
    assert "vpc-00000000" in error.value.details()
    assert "Traceback" not in error.value.details()


def test_whole_numbers_stay_whole() -> None:
    assert plain(struct({"a": 1, "b": [2.5, {"c": 3}], "d": True, "e": "1"})) == {
        "a": 1,
        "b": [2.5, {"c": 3}],
        "d": True,
        "e": "1",
    }
