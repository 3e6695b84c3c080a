"""One run has one id: which changes begin a run, which continue it, and which are refused."""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from gpufleet.infra.definition.loader import load
from gpufleet.infra.definition.model import CapacityBlock, Disk, StackDefinition
from gpufleet.infra.errors import DefinitionError
from gpufleet.infra.program.run_guard import Previous, RunDecision, judge, timer_seconds
from gpufleet.job.text import stamp
from tests.repository import ROOT

NOW = datetime(2026, 11, 21, 12, 0, 0, 250_000, tzinfo=UTC)
DEFINITION = load(ROOT / "stacks" / "tinystories-growth.yaml", now=NOW)
HOUR = timedelta(hours=1)


def verdict(
    definition: StackDefinition = DEFINITION,
    *,
    previous: RunDecision | None = None,
    fleets: set[str] | None = None,
    now: datetime = NOW,
    code: str = "c1",
    dataset: str | None = "d1",
    objects: tuple[str, ...] = (),
) -> RunDecision:
    """The verdict on `definition` in a stack whose last update had the verdict `previous`. `fleets`: the runs of
    its fleets, the last update's unless said otherwise.
    """
    if fleets is None:
        fleets = {previous.run.id} if previous else set()
    outputs: dict[str, Any] = {}
    if previous:
        outputs = {"run": asdict(previous.run), "runs": list(previous.runs)}
    return judge(
        definition,
        dataset_sha256=dataset,
        code_sha256=code,
        previous=Previous(outputs=outputs, fleets=frozenset(fleets), objects=frozenset(objects)),
        now=now,
    )


def run(definition: StackDefinition, run_id: str) -> StackDefinition:
    return replace(definition, run=replace(definition.run, id=run_id))


def limits(**changes: Any) -> StackDefinition:
    return replace(DEFINITION, limits=replace(DEFINITION.limits, **changes))


def test_a_first_run_begins_and_lives_its_hours_and_a_day() -> None:
    first = verdict()
    assert (first.continues, first.over, first.warnings) == (False, False, ())
    assert first.run.valid_until == "2026-11-22T14:00:00Z"  # 2 h of work, 24 h of waiting; whole seconds, Z


def test_a_deadline_is_the_end_of_the_fleet() -> None:
    assert verdict(limits(deadline=NOW + 3 * HOUR)).run.valid_until == "2026-11-21T15:00:00Z"


def test_a_deadline_in_hours_counts_from_the_runs_first_up_and_does_not_move() -> None:
    soon = limits(deadline=3 * HOUR)
    first = verdict(soon)
    assert first.run.valid_until == "2026-11-21T15:00:00Z"
    again = verdict(soon, previous=first, now=NOW + 2 * HOUR)
    assert (again.continues, again.over, again.run) == (True, False, first.run)
    assert verdict(soon, previous=first, now=NOW + 4 * HOUR).over
    second = verdict(run(soon, "r2"), previous=first, now=NOW + 4 * HOUR)
    assert second.run.valid_until == "2026-11-21T19:00:00Z"


def test_another_deadline_in_hours_is_another_setting() -> None:
    with pytest.raises(DefinitionError, match=r"run.id: 'r1' .* give run.id a new value"):
        verdict(limits(deadline=4 * HOUR), previous=verdict(limits(deadline=3 * HOUR)))


def test_a_new_run_past_its_deadline_is_refused() -> None:
    with pytest.raises(DefinitionError, match=r"limits.deadline: '2026-11-21T11:00:00Z' .* has not begun"):
        verdict(limits(deadline=NOW - HOUR))
    with pytest.raises(DefinitionError, match="a time after now"):
        verdict(limits(deadline=NOW))


def test_the_same_run_continues_with_the_expiry_it_began_with() -> None:
    later = verdict(previous=verdict(), now=NOW + HOUR)
    assert later.continues
    assert not later.over
    assert later.run == verdict().run


