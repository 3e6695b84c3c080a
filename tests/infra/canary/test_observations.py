"""A canary's facts, without names of people or accounts, and the assumptions judged by these facts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpufleet.infra.canary.assumptions import EXPECTATIONS, Assumption, _judged, judge, known
from gpufleet.infra.canary.observations import FlightFacts, redacted
from tests.repository import ROOT

PLANTED = (
    ("account", {"OwnerId": "123456789012"}),
    ("account", {"text": "of account 123456789012."}),
    ("arn", {"text": "arn:aws:iam::123456789012:user/alice.smith is not authorized"}),
    ("role", {"RoleArn": "arn:aws:sts::123456789012:assumed-role/Admin/alice.smith"}),
    ("user", {"UserId": "AIDAJQABLZS4A3QDU576Q", "UserName": "alice.smith"}),
    ("instance", {"InstanceId": "i-0123456789abcdef0", "SubnetId": "subnet-0123456789abcdef0"}),
    ("fleet", {"FleetId": "fleet-12a34b56-7890-4abc-8def-0123456789ab"}),
    ("short id", {"VpcId": "vpc-1a2b3c4d", "SpotInstanceRequestId": "sir-abcd1234"}),
    ("address", {"PrivateIpAddress": "10.11.12.13", "Ipv6": "2001:db8:85a3:0:0:8a2e:370:7334"}),
    ("mac", {"MacAddress": "0e:49:61:0f:c3:11"}),
    ("host", {"PrivateDnsName": "ip-10-11-12-13.us-east-2.compute.internal", "text": "at ip-10-11-12-13.ec2.internal"}),
    ("mail", {"Endpoint": "alice.smith@example.org"}),
    ("key", {"text": "AKIAIOSFODNN7EXAMPLE", "AccessKeyId": "ASIAIOSFODNN7EXAMPLE"}),
    ("secret", {"SecretAccessKey": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"}),
    ("token", {"text": "https://b/k?X-Amz-Security-Token=FwoGZXIvYXdzEXAMPLE&X-Amz-Signature=" + "ab" * 32}),
    ("signature", {"Authorization": "AWS4-HMAC-SHA256 Signature=" + "cd" * 32}),
    ("bucket", {"Name": "gpufleet-canary-1a2b3c4", "Key": "gpufleet-canary-cap-stop-9f8e7d6"}),
    ("user data", {"UserData": "IyEvYmluL2Jhc2gKZWNobyBoZWxsbwo="}),
    ("hash", {"text": "of " + "ef" * 16}),
    ("blob", {"text": "a token QUJDREVG" + "Ghij/KLm+N" * 4 + "=="}),
    ("request", {"ResponseMetadata": {"RequestId": "7a62c49f-347e-4fc4-9331-6e8eEXAMPLE"}}),
)  # fmt: skip
LEAKS = (
    "123456789012", "alice", "AIDAJQ", "0123456789abcdef0", "12a34b56", "1a2b3c4d", "abcd1234", "10.11.12.13",
    "10-11-12-13", "2001:db8", "0e:49", "example.org", "IOSFODNN7", "wJalr", "FwoGZX", "abab", "cdcd", "1a2b3c4",
    "9f8e7d6", "IyEv", "7a62c49f", "efef", "QUJD",
)  # fmt: skip


@pytest.mark.parametrize(("kind", "answer"), PLANTED, ids=[f"{kind}-{n}" for n, (kind, _) in enumerate(PLANTED)])
def test_what_names_somebody_is_taken_out_of_an_answer(kind: str, answer: dict[str, Any]) -> None:
    for nested in (answer, {"List": [{"Deep": answer}]}):
        text = json.dumps(redacted(nested))
        assert [leak for leak in LEAKS if leak in text] == [], kind


def test_what_names_nobody_stays() -> None:
    answer = {"InstanceType": "g4dn.xlarge", "Zone": "us-east-2a", "Code": "UnauthorizedOperation", "Count": 3}
    assert redacted(answer) == answer
    assert redacted("2026-11-29T16:12:07+00:00") == "2026-11-29T16:12:07+00:00"


def test_each_assumption_is_said_once_and_stands_beside_code_that_is_there() -> None:
    assert len({each.id for each in known()}) == len(known()) >= 100
    for each in known():
        assert (ROOT / each.where).is_file(), each
        assert each.says.endswith("."), each
        assert sum(map(bool, (each.seen, each.answer, each.ask))) == 1, each
        assert each.expected[0] in (*EXPECTATIONS, "has"), each


def test_nothing_is_held_that_was_not_seen() -> None:
    assert {each.state for each in judge(FlightFacts())} == {"not met"}


@pytest.mark.parametrize(
    ("expected", "held", "refuted"),
    [
        (("is", True), True, False),
        (("is", 0), 0, "not within 5 s"),
        (("at_most", 10), 9.5, 11),
        (("at_most", 10), 10, "not within 5 s"),
        (("at_least", 0.99), 1, 0.5),
        (("within", [105, 120]), 120, 30.2),
        (("one_of", ["a", "b"]), "b", "c"),
        (("like", "^All G"), "All G and VT", "No G"),
        (("at_most", 1), 0, True),
    ],
)
def test_one_value_beside_what_is_expected_refutes(expected: tuple[str, Any], held: object, refuted: object) -> None:
    row = Assumption(id="x", says="X.", where="README.md", source="", seen="x", expected=expected)
    facts = FlightFacts()
    facts.add("x", held)
    assert _judged(row, facts).state == "held"
    facts.add("x", refuted)
    found = _judged(row, facts)
    assert (found.state, found.seen) == ("refuted", str(refuted))


def test_a_field_that_an_answer_lacks_is_named() -> None:
    row = Assumption(id="x", says="X.", where="README.md", source="", answer="ec2.D", has=("Fleets[].Id", "Fleets[].S"))
    facts = FlightFacts()
    facts._raw["ec2.D"] = [{"Fleets": []}]
    assert _judged(row, facts).state == "not met"
    facts._raw["ec2.D"].append({"Fleets": [{"Id": "f", "S": "active"}]})
    assert _judged(row, facts).state == "held"
    facts._raw["ec2.D"].append({"Fleets": [{"Id": "f"}]})
    assert _judged(row, facts).seen == "without Fleets[].S"
