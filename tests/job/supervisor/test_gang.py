"""What nodes of one run decide, row by row of what may happen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from gpufleet.job.contract.bucket import CheckpointPlace
from gpufleet.job.contract.codes import TrainerExit
from gpufleet.job.contract.gang import GangGeneration, Presence
from gpufleet.job.supervisor import gang
from gpufleet.job.supervisor.gang import Join, Leave, LetAllGo, Propose, Sight, View, Wait

SEVENTH = CheckpointPlace(7, 2)


def node(name: str, launched: float = 0.0, **said: Any) -> Presence:
    return Presence(instance=name, address=f"10.0.0.{name[-1]}", launched_at=launched, **said)


def view(own: Presence, *others: Presence, ages: dict[str, float] | None = None, **known: Any) -> View:
    sights = {each.instance: Sight(presence=each, age_s=(ages or {}).get(each.instance, 1.0)) for each in others}
    return View(own=own, others=sights, **{"steady_s": 100.0, **known})


def act(
    seen: View,
    nodes: int = 2,
    *,
    ready_s: float = 0.0,
    spare_s: float = 0.0,
    lacking_s: float = 0.0,
    gather_s: float = 1.0,
    origin: CheckpointPlace | None = SEVENTH,
) -> gang.Action:
    waits = {"ready_s": ready_s, "spare_s": spare_s, "lacking_s": lacking_s, "gather_s": gather_s}
    return gang.next_of(seen, nodes, **waits, origin=origin)


OLD, NEW = node("i-1", 10), node("i-2", 20)
PAIR = GangGeneration(number=3, members=("i-1", "i-2"), addresses=("10.0.0.1", "10.0.0.2"), step=7, source=2)
FIRST, SECOND = (replace(each, state="busy", generation=3) for each in (OLD, NEW))


def why_over(seen: View, generation: GangGeneration = PAIR, idle_s: float = 1.0) -> str | None:
    return gang.why_over(seen, generation, idle_s=idle_s)


def test_the_oldest_ready_node_proposes() -> None:
    proposed = act(view(OLD, NEW))
    assert isinstance(proposed, Propose)
    assert proposed.generation == replace(PAIR, number=1)
    assert act(view(NEW, OLD)) == Wait(why="i-1 must propose a generation")


def test_another_proposes_where_the_oldest_does_not() -> None:
    assert isinstance(act(view(NEW, OLD), ready_s=gang.PROPOSE_S), Propose)


def test_who_had_rank_0_last_leads_the_next_generation() -> None:
    proposed = act(view(replace(OLD, first_in=1), replace(NEW, first_in=2), node("i-3", 5)), nodes=3)
    assert proposed == Wait(why="i-3 must propose a generation")
    proposed = act(view(node("i-3", 5), replace(OLD, first_in=1), replace(NEW, first_in=2)), nodes=3)
    assert isinstance(proposed, Propose)
    assert proposed.generation.members == ("i-2", "i-1", "i-3")
    assert proposed.generation.addresses == ("10.0.0.2", "10.0.0.1", "10.0.0.3")


def test_without_a_rank_0_before_the_node_leads_to_which_c10d_gives_it() -> None:
    """By the host names that EC2 gives machines, the order is torch's own."""
    addresses = ["10.0.1.9", "10.0.1.12", "10.0.1.120", "10.0.12.3", "10.0.2.200"]
    names = {f"ip-{each.replace('.', '-')}.us-east-2.compute.internal": each for each in addresses}
    first = names[min(_NodeDesc(name, 1, 0) for name in names).addr]
    nodes = [Presence(instance=each, address=each, launched_at=at) for at, each in enumerate(addresses)]
    proposed = act(view(*nodes), nodes=len(nodes))
    assert isinstance(proposed, Propose)
    assert proposed.generation.addresses[0] == first == "10.0.1.12"


