"""Whatever happens to the nodes of a run, in whatever order: it ends once, and all that is published verifies."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from gpufleet.job.contract import bucket
from gpufleet.job.supervisor import gang, member
from tests.job.gang_world import START, TORN_S, Town, TownNode, written

# Schedules, where the leader alone saves and where each node saves a part.
QUICK, AT_ONCE, ALL = 10, 58, {False: 126, True: 300}
# Of what a leader writes.
WRITTEN = ("ckpt/", "ckpt/", "manifest.json", "final/", "metrics.jsonl", "receipt.json", "job.log", "done.json")
STANDSTILL_S = gang.FENCE_S + 2 * gang.BEAT_S


def play(folder: Path, seed: int, *, parts: bool = False) -> Town:
    """A run of two to four nodes, to which up to five things happen within its first three minutes."""
    drawn = random.Random(seed)
    nodes, every = drawn.choice([2, 2, 3, 4]), drawn.choice([5, 15, 100])
    limits = {"max_usd": "100", "max_hours": "100", "deadline": None}
    town = Town(folder, nodes=nodes, last=60, saves_every=every, parts=parts, limits=limits)
    town.part_s = lambda: drawn.choice([0.0, 1.0, 5.0, 20.0, 10 * TORN_S])
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
            to_one(fail(1 if town.parts else 69)),  # memory that ran out: a command has no ladder
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
    assert town.wrong == []
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


def killed(folder: Path, node: int, put: int) -> bool:
    """A run on two nodes that each leave a part, of which one vanishes at its put of that number. False: it makes fewer
    puts.
    """
    town = Town(folder, last=20, saves_every=10, parts=True)
    town.boot_s, calls = 10.0, itertools.count()
    town.boot(), town.boot()
    machine = town.machines[node]
    town.at_call(machine, lambda call: call.startswith("put ") and next(calls) == put, lambda: town.kill(machine))
    town.run()
    check(town)
    return machine.is_killed


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_a_node_that_vanishes_at_any_put_leaves_no_checkpoint_torn_or_mixed(
    node: int, every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member, "TICK_S", 1.0)
    puts = itertools.takewhile(lambda put: killed(tmp_path / str(put), node, put), itertools.count(1, every))
    assert len(list(puts)) * every > 27


@pytest.mark.parametrize(
    ("parts", "seeds"),
    [
        pytest.param(
            parts,
            range(first, min(first + AT_ONCE, most) if first else QUICK),
            marks=[pytest.mark.slow] if first else [],
            id=f"{'parts' if parts else 'whole'} from {first}",
        )
        for parts, most in ALL.items()
        for first in (0, *range(QUICK, most, AT_ONCE))
    ],
)
def test_any_schedule_of_losses_ends_with_one_done_json_and_manifests_that_verify(
    parts: bool, seeds: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member, "TICK_S", 1.0)
    for seed in seeds:
        town = play(tmp_path / str(seed), seed, parts=parts)
        try:
            check(town)
        except AssertionError as error:
            raise AssertionError(f"schedule {seed}, {town.now - START:.0f} s: {error}\n{town.said[-6000:]}") from error
