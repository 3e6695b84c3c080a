"""The values that each key accepts, and the messages about others. The files here are stacks/ files with one change."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest

from gpufleet.infra.definition.loader import load
from gpufleet.infra.errors import DefinitionError, Problem
from gpufleet.job.experiments.growth.spec import GrowthConfig

NOW = datetime(2026, 11, 21, 12, 0, 0, tzinfo=UTC)
MINIMAL = """\
# A minimal definition. Bound: one hour.
run: {id: r1, owner: you}
job: {experiment: tinystories-growth, image: registry.example/team/image:1}
fleet: {region: us-east-2, zones: [us-east-2a], instance_types: [g5.2xlarge]}
storage: {dataset: data/x}
limits: {max_usd: 3.00, max_hours: 1}
"""

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(text: str) -> Path:
        path = tmp_path / "growth-test.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


def changed(section: str, line: str) -> str:
    """The minimal file with `line` added to `section`, in place of the section's line with the same key."""
    key = line.partition(":")[0]
    sections = []
    for entry in MINIMAL.splitlines():
        name, _, rest = entry.partition(": {")
        if name != section:
            sections.append(entry)
            continue
        pairs = [pair for pair in _pairs(rest.rstrip("}")) if pair.partition(":")[0] != key]
        sections.append(f"{section}: {{{', '.join([*pairs, line])}}}")
    text = "\n".join(sections)
    return text if f"{section}: {{" in text else f"{text}\n{section}: {{{line}}}"


def _pairs(text: str) -> list[str]:
    pairs, depth, start = [], 0, 0
    for index, character in enumerate(text + ","):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(character, 0)
        if character == "," and not depth:
            pairs.append(text[start:index].strip())
            start = index + 1
    return pairs


def problems(path: Path) -> tuple[Problem, ...]:
    with pytest.raises(DefinitionError) as caught:
        load(path, now=NOW)
    return caught.value.problems


def test_a_minimal_file_loads_with_its_types(write: Write) -> None:
    definition = load(write(MINIMAL), now=NOW)
    assert definition.name == "growth-test"
    assert definition.purpose == "A minimal definition. Bound: one hour."
    assert definition.limits.max_usd == Decimal("3.00")
    assert definition.fleet.zones == ("us-east-2a",)
    assert definition.storage.keep.bucket is True
    assert isinstance(definition.job.parameters, GrowthConfig)
    assert definition.job.parameters.steps_per_phase == 1000


@pytest.mark.parametrize(
    ("section", "line", "read"),
    [
        pytest.param(
            "job", "parameters: {optim: {lr: [3e-4, 1.0E-4, .00008]}}", "(0.0003, 0.0001, 8e-05)", id="floats"
        ),
        pytest.param("run", "id: 007", "'007'", id="text that looks like a number"),
        pytest.param("run", "owner: yes", "'yes'", id="text that looks like a truth value"),
        pytest.param("run", "owner: 2026-11-21", "'2026-11-21'", id="text that looks like a date"),
        pytest.param("limits", "max_usd: 3.10", "Decimal('3.10')", id="money keeps its cents"),
        pytest.param("limits", "max_usd: 1e3", "Decimal('1000')", id="money without an exponent"),
        pytest.param("limits", "deadline: 2026-11-22T10:00:00+02:00", "hour=8", id="time zone"),
        pytest.param("limits", "deadline: in 1.5 h", "deadline=datetime.timedelta(seconds=5400)", id="a span"),
        pytest.param("limits", "deadline:", "deadline=None", id="nothing where nothing is allowed"),
        pytest.param("storage", "keep: {bucket: false}", "bucket=False", id="truth"),
        pytest.param("storage", "keep: {days: 3}", "days=3", id="the shortest for this fleet"),
        pytest.param("storage", "keep:", "Keep(bucket=True, days=30, ", id="an empty section is its defaults"),
        pytest.param("job", 'image: "registry.example:443/a/b:1"', "registry.example:443/a/b:1", id="port"),
        pytest.param("storage", "data: {size_gib: 500, snapshot: snap-0123456789abcdef0}", "snap-0", id="snapshot"),
        pytest.param("storage", "dataset: s3://my-bucket/tokens/v1/", "s3://my-bucket/tokens/v1/", id="prefix"),
        pytest.param(
            "storage", "root: {size_gib: 160, iops: 80000, throughput_mibps: 2000}", "iops=80000", id="gp3 top"
        ),
    ],
)
def test_values_mean_what_the_key_says(write: Write, section: str, line: str, read: str) -> None:
    definition = load(write(changed(section, line)), now=NOW)
    if read == "hour=8":
        assert definition.limits.deadline == datetime(2026, 11, 22, 8, tzinfo=UTC)
    else:
        assert read in repr(definition)


