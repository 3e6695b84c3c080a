"""`gpufleet compare` in a project: the project's files change its rows as they change the bill."""

from __future__ import annotations

import functools
import io
import json
import re
import shutil
import tempfile
from contextlib import chdir, redirect_stdout
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gpufleet.infra.cli import main
from gpufleet.infra.commands import compare as compare_command
from gpufleet.infra.compare import ranking
from gpufleet.infra.compare import table as compare_table
from gpufleet.infra.compare.rows import Row
from gpufleet.infra.definition.loader import load
from gpufleet.infra.definition.scenarios import scenarios
from tests.repository import ROOT

EXAMPLES = 60_000  # a tenth of what sft-h100 expects


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with the definitions and no prepared dataset."""
    shutil.copytree(ROOT / "stacks", tmp_path / "stacks")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def prepare(project: Path) -> None:
    """Writes the dataset.json of a dataset of sft-h100; no test here reads the files that it lists."""
    folder = project / "data" / "sft"
    folder.mkdir(parents=True)
    facts = {
        "examples": EXAMPLES,
        "held_out_examples": 600,
        "held_out_rows": 150,
        "prompts": 100,
        "tokens": 20_000_000,
        "rows": 5_000,
        "row": 4096,
        "longest": 1024,
        "most_examples": 12,
        "vocab": 128_256,
        "loss_tokens": 10_000_000,
        "stop": 7,
        "loss_on": "response",
        "template": "llama-3",
        "tokenizer": "file",
        "tokenizer_id": "a test's",
        "packing": True,
        "texts": False,
    }
    files = [{"name": "train_00000.bin", "bytes": 40_000_000, "sha256": "0" * 64}]
    tree = {"schema": 1, "kind": "packed", "source": "a test", "files": files, "facts": facts}
    (folder / "dataset.json").write_text(json.dumps(tree))


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    main([*words, "--json"])
    return json.loads(capsys.readouterr().out)


@functools.cache
def output(*words: str, prepared: bool = False) -> str:
    """What a command prints in such a project, with or without a prepared dataset of sft-h100."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder), redirect_stdout(io.StringIO()) as stream:
        shutil.copytree(ROOT / "stacks", "stacks")
        if prepared:
            prepare(Path(folder))
        assert main([*words]) == 0
    return stream.getvalue()


def rows(*, prepared: bool = False) -> dict[str, dict[str, Any]]:
    found = json.loads(output("compare", "sft-h100", "--json", prepared=prepared))
    return {row["scenario"]: row for row in found["scenarios"]}


def test_a_prepared_datasets_counts_enter_every_row_as_they_enter_the_bill() -> None:
    expected, counted = rows(), rows(prepared=True)
    for scenario in ("h100-optimized", "p5-8xh100", "fsdp-2xh100"):
        assert expected[scenario]["dataset"] is None
        assert counted[scenario]["dataset"] == "data/sft"
        assert counted[scenario]["tokens"] < expected[scenario]["tokens"] / 10
        bill = json.loads(output("cost", "sft-h100", "--scenario", scenario, "--json", prepared=True))
        assert counted[scenario]["usd"] == bill["usd"]


def test_that_prices_are_old_is_told_of_a_comparison_and_of_a_sum() -> None:
    """The shipped spot prices are from January 2026."""
    for words in (["compare", "two-tower"], ["compare", "two-tower", "--all"], ["cost", "two-tower", "--times", "2"]):
        assert "`gpufleet prices refresh`" in " ".join(output(*words).split())


def test_the_options_of_a_work_are_counted_alike() -> None:
    found = json.loads(output("compare", "sft-h100", "--scenario", "l40s-1", "--json", prepared=True))["options"]
    assert {row["dataset"] for row in found} == {"data/sft"}
    assert len({row["tokens"] for row in found}) == 1


def test_a_scenario_that_says_what_its_data_counts_keeps_its_word() -> None:
    assert rows(prepared=True)["validation"] == rows()["validation"]


def test_the_page_says_whose_counts_it_used() -> None:
    assert "as prepared" not in output("compare", "sft-h100", "--all")
    page = " ".join(output("compare", "sft-h100", "--all", prepared=True).split())
    assert "Counted from data/sft as prepared, not as job.parameters.data expects, but for validation." in page


