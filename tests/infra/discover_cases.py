"""Small folders of training code, each with a command, and the file that `gpufleet new` must write.

`expects`: paths of the written file with a regular expression that the value must match; None: the key is not there.
`says`, `silent`: regular expressions of the sentences and comments.
"""

from __future__ import annotations

from dataclasses import dataclass, field

LOOP = "loss.backward(); optimizer.step(); print(f'step {step} loss {loss.item():.3f}')"


@dataclass(frozen=True, kw_only=True)
class CodeCase:
    """One folder."""

    files: dict[str, str]
    command: str = ""
    expects: dict[str, str | None] = field(default_factory=dict)
    says: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()


def script(save: str, *, head: str = "", arguments: str = "", before: str = "", bound: str = "args.steps") -> str:
    """A script of argparse that saves in a loop of steps."""
    return f"""
import argparse, json, os, pickle, shutil, numpy as np, torch
from pathlib import Path
{head}
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--dest", default="kept")
    {arguments}
    args = parser.parse_args()
    {before}
    for step in range({bound}):
        {LOOP}
        if step % 50 == 0:
            {save}
if __name__ == "__main__":
    main()
"""


DEEPSPEED = {"head": "import deepspeed", "before": "engine, *_ = deepspeed.initialize(args)"}
WRITER = """
import os, torch
class Writer:
    def __init__(self, net, place):
        self.net, self.place = net, place
    def save(self, epoch):
        torch.save({"net": self.net, "epoch": epoch}, os.path.join(self.place, "net-%03d.tar" % epoch))
"""
EPOCHS = """
import argparse, torch
from kit.writer import Writer
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--place", default="x"); parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--resume", default="")
    args = parser.parse_args()
    writer = Writer(None, args.place)
    begin = torch.load(args.resume)["epoch"] if args.resume else 0
    for epoch in range(begin, args.epochs):
        for batch in loader:
            loss.backward(); optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.3f}")
        writer.save(epoch)
main()
"""
BY_STEP_OR_EPOCH = """
import argparse, os
from accelerate import Accelerator
def training_function(config, args):
    accelerator, num_epochs, overall_step = Accelerator(), int(config["num_epochs"]), 0
    by = args.saves_by
    if by is not None and by.isdigit():
        by = int(args.saves_by)
    for epoch in range(num_epochs):
        for step, batch in enumerate(loader):
            accelerator.backward(loss)
            overall_step += 1
            if isinstance(by, int):
                if overall_step % by == 0:
                    accelerator.save_state(os.path.join(args.dest, f"step_{overall_step}"))
        accelerator.print(f"epoch {epoch}:", metric)
        if by == "epoch":
            accelerator.save_state(os.path.join(args.dest, f"epoch_{epoch}"))
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--saves_by", type=str, default=None)
    parser.add_argument("--dest", type=str, default=".")
    config = {"lr": 2e-5, "num_epochs": 3}
    training_function(config, parser.parse_args())
main()
"""
ENDLESS = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--max_steps", type=int, default=-1)
args = parser.parse_args()
step, table, rows = 0, torch.load("./table.bin"), [torch.load("rows/a.bin"), torch.load("rows/b.bin")]
while True:
    loss.backward(); optimizer.step()
    step += 1
    print(f"step {step} last {ep_reward:.2f}")
    if step % 500 == 0:
        torch.save({"step": step}, "newest.pt")
    if args.max_steps >= 0 and step >= args.max_steps:
        break
"""
LIBRARY = """
import os, torch
def fit(options):
    name = os.path.join(options.where, "state.bin")
    begin = torch.load(name)["step"] if os.path.exists(name) else 0
    for step in range(begin, options.rounds):
        loss.backward(); optimizer.step()
        if step % 25 == 0:
            print("round step", step, "loss", loss.item())
            torch.save({"step": step, "optimizer": optimizer.state_dict()}, name)
"""
STARTS_LIBRARY = """
import argparse
from inner import work
if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--where", required=True); p.add_argument("--rounds", type=int, default=700)
    work.fit(p.parse_args())
"""
BY_ENVIRONMENT = """
import os, torch
KEPT, ROUNDS = os.environ.get("KEPT", "out"), int(os.getenv("ROUNDS", "700"))
def main():
    there = sorted(os.listdir(KEPT)) if os.path.isdir(KEPT) else []
    begin = torch.load(os.path.join(KEPT, there[-1]))["step"] if there else 0
    for step in range(begin, ROUNDS):
        loss.backward(); print(f"step {step} loss {loss.item():.3f}")
        if step % 20 == 0:
            torch.save({"step": step}, os.path.join(KEPT, "at-{:04d}.pt".format(step)))
main()
"""
EVERY_50 = 'parser.add_argument("--often", type=int, default=50)'
# The kind of pytorch/examples: distributed/minGPT-ddp. The configuration stands beside the script, and a class has a
# name for where none is given.
BESIDE = """
import hydra, torch
class Trainer:
    def __init__(self, config, net):
        self.config, self.net = config, net
        if self.config.kept_as is None:
            self.config.kept_as = "another.pt"
    def train(self):
        for epoch in range(self.config.epochs):
            loss.backward()
            if epoch % self.config.each == 0:
                torch.save({"net": self.net, "epoch": epoch}, self.config.kept_as)
@hydra.main(config_path=".", config_name="main")
def main(cfg):
    Trainer(cfg["trainer"], 1).train()
if __name__ == "__main__":
    main()
"""
# The kind of distributed/FSDP2 there: helpers of torch.distributed.checkpoint, and torch.save at the end.
HELPERS = """
import time, torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict
class Keeper:
    def save(self, net):
        torch.save(get_model_state_dict(net), f"kept/{int(time.time() * 1000)}/net_state.pt")
for _ in range(30):
    loss.backward()
Keeper().save(net)
"""
LIGHTNING = """
import pytorch_lightning as pl
from pytorch_lightning.callbacks import ModelCheckpoint
keeps = ModelCheckpoint(dirpath="kept", filename="{epoch}-{step}", every_n_train_steps=500)
pl.Trainer(max_steps=2000, callbacks=[keeps]).fit(pl.LightningModule(), ckpt_path="last")
"""
FLAX = """
import argparse, jax
from flax.training import checkpoints
parser = argparse.ArgumentParser()
parser.add_argument("--dest", default="kept")
args = parser.parse_args()
state = checkpoints.restore_checkpoint(args.dest, start())
for step in range(int(state.step), 900):
    loss, grads = jax.value_and_grad(f)(state)
    print(f"step {step}, loss {loss}")
    if step % 90 == 0:
        checkpoints.save_checkpoint(args.dest, state, step)
"""
EVOLVES = """
import argparse, pickle
parser = argparse.ArgumentParser()
parser.add_argument("--rounds", type=int, default=10)
for generation in range(parser.parse_args().rounds):
    print(generation)
"""
SAVES = 'torch.save({"step": step}, f"{args.dest}/at-{step}.pt")'
PLAIN = script(SAVES)
UNCALLED = """
def old(args):
    for step in range(args.steps):
        if step % args.keep_every == 0:
            torch.save({"optimizer": 1, "step": step}, f"{args.dest}/checkpoint-{step}.pt")
"""
AT_STEP = r"^at-\{step\}\.pt$"
GROUPS = {"job.checkpoint.each": AT_STEP, "job.command": r"--dest \{checkpoints\}"}
FIRE = f"""
import fire, torch
def train(folder: str = "kept", steps: int = 800, save_every: int = 40):
    for step in range(steps):
        {LOOP}
        if step % save_every == 0:
            torch.save({{"step": step}}, f"{{folder}}/at-{{step}}.pt")
if __name__ == "__main__":
    fire.Fire(train)
"""
CLICK = f"""
import click, torch
@click.command()
@click.option("--folder", default="kept")
@click.option("--steps", default=800)
def main(folder, steps):
    for step in range(steps):
        {LOOP}
        if step % 40 == 0:
            torch.save({{"step": step}}, f"{{folder}}/at-{{step}}.pt")
