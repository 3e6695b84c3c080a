"""The metadata service of a rehearsed node."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from http.client import RemoteDisconnected
from pathlib import Path

import pytest
from botocore.credentials import InstanceMetadataFetcher, InstanceMetadataProvider
from botocore.utils import IMDSFetcher

from gpufleet.rehearsal.clock import ManualClock
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.gate import NODE_KEY
from gpufleet.rehearsal.imds import Fault, Imds
from tests.rehearsal.declared import fleet
from tests.waiting import HANG_S

ACTION = "meta-data/spot/instance-action"
REBALANCE = "meta-data/events/recommendations/rebalance"


def token(endpoint: str) -> str:
    headers = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    request = urllib.request.Request(f"{endpoint}/latest/api/token", method="PUT", headers=headers)
    with urllib.request.urlopen(request) as answer:
        return str(answer.read().decode())


def get(endpoint: str, path: str, key: str | None = None) -> tuple[int, str]:
    headers = {"X-aws-ec2-metadata-token": key if key is not None else token(endpoint)}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{endpoint}/latest/{path}", headers=headers)) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.fixture
def imds() -> Iterator[Imds]:
    with Imds(clock=ManualClock(), access_key="ASIA1") as imds:
        yield imds


def test_without_a_token_nothing_is_told(imds: Imds) -> None:
    assert get(imds.endpoint, "meta-data/instance-id", key="made-up")[0] == 401
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{imds.endpoint}/latest/meta-data/instance-id")
    refused.value.close()
    assert refused.value.code == 401


def test_a_token_ends_with_its_time(imds: Imds) -> None:
    key = token(imds.endpoint)
    assert isinstance(imds.clock, ManualClock)
    imds.clock.advance(59)
    assert get(imds.endpoint, "meta-data/instance-id", key)[0] == 200
    imds.clock.advance(1)
    assert get(imds.endpoint, "meta-data/instance-id", key)[0] == 401


@pytest.mark.parametrize("seconds", [None, "0", "21601", "soon"])
def test_a_token_lives_from_a_second_to_six_hours(imds: Imds, seconds: str | None) -> None:
    assert imds.new_token(seconds) is None


def test_it_knows_the_instance(imds: Imds) -> None:
    assert get(imds.endpoint, "meta-data/instance-id") == (200, "i-0123456789abcdef0")
    assert get(imds.endpoint, "meta-data/placement/availability-zone") == (200, "us-east-2a")
    assert get(imds.endpoint, "meta-data/placement/region") == (200, "us-east-2")
    assert get(imds.endpoint, "meta-data/instance-life-cycle") == (200, "spot")
    assert get(imds.endpoint, "meta-data/tags/instance")[0] == 404
    document = json.loads(get(imds.endpoint, "dynamic/instance-identity/document")[1])
    assert document["pendingTime"] == "2026-11-21T12:00:00Z"


def test_notice_and_recommendation_are_404_until_there_is_one(imds: Imds) -> None:
    assert get(imds.endpoint, ACTION)[0] == get(imds.endpoint, REBALANCE)[0] == 404
    imds.notice(datetime(2026, 11, 21, 12, 2, tzinfo=UTC))
    imds.rebalance(datetime(2026, 11, 21, 12, 1, tzinfo=UTC))
    assert json.loads(get(imds.endpoint, ACTION)[1]) == {"action": "terminate", "time": "2026-11-21T12:02:00Z"}
    assert json.loads(get(imds.endpoint, REBALANCE)[1]) == {"noticeTime": "2026-11-21T12:01:00Z"}


@pytest.mark.parametrize(("fault", "status"), [("500", 500), ("garbage", 200), ("bad-time", 200), ("401", 401)])
def test_a_fault_spoils_the_notice_paths(imds: Imds, fault: Fault, status: int) -> None:
    imds.notice(imds.clock.now())
    imds.fault = fault
    got, body = get(imds.endpoint, ACTION)
    assert got == status
    assert "2026" not in body


def test_a_silent_service_closes_the_connection(imds: Imds) -> None:
    key = token(imds.endpoint)
    imds.fault, imds.slow_s = "silent", 0.0
    with pytest.raises(RemoteDisconnected):
        get(imds.endpoint, ACTION, key)


def test_faults_leave_the_rest_alone(imds: Imds) -> None:
    imds.fault = "500"
    assert get(imds.endpoint, "meta-data/instance-id")[0] == 200


def test_botocore_gets_the_roles_credentials(imds: Imds) -> None:
    fetcher = InstanceMetadataFetcher(
        timeout=HANG_S, num_attempts=1, config={"ec2_metadata_service_endpoint": imds.endpoint}
    )
    assert isinstance(fetcher, IMDSFetcher)
    credentials = InstanceMetadataProvider(fetcher).load()
    assert credentials is not None
    assert credentials.get_frozen_credentials().access_key == "ASIA1"


def test_a_fleets_node_has_its_own_service_with_its_own_notice(tmp_path: Path) -> None:
    clock = ManualClock()
    with Cloud(tmp_path, clock=clock) as cloud:
        fleet_id = fleet(cloud)
        cloud.tick()
        node = cloud.instances()[0]
        endpoint = cloud.metadata(node.id).endpoint
        assert get(endpoint, "meta-data/tags/instance/aws:ec2:fleet-id") == (200, fleet_id)
        assert get(endpoint, ACTION)[0] == 404
        cloud.interrupt(node.id)
        assert json.loads(get(endpoint, ACTION)[1])["time"] == "2026-11-21T12:02:00Z"
        cloud.rebalance(node.id)
        assert json.loads(get(endpoint, REBALANCE)[1])["noticeTime"] == "2026-11-21T12:00:00Z"
        assert cloud.metadata(node.id).access_key == NODE_KEY
        clock.advance(121)
        cloud.tick()
        with pytest.raises(urllib.error.URLError):
            get(endpoint, ACTION)