@pytest.mark.usefixtures("project")
def test_a_scenario_whose_work_goes_nowhere_else_is_said_to_have_no_options(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["compare", "pretrain-d64", "--scenario", "plan-as-written"]) == 2
    assert "scenario plan-as-written ran elsewhere" in capsys.readouterr().err


def test_what_asks_for_several_nodes_is_ranked_from_one_node_on() -> None:
    found = json.loads(output("compare", "sft-h100", "--scenario", "fsdp-2xh100", "--json"))["options"]
    own = {(row["nodes"], row["capacity"]) for row in found if row["type"] == "p5.4xlarge"}
    assert {count for count, _ in own} >= {1, 2}
    one, two = (
        next(row for row in found if (row["type"], row["nodes"], row["capacity"]) == ("p5.4xlarge", count, "on-demand"))
        for count in (1, 2)
    )
    assert float(one["usd"]["mean"]) < float(two["usd"]["mean"])  # several nodes only save time
    assert float(one["wall_hours"]["p50"]) > float(two["wall_hours"]["p50"])


def test_the_first_line_names_what_costs_least_and_ten_rows_follow_and_what_to_do() -> None:
    options = json.loads(output("compare", "sft-h100", "--json"))["options"]
    found = [row for row in options if "h100-optimized" in row["scenario"]]
    lines = output("compare", "sft-h100").splitlines()
    keeps = next(row for row in found if not row["over_limit"] and row["late"] <= ranking.SURE)
    first = f"sft-h100, h100-optimized: {keeps['type']} {keeps['capacity']}, about "
    assert lines[0].startswith(first)
    text = " ".join(" ".join(lines).split())
    assert "is the cheapest option within the limits; the file's p5.4xlarge on demand costs about " in text
    take = f"write fleet.instance_types: [{keeps['type']}] and fleet.capacity: {keeps['capacity']} into sft-h100.yaml"
    assert take in text
    (rule,) = (at for at, line in enumerate(lines) if line.startswith("-"))
    rows = lines[rule + 1 : rule + 1 + compare_table.SHOWN]
    assert [row.lstrip("* ").split()[0] for row in rows] == [row["type"] for row in found[: compare_table.SHOWN]]
    assert ["over limit" in row for row in rows] == [row["over_limit"] for row in found[: compare_table.SHOWN]]
    assert lines[-1].endswith("Every option, scenario and region: `gpufleet compare sft-h100 --all`")
    assert len(lines) <= 20


def test_an_answer_rates_the_options_for_one_work_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rated, every_option = list[Row](), ranking.every_option

    def noted(*args: Any, **keys: Any) -> list[Row]:
        rated.extend(found := every_option(*args, **keys))
        return found

    monkeypatch.setattr(ranking, "every_option", noted)
    output.__wrapped__("compare", "sft-h100")
    assert {row.scenario for row in rated} == {"h100-optimized"}