if __name__ == "__main__":
    main()
"""
TYPER = f"""
import typer, torch
def main(folder: str = "kept", steps: int = 800):
    for step in range(steps):
        {LOOP}
        if step % 40 == 0:
            torch.save({{"step": step}}, f"{{folder}}/at-{{step}}.pt")
if __name__ == "__main__":
    typer.run(main)
"""
DATACLASS = f"""
import torch, tyro, draccus
from dataclasses import dataclass, field
from transformers import HfArgumentParser
@dataclass
class Saving:
    folder: str = "kept"
@dataclass
class Options:
    steps: int = 800
    saving: Saving = field(default_factory=Saving)
def train(options: Options):
    for step in range(options.steps):
        {LOOP}
        if step % 40 == 0:
            torch.save({{"step": step}}, f"{{options.saving.folder}}/at-{{step}}.pt")
if __name__ == "__main__":
    START
"""
ABSL = f"""
import torch
from absl import app, flags
FLAGS = flags.FLAGS
flags.DEFINE_string("folder", "kept", "")
flags.DEFINE_integer("steps", 800, "")
def main(argv):
    for step in range(FLAGS.steps):
        {LOOP}
        if step % 40 == 0:
            torch.save({{"step": step}}, f"{{FLAGS.folder}}/at-{{step}}.pt")
app.run(main)
"""
COLLECTIONS = f"""
import torch
from absl import app, flags
from ml_collections import config_flags
FLAGS = flags.FLAGS
config_flags.DEFINE_config_file("config")
flags.DEFINE_string("workdir", None, "")
def train(config, workdir):
    for step in range(config.num_train_steps):
        {LOOP}
        if step % config.keep_every == 0:
            torch.save({{"step": step}}, f"{{workdir}}/at-{{step}}.pt")
def main(argv):
    train(FLAGS.config, FLAGS.workdir)
app.run(main)
"""
HYDRA = f"""
import hydra, torch
@hydra.main(config_path="conf", config_name="main")
def main(cfg):
    for step in range(cfg.run.steps):
        {LOOP}
        if step % 40 == 0:
            torch.save({{"step": step}}, f"{{cfg.run.folder}}/at-{{step}}.pt")
main()
"""
FILE = f"""
import sys, torch, yaml
config = yaml.safe_load(open(sys.argv[1]))
for step in range(config["train"]["steps"]):
    {LOOP}
    if step % config["train"]["keep_every"] == 0:
        torch.save({{"step": step}}, f"{{config['train']['folder']}}/at-{{step}}.pt")
"""
METERS = """
import argparse, shutil, torch
def keep(state, is_best, name="newest.pth.tar"):
    torch.save(state, name)
    if is_best:
        shutil.copyfile(name, "best.pth.tar")
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("data"); parser.add_argument("--epochs", default=30, type=int)
    parser.add_argument("--resume", default="", type=str)
    args = parser.parse_args()
    begin = 0
    if args.resume:
        begin = torch.load(args.resume)["epoch"]
    for epoch in range(begin, args.epochs):
        for i, (images, target) in enumerate(loader):
            loss.backward(); optimizer.step()
            print("Epoch: [{}][{}/{}] Loss {:.4e}".format(epoch, i, len(loader), loss.item()))
        keep({"epoch": epoch + 1, "optimizer": optimizer.state_dict()}, False)
if __name__ == "__main__":
    main()
"""
AT_THE_END = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5); parser.add_argument("--keep", default="model.pt")
args = parser.parse_args()
best = None
for epoch in range(1, args.epochs + 1):
    loss.backward(); optimizer.step()
    print("| end of epoch {:3d} | valid loss {:5.2f}".format(epoch, val_loss))
    if not best or val_loss < best:
        with open(args.keep, "wb") as f:
            torch.save(model, f)
        best = val_loss
with open(args.keep, "rb") as f:
    model = torch.load(f)
"""
COUNTED = """
import torch
for i in range(500):
    loss.backward(); print(f"i {i}/500 loss {loss}")
    torch.save({"step": i}, f"kept/step{i:05d}.pt")
"""
PAIR = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--epoch", type=int, default=0, help="to begin from")
parser.add_argument("--n_epochs", type=int, default=20)
opt = parser.parse_args()
if opt.epoch != 0:
    g.load_state_dict(torch.load("kept/%s/g_%d.pth" % ("a", opt.epoch)))
for epoch in range(opt.epoch, opt.n_epochs):
    loss.backward(); optimizer.step()
    print(f"[Epoch {epoch}] loss: {loss}")
    torch.save(g.state_dict(), "kept/%s/g_%d.pth" % ("a", epoch))
    torch.save(d.state_dict(), "kept/%s/d_%d.pth" % ("a", epoch))
"""
SIGNAL = script(
    SAVES, head="import signal\nimport torch.distributed as dist\nsignal.signal(signal.SIGUSR2, lambda *_: None)"
)
ACCELERATE = script(
    'accelerator.save_state(os.path.join(args.dest, f"checkpoint-{step}"))',
    head="from accelerate import Accelerator",
    arguments='parser.add_argument("--go_on_from", default=None); parser.add_argument("--max_train_steps", type=int)',
    before="accelerator = Accelerator(); args.go_on_from and accelerator.load_state(args.go_on_from)",
    bound="args.max_train_steps",
)

HF = """
from transformers import HfArgumentParser, Trainer, TrainingArguments
(told,) = HfArgumentParser((TrainingArguments,)).parse_args_into_dataclasses()
trainer = Trainer(args=told)
"""
CLI = """
from lightning.pytorch.cli import LightningCLI
cli = LightningCLI(Net, Rows{run})
"""
CLI_FILE = """
trainer:
  default_root_dir: null
  max_epochs: 40
  callbacks:
    - class_path: lightning.pytorch.callbacks.LearningRateMonitor
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args:
        dirpath: "${trainer.default_root_dir}/kept"
        filename: "e_{epoch:03d}"
        auto_insert_metric_name: false
    - class_path: lightning.pytorch.callbacks.RichProgressBar
model: {max_steps: 9000}
"""
MERGED = """
import sys, omegaconf, lightning as L
cfg = omegaconf.OmegaConf.merge(omegaconf.OmegaConf.load(sys.argv[1]), omegaconf.OmegaConf.from_dotlist(sys.argv[2:]))
trainer = L.Trainer(default_root_dir=cfg.place, max_steps=cfg.rounds{more})
trainer.fit(net, ckpt_path=cfg.begin)
"""
BEST = """
import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
keeps = ModelCheckpoint(dirpath="kept", filename="{epoch}", monitor="acc", save_last=True)
L.Trainer(max_epochs=30, callbacks=[keeps]).fit(net)
"""
BY_DICTIONARY = """
import argparse, lightning as L
parser = argparse.ArgumentParser()
parser.add_argument("--kept", default="logs"); parser.add_argument("--num_steps", default=9)
told = {"dirpath": find_place(), "filename": "{epoch:06}"}
L.Trainer(max_epochs=30, callbacks=[make("ModelCheckpoint", told)], default_root_dir=parser.parse_args().kept).fit(net)
"""
MMENGINE = """
import argparse
from mmengine.config import Config
from mmengine.runner import Runner
parser = argparse.ArgumentParser()
parser.add_argument("config"); parser.add_argument("--work-dir")
cfg = Config.fromfile(parser.parse_args().config)
Runner.from_cfg(cfg).train()
"""
STATES = script(
    """save(f"w-{step}.safetensors")
            if args.whole: keep_all(args, step)""",
    head="""
from accelerate import Accelerator
def keep_all(args, step):
    accelerator.save_state(os.path.join(args.dest, f"all-{step}"))
