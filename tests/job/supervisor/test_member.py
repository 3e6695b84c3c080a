"""Real supervisors of several nodes, in virtual time: what happens when."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gpufleet.job.contract import bucket
from gpufleet.job.contract.bucket import CheckpointPlace
from gpufleet.job.supervisor import gang
from tests.job.gang_world import START, TORN_S, Town, TownNode


@pytest.fixture
def town(tmp_path: Path) -> Town:
    made = Town(tmp_path)
    made.boot(), made.boot(skew_s=7200.0)
    return made


def test_two_nodes_train_to_the_end_and_one_says_so(town: Town) -> None:
    town.run()
    assert [machine.code for machine in town.machines] == [0, 0]
    assert (town.store.json(bucket.DONE) or {})["reason"] == "finished"
    assert len(town.writers(bucket.DONE)) == 1
    assert [(each["number"], each["members"]) for each in town.generations()] == [(1, ["i-1", "i-2"])]
    assert lost(town) == 0
    assert (town.store.json("attempts/i-2.json") or {})["started_s"] > 0
    assert town.manifests()[-1] == town.last


def test_a_member_that_waited_begins_within_two_seconds_of_the_one_that_proposed(tmp_path: Path) -> None:
    town = Town(tmp_path)
    town.boot()
    town.schedule(13.5, town.boot)
    town.run()
    finished(town)
    first, second = (trainer.began_at for trainer in town.groups[1].values())
    assert abs(first - second) <= 2


def after_step(town: Town, step: int, act: Callable[[], object]) -> None:
    town.when(lambda: town.step >= step, act)


def to_all(town: Town, act: Callable[[TownNode], object]) -> None:
    for machine in town.machines:
        act(machine)


def trained_twice(town: Town) -> int:
    """Steps that were trained again."""
    return len(town.steps) - len({step for _, step in town.steps})


def lost(town: Town) -> int:
    """Nodes that the receipt has as gone without a word."""
    return sum(each["exit"] is None for each in (town.store.json("receipt.json") or {})["attempts"])


def finished(town: Town) -> None:
    """One end, said once, and the last checkpoint verifies."""
    assert (town.store.json(bucket.DONE) or {}).get("reason") == "finished", town.said
    assert len(town.writers(bucket.DONE)) == 1
    assert town.manifests()[-1] == town.last


@pytest.mark.parametrize("noticed", [0, 1], ids=["the leader", "a follower"])
def test_a_notice_to_one_node_loses_no_step(town: Town, noticed: int) -> None:
    after_step(town, 13, lambda: town.notice(town.machines[noticed]))
    town.run()
    finished(town)
    assert trained_twice(town) == 0
    assert town.machines[noticed].code == 75
    assert [each["members"] for each in town.generations()] == [["i-1", "i-2"], [f"i-{2 - noticed}", "i-3"]]
    stopped_at = max(step for generation, step in town.steps if generation == 1)
    assert town.writers(bucket.CheckpointPlace(stopped_at, 1).manifest) == ["i-1"]


def test_a_notice_to_all_loses_no_step(town: Town) -> None:
    after_step(town, 13, lambda: to_all(town, town.notice))
    town.run()
    finished(town)
    assert trained_twice(town) == 0
    assert [machine.code for machine in town.machines[:2]] == [75, 75]


@pytest.mark.parametrize("lost", [0, 1], ids=["the leader", "a follower"])
def test_a_node_that_vanishes_costs_the_steps_since_the_last_save_and_under_a_minute_of_standstill(
    town: Town, lost: int
) -> None:
    town.boot_s = 10.0
    after_step(town, 13, lambda: town.kill(town.machines[lost]))
    town.run()
    finished(town)
    assert trained_twice(town) == 3  # 11, 12 and 13
    assert town.generations()[1]["members"] == [f"i-{2 - lost}", "i-3"]
    assert f"generation 1 ends: i-{lost + 1} is lost" in town.said
    assert max(town.machines[1 - lost].stood_still) < 60


@pytest.mark.parametrize("lost", [0, 1], ids=["the leader", "a follower"])
def test_where_ranks_fail_with_the_node_that_vanished_the_next_generation_begins_within_half_a_minute(
    parts: Town, lost: int
) -> None:
    parts.boot_s = 5.0
    vanished, other = parts.machines[lost], parts.machines[1 - lost]

    def vanish() -> None:
        began.append(parts.now)
        parts.kill(vanished)
        assert other.trainer is not None
        other.trainer.fails = 1

    began = list[float]()
    after_step(parts, 13, vanish)
    parts.run()
    finished(parts)
    assert min(trainer.began_at for trainer in parts.groups[2].values()) - began[0] < 30


def test_a_node_that_stands_still_comes_back_to_a_newer_generation_and_trains_nothing_more(town: Town) -> None:
    town.boot_s = None
    after_step(town, 13, lambda: town.pause(town.machines[0], 150.0))
    town.schedule(60.0, town.boot)
    town.run()
    finished(town)
    assert [each["members"] for each in town.generations()][:2] == [["i-1", "i-2"], ["i-2", "i-3"]]
    assert town.writers(bucket.DONE) == ["i-2"]
    assert town.overwritten() == []
    assert town.published() == {30: 2, 40: 2}


@pytest.mark.parametrize(
    "call",
    [
        "put ckpt/step_00000040/g000001/v.bin",
        "put ckpt/step_00000040/g000001/manifest.json",
        "delete",
        "put metrics.jsonl",
        "put job.log",
        "put final/b.bin",
        "put receipt.json",
        "put done.json",
    ],
)
def test_a_leader_that_froze_amid_a_write_and_wakes_overwrites_nothing(town: Town, call: str) -> None:
    """A third node takes its place, and the second generation ends the run: where it repeats steps, by other bytes."""
    town.boot_s = None
    leader = town.machines[0]

    def freeze() -> None:
        town.pause(leader, 300.0)
        town.boot()

    after_step(town, 30, lambda: town.at_call(leader, lambda made: made.startswith(call), freeze))
    town.run()
    finished(town)
    assert leader.stopped_until > 0
    assert (town.overwritten(), town.lost) == ([], [])
    assert (len(town.generations()), town.manifests()) == (2, [30, 40])


@pytest.fixture
def parts(tmp_path: Path) -> Town:
    """Two nodes of which each saves a part."""
    made = Town(tmp_path, parts=True)
    made.boot(), made.boot()
    return made


def test_a_checkpoint_of_parts_is_published_with_all_of_them_and_counts_nodes(parts: Town) -> None:
    after_step(parts, 13, lambda: parts.notice(parts.machines[0]))
    parts.run()
    finished(parts)
    assert parts.wrong == []
    assert trained_twice(parts) == 0
    assert [each["members"] for each in parts.generations()] == [["i-1", "i-2"], ["i-2", "i-3"]]
    manifest = parts.store.json(bucket.CheckpointPlace(40, 2).manifest) or {}
    assert manifest["nodes"] == 2
    assert [[file["name"] for file in part["files"]] for part in manifest["parts"]] == [["w.bin", "shard_1.bin"]]


def test_a_part_that_never_comes_leaves_the_older_checkpoint_the_newest(parts: Town) -> None:
    delays = iter([0.0, 10 * TORN_S])
    parts.part_s, parts.last = lambda: next(delays, 0.0), 120
    seen: list[dict[int, int]] = []
    after_step(parts, 39, lambda: seen.append(parts.published()))
    parts.run()
    finished(parts)
    assert list(seen[0]) == [10]  # nor 30: the part of 20 may still come
    assert 20 not in {place.step for place in published_ever(parts)}
    assert len(published_ever(parts)) > 3


def test_parts_that_take_longer_than_the_time_to_the_next_save_are_published_all_the_same(parts: Town) -> None:
    parts.part_s, parts.saves_every, parts.last = lambda: 25.0, 5, 60
    parts.run()
    finished(parts)
    assert [place.step for place in published_ever(parts)] == [5, 15, 25, 35, 45, 60]


def test_for_the_part_of_a_node_that_is_lost_nobody_waits(parts: Town) -> None:
    parts.boot_s, parts.part_s = 10.0, lambda: 5.0
    times: list[float] = []

    def lose() -> None:
        parts.kill(parts.machines[1])
        times.append(parts.now)

    after_step(parts, 10, lose)
    parts.when(lambda: len(parts.generations()) == 2, lambda: times.append(parts.now))
    parts.run()
    finished(parts)
    assert times[1] - times[0] < 75  # of which 45 until it counts as lost


def test_all_members_begin_from_the_checkpoint_that_their_generation_names_whatever_is_published_meanwhile(
    parts: Town,
) -> None:
    """The leader before freezes as it publishes step 20. It wakes when the second generation has begun from step 10,
    before its follower has looked for a checkpoint.
    """
    parts.boot_s = None
    leader = parts.machines[0]

    def freeze() -> None:
        parts.pause(leader, 1e6)
        parts.boot()

    def wake() -> None:
        parts.pause(parts.machines[2], 20.0)
        parts.wake(leader)

    manifest = f"put {CheckpointPlace(20, 1).manifest}"
    after_step(parts, 1, lambda: parts.at_call(leader, lambda call: call == manifest, freeze))
    parts.when(lambda: len(parts.generations()) == 2, wake)
    parts.run()
    finished(parts)
    assert (parts.wrong, parts.lost, parts.overwritten()) == ([], [], [])
    assert [place for place in published_ever(parts) if place.step == 20] == [(20, 1), (20, 2)]


def published_ever(town: Town) -> list[CheckpointPlace]:
    """Every checkpoint that was, in order."""
    places = (bucket.checkpoint_place(put.key) for put in town.store.puts if bucket.MANIFEST_KEY.fullmatch(put.key))
    return list(dict.fromkeys(place for place in places if place is not None))


def test_an_upload_that_outlasts_its_generation_ends_with_it(town: Town) -> None:
    """Three files of a minute each, and one of the nodes crashes meanwhile."""
    town.file_s = 60.0
    after_step(town, 12, lambda: setattr(town.machines[1].trainer, "fails", 1))
    town.run(limit_s=7200.0)
    finished(town)
    puts = [put for put in town.store.puts if put.key.startswith(bucket.CHECKPOINTS)]
    places = [(bucket.checkpoint_place(put.key), put.generation) for put in puts]
    assert set(places) == {((10, 1), 1), ((10, 2), 2), ((40, 2), 2)}  # 20 and 30 were overtaken by 40


def test_a_store_that_is_down_for_one_node_ends_its_part_and_for_all_nothing(town: Town) -> None:
    after_step(town, 3, lambda: to_all(town, lambda each: town.cut(each, 100.0)))
    town.run()
    finished(town)
    assert len(town.generations()) == 1
    assert trained_twice(town) == 0


@pytest.mark.parametrize("cut_s", [120.0, 700.0])
def test_a_node_that_alone_cannot_reach_the_store_trains_on_for_ten_minutes_and_is_trained_without_then(
    town: Town, cut_s: float
) -> None:
    town.last = 80 if cut_s < gang.SILENT_S else 400
    after_step(town, 13, lambda: town.cut(town.machines[1], cut_s))
    town.run()
    finished(town)
    assert ("generation 1 ends: i-2 is lost" in town.said) is (cut_s > gang.SILENT_S)
    assert len(town.generations()) == 1 + (cut_s > gang.SILENT_S)
    assert trained_twice(town) <= 10


def test_a_crash_is_tried_again_once_and_then_all_leave(town: Town) -> None:
    town.boot_s = None

    def crash() -> None:
        trainer = town.machines[1].trainer
        if trainer is not None and trainer.code is None and not trainer.killed:
            trainer.fails = 1

    for seconds in range(4, 400, 4):
        town.schedule(seconds, crash)
    town.run()
    assert [machine.code for machine in town.machines] == [1, 1]
    assert [(each["tries"], each["is_last"]) for each in town.generations()] == [(0, False), (1, False), (2, True)]
    assert not town.is_over


def test_a_crash_behind_a_checkpoint_ends_as_soon_and_progress_before_one_counts(town: Town) -> None:
    town.boot_s = None
    town.last = 80

    def crash() -> None:
        trainer = town.machines[1].trainer
        if trainer is not None and trainer.code is None and not trainer.killed and town.step >= 15:
            trainer.fails = 1

    for seconds in range(1, 1200):
        town.schedule(seconds, crash)
    town.run()
    assert [machine.code for machine in town.machines] == [1, 1]
    assert [(each["step"], each["tries"], each["is_last"]) for each in town.generations()] == [
        (-1, 0, False), (10, 0, False), (10, 1, False), (10, 2, True),
    ]  # fmt: skip
    assert not town.is_over


def test_memory_that_ran_out_on_a_follower_takes_all_to_a_lower_rung(town: Town) -> None:
    after_step(town, 3, lambda: setattr(town.machines[1].trainer, "fails", 69))
    town.run()
    finished(town)
    assert [each["rung"] for each in town.generations()] == [0, 1]


def test_what_a_follower_finds_that_no_node_can_do_ends_the_run(town: Town) -> None:
    def fail() -> None:
        (town.machines[1].workdir / "fatal.json").write_text('{"error": "ValueError", "detail": "no such data"}')
        setattr(town.machines[1].trainer, "fails", 65)  # noqa: B010

    after_step(town, 3, fail)
    town.run()
    done = town.store.json(bucket.DONE) or {}
    assert (done["reason"], done["instance"]) == ("failed", "i-1")
    assert "no such data" in done["detail"]
    assert [machine.code for machine in town.machines] == [70, 70]


def test_a_refused_follower_leaves_and_another_node_takes_its_place(town: Town) -> None:
    def refuse() -> None:
        (town.machines[1].workdir / "preflight.json").write_text('{"ranks": [], "problems": ["rank 1: slow"]}')
        setattr(town.machines[1].trainer, "fails", 71)  # noqa: B010

    after_step(town, 1, refuse)
    town.run()
    finished(town)
    assert town.machines[1].code == 71
    assert town.generations()[1]["members"] == ["i-1", "i-3"]


def test_the_node_on_which_a_launcher_puts_rank_0_leads_from_then_on(town: Town) -> None:
    town.boot(), town.boot()
    town.first_rank_on = "i-2"
    town.when(lambda: town.step >= 25, lambda: town.kill(town.machines[0]))
    town.run()
    assert [each["members"] for each in town.generations()] == [["i-1", "i-2"], ["i-2", "i-1"], ["i-2", "i-3"]]
    assert "rank 0, which saves and prints, is on i-2" in town.said
    assert town.writers(bucket.DONE) == ["i-2"]


def test_a_node_whose_looks_are_late_costs_a_word_and_no_generation(tmp_path: Path) -> None:
    town = Town(tmp_path, last=300)
    town.boot(), town.boot()
    late = town.machines[1]
    town.when(lambda: town.step >= 13, lambda: town.cut(late, 50.0))
    town.when(lambda: town.step >= 60, lambda: setattr(late, "slow", 200.0))  # looks of 50 s from then on
    town.run()
    finished(town)
    assert len(town.generations()) == 1
    assert [step for _, step in town.steps] == list(range(1, 301))
    assert "no news from i-2 for 45 s; the ranks' steps decide" in town.said
    record = town.store.json(bucket.attempt_key("i-2")) or {}
    assert "i-2 is slow: its last 5 looks at S3 have each taken" in record["alarm"]


def test_the_last_part_is_published_although_the_leaders_looks_are_late(parts: Town) -> None:
    leader = parts.machines[0]
    after_step(parts, parts.last - 10, lambda: parts.cut(leader, 30.0))  # seen again amid the wait for its last word
    parts.run()
    finished(parts)
    assert len(parts.generations()) == 1


def test_followers_that_lose_their_leader_as_it_stops_send_their_parts_of_its_last_save(tmp_path: Path) -> None:
    town = Town(tmp_path, nodes=3, parts=True)
    town.boot(), town.boot(), town.boot()
    town.follower_code = 1
    leader, _, late = town.machines
    after_step(town, 13, lambda: town.notice(leader))
    after_step(town, 13, lambda: town.cut(late, 10.0))  # it sees at once all that happened
    town.run()
    finished(town)
    assert trained_twice(town) == 0


def test_a_node_that_the_others_wait_for_is_named_in_record_and_receipt(tmp_path: Path) -> None:
    town = Town(tmp_path, nodes=3, last=60)
    town.boot(), town.boot(), town.boot()
    town.machines[1].own_s = 1.6
    town.run()
    finished(town)
    why = "i-2 is slow: before the exchange, its last 20 steps took 1.6 times as long as those of other nodes"
    attempts = (town.store.json("receipt.json") or {})["attempts"]
    assert {each["instance"]: each.get("alarm") for each in attempts} == {"i-1": None, "i-2": why, "i-3": None}


@pytest.mark.parametrize("slow", [0, 1], ids=["the leader", "a follower"])
def test_a_slow_node_saves_and_leaves_where_another_is_cheaper_and_the_next_slow_one_stays(
    tmp_path: Path, slow: int
) -> None:
    town = Town(tmp_path, last=100, gather_s=300.0)
    first, second = town.boot(), town.boot()
    first.own_s = second.own_s = 10.0  # of what only the ranks tell, so that 80 steps are minutes
    town.machines[slow].own_s = 16.0
    town.when(lambda: len(town.machines) == 3, lambda: setattr(town.machines[2], "own_s", 40.0))
    town.run()
    finished(town)
    stays = f"i-{2 - slow}"
    assert [each["members"] for each in town.generations()] == [["i-1", "i-2"], [stays, "i-3"]]
    assert [step for _, step in town.steps] == list(range(1, 101))
    ends = {each["instance"]: each["exit"]["reason"] for each in (town.store.json("receipt.json") or {})["attempts"]}
    assert ends == {f"i-{slow + 1}": "slow", stays: "finished", "i-3": "finished"}
    assert town.machines[slow].code == 75
    assert (
        "i-3 is slow: before the exchange, its last 20 steps took 4.0 times"
        in (town.store.json("attempts/i-3.json") or {})["alarm"]
    )


def test_a_step_s_time_is_told_of_the_generation_in_which_it_was_measured(town: Town) -> None:
    told = list[float]()

    def look() -> None:
        told.append((town.store.json(bucket.presence_key("i-1")) or {})["own_s"])

    after_step(town, 26, look)
    after_step(town, 30, lambda: town.kill(town.machines[1]))
    town.when(lambda: len(town.generations()) == 2 and town.step == 38, look)
    town.run()
    finished(town)
    assert told == [1.0, 0.0]


def test_a_follower_that_fails_while_the_leader_saves_the_last_time_ends_no_generation(town: Town) -> None:
    town.end_s, town.follower_code = 60.0, 1
    town.run()
    finished(town)
    assert len(town.generations()) == 1
    assert trained_twice(town) == 0


def test_a_third_node_waits_and_leaves_after_ten_minutes_and_trains_nothing(town: Town) -> None:
    town.last, town.boot_s = 400, None
    town.schedule(20.0, town.boot)
    town.run()
    finished(town)
    assert town.machines[2].code == 75
    assert len(town.generations()) == 1


def test_where_not_all_come_those_that_wait_keep_the_limits(tmp_path: Path) -> None:
    limits = {"max_usd": "0.10", "max_hours": "2", "deadline": None}
    town = Town(tmp_path, limits=limits, gather_s=None)
    town.boot_s = None
    town.boot()
    town.run(limit_s=7200.0)
    done = town.store.json(bucket.DONE) or {}
    assert done["reason"] == "max_usd"
    assert "waits: 1 of 2 nodes are ready" in town.said


def test_those_that_wait_in_vain_let_go_and_all_are_asked_for_later(tmp_path: Path) -> None:
    town = Town(tmp_path, nodes=3, last=60)
    town.boot()
    town.schedule(300.0, town.boot)  # and one that is never there
    town.run(limit_s=3600.0 + 900.0 + 600.0)
    assert [(each.name, each.code) for each in town.machines[:2]] == [("i-1", 75), ("i-2", 75)]
    assert town.asked.keys() == {"0-1"}
    assert 900 <= town.asked["0-1"] - START <= 930  # the oldest's wait
    record = town.store.json(bucket.attempt_key("i-2")) or {}
    assert (record["exit"]["reason"], record["exit"]["notice"]) == ("let go", False)  # nobody is charged less for it
    assert [each["members"] for each in town.generations()] == [["i-3", "i-4", "i-5"]]
    finished(town)


def test_a_survivor_lets_go_too_and_later_waits_are_shorter_and_pauses_longer(tmp_path: Path) -> None:
    town = Town(tmp_path, last=60)
    town.boot(), town.boot()
    town.boot_s, town.comes = 1e9, [1, 1, 2]
    after_step(town, 25, lambda: town.kill(town.machines[1]))
    town.run(limit_s=10 * 3600.0)
    assert town.asked.keys() == {"1-1", "1-2", "1-3"}
    first, second, third = town.asked.values()
    assert 3600 + 600 <= second - first <= 3600 + 630
    assert 7200 + 600 <= third - second <= 7200 + 630
    assert [each["members"] for each in town.generations()] == [["i-1", "i-2"], ["i-5", "i-6"]]
    assert town.generations()[1]["step"] == 20
    finished(town)


def test_who_ends_a_run_in_which_nobody_trains_keeps_what_the_leader_before_wrote(tmp_path: Path) -> None:
    town = Town(tmp_path, last=10_000, limits={"max_usd": "0.50", "max_hours": "2", "deadline": None}, gather_s=None)
    town.boot_s = None
    town.boot(), town.boot()
    after_step(town, 13, lambda: town.notice(town.machines[0]))
    town.run(limit_s=7200.0)
    assert (town.store.json(bucket.DONE) or {})["instance"] == "i-2"
    lines = (town.store.get("metrics.jsonl") or b"").splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, town.step + 1))
    log = (town.store.get("job.log") or b"").decode()
    assert log.count("generation 1: i-1, i-2; this node leads it") == 1
    assert log.count("the run ends: max_usd") == 1


def test_a_limit_stops_all_and_the_leader_says_so(tmp_path: Path) -> None:
    town = Town(tmp_path, last=10_000, limits={"max_usd": "0.50", "max_hours": "2", "deadline": None})
    town.boot(), town.boot()
    town.run(limit_s=7200.0)
    assert (town.store.json(bucket.DONE) or {})["reason"] == "max_usd"
    assert town.writers(bucket.DONE) == ["i-1"]
    assert [machine.code for machine in town.machines] == [0, 0]
    assert town.manifests()[-1] == town.step


def test_a_stop_by_hand_stops_all(town: Town) -> None:
    after_step(town, 13, lambda: town.store.put("hand", b'{"by": "you", "at": ""}', bucket.ASKED))
    town.last = 10_000
    town.run()
    assert (town.store.json(bucket.DONE) or {})["reason"] == "stopped"
    assert [machine.code for machine in town.machines] == [0, 0]
    assert town.manifests()[-1] == town.step


def test_a_follower_publishes_nothing(town: Town) -> None:
    town.run()
    finished(town)
    own = {
        bucket.presence_key("i-2"),
        bucket.attempt_key("i-2"),
        bucket.heartbeat_key("i-2"),
        bucket.node_log_key("i-2"),
    }
    assert {put.key for put in town.store.puts if put.instance == "i-2"} == own


@pytest.mark.parametrize("capacity", ["block", "spot"])
def test_in_a_block_who_waits_for_a_lost_node_fails_after_twenty_minutes_and_elsewhere_waits_on(
    tmp_path: Path, capacity: str
) -> None:
    """Nothing replaces it there: the node then ends the fleet (job/node)."""
    town = Town(tmp_path, last=10_000, limits={"max_usd": "100", "max_hours": "100", "deadline": None}, gather_s=None)
    town.tree["capacity"] = capacity
    town.boot_s = None
    town.boot(), town.boot()
    after_step(town, 13, lambda: town.kill(town.machines[1]))
    town.run(limit_s=3600.0)
    assert town.machines[0].code == (1 if capacity == "block" else None)
    assert ("a block's fleet replaces none" in town.said) is (capacity == "block")