OTHER_SETTINGS = {
    "hours": limits(max_hours=Decimal(3)),
    "dollars": limits(max_usd=Decimal(4)),
    "deadline": limits(deadline=NOW + 50 * HOUR),
    "owner": replace(DEFINITION, run=replace(DEFINITION.run, owner="another")),
    "image": replace(DEFINITION, job=replace(DEFINITION.job, image="r/i:2")),
    "job": replace(DEFINITION, job=replace(DEFINITION.job, parameters=replace(DEFINITION.job.parameters, seed=1))),
    "ami": replace(DEFINITION, fleet=replace(DEFINITION.fleet, ami="ami-1")),
    "capacity": replace(DEFINITION, fleet=replace(DEFINITION.fleet, capacity="on-demand")),
    "types": replace(DEFINITION, fleet=replace(DEFINITION.fleet, instance_types=("g5.4xlarge",))),
    "zones": replace(DEFINITION, fleet=replace(DEFINITION.fleet, zones=("us-east-2a",))),
    "region": replace(DEFINITION, fleet=replace(DEFINITION.fleet, region="us-west-2")),
    "root disk": replace(DEFINITION, storage=replace(DEFINITION.storage, root=Disk(size_gib=200))),
    "data disk": replace(DEFINITION, storage=replace(DEFINITION.storage, data=Disk(size_gib=50))),
    "dataset": replace(DEFINITION, storage=replace(DEFINITION.storage, dataset="data/other")),
    "base weights": replace(DEFINITION, storage=replace(DEFINITION.storage, base_weights="s3://weights/other")),
}


def test_types_and_zones_in_another_order_are_the_same_run() -> None:
    types, zones = ("g5.2xlarge", "g6.2xlarge"), ("us-east-2a", "us-east-2b")
    one = replace(DEFINITION, fleet=replace(DEFINITION.fleet, instance_types=types, zones=zones))
    other = replace(DEFINITION, fleet=replace(DEFINITION.fleet, instance_types=types[::-1], zones=zones[::-1]))
    assert verdict(other, previous=verdict(one)).continues


@pytest.mark.parametrize("changed", OTHER_SETTINGS.values(), ids=OTHER_SETTINGS.keys())
def test_other_settings_under_the_same_id_are_refused(changed: StackDefinition) -> None:
    with pytest.raises(DefinitionError, match=r"run.id: 'r1' .* give run.id a new value"):
        verdict(changed, previous=verdict())


def test_another_dataset_in_the_same_folder_is_refused() -> None:
    with pytest.raises(DefinitionError, match=r"run.id: 'r1'"):
        verdict(previous=verdict(), dataset="d2")


def test_a_dataset_that_is_not_there_any_more_says_nothing_about_the_run() -> None:
    assert verdict(previous=verdict(), dataset=None).run.dataset == "d1"


SAME_RUN = {
    "kept for longer": replace(
        DEFINITION, storage=replace(DEFINITION.storage, keep=replace(DEFINITION.storage.keep, days=90))
    ),
    "other assumptions": replace(DEFINITION, estimate=replace(DEFINITION.estimate, hazard_per_hour=Decimal(1))),
    "zones in another order": replace(DEFINITION, fleet=replace(DEFINITION.fleet, zones=DEFINITION.fleet.zones[::-1])),
}


@pytest.mark.parametrize("changed", SAME_RUN.values(), ids=SAME_RUN.keys())
def test_what_a_fleet_does_not_take_may_change_under_the_same_id(changed: StackDefinition) -> None:
    assert verdict(changed, previous=verdict()).continues


def kept_record(days: int, definition: StackDefinition = DEFINITION) -> StackDefinition:
    return replace(definition, storage=replace(definition.storage, keep=replace(definition.storage.keep, days=days)))