def test_a_generation_ends_where_rank_0_is_not_the_leader_s() -> None:
    here = replace(SECOND, first_in=PAIR.number)
    for seen in (view(FIRST, here), view(here, FIRST)):
        assert (why_over(seen) or "").startswith("rank 0, which saves and prints, is on i-2")
    assert why_over(view(replace(FIRST, first_in=PAIR.number), SECOND)) is None
    assert why_over(view(FIRST, replace(SECOND, first_in=PAIR.number - 1))) is None  # as it led an earlier one


def test_a_member_whose_steps_arrive_is_not_lost_however_late_its_presence_is() -> None:
    late = view(FIRST, SECOND, ages={"i-2": gang.LOST_S + 1})
    assert why_over(late, idle_s=gang.LOST_S) is None
    assert why_over(late, idle_s=gang.LOST_S + 1) == "i-2 is lost"
    assert why_over(view(FIRST, SECOND, ages={"i-2": gang.SILENT_S + 1})) == "i-2 is lost"
    assert why_over(view(FIRST, replace(SECOND, state="gone"), ages={"i-2": 50.0})) == "i-2 has left"


def test_who_is_slower_than_the_others_or_looks_slowly_knows_it() -> None:
    third = replace(node("i-3", 30), state="busy", generation=3, own_s=1.0)
    trio = replace(PAIR, members=("i-1", "i-2", "i-3"), addresses=("a", "b", "c"))

    def slowness(own_s: float, other_s: float, look_s: float = 0.0) -> str:
        own, other = replace(FIRST, own_s=own_s, look_s=look_s), replace(SECOND, own_s=other_s)
        return gang.why_slow(view(own, other, third), trio)

    assert slowness(1.5, 1.0).startswith("before the exchange, its last 20 steps took 1.5 times as long")
    assert slowness(1.49, 1.0) == slowness(1.0, 1.5) == slowness(0.0, 1.0) == ""
    assert slowness(1.0, 1.0, look_s=16.0).startswith("its last 5 looks at S3 have each taken 16 s or more")
    unknown = gang.why_slow(view(replace(FIRST, own_s=9.0), replace(SECOND, generation=2, own_s=1.0)), PAIR)
    assert unknown == ""  # an earlier generation's


def test_two_of_one_age_agree_by_name() -> None:
    both = node("i-1", 10), node("i-2", 10)
    assert isinstance(act(view(*both)), Propose)
    assert isinstance(act(view(*reversed(both))), Wait)


def test_nobody_trains_until_all_nodes_are_there() -> None:
    assert act(view(OLD, NEW), nodes=3) == Wait(why="2 of 3 nodes are ready")
    assert act(view(OLD, NEW, ages={"i-2": gang.LOST_S + 1})) == Wait(why="1 of 2 nodes are ready")


def test_the_oldest_that_waits_lets_go_and_one_that_is_never_ready_counts_as_not_there() -> None:
    for other in (replace(NEW, state="staging"), replace(NEW, notice=500.0)):
        assert act(view(OLD, other, let_go=0), gather_s=1.0) == Wait(why="1 of 2 nodes are ready")
        assert act(view(OLD, other, let_go=0), gather_s=0.0) == LetAllGo()
    assert act(view(NEW, OLD, let_go=0), nodes=3, gather_s=0.0) == Wait(why="2 of 3 nodes are ready")
    assert act(view(OLD, let_go=None), gather_s=0.0) == Wait(why="1 of 2 nodes are ready")  # it has not looked yet
    busy = replace(NEW, state="busy", generation=3)
    assert act(view(OLD, busy, let_go=0), gather_s=0.0) == Wait(why="i-2 not ready yet")
    assert isinstance(act(view(OLD, NEW, let_go=0), gather_s=0.0), Propose)


def test_a_node_under_notice_is_never_in_the_next_generation() -> None:
    assert act(view(OLD, replace(NEW, notice=500.0))) == Wait(why="1 of 2 nodes are ready")
    assert act(view(replace(OLD, notice=500.0), NEW)) == Wait(why="1 of 2 nodes are ready")


