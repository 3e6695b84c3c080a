"""The component TrainingRun, in the example program and in small ones: under mocks, and with the real engine."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpufleet.infra.definition.pin import pin
from gpufleet.infra.review import policy
from gpufleet.rehearsal import provider
from gpufleet.rehearsal.clock import ManualClock
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.engine import Pulumi, Result, settings
from gpufleet.rehearsal.environment import scratch
from tests import forked
from tests.rehearsal.engine_world import AMI, IMAGE, edit
from tests.repository import ROOT

EXAMPLE = ROOT / "examples" / "program"


def mocked(folder: Path, mode: str = "preview") -> dict[str, Any]:
    """What a program declares and exports under Pulumi's mocks, in a process of its own."""
    printed = folder.with_name("printed.txt")
    asked, environment = ["tests.gpufleet_api.mocked", str(folder), mode], {"PYTHONPATH": str(ROOT)}
    assert forked.run(asked, environment, printed, begun=lambda _: None) == 0, printed.read_text()
    # The last one: an event loop that is thrown away may say something behind it.
    found: dict[str, Any] = json.loads([line for line in printed.read_text().splitlines() if line[:1] == "{"][-1])
    return found


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("mocked") / "program"
    shutil.copytree(EXAMPLE, folder)
    return mocked(folder)


def resources_of(declared: list[dict[str, Any]], run: str) -> list[dict[str, Any]]:
    """The resources of one run, from its component down."""
    inside, found = {run}, []
    for _ in range(3):
        found = [each for each in declared if each["parent"] in inside]
        inside |= {each["name"] for each in found if each["type"].startswith("gpufleet:")}
    return found


def test_each_run_of_the_example_has_all_of_its_resources_below_its_component(example: dict[str, Any]) -> None:
    assert example["error"] == ""
    own = {run: resources_of(example["declared"], run) for run in ("base", "faster")}
    kinds = {run: {each["type"] for each in found} for run, found in own.items()}
    network = {"Vpc:Vpc", "Subnet:Subnet", "RouteTable:RouteTable", "InternetGateway:InternetGateway", "Route:Route"}
    short = {run: {kind.partition("/")[2] for kind in found} for run, found in kinds.items()}
    assert "aws:ec2/fleet:Fleet" in kinds["base"] & kinds["faster"]
    assert not any(kind.startswith("vpc:") for kind in short["base"])
    assert any(kind.startswith("vpc:") for kind in short["faster"]), network
    other = [each for each in example["declared"] if each not in [*own["base"], *own["faster"]]]
    assert not any("gpufleet:stack" in each["tags"] for each in other)
    named = [(each["type"], each["name"]) for each in example["declared"]]
    assert len(set(named)) == len(named)


def test_a_provider_that_is_given_is_used_and_else_there_is_one_of_the_region(example: dict[str, Any]) -> None:
    used = {
        run: {name for each in resources_of(example["declared"], run) for name in each["provider"]}
        for run in ("base", "faster")
    }
    assert used == {"base": {"ohio"}, "faster": {"faster-aws"}}


def test_tags_of_the_program_are_on_every_tagged_resource_of_that_run_alone(example: dict[str, Any]) -> None:
    for run, tag in (("base", "1234"), ("faster", None)):
        tagged = [each["tags"] for each in resources_of(example["declared"], run) if each["tags"]]
        assert len(tagged) > 5
        assert {each.get("CostCenter") for each in tagged} == {tag}


def test_the_bill_comes_out_in_numbers(example: dict[str, Any]) -> None:
    for name in ("training", "faster"):
        out = example["outputs"][name]
        assert 0 < out["usd_p90"] < 10
        assert out["results"] == f"s3://gpufleet-{name}-1234567/r1/"
        assert out["fleet"]


def test_the_policy_pack_finds_the_run_of_each_component(example: dict[str, Any]) -> None:
    names = [each["name"] for each in example["declared"] if each["name"].endswith(policy.RUN_CONFIG)]
    assert sorted(names) == ["base-run-config", "faster-run-config"]
    with pytest.raises(KeyError, match="content"):
        policy.declared(policy.OBJECT, names[0], {})
    assert policy.declared(policy.OBJECT, "other-config", {}) is None


PROGRAM = """\
import copy, gpufleet, pulumi, yaml
file = yaml.safe_load(open("training.yaml"))
said = []
for before, arguments in {cases!r}:
    definition = copy.deepcopy(file)
    try:
        exec(before)
        eval(f"gpufleet.TrainingRun('one', definition{{arguments}})")
    except pulumi.RunError as error:
        said.append(str(error))
pulumi.export("said", said)
"""