REFUSED = [
    # section, line, path, a word of the allowed range, a word of the hint, why
    ("limits", "max_price: 2", "limits.max_price", "max_usd", "It is called limits.max_usd.", "another tool's key"),
    ("limits", "max_hour: 2", "limits.max_hour", "max_hours", "Nearest: max_hours.", "unknown key"),
    ("run", "max_usd: 3", "run.max_usd", "id, owner", "It belongs under limits.", "key of another section"),
    ("job", "parameters: {model: {widht: 8}}", "job.parameters.model.widht", "width", "Nearest: width.", "deep typo"),
    ("storage", "keep: {bucket: yes}", "storage.keep.bucket", "true or false", "Write true.", "yes"),
    ("storage", "keep: {bucket: Off}", "storage.keep.bucket", "true or false", "Write false.", "off"),
    ("storage", "keep: {bucket: 1}", "storage.keep.bucket", "true or false", "", "one as a truth value"),
    ("storage", "keep: {days: 0}", "storage.keep.days", "from 1 to 3,650 (days)", "", "no retention"),
    (
        "storage",
        "keep: {days: 2}",
        "storage.keep.days",
        "at least 3 (days)",
        "2026-11-22T13",
        "less than 25 h and a day",
    ),
    ("limits", "max_hours: 0", "limits.max_hours", "from 0.01 to 720 (hours)", "", "zero hours"),
    ("limits", "max_hours: 2h", "limits.max_hours", "hours", "without unit", "a unit"),
    ("limits", "max_usd: $3", "limits.max_usd", "USD", "without unit", "a currency sign"),
    ("limits", "max_usd: -1", "limits.max_usd", "from 0.01", "", "negative money"),
    ("limits", "max_usd: .nan", "limits.max_usd", "a number", "", "not a number"),
    ("limits", "max_usd: 1_000", "limits.max_usd", "a number", "separator", "underscores"),
    ("limits", "max_usd:", "limits.max_usd", "a number", "", "an empty value"),
    ("limits", "max_usd: [3]", "limits.max_usd", "a number", "", "a list for a number"),
    ("limits", "deadline: 2026-12-01", "limits.deadline", "2026-12-31T18:00:00Z", "T00:00:00Z", "a date"),
    ("limits", "deadline: 2026-12-01T10:00:00", "limits.deadline", "zone", "Z for UTC", "a time without zone"),
    ("limits", "deadline: 2026-12-01T10:00:00.5Z", "limits.deadline", "zone", "Whole seconds", "fractions"),
    ("limits", "deadline: 0001-01-01T00:00:00+23:00", "limits.deadline", "zone", "", "the calendar's edge"),
    ("limits", "deadline: in 10 hours", "limits.deadline", "as in 10 h", "Write in 10 h.", "hours in letters"),
    ("limits", "deadline: +90min", "limits.deadline", "as in 10 h", "Write in 1.5 h.", "minutes"),
    ("limits", "deadline: 2 days", "limits.deadline", "as in 10 h", "Write in 48 h.", "days"),
    ("limits", "deadline: in 0 h", "limits.deadline", "after now", "", "no time at all"),
    ("limits", "deadline: in 9000 h", "limits.deadline", "within a year", "", "more than a year"),
    ("limits", "deadline: 2026-11-21T11:59:59Z", "limits.deadline", "after now, 2026-11-21", "new id", "past"),
    ("limits", "deadline: 2028-01-01T00:00:00Z", "limits.deadline", "within a year", "", "too far"),
    ("job", "parameters: {steps_per_phase: 3e-4}", "job.parameters.steps_per_phase", "whole number", "", "3e-4 steps"),
    (
        "job",
        "parameters: {steps_per_phase: 1e3}",
        "job.parameters.steps_per_phase",
        "whole number",
        "Write 1000.",
        "1e3",
    ),
    ("job", "parameters: {steps_per_phase: 010}", "job.parameters.steps_per_phase", "whole", "Write 10.", "octal"),
    ("limits", "max_usd: 010", "limits.max_usd", "a number", "Write 10.", "octal money"),
    ("job", "parameters: {steps_per_phase: 0x10}", "job.parameters.steps_per_phase", "whole", "plain", "hexadecimal"),
    ("job", "parameters: {steps_per_phase: ١٠}", "job.parameters.steps_per_phase", "whole number", "", "other digits"),
    (
        "job",
        "parameters: {optim: {lr: 3e-4}}",
        "job.parameters.optim.lr",
        "a list",
        "One per phase, three values, as in [3e-4, 3e-4, 3e-4].",
        "no list",
    ),
    ("estimate", "step_ms: 90", "estimate.step_ms", "a list", "One per phase, three values, as in [90", "one time"),
    ("job", "parameters: {device: gpu}", "job.parameters.device", "cuda, cpu", "Nearest: cuda.", "gpu"),
    (
        "job",
        "parameters: {optim: {learning_rate: 1}}",
        "job.parameters.optim.learning_rate",
        "lr, ",
        "It is called optim.lr.",
        "another tool's word",
    ),
    ("job", "experiment: sft", "job.experiment", "sft-h100", "Nearest: sft-h100.", "the beginning of one"),
    ("job", "parameters: {optim: {lr: [3e-4, 1e-4]}}", "job.parameters.optim.lr", "3 learning", "", "two of three"),
    ("job", "parameters: {optim: {lr: [3e-4, 1e999, 0]}}", "job.parameters.optim.lr[1]", "1e-09 to 1", "", "infinity"),
    ("job", "parameters: {optim: {eps: 0}}", "job.parameters.optim.eps", "1e-16 to 0.01", "", "eps of 0"),
    ("job", "parameters: {precision: {compute: fp16}}", "job.parameters.precision.compute", "bf16, fp32", "", "fp16"),
    (
        "job",
        "parameters: {model: {heads: 9}}",
        "job.parameters.model.heads",
        "divisor of the width, 832; nearest: 8",
        "",
        "heads",
    ),
    (
        "job",
        "parameters: {model: {width: 24}}",
        "job.parameters.model.heads",
        "an even width",
        "",
        "odd width per head",
    ),
    ("job", "parameters: {model: {top_k: 9}}", "job.parameters.model.top_k", "experts, 8", "", "top_k"),
    ("job", "parameters: {batch: {micro: 32}}", "job.parameters.batch.micro", "global batch, 16", "", "micro"),
    ("job", "parameters: {eval: {prompts: []}}", "job.parameters.eval.prompts", "at least one", "", "no prompt"),
    ("job", "experiment: tinystory-growth", "job.experiment", "tinystories-growth", "Nearest", "experiment"),
    ("job", "image: pytorch:2.13", "job.image", "registry/repository:tag", "registry", "no registry"),
    ("job", "image: pytorch/pytorch:2.13", "job.image", "registry/repository:tag", "docker.io", "Docker Hub unsaid"),
    ("job", "image: registry.example/a/b", "job.image", "registry/repository:tag", "tag", "no tag"),
    (
        "job",
        'image: "registry.example:5000/a/b:1"',
        "job.image",
        "registry/",
        "only at port 443",
        "a port out of reach",
    ),
    ("job", "image: localhost/a/b:1", "job.image", "registry/repository:tag", "registry", "a registry on the node"),
    ("job", "image: registry.example/a/b:1@sha256:12", "job.image", "its @sha256: digest", "", "short digest"),
    ("fleet", "region: us-east2", "fleet.region", "us-east-2", "Nearest: us-east-2.", "unknown region"),
    ("fleet", "zones: [us-east-1a]", "fleet.zones[0]", "zones of us-east-2", "us-east-1", "another region's zone"),
    ("fleet", "zones: [us-east-2a, us-east-2a]", "fleet.zones[1]", "each zone once", "", "a zone twice"),
    ("fleet", "zones: []", "fleet.zones", "a list of 1 to 6", "", "no zone"),
    ("fleet", "zones: [~]", "fleet.zones[0]", "text", "", "a zone that says nothing"),
    ("fleet", "zones: us-east-2a", "fleet.zones", "a list", "Write [us-east-2a].", "a zone that is no list"),
    ("fleet", "instance_types: [p3.2xlarge]", "fleet.instance_types[0]", "still offers", "Use g5.2xlarge", "p3"),
    ("fleet", "instance_types: [p3dn.24xlarge]", "fleet.instance_types[0]", "can use", "capability 7.0", "V100"),
    ("fleet", "instance_types: [g4dn.2xlarge]", "fleet.instance_types[0]", "bf16", "g5.2xlarge", "no bf16"),
    ("fleet", "instance_types: [g5.2xlrage]", "fleet.instance_types[0]", "g5.2xlarge", "Nearest: g5.2xlarge.", "typo"),
    ("fleet", "instance_types: [c7i.large]", "fleet.instance_types[0]", "g5.*", "", "no GPU"),
    ("fleet", "instance_types: [g5.2xlarge, g5.2xlarge]", "fleet.instance_types[1]", "type once", "", "a type twice"),
    (
        "fleet",
        "instance_types: [p4de.24xlarge]",
        "fleet.instance_types[0]",
        "offered",
        "us-east-1, us-west-2",
        "not in the region",
    ),
    ("fleet", "capacity: spto", "fleet.capacity", "spot, on-demand", "Nearest: spot.", "capacity"),
    ("fleet", "ami: 'resolve:ssm:/x'", "fleet.ami", "ami-", "doctor --pin", "a parameter as AMI"),
    ("storage", "root: 100GB", "storage.root", "size_gib", "Write {size_gib: 100}.", "a size for a disk"),
    ("storage", "root: 100", "storage.root", "size_gib", "Write {size_gib: 100}.", "a number for a disk"),
    ("storage", "root: large", "storage.root", "size_gib", "", "a word for a disk"),
    ("storage", "keep: false", "storage.keep", "bucket, days", "Write {bucket: false}.", "a truth value for a section"),
    ("storage", "keep: 7", "storage.keep", "bucket, days", "Write {days: 7}.", "days for a section"),
    ("storage", "root: {size_gib: 74}", "storage.root.size_gib", "at least 75", "", "smaller than the AMI"),
    ("storage", "root: {size_gib: 65537}", "storage.root.size_gib", "65,536 (GiB)", "", "larger than gp3"),
    ("storage", "root: {size_gib: 100, iops: 50001}", "storage.root.iops", "500 per GiB, 50,000", "101", "IOPS ratio"),
    ("storage", "root: {size_gib: 100, throughput_mibps: 751}", "storage.root.throughput_mibps", "750", "3004", "rate"),
    ("storage", "root: {size_gib: 100, snapshot: snap-01234567}", "storage.root.snapshot", "AMI", "data", "root snap"),
    ("storage", "data: {iops: 3000}", "storage.data.size_gib", "whole number from 1", "", "a disk without size"),
    ("storage", "dataset: s3:/bucket/x", "storage.dataset", "s3://bucket/prefix", "colon", "one slash"),
    ("storage", "dataset: s3://Bucket/x", "storage.dataset", "s3://", "bucket name", "capital letters"),
    ("storage", "dataset: s3://bucket/x/*", "storage.dataset", "s3://", "plain folder names", "a wildcard of IAM's"),
    ("storage", "dataset: /home/me/data", "storage.dataset", "inside the project", "relative", "absolute path"),
    (
        "storage",
        'dataset: "data/a\\nb"',
        "storage.dataset",
        "inside the project",
        "line break",
        "a line break in a name",
    ),
    ("storage", 'dataset: "data/a\\0b"', "storage.dataset", "inside the project", "invisible", "a NUL in a name"),
    ("storage", "dataset: ../data", "storage.dataset", "inside the project", "relative", "above the project"),
    ("storage", "dataset: .", "storage.dataset", "inside the project", "relative", "the project itself"),
    ("run", "id: R1", "run.id", "a-z, 0-9", "", "capital run id"),
    ("run", "id: inputs", "run.id", "not `inputs`", "", "the inputs folder"),
    ("run", "id: " + "r" * 33, "run.id", "1 to 32", "", "a long run id"),
    ("run", "owner: 'aws:me'", "run.owner", "not starting with aws:", "", "a reserved tag"),
    ("estimate", "step_ms: [30, 60]", "estimate.step_ms", "3 numbers (ms)", "", "a phase missing"),
    ("storage", "base_weights: data/x", "storage.base_weights", "nothing", "remove the key", "weights nobody reads"),
    ("fleet", "instance_types: [g55.2xlarge]", "fleet.instance_types[0]", "g5.*", "Nearest: g5.2xlarge.", "family"),
    ("estimate", "efficiency: 45", "estimate.efficiency", "from 0.001 to 1", "", "per cent"),
    ("rehearsal", "interruptions: {notice_s: 0}", "rehearsal.interruptions.notice_s", "from 1 to 120", "", "no notice"),
    ("rehearsal", "run: {id: x}", "rehearsal.run", "job, fleet", "", "another identity"),
    ("rehearsal", "job: {image: x}", "rehearsal.job.image", "parameters", "", "another image"),
    ("rehearsal", "limits: {max_hours: 0}", "rehearsal.limits.max_hours", "hours", "", "a wrong overlay"),
]