""",
    arguments='parser.add_argument("--whole", action="store_true")',
    before="accelerator = Accelerator()\n    def save(name): torch.save(net, os.path.join(args.dest, name))",
)
MOVED = """
import torch
from iopath.common.file_io import g_pathmgr
class Teacher:
    def __init__(self, conf, epochs):
        self.conf, self.epochs = conf, epochs
    def train(self):
        for epoch in range(self.epochs):
            loss.backward()
            self.keep(epoch)
    def keep(self, epoch):
        paths, names = [], ["newest"]
        if epoch in self.extra:
            names.append(f"newest_{epoch}")
        for name in names:
            paths.append(self.conf.save_dir + "/" + f"{name}.pt")
        for path in paths:
            self.write({"optimizer": 1, "epoch": epoch}, path)
    def write(self, state, path):
        part = f"{path}.tmp"
        with g_pathmgr.open(part, "wb") as f:
            torch.save(state, f)
        g_pathmgr.mv(part, path)
"""
BY_PACKAGE = """
import argparse
from hydra import compose, initialize_config_module
from hydra.utils import instantiate
parser = argparse.ArgumentParser(); parser.add_argument("-c", "--config")
with initialize_config_module("kit"):
    instantiate(compose(parser.parse_args().config).teacher).train()
"""
SPREAD = """
import click, os, torch
def loop(place=".", rounds=900):
    for step in range(rounds):
        loss.backward()
        if step % 50 == 0:
            torch.save({"step": step}, os.path.join(place, f"at-{step}.pt"))
@click.command()
@click.option("--dest", default="kept")
@click.option("--flat", is_flag=True)
def main(**words):
    told, c = Box(words), Box()
    if told.flat:
        c.place = told.dest
    else:
        c.place = os.path.join(told.dest, f"{count():05d}-run")
    loop(**c)
main()
"""
STOPPER = """
import argparse, torch
class Stopper:
    def __call__(self, score, net, path):
        self.keep(net, path)
    def keep(self, net, path):
        torch.save(net, path + "/" + "newest.pth")
parser = argparse.ArgumentParser()
parser.add_argument("--kept", default="kept"); parser.add_argument("--train_epochs", type=int, default=7)
parser.add_argument("--itr", type=int, default=1)
args = parser.parse_args()
stopper = Stopper()
for ii in range(args.itr):
    train_steps = len(loader)
    for epoch in range(args.train_epochs):
        loss.backward()
        print(f"Epoch: {epoch}, Steps: {train_steps} | Loss: {loss:.3f}")
        stopper(loss, net, args.kept)
"""
CLOSURE = """
import torch
for_all = None
def main(epochs=30):
    for epoch in range(epochs):
        for itr, batch in enumerate(loader):
            loss.backward()
            def tell():
                print("[%d, %5d] loss: %.3f" % (epoch + 1, itr, loss))
            tell()
        torch.save({"epoch": epoch, "optimizer": 1}, "kept/newest.pt")
main()
"""
ARRAYS = """#!/bin/bash
KEPT=$1
MODEL=(
    --layers 4  # small
    --hidden 8
)
KEEPS=(
    --steps 4000
    --dest $KEPT
)
torchrun --nproc_per_node 8 t.py ${MODEL[@]} \\
    "${KEEPS[@]}"
