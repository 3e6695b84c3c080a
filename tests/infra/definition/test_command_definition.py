"""A command in a definition file: the allowed values, and every mistake with its line, its value and what to do."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gpufleet.infra.definition.loader import load, rehearsal_text
from gpufleet.infra.definition.model import SUPERVISOR_IMAGE
from gpufleet.infra.definition.pin import pin
from gpufleet.infra.definition.scenarios import scenarios
from gpufleet.infra.errors import DefinitionError
from gpufleet.infra.program.resources.identity import node_statements
from gpufleet.infra.program.run_guard import creation_digest
from gpufleet.job.kind import batch
from gpufleet.job.kind.command import CommandConfig
from tests.infra.command_files import FLEET, IMAGE, command_file

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
SAVES = {"format": "hf-trainer", "every": {"steps": 10}, "size_gb": 1}


def test_three_keys_beside_the_image_are_enough(tmp_path: Path) -> None:
    path = command_file(tmp_path, checkpoint={"format": "hf-trainer", "every": {"minutes": 10}}, work=None)

    stack = load(path, now=NOW)

    config = stack.job.parameters
    assert isinstance(config, CommandConfig)
    assert (config.command, config.names, config.complete) == (
        "python train.py",
        ("checkpoint-{step}/",),
        "trainer_state.json",
    )
    assert (stack.job.image, stack.job.supervisor_image) == (IMAGE, SUPERVISOR_IMAGE)
    assert stack.storage.dataset_folder(tmp_path) is None


def refused(path: Path) -> list[str]:
    """Every problem, in the form that users see."""
    with pytest.raises(DefinitionError) as found:
        load(path, now=NOW)
    return [str(problem) for problem in found.value.problems]


# The changed keys of job (or another section) -> the expected problem. `command` is on line 4, `checkpoint` on line 5.
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "a number for an interval": (
        {"checkpoint": {"format": "hf-trainer", "every": 50, "size_gb": 1}},
        "line 5, job.checkpoint.every: '50' is not accepted; allowed: a section with the keys steps, minutes, epochs."
        " Write {steps: 50} or {minutes: 50} or {epochs: 50}.",
    ),
    "an interval with its unit": (
        {"checkpoint": {"format": "hf-trainer", "every": "10 min", "size_gb": 1}},
        "line 5, job.checkpoint.every: '10 min' is not accepted; allowed: a section with the keys steps, minutes,"
        " epochs. Write {minutes: 10}.",
    ),
    "a step's time with its unit": (
        {"work": {"steps": 9, "step_ms": "300 ms"}},
        "line 6, job.work.step_ms: '300 ms' is not accepted; allowed: a section, or nothing. Write step_ms:"
        " {L40S: 300}.",
    ),
    "variables in a list": (
        {"env": ["A=1"]},
        "line 7, job.env: 'a list' is not accepted; allowed: a section, or nothing. Write env: {A: 1}.",
    ),
    "a price for an instance": (
        {"fleet": {**FLEET, "max_price": 1.2}},
        "line 7, fleet.max_price: unknown key. A ceiling for the price of an hour is limits.usd_per_hour. Allowed:",
    ),
    "a type without a GPU": (
        {"fleet": {**FLEET, "instance_types": ["c7i.4xlarge"]}},
        "line 7, fleet.instance_types[0]: 'c7i.4xlarge' is not accepted; allowed: a type with a GPU, or job.device:"
        " cpu for a job that needs none. c7i.4xlarge has no GPU.",
    ),
    "both kinds": (
        {"experiment": "sft-h100"},
        "line 2, job: 'both command and experiment' is not accepted; allowed: one of them.",
    ),
    "no command": ({"command": ""}, "line 4, job.command: missing; allowed: the command that trains, as you would"),
    "USR1 with torchrun": (
        {"command": "torchrun train.py", "stop": {"signal": "USR1"}},
        "line 7, job.stop.signal: 'USR1' is not accepted; allowed: TERM with torchrun: USR1 and USR2 end torchrun"
        " itself and leave its ranks running, unless --signals-to-handle names them.",
    ),
    "a request by USR2 with torchrun": (
        {"command": "torchrun train.py", "stop": {"request": "USR2"}},
        "line 7, job.stop.request: 'USR2' is not accepted; allowed: TERM with torchrun",
    ),
    "each without a step": (
        {"checkpoint": {**SAVES, "each": "ckpt.pt"}},
        "line 5, job.checkpoint.each: 'ckpt.pt' is not accepted; allowed: names with {step} or {epoch}; a name"
        " without them needs rewritten: true.",
    ),
    "each out of its folder": (
        {"checkpoint": {**SAVES, "each": "../{step}/"}},
        "line 5, job.checkpoint.each: '../{step}/' is not accepted; allowed: names below checkpoint.folder.",
    ),
    "no checkpoint": (
        {"checkpoint": {"every": {"steps": 1}}, "progress": {"file": "log.jsonl"}},
        "line 5, job.checkpoint.each: '[] (the default)' is not accepted; allowed: what one checkpoint is, such as"
        " checkpoint-{step}/, epoch_{epoch}.pt or ckpt.pt, or a `format`; or checkpoint: none if the command saves"
        " nothing.",
    ),
    "every is missing on spot": (
        {"checkpoint": {"format": "dcp"}, "progress": {"stdout": "(?P<step>.)"}},
        "line 5, job.checkpoint.every: missing; allowed: how often the command saves by itself, {steps: N},"
        " {epochs: N} or {minutes: N}. On spot a lost node's work after the last save is repeated, and the bill"
        " prices that by this key. If the command saves nothing, write checkpoint: none.",
    ),
    "every is no number": (
        {"checkpoint": {**SAVES, "every": {"steps": "often"}}},
        "line 5, job.checkpoint.every.steps: 'often' is not accepted; allowed: a whole number from 1 to 100,000,000, or"
        " nothing.",
    ),
    "no group step": (
        {"progress": {"stdout": r"loss (?P<loss>[\d.]+)"}},
        r"line 7, job.progress.stdout: 'loss (?P<loss>[\\d.]+)' is not accepted; allowed: a group named step, as in"
        " (?P<step>[0-9]+), or epoch.",
    ),
    "no regular expression": (
        {"progress": {"stdout": "(step"}},
        "line 7, job.progress.stdout: '(step' is not accepted; allowed: a regular expression; at character 0: missing"
        " ), unterminated subpattern.",
    ),
    "a key in the command": (
        {"command": "python train.py --token hf_" + "a" * 30},
        "line 4, job.command: 'python train.py --token (looks like a key)' is not accepted; allowed: no secret key,"
        " because run.json can be read. Put it under job.secrets (NAME: ssm:/name), and read $NAME.",
    ),
    "an unknown placeholder": (
        {"command": "python train.py --out {output}"},
        "line 4, job.command: 'python train.py --out {output}' is not accepted; allowed: the placeholders"
        " {code}, {checkpoints}, {outputs}, {state}, {inputs.NAME}, {gpus}, {run}, {nodes}, {node_rank}, {ranks},"
        " {master}, {port}; {{ is a brace; {output} is unknown.",
    ),
    "an input that is not named": (
        {"command": "python train.py {inputs.txt}", "storage": {"inputs": {"text": "../text"}}},
        "line 4, job.command: '{inputs.txt}' is not accepted; allowed: an input of storage.inputs or an earlier"
        " stage, which are text. Nearest: text.",
    ),
    "an input that is not named, in env": (
        {"env": {"DATA": "{inputs.txt}"}},
        "line 7, job.env.DATA: '{inputs.txt}' is not accepted; allowed: an input of storage.inputs or an earlier"
        " stage, which are none.",
    ),
    "checkpoints beside the code": (
        {"checkpoint": {**SAVES, "folder": "./"}},
        "line 5, job.checkpoint.folder: './' is not accepted; allowed: {checkpoints}, or a folder for checkpoints"
        " only, because gpufleet empties it before each start. If the command saves into the folder"
        " in which it starts, write job.workdir: {checkpoints}.",
    ),
    "a name of the node's": (
        {"env": {"AWS_PROFILE": "x"}},
        "line 7, job.env.AWS_PROFILE: 'x' is not accepted; allowed: a name that does not begin with AWS_ or GPUFLEET_:"
        " gpufleet sets those variables.",
    ),
    "env and secrets": (
        {"env": {"TOKEN": "x"}, "secrets": {"TOKEN": "ssm:/token"}},
        "line 7, job.env.TOKEN: 'x' is not accepted; allowed: a name that is not in job.secrets too.",
    ),
    "a secret that is none": (
        {"secrets": {"TOKEN": "my-token"}},
        "line 7, job.secrets.TOKEN: 'my-token' is not accepted; allowed: the place of the value: ssm:/name or"
        " secretsmanager:name.",
    ),
    "a dataset": (
        {"storage": {"dataset": "data/x"}},
        "line 9, storage.dataset: 'data/x' is not accepted; allowed: nothing when job.command is set. Name it under"
        " storage.inputs: in the command, {inputs.NAME} is its path.",
    ),
    "an input at home": (
        {"storage": {"inputs": {"text": "~/text"}}},
        "line 9, storage.inputs.text: '~/text' is not accepted; allowed: a folder, relative to the project, or"
        " s3://bucket/prefix. No shell expands ~ here: write the path relative to the project, as in"
        " ../my-model, or in full.",
    ),
    "an input's name": (
        {"storage": {"inputs": {"my text": "../text"}}},
        "line 9, storage.inputs.my text: 'my text' is not accepted; allowed: a name of 1 to 40 of a-z, 0-9 and _,"
        " beginning with a letter.",
    ),
    "code in a bucket": (
        {"code": {"folder": "s3://bucket/code"}},
        "line 7, job.code.folder: 's3://bucket/code' is not accepted; allowed: a folder, relative to the project."
        " Only a folder of this machine can be shipped.",
    ),
    "unlike GPUs": (
        {"fleet": {**FLEET, "instance_types": ["g5.2xlarge", "g5.12xlarge"]}},
        "line 7, fleet.instance_types: 'g5.2xlarge has 1 GPU, g5.12xlarge has 4 GPUs' is not accepted; allowed: types"
        " with equally many GPUs, or job.checkpoint.same_gpus: false. A checkpoint that 4 GPUs wrote in shards"
        " can only be read by 4 GPUs, unless your script can do more.",
    ),
    "more GPUs than there are": (
        {"gpus": 4},
        "line 7, job.gpus: '4' is not accepted; allowed: at most the GPUs of each listed type; g5.2xlarge has 1.",
    ),
    "more memory than there is": (
        {"memory_gb": 60},
        "line 8, fleet.instance_types[0]: 'g5.2xlarge' is not accepted; allowed: a type on which every phase fits",
    ),
    "a misspelled key": (
        {"chekpoint": {}},
        "line 7, job.chekpoint: unknown key. Nearest: checkpoint. Allowed: image, supervisor_image, command,",
    ),
    "steps and hours": (
        {"work": {"steps": 1, "hours": {"low": 1, "likely": 2, "high": 3}}},
        "line 6, job.work.hours: 'a section' is not accepted; allowed: only one of work.steps and work.hours.",
    ),
    "a misspelled command": (
        {"command": None, "comand": "python train.py"},
        "line 6, job.comand: unknown key. Nearest: command. Allowed: image, supervisor_image, command,",
    ),
    "another tool's word for it": (
        {"command": None, "run": "python train.py"},
        "line 6, job.run: unknown key. It is called job.command. Allowed: image, ",
    ),
    "spot as a switch": (
        {"fleet": {**FLEET, "spot": True}},
        "line 7, fleet.spot: unknown key. Write capacity: spot, or capacity: on-demand. Allowed: ",
    ),
    "GPUs of the fleet": (
        {"fleet": {**FLEET, "gpus": 8}},
        "line 7, fleet.gpus: unknown key. It belongs under job, but only if the job is a command of your own."
        " Allowed: ",
    ),
    "an image of Docker Hub": (
        {"image": "pytorch/pytorch:2.9"},
        "line 3, job.image: 'pytorch/pytorch:2.9' is not accepted; allowed: registry/repository:tag, with its @sha256:"
        " digest once pinned. It names no registry: write docker.io/pytorch/pytorch:2.9.",
    ),
    "an image without a tag": (
        {"image": "nvcr.io/nvidia/pytorch"},
        "line 3, job.image: 'nvcr.io/nvidia/pytorch' is not accepted; allowed: registry/repository:tag, with its"
        " @sha256: digest once pinned. It names no tag: write nvcr.io/nvidia/pytorch:TAG.",
    ),
    "an official image": (
        {"image": "ubuntu"},
        "line 3, job.image: 'ubuntu' is not accepted; allowed: registry/repository:tag, with its @sha256: digest once"
        " pinned. It names no registry and no tag: write docker.io/library/ubuntu:TAG.",
    ),
    "a checkpoint beside none": (
        {"checkpoint": {"format": "none", "each": "a-{step}"}, "progress": {"stdout": r"(?P<step>\d+)"}},
        "line 5, job.checkpoint.each: 'a-{step}' is not accepted; allowed: no other key beside checkpoint: none",
    ),
    "a save every so many steps where epochs are counted": (
        {"work": {"epochs": 3}},
        "line 5, job.checkpoint.every.steps: '10' is not accepted; allowed: epochs or minutes, because this run"
        " counts epochs.",
    ),
    "a save every so many epochs of nobody knows what length": (
        {"checkpoint": {**SAVES, "every": {"epochs": 1}}},
        "line 5, job.checkpoint.every.epochs: '1' is not accepted; allowed: minutes; epochs need work.epochs or",
    ),
    "the time of a step where epochs are counted": (
        {"checkpoint": {**SAVES, "every": {"epochs": 1}}, "work": {"epochs": 3, "step_ms": {"A10G": 5}}},
        "line 6, job.work.step_ms: 'a section' is not accepted; allowed: work.epoch_minutes if epochs are counted",
    ),
    "one time of a step for every GPU": (
        {"work": {"steps": 100, "step_ms": 100}},
        "line 6, job.work.step_ms: '100' is not accepted; allowed: a section, or nothing. Write step_ms: {L40S: 100}.",
    ),
    "lines that tell epochs where steps are counted": (
        {"progress": {"stdout": r"epoch (?P<epoch>\d+)"}},
        r"line 7, job.progress.stdout: 'epoch (?P<epoch>\\d+)' is not accepted; allowed: a group named step, or groups"
        " epoch, batch and batches, because this run counts steps; write work.epochs to count epochs.",
    ),
    "a folder of the machine's": (
        {"workdir": "/opt"},
        "line 7, job.workdir: '/opt' is not accepted; allowed: a folder of the run: {code}, {checkpoints}, {outputs},"
        " {state}, or one below the code's.",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_told_where_it_is_with_what_is_allowed(case: str, tmp_path: Path) -> None:
    keys, said = MISTAKES[case]

    (problem,) = refused(command_file(tmp_path, **keys))

    assert problem.startswith(said)


KEYS = ["hf_" + "a" * 30, "AKIA" + "A" * 16, "ghp_" + "a" * 36, "0123456789" * 4]


@pytest.mark.parametrize("key", KEYS)
def test_a_value_that_looks_like_a_key_is_refused_and_not_shown(key: str, tmp_path: Path) -> None:
    (problem,) = refused(command_file(tmp_path, env={"HF_TOKEN": key}))

    assert problem.startswith("line 7, job.env.HF_TOKEN: ")
    assert problem.endswith("Put it under job.secrets.")
    assert key not in problem


def test_like_gpus_are_asked_for_only_where_a_checkpoint_needs_them(tmp_path: Path) -> None:
    fleet = {**FLEET, "instance_types": ["g5.2xlarge", "g5.12xlarge"]}

    assert load(command_file(tmp_path, fleet=fleet, checkpoint={**SAVES, "same_gpus": False}), now=NOW)
    assert load(command_file(tmp_path, fleet=fleet, gpus=1), now=NOW)


def test_every_is_not_asked_for_on_demand(tmp_path: Path) -> None:
    fleet = {**FLEET, "capacity": "on-demand"}

    assert load(command_file(tmp_path, fleet=fleet, checkpoint={"format": "hf-trainer"}), now=NOW)


def test_a_ready_made_job_takes_no_inputs_and_no_keys_of_a_command(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"command": None, "checkpoint": None, "work": None, "experiment": "tinystories-growth"}
    storage = {"dataset": "data/x", "inputs": {"text": "../text"}}

    assert refused(command_file(tmp_path, **keys, storage=storage)) == [
        "line 7, storage.inputs: 'a section' is not accepted; allowed: nothing unless job.command is set."
        " Use storage.dataset for this job."
    ]
    (problem,) = refused(command_file(tmp_path, **keys, storage={"dataset": "data/x"}, setup="x"))
    assert problem == "line 5, job.setup: unknown key; allowed: experiment, image, parameters."


@pytest.mark.parametrize(
    ("keys", "unit", "total", "between", "interval_s"),
    [
        ({"work": {"steps": 40}}, "step", 40, 10, 20.0),
        ({"work": {"epochs": 4}, "checkpoint": {**SAVES, "every": {"epochs": 2}}}, "epoch", 4, 2, 4.0),
        ({"work": {"epochs": 4, "steps_per_epoch": 25}, "checkpoint": {**SAVES, "every": {"epochs": 2}}},
         "step", 100, 50, 100.0),
        ({"work": {"steps": 90, "steps_per_epoch": 25}, "checkpoint": {**SAVES, "every": {"epochs": 2}}},
         "step", 90, 50, 100.0),
        ({"work": {"hours": {"low": 1, "likely": 2, "high": 3}}, "checkpoint": {**SAVES, "every": {"minutes": 3}},
          "progress": {"stdout": r"epoch (?P<epoch>\d+)"}}, "epoch", None, None, 180.0),
        ({"work": {"steps": 40}, "checkpoint": "none", "progress": {"stdout": r"step (?P<step>\d+)"}},
         "step", 40, None, 10 * 365 * 86400.0),
    ],
)  # fmt: skip
def test_a_run_counts_steps_or_epochs_and_says_how_far_apart_its_saves_are(
    tmp_path: Path, keys: dict[str, Any], unit: str, total: int | None, between: int | None, interval_s: float
) -> None:
    config: Any = load(command_file(tmp_path, **keys), now=NOW).job.parameters
    assert (config.unit, config.total, config.steps_between_saves()) == (unit, total, between)
    assert config.save_interval_s(2.0) == interval_s


def test_a_command_that_saves_nothing_is_warned_of_and_no_signal_saves_anything(tmp_path: Path) -> None:
    config: Any = load(
        command_file(tmp_path, checkpoint="none", progress={"stdout": r"step (?P<step>\d+)"}), now=NOW
    ).job.parameters
    assert (config.saves, config.saves_on_signal, config.demands.interval) == (False, False, False)
    assert [each for each in config.doubts(1000) if "a loss repeats all" in each]


def test_keys_that_came_later_leave_a_run_what_it_was(tmp_path: Path) -> None:
    later: dict[str, Any] = {"workdir": "{code}", "exit": {"hold_minutes": 0}}
    before, after = (load(command_file(tmp_path, **each), now=NOW) for each in ({}, later))
    assert creation_digest(before) == creation_digest(after)
    assert creation_digest(before) != creation_digest(load(command_file(tmp_path, workdir="x"), now=NOW))


def test_neither_is_told_of_both(tmp_path: Path) -> None:
    first, *_ = refused(command_file(tmp_path, command=None, checkpoint=None, work=None))

    assert first.startswith("line 2, job.experiment: missing; allowed: one of kernel-sft, ")
    assert first.endswith("; or job.command in its place, for your own script.")


def test_a_rehearsal_and_a_scenario_lay_any_of_its_keys_over(tmp_path: Path) -> None:
    more = """
