"""`import gpufleet`: what it costs to import, what it gives back, what it shows in a notebook."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

import gpufleet
from gpufleet.infra.bill import record
from gpufleet.infra.cli import main
from tests.receipt_tree import place, receipt
from tests.repository import ROOT

SMALL: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "program" / "training.yaml").read_text())
SMALL["job"]["code"] = None


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks" / "mine.yaml").write_text(yaml.safe_dump(SMALL))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def loaded(program: str) -> set[str]:
    """The packages that a program has loaded when it ends."""
    code = f"{program}\nimport json, sys\nprint(json.dumps(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_it_loads_nothing_and_pricing_neither_torch_nor_pulumi_nor_boto3() -> None:
    assert not loaded("import gpufleet") & {"torch", "pulumi", "boto3", "numpy", "yaml", "infra", "job"}
    priced = loaded("import gpufleet; gpufleet.price('two-tower'); gpufleet.compare('two-tower'); gpufleet.receipts()")
    assert "numpy" in priced
    assert not priced & {"torch", "pulumi", "boto3", "matplotlib"}


def test_all_that_is_listed_is_there_and_nothing_else() -> None:
    for name in gpufleet.__all__:
        found = getattr(gpufleet, name)
        assert found.__doc__, name
    assert dir(gpufleet) == gpufleet.__all__
    with pytest.raises(AttributeError, match="gpufleet has no bills; it has Bill, "):
        gpufleet.bills  # noqa: B018


def test_the_page_explains_all_that_is_listed() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    assert [name for name in gpufleet.__all__ if f"`{name}" not in page and f".{name}(" not in page] == []


def test_a_file_and_the_same_as_a_mapping_are_one_definition(project: Path) -> None:
    of_file, of_mapping = gpufleet.load("mine"), gpufleet.load(SMALL, name="other")
    assert (of_file.name, of_mapping.name) == ("mine", "other")
    assert (of_file.max_usd, of_file.max_hours, of_file.zones) == (3.0, 4.0, ("us-east-2a", "us-east-2b"))
    assert of_mapping.path == project / ".gpufleet" / "definitions" / "other.yaml"
    first, second = gpufleet.price(of_file), gpufleet.price(of_mapping)
    assert first.usd == second.usd
    assert gpufleet.load(of_mapping.path).run == of_mapping.run  # further commands take the path


def test_a_mapping_may_hold_what_python_has_for_its_values(project: Path) -> None:
    deadline = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=30)
    limits = {"max_usd": Decimal("2.50"), "max_hours": 4, "deadline": deadline}
    shared = ["{outputs}", "yes"]
    job = {**SMALL["job"], "outputs": tuple(shared), "env": {"N": "1", "EMPTY_IS_NOT": "null"}}
    found = gpufleet.load({**SMALL, "limits": limits, "job": job}, name="mine")
    assert found.max_usd == 2.5
    assert found._definition.limits.deadline == deadline
    assert found._definition.job.parameters.outputs == ("{outputs}", "yes")  # type: ignore[attr-defined]
    assert found._definition.job.parameters.env == {"N": "1", "EMPTY_IS_NOT": "null"}  # type: ignore[attr-defined]


def test_what_is_wrong_comes_as_problems_with_their_paths(project: Path) -> None:
    with pytest.raises(gpufleet.DefinitionError) as refused:
        gpufleet.load({**SMALL, "limits": {"max_usd": "much", "max_hour": 2}}, name="mine")
    assert [each.path for each in refused.value.problems] == ["limits.max_usd", "limits.max_hour"]
    for wrong, said in ((set, "type"), ("nowhere", "there is no stack")):
        with pytest.raises(gpufleet.GpufleetError, match=said):
            gpufleet.load({"run": wrong} if wrong is set else "nowhere", name="mine")
    with pytest.raises(gpufleet.GpufleetError, match="needs a name"):
        gpufleet.load(SMALL)
    with pytest.raises(gpufleet.GpufleetError, match="has no scenario 'large'"):
        gpufleet.price("mine", scenario="large")


def test_the_bill_is_the_command_s_in_floats(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bill = gpufleet.price("mine")
    assert main(["cost", "mine", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    for mine, theirs in ((bill.usd, said["usd"]), (bill.hours, said["hours"]), (bill.wall_hours, said["wall_hours"])):
        assert {key: float(value) for key, value in theirs.items()} == {
            key: getattr(mine, key) for key in ("p10", "p50", "p90", "mean")
        }
    assert sum(line.usd for line in bill.lines) == pytest.approx(bill.usd.p50)
    assert [line.name for line in bill.lines] == [line["name"] for line in record.to_json(bill._bill)["lines"]]
    assert bill.stopped == pytest.approx(said["cap"]["probability"], abs=1e-4)
    assert "total = p50" in str(bill)


def test_limits_that_are_too_low_are_problems_of_a_bill(project: Path) -> None:
    assert gpufleet.price("mine").problems == ()
    low = gpufleet.price({**SMALL, "limits": {"max_usd": 0.05, "max_hours": 4}}, name="low")
    assert "limits.max_usd" in low.problems[0]


class HtmlTables(HTMLParser):
    """The cells of all tables, row by row."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


