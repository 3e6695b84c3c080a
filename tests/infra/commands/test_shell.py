"""A shell on a node, and a run's figures in TensorBoard: the calls to AWS, and the messages about missing tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import ClientError

from gpufleet.infra.account import aws
from gpufleet.infra.commands import shell, tensorboard
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import AwsRefused, GpufleetError
from gpufleet.job.contract import metrics
from gpufleet.rehearsal.cloud import Cloud
from tests.infra.commands_world import declare_bucket, declare_fleet, put

SESSION = {"SessionId": "s-1", "TokenValue": "secret", "StreamUrl": "wss://stream", "ResponseMetadata": {}}


class Ssm:
    """Session Manager that gives a session, or answers with an error code."""

    meta = SimpleNamespace(endpoint_url="https://ssm.us-east-2.amazonaws.com")

    def __init__(self, refuses: str = "") -> None:
        self.refuses, self.asked = refuses, list[dict[str, Any]]()

    def start_session(self, **asked: Any) -> dict[str, Any]:
        self.asked.append(asked)
        if self.refuses:
            raise ClientError({"Error": {"Code": self.refuses, "Message": ""}}, "StartSession")
        return SESSION


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / shell.PLUGIN).write_text("")
    (tmp_path / "bin" / shell.PLUGIN).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("AWS_PROFILE", raising=False)


def opened(stack: StackDefinition, ssm: Ssm, *, on_node: bool = False) -> list[tuple[list[str], dict[str, str]]]:
    """The command that `gpufleet shell` starts."""
    started = []

    def start(words: Sequence[str], environment: Mapping[str, str]) -> int:
        started.append((list(words), dict(environment)))
        return 3

    assert shell.open_shell(stack, aws.client("ec2", "us-east-2"), ssm, on_node=on_node, start=start) == 3
    return started


@pytest.mark.usefixtures("plugin")
def test_the_plugin_gets_a_session_into_the_container_and_no_argument_shows_its_token(
    cloud: Cloud, stack: StackDefinition
) -> None:
    declare_fleet(cloud)
    cloud.tick()
    (node,) = cloud.instances()
    ssm = Ssm()
    ((words, environment),) = opened(stack, ssm)
    (asked,) = ssm.asked
    assert (asked["Target"], asked["DocumentName"]) == (node.id, "AWS-StartInteractiveCommand")
    assert "docker exec -it" in asked["Parameters"]["command"][0]
    assert words[:5] == [shell.PLUGIN, "AWS_SSM_START_SESSION_RESPONSE", "us-east-2", "StartSession", ""]
    assert "secret" not in " ".join(words)
    assert json.loads(environment["AWS_SSM_START_SESSION_RESPONSE"])["TokenValue"] == "secret"
    beside = Ssm()
    opened(stack, beside, on_node=True)
    assert beside.asked == [{"Target": node.id}]


@pytest.mark.usefixtures("plugin")
def test_without_a_node_or_its_agent_it_says_so(cloud: Cloud, stack: StackDefinition) -> None:
    with pytest.raises(AwsRefused, match=r"no node of .* is running: `gpufleet wait"):
        opened(stack, Ssm())
    declare_fleet(cloud)
    cloud.tick()
    with pytest.raises(AwsRefused, match=r"has not registered with Session Manager yet.* SSM agent"):
        opened(stack, Ssm("TargetNotConnected"))


def test_without_the_plugin_it_says_where_it_is_got(stack: StackDefinition, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(GpufleetError, match="session-manager-plugin, which is not installed on this machine: https:"):
        opened(stack, Ssm())


def line(step: int, at: float, loss: float, **more: Any) -> bytes:
    return metrics.write({"ts": at, "phase": "train", "step": step, "loss": loss, **more})


def test_a_board_follows_the_lines_and_what_is_trained_again_takes_the_place_of_what_was(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    made = tensorboard.Board(tmp_path)
    first = line(10, 1000.0, 3.0, gpu_temp_c=61.0) + line(20, 1010.0, 2.5)
    assert made.follow(first) == 2
    assert made.follow(first + b'{"torn') == 0
    assert made.follow(line(10, 1000.0, 3.0, gpu_temp_c=61.0) + line(20, 2000.0, 2.0) + line(30, 2010.0, 1.5)) == 2
    made.close()
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert [(each.step, each.value) for each in read.Scalars("loss")] == [(10, 3.0), (20, 2.0), (30, 1.5)]
    assert [each.value for each in read.Scalars("gpu_temp_c")] == [61.0]


def test_tensorboard_is_served_with_the_lines_of_the_bucket_until_it_ends(
    cloud: Cloud, stack: StackDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cloud, declare_bucket(cloud), "metrics.jsonl", line(10, 1000.0, 3.0))
    started, said, looks = list[list[str]](), list[str](), list[float]()

    class Server:
        returncode = 0

        def __init__(self, words: list[str], **_: Any) -> None:
            started.append(words)

        def poll(self) -> int | None:
            return 0 if looks else None

        def terminate(self) -> None: ...

        wait = terminate

    monkeypatch.setattr(tensorboard, "Popen", Server)
    assert tensorboard.serve(stack, aws.client("s3", "us-east-2"), port=7007, say=said.append, sleep=looks.append) == 0
    assert started[0][-6:] == ["--host", "localhost", "--port", "7007", "--reload_interval", "10"]
    assert said[0].startswith("1 lines of s3://")
    assert looks == [tensorboard.EVERY_S]


def test_without_tensorboard_it_says_what_to_install(stack: StackDefinition, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard, "find_spec", lambda name: None)
    with pytest.raises(GpufleetError, match="pip install tensorboard"):
        tensorboard.serve(stack, None, port=6006)