def test_the_next_generation_waits_for_what_a_leaving_node_still_publishes() -> None:
    leaving = replace(OLD, state="busy", notice=500.0, generation=2, ended=75)
    assert act(view(NEW, leaving, node("i-3", 30))) == Wait(why="i-1 not ready yet")
    assert isinstance(act(view(NEW, leaving, node("i-3", 30), ages={"i-1": 46.0})), Propose)


def test_a_member_joins_and_reads_what_another_has_proposed() -> None:
    assert act(view(NEW, OLD, newest=PAIR)) == Join(generation=PAIR)
    assert isinstance(act(view(replace(OLD, generation=3), replace(NEW, generation=3), newest=PAIR)), Propose)


def test_a_node_that_the_run_trains_without_leaves_after_ten_minutes() -> None:
    spare = view(node("i-3", 30), FIRST, SECOND, newest=PAIR)
    assert isinstance(act(spare, spare_s=gang.SPARE_S - 1), Wait)
    left = act(spare, spare_s=gang.SPARE_S)
    assert isinstance(left, Leave)
    assert left.code == 75


def test_a_spare_node_takes_the_place_of_one_that_is_gone() -> None:
    there = view(node("i-3", 30), replace(FIRST, state="ready"), SECOND, ages={"i-2": 50.0}, newest=PAIR)
    assert act(there) == Wait(why="i-1 must propose a generation")
    proposed = act(view(replace(FIRST, state="ready"), node("i-3", 30), newest=PAIR))
    assert isinstance(proposed, Propose)
    assert (proposed.generation.number, proposed.generation.members) == (4, ("i-1", "i-3"))


def test_members_train_on_while_each_is_there() -> None:
    assert why_over(view(FIRST, SECOND, newest=PAIR)) is None
    assert why_over(view(SECOND, FIRST, newest=PAIR)) is None


def test_a_member_lost_for_45_s_ends_the_generation() -> None:
    assert why_over(view(FIRST, SECOND, newest=PAIR, ages={"i-2": 45.0}), idle_s=99.0) is None
    assert why_over(view(FIRST, SECOND, newest=PAIR, ages={"i-2": 45.1}), idle_s=99.0) == "i-2 is lost"
    assert why_over(view(SECOND, newest=PAIR)) == "i-1 is lost"


def test_where_ranks_have_failed_a_silent_member_is_waited_for_20_s() -> None:
    failed, new = replace(FIRST, state="ready", ended=1), node("i-3", 30)

    def busy(own: Presence, silent_s: float, **known: float) -> list[str]:
        return gang.busy_nodes(view(own, SECOND, new, ages={"i-2": silent_s}, **known))

    assert busy(failed, 20.0) == ["i-2"]
    assert busy(failed, 20.1) == []
    assert busy(failed, 20.1, steady_s=14.0) == ["i-2"]  # after an outage of the store all presences are old
    assert busy(replace(failed, ended=75), 20.1) == ["i-2"]  # it saves
    assert busy(replace(failed, generation=2), 20.1) == ["i-2"]
    assert gang.busy_nodes(view(new, SECOND, failed, ages={"i-2": 20.1})) == []


def test_a_node_that_says_that_it_leaves_is_waited_for_no_more() -> None:
    gone = replace(SECOND, state="gone", ended=75)
    assert why_over(view(FIRST, gone, newest=PAIR)) == "i-2 has left"
    assert act(view(replace(FIRST, state="ready"), gone, newest=PAIR)) == Wait(why="1 of 2 nodes are ready")


def test_a_store_that_is_down_for_all_ends_nothing_and_nor_do_old_presences_right_after_it() -> None:
    assert why_over(view(FIRST, SECOND, newest=PAIR, age_s=1000.0)) is None  # steps go on
    assert why_over(view(FIRST, SECOND, newest=PAIR, steady_s=14.0, ages={"i-2": 1000.0})) is None
    assert why_over(view(FIRST, SECOND, newest=PAIR, steady_s=15.0, ages={"i-2": 1000.0})) == "i-2 is lost"