@pytest.mark.parametrize(
    ("section", "line", "path", "allowed", "hint"),
    [pytest.param(*case[:5], id=case[5]) for case in REFUSED],
)
def test_a_wrong_value_is_named_with_its_path_range_and_way_out(
    write: Write, section: str, line: str, path: str, allowed: str, hint: str
) -> None:
    text = changed(section, line)
    found = {problem.path: problem for problem in problems(write(text))}
    assert path in found, list(found)
    problem = found[path]
    assert allowed in problem.allowed
    assert hint in problem.hint
    assert problem.line is not None
    assert text.splitlines()[problem.line - 1].startswith(section)


def test_one_mistake_gives_one_problem(write: Write) -> None:
    for section, line, *_ in REFUSED:
        found = problems(write(changed(section, line)))
        expected = 2 if "1e999, 0" in line else 1
        assert len(found) == expected, (line, found)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("instance_types: [", "instance_type: [", "line 4, fleet.instance_type: unknown key. It is called fleet.inst"),
        ("limits:", "limit:", "line 6, limit: unknown key. Nearest: limits. Allowed: run, job, "),
        ("experiment:", "experimant:", "line 3, job.experimant: unknown key. Nearest: experiment. Allowed: "),
    ],
)
def test_a_key_that_is_misspelled_or_misplaced_is_not_missing_as_well(
    write: Write, old: str, new: str, said: str
) -> None:
    (problem,) = problems(write(MINIMAL.replace(old, new)))
    assert str(problem).startswith(said)


