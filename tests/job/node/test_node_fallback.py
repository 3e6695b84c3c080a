"""A node of a run that may go on on demand: which one trains, what becomes of the other, and the hour of the switch."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from gpufleet.job.contract.aws import SWITCH
from gpufleet.job.contract.bucket import FALLBACK, fleet_key
from gpufleet.job.node.fallback import LIFE_CYCLE
from tests.infra.boot_stubs import DELETE, FLEET, INSTANCE, RUN, SHUTDOWN, TERMINATE, StubNode

OTHER = "fleet-spot"
HOUR = 3600.0


def made(folder: Path, market: str) -> StubNode:
    node = StubNode(folder)
    node.launched(minutes_ago=2)
    node.fallback = True
    node.imds(LIFE_CYCLE, market)
    node.put(fleet_key(OTHER), "known")
    (node.world / "there").touch()
    return node


@pytest.fixture
def spot(tmp_path: Path) -> StubNode:
    return made(tmp_path, "spot")


@pytest.fixture
def on_demand(tmp_path: Path) -> StubNode:
    return made(tmp_path, "on-demand")


def deleted(calls: list[str]) -> list[str]:
    return [call.split("--fleet-ids ")[1].split()[0] for call in calls if call.startswith(DELETE)]


def test_a_node_on_demand_ends_the_fleet_on_spot_and_trains_once_its_nodes_are_gone(on_demand: StubNode) -> None:
    (on_demand.world / "there").write_text(f"i-spot\t{OTHER}\n")
    aws = on_demand.bin / "aws"  # it has gone when it is looked for again
    there = 'cat "$WORLD/there"'
    aws.write_text(aws.read_text().replace(f"{there} 2>/dev/null", f'{there}; : >"$WORLD/there"', 1))

    on_demand.notify = {"topic": "arn:aws:sns:us-east-2:111122223333:x", "webhook": "", "silent_s": 3600}

    outcome = on_demand.boot()

    assert on_demand.has(FALLBACK)
    assert "on spot it would miss its deadline: it continues on demand" in (on_demand.world / "told").read_text()
    assert on_demand.stored(f"attempts/{INSTANCE}.json")["capacity"] == "on-demand"
    assert deleted(outcome.calls)[0] == OTHER
    told = [call for call in outcome.calls if call.startswith((DELETE, RUN)) or "--filters" in call]
    assert told[0].startswith("aws ec2 describe-instances")
    assert told[1].startswith(DELETE)
    for asked in (told[0], told[2]):
        assert "Name=tag:gpufleet:run,Values=r1" in asked
        assert "Name=tag:gpufleet:owner,Values=you" in asked
        assert "InstanceLifecycle=='spot'" in asked
    assert "-e GPUFLEET_CAPACITY=on-demand" in next(call for call in outcome.calls if call.startswith(RUN))
    assert TERMINATE + " --instance-ids i-spot" not in "\n".join(outcome.calls)


def test_a_node_on_spot_whose_fleet_the_bucket_no_longer_names_does_not_train_on_beside_it(on_demand: StubNode) -> None:
    """A `destroy` takes the name back, and may then fail to delete the fleet."""
    (on_demand.s3 / "r1" / fleet_key(OTHER)).unlink()
    (on_demand.world / "there").write_text(f"i-spot\t{OTHER}\n")
    aws, contract = on_demand.bin / "aws", on_demand.code / "contract/aws.py"
    contract.write_text(contract.read_text().replace("HANDOVER_S, SWITCH_MARGIN_S = 600", "HANDOVER_S, _ = 0"))
    ends = "echo TERMINATINGINSTANCES"
    aws.write_text(aws.read_text().replace(ends, f'{ends}; : >"$WORLD/there"'))
    outcome = on_demand.boot()
    assert deleted(outcome.calls)[0] == OTHER
    calls = [call for call in outcome.calls if call.startswith((TERMINATE, RUN))]
    assert calls[0].startswith(f"{TERMINATE} --instance-ids i-spot")
    assert calls[1].startswith(RUN)


def test_a_node_on_spot_that_does_not_leave_in_time_is_ended(on_demand: StubNode) -> None:
    (on_demand.world / "there").write_text("i-spot\n")
    contract, aws = on_demand.code / "contract/aws.py", on_demand.bin / "aws"
    contract.write_text(contract.read_text().replace("HANDOVER_S, SWITCH_MARGIN_S = 600", "HANDOVER_S, _ = 0"))
    ends = "echo TERMINATINGINSTANCES"
    aws.write_text(aws.read_text().replace(ends, f'{ends}; : >"$WORLD/there"'))

    outcome = on_demand.boot()

    assert any(call.startswith(f"{TERMINATE} --instance-ids i-spot") for call in outcome.calls)
    assert outcome.calls_starting(RUN) == [RUN]


def test_a_node_on_spot_that_boots_late_ends_its_fleet_and_leaves(spot: StubNode) -> None:
    spot.put(FALLBACK, {"at": ""})
    outcome = spot.boot()
    assert outcome.calls_starting(RUN) == []
    assert deleted(outcome.calls) == [FLEET]  # not the one on demand
    assert "shutting down: the run continues on demand" in outcome.log
    assert not spot.has(f"attempts/{INSTANCE}.json")
    assert not spot.has("done.json")


def test_a_node_on_spot_that_has_saved_for_the_other_ends_its_fleet_alone(spot: StubNode) -> None:
    written = spot.s3 / f"r1/attempts/{INSTANCE}.json"
    spot.job_ends_with(75, f"""echo '{{"exit": {{"code": 75, "reason": "fallback"}}}}' > {written}""")
    outcome = spot.boot()
    assert deleted(outcome.calls) == [FLEET]
    assert spot.stored(f"attempts/{INSTANCE}.json")["exit"]["reason"] == "fallback"
    assert outcome.calls_starting(SHUTDOWN) == [SHUTDOWN]


def test_a_second_node_on_demand_goes_on_without_waiting(on_demand: StubNode) -> None:
    on_demand.put(FALLBACK, {"at": "earlier"})
    outcome = on_demand.boot()
    assert outcome.calls_starting(RUN) == [RUN]
    assert on_demand.stored(FALLBACK) == {"at": "earlier"}


@pytest.mark.parametrize("market", ["spot", "on-demand"])
def test_whoever_ends_the_run_ends_both_fleets_and_the_switch(tmp_path: Path, market: str) -> None:
    node = made(tmp_path, market)
    outcome = node.boot()
    assert node.stored("done.json")["reason"] == "finished"
    assert set(deleted(outcome.calls)) == {FLEET, OTHER}
    last = json.loads((node.world / "moves").read_text().splitlines()[-1])
    assert (last["Name"], last["State"]) == (SWITCH, "DISABLED")
    assert node.moves(SWITCH)[-1] > time.time()  # AWS takes no hour that has passed


@pytest.mark.parametrize("market", ["spot", "on-demand"])
def test_a_node_that_the_switch_starts_after_the_end_leaves_at_once(tmp_path: Path, market: str) -> None:
    node = made(tmp_path, market)
    node.put("done.json", {"reason": "finished"})
    outcome = node.boot()
    assert outcome.calls_starting(RUN) == []
    assert set(deleted(outcome.calls)) == {FLEET, OTHER}
    assert not node.has(FALLBACK)


def test_a_node_on_demand_that_learns_of_no_fleet_on_spot_does_not_train(tmp_path: Path) -> None:
    node = made(tmp_path, "on-demand")
    node.fails("known_fleet")
    outcome = node.boot()
    assert outcome.calls_starting(RUN) == []


def test_a_node_that_cannot_tell_its_market_does_not_train(spot: StubNode) -> None:
    (spot.world / "imds" / LIFE_CYCLE).unlink()
    outcome = spot.boot()
    assert outcome.calls_starting(RUN) == []
    assert "attempt failed: the metadata service does not say whether this node is on spot" in outcome.log


def test_without_the_key_nobody_is_asked(tmp_path: Path) -> None:
    node = StubNode(tmp_path)
    node.put(FALLBACK, {"at": ""})
    outcome = node.boot()
    assert outcome.calls_starting(RUN) == [RUN]
    assert node.moves(SWITCH) == []
    assert "capacity" not in node.stored(f"attempts/{INSTANCE}.json")


def trains(node: StubNode, switch_at: float, *, paid: bool = True, trained: bool = True, until: str) -> None:
    """A job that has told this, and ends once `until` holds."""
    told = {"spent_usd": "1", "spent_s": "60", "at": time.time(), "switch_at": switch_at, "switch_is_paid": paid}
    told["trained_at"] = time.time() if trained else 0
    node.job_ends_with(
        0,
        f"find {node.root} -path '*/run/run.json' -printf '%h\\n' >$WORLD/folder\n"
        f"echo '{json.dumps(told)}' >$(cat $WORLD/folder)/control/spent.json\n"
        f"until {until}; do /bin/sleep 0.05; done",
    )


def stands(node: StubNode, at: float, state: str = "ENABLED") -> None:
    file = node.world / "schedule"
    hour = time.strftime("at(%Y-%m-%dT%H:%M:%S)", time.gmtime(at))
    file.write_text(json.dumps({**json.loads(file.read_text()), "ScheduleExpression": hour, "State": state}))


def moved(node: StubNode) -> list[dict[str, str]]:
    """What was asked of the switch before the run's end, which disables it."""
    path = node.world / "moves"
    told = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [each for each in told if each["Name"] == SWITCH][:-1]


