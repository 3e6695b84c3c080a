"""`campaigns/NAME.yaml`: what it may say, and the plain definitions that it becomes."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft7Validator

from gpufleet.infra.definition import campaign
from gpufleet.infra.definition.loader import TRIALS, find, load, of_project
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import GpufleetError
from tests.infra.command_files import command_file
from tests.infra.commands_world import DEFINITION

SCHEMA = Draft7Validator(json.loads(campaign.SCHEMA_FILE.read_text()))
ALL = """\
files: [mine, other]
grid:
  --lr: [1e-3, 3e-3]
  limits.max_usd: [9]
list: [{job.workdir: a, --seed: 1}, {--seed: 2}]
max_usd: 50
max_hours: 12
at_once: 2
order: cheapest
open: true
"""
SEARCH = "files: [mine]\nmax_usd: 1\n"
SHARED = "files: [mine]\nmax_usd: 10\nshare_node: true\ngrid: {--lr: [1, 2, 3]}\n"
DRAWS = """\
metric: val_loss
direction: minimize
sampler: tpe
trials: 9
draw: {--lr: {low: 1e-5, high: 1e-2, log: true}, job.workdir: [a, b]}
"""


def written(root: Path, text: str, name: str = "night") -> campaign.CampaignFile:
    """The campaign of that text, in a project with the stacks mine, other and small-growth."""
    for each in ("mine", "other"):
        command_file(root, name=each, command="python train.py --lr 0.1 --out={checkpoints}")
    (root / "stacks" / "small-growth.yaml").write_text(DEFINITION)
    (root / "campaigns").mkdir(exist_ok=True)
    (root / "campaigns" / f"{name}.yaml").write_text(text)
    return campaign.load(name, root)


def definitions(root: Path, made: list[campaign.DefinedTrial]) -> list[StackDefinition]:
    campaign.write(made, root)
    return [load(find(each.name, root), now=datetime(2026, 11, 21, tzinfo=UTC)) for each in made]


def test_each_combination_is_a_plain_definition(tmp_path: Path) -> None:
    found = written(tmp_path, ALL)
    assert (found.max_usd, found.max_hours, found.at_once) == (Decimal(50), Decimal(12), 2)
    made = campaign.trials(found, tmp_path)
    read = definitions(tmp_path, made)
    assert len(made) == len({each.name for each in made}) == 8
    first, second = (each.job.parameters.command for each in read[:2])  # type: ignore[attr-defined]
    assert first == "python train.py --lr 1e-3 --out={checkpoints} --seed=1"
    assert second == "python train.py --lr 3e-3 --out={checkpoints} --seed=1"
    assert {each.limits.max_usd for each in read} == {9}
    assert [each.job.parameters.workdir for each in read[:4]] == ["a", "a", "{code}", "{code}"]  # type: ignore[attr-defined]
    assert str(made[0]) == "workdir=a, --seed=1, --lr=1e-3, max_usd=9"


def test_a_trial_keeps_its_name_as_other_values_are_added(tmp_path: Path) -> None:
    few = written(tmp_path, "files: [mine]\ngrid: {--lr: [1e-3]}\nmax_usd: 50\n")
    more = written(tmp_path, "files: [other, mine]\ngrid: {--lr: [3e-3, 1e-3]}\nmax_usd: 70\n")
    (name,) = (each.name for each in campaign.trials(few, tmp_path))
    assert name in [each.name for each in campaign.trials(more, tmp_path)]


def test_without_other_values_the_stacks_are_the_trials(tmp_path: Path) -> None:
    found = written(tmp_path, "files: [mine, small-growth]\nmax_usd: 50\n")
    made = campaign.trials(found, tmp_path)
    assert [each.name for each in made] == ["mine", "small-growth"]
    campaign.write(made, tmp_path)
    assert not (tmp_path / TRIALS).exists()


def test_a_value_may_be_a_list_or_a_section(tmp_path: Path) -> None:
    text = "files: [mine]\ngrid:\n  fleet.instance_types: [[g5.2xlarge], [g5.2xlarge, g6.2xlarge]]\n"
    text += "  job.work: [{steps: 5, step_ms: {A10G: 7}}]\nmax_usd: 9\n"
    one, two = definitions(tmp_path, campaign.trials(written(tmp_path, text), tmp_path))
    assert (len(one.fleet.instance_types), len(two.fleet.instance_types)) == (1, 2)
    assert one.job.parameters.work.steps == 5  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("files: [mine]\n", "max_usd: missing; allowed: a number from 0.01 to 1,000,000"),
        ("files: []\nmax_usd: 1\n", "files: 'an empty list' is not accepted; allowed: at least one stack"),
        ("files: [mine]\nmax_usd: 1\ngird: {--lr: [1]}\n", "gird: unknown key. Nearest: grid."),
        ("files: [mine]\nmax_usd: 1\ngrid: {--lr: 1}\n", "a list with at least one value. Write [VALUE, VALUE]."),
        ("files: [mine]\nmax_usd: 1\nlist: []\n", "list: 'an empty list' is not accepted"),
        (
            "files: [mine]\nmax_usd: 1\nlist: [{jobs.seed: 1}]\n",
            "'jobs.seed' is not accepted; allowed: a key below one of",
        ),
        (
            "files: [mine]\nmax_usd: 1\ngrid: {run.id: [r1, r2]}\n",
            "'run.id' is not accepted; allowed: a key below one of",
        ),
        (
            "files: [mine]\nmax_usd: 1\nat_once: 0\n",
            "at_once: '0' is not accepted; allowed: a whole number from 1 to 100",
        ),
        ("files: [mine]\nmax_usd: 1\norder: dearest\n", "allowed: one of listed, cheapest"),
        (
            "files: [mine]\nmax_usd: 1\nopen: true\n",
            "max_hours: missing; allowed: hours, after which an open campaign ends",
        ),
        (f"{SEARCH}share_node: true\n", "share_node: 'true' is not accepted; allowed: true only with one file"),
        (f"{SHARED}open: true\nmax_hours: 9\n", "allowed: true only with one file, its grid or list"),
        (f"{SEARCH}{DRAWS}share_node: true\n", "Runs that come later cannot join a node: without share_node each"),
        (SHARED.replace("[mine]", "[mine, other]"), "allowed: true only with one file, its grid or list"),
        (f"{SHARED}order: cheapest\n", "allowed: listed, as share_node is true. Each node does its runs in the"),
        (f"{SEARCH}pruner: asha\nmetric: loss\ndirection: minimize\n", "every: missing; allowed: a value, as pruner"),
        (f"{SEARCH}metric: loss\n", "direction: missing; allowed: a value, as metric needs it"),
        (f"{SEARCH}direction: down\nmetric: loss\n", "allowed: one of minimize, maximize"),
        (f"{SEARCH}{DRAWS}grid: {{--seed: [1]}}\n", "allowed: a file alone, without grid and list"),
        (f"{SEARCH}{DRAWS}".replace("low: 1e-5, ", ""), "allowed: {low: A, high: B}, or a list of choices"),
        (f"{SEARCH}{DRAWS}".replace("{--lr", "{lr"), "'lr' is not accepted; allowed: a key below one of"),
        (f"{SEARCH}{DRAWS}".replace("trials: 9\n", ""), "trials: missing; allowed: a value, as draw needs it"),
    ],
)
def test_a_wrong_file_is_refused_by_reader_and_schema(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(GpufleetError) as refused:
        written(tmp_path, text)
    assert message in str(refused.value)
    assert not SCHEMA.is_valid(yaml.safe_load(text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("files: [mien]\nmax_usd: 1\n", "there is no stack 'mien'"),
        ("files: [mine, mine]\nmax_usd: 1\n", "mine twice; to repeat a trial"),
        ("files: [mine]\nmax_usd: 1\ngrid: {--lr: [1, 1]}\n", "--lr=1 twice; to repeat a trial"),
        ("files: [mine]\nmax_usd: 1\ngrid: {--lr: [1; rm -r x]}\n", "--lr: '1; rm -r x' is not accepted"),
        ("files: [small-growth]\nmax_usd: 1\ngrid: {--lr: [1]}\n", "--lr of the campaign needs a job.command"),
        ("files: [mine]\nmax_usd: 1\ngrid: {--lr: [[1]]}\n", "--lr of the campaign takes single values"),
        (
            f"files: [mine]\nmax_usd: 1\ngrid: {{--a: {[*range(40)]}, --b: {[*range(40)]}}}\n",
            "1600 trials; at most 1000",
        ),
        (
            f"{SHARED}".replace("--lr: [1, 2, 3]", "storage.root.size_gib: [50, 60]"),
            "trials differ in storage; with share_node trials may differ in job, estimate, limits",
        ),
        (SHARED.replace("[1, 2, 3]", f"{[*range(25)]}"), "25 trials; with share_node and this at_once at most 24 are"),
    ],
)
def test_what_gives_no_trial_is_refused(tmp_path: Path, text: str, message: str) -> None:
    found = written(tmp_path, text)
    with pytest.raises(GpufleetError) as refused:
        campaign.trials(found, tmp_path)
    assert message in str(refused.value)


def test_trials_that_share_nodes_are_dealt_to_runs_with_an_equal_share_of_the_cap(tmp_path: Path) -> None:
    found = written(tmp_path, f"{SHARED}at_once: 2\n")
    first, second = campaign.trials(found, tmp_path)
    assert [member.values["--lr"] for member in first.members] == ["1", "3"]
    assert (second.values, second.members) == ({"--lr": "2"}, ())
    campaign.write([first], tmp_path)
    whole = load(find(first.name, tmp_path), now=datetime(2026, 11, 21, tzinfo=UTC), staged=True)
    assert whole.limits.max_usd == 5
    assert [part.stage for part in whole.stages] == [member.stage for member in first.members]
    assert [part.fleet_of for part in whole.stages] == ["", whole.stages[0].stage]
    own = load(tmp_path / "stacks" / "mine.yaml", now=datetime(2026, 11, 21, tzinfo=UTC)).limits
    assert {part.limits for part in whole.stages} == {own}
    assert whole.limits.max_hours == 2 * own.max_hours
    short = campaign.trials(replace(found, max_hours=own.max_hours + 1), tmp_path)[0]
    campaign.write([short], tmp_path)
    again = load(find(short.name, tmp_path), now=datetime(2026, 11, 21, tzinfo=UTC), staged=True)
    assert again.limits.max_hours == own.max_hours + 1
    assert [part.job.parameters.command[16:22] for part in whole.stages] == ["--lr 1", "--lr 3"]  # type: ignore[attr-defined]


def test_an_unknown_key_below_a_section_is_refused_with_the_trial(tmp_path: Path) -> None:
    found = written(tmp_path, "files: [mine]\nmax_usd: 1\ngrid: {limits.max_used: [1]}\n")
    with pytest.raises(GpufleetError, match=r"night-[0-9a-f]{8}\.yaml.*\n.*max_used: unknown key\. Nearest: max_usd"):
        definitions(tmp_path, campaign.trials(found, tmp_path))


def test_an_open_campaign_takes_the_definitions_of_its_folder(tmp_path: Path) -> None:
    found = written(tmp_path, "files: [mine]\nmax_usd: 9\nmax_hours: 2\nopen: true\n")
    folder = tmp_path / "campaigns" / "night"
    folder.mkdir()
    for name in ("wide.yaml", ".half.yaml", "UP.yaml", "notes.txt", f"{'x' * 40}.yaml"):
        (folder / name).write_text(DEFINITION)
    assert [each.name for each in campaign.offered(found, tmp_path)] == ["night-wide"]
    assert [each.name for each in definitions(tmp_path, campaign.offered(found, tmp_path))] == ["night-wide"]
    closed = written(tmp_path, "files: [mine]\nmax_usd: 9\n")
    assert campaign.offered(closed, tmp_path) == []


def test_a_name_that_leaves_its_folder_is_no_campaign(tmp_path: Path) -> None:
    written(tmp_path, ALL)
    assert SCHEMA.is_valid(yaml.safe_load(ALL))
    for name in ("../night", "/etc/passwd", "", "Night", "n" * 40):
        with pytest.raises(GpufleetError, match=r"there is no campaign .*: campaigns/ has night"):
            campaign.load(name, tmp_path)


def test_what_a_sampler_draws_becomes_a_plain_definition(tmp_path: Path) -> None:
    found = written(tmp_path, f"{SEARCH}{DRAWS}")
    assert SCHEMA.is_valid(yaml.safe_load(f"{SEARCH}{DRAWS}"))
    assert [each.name for each in campaign.trials(found, tmp_path)] == ["mine"]
    assert (found.draw["--lr"].is_whole, found.draw["job.workdir"].choices) == (False, ("a", "b"))
    made = campaign.define_drawn(found, {"--lr": "0.00012", "job.workdir": "b"}, tmp_path)
    (read,) = definitions(tmp_path, [made])
    assert read.job.parameters.command == "python train.py --lr 0.00012 --out={checkpoints}"  # type: ignore[attr-defined]
    assert read.job.parameters.workdir == "b"  # type: ignore[attr-defined]
    campaign.lower_limit(made.name, Decimal("1.25"), tmp_path)
    again = load(find(made.name, tmp_path), now=datetime(2026, 11, 21, tzinfo=UTC))
    assert (again.limits, again.job) == (replace(read.limits, max_usd=Decimal("1.25")), read.job)


@pytest.mark.parametrize(
    ("of", "message"),
    [
        ("{low: 2, high: 1}", "allowed: high above low"),
        ("{low: 0, high: 1, log: true}", "allowed: low above 0 and no step with log, and high above low"),
        ("{low: 1, high: 2, step: 0}", "allowed: a number from"),
        ("{low: 1, high: 8, step: 2}", "allowed: high a multiple of step above low"),
    ],
)
def test_a_range_that_is_none_is_refused(tmp_path: Path, of: str, message: str) -> None:
    with pytest.raises(GpufleetError) as refused:
        written(tmp_path, f"{SEARCH}{DRAWS}".replace("{low: 1e-5, high: 1e-2, log: true}", of))
    assert message in str(refused.value)


@pytest.mark.parametrize(("low", "high", "whole"), [("2", "8", True), ("0.0", "1.0", False), ("1e-3", "1", False)])
def test_whole_numbers_are_drawn_where_both_bounds_are_written_so(low: str, high: str, whole: bool) -> None:
    assert campaign.DrawnRange(low=Decimal(low), high=Decimal(high)).is_whole is whole


def test_a_campaign_s_files_and_results_are_no_training_code(tmp_path: Path) -> None:
    """Else what an agent puts there would change the code of all runs, which was approved."""
    written(tmp_path, SEARCH)
    own = of_project(tmp_path)
    for name in ("campaigns/night.yaml", "campaigns/night/wide.yaml", "results/night-0a1b2c3d/r1/x", "results/night/x"):
        assert own.match(name), name
    for name in ("campaigns/tool.py", "campaigns/nights/x", "results/nights/x", "src/campaigns/night.yaml"):
        assert not own.match(name), name