def test_zones_of_another_region_are_one_slip(write: Write) -> None:
    (problem,) = problems(write(changed("fleet", "zones: [us-west-2a, us-west-2b, us-west-2c]")))
    assert (problem.path, problem.hint) == ("fleet.zones[0]", "In us-west-2: us-west-2a, us-west-2b, us-west-2c.")


def test_a_key_in_the_wrong_section_is_not_missing_in_its_own(write: Write) -> None:
    text = MINIMAL.replace(", owner: me", "").replace("max_usd: 3.00", "max_usd: 3.00, owner: me")
    (problem,) = problems(write(text))
    assert str(problem) == (
        "line 6, limits.owner: unknown key. It belongs under run. Allowed: max_usd, max_hours, deadline, usd_per_hour."
    )


MANY: dict[str, Callable[[int], str]] = {  # each function makes the part of a file that grows with `count`
    "unknown keys": lambda count: "".join(f"key{i}: 1\n" for i in range(count)),
    "scenarios": lambda count: "scenarios:\n" + "".join(f"  s{i}: {{}}\n" for i in range(count)),
    "unknown keys and scenarios": lambda count: MANY["unknown keys"](count) + MANY["scenarios"](count),
    "types": lambda count: changed("fleet", f"instance_types: [{', '.join(f'g9.x{i}' for i in range(count))}]"),
    "repeated types": lambda count: changed("fleet", f"instance_types: [{', '.join(['g5.2xlarge'] * count)}]"),
    "zones": lambda count: changed("fleet", f"zones: [{', '.join(f'us-east-2x{i}' for i in range(count))}]"),
}