"""

CASES: dict[str, CodeCase] = {
    # What public repositories of 2026-12 showed
    "the file of a launcher is no script, and states the number of processes": CodeCase(
        files={"t.py": PLAIN, "conf/two.yaml": "num_machines: 1\nnum_processes: 4\n"},
        command="accelerate launch --config_file conf/two.yaml t.py --steps 300",
        expects={
            "job.command": r"^accelerate launch --num_processes \{gpus\} --config_file conf/two\.yaml t\.py --steps",
            "job.checkpoint.each": AT_STEP,
        },
        says=("4 processes",),
    ),
    "a Trainer that saves each epoch is not told to save each 500 steps": CodeCase(
        files={"t.py": HF + "trainer.train(resume_from_checkpoint=told.resume_from_checkpoint)"},
        command="python t.py --num_train_epochs 2 --save_strategy epoch",
        expects={
            "job.checkpoint.every": r"^\{'epochs': 1\}$",
            "job.command": r"epoch --output_dir \{checkpoints\}$",
            "job.resume.args": r"^--resume_from_checkpoint \{checkpoint\}$",
        },
    ),
    "a Trainer whose strategy is unknown has an interval to look at": CodeCase(
        files={"t.py": HF + "trainer.train()"},
        command="python t.py --save_strategy no",
        expects={"job.checkpoint.every": "minutes"},
        says=("CHECK: how often the script saves",),
    ),
    "a Trainer that is given its newest checkpoint if there is one": CodeCase(
        files={
            "t.py": HF
            + "if list(told.output_dir.glob('checkpoint-*')):\n    trainer.train(resume_from_checkpoint=True)\n"
            "else:\n    trainer.train()"
        },
        command="python t.py --max_steps 90",
        expects={"job.resume": None},
        says=("gives train\\(\\) its newest checkpoint",),
        silent=("begins anew",),
    ),
    "words that the parser takes and the script leaves lying do not resume": CodeCase(
        files={"t.py": HF + "trainer.train(model_path=told.place)"},
        command="python t.py --max_steps 90",
        expects={"job.resume": None},
        says=("how the script goes on from a checkpoint",),
    ),
    "GPUs that are listed are no number": CodeCase(
        files={"t.py": PLAIN},
        command="python t.py --devices cuda:0 cuda:1 cuda:2",
        expects={"job.command": r"--devices cuda:0 cuda:1 cuda:2 ", "fleet.instance_types": "g6e.12xlarge"},
    ),
    "a list of one GPU is no number either": CodeCase(
        files={"t.py": PLAIN},
        command="python t.py --gpus 0,",
        expects={"job.command": r"--gpus 0, ", "fleet.instance_types": "g6e.2xlarge"},
    ),
    "a number of an option is not taken for that of the processes": CodeCase(
        files={"go.sh": '#!/bin/sh\ntorchrun --nproc_per_node=8 t.py "$@"\n', "t.py": PLAIN},
        command="./go.sh --batch 8",
        expects={"job.command": r"--batch 8 "},
    ),
    "a bound in a name is no step": CodeCase(
        files={
            "t.py": script(
                'torch.save({"step": step}, os.path.join(args.dest, name, f"at-{step}.pt"))',
                before='name = f"mini_{cfg.max_train_steps}_{cfg.accumulation_steps}"',
            )
        },
        expects={"job.checkpoint.each": r"^mini_\*_\*/at-\{step\}\.pt$"},
    ),
    "an image of PyTorch is not one for other libraries": CodeCase(
        files={"t.py": "import tensorflow as tf\ntf.Model().fit(rows)\n"},
        command="python t.py",
        says=("image: .*CHECK: with tensorflow, which this image of PyTorch lacks",),
    ),
    "an image of PyTorch is one for a script that also uses another library": CodeCase(
        files={"t.py": "import tensorflow as tf\nimport torch\ntf.Model().fit(torch.rand(3))\n"},
        command="python t.py",
        silent=("this image of PyTorch lacks",),
    ),
    "of a latest file and rarer ones with a number the latest": CodeCase(
        files={
            "t.py": script(
                "torch.save({'optimizer': 1}, args.dest + '/net-latest.tar')\n"
                "            if step % 200 == 0: torch.save({'optimizer': 1}, f'{args.dest}/net-{step}.tar')"
            )
        },
        expects={"job.checkpoint.each": r"^net-latest\.tar$", "job.checkpoint.every.steps": "^50$"},
    ),
    "a name that counts saves states no step": CodeCase(
        files={
            "t.py": script('torch.save({"step": step}, f"{args.dest}/m-{step // args.often}.pt")', arguments=EVERY_50)
        },
        expects={"job.checkpoint.each": r"^m-\*\.pt$", "job.checkpoint.rewritten": "True"},
    ),
    "Lightning saves below its logger's folder": CodeCase(
        files={"t.py": MERGED.replace("{more}", ""), "a.yaml": "place: kept\nrounds: 70\nbegin: null\n"},
        command="python t.py a.yaml",
        expects={
            "job.command": r"^python t\.py a\.yaml place=\{checkpoints\}$",
            "job.checkpoint.format": "^lightning$",
            "job.checkpoint.each": r"^\*/\*/checkpoints/\*step=\{step\}\.ckpt$",
            "job.resume.args": r"^begin=\{checkpoint\}$",
            "job.work.steps": "^70$",
        },
        silent=("in which folders",),
    ),
    "which folder that is depends on the logger": CodeCase(
        files={
            "t.py": MERGED.replace("{more}", ", logger=loggers"),
            "a.yaml": "place: kept\nrounds: 70\nbegin: null\n",
        },
        command="python t.py a.yaml",
        says=(r"folder: .*CHECK: t\.py:4 says in which folders below it",),
    ),
    "a LightningCLI takes its file's values by its own words": CodeCase(
        files={"t.py": CLI.replace("{run}", ""), "a.yaml": CLI_FILE},
        command="python t.py fit --config a.yaml --trainer.max_epochs=20",
        expects={
            "job.command": r"--trainer\.default_root_dir \{checkpoints\}$",
            "job.checkpoint.each": r"^kept/\*e_\{epoch:03d\}\*\.ckpt$",
            "job.resume.args": r"^--ckpt_path \{checkpoint\}$",
            "job.work.epochs": "^20$",
            "rehearsal.job.command": r"--trainer\.max_epochs 6 ",
        },
        says=(r"# progress: .*CHECK: a\.yaml:\d+: RichProgressBar prints no line",),
    ),
    "a LightningCLI that does not run by itself takes no checkpoint": CodeCase(
        files={"t.py": CLI.replace("{run}", ", run=False") + "cli.trainer.fit(cli.model)\n", "a.yaml": CLI_FILE},
        command="python t.py --config a.yaml",
        expects={"job.resume": None},
        says=("# resume: .*CHECK",),
    ),
    "of the best and the last the last is the checkpoint": CodeCase(
        files={"t.py": BEST},
        expects={"job.checkpoint.each": r"^last\*\.ckpt$", "job.checkpoint.rewritten": "True"},
    ),
    "a callback that a dictionary makes; a framework's own length precedes others": CodeCase(
        files={"t.py": BY_DICTIONARY},
        expects={"job.checkpoint.each": r"\*epoch=\{epoch:06\}\*\.ckpt$", "job.work.epochs": "^30$"},
        says=(r"CHECK: t\.py:5 says in which folders",),
    ),
    "MMEngine resumes by a file, and its configurations stand on others": CodeCase(
        files={
            "t.py": MMENGINE,
            "c/net.py": "_base_ = ['../base/long.py']\nmodel = dict(depth=18)\n",
            "base/long.py": "train_cfg = dict(max_epochs=70)\ndefault_hooks = dict(checkpoint=dict(interval=2))\n",
        },
        command="python t.py c/net.py",
        expects={
            "job.checkpoint.each": r"^epoch_\{epoch\}\.pth$",
            "job.checkpoint.also": "last_checkpoint",
            "job.checkpoint.every.epochs": "^2$",
            "job.work.epochs": "^70$",
        },
    ),
    "MMEngine by iterations": CodeCase(
        files={
            "t.py": MMENGINE,
            "c.py": "train_cfg = dict(max_iters=700)\ndefault_hooks = dict(checkpoint=dict(interval=20))\n",
        },
        command="python t.py c.py",
        expects={
            "job.checkpoint.each": r"^iter_\{step\}\.pth$",
            "job.checkpoint.every.steps": "^20$",
            "job.work.steps": "^700$",
        },
    ),
    "whole states that an option switches on": CodeCase(
        files={"t.py": STATES},
        command="accelerate launch t.py",
        expects={
            "job.command": r"--whole",
            "job.checkpoint.each": r"^all-\{step\}/$",
            "job.checkpoint.complete": "random_states_0",
        },
        says=("saves this only with --whole",),
    ),
    "a file that is moved, of a list, of a class that a package's configuration names": CodeCase(
        files={
            "kit/go.py": BY_PACKAGE,
            "kit/teacher.py": MOVED,
            "kit/__init__.py": "",
            "kit/conf/a.yaml": "teacher:\n  _target_: kit.teacher.Teacher\n  conf: {save_dir: kept/here}\n"
            "  epochs: 12\n",
        },
        command="python kit/go.py -c conf/a.yaml",
        expects={
            "job.checkpoint.each": r"^newest\.pt$",
            "job.checkpoint.folder": "^kept/here$",
            "job.work.steps": "^12$",
        },
    ),
    "what ** passes, without the branch that is off": CodeCase(
        files={"t.py": SPREAD},
        command="python t.py",
        expects={"job.command": r"--dest \{checkpoints\}", "job.checkpoint.each": r"^\*-run/at-\{step\}\.pt$"},
    ),
    "an object that is called saves; a number of rows is no step, a repetition no length": CodeCase(
        files={"t.py": STOPPER},
        expects={
            "job.command": r"--kept \{checkpoints\}",
            "job.checkpoint.each": r"^newest\.pth$",
            "job.work.steps": "^7$",
            "job.progress.stdout": r"Epoch.*P<step>(?!.*P<(step|batch)>).*Loss",
        },
    ),
    "the batch that a function in the loop tells is no step": CodeCase(
        files={"t.py": CLOSURE}, expects={"job.checkpoint.each": r"^newest\.pt$"}, silent=(r"\?P<step>\\d\+\)\\\]",)
    ),
    "a shell script's arrays, and its first word": CodeCase(
        files={"go.sh": ARRAYS, "t.py": PLAIN},
        command="bash go.sh mine",
        expects={
            "job.command": r"^bash go\.sh \{checkpoints\}$",
            "job.work.steps": "^4000$",
            "job.checkpoint.each": AT_STEP,
            "fleet.instance_types": "g6e.48xlarge",
        },
    ),
    "a shell script that gives Megatron its folder twice": CodeCase(
        files={
            "go.sh": "python t.py --save $1 --load $1 --train-iters 90 --save-interval 30\n",
            "t.py": "from megatron.training import pretrain\npretrain(net)\n",
        },
        command="bash go.sh kept",
        expects={
            "job.command": r"^bash go\.sh \{checkpoints\}$",
            "job.resume": None,
            "job.work.steps": "^90$",
            "job.checkpoint.every.steps": "^30$",
        },
        says=("--load names the output folder",),
        silent=("# resume",),
    ),
    "a loop that tries again is not the training's, and a function of one's own is no library's": CodeCase(
        files={
            "t.py": script(
                "save_model(f'w-{step}', args)",
                head="""
def save_model(name, args):
    for attempt in range(3):
        try:
            return torch.save({"optimizer": 1}, os.path.join(args.dest, name + ".pt"))
        except OSError:
            pass
