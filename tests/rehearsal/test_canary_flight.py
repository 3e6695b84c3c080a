"""What a canary is refused before anything is made, its interruption by FIS, and whole flights."""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gpufleet.infra.account.fleet import nodes_of
from gpufleet.infra.canary import notice, stacks
from gpufleet.infra.canary.assumptions import judge, known
from gpufleet.infra.canary.flight import Flight, PhaseError
from gpufleet.infra.cli import main
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import AwsRefused, GpufleetError
from gpufleet.job.contract.done import Done
from gpufleet.rehearsal import canary, gate, scratch
from gpufleet.rehearsal.clock import ManualClock
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.gate import Gate
from gpufleet.rehearsal.habits import Habits
from gpufleet.rehearsal.launch import Launcher
from tests import forked
from tests.rehearsal.canary_program import pinned

GPU_SPOT = "L-3819A6DF"


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Cloud]:
    with Cloud(tmp_path / "cloud", clock=ManualClock()) as made:
        yield made


def choose(cloud: Cloud, tmp_path: Path, *, by_notice: bool = True) -> stacks.Chosen:
    project = scratch.make(tmp_path / "project", {})
    return stacks.choose(project, "r1", cloud.region, cloud.client, stacks.AWS, notice=by_notice)


def test_the_bill_is_within_half_a_dollar_and_names_each_part(cloud: Cloud, tmp_path: Path) -> None:
    chosen = choose(cloud, tmp_path)
    assert chosen.usd <= stacks.MOST_USD
    assert [line.partition(":")[0] for line in chosen.lines] == [
        "canary",
        "canary-cap, twice",
        "a notice by AWS Fault Injection Service",
    ]
    assert chosen.types[0] == "g4dn.xlarge"
    assert cloud.leftovers() == {}


def test_without_a_gpu_it_flies_on_the_cheapest_types_that_have_none(cloud: Cloud, tmp_path: Path) -> None:
    project = scratch.make(tmp_path / "project", {})
    cloud.quotas[GPU_SPOT] = 0
    scale = stacks.AWS.without_gpu()
    chosen = stacks.choose(project, "r1", cloud.region, cloud.client, scale, notice=True)
    assert chosen.types == ["c7i.xlarge", "m7i.2xlarge"]  # the next one's cap of 0.05 USD would not pay its boot
    assert chosen.usd <= stacks.MOST_USD
    for name in stacks.NAMES:
        stack = stacks.definition(project, name)
        assert (stack.job.parameters.device, stack.job.image) == ("cpu", stacks.PYTHON)


def test_without_a_quota_it_is_refused_with_a_sentence(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "TRIED", 1)
    cloud.quotas[GPU_SPOT] = 0
    with pytest.raises(AwsRefused, match=r"nothing was made:\n  - g4dn.xlarge: All G and VT Spot .* is 0 vCPUs"):
        choose(cloud, tmp_path)
    assert cloud.leftovers() == {}


def test_a_right_that_is_missing_is_named(cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "TYPES", 1)
    cloud.deny("CreateRole")
    cloud.deny("CreateBucket")
    with pytest.raises(AwsRefused, match=r"nothing was made:\n.*lacks: iam:CreateRole, s3:CreateBucket\b"):
        choose(cloud, tmp_path)
    assert cloud.leftovers() == {}


def test_a_price_above_the_cap_is_refused(cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "TYPES", 1)
    monkeypatch.setattr(stacks, "MOST_USD", Decimal("0.40"))
    with pytest.raises(GpufleetError, match=r"up to 0.49 USD; allowed are 0.40. Nothing was made"):
        choose(cloud, tmp_path)
    assert choose(cloud, tmp_path / "again", by_notice=False).usd == Decimal("0.29")