@pytest.mark.parametrize("kind", MANY)
def test_a_file_twice_as_long_is_at_most_twice_the_work(write: Write, kind: str) -> None:
    """The work is counted in calls, so that the machine's speed does not matter."""

    def work(count: int) -> int:
        text = MANY[kind](count)
        path, calls = write(text if "run:" in text else f"{MINIMAL}\n{text}"), 0

        def call(*_: object) -> None:
            nonlocal calls
            calls += 1

        sys.setprofile(call)
        try:
            load(path, now=NOW)
        except DefinitionError:
            pass
        finally:
            sys.setprofile(None)
        return calls

    work(1)
    assert work(400) < 2.2 * work(200)


def test_twenty_problems_are_printed_and_the_rest_is_counted(write: Write) -> None:
    with pytest.raises(DefinitionError) as caught:
        load(write(MINIMAL + "\n" + MANY["unknown keys"](50)), now=NOW)
    first, *lines, last = str(caught.value).splitlines()
    assert first.endswith(": 50 problems")
    assert len(lines) == 20
    assert lines[-1].startswith("  - line 27, key19: unknown key")
    assert last == "  and 30 more"


def test_more_scenarios_than_anybody_reads_are_one_problem(write: Write) -> None:
    (problem,) = problems(write(MINIMAL + "\n" + MANY["scenarios"](101)))
    assert (problem.path, problem.value) == ("scenarios", "101 of them")