def test_what_the_file_has_already_is_nothing_to_do(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = project / "stacks" / "two-tower.yaml"
    path.write_text(path.read_text().replace("g5.xlarge", "g4dn.xlarge", 1).partition("\nscenarios:")[0] + "\n")
    assert main(["compare", "two-tower"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert main(["compare", "two-tower", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["scenarios"]
    (p50,) = (row["usd"]["p50"] for row in rows if (row["type"], row["capacity"]) == ("g4dn.xlarge", "spot"))
    shown = re.search(r"g4dn\.xlarge spot, about (0\.\d{3}) USD", said)
    assert shown is not None
    assert Decimal(shown[1]) == pytest.approx(Decimal(p50), abs=Decimal("0.0006"))  # each figure is rounded by itself
    assert "costs least, as the file has it." in said
    assert "write fleet.instance_types" not in said


def test_a_scenario_of_another_region_is_compared_there_where_it_alone_is_asked_for(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = project / "stacks" / "two-tower.yaml"
    elsewhere = "  elsewhere:\n    fleet: {region: us-west-2, zones: [us-west-2a, us-west-2b]}\n"
    path.write_text(path.read_text().replace("\nscenarios:", f"\nscenarios:\n{elsewhere}".rstrip(), 1))
    found = printed(capsys, "compare", "two-tower", "--scenario", "elsewhere")
    west = {(row["type"], row["capacity"]): row["usd"] for row in found["options"]}
    everything = printed(capsys, "compare", "two-tower")
    own = [row for row in everything["options"] if "elsewhere" in row["scenario"]]
    east = {(row["type"], row["capacity"]): row["usd"] for row in own}
    assert (found["region"], everything["region"]) == ("us-west-2", "us-east-2")
    assert west["g5.xlarge", "spot"] != east["g5.xlarge", "spot"]


@pytest.mark.parametrize("within", ["nan", "inf", "1e300", "0", "-1", "24h"])
def test_hours_that_no_run_could_be_done_in_are_refused(capsys: pytest.CaptureFixture[str], within: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["compare", "sft-h100", "--within", within])
    assert ended.value.code == 2
    told = f"--within: {within}: allowed are hours from now, above 0 and up to 8784, a year"
    assert told in " ".join(capsys.readouterr().err.split())


def test_a_picture_in_a_folder_that_is_not_there_is_refused(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "sft-h100", "--plot", "nowhere/x.png"]) == 2
    assert "--plot nowhere/x.png: there is no folder nowhere; make it" in capsys.readouterr().err


def test_a_picture_of_another_kind_is_refused_before_anything_is_computed(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(compare_command, "compare_file")
    assert main(["compare", "sft-h100", "--plot", "x.pdf"]) == 2
    assert "--plot x.pdf: the file's name must end in one of .png, .svg" in capsys.readouterr().err


def test_the_sentence_about_the_deadline_names_its_type(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["compare", "two-tower", "--scenario", "o", "--within", "6"])
    assert "With the deadline, on g4dn.xlarge: " in capsys.readouterr().out


def test_a_scenarios_own_deadline_counts_where_it_alone_is_asked_for(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, soon = project / "stacks" / "two-tower.yaml", datetime.now(UTC) + timedelta(hours=6)
    path.write_text(f"{path.read_text()}  soon:\n    limits: {{deadline: {soon:%Y-%m-%dT%H:%M:%SZ}}}\n")
    assert printed(capsys, "compare", "two-tower")["deadline_policy"] is None
    policy = printed(capsys, "compare", "two-tower", "--scenario", "soon")["deadline_policy"]
    assert policy["hours_left"] == pytest.approx(6, abs=0.1)


def test_an_unknown_scenario_is_named_as_cost_names_it(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for command in ("cost", "compare"):
        assert main([command, "sft-h100", "--scenario", "l40s-5"]) == 2
        said.append(capsys.readouterr().err)
    assert said[0] == said[1]
    assert "sft-h100.yaml has no scenario 'l40s-5'" in said[1]
    assert "Nearest: l40s-4." in said[1]


@pytest.mark.parametrize(
    ("stack", "first_held", "as_it_is"),
    [("pretrain-d64", "31h-p5", "m44x2816-5000"), ("kernel-sft", "balanced", "ours")],
)
def test_the_file_as_it_is_is_not_the_scenario_that_holds_its_node_longer(
    stack: str, first_held: str, as_it_is: str
) -> None:
    path, now = ROOT / "stacks" / f"{stack}.yaml", datetime.now(UTC)
    definition, variants = load(path, now=now), scenarios(path, now=now)
    names = [each.scenario for each in variants]
    assert names.index(first_held) < names.index(as_it_is)
    assert ranking.default_scenario(definition, variants) == as_it_is

    others = tuple(each for each in variants if each.scenario != as_it_is)
    first = next(each for each in others if not each.variant.reference)
    assert ranking.default_scenario(definition, others) == first.scenario


def test_of_a_run_in_stages_each_is_ranked_and_the_best_are_added_up() -> None:
    text = " ".join(output("compare", "kernel-sft-stages").split())
    usd, theirs = (Decimal(figure) for figure in re.findall(r"about (\d+\.\d\d)", text))
    best = {}
    for row in json.loads(output("compare", "kernel-sft-stages", "--json"))["options"]:
        if row["usd"] is not None and not row["why"] and row["scenario"] not in best:
            best[row["scenario"]] = row
    assert set(best) == {"train", "judge"}
    assert usd == pytest.approx(sum(Decimal(row["usd"]["p50"]) for row in best.values()), abs=Decimal("0.1"))
    assert usd < theirs
    for stage, row in best.items():
        assert f"{stage} {row['type']} {row['capacity']}" in text
    assert "To take" not in text  # which would name the file's own key