""",
            )
        },
        expects={"job.work.steps": "^900$", "job.checkpoint.each": r"^w-\{step\}\.pt$", "job.workdir": None},
    ),
    "a reading that a setting has to switch on does not happen by itself": CodeCase(
        files={
            "t.py": BY_ENVIRONMENT.replace(
                '    begin = torch.load(os.path.join(KEPT, there[-1]))["step"] if there else 0',
                "    if cfg['again']: torch.load(os.path.join(KEPT, there[-1]))",
            ).replace("range(begin,", "range("),
            "a.yaml": "again: false\n",
        },
        command="python t.py a.yaml",
        says=("how the script goes on from a checkpoint",),
        silent=("by itself;",),
    ),
    "one function that saves at several places is to be looked at": CodeCase(
        files={
            "t.py": script(
                "keep(args, f'at-{step}.pt')\n        if step % 200 == 0:\n            keep(args, 'newest.pt')",
                head="def keep(args, name):\n    torch.save({'optimizer': 1}, os.path.join(args.dest, name))",
            )
        },
        says=(r"each: .*# CHECK: t\.py:\d+ also saves under other names",),
    ),
    "steps that a list names": CodeCase(
        files={
            "t.py": script(SAVES, arguments='parser.add_argument("--at", nargs="+", default=[])').replace(
                "step % 50 == 0", "step in args.at"
            )
        },
        expects={"job.checkpoint.each": AT_STEP, "job.checkpoint.every.minutes": "10"},
        says=(r"CHECK: how often the script saves.*t\.py:\d+ says when",),
    ),
    "weights for an evaluation are no checkpoint beside those of fvcore's checkpointer": CodeCase(
        files={
            "t.py": script(
                "torch.save({'teacher': net}, os.path.join(args.dest, 'eval', f'run_{step}', 'net_checkpoint.pth'))",
                head="from fvcore.common.checkpoint import Checkpointer, PeriodicCheckpointer",
                before="keeps = PeriodicCheckpointer(Checkpointer(net, args.dest), period=20)",
            )
        },
        expects={
            "job.checkpoint.each": r"^model_\{step\}\*\.pth$",
            "job.checkpoint.also": r"last_checkpoint\*",
            "job.checkpoint.every.steps": "^20$",
        },
    ),
    "a folder above that of the code is not the run's": CodeCase(
        files={"t.py": script('torch.save({"step": step}, f"{here()}/../../kept/at-{step}.pt")')},
        expects={"job.checkpoint.each": AT_STEP, "job.checkpoint.folder": r"^\{checkpoints\}$"},
        says=(r"folder: .*CHECK: t\.py:\d+ writes to \.\./\.\./kept",),
    ),
    "the value that a call gives, not the one for where none is given": CodeCase(
        files={
            "t.py": script(
                'torch.save({"step": step}, f"{place}/at-{step}.pt")',
                head="def default(value, other):\n    return other if value is None else value",
                before='place = default(args.dest, "elsewhere"); often = default(args.steps, 3)',
            )
        },
        expects={"job.command": r"--dest \{checkpoints\}", "job.checkpoint.each": AT_STEP},
    ),
    "hydra's lists of options, and files for the whole configuration": CodeCase(
        files={
            "t.py": HYDRA,
            "conf/main.yaml": "defaults:\n  - extra: [one, two]\nrun: {folder: kept}\n",
            "conf/extra/two.yaml": "# @package _global_\nrun:\n  steps: 66\n",
        },
        command="python t.py",
        expects={"job.command": r"run\.folder=\{checkpoints\}", "job.work.steps": "^66$"},
    ),
    "defaults that are constants, here and in another file": CodeCase(
        files={
            "t.py": script("torch.save(net, f'{args.dest}/step-{step}.pt')", head="from c import LONG\nOUT = 'kept'")
            .replace("default=900", "default=LONG")
            .replace('default="kept"', "default=OUT"),
            "c.py": "LONG = 30 * 100",
        },
        expects={"job.work.steps": "^3000$"},
    ),
    # How the training starts
    "the file with a main that imports a library": CodeCase(
        files={"start.py": STARTS_LIBRARY, "inner/__init__.py": "", "inner/work.py": LIBRARY},
        expects={
            "job.command": r"^python start\.py --where \{checkpoints\}$",
            "job.checkpoint.each": r"^state\.bin$",
            "job.work.steps": "^700$",
            "job.checkpoint.every.steps": "^25$",
            "job.resume": None,
        },
        says=(r"it reads state\.bin by itself; .* \(inner/work\.py:5\)",),
        silent=("how the script goes on from a checkpoint",),
    ),
    "weights that nobody named are read where nothing says how it goes on": CodeCase(
        files={
            "t.py": script(
                'torch.save(model.state_dict(), f"kept/{step}.pth")',
                before='weights = ""\n    if weights: model.load_state_dict(torch.load(weights))',
            )
        },
        expects={"job.checkpoint.each": r"^\{step\}\.pth$", "job.resume": None},
        says=("how the script goes on from a checkpoint",),
    ),
    "a rehearsal saves no more rarely than the command": CodeCase(
        files={
            "t.py": script(
                'if step % args.save_every == 0: torch.save(model.state_dict(), f"kept/{step}.pth")',
                arguments='parser.add_argument("--save_every", type=int, default=2)',
            )
        },
        expects={"rehearsal.job.command": "--save_every 2", "rehearsal.job.checkpoint.every.steps": "^2$"},
    ),
    "a saver that is imported, a converter that is not": CodeCase(
        files={
            "go.py": EPOCHS,
            "kit/__init__.py": "",
            "kit/writer.py": WRITER,
            "kit/convert.py": "import torch\ndef f(n): torch.save(torch.load(n), f'old_{n}_new.pth')",
        },
        command="python go.py --epochs 60",
        expects={
            "job.checkpoint.each": r"^net-\{step:03d\}\.tar$",
            "job.checkpoint.rewritten": None,
            "job.work.steps": "^60$",
            "job.resume.args": r"^--resume \{checkpoint\}$",
            "job.progress.stdout": r"epoch.*\(\?P<step>",
        },
        silent=("convert",),
    ),
    "a function that nothing calls is not read": CodeCase(
        files={"t.py": PLAIN.replace("def main", UNCALLED + "def main").replace("at-{step}.pt", "last.npz")},
        expects={"job.checkpoint.each": r"^last\.npz$"},
    ),
    "a shell script that passes its words on": CodeCase(
        files={
            "go.sh": '#!/bin/sh\nN=${1:-2}\nshift\nexec torchrun --nproc_per_node="$1" t.py "$@"\n',
            "t.py": PLAIN,
            "a.py": "x = 1",
        },
        command="bash go.sh --steps 300",
        expects={"job.command": r"--dest \{checkpoints\}$", "job.work.steps": "^300$", "job.checkpoint.each": AT_STEP},
    ),
    "a shell script that passes nothing on": CodeCase(
        files={"go.sh": "#!/bin/sh\npython t.py --steps 300\n", "t.py": PLAIN},
        command="./go.sh",
        expects={"job.command": r"^\./go\.sh$", "job.work.steps": "^300$"},
        says=(r"go\.sh:2 does not pass on words that are added",),
    ),
    "nanochat's folder follows from its depth and a variable": CodeCase(
        files={
            "scripts/base_train.py": "import argparse\nfrom nanochat.gpt import GPT\np = argparse.ArgumentParser()\n"
            "p.add_argument('--depth', type=int, default=20)\np.add_argument('--num-iterations', type=int)\n"
            "p.add_argument('--model-tag', default=None)\np.parse_args()\nGPT(); loss.backward()\n"
        },
        command="torchrun --nproc_per_node=8 -m scripts.base_train --depth=12 --num-iterations=500",
        expects={
            "job.env.NANOCHAT_BASE_DIR": r"^\{state\}$",
            "job.checkpoint.folder": r"^\{state\}/base_checkpoints/d12$",
        },
    ),
    "a target of a Makefile": CodeCase(
        files={"Makefile": "S ?= 100\nall: x\n\ntrain:\n\tpython t.py --steps $(S)\n", "t.py": PLAIN},
        command="make train S=400",
        expects={"job.work.steps": "^400$", "job.checkpoint.each": AT_STEP},
    ),
    "a console script of pyproject.toml": CodeCase(
        files={
            "pyproject.toml": '[project]\nname = "a"\n[project.scripts]\nteach = "pack.cli:main"\n',
            "src/pack/__init__.py": "",
            "src/pack/cli.py": PLAIN,
        },
        command="teach --steps=200",
        expects={**GROUPS, "job.work.steps": "^200$"},
    ),
    "a module, by a launcher": CodeCase(
        files={"pack/__init__.py": "", "pack/run.py": PLAIN},
        command="torchrun --nproc_per_node=gpu -m pack.run --steps 60",
        expects={**GROUPS, "job.work.steps": "^60$"},
    ),
    "what the image of a Dockerfile starts": CodeCase(
        files={"Dockerfile": 'FROM x\nCMD ["python", "b.py", "--steps", "70"]\n', "a.py": PLAIN, "b.py": PLAIN},
        expects={"job.command": r"^python b\.py", "job.work.steps": "^70$"},
    ),
    "a program that is not the folder's": CodeCase(
        files={"data.yaml": "train: images\n"},
        command="yolo train data=data.yaml epochs=12",
        expects={
            "job.command": r"project=\{checkpoints\}",
            "job.checkpoint.each": r"weights/last\.pt",
            "job.resume.args": r"^model=\{checkpoint\} resume=True$",
            "job.work.epochs": "^12$",
        },
    ),
    "a program that nobody knows": CodeCase(
        files={"data.yaml": "train: images\n"},
        command="teachify data.yaml",
        expects={"job.command": "^teachify", "job.checkpoint.format": "^none$"},
        says=("whether the script saves",),
    ),
    # The typed command
    "values that were typed, and accelerate's own save": CodeCase(
        files={"t.py": ACCELERATE},
        command="accelerate launch t.py --max_train_steps=1200 --dest=elsewhere",
        expects={
            "job.command": r"--dest \{checkpoints\}",
            "job.work.steps": "^1200$",
            "job.checkpoint.each": r"^checkpoint-\{step\}/$",
            "job.checkpoint.complete": "random_states_0",
            "job.resume.args": r"^--go_on_from \{checkpoint\}$",
        },
        silent=("elsewhere",),
    ),
    "of two ways to save the one that was typed, epochs; their number stands in a dictionary": CodeCase(
        files={"t.py": BY_STEP_OR_EPOCH},
        command="accelerate launch t.py --saves_by epoch",
        expects={
            "job.checkpoint.each": r"^epoch_\{step\}/$",
            "job.checkpoint.every": "'steps': 1",
            "job.progress.stdout": r"\?P<step>",
            "job.work.steps": "^3$",
            "rehearsal.job.work.steps": "^3$",
            "rehearsal.job.checkpoint.every": "'steps': 1",
        },
    ),
    "of two ways to save the one that was typed, steps": CodeCase(
        files={"t.py": BY_STEP_OR_EPOCH},
        command="accelerate launch t.py --saves_by 200",
        expects={
            "job.checkpoint.each": r"^step_\{step\}/$",
            "job.checkpoint.every": "'steps': 200",
            "job.work.epochs": "^3$",
            "job.work.steps_per_epoch": "^1000$",
            "rehearsal.job.command": "--saves_by 10 ",
            "rehearsal.job.checkpoint.every": "'steps': 10",
        },
    ),
    "names that count steps are no epochs, though only epochs are told": CodeCase(
        files={"t.py": BY_STEP_OR_EPOCH.replace('int(config["num_epochs"])', "ask()")},
        command="accelerate launch t.py --saves_by 200",
        expects={
            "job.work": None,
            "rehearsal.job.work.epochs": None,
            "rehearsal.job.work.steps": "^60$",
            "rehearsal.job.command": "--saves_by 10 ",
            "rehearsal.job.checkpoint.every": "'steps': 10",
        },
    ),
    "processes that were typed": CodeCase(
        files={"t.py": PLAIN},
        command="torchrun --standalone --nproc-per-node 4 t.py",
        expects={"job.command": r"--nproc-per-node \{gpus\}"},
        says=("4 processes", r"g6e\.12xlarge has 4"),
    ),
    "processes that a script fixes": CodeCase(
        files={"go.sh": '#!/bin/sh\ntorchrun --nproc_per_node=8 t.py "$@"\n', "t.py": PLAIN},
        command="./go.sh",
        expects={"fleet.instance_types": r"g6e\.48xlarge"},
        says=(r"go\.sh:2 starts 8 processes",),
    ),
    "a signal of clusters": CodeCase(
        files={"t.py": SIGNAL},
        command="accelerate launch t.py",
        expects={"job.stop": None},
        says=("SIGUSR2", "signals-to-handle"),
    ),
    # Settings
    "fire": CodeCase(
        files={"t.py": FIRE},
        expects={
            "job.command": r"--folder=\{checkpoints\}",
            "job.work.steps": "^800$",
            "job.checkpoint.every.steps": "^40$",
        },
    ),
    "click": CodeCase(
        files={"t.py": CLICK}, expects={"job.command": r"--folder \{checkpoints\}", "job.work.steps": "^800$"}
    ),
    "typer": CodeCase(
        files={"t.py": TYPER}, expects={"job.command": r"--folder \{checkpoints\}", "job.work.steps": "^800$"}
    ),
    "tyro": CodeCase(
        files={"t.py": DATACLASS.replace("START", "train(tyro.cli(Options))")},
        command="python t.py --steps 90",
        expects={"job.command": r"--saving\.folder \{checkpoints\}", "job.work.steps": "^90$"},
    ),
    "draccus": CodeCase(
        files={"t.py": DATACLASS.replace("START", "train()").replace("def train", "@draccus.wrap()\ndef train")},
        expects={"job.command": r"--saving\.folder=\{checkpoints\}", "job.work.steps": "^800$"},
    ),
    "absl": CodeCase(
        files={"t.py": ABSL}, expects={"job.command": r"--folder=\{checkpoints\}", "job.work.steps": "^800$"}
    ),
    "ml_collections": CodeCase(
        files={
            "t.py": COLLECTIONS,
            "conf/a.py": "def get_config():\n  config = D()\n  config.num_train_steps = 77\n  config.keep_every = 11\n",
        },
        command="python t.py --workdir=w --config=conf/a.py",
        expects={
            "job.command": r"--workdir=\{checkpoints\}",
            "job.work.steps": "^77$",
            "job.checkpoint.every.steps": "^11$",
        },
    ),
    "hydra": CodeCase(
        files={
            "t.py": HYDRA,
            "conf/main.yaml": "defaults:\n  - run: short\n",
            "conf/run/short.yaml": "steps: 66\nfolder: kept\n",
            "conf/run/long.yaml": "steps: 660\nfolder: kept\n",
        },
        command="python t.py run=long",
        expects={"job.command": r"run\.folder=\{checkpoints\}", "job.work.steps": "^660$"},
    ),
    "a configuration file that the command names": CodeCase(
        files={"t.py": FILE, "a.yaml": "train:\n  steps: 55\n  keep_every: 5\n  folder: kept/here\n"},
        command="python t.py a.yaml",
        expects={"job.checkpoint.folder": "^kept/here$", "job.work.steps": "^55$", "job.checkpoint.every.steps": "^5$"},
    ),
    # Saves
    "a rename leads to its target": CodeCase(
        files={
            "t.py": script(
                'torch.save({}, args.dest + "/part"); os.replace(args.dest + "/part", args.dest + "/last.pt")'
            )
        },
        expects={"job.checkpoint.each": r"^last\.pt$", "job.checkpoint.rewritten": "true|True"},
    ),
    "numpy": CodeCase(
        files={"t.py": script('np.savez(os.path.join(args.dest, "w_{:04d}.npz".format(step)), a=1)')},
        expects={"job.checkpoint.each": r"^w_\{step:04d\}\.npz$"},
    ),
    "json, into a file that is opened": CodeCase(
        files={
            "t.py": script(
                'with open(f"{args.dest}/state-{step}.json", "w") as f: json.dump({"step": step, "optimizer": 1}, f)'
            )
        },
        expects={"job.checkpoint.each": r"^state-\{step\}\.json$"},
    ),
    "pickle, by a path object": CodeCase(
        files={"t.py": script('pickle.dump({"step": step}, (Path(args.dest) / f"s{step}.pkl").open("wb"))')},
        expects={"job.checkpoint.each": r"^s\{step\}\.pkl$"},
    ),
    "safetensors in a folder of each step": CodeCase(
        files={"t.py": script('save_file(state, os.path.join(args.dest, f"step-{step}", "model.safetensors"))')},
        expects={"job.checkpoint.each": r"^step-\{step\}/$"},
    ),
    "a name that a loop counts": CodeCase(
        files={"t.py": COUNTED},
        expects={
            "job.checkpoint.each": r"^step\{step:05d\}\.pt$",
            "job.checkpoint.folder": "^kept$",
            "job.work.steps": "^500$",
        },
    ),
    "two files of one checkpoint, and an epoch to begin from": CodeCase(
        files={"t.py": PAIR},
        expects={
            "job.checkpoint.each": r"g_\{step\}\.pth', 'd_\{step\}\.pth|g_\{step\}\.pth.*d_\{step\}\.pth",
            "job.checkpoint.folder": "^kept/a$",
            "job.resume.args": r"^--epoch \{(step|epoch)\}$",
        },
    ),
    "a script that saves where it starts, in epochs and batches": CodeCase(
        files={"t.py": METERS},
        command="python t.py data",
        expects={
            "job.workdir": r"\{checkpoints\}",
            "job.command": r"^python \{code\}/t\.py",
            "job.checkpoint.each": r"^newest\.pth\.tar$",
            "job.work.epochs": "^30$",
            "job.checkpoint.every.epochs": "^1$",
            "job.resume.args": r"--resume \{checkpoint\}",
            "job.progress.stdout": r"P<epoch>.*P<batch>.*P<batches>.*P<loss>",
        },
    ),
    "what is read at the end is no resume": CodeCase(
        files={"t.py": AT_THE_END},
        expects={
            "job.checkpoint.each": r"^model\.pt$",
            "job.command": r"--keep \{checkpoints\}/model\.pt",
            "job.resume": None,
        },
        says=("how the script goes on from a checkpoint",),
        silent=("by itself;",),
    ),
    "a script that saves at its end alone": CodeCase(
        files={"t.py": "for step in range(300):\n    loss.backward()\ntorch.save(model, 'model.pt')\n"},
        expects={"job.checkpoint.format": "^none$"},
        says=(r"t\.py:3 saves only model\.pt",),
    ),
    "a script that saves nothing": CodeCase(
        files={"t.py": "for step in range(300):\n    loss.backward()\n    print('step', step, 'loss', loss.item())\n"},
        expects={"job.checkpoint.format": "^none$", "job.work.steps": "^300$"},
        says=("no code of the command saves",),
        silent=("CHECK: allowed",),
    ),
    "an option -n of a script is no number of processes, and no rounds are asked for by default": CodeCase(
        files={
            "t.py": script(
                "torch.save({'step': step}, f'{args.dest}/{step}.pt')",
                arguments='parser.add_argument("-n", "--n-timesteps", type=int, default=-1)',
                before="step = args.n_timesteps",
                bound="args.n_timesteps",
            )
        },
        command="python t.py -n 20000",
        expects={
            "job.command": "-n 20000",
            "job.work.steps": "^20000$",
            "rehearsal.job.command": "--n-timesteps 150",
            "fleet.instance_types": "g6e.2xlarge",
        },
    ),
    "a training that ends only where it is asked to is rehearsed by that": CodeCase(
        files={"t.py": ENDLESS, "table.bin": "1", "rows/a.bin": "1", "rows/b.bin": "1"},
        expects={
            "job.command": r"^ln -sfn \{code\}/table\.bin \{code\}/rows \. && python \{code\}/t\.py$",
            "job.work": None,
            "job.checkpoint.each": r"^newest\.pt$",
            "job.workdir": r"^\{checkpoints\}$",
            "job.progress.stdout": r"^(?!.*P<epoch>).*P<step>",
            "rehearsal.job.command": "--max_steps 1500",
        },
        says=(r"workdir: '\{checkpoints\}'   # CHECK: .* own files there: .*\d+ looks for table\.bin; .* rows/b\.bin",),
    ),
    "variables of the environment are settings, typed before the command or not": CodeCase(
        files={"t.py": BY_ENVIRONMENT},
        command="KEPT=mine python t.py",
        expects={
            "job.command": r"^KEPT=\{checkpoints\} python t\.py$",
            "job.checkpoint.folder": None,
            "job.checkpoint.each": r"^at-\{step:04d\}\.pt$",
            "job.work.steps": "^700$",
            "rehearsal.job.command": r"^ROUNDS=\d+ KEPT=\{checkpoints\} python t\.py$",
        },
        says=("it reads at-.* by itself",),
    ),
    "a line that is printed in several arguments tells its step": CodeCase(
        files={"t.py": "for i in range(300):\n    loss.backward()\n    print('Step:', i, 'lr', 1)\n"},
        expects={"job.progress.stdout": r"Step:.*P<step>"},
    ),
    "a launcher of Lightning's Fabric starts a script": CodeCase(
        files={"t.py": PLAIN},
        command="fabric run t.py --devices=2 --steps 400",
        expects={**GROUPS, "job.work.steps": "^400$"},
    ),
    "the one program that an image starts is meant, whatever it is called": CodeCase(
        files={
            "Dockerfile": 'FROM python\nENTRYPOINT ["python", "app/evolve.py"]\nCMD ["--rounds", "90"]\n',
            "app/evolve.py": EVOLVES,
            "app/other.py": EVOLVES,
        },
        expects={"job.command": r"^python app/evolve\.py --rounds 90"},
    ),
    "a Trainer whose script parses nothing gets no words": CodeCase(
        files={
            "t.py": 'from transformers import Trainer, TrainingArguments as Told\nTrainer(args=Told("o")).train()\n'
        },
        expects={"rehearsal.job.command": r"^python t\.py$"},
    ),
    "what a command is told stands beside the program that trains": CodeCase(
        files={
            "t.py": script(SAVES, arguments=EVERY_50).replace("% 50", "% args.often"),
            "before.py": "1",
            "after.py": "1",
        },
        command="python before.py && python t.py --steps 400; python after.py",
        expects={
            "job.command": r"^python before\.py && python t\.py --steps 400 --dest \{checkpoints\}; python after\.py$",
            "rehearsal.job.command": r"--dest \{checkpoints\} --often 10; python after\.py$",
            "job.resume.args": None,
        },
    ),
    "words that resume would go to the last program, so they are asked for": CodeCase(
        files={"t.py": EPOCHS, "kit/__init__.py": "", "kit/writer.py": WRITER, "after.py": "1"},
        command="python t.py && python after.py",
        expects={"job.resume": None},
        says=(r"# resume: .*CHECK: the last program would get these",),
    ),
    "a script that uses a framework has none of the words of its program": CodeCase(
        files={"t.py": "from ultralytics import YOLO\nYOLO('n').train(data='d', epochs=50, project='runs')\n"},
        expects={
            "job.command": r"^python t\.py$",
            "job.checkpoint.folder": "^runs$",
            "job.work.epochs": "^50$",
            "job.checkpoint.every.epochs": "^1$",
            "job.resume": None,
        },
    ),
    "a script that asks for its checkpoint as the node says it": CodeCase(
        files={
            "t.py": "import os\nfrom lightning.pytorch import Trainer\n"
            "Trainer(max_steps=90).fit(net, ckpt_path=os.environ.get('GPUFLEET_RESUME_FROM'))\n"
        },
        command="python t.py",
        expects={"job.checkpoint.format": "^lightning$"},
        says=("it reads .GPUFLEET_RESUME_FROM",),
        silent=("how it goes on",),
    ),
    "Lightning's callback says where, how often and under which names": CodeCase(
        files={"t.py": LIGHTNING},
        expects={
            "job.checkpoint.folder": "^kept$",
            "job.checkpoint.every.steps": "^500$",
            "job.work.steps": "^2000$",
            "job.resume": None,
        },
        says=("last is its checkpoint",),
    ),
    "a value that stands where none is given does not hide the configuration's": CodeCase(
        files={"t.py": BESIDE, "main.yaml": "trainer:\n  kept_as: mine.pt\n  epochs: 40\n  each: 3\n"},
        command="torchrun --nnodes 2 --nproc-per-node 8 t.py",
        expects={
            "job.checkpoint.each": r"^mine\.pt$",
            "job.command": r"trainer\.kept_as=\{checkpoints\}/mine\.pt$",
            "job.work.steps": "^40$",
        },
    ),
    "what a tracker gets is not printed": CodeCase(
        files={
            "t.py": "import torch, wandb\nfor epoch in range(90):\n    for batch in data:\n        loss.backward()\n"
            "    print(f'epoch {epoch}:', figures)\n"
            "    wandb.log({'train_loss': loss.item(), 'epoch': epoch})\n    torch.save(net, f'w-{epoch}.pt')\n"
        },
        command="python t.py",
        expects={"job.progress.stdout": r"^\['epoch\\\\s\+\(\?P<step>"},
    ),
    "a launcher's option names a file of the folder, which is not the script": CodeCase(
        files={"t.py": script("torch.save(net, f'{args.dest}/w-{step}.pt')"), "two.yaml": "num_machines: 2\n"},
        command="accelerate launch --config_file two.yaml t.py",
        expects={"job.checkpoint.each": r"^w-\{step\}\.pt$", "job.command": r" t\.py --dest \{checkpoints\}$"},
    ),
    "a script with a loop of its own tells its step by its own lines": CodeCase(
        files={
            "t.py": "import deepspeed\nengine = deepspeed.initialize(model=net)\nfor step in range(90):\n"
            "    engine.backward(loss); engine.step(); print(f'step {step} loss {loss.item():.3f}')\n"
            "    if step % 9 == 0:\n        engine.save_checkpoint('kept', tag=f'global_step{step}')\n"
        },
        command="python t.py",
        expects={"job.progress.stdout": r"^\['step\\\\s\+\(\?P<step>"},
    ),
    **{
        f"DeepSpeed's engine saves {what}": CodeCase(
            files={"t.py": script(f"engine.save_checkpoint({given})", **DEEPSPEED), "hosts": "node-1 slots=8\n"},
            command="deepspeed --hostfile hosts --num_nodes 2 t.py",
            expects={
                "job.command": r" t\.py --dest \{checkpoints\}$",
                "job.checkpoint.format": "^deepspeed$",
                "job.checkpoint.each": each,
                "job.checkpoint.also": also,
                "job.checkpoint.every.steps": "^50$",
            },
        )
        for what, given, each, also in (
            ("under a tag of its own", "args.dest", None, None),
            ("under a tag that is equal", "args.dest, f'global_step{step}'", None, None),
            ("under another tag", "save_dir=args.dest, tag=f'at-{step}'", r"^at-\{step\}/$", None),
            ("under the number alone", "args.dest, step, {'step': step}", r"^\{step\}/$", None),
            (
                "into a folder below",
                "os.path.join(args.dest, 'all'), client_state={'step': step}",
                r"^all/global_step\{step\}/$",
                r"^\['all/latest'\]$",
            ),
        )
    },
    "a save_checkpoint of the script's own is not DeepSpeed's": CodeCase(
        files={
            "t.py": script(
                "Keeper().save_checkpoint(args.dest, step)",
                before=DEEPSPEED["before"],
                head="import deepspeed\nfrom kit import Keeper",
            ).replace(LOOP, "engine.step()"),
            "kit.py": "import torch\nclass Keeper:\n    def save_checkpoint(self, place, step):\n"
            "        torch.save({'optimizer': 1}, f'{place}/w{step}.pt')\n",
        },
        command="deepspeed t.py",
        expects={
            "job.checkpoint.format": None,
            "job.checkpoint.each": r"^w\{step\}\.pt$",
            "job.progress.format": "^deepspeed$",
        },
    ),
    "shards of torch.distributed.checkpoint are called so under a name of the script's": CodeCase(
        files={
            "t.py": script(
                "dcp.save(state, checkpoint_id=f'{args.dest}/at-{step}')",
                head="import torch.distributed.checkpoint as dcp",
            )
        },
        expects={
            "job.checkpoint.format": "^dcp$",
            "job.checkpoint.each": r"^at-\{step\}/$",
            "job.progress.stdout": r"\(\?P<step>",
        },
    ),
    "helpers of a framework are not its checkpoints": CodeCase(
        files={"t.py": HELPERS},
        command="torchrun --nnodes 2 --nproc-per-node 8 t.py",
        expects={"job.checkpoint.format": "^none$"},
        says=(r"saves only net_state\.pt",),
    ),
    "a call that looks for a checkpoint by itself needs no words": CodeCase(
        files={"t.py": FLAX},
        command="python t.py --dest mine",
        says=("restore_checkpoint looks for a checkpoint by itself",),
        silent=("# resume",),
    ),
    "a file that the command names precedes the defaults in the code": CodeCase(
        files={
            "t.py": script("torch.save({'step': step}, f'{args.dest}/at-{step}.pt')"),
            "conf/own.yaml": "steps: 4000\n",
        },
        command="python t.py --config conf/own.yaml",
        expects={"job.work.steps": "^4000$", "job.command": r"--dest \{checkpoints\}"},
    ),
    "a program of a framework gets settings as it takes them, and its file's values": CodeCase(
        files={"sft.yaml": "output_dir: saves/own\nsave_steps: 250\nmax_steps: 900\nresume_from_checkpoint: null\n"},
        command="llamafactory-cli train sft.yaml",
        expects={
            "job.command": r"^llamafactory-cli train sft\.yaml output_dir=\{checkpoints\}( save_steps=250)?$",
            "job.resume.args": r"^resume_from_checkpoint=\{checkpoint\}$",
            "job.checkpoint.format": "^hf-trainer$",
            "job.checkpoint.every.steps": "^250$",
            "job.work.steps": "^900$",
            "rehearsal.job.command": "max_steps=",
        },
    ),
    "a meter's newest value is a loss of the training": CodeCase(
        files={
            "t.py": script("torch.save({'step': step}, f'{args.dest}/at-{step}.pt')").replace(
                "print(f'step {step} loss {loss.item():.3f}')",
                "log.info(f'Train: [{step}/{args.steps}] time {took.val:.2f} ({took.avg:.2f}) "
                "loss {losses.val:.4f} ({losses.avg:.4f})')",
            )
        },
        command="python t.py",
        expects={"job.progress.stdout": r"^(?!.*P<val>).*P<loss>"},
    ),
    "values of yacs are those of its file and of the code, and an option sets one of its name": CodeCase(
        files={
            "t.py": script(
                "torch.save({'step': step}, os.path.join(cfg.OUTPUT, f'at-{step}.pt'))",
                head="from defaults import cfg",
                arguments="parser.add_argument('--cfg'); parser.add_argument('--output')",
                before="cfg.merge_from_file(args.cfg); cfg.OUTPUT = args.output or cfg.OUTPUT",
                bound="cfg.TRAIN.STEPS",
            ).replace("step % 50", "step % cfg.SAVE_FREQ"),
            "defaults.py": "from yacs.config import CfgNode as CN\n_C = CN()\n_C.TRAIN = CN()\n"
            "_C.TRAIN.STEPS = 900\n_C.SAVE_FREQ = 20\n_C.OUTPUT = ''\ncfg = _C.clone()\n",
            "big.yaml": "TRAIN:\n  STEPS: 5000\n",
        },
        command="python t.py --cfg big.yaml",
        expects={
            "job.work.steps": "^5000$",
            "job.checkpoint.every.steps": "^20$",
            "job.command": r"--output \{checkpoints\}$",
        },
    ),
}