def test_all_problems_of_a_file_are_reported_together_in_file_order(write: Write) -> None:
    text = MINIMAL.replace("r1", "R 1").replace("[us-east-2a]", "[us-east-1a, us-east-2z]").replace("3.00", "three")
    text += "rehearsal: {limits: {max_hours: 0}}\nlimit: {}\n"
    paths = [problem.path for problem in problems(write(text))]
    assert paths == [
        "run.id",
        "fleet.zones[0]",
        "fleet.zones[1]",
        "limits.max_usd",
        "rehearsal.limits.max_hours",
        "limit",
    ]


def test_instance_types_are_judged_also_when_the_experiment_is_unknown(write: Write) -> None:
    text = changed("job", "experiment: tinystory-growth").replace("[g5.2xlarge]", "[p3.2xlarge, g5.2xlrge]")
    paths = [problem.path for problem in problems(write(text))]
    assert paths == ["job.experiment", "fleet.instance_types[0]", "fleet.instance_types[1]"]


@pytest.mark.parametrize(
    ("section", "line", "hint"),
    [
        ("job", "experiment: sft-h100, parameters: {lr: 1e-4}", "It is called optim.lr."),
        ("job", "experiment: sft-h100, parameters: {learning_rate: 1e-4}", "It is called optim.lr."),
        ("job", "experiment: sft-h100, parameters: {every: 5}", "It is called eval.every or log.every."),
        ("storage", "size_gib: 100", "It is called root.size_gib or data.size_gib."),
        ("fleet", "image: x", "It belongs under job."),  # not: nearest, ami
        ("limits", "max_usb: 3", "Nearest: max_usd."),
        ("fleet", "instance_types: [h100]", "H100 is the GPU of p5.4xlarge, p5.48xlarge."),
        ("fleet", "instance_types: [L4]", "g6.xlarge"),
        ("fleet", "instance_types: ['L40S:4']", "At least 4 x L40S: g6e.12xlarge, g6e.24xlarge, g6e.48xlarge."),
        ("fleet", "instance_types: [4xL40S]", "At least 4 x L40S: g6e.12xlarge"),
        ("fleet", "instance_types: [4 x l40s]", "At least 4 x L40S: g6e.12xlarge"),
        ("fleet", "instance_types: ['A100-40GB:8']", "At least 8 x A100 40GB: p4d.24xlarge."),
        ("fleet", "instance_types: [RTXPRO6000]", "RTX PRO 6000 is the GPU of g7e.2xlarge"),
        ("fleet", "instance_types: [16xH100]", "No type has more than 8 x H100."),
    ],
)
def test_a_key_one_section_too_high_or_a_gpu_for_a_type_is_answered_with_the_right_one(
    write: Write, section: str, line: str, hint: str
) -> None:
    assert any(hint in problem.hint for problem in problems(write(changed(section, line))))


def test_a_gpu_with_too_little_memory_is_refused_with_the_phase_and_the_smallest_that_fits(write: Write) -> None:
    parameters = "parameters: {precision: {phase3_state: fp32}}"
    (problem,) = problems(write(changed("job", parameters)))
    assert problem.path == "fleet.instance_types[0]"
    assert "phase grown needs" in problem.allowed
    assert "A10G has 24" in problem.allowed
    assert "g6e." in problem.hint


def test_where_no_type_fits_the_phase_that_needs_most_is_named(write: Write) -> None:
    (problem,) = problems(write(changed("job", "parameters: {model: {width: 1664, experts: 64}}")))
    assert "phase grown needs 256" in problem.allowed  # dense and moe do not fit an A10G either
    assert problem.hint == "No type in the catalog fits."


def test_a_default_that_another_key_forbids_is_shown_and_not_called_missing(write: Write) -> None:
    (problem,) = problems(write(changed("job", "parameters: {model: {width: 833}}")))
    assert "job.parameters.model.heads: '8 (the default)' is not accepted; allowed: a divisor of" in str(problem)


