"""The stack's own state, read while the engine writes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from gpufleet.infra.program import previous
from gpufleet.infra.program.run_guard import Previous

ANSWERS: dict[str, Mapping[str, Any]] = {
    "pulumi:pulumi:readStackOutputs": {"outputs": {"run": {"id": "r1"}}},
    "pulumi:pulumi:readStackResourceOutputs": {
        "outputs": {
            "a": {
                "type": "aws:ec2/fleet:Fleet",
                "outputs": {"arn": "arn:aws:ec2:us-east-2:1:fleet/fleet-1", "tags": {"gpufleet:run": "r1"}},
            },
            "b": {"type": "aws:ec2/vpc:Vpc", "outputs": {"tags": {"gpufleet:run": "r0"}}},
            "e": {"type": "aws:s3/bucketObjectv2:BucketObjectv2", "outputs": {"key": "r2/run.json"}},
            "f": {
                "type": "aws:s3/bucketObjectv2:BucketObjectv2",
                "outputs": {"key": "inputs/c/job.tar.gz"},
            },
            "c": {"type": "pulumi:providers:aws", "outputs": {"region": "us-east-2", "version": "7.51.1"}},
            "d": {"type": "pulumi:providers:pulumi", "outputs": {}},
        }
    },
}


class PulumiEngine:
    """Refuses the first questions, with the words in `refusals`."""

    def __init__(self, refusals: int, words: str) -> None:
        self.refusals, self.words, self.asked = refusals, words, 0

    def __call__(self, token: str, arguments: dict[str, Any]) -> Mapping[str, Any]:
        self.asked += 1
        if self.asked <= self.refusals:
            raise Exception(self.words)
        assert set(arguments.values()) == {"org/gpufleet/growth"}
        return ANSWERS[token]


def test_a_state_that_is_just_being_written_is_read_again() -> None:
    engine, pauses = PulumiEngine(3, "rpc error: failed to load checkpoint: EOF"), list[float]()
    found = previous.previous("org/gpufleet/growth", engine, pause=pauses.append)
    assert found.outputs == {"run": {"id": "r1"}}
    assert found.fleets == {"r1"}
    assert found.fleet_ids == {"fleet-1"}
    assert found.objects == {"r2/run.json", "inputs/c/job.tar.gz"}
    assert found.region == "us-east-2"
    assert len(pauses) == 3


def test_a_state_that_stays_unreadable_is_an_error() -> None:
    engine, pauses = PulumiEngine(1000, "failed to load checkpoint: EOF"), list[float]()
    with pytest.raises(Exception, match="failed to load checkpoint"):
        previous.previous("org/gpufleet/growth", engine, pause=pauses.append)
    assert engine.asked == previous.TRIES


def test_a_fleet_without_tags_is_still_a_fleet() -> None:
    bare: Mapping[str, Any] = {"outputs": {"a": {"type": previous.FLEET, "outputs": {}}}}
    assert previous.previous("s", lambda token, _: bare).fleets == {""}


def test_any_other_refusal_is_passed_on_at_once() -> None:
    engine = PulumiEngine(1000, "access denied")
    with pytest.raises(Exception, match="access denied"):
        previous.previous("org/gpufleet/growth", engine, pause=lambda seconds: None)
    assert engine.asked == 1


def test_a_component_is_what_its_own_outputs_and_tags_say() -> None:
    kind, fleet, stored = "gpufleet:index:TrainingRun", previous.FLEET, "aws:s3/bucketObjectv2:BucketObjectv2"

    def tagged(stack: str, **more: str) -> dict[str, Any]:
        return {"tags": {"gpufleet:stack": stack, "gpufleet:run": "r1"}, **more}

    outputs = {"run": {"id": "r1"}, "definition": "mine", "region": "us-east-2"}
    there = {
        "urn:pulumi:dev::p::gpufleet:index:TrainingRun::one": {"type": kind, "outputs": outputs},
        "urn:pulumi:dev::p::gpufleet:index:TrainingRun::two": {"type": kind, "outputs": {"definition": "other"}},
        "a": {"type": fleet, "outputs": tagged("mine")},
        "b": {"type": fleet, "outputs": {"tags": {"gpufleet:stack": "other", "gpufleet:run": "r7"}}},
        "c": {"type": stored, "outputs": tagged("mine", key="r1/run.json")},
        "d": {"type": stored, "outputs": tagged("other", key="r7/run.json")},
        "e": {"type": "other:index:Thing", "outputs": {}},
    }

    def asked(names: list[str], definition: str) -> Previous:
        return previous.previous_of_component("s", kind, names, definition, lambda token, _: {"outputs": there})

    mine = Previous(outputs=outputs, fleets=frozenset({"r1"}), objects=frozenset({"r1/run.json"}), region="us-east-2")
    assert asked(["one"], "renamed") == mine
    assert asked(["first", "one"], "mine") == mine  # a component whose name was "one"
    assert asked(["two", "one"], "mine") == mine
    assert asked(["first"], "mine").other == "one"
    assert asked(["three"], "third") == Previous(outputs={})
    assert previous.previous_of_component("s", kind, ["one"], "mine", lambda token, _: {}) == Previous(outputs={})
