"""The facts that `gpufleet new` reads in a folder of training code, and the file that it writes."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from gpufleet.infra import cli
from gpufleet.infra.definition.loader import load
from gpufleet.infra.discover.marks import checks_left, processes_asked
from gpufleet.infra.discover.script import look
from gpufleet.infra.discover.template import Draft, draft, loadable
from gpufleet.infra.errors import GpufleetError
from tests.infra.discover_cases import AT_STEP, CASES, PLAIN, CodeCase


def folder(place: Path, files: dict[str, str]) -> Path:
    """A folder of code with these files."""
    for name, text in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    return place


def drafted(code: Path, command: str = "") -> Draft:
    return loadable(draft("mine", look(code, command), folder="../mine", command=command), "mine")


def value(text: str, path: str) -> str | None:
    """The value of a written file at a path; the word `none` stands for the section with this meaning."""
    tree = yaml.safe_load(text)
    for part in path.split("."):
        tree = {"format": tree} if isinstance(tree, str) else tree
        tree = tree.get(part) if isinstance(tree, dict) else None
    return None if tree is None else str(tree)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_is_written_of_a_folder(tmp_path: Path, case: CodeCase) -> None:
    made = drafted(folder(tmp_path, case.files), case.command)
    for path, wanted in case.expects.items():
        there = value(made.text, path)
        assert there is None if wanted is None else re.search(wanted, there or ""), (path, there)
    sentences = "\n".join((*made.known, *made.unknown, made.text))
    assert [each for each in case.says if not re.search(each, sentences)] == []
    assert [each for each in case.silent if re.search(each, sentences)] == []


def test_patterns_match_what_the_script_prints(tmp_path: Path) -> None:
    code = folder(tmp_path, {"t.py": PLAIN})
    (pattern,) = (line.regex for line in look(code).lines)
    for loss in ("0.512", "1e-05", "nan", "inf"):
        match = re.search(pattern, f"step 12 loss {loss}")
        assert match is not None
        assert match.groupdict() == {"step": "12", "loss": loss}


IN_EPOCHS = """
import json, sys, torch
log = open("log.txt", "w")
for epoch in range(9):
    for step, batch in enumerate(loader{start}):
        loss.backward()
        stats = {stats}
        print({printed})
"""
AS_DICT = "dict(epoch=epoch, step=step, lr=optimizer.param_groups[0]['lr'], loss=loss.item())"
AS_BRACES = "{'step': step, 'loss': float(loss)}"


@pytest.mark.parametrize(
    ("start", "stats", "printed", "line", "figures"),
    [
        (
            ", start=epoch * len(loader)",
            AS_DICT,
            "json.dumps(stats)",
            '{"epoch": 2, "step": 740, "lr": 0.1, "loss": 1.5e-05}',
            {"epoch": "2", "step": "740", "loss": "1.5e-05"},
        ),
        (", epoch * len(loader)", AS_BRACES, "stats", "{'step': 740, 'loss': nan}", {"step": "740", "loss": "nan"}),
        (", epoch * len(loader)", AS_BRACES, "json.dumps(stats), file=sys.stderr", '{"step": 7, "loss": 1}', None),
        (", epoch * len(loader)", AS_BRACES, "json.dumps(stats), file=log", "", {}),
        ("", AS_DICT, "json.dumps(stats)", "", {}),  # a batch of an epoch, and nothing says of how many
        (", 1", AS_DICT, "json.dumps(stats)", "", {}),
    ],
)
def test_a_printed_dictionary_states_the_step(
    tmp_path: Path, start: str, stats: str, printed: str, line: str, figures: dict[str, str] | None
) -> None:
    code = folder(tmp_path, {"t.py": IN_EPOCHS.format(start=start, stats=stats, printed=printed)})
    patterns = [line.regex for line in look(code).lines]
    assert len(patterns) == (1 if line else 0)
    for pattern in patterns:
        match = re.search(pattern, line)
        assert match is not None
        assert match.groupdict() == (figures or {"step": "7", "loss": "1"})


METERED = """
import torch
from tqdm.auto import tqdm
def train(args, loader, steps):
    for epoch in range(args.epochs):
        {before}
        for batch in {over}:
            loss.backward()
            {tells}