@pytest.mark.parametrize(
    ("towers", "said"),
    [
        ("{query: []}", "job.parameters.towers.query: 'a list' is not accepted; allowed: at least one width."),
        (
            "{model: [512, 100]}",
            "towers.query: '[256, 192, 128] (the default)' is not accepted; allowed: widths that end",
        ),
    ],
)
def test_towers_that_cannot_be_built_are_a_problem_and_no_traceback(write: Write, towers: str, said: str) -> None:
    text = changed("job", f"parameters: {{towers: {towers}}}").replace(
        "experiment: tinystories-growth", "experiment: two-tower"
    )
    assert said in str(problems(write(text))[0])


def test_a_value_that_several_forms_refuse_is_one_problem_and_one_that_only_a_form_refuses_names_it(
    write: Write,
) -> None:
    """The rehearsal is 64 wide and a scenario 48; the file itself is 832 wide, which 13 divides and 9 does not."""
    laid = "\nrehearsal: {job: {parameters: {model: {width: 64}}}}"
    laid += "\nscenarios: {a: {job: {parameters: {model: {width: 48}}}}}"
    (problem,) = problems(write(changed("job", "parameters: {model: {heads: 9}}") + laid))
    assert problem.allowed == "a divisor of the width, 832; nearest: 8"
    (problem,) = problems(write(changed("job", "parameters: {model: {heads: 13}}") + laid))
    assert problem.allowed == "a divisor of the width, 64; nearest: 16 (with rehearsal laid over)"
    (problem,) = problems(write(changed("job", "parameters: {model: {heads: 16}}") + laid))
    assert problem.allowed == "an even width per head (rotary positions turn pairs), not 3 (with scenarios.a laid over)"


def test_the_memory_that_is_too_much_counts_what_the_device_keeps_for_itself(write: Write) -> None:
    """The job needs 23.7 GB, which 24 GB would hold, but the driver needs 1 GB more."""
    (problem,) = problems(write(changed("job", "parameters: {model: {new_layers: 8}}")))
    needs = re.search(r"needs (\S+) GB at its smallest micro-batch, A10G has 24", problem.allowed)
    assert needs
    assert 24 < float(needs[1]) < 25


def test_a_type_of_known_speed_is_named_before_one_without(write: Write) -> None:
    """An RTX PRO 6000 has the memory, but no peak in the catalog, so it would have no bill."""
    (problem,) = problems(write(changed("job", "parameters: {model: {width: 1664}}")))
    assert "g7e" not in problem.hint
    assert problem.hint.startswith("Nearest that fits: ")


def test_no_family_is_near_that_is_spelled_otherwise(write: Write) -> None:
    (problem,) = problems(write(changed("fleet", "instance_types: [trn1.32xlarge]")))
    assert problem.hint == ""


def test_one_phase_takes_one_number(write: Write) -> None:
    text = changed("estimate", "step_ms: [1, 2]").replace("tinystories-growth", "pretrain-d64")
    assert "1 number (ms), one per phase with optimizer steps" in str(problems(write(text)))


def test_missing_sections_are_named_with_every_required_key(write: Write) -> None:
    found = {problem.path: problem.allowed for problem in problems(write("run: {id: r1}\n"))}
    again = {problem.path: problem.allowed for problem in problems(write("run: {id: r1}\njob:\n  experiment:\n"))}
    assert found["job.experiment"] == again["job.experiment"]
    assert "two-tower" in found["job.experiment"]
    assert "[g5.2xlarge]" in found["fleet.instance_types"]
    assert found.keys() == {
        "run.owner",
        "job.experiment",
        "job.image",
        "fleet.region",
        "fleet.zones",
        "fleet.instance_types",
        "storage.dataset",
        "limits.max_usd",
        "limits.max_hours",
    }


def test_a_past_deadline_is_accepted_for_a_run_that_is_over(write: Write) -> None:
    path = write(changed("limits", "deadline: 2026-11-21T11:00:00Z"))
    definition = load(path, now=NOW, past_deadline=True)
    assert definition.limits.deadline == datetime(2026, 11, 21, 11, tzinfo=UTC)


def test_a_far_deadline_takes_more_than_the_days_of_default(write: Write) -> None:
    (problem,) = problems(write(changed("limits", "deadline: 2026-12-21T12:00:00Z")))
    assert (problem.path, problem.value) == ("storage.keep.days", "30 (the default)")
    assert "at least 31 (days)" in problem.allowed