def test_a_node_without_store_and_steps_fences_itself() -> None:
    assert why_over(view(FIRST, SECOND, newest=PAIR, age_s=59.0), idle_s=200.0) is None
    assert why_over(view(FIRST, SECOND, newest=PAIR, age_s=60.0), idle_s=59.0) is None
    assert why_over(view(FIRST, SECOND, newest=PAIR, age_s=61.0), idle_s=60.0) == "no store and no step for 60 s"


def test_a_newer_generation_ends_an_old_one_s_trainer() -> None:
    assert why_over(view(FIRST, SECOND, newest=replace(PAIR, number=4))) == "generation 4 has taken over"


def test_a_trainer_that_crashed_on_one_node_ends_the_others() -> None:
    assert why_over(view(FIRST, replace(SECOND, ended=1), newest=PAIR)) == "i-2's trainer ended with 1"
    assert why_over(view(FIRST, replace(SECOND, ended=75, state="ready"), newest=PAIR)) is None  # as all do now
    assert why_over(view(FIRST, replace(SECOND, generation=2, ended=1), newest=PAIR)) is None  # of the one before


def test_a_follower_that_ends_ill_while_the_leader_saves_ends_nothing_and_the_leader_does() -> None:
    assert gang.why_over(view(FIRST, replace(SECOND, ended=1), newest=PAIR), PAIR, idle_s=1.0, stopping=True) is None
    ill = view(SECOND, replace(FIRST, ended=-9), newest=PAIR)
    assert gang.why_over(ill, PAIR, idle_s=1.0, stopping=True) == "i-1's trainer ended with -9"


def test_a_follower_stops_with_its_leader_also_if_it_sees_that_only_afterwards() -> None:
    """Otherwise the failure of a third node, which lost its connection, ends it before it has sent its part."""
    for presence, stops in (
        (FIRST, False),
        (replace(FIRST, stopping=True), True),
        (replace(FIRST, ended=TrainerExit.STOPPED), True),
        (replace(FIRST, ended=TrainerExit.FINISHED), False),  # it saves its last part
        (replace(FIRST, ended=TrainerExit.STOPPED, generation=2), False),  # of the one before
    ):
        assert gang.leader_stops(view(SECOND, presence, newest=PAIR), PAIR) is stops


def test_a_crash_is_tried_once_more_with_the_same_nodes_and_then_all_leave() -> None:
    ready = [replace(each, state="ready", ended=1) for each in (FIRST, SECOND)]
    again = act(view(*ready, newest=PAIR))
    assert isinstance(again, Propose)
    assert (again.generation.tries, again.generation.is_last) == (1, False)
    last = act(view(*(replace(each, generation=4) for each in ready), newest=again.generation))
    assert isinstance(last, Propose)
    assert last.generation.is_last
    left = [act(view(*pair, newest=last.generation)) for pair in (ready, reversed(ready))]
    assert left == [Leave(code=1, why="the same nodes ended 2 times at step 7")] * 2


def test_rank_0_found_on_another_node_costs_no_try_the_first_time() -> None:
    ready = replace(FIRST, state="ready"), replace(SECOND, state="ready", first_in=PAIR.number)
    moved = act(view(*ready, newest=PAIR))
    assert isinstance(moved, Propose)
    assert (moved.generation.leader, moved.generation.tries, moved.generation.is_last) == ("i-2", 0, False)
    there = [replace(each, generation=4) for each in ready]
    back = act(view(replace(there[0], first_in=4), there[1], newest=moved.generation))
    assert isinstance(back, Propose)
    assert (back.generation.leader, back.generation.tries) == ("i-1", 1)


