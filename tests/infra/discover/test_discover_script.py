"""What `gpufleet new` reads off a folder of training code."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpufleet.infra import cli
from gpufleet.infra.definition.loader import load
from gpufleet.infra.discover.script import OUT, RESUME, look
from gpufleet.infra.discover.template import draft
from gpufleet.infra.errors import GpufleetError
from gpufleet.job.kind.command import SAVE_INTERVALS, STEP_COUNTS

GLOBALS = """
import os, torch
from model import GPT
out_dir = 'out'
eval_interval = 2000
max_iters = 600000
init_from = 'scratch'
device = 'cuda'
compile = True
exec(open('configurator.py').read())
ddp = int(os.environ.get('RANK', -1)) != -1
if ddp:
    torch.distributed.init_process_group('nccl')
iter_num = 0
while True:
    if iter_num % eval_interval == 0:
        losses = estimate()
        print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        torch.save({}, os.path.join(out_dir, 'ckpt.pt'))
    print(f"iter {iter_num}: loss {lossf:.4f}, time {dt*1000:.2f}ms, mfu {mfu*100:.2f}%")
"""
ARGPARSE = """
import argparse, signal, torch, wandb
from pathlib import Path
parser = argparse.ArgumentParser()
parser.add_argument("--max-steps", type=int, default=3000)
parser.add_argument("--save-every", type=int, default=-1)
parser.add_argument("--ckpt-dir", default="ckpts")
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()
signal.signal(signal.SIGUSR1, lambda *_: None)
for step in range(args.max_steps):
    loss.backward()
    print("step %d/%d loss %.3f" % (step, args.max_steps, loss))
    if step % args.save_every == 0:
        path = Path(args.ckpt_dir) / f"step_{step:06d}.pt"
        torch.save(model.state_dict(), path)
"""
TRAINER = """
from transformers import HfArgumentParser, Trainer, TrainingArguments
(training_args,) = HfArgumentParser((TrainingArguments,)).parse_args_into_dataclasses()
trainer = Trainer(args=training_args)
trainer.train({given})
"""
LIGHTNING = "import lightning\ntrainer = lightning.Trainer()\ntrainer.fit(model, ckpt_path=None)\n"


def folder(tmp_path: Path, **files: str) -> Path:
    """A folder of code; `train` is train.py."""
    for name, text in files.items():
        place = tmp_path / f"{name.replace('__', '/')}.py"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return tmp_path


def test_a_script_of_module_values_is_read_with_its_config_file(tmp_path: Path) -> None:
    code = folder(
        tmp_path, train=GLOBALS, model="class GPT: ...", config__small="max_iters = 5000\neval_interval = 250\n"
    )
    found = look(code, "torchrun train.py config/small.py")
    assert found.script == "train.py"
    assert found.saves is not None
    assert (found.saves.value, found.saves.where) == ("ckpt.pt", "train.py:19")
    values = [
        (each.written, each.default)
        for names in (OUT, RESUME, STEP_COUNTS, SAVE_INTERVALS)
        if (each := found.argument(names))
    ]
    assert values == [
        ("--out_dir=", "out"),
        ("--init_from=", "scratch"),
        ("--max_iters=", 5000),
        ("--eval_interval=", 250),
    ]
    assert found.launcher is not None


@pytest.mark.parametrize(
    ("line", "groups"),
    [
        ("iter 12: loss 3.2175, time 590.12ms, mfu 1.00%", {"step": "12", "loss": "3.2175", "step_ms": "590.12"}),
        ("step 250: train loss 3.1, val loss 3.3e-01", {"step": "250", "loss": "3.1", "val": "3.3e-01"}),
    ],
)
def test_the_expressions_for_its_output_match_what_it_prints(tmp_path: Path, line: str, groups: dict[str, str]) -> None:
    found = look(folder(tmp_path, train=GLOBALS))
    matched = [match.groupdict() for each in found.progress if (match := re.search(each.value, line))]
    assert matched == [groups]


def test_a_script_with_argparse_says_settings_cadence_name_signal(tmp_path: Path) -> None:
    found = look(folder(tmp_path, train=ARGPARSE))
    assert found.saves is not None
    assert found.saves.value == "step_{step:06d}.pt"
    assert found.every is not None
    assert found.every.value == "save_every"
    assert found.handles_signal is not None
    assert found.handles_signal.value == "SIGUSR1"
    assert found.wandb is not None
    (progress,) = found.progress
    match = re.search(progress.value, "step 7/3000 loss 2.500")
    assert match is not None
    assert match.groupdict() == {"step": "7", "total": "3000", "loss": "2.500"}
    text = draft("mine", found, folder="../mine").text
    assert "--save-every 500" in text  # off by default: the command asks for it
    assert "--ckpt-dir {checkpoints}" in text
    assert "{args: --resume}" in text.replace("'", "")


@pytest.mark.parametrize(("given", "bare"), [("", True), ("resume_from_checkpoint=True", False)])
def test_a_trainer_that_is_given_no_checkpoint_is_told(tmp_path: Path, given: str, bare: bool) -> None:
    found = look(folder(tmp_path, train=TRAINER.format(given=given)))
    assert found.framework == "hf-trainer"
    assert (found.bare_resume is not None) == bare
    made = draft("mine", found, folder="../mine")
    assert any("GPUFLEET_RESUME_FROM" in sentence for sentence in made.unknown) == bare
    assert "--save_steps 500" in made.text


@pytest.mark.parametrize(
    ("text", "framework"),
    [
        (LIGHTNING, "lightning"),
        ("import litgpt\n", "litgpt"),
        ("import torch.distributed.checkpoint as dcp\n", "dcp"),
        ("from trl import SFTTrainer\ntrainer = SFTTrainer()\ntrainer.train()\n", "hf-trainer"),
        ("import torch\ntorch.save({}, 'a.pt')\n", None),
    ],
)
def test_frameworks_are_told_by_what_is_imported(tmp_path: Path, text: str, framework: str | None) -> None:
    assert look(folder(tmp_path, train=text)).framework == framework


def test_where_two_scripts_look_alike_it_asks_instead_of_guessing(tmp_path: Path) -> None:
    code = folder(tmp_path, train_a="loss.backward()\n", train_b="loss.backward()\n")
    with pytest.raises(GpufleetError, match="--command"):
        look(code)
    assert look(code, "python train_b.py").script == "train_b.py"


def test_a_sole_script_needs_no_telling_name(tmp_path: Path) -> None:
    assert look(folder(tmp_path / "one", mine="trainer.fit(net)\n")).script == "mine.py"
    with pytest.raises(GpufleetError, match=r"which file in .* trains is not clear; say it: --command"):
        look(folder(tmp_path / "none", mine="print('a tool')\n"))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [("missing", None, "no folder"), ("empty", "", "no Python file"), ("torn", "def f(:", "no Python")],
)
def test_a_folder_without_readable_code_is_refused(tmp_path: Path, name: str, text: str | None, said: str) -> None:
    place = tmp_path / name
    if text is not None:
        place.mkdir()
        (place / "readme.txt").write_text("x")
        if text:
            (place / "train.py").write_text(text)
    with pytest.raises(GpufleetError, match=said):
        look(place)


def test_code_is_read_and_never_run(tmp_path: Path) -> None:
    look(folder(tmp_path, train="raise SystemExit('it was run')\nopen('made', 'w')\n"))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("text", [GLOBALS, ARGPARSE, TRAINER.format(given=""), LIGHTNING, "import nanochat\n"])
def test_what_is_written_loads_and_has_a_bill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    folder(tmp_path / "mine", train=text)
    (tmp_path / "project" / "stacks").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "project")
    assert cli.main(["new", "mine", "--code", "../mine"]) == 0
    said = capsys.readouterr().out
    assert "Wrote stacks/mine.yaml." in said
    assert "does not hold" not in said
    assert cli.main(["cost", "mine"]) in (0, 2)  # 2: the bill is shown, and its limits are told to be too low
    assert "compute" in capsys.readouterr().out
    assert cli.main(["new", "mine", "--code", "../mine"]) == 2
    assert "is there already" in capsys.readouterr().err


LOOP = """
import os, torch
path, start = os.path.join(os.environ["GPUFLEET_CHECKPOINTS"], "ckpt.pt"), 0
COUNT = 20_000
for step in tqdm(range(start, COUNT)):
    print(f"step {step} loss {loss.item():.4f}")
    if step % 1000 == 0:
        torch.save({"step": step}, path)