def test_a_type_on_which_two_interruptions_would_meet_the_cap_is_refused_with_its_price(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node counts what is left at the on-demand price when it boots, and ends a run with too little."""
    monkeypatch.setattr(stacks, "TRIED", 1)
    monkeypatch.setitem(stacks.LIMITS, stacks.RUN, Decimal("0.12"))
    with pytest.raises(AwsRefused, match=r"costs more than the canary may .*two interruptions it needs 0.13 USD"):
        choose(cloud, tmp_path)
    assert cloud.leftovers() == {}


@pytest.mark.parametrize("way", [[], ["--embedded"]])
def test_a_region_without_prices_is_refused_with_those_that_have_some(
    way: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["canary", "--region", "mars-1", "--yes", *way]) == 2
    assert "--region mars-1: allowed are us-east-1, us-east-2" in capsys.readouterr().err


def test_where_nothing_is_offered_each_type_says_so(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "_offers", lambda *_: {})
    with pytest.raises(AwsRefused, match=r"g4dn\.xlarge: not offered in us-east-2"):
        choose(cloud, tmp_path)


@contextmanager
def waiting_flight(
    cloud: Cloud, folder: Path, monkeypatch: pytest.MonkeyPatch, said: list[str] | None = None
) -> Iterator[Flight]:
    """A flight in process, whose waiting moves the account's clock. Its nodes are rows of EC2's alone."""

    def wait(seconds: float) -> None:
        assert isinstance(cloud.clock, ManualClock)
        cloud.clock.advance(seconds)
        cloud.tick()

    monkeypatch.setattr(Flight, "command", pinned)
    project = folder / "project"
    with forked.programs(project):
        flown = canary.flight(project, cloud, say=(said if said is not None else []).append, real=False)
        flown.sleep, flown.clock = wait, lambda: cloud.clock.now().timestamp()
        flown.scale = replace(flown.scale, poll_s=50)
        yield flown


FIRST, SECOND = "g4dn.xlarge", "g4dn.2xlarge"  # the cheapest types in us-east-2


@pytest.mark.parametrize("full", [(FIRST, "*"), (FIRST, "us-east-2c")], ids=["a type", "a zone"])
def test_where_a_type_or_its_zone_is_full_the_node_comes_from_the_next(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: tuple[str, str]
) -> None:
    with waiting_flight(cloud, tmp_path, monkeypatch) as flown, flown.engine(stacks.RUN) as engine:
        stack = flown._up(stacks.RUN, engine)
        (before,) = (node for node in cloud.instances() if not node.ended_at)
        assert (before.type, before.zone) == (FIRST, "us-east-2c")
        cloud.no_capacity(*full)
        cloud.kill(before.id)
        flown.sleep(60)
        (node,) = (each for each in cloud.instances() if not each.ended_at)
        assert (node.type == SECOND) if full[1] == "*" else (node.type == FIRST and node.zone != before.zone)
        flown._look(stack, nodes_of(cloud.client("ec2"), stack)[-1], {}, 0)
        assert flown.facts.seen["node.kind"] == [node.type]
        assert [each for each in judge(flown.facts) if each.state == "refuted"] == []
        engine.destroy()


def test_where_every_type_is_full_the_flight_says_so_and_leaves_nothing(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud.no_capacity()
    with waiting_flight(cloud, tmp_path, monkeypatch) as flown:
        types = " or ".join(stacks.definition(flown.project, stacks.RUN).fleet.instance_types)
        assert flown.fly().startswith(f"canary: within 400 s no node: AWS has no free {types} in us-east-2a, ")
    assert cloud.leftovers() == {}


@pytest.mark.parametrize(("boot_s", "seconds"), [(2, 94), (100, 290)])
def test_after_a_slow_boot_the_cap_leaves_time_to_train(tmp_path: Path, boot_s: float, seconds: float) -> None:
    project = scratch.make(tmp_path / "project", {})
    stacks.write(project, "r1", "us-east-2", ([FIRST], ["us-east-2c"]), stacks.EMBEDDED)
    stacks.renew_capped(project, "stop", stacks.EMBEDDED, 1)
    stacks.renew_capped(project, "cap", stacks.EMBEDDED, boot_s)
    stack = stacks.definition(project, stacks.CAP)
    assert stack.run.id == "r1-cap"
    assert float(stack.limits.max_hours) * 3600 == pytest.approx(seconds, abs=4)


@pytest.mark.parametrize(
    ("usd", "notice", "is_flown"), [("0.16", True, True), ("0.17", True, False), ("0.19", False, True)]
)
def test_after_a_dear_first_run_nothing_is_stopped_by_hand(usd: str, notice: bool, is_flown: bool) -> None:
    assert stacks.affords_stop(Decimal(usd), notice=notice) == is_flown


def test_a_flight_that_breaks_off_leaves_nothing(cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def broken(flown: Flight, stack: StackDefinition, act: object) -> Done:
        notice.interrupt(stack, cloud.instances()[0].id, cloud.client, lambda _: None)
        assert cloud.leftovers() != {}
        raise PhaseError("canary: nothing new")

    monkeypatch.setattr(stacks, "TYPES", 1)
    monkeypatch.setattr(Flight, "_watch", broken)
    with waiting_flight(cloud, tmp_path, monkeypatch, said) as flown:
        assert flown.fly() == "canary: nothing new"
    assert cloud.leftovers() == {}
    assert cloud.client("fis").list_experiment_templates()["experimentTemplates"] == []
    assert said[-1] == "AWS shows nothing more of the canary."


def ids_of(tree: dict[str, Any], state: str) -> set[str]:
    return {each["id"] for each in tree["assumptions"] if each["state"] == state}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "without"), [([], {"boots-without-gpu", "quota-standard-name"}), (["--no-gpu"], {"quota-name"})]
)
def test_a_clean_flight_holds_all_but_what_needs_a_gpu_and_leaves_nothing(
    options: list[str],
    without: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "stacks").mkdir()
    monkeypatch.chdir(tmp_path)
    code = main(["canary", "--embedded", "--yes", *options])
    said = capsys.readouterr().out
    (path,) = (tmp_path / "rehearsals" / "canary").glob("*.json")
    tree = json.loads(path.read_text())
    assert ids_of(tree, "refuted") == set(), said
    charged = {each.id for each in known() if each.id.startswith("charged-")}  # known a day later
    assert ids_of(tree, "not met") == {"gpu-computes", "timer-ends", *without, *charged}, said
    assert code == 0
    assert "AWS shows nothing more of the canary." in said


def slowly(body: Any, length: int) -> Iterator[bytes]:
    """A request's body, at two megabytes a second. A server that took none for 30 s would be one that is out of
    order: the node gives such an upload up, and no checkpoint is late.
    """
    while length and (part := body.read(min(length, 2_000_000))):
        length -= len(part)
        time.sleep(1.05 * len(part) / 2_000_000)
        yield part


@pytest.mark.slow
def test_what_aws_does_otherwise_to_nodes_is_named_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notice of 30 s, a wrong hop limit, a log driver that drops, a slow bucket, and a right refused to nodes."""
    run, answer = Launcher._run, Gate.__call__

    def with_hops(*words: Any) -> Any:
        made = run(*words)
        made.hops = 2
        return made

    def otherwise(asked: Gate, environ: dict[str, Any], start: Any) -> Any:
        # the log of this stack is whole: by its lines it is known when a checkpoint was due
        if re.match("/gpufleet-canary-cap-.*/r1-cap/ckpt/", environ["PATH_INFO"]):
            body = slowly(environ["wsgi.input"], int(environ.get("CONTENT_LENGTH") or 0))
            environ["wsgi.input"] = io.BytesIO(b"".join(body))
        drops = str(environ.get("HTTP_X_AMZ_TARGET", "")).endswith("PutLogEvents")
        told = gate._body(environ) if drops else b""
        if b" loss " in told and b"spot notice" not in told and b"gpufleet-canary-cap-" not in told:
            return gate._send(start, environ, *gate._unauthorized("logs", "PutLogEvents"))
        return answer(asked, environ, start)

    monkeypatch.setattr(Launcher, "_run", with_hops)
    monkeypatch.setattr(Gate, "__call__", otherwise)
    with Cloud(tmp_path / "cloud", habits=Habits(notice_s=30, relaunch_s=1)) as cloud:
        cloud.deny("DescribeSpotPriceHistory", node=True)
        flight = canary.flight(tmp_path / "project", cloud, say=lambda line: None, real=False)
        nodes = canary.nodes(cloud, tmp_path / "nodes")
        try:
            assert flight.fly() == ""
        finally:
            nodes.close()
        assert cloud.leftovers() == {}
    assert {each.assumption.id for each in judge(flight.facts) if each.state == "refuted"} == {
        "notice-left",
        "metadata-closed",
        "log-share",
        "save-published",
        "price-asked",
    }