def small(tmp_path: Path, *cases: tuple[str, str]) -> dict[str, Any]:
    """What a program with these runs, the example's otherwise, declares in a preview; `said` are its refusals."""
    folder = tmp_path / "program"
    shutil.copytree(EXAMPLE, folder)
    (folder / "__main__.py").write_text(PROGRAM.format(cases=cases))
    return mocked(folder)


# What is done before, further arguments, what is said.
REFUSED = [
    ("definition['limits']['max_usd'] = 0.01", "", "limits.max_usd: '0.01' is not accepted"),
    ("definition['fleet']['region'] = 'us-east-9'", "", "fleet.region: 'us-east-9'"),
    ("definition = 'nothing.yaml'", "", "there is no file nothing.yaml"),
    ("definition['run']['id'] = print", "", "a definition may hold only text, numbers"),
    ("", ", scenario='large'", "has no scenario 'large'"),
    ("", ", tags={'aws:cost': '1'}", "account.tags.aws:cost"),
    ("", ", tags={'note': '<b>'}", "account.tags.note: '<b>' is not accepted"),
    ("", ", vpc_id='vpc-1'", "vpc_id and subnets belong together"),
    ("", ", vpc_id='vpc-1', subnets={'us-east-2a': 'subnet-1'}", "a subnet for each of fleet.zones"),
]


def test_what_is_wrong_is_said_before_anything_is_declared(tmp_path: Path) -> None:
    found = small(tmp_path, *((before, arguments) for before, arguments, _ in REFUSED))
    assert found["error"] == ""
    assert len(found["outputs"]["said"]) == len(REFUSED)
    for (*_, words), said in zip(REFUSED, found["outputs"]["said"], strict=True):
        assert said.startswith("one: ")
        assert words in said
        assert said.endswith("Nothing of it was declared.")
    assert [each["type"] for each in found["declared"]] == ["pulumi:pulumi:Stack"]


def test_two_runs_of_one_definition_are_refused_and_of_a_mapping_are_two(tmp_path: Path) -> None:
    folder = tmp_path / "program"
    shutil.copytree(EXAMPLE, folder)
    two = "import gpufleet; gpufleet.TrainingRun('one', {first}); gpufleet.TrainingRun('two', {second})"
    sections = "__import__('yaml').safe_load(open('training.yaml'))"
    (folder / "__main__.py").write_text(two.format(first="'training.yaml'", second="'training.yaml'"))
    assert "two: one already runs the definition training" in mocked(folder)["error"]
    (folder / "__main__.py").write_text(two.format(first="'training.yaml'", second=sections))
    found = mocked(folder)
    assert found["error"] == ""
    assert {each["tags"].get("gpufleet:stack") for each in found["declared"]} == {None, "training", "two"}


def test_an_up_without_pins_is_refused_and_says_what_is_missing(tmp_path: Path) -> None:
    folder = tmp_path / "program"
    shutil.copytree(EXAMPLE, folder)
    (folder / "__main__.py").write_text("import gpufleet; gpufleet.TrainingRun('one', 'training.yaml')")
    found = mocked(folder, "up")
    assert "training.yaml: not ready for up" in found["error"]
    assert "gpufleet doctor training.yaml --pin" in found["error"]


def test_a_boundary_of_the_program_comes_before_the_file_s(tmp_path: Path) -> None:
    arn = "arn:aws:iam::111122223333:policy/"
    before = f"definition['account'] = {{'permissions_boundary': '{arn}file'}}"
    found = small(tmp_path, (before, f", permissions_boundary=pulumi.Output.from_input('{arn}program')"))
    assert (found["error"], found["outputs"]["said"]) == ("", [])
    assert {each["boundary"] for each in found["declared"] if each["type"] == "aws:iam/role:Role"} == {f"{arn}program"}


def test_a_provider_of_another_region_is_refused(tmp_path: Path) -> None:
    before = "import pulumi_aws as aws\nwest = aws.Provider('west', region='us-west-2')"
    found = small(tmp_path, (before, ", opts=pulumi.ResourceOptions(provider=west)"))
    assert "the provider's region is us-west-2, but fleet.region of the definition is us-east-2" in found["error"]