def test_a_run_that_may_go_on_is_kept_for_longer_than_its_fleet_lives() -> None:
    """The loader compares storage.keep.days with the time left to the deadline; a run under way is older than that."""
    far = limits(deadline=NOW + timedelta(days=20))
    first, later = verdict(kept_record(21, far)), NOW + timedelta(days=18)
    assert verdict(kept_record(21, far), previous=first, now=later).continues
    with pytest.raises(
        DefinitionError, match=r"storage.keep.days: '4' .* at least 21 \(days\).*began at 2026-11-21T12"
    ):
        verdict(kept_record(4, far), previous=first, now=later)
    assert verdict(kept_record(4, far), previous=first, fleets=set(), now=later).over


@pytest.mark.parametrize("run_id", ["r1", "r2"])
@pytest.mark.parametrize(
    ("previous", "said"),
    [
        (
            Previous(outputs={"definition": "older"}),
            r"the file's name: 'tinystories-growth' .* older, which this stack",
        ),
        (Previous(outputs={}, region="us-west-2"), r"fleet.region: 'us-east-2' .* us-west-2, where this stack is"),
    ],
)
def test_a_stack_stays_with_its_file_and_in_its_region(previous: Previous, said: str, run_id: str) -> None:
    """This holds even before the stack's first `up` has ended, because that `up` has made resources."""
    with pytest.raises(DefinitionError, match=said + r".* Write the old one again, and run `pulumi destroy`"):
        judge(run(DEFINITION, run_id), dataset_sha256="d1", code_sha256="c1", previous=previous, now=NOW)
    here = Previous(outputs={"definition": DEFINITION.name}, region="us-east-2")
    assert not judge(DEFINITION, dataset_sha256="d1", code_sha256="c1", previous=here, now=NOW).continues


def test_new_job_code_keeps_the_run_and_warns() -> None:
    later = verdict(previous=verdict(), code="c2")
    assert later.run.code == "c1"
    assert "job code has changed since run r1 began" in later.warnings[0]


def test_a_new_id_begins_a_run_with_any_settings_and_remembers_the_old_ids() -> None:
    second = verdict(run(limits(max_hours=Decimal(9)), "r2"), previous=verdict(), code="c2")
    assert (second.continues, second.over) == (False, False)
    assert second.runs == ("r1", "r2")
    assert second.run.code == "c2"


def test_a_new_run_says_whose_fleet_it_takes_the_place_of_unless_that_one_has_expired() -> None:
    first = verdict()
    (warning,) = verdict(run(DEFINITION, "r2"), previous=first).warnings
    assert "replaces that of run r1. If r1 still trains, `pulumi up` ends it" in warning
    assert "`gpufleet status tinystories-growth --run r1`" in warning
    for fleets in ({"r1"}, {"r1", ""}):  # a fleet without a tag has no run to name
        assert verdict(run(DEFINITION, "r2"), previous=first, fleets=fleets, now=NOW + 27 * HOUR).warnings == ()
    assert verdict(run(DEFINITION, "r2"), previous=first, fleets=set()).warnings == ()


def test_the_id_of_an_earlier_run_is_refused() -> None:
    second = verdict(run(DEFINITION, "r2"), previous=verdict())
    third = verdict(run(DEFINITION, "r3"), previous=second)
    for earlier in ("r1", "r2"):
        with pytest.raises(
            DefinitionError, match=rf"run.id: '{earlier}' .* not used.* is an earlier run of this stack"
        ):
            verdict(run(limits(max_hours=Decimal(9)), earlier), previous=third)


def test_a_new_run_whose_up_failed_before_its_fleet_may_be_tried_again() -> None:
    """After a failed `up` the outputs are those of the `up` before."""
    first = verdict()
    for fleets in ({"r1"}, set[str]()):  # the old fleet is deleted before the new one is made
        assert not verdict(run(DEFINITION, "r2"), previous=first, fleets=fleets).continues


def test_a_fleet_that_an_up_cut_short_has_made_keeps_its_id() -> None:
    with pytest.raises(DefinitionError, match=r"run.id: 'r1' .* has made the fleet of run r1.* `pulumi destroy`"):
        verdict(fleets={"r1"})
    with pytest.raises(DefinitionError, match=r"run.id: 'r2' .* has made the fleet of run r2"):
        verdict(run(DEFINITION, "r2"), previous=verdict(), fleets={"r2"})
    taken = verdict(run(DEFINITION, "r2"), fleets={"r1"})
    assert (taken.continues, taken.runs) == (False, ("r1", "r2"))  # r1's objects expire as any run's


