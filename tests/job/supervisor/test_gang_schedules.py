"""Whatever happens to the nodes of a run, in whatever order: it ends once, and all that is published verifies."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from gang_world import START, Town, TownNode

from gpufleet.job.contract import bucket
from gpufleet.job.supervisor import gang, member

QUICK, ALL, AT_ONCE = 16, 200, 46  # schedules
STANDSTILL_S = gang.FENCE_S + 2 * gang.BEAT_S


def play(folder: Path, seed: int) -> Town:
    """A run of two to four nodes, to which up to five things happen within its first three minutes."""
    drawn = random.Random(seed)
    town = Town(folder, nodes=drawn.choice([2, 2, 3, 4]), last=60, saves_every=drawn.choice([5, 15, 100]))
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
        there = [each for each in town.machines if each.thread.is_alive() and not each.is_silent]
        return drawn.choice(there) if there else None

    def to_one(act: Callable[[TownNode], object]) -> Callable[[], object]:
        return lambda: None if (found := one()) is None else act(found)

    def to_all(act: Callable[[TownNode], object]) -> Callable[[], object]:
        return lambda: [act(each) for each in town.machines if each.thread.is_alive()]

    def fail(code: int) -> Callable[[TownNode], object]:
        def act(machine: TownNode) -> None:
            if machine.trainer is not None and machine.trainer.code is None:
                machine.trainer.fails = code

        return act

    def die_amid_an_upload(machine: TownNode) -> None:
        town.when(lambda: town.store.puts[-1][1].endswith("w.bin"), lambda: town.kill(machine))

    seconds = drawn.uniform(5, 200)
    return drawn.choice(
        [
            to_one(town.notice),
            to_one(town.notice),
            to_all(town.notice),
            to_one(town.kill),
            to_one(town.kill),
            to_one(die_amid_an_upload),
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
    trained = [generation for generation, _ in town.steps]
    assert trained == sorted(trained), "an old generation trained beside a newer one"
    leaders = {each["members"][0] for each in town.generations()}
    manifests = {(who, key) for who, key in town.store.puts if bucket.MANIFEST_KEY.fullmatch(key)}
    assert {who for who, _ in manifests} <= leaders
    stood = [seconds for machine in town.machines for seconds in machine.stood_still]
    # Whom the store was down for judges no other until it has been back for a while.
    assert max(stood, default=0.0) <= STANDSTILL_S + (gang.STEADY_S if town.was_cut else 0.0)


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