SAID = "grep -q switch $WORLD/moves 2>/dev/null"
WAITED = "[[ $SECONDS -gt 1 ]]"


def test_a_node_that_trains_on_spot_pushes_the_hour_on(spot: StubNode) -> None:
    stands(spot, time.time() + HOUR)
    trains(spot, time.time() + 3 * HOUR, until=SAID)
    spot.boot()
    assert spot.moves(SWITCH)[0] == spot.after_a_moment_of_its_life(3 * HOUR)
    assert moved(spot)[0]["State"] == "ENABLED"


@pytest.mark.parametrize(
    ("at", "trained", "market"),
    [(0.5, True, "spot"), (1.02, True, "spot"), (3, False, "spot"), (3, True, "on-demand"), (-1, True, "spot")],
    ids=["never back", "not by seconds", "not while nothing trains", "not on demand", "not to the past"],
)
def test_the_hour_stays(tmp_path: Path, at: float, trained: bool, market: str) -> None:
    node = made(tmp_path, market)
    stands(node, time.time() + (HOUR if at > 0 else -2 * HOUR))
    trains(node, time.time() + at * HOUR, trained=trained, until=WAITED)
    node.boot()
    assert moved(node) == []


@pytest.mark.parametrize("market", ["spot", "on-demand"])
def test_what_a_node_has_left_ends_its_own_fleet_alone(tmp_path: Path, market: str) -> None:
    """Else what was spent on spot would end the fleet that waits on demand."""
    node = made(tmp_path, market)
    node.boot()
    told = [json.loads(line) for line in (node.world / "moves").read_text().splitlines()]
    stop = [json.loads(each["Target"]["Input"]) for each in told if each["Name"] == "stop"]
    assert stop
    assert all(each == {"FleetIds": [FLEET], "TerminateInstances": True} for each in stop)


def test_a_push_that_is_refused_is_said_and_what_stands_stands(spot: StubNode) -> None:
    spot.fails("scheduler")
    trains(spot, time.time() + 3 * HOUR, until="[[ -e $WORLD/refused ]] && grep -c scheduler $WORLD/refused >/dev/null")
    outcome = spot.boot()
    assert "the hour at which AWS begins on demand cannot be moved: it stays as it is" in outcome.log
    assert spot.moves(SWITCH) == []
    assert spot.stored("done.json")["reason"] == "finished"


def test_limits_that_do_not_pay_for_the_rest_forbid_the_switch_and_allow_it_again(tmp_path: Path) -> None:
    for state, paid in (("ENABLED", False), ("DISABLED", True)):
        node = made(tmp_path / state, "spot")
        stands(node, time.time() + HOUR, state)
        trains(node, time.time() + HOUR / 2, paid=paid, until=SAID)
        outcome = node.boot()
        assert moved(node)[0]["State"] == ("ENABLED" if paid else "DISABLED")
        assert ("the rest costs more than the limits allow" in outcome.log) != paid
        assert node.moves(SWITCH)[0] == pytest.approx(time.time() + HOUR, abs=60)  # never back