rehearsal:
  job: {command: python train.py --tiny, setup: "", device: cpu, env: {B: "2"}}
  storage: {inputs: {text: ../tiny}}
scenarios:
  shorter: {job: {work: {steps: 10}}}
  other: {job: {image: x}}
"""
    kept: dict[str, Any] = {"env": {"A": "1"}, "setup": "pip install x", "storage": {"inputs": {"text": "../text"}}}
    path = command_file(tmp_path / "project", **kept, more=more)
    assert refused(path)[0].startswith("line 18, scenarios.other.job.image: unknown key. It belongs under job.")
    path.write_text(path.read_text().replace("  other: {job: {image: x}}\n", ""))

    rehearsed = load(path, now=NOW, rehearsal=True)

    config: Any = rehearsed.job.parameters
    assert (config.command, config.device, config.env) == ("python train.py --tiny", "cpu", {"A": "1", "B": "2"})
    assert rehearsed.storage.inputs == {"text": "../tiny"}
    installs = {text: load(path, now=NOW, rehearsal=text == "").job.parameters.demands.installs for text in ("", "pip")}
    assert installs == {"": False, "pip": True}
    (shorter,) = scenarios(path, now=NOW)
    assert batch.total_steps(shorter.job.parameters) == 10


def test_a_rehearsal_s_own_file_names_its_folders_in_full(tmp_path: Path) -> None:
    project = tmp_path / "project"
    places = {"text": "../text", "more": "s3://theirs/data"}
    path = command_file(project, code={"folder": "../mine"}, storage={"inputs": places})
    elsewhere = tmp_path / "elsewhere.yaml"
    elsewhere.write_text(rehearsal_text(path, project))

    stack = load(elsewhere, now=NOW)

    assert stack.job.parameters.demands.code is not None
    assert stack.job.parameters.demands.code.folder == str(tmp_path / "mine")
    assert stack.storage.inputs == {"text": str(tmp_path / "text"), "more": "s3://theirs/data"}


def test_both_images_are_pinned_and_the_supervisor_s_gets_a_line(tmp_path: Path) -> None:
    path, digest = command_file(tmp_path), "sha256:" + "5" * 64
    before = path.read_text()

    for _ in range(2):
        pin(
            path,
            ami="ami-0123456789abcdef0",
            image=f"{IMAGE}@{digest}",
            supervisor_image=f"{SUPERVISOR_IMAGE}@{digest}",
        )

    stack = load(path, now=NOW)
    assert stack.job.images == (f"{IMAGE}@{digest}", f"{SUPERVISOR_IMAGE}@{digest}")
    assert len(path.read_text().splitlines()) == len(before.splitlines()) + 1


def test_the_run_is_another_with_another_input_or_command(tmp_path: Path) -> None:
    given: list[dict[str, Any]] = [
        {},
        {"command": "x"},
        {"storage": {"inputs": {"text": "../text"}}},
        {"env": {"A": "1"}},
    ]

    assert len({creation_digest(load(command_file(tmp_path, **each), now=NOW)) for each in given}) == len(given)


def test_a_node_may_read_what_the_file_names_and_nothing_beside_it(tmp_path: Path) -> None:
    key = "arn:aws:kms:us-east-2:111122223333:key/abc"
    path = command_file(
        tmp_path,
        secrets={"A": "ssm:/team/a", "B": "secretsmanager:team/b"},
        registry="ssm:/login",
        storage={"inputs": {"text": "s3://theirs/some/data", "more": "../more"}},
        account={"kms_key": key},
    )

    stated = {
        each["Sid"]: each
        for each in node_statements(load(path, now=NOW), "arn:aws:s3:::own", "arn:logs", "arn:schedule", "arn:role")
    }

    parameters, secrets = stated["Parameters"], stated["Secrets"]
    of_us = "arn:aws:ssm:us-east-2:*:parameter"
    assert (parameters["Action"], parameters["Resource"]) == ("ssm:GetParameter", [f"{of_us}/team/a", f"{of_us}/login"])
    assert secrets["Action"] == "secretsmanager:GetSecretValue"
    assert secrets["Resource"] == ["arn:aws:secretsmanager:us-east-2:*:secret:team/b-??????"]
    assert (stated["KeyOfSecrets"]["Action"], stated["KeyOfSecrets"]["Resource"]) == ("kms:Decrypt", key)
    assert stated["Input0"]["Resource"] == "arn:aws:s3:::theirs/some/data/*"
    plain = node_statements(
        load(command_file(tmp_path), now=NOW), "arn:aws:s3:::own", "arn:logs", "arn:schedule", "arn:role"
    )
    assert not {"Parameters", "Secrets", "KeyOfSecrets", "Input0"} & {each["Sid"] for each in plain}