@pytest.mark.parametrize("replaced", ["r2/run.json", "inputs/c2/job.tar.gz", "inputs/d2/train.bin"])
def test_no_up_deletes_what_one_that_was_cut_short_has_replaced_while_the_run_goes_on(replaced: str) -> None:
    first = verdict()
    own = ("r1/run.json", "inputs/c1/job.tar.gz", "inputs/d1/train.bin")
    assert verdict(previous=first, objects=own).continues
    others = (*own[1:], replaced)
    with pytest.raises(
        DefinitionError, match=r"run.id: 'r1' .*Run r1 goes on, but an `up` for another run .* interrupted before"
    ):
        verdict(previous=first, objects=others)
    assert verdict(previous=first, objects=others, fleets=set()).over  # no node of the old run boots any more
    assert not verdict(run(DEFINITION, "r2"), previous=first, objects=others).continues


@pytest.mark.parametrize("now", [NOW, NOW + 40 * HOUR])
def test_no_up_deletes_a_fleet_of_another_run(now: datetime) -> None:
    """An aborted `up` leads to this state, as does `refresh --run-program`, which writes outputs without a fleet."""
    with pytest.raises(
        DefinitionError, match=r"record names run r1, but its fleet belongs to run r2, and `up` would delete it"
    ):
        verdict(previous=verdict(), fleets={"r2"}, now=now)
    assert not verdict(run(DEFINITION, "r3"), previous=verdict(), fleets={"r2"}).continues  # the way out
    assert not verdict(previous=verdict(), fleets={""}).over  # a fleet without a tag could be this run's own


def test_a_run_is_over_at_the_moment_it_expires() -> None:
    end = datetime(2026, 11, 22, 14, 0, tzinfo=UTC)
    assert not verdict(previous=verdict(), now=end - timedelta(seconds=1)).over
    over = verdict(previous=verdict(), now=end)
    assert over.over
    assert "Run r1 is over (since 2026-11-22T14:00:00Z)" in over.warnings[0]


def test_a_past_deadline_of_the_previous_run_is_no_error() -> None:
    short = limits(deadline=NOW + HOUR)
    assert verdict(short, previous=verdict(short), now=NOW + 2 * HOUR).over


def test_a_run_whose_fleet_is_gone_is_over() -> None:
    over = verdict(previous=verdict(), fleets=set())
    assert over.over
    assert "its fleet no longer exists" in over.warnings[0]


def test_the_timer_of_a_boot_that_knows_nothing_yet_is_two_minutes_longer_than_the_run() -> None:
    assert timer_seconds(DEFINITION) == 2 * 3600 + 120
    assert timer_seconds(limits(max_hours=Decimal("0.5"))) == 1800 + 120


def test_in_a_block_a_fleet_that_is_gone_is_made_again_until_its_end() -> None:
    """Nothing else replaces the nodes. A node of a run that is over notices that and ends itself."""
    block = CapacityBlock(start=NOW - HOUR, end=NOW + 24 * HOUR, fee_usd=Decimal(1))
    fleet = replace(DEFINITION.fleet, capacity="block", block=block)
    inside = replace(DEFINITION, fleet=fleet)
    first = verdict(inside)
    assert first.run.valid_until == stamp(NOW + 23.5 * HOUR)
    gone = verdict(inside, previous=first, fleets=set(), now=NOW + HOUR)
    assert (gone.continues, gone.over) == (True, False)
    assert "`up` launches its nodes again" in " ".join(gone.warnings)
    assert verdict(inside, previous=first, now=NOW + HOUR).warnings == ()
    assert verdict(inside, previous=first, fleets=set(), now=NOW + 24 * HOUR).over