REAL = pytest.mark.skipif(shutil.which("pulumi") is None, reason="the Pulumi engine is not on PATH")
FLEET = "aws:ec2/fleet:Fleet"
STAMPING = """
def stamp(args):
    if args.type_ != "aws:s3/bucket:Bucket":
        return None
    tags = {**args.props["tags"], "Stamped": args.name}
    return pulumi.ResourceTransformResult({**args.props, "tags": tags}, args.opts)


STAMPED = pulumi.ResourceOptions(transforms=[stamp])

"""


def deleted_fleets(result: Result) -> set[str]:
    return {each.name for each in result.steps if each.operation == "delete" and each.type == FLEET}


@REAL
def test_two_runs_of_a_program_live_beside_its_resources_and_one_goes_alone(tmp_path: Path) -> None:
    folder = tmp_path / "program"
    shutil.copytree(EXAMPLE, folder)
    project = yaml.safe_load((folder / "Pulumi.yaml").read_text())
    project["runtime"] = {"name": "python", "options": {"virtualenv": sys.prefix}}
    (folder / "Pulumi.yaml").write_text(yaml.safe_dump(project))
    file = folder / "training.yaml"
    pin(file, ami=AMI, image=IMAGE, supervisor_image=IMAGE)
    edit(folder / "__main__.py", '("faster", definition)', '("faster", definition, opts=STAMPED)')
    edit(folder / "__main__.py", '"training.yaml",\n', '"training.yaml",\n    project=".",\n')  # the program's folder
    edit(folder / "__main__.py", "# A definition from a file", STAMPING + "# A definition from a file")
    clock = ManualClock(datetime.now(UTC).replace(microsecond=0) - timedelta(minutes=5))
    with Cloud(tmp_path / "cloud", clock=clock) as cloud:
        environment = {**cloud.environment(), "PYTHONPATH": str(ROOT)}
        with provider.serve(environment) as port:
            engine = Pulumi(folder, {**environment, **settings(folder, port)}, "dev", lambda line: None)
            created = engine.up()
            assert created.ok, created.text
            stamped = re.findall('"Stamped": "(.*?)"', engine._run(["pulumi", "stack", "export", "--stack", "dev"]))
            assert set(stamped) == {"gpufleet-faster"}
            outputs = engine.outputs()
            fleets = {name: outputs[name]["fleet"] for name in ("training", "faster")}
            assert len({each for each in fleets.values() if each.startswith("fleet-")}) == 2
            for name, path in (("training", "training.yaml"), ("faster", ".gpufleet/definitions/faster.yaml")):
                asked = [sys.executable, "-m", "gpufleet.infra.cli", "status", path]
                told = subprocess.run(asked, cwd=folder, env=scratch(environment), capture_output=True, text=True)
                assert fleets[name] in told.stdout, told

            edit(folder / "__main__.py", '"base",', '"core",')
            renamed = engine.preview()
            assert not renamed.ok
            assert "The component base of this stack runs it" in renamed.diagnostics
            known_as = 'opts=pulumi.ResourceOptions(provider=ohio, aliases=[pulumi.Alias(name="base")])'
            edit(folder / "__main__.py", "opts=pulumi.ResourceOptions(provider=ohio)", known_as)
            renamed = engine.up()
            assert set(renamed.changes) == {"same"}, renamed.text

            edit(file, "max_hours: 4", "max_hours: 3")
            other = engine.preview()
            assert not other.ok
            assert "Run r1 already exists with other settings" in other.diagnostics
            edit(file, "id: r1", "id: r2")
            replaced = engine.up()
            assert replaced.ok, replaced.text
            after = engine.outputs()
            assert all(after[name]["fleet"] != fleets[name] for name in fleets)
            assert after["training"]["results"].endswith("/r2/")

            urns = engine._run(["pulumi", "stack", "--show-urns", "--stack", "dev"]).split()
            (urn,) = {word for word in urns if word.endswith("gpufleet:index:TrainingRun::faster")}
            options = ("--target", urn, "--target-dependents", "--refresh=false")  # the engine refreshes no target
            alone = engine._command("destroy", "--yes", "--skip-preview", *options)
            assert alone.ok, alone.text
            assert deleted_fleets(alone) == {"faster-fleet-fleet"}

            program = (folder / "__main__.py").read_text()
            (folder / "__main__.py").write_text(program[: program.index("# A definition from a file")])
            taken_out = engine.up()
            assert taken_out.ok, taken_out.text
            assert deleted_fleets(taken_out) == {"core-fleet-fleet"}
            assert "team" in taken_out.affected("same")
            assert engine.destroy().ok
            assert {kind for kind, _ in cloud.leftovers()} == {"bucket"}