train(told, rows, 90)
"""
METER_OF_EPOCH = {"epoch": "3", "batch": "20", "batches": "1251", "loss": "0.8123"}


@pytest.mark.parametrize(
    ("before", "over", "tells", "line", "figures"),
    [
        (
            "header = 'Epoch: [{}]'.format(epoch)",
            "logger.log_every(loader, 10, header)",
            "pass",
            "Epoch: [3]  [  20/1251]  eta: 0:10:00  lr: 0.000100  loss: 0.8123 (0.8411)  time: 0.5003",
            METER_OF_EPOCH,
        ),
        (
            "header = 'Training'",
            "logger.log_every(loader, 10, header, steps)",
            "pass",
            "I2026 helpers.py:102] Training  [    40/125000]  eta: 1:00  lr: 0.1  total_loss: 9.81 (9.9)",
            {"step": "40", "total": "125000", "loss": "9.81"},
        ),
        (
            "meter = ProgressMeter(len(loader), [time, losses], prefix=f'Epoch: [{epoch}]')",
            "loader",
            "meter.display(1)",
            "Epoch: [3][  20/1251]\tTime  0.4 ( 0.6)\tLoss 0.8123 (6.9011e+00)\tAcc@1   0.00 (  0.41)",
            METER_OF_EPOCH,
        ),
        (
            "bar = tqdm(total=steps)",
            "loader",
            "bar.set_description(f'now at loss {loss:.4f}')",
            "now at loss 0.51:  12%|#   | 11/90 [00:01<00:09, 8.1it/s]",
            {"step": "11", "total": "90", "loss": "0.51"},
        ),
        (
            "bar = tqdm(total=len(loader), desc=f'Epoch {epoch + 1}/{args.epochs}')",
            "loader",
            "bar.set_postfix(update='7', loss=loss.item())",
            "Epoch 4/9:  12%|#   | 11/90 [00:01<00:09, 8.1it/s, update=7, loss=0.51]",
            {"epoch": "4", "batch": "11", "batches": "90", "loss": "0.51"},
        ),
        (
            "pass",
            "loader",
            "print(f'Epoch: {epoch}, Step: {global_step}/{args.max_steps}, Loss: {loss:.3f}')",
            "Epoch: 3, Step: 11/90, Loss: 0.512",
            {"epoch": "3", "step": "11", "total": "90", "loss": "0.512"},
        ),
    ],
)
def test_bars_and_meters_state_their_count(
    tmp_path: Path, before: str, over: str, tells: str, line: str, figures: dict[str, str]
) -> None:
    code = folder(tmp_path, {"t.py": METERED.format(before=before, over=over, tells=tells)})
    match = re.search(look(code).lines[0].regex, line)
    assert match is not None
    assert match.groupdict() == figures


@pytest.mark.parametrize(
    ("over", "tells"),
    [
        ("loader", "print(f'Saved state at step {step}, loss {loss}')"),
        ("tqdm(range(steps), desc='validation steps')", "bar.set_postfix(loss=loss)"),
        ("tqdm(range(steps), desc='validation steps')", "pass"),
    ],
)
def test_lines_of_other_work_are_not_those_of_the_training(tmp_path: Path, over: str, tells: str) -> None:
    text = METERED.format(before="bar = None", over=over, tells=tells).replace("for batch", "for step")
    code = folder(tmp_path, {"t.py": text})
    assert not any(line.is_of_training for line in look(code).lines)


TRAINER = """
from transformers import HfArgumentParser, Trainer, TrainingArguments
(training_args,) = HfArgumentParser((TrainingArguments,)).parse_args_into_dataclasses()
trainer = Trainer(args=training_args)
trainer.train({given})
"""


@pytest.mark.parametrize(("given", "bare"), [("", True), ("resume_from_checkpoint=True", False)])
def test_a_trainer_that_is_given_no_checkpoint_is_pointed_out(tmp_path: Path, given: str, bare: bool) -> None:
    made = drafted(folder(tmp_path, {"t.py": TRAINER.format(given=given)}))
    assert any("GPUFLEET_RESUME_FROM" in sentence for sentence in made.unknown) == bare
    assert "--save_steps 500" in made.text
    assert value(made.text, "job.checkpoint.format") == "hf-trainer"


def test_a_flag_of_the_rehearsal_that_the_command_has_already_is_not_written_twice(tmp_path: Path) -> None:
    command = "python t.py --output_dir out --use_cpu True --report_to wandb"
    rehearsed = value(
        drafted(folder(tmp_path, {"t.py": TRAINER.format(given="")}), command).text, "rehearsal.job.command"
    )
    assert rehearsed is not None
    assert rehearsed.lower().count("--use_cpu") == 1
    assert rehearsed.endswith("--report_to none")


@pytest.mark.parametrize(
    ("text", "framework"),
    [
        ("import lightning\ntrainer = lightning.Trainer()\ntrainer.fit(model)\n", "Lightning"),
        ("from composer import Trainer\nTrainer(model).fit()\n", "Composer"),
        ("from trl import SFTTrainer\ntrainer = SFTTrainer()\ntrainer.train()\n", "TRL"),
        ("import torch.distributed.checkpoint as dcp\ndcp.save({})\n", "torch.distributed.checkpoint"),
        ("import xgboost as xgb\nxgb.train({}, d)\n", "XGBoost"),
        ("import lightgbm\nimport torch\ntorch.save({}, 'a.pt')\n", None),  # imported, and not used
        ("import torch\nloss.backward()\n", None),
    ],
)
def test_a_framework_is_known_by_what_is_imported_and_used(tmp_path: Path, text: str, framework: str | None) -> None:
    row = look(folder(tmp_path, {"t.py": text}), "python t.py").framework
    assert (row.name if row else None) == framework


def test_where_two_scripts_look_alike_it_asks_instead_of_guessing(tmp_path: Path) -> None:
    code = folder(tmp_path, {"train_a.py": "loss.backward()\n", "train_b.py": "loss.backward()\n"})
    with pytest.raises(GpufleetError, match=r"train_a\.py, train_b\.py\); name it: --command"):
        look(code)
    assert look(code, "python train_b.py").script == "train_b.py"


@pytest.mark.parametrize(
    ("files", "command", "why"),
    [
        (None, "", "is not a folder"),
        ({"readme.txt": "x"}, "", "no Python file"),
        ({"tool.py": "print('a tool')\n"}, "", r"unclear which file in .* trains \(none of them is seen to train"),
        ({"t.py": PLAIN}, "python other.py", r"other\.py is not in the folder; it has t\.py"),
        ({"t.py": PLAIN}, "python 't.py", "No closing quotation"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, files: dict[str, str] | None, command: str, why: str) -> None:
    with pytest.raises(GpufleetError, match=why):
        look(tmp_path / "missing" if files is None else folder(tmp_path, files), command)


def test_code_is_read_and_never_run(tmp_path: Path) -> None:
    look(folder(tmp_path, {"t.py": "raise SystemExit('it was run')\nopen('made', 'w')\nloss.backward()\n"}))
    assert not (tmp_path / "made").exists()


def test_inputs_that_a_command_names_are_in_the_file_and_asked_for(tmp_path: Path) -> None:
    made = drafted(folder(tmp_path, {"t.py": PLAIN}), "python t.py {inputs.text}/a.txt {inputs.text} {inputs.model}")
    assert "  inputs:   # CHECK" in made.text
    assert made.text.count("\n    text: data/text\n    model: data/model\n") == 1


def test_a_value_that_does_not_load_is_a_comment_and_never_written(tmp_path: Path) -> None:
    made = Draft(text=drafted(folder(tmp_path, {"t.py": PLAIN})).text)
    broken = made.text.replace("at-{step}.pt", "../at-{step}.pt").replace("ami: unpinned", "ami: of-mine")
    made = loadable(Draft(text=broken), "mine")
    (tmp_path / "mine.yaml").write_text(made.text)
    load(tmp_path / "mine.yaml", now=datetime.now(UTC))
    assert re.search(r"# ami: of-mine.*# CHECK: allowed", made.text)
    assert value(made.text, "job.checkpoint.format") == "none"
    assert any("of-mine" in sentence and "does not load" in sentence for sentence in made.unknown)
    with pytest.raises(GpufleetError, match="so no file is written"):
        loadable(Draft(text="run: {id: r1}\n"), "mine")


def test_the_command_writes_a_file_once_and_cost_counts_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder(tmp_path / "mine", {"t.py": PLAIN})
    (tmp_path / "project" / "stacks").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "project")
    command = ["new", "mine", "--code", "../mine", "--command", "torchrun --nproc_per_node=8 t.py"]
    assert cli.main(command) == 0
    assert "8 processes" in capsys.readouterr().out
    path = tmp_path / "project" / "stacks" / "mine.yaml"
    assert re.search(AT_STEP, value(path.read_text(), "job.checkpoint.each") or "")
    left = checks_left(path.read_text())
    assert left
    assert cli.main(["cost", "mine", "--all"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{len(left)} lines of mine.yaml still marked CHECK ({left[0]}, {left[1]}" in shown
    assert "processes on each node" not in shown
    path.write_text(path.read_text().replace("--nproc_per_node={gpus}", "--nproc_per_node=8").replace("# CHECK", "#"))
    assert cli.main(["cost", "mine", "--all"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "g6e.2xlarge has 1 GPU, and job.command starts 8 processes on each node" in shown
    assert "CHECK" not in shown
    assert cli.main(command) == 2
    assert "exists already" in capsys.readouterr().err


def test_a_number_of_processes_is_seen_beside_a_launcher_s_placeholder() -> None:
    assert processes_asked("torchrun --nproc-per-node {gpus} t.py --devices 8") == 8
    assert processes_asked("torchrun --nproc-per-node {gpus} t.py --devices {gpus}") is None


@pytest.mark.parametrize("command", ["pretrain pythia-14m", "finetune_full org/model", "finetune_lora org/model"])
def test_a_program_gets_the_words_to_go_on_where_its_command_takes_them(command: str, tmp_path: Path) -> None:
    made = drafted(folder(tmp_path, {}), f"litgpt {command} --num_nodes 2")
    takes_them = "lora" not in command
    assert yaml.safe_load(made.text)["job"].get("resume") == ({"args": "--resume auto"} if takes_them else None)
    assert ("finetune_lora has none" in " ".join(made.unknown)) is not takes_them


def test_a_command_that_counts_tokens_has_no_steps_from_a_setting_that_it_ignores(tmp_path: Path) -> None:
    settings = "--train.max_steps 500 --train.max_tokens 1000000"
    made = drafted(folder(tmp_path, {}), f"litgpt pretrain pythia-14m {settings}")
    assert "work" not in yaml.safe_load(made.text)["job"]
    assert settings in yaml.safe_load(made.text)["rehearsal"]["job"]["command"]
    tuned = drafted(folder(tmp_path, {}), f"litgpt finetune_full org/model {settings}")
    assert yaml.safe_load(tuned.text)["job"]["work"]["steps"] == 500


OURS = "--nnodes {nodes} --node-rank {node_rank}"
MEETS = "--master-addr {master} --master-port {port}"


@pytest.mark.parametrize(("typed", "written", "nodes", "environment"), [
    (
        "torchrun --nnodes 2 --nproc_per_node 8 --rdzv_id 456 --rdzv_endpoint $MASTER:29500 t.py --lr 1",
        f"torchrun {OURS} --nproc_per_node {{gpus}} --rdzv_id {{run}} --rdzv_endpoint {{master}}:{{port}} t.py --lr 1",
        2, {},
    ),
    (
        "torchrun --nnodes=1:4 --nproc-per-node=gpu --rdzv-id=$RANDOM --rdzv-backend=c10d"
        " --rdzv-endpoint=$head_node_ip:29500 train.py",
        "torchrun --nnodes={nodes} --nproc-per-node={gpus} --rdzv-id={run} --rdzv-backend=c10d"
        " --rdzv-endpoint={master}:{port} train.py",
        4, {},
    ),
    (
        "python -m torch.distributed.run --nnodes $SLURM_NNODES --node_rank $SLURM_NODEID --master_addr ${HEAD}"
        " --master_port 29400 --nproc_per_node 1 train.py",
        "python -m torch.distributed.run --nnodes {nodes} --node_rank {node_rank} --master_addr {master}"
        " --master_port {port} --nproc_per_node 1 train.py",
        2, {},
    ),
    (
        "accelerate launch --num_machines 2 --machine_rank 0 --main_process_ip 10.0.0.1 --main_process_port 29500"
        " --num_processes 16 train.py",
        "accelerate launch --num_machines {nodes} --machine_rank {node_rank} --main_process_ip {master}"
        " --main_process_port {port} --num_processes {ranks} train.py",
        2, {},
    ),
    (
        "python train.py --trainer.num_nodes 2",
        f"torchrun {OURS} {MEETS} --nproc-per-node {{gpus}} train.py --trainer.num_nodes {{nodes}}",
        2, {},
    ),
    (
        "train --num_nodes 2",
        "train --num_nodes {nodes}",
        2, {"NODE_RANK": "{node_rank}", "MASTER_ADDR": "{master}", "MASTER_PORT": "{port}"},
    ),
    (
        "litgpt pretrain pythia-14m --num_nodes 2",
        f"torchrun {OURS} {MEETS} --nproc-per-node {{gpus}} --no-python litgpt pretrain pythia-14m"
        " --num_nodes {nodes} --out_dir {checkpoints}",
        2, {},
    ),
    (
        "litgpt finetune_full org/model --devices 8 --num_nodes 2",
        f"torchrun {OURS} {MEETS} --nproc-per-node {{gpus}} --no-python litgpt finetune_full org/model"
        " --devices {gpus} --num_nodes {nodes} --out_dir {checkpoints}",
        2, {},
    ),
    (
        "fabric run --num-nodes=2 --node-rank=0 --main-address=10.0.0.1 --main-port=1234 --devices=8 train.py",
        "fabric run --num-nodes={nodes} --node-rank={node_rank} --main-address={master} --main-port={port}"
        " --devices={gpus} train.py",
        2, {},
    ),
    (
        "python train.py --dist-url 'tcp://10.0.0.1:23456' --multiprocessing-distributed --world-size 2 --rank 0 data",
        "python train.py --dist-url tcp://{master}:{port} --multiprocessing-distributed --world-size {nodes}"
        " --rank {node_rank} data",
        2, {},
    ),
    (
        "deepspeed --num_nodes 2 --num_gpus=8 --hostfile hosts train.py --deepspeed_config ds.json",
        "deepspeed --hostfile \"$(seq -f 'node-%g slots={gpus}' {nodes} > {state}/hosts; echo {state}/hosts)\" --no_ssh"
        " --node_rank {node_rank} --master_addr {master} --master_port {port} train.py --deepspeed_config ds.json",
        2, {},
    ),
    (
        "torchrun --nnodes=2 --nproc_per_node=8 train.py",
        f"torchrun --nnodes={{nodes}} --node-rank {{node_rank}} {MEETS} --nproc_per_node={{gpus}} train.py",
        2, {},
    ),
    ("torchrun --nnodes 1 --nproc_per_node 8 train.py", "torchrun --nnodes 1 --nproc_per_node {gpus} train.py", 1, {}),
])  # fmt: skip
def test_a_command_for_several_nodes_becomes_one_in_our_words(
    typed: str, written: str, nodes: int, environment: dict[str, str], tmp_path: Path
) -> None:
    made = drafted(folder(tmp_path, dict.fromkeys(("train.py", "t.py"), "import torch\n")), typed)
    tree = yaml.safe_load(made.text)
    assert tree["job"]["command"] == written
    assert tree["job"].get("env", {}) == environment
    assert (tree["fleet"].get("nodes", 1), len(tree["fleet"]["zones"])) == (nodes, 1 if nodes > 1 else 3)
    assert "{nodes}" in tree["rehearsal"]["job"]["command"] or nodes == 1
    assert ("CHECK: how many" in made.text) is ("SLURM_NNODES" in typed)


@pytest.mark.parametrize("nodes", [1, 3])
def test_nodes_that_the_code_tells_its_trainer_become_a_command_for_as_many(nodes: int, tmp_path: Path) -> None:
    text = f"from lightning import Trainer\nTrainer(num_nodes={nodes}, max_steps=9).fit(model)\n"
    tree = yaml.safe_load(drafted(folder(tmp_path, {"train.py": text}), "python train.py").text)
    assert tree["fleet"].get("nodes", 1) == nodes
    told = f"torchrun {OURS} {MEETS} --nproc-per-node {{gpus}}" if nodes > 1 else "python"
    assert tree["job"]["command"].startswith(f"{told} train.py")
