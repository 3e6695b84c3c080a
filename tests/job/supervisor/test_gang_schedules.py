"""Whatever happens to the nodes of a run, in whatever order: it ends once, and all that is published verifies."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from gang_world import START, Town, TownNode, written

from gpufleet.job.contract import bucket
from gpufleet.job.supervisor import gang, member

QUICK, ALL, AT_ONCE = 16, 200, 46  # schedules
# Of what a leader writes.
WRITTEN = ("ckpt/", "ckpt/", "manifest.json", "final/", "metrics.jsonl", "receipt.json", "job.log", "done.json")
STANDSTILL_S = gang.FENCE_S + 2 * gang.BEAT_S


def play(folder: Path, seed: int) -> Town:
    """A run of two to four nodes, to which up to five things happen within its first three minutes."""
    drawn = random.Random(seed)
    town = Town(folder, nodes=drawn.choice([2, 2, 3, 4]), last=60, saves_every=drawn.choice([5, 15, 100]))
    town.call_s, town.file_s = drawn.choice([(0.05, 0.2), (0.2, 1.0), (0.5, 4.0)])
    town.boot_s = drawn.choice([10.0, 40.0, 90.0])
    for _ in range(town.nodes):
        town.schedule(drawn.uniform(0, 30), lambda: town.boot(skew_s=drawn.uniform(-7200, 7200)))
    for _ in range(drawn.randint(0, 5)):
        town.schedule(drawn.uniform(5, 180), happening(town, drawn))
    town.run(limit_s=4 * 3600)
    return town


def happening(town: Town, drawn: random.Random) -> Callable[[], object]:
    """One of what may happen to nodes that are there then."""

    def one() -> TownNode | None:
        there = [each for each in town.machines if each.is_there and not each.is_silent]
        return drawn.choice(there) if there else None

    def to_one(act: Callable[[TownNode], object]) -> Callable[[], object]:
        return lambda: None if (found := one()) is None else act(found)

    def to_all(act: Callable[[TownNode], object]) -> Callable[[], object]:
        return lambda: [act(each) for each in town.machines if each.is_there]

    def fail(code: int) -> Callable[[TownNode], object]:
        def act(machine: TownNode) -> None:
            if machine.trainer is not None and machine.trainer.code is None:
                machine.trainer.fails = code

        return act

    seconds, skipped, word = drawn.uniform(5, 200), drawn.randrange(4), drawn.choice(WRITTEN)

    def amid_a_write(act: Callable[[TownNode], object]) -> Callable[[TownNode], object]:
        """Where a node writes such an object, or the second after it, or the third."""
        left = itertools.count(-skipped)

        def plan(machine: TownNode) -> None:
            town.at_call(machine, lambda call: word in call and next(left) >= 0, lambda: act(machine))

        return plan

    def freeze(machine: TownNode) -> None:
        """For longer than others wait for it, and another node takes its place."""
        town.pause(machine, 60 + seconds)
        town.schedule(town.now - START + (town.boot_s or 0.0), town.boot)

    return drawn.choice(
        [
            to_one(town.notice),
            to_one(town.notice),
            to_all(town.notice),
            to_one(town.kill),
            to_one(town.kill),
            to_one(amid_a_write(town.kill)),
            to_all(amid_a_write(freeze)),
            to_all(amid_a_write(freeze)),
            to_one(lambda machine: town.pause(machine, seconds)),
            to_one(lambda machine: town.cut(machine, seconds)),
            to_all(lambda machine: town.cut(machine, seconds)),
            to_one(fail(1)),
            to_one(fail(69)),
            town.boot,
        ]
    )


def check(town: Town) -> None:
    done = town.store.json(bucket.DONE)
    assert done is not None
    assert done["reason"] == "finished"
    assert len(town.writers(bucket.DONE)) == 1
    assert town.manifests()[-1] == town.last
    assert town.lost == [], "the newest whole checkpoint was lost"
    assert town.overwritten() == [], "a node wrote over what a later generation had written"
    assert {name: written(town.store.get(f"final/{name}") or b"")[0] for name in ("a.bin", "b.bin")} == dict.fromkeys(
        ("a.bin", "b.bin"), town.last
    )
    trained = [generation for generation, _ in town.steps]
    assert trained == sorted(trained), "an old generation trained beside a newer one"
    leaders = {each["members"][0] for each in town.generations()}
    assert {put.instance for put in town.store.puts if bucket.MANIFEST_KEY.fullmatch(put.key)} <= leaders
    stood = [seconds for machine in town.machines for seconds in machine.stood_still]
    # Whom the store was down for, when it was about to find another one lost, waits as long for steps of its own.
    assert max(stood, default=0.0) <= STANDSTILL_S + (gang.LOST_S if town.was_cut else 0.0)


@pytest.mark.parametrize(
    "seeds",
    [
        range(QUICK),
        *(pytest.param(range(first, first + AT_ONCE), marks=pytest.mark.slow) for first in range(QUICK, ALL, AT_ONCE)),
    ],
    ids=lambda seeds: f"{seeds[0]} to {seeds[-1]}",
)
def test_any_schedule_of_losses_ends_with_one_done_json_and_manifests_that_verify(
    seeds: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member, "TICK_S", 1.0)
    for seed in seeds:
        town = play(tmp_path / str(seed), seed)
        try:
            check(town)
        except AssertionError as error:
            raise AssertionError(f"schedule {seed}, {town.now - START:.0f} s: {error}\n{town.said[-6000:]}") from error