def test_nodes_that_never_had_a_checkpoint_leave_saying_so() -> None:
    newest = replace(PAIR, step=-1, source=0, tries=2, is_last=True)
    assert act(view(OLD, NEW, newest=newest)) == Leave(code=1, why="the same nodes ended 2 times before any checkpoint")


def test_a_crash_after_a_checkpoint_or_with_another_node_counts_anew() -> None:
    ready = [replace(each, state="ready", ended=1) for each in (FIRST, SECOND)]
    for seen, origin in (
        (view(*ready, newest=replace(PAIR, tries=1)), CheckpointPlace(8, 3)),
        (view(*ready, newest=replace(PAIR, tries=1)), CheckpointPlace(7, 3)),
        (view(ready[0], node("i-3", 30), newest=replace(PAIR, tries=1)), SEVENTH),
    ):
        proposed = act(seen, origin=origin)
        assert isinstance(proposed, Propose)
        assert (proposed.generation.tries, proposed.generation.is_last) == (0, False)


def test_memory_that_ran_out_anywhere_lowers_the_rung_of_all() -> None:
    ready = replace(FIRST, state="ready"), replace(SECOND, state="ready", ended=69, rung=2)
    proposed = act(view(*ready, newest=replace(PAIR, tries=1)))
    assert isinstance(proposed, Propose)
    assert (proposed.generation.rung, proposed.generation.tries) == (2, 0)


def test_the_leader_stops_for_the_earliest_notice() -> None:
    trio = GangGeneration(number=3, members=("i-1", "i-2", "i-3"), addresses=("a", "b", "c"))
    late = replace(node("i-3", 30), state="busy", notice=7300.0, at=7200.0)  # its clock is two hours ahead
    seen = view(FIRST, replace(SECOND, notice=200.0, at=80.0), late, ages={"i-3": 4.0}, age_s=2.0)
    assert gang.notice_in_s(seen, trio) == 94.0
    assert gang.notice_in_s(view(FIRST, SECOND), trio) is None


def test_what_no_node_can_do_is_told_by_whoever_found_it() -> None:
    assert gang.fatal(view(FIRST, replace(SECOND, ended=65, said="no such data")), PAIR) == "i-2: no such data"
    assert gang.fatal(view(FIRST, replace(SECOND, generation=2, ended=65)), PAIR) is None


def test_the_oldest_keeps_the_limits_where_nobody_trains() -> None:
    assert [gang.acts(view(OLD, NEW)), gang.acts(view(NEW, OLD))] == [True, False]
    assert not gang.acts(view(OLD, replace(NEW, state="busy")))


@pytest.mark.parametrize(
    ("published", "newest", "origin"),
    [
        ([], PAIR, None),
        ([(7, 2), (9, 3)], PAIR, (9, 3)),
        ([(7, 2), (9, 2)], PAIR, (7, 2)),  # the leader of the second generation woke and published what it still had
        ([(7, 1), (7, 2)], PAIR, (7, 2)),
        ([(9, 2)], PAIR, (9, 2)),  # better than nothing
        ([(7, 0), (9, 0)], PAIR, (9, 0)),  # of a version before generations had folders of their own
        ([(5, 1), (9, 2)], None, (9, 2)),
    ],
)
def test_a_generation_begins_from_the_newest_checkpoint_that_was_published_in_time(
    published: list[tuple[int, int]], newest: GangGeneration | None, origin: tuple[int, int] | None
) -> None:
    found = gang.timely([CheckpointPlace(*each) for each in published], newest)
    assert (found[-1] if found else None) == origin


def test_a_presence_and_a_generation_read_back_as_they_were_written() -> None:
    told = replace(SECOND, notice=900.5, ended=-9, said="x", rung=1)
    assert Presence.from_json(told.to_json()) == told
    assert (
        GangGeneration.from_json({**PAIR.to_json(), "members": list(PAIR.members), "addresses": list(PAIR.addresses)})
        == PAIR
    )