def test_the_files_name_must_suit_a_bucket(tmp_path: Path) -> None:
    path = tmp_path / "My_Stack.yaml"
    path.write_text(MINIMAL)
    (problem,) = problems(path)
    assert problem.path == "the file's name"
    assert problem.value == "My_Stack"


def test_the_message_is_one_line_per_problem(write: Write) -> None:
    with pytest.raises(DefinitionError) as caught:
        load(write(changed("limits", "max_hours: 0")), now=NOW)
    first, second = str(caught.value).splitlines()
    assert first.endswith("growth-test.yaml: 1 problem")
    assert second == ("  - line 6, limits.max_hours: '0' is not accepted; allowed: a number from 0.01 to 720 (hours).")


@pytest.mark.parametrize(
    ("parameters", "most"), [("generate: {tasks: 21}", "from 1 to 20"), ("funnel: {planted: 201}", "from 0 to 200")]
)
def test_more_tasks_or_planted_candidates_than_there_are_is_a_mistake(write: Write, parameters: str, most: str) -> None:
    found = problems(write(changed("job", f"experiment: kernel-sft, parameters: {{{parameters}}}")))
    assert any(most in problem.allowed for problem in found)


@pytest.mark.parametrize("experiment", ["sft-h100", "kernel-sft"])
@pytest.mark.parametrize(("written", "missing"), [("", ""), (", base_weights: null", "null")])
def test_an_experiment_that_starts_from_a_model_is_not_launched_without_one(
    write: Write, experiment: str, written: str, missing: str
) -> None:
    text = changed("job", f"experiment: {experiment}").replace("[g5.2xlarge]", "[p5.48xlarge]")
    text = text.replace("dataset: data/x", f"dataset: data/x{written}")
    (problem,) = problems(write(text))
    assert (problem.path, problem.value, problem.line) == ("storage.base_weights", missing, 5)
    assert f"{experiment} starts from a model" in problem.hint
    source = {"sft-h100": "generated-pairs", "kernel-sft": "generated-kernels"}[experiment]
    made = text.replace(experiment, f"{experiment}, parameters: {{data: {{source: {source}}}}}")
    assert load(write(made), now=NOW).storage.base_weights is None


def test_more_gpus_than_a_listed_type_has_are_refused_and_a_cpu_has_as_many_processes(write: Write) -> None:
    text = changed("job", "experiment: sft-h100").replace("sft-h100", "sft-h100, parameters: {gpus: 4}")
    text = text.replace("max_usd: 3.00, max_hours: 1", "max_usd: 900, max_hours: 90").replace("us-east-2", "us-east-1")
    text = text.replace("dataset: data/x", "dataset: data/x, base_weights: data/y")
    few = text.replace("[g5.2xlarge]", "[p5.4xlarge, p4d.24xlarge]")
    (problem,) = problems(write(few))
    assert str(problem) == (
        "line 3, job.parameters.gpus: '4' is not accepted; allowed: at most the GPUs of each listed type; p5.4xlarge"
        " has 1."
    )
    load(write(few.replace("p5.4xlarge, ", "")), now=NOW)
    load(write(few.replace("gpus: 4", "gpus: 4, device: cpu")), now=NOW)
    scenario = few.replace("p5.4xlarge, ", "") + "\nscenarios: {one: {fleet: {instance_types: [p5.4xlarge]}}}\n"
    load(write(scenario), now=NOW)  # shown beside the others, but refused for a run
    (problem,) = problems(write(text.replace("[g5.2xlarge]", "[g4dn.12xlarge]")))
    assert problem.hint == "Nearest that fits: g5.12xlarge."  # not g5.16xlarge, which has one GPU


@pytest.mark.parametrize("parameters", ["data: {row: 32768}", "batch: {tokens: 100}"])
def test_a_step_of_no_whole_row_is_a_mistake_and_no_crash(write: Write, parameters: str) -> None:
    text = changed("job", f"experiment: sft-h100, parameters: {{{parameters}}}").replace("[g5.2xlarge]", "[p5.4xlarge]")
    text = text.replace("dataset: data/x", "dataset: data/x, base_weights: data/y")
    found = [problem for problem in problems(write(text)) if problem.path.startswith("job.")]
    assert [problem.path for problem in found] == ["job.parameters.batch.tokens"]
    assert "a multiple of data.row" in found[0].allowed