PLAIN = {"table", "caption", "thead", "tbody", "tr", "th", "td", "p"}
BAND = {"svg", "path", "rect", "text"}  # of the bill's range; a receipt adds its dot


def test_a_notebook_shows_bill_and_comparison_as_tables_and_the_frontier_as_a_picture(project: Path) -> None:
    bill, compared = gpufleet.price("mine"), gpufleet.compare("mine")
    shown = HtmlTables(bill._repr_html_())
    assert shown.tags == PLAIN | BAND
    assert len(shown.rows) == len(bill.lines) + 2
    assert shown.rows[-1][0].startswith("total = p50")
    table = HtmlTables(compared._repr_html_())
    assert table.tags == PLAIN
    able = [each for each in compared.options if each.runnable]
    assert [row[2] for row in table.rows[1:]] == [each.instance_type for each in able][: len(table.rows) - 1]
    assert [row[0] for row in table.rows].count("*") == len(compared.frontier.options)
    assert compared.frontier._repr_png_().startswith(b"\x89PNG")
    compared.frontier.save("front.svg")
    assert "<svg" in Path("front.svg").read_text()
    with pytest.raises(gpufleet.GpufleetError, match=r"front\.pdf: the file's name must end in one of"):
        compared.frontier.save("front.pdf")


def test_the_picture_leaves_a_notebook_s_own_plots_alone(project: Path) -> None:
    code = (
        "import gpufleet, matplotlib, sys; matplotlib.use('svg')\n"
        "gpufleet.compare('mine').frontier._repr_png_()\n"
        "assert matplotlib.get_backend() == 'svg' and 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(ROOT)})


def test_options_of_a_comparison_are_ranked_and_say_why_they_cannot_be_run(project: Path) -> None:
    compared = gpufleet.compare("mine", within_hours=100)
    means = [each.usd.mean for each in compared.options if each.runnable and each.usd]
    assert means == sorted(means)
    assert compared.runnable
    assert all(each.why for each in compared.options if not each.runnable)
    front = [
        (each.usd.mean, each.wall_hours.mean) for each in compared.frontier.options if each.usd and each.wall_hours
    ]
    assert front
    assert compared.scenarios[0].instance_type == "g5.2xlarge"


def test_receipts_come_in_numbers_and_what_is_none_is_warned_of(project: Path) -> None:
    evil = "<script>alert(1)</script>"
    tree = receipt("1.40")
    tree["lines"][0]["note"] = evil
    place(project, tree)
    place(project, receipt("0.90", run="r2", device="cpu"), name="r2")
    place(project, "{", name="r3")
    with pytest.warns(UserWarning, match=r"r3\.json is left out"):
        found = {each.run: each for each in gpufleet.receipts()}
    one = found["r1"]
    assert (one.estimate, one.actual, one.inside) == (1.0, 1.4, False)
    assert one.error_percent == pytest.approx(40)
    assert (one.counted, found["r2"].counted, found["r2"].rehearsal) == (True, False, True)
    assert sum(one.causes.values()) == pytest.approx(one.actual - one.estimate)
    with pytest.warns(UserWarning, match="r3"):
        assert gpufleet.receipts("small-growth") == list(found.values())
    html = one._repr_html_()
    assert evil not in html
    assert "&lt;script&gt;" in html
    assert HtmlTables(html).tags == PLAIN - {"p"} | BAND | {"circle"}
    assert "svg" not in found["r2"]._repr_html_()  # a rehearsal has no chart of cost, because nobody paid
    assert gpufleet.receipts("nothing") == []