"""


def test_a_loop_says_its_own_count_which_a_rehearsal_cannot_change(tmp_path: Path) -> None:
    found = look(folder(tmp_path, train=LOOP))
    assert found.counted is not None
    assert (found.counted.value, found.counted.where) == ("20000", "train.py:5")
    assert found.saves is not None
    assert found.saves.value == "ckpt.pt"
    made = draft("mine", found, folder="../mine")
    assert made.text.count("steps: 20000") == 2
    assert "every: {steps: 1000}   # train.py:7" in made.text
    assert any("trains all 20000 of train.py:5" in sentence for sentence in made.unknown)
    assert any("GPUFLEET_CHECKPOINTS says where it writes" in sentence for sentence in made.known)
    assert not any("where the script writes" in sentence for sentence in made.unknown)


@pytest.mark.parametrize(("words", "steps"), [("start + 1, 601", "600"), ("1, 601", "600"), ("start, 601", "601")])
def test_a_loop_that_counts_from_one_is_as_long_as_its_last_number(tmp_path: Path, words: str, steps: str) -> None:
    found = look(folder(tmp_path, train=LOOP.replace("start, COUNT", words)))
    assert found.counted is not None
    assert found.counted.value == steps


def test_inputs_that_a_command_names_are_in_the_file_and_asked_for(tmp_path: Path) -> None:
    command = "python train.py {inputs.text}/a.txt {inputs.text} {inputs.model}"
    made = draft("mine", look(folder(tmp_path, train=LOOP)), folder="../mine", command=command)
    assert "  inputs:   # CHECK" in made.text
    assert made.text.count("\n    text: data/text\n    model: data/model\n") == 1
    assert "where the data is: storage.inputs (text, model)" in made.unknown
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks" / "mine.yaml").write_text(made.text)
    load(tmp_path / "stacks" / "mine.yaml", now=datetime.now(UTC))


def test_a_folder_without_a_python_of_its_own_is_asked_for_one(tmp_path: Path) -> None:
    code = folder(tmp_path, train=GLOBALS)
    assert any("rehearsal.python" in sentence for sentence in draft("mine", look(code), folder="../mine").unknown)
    (code / ".venv" / "bin").mkdir(parents=True)
    assert not any("rehearsal.python" in sentence for sentence in draft("mine", look(code), folder="../mine").unknown)
