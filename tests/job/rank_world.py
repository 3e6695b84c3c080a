"""Ranks as processes on gloo, forked from a server that has imported torch already, and a model small enough for them.

`reshard_after_forward` of the run config chooses how the toy is spread: sharded (True) or replicated (False).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import socket
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from gpufleet.job import atomic
from gpufleet.job.experiments.dataset.prepare import publish
from gpufleet.job.experiments.engine import __main__ as trainer
from gpufleet.job.experiments.engine import export, optimizer, parallel
from gpufleet.job.experiments.engine.data import draw, split
from gpufleet.job.experiments.engine.experiment import Experiment, Micro, Phase, Session, Weights, Work
from gpufleet.job.experiments.growth.spec import AdamW
from gpufleet.job.experiments.pretrain.spec import PretrainConfig
from gpufleet.job.kind.common import Rung
from tests.job.train_world import StopAt
from tests.waiting import HANG_S

STEPS, ROWS, LENGTH, VOCAB = 12, 16, 9, 37
WORLDS = 8  # that the processes of one launch form, one after another, at most
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["torch._dynamo", "torch._inductor", "torch.distributed.checkpoint", "gpufleet.job.experiments.engine.__main__"]
)
PARAMETERS: dict[str, Any] = {
    "steps": STEPS,
    "device": "cpu",
    "model": {"layers": 3, "width": 16, "head_dim": 4},
    "data": {"sequence": 8, "characters": 1000},
    "batch": {"rows": ROWS, "micro": 4},
    "precision": {"compute": "fp32"},
    "optim": {"clip": 0.5},
    "checkpoint": {"interval_s": 3600.0},
    "eval": {"every": 4, "windows": 8},
    "log": {"every": 1},
}


class Out(NamedTuple):
    loss_sum: Tensor
    aux: dict[str, Tensor]
    aux_loss: Tensor | None = None


class RankBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 21), nn.Linear(21, 12)  # 21 rows do not divide by 2 or 4

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(F.gelu(self.up(x)))
        return F.dropout(x, 0.1, self.training)


class RankModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 12)
        self.blocks = nn.ModuleList(RankBlock() for _ in range(3))
        self.head = nn.Linear(12, VOCAB)

    def forward(self, tokens: Tensor, targets: Tensor) -> Out:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), reduction="sum")
        return Out(loss, {"seen": torch.bincount(tokens.flatten(), minlength=VOCAB)})


class RankExperiment(Experiment):
    def __init__(self, session: Session) -> None:
        self.session = session
        assert isinstance(session.config, PretrainConfig)
        self.config = session.config
        (self.size,) = session.config.phases()
        self.phases = [
            Phase(
                index=0,
                name=self.size.name,
                first=0,
                steps=self.size.steps,
                flops_per_token=1.0,
                tokens_per_step=ROWS * 8,
            )
        ]
        self.progress: dict[str, Any] = {}
        self.rows = torch.frombuffer(bytearray((session.data / "rows.bin").read_bytes()), dtype=torch.uint8)
        self.rows = self.rows.view(-1, LENGTH).long()

    def begin(self, phase: Phase, previous: nn.Module | None) -> nn.Module:
        torch.manual_seed(self.config.seed)
        return self.spread(RankModel())

    def blank(self, phase: Phase) -> nn.Module:
        return self.spread(RankModel())

    def spread(self, model: RankModel) -> nn.Module:
        if self.config.reshard_after_forward:
            return parallel.shard(model, self.session.world, model.blocks, compute=torch.float32, reshard=True)
        return parallel.replicate(model, self.session.world)

    def optimizer(self, phase: Phase, module: nn.Module) -> Optimizer:
        return optimizer.make([{"params": list(module.parameters()), "weight_decay": 0.1}], AdamW(), seed=1)

    def schedule(self, phase: Phase, opt: Optimizer, step: int) -> float:
        optimizer.set_lr(opt, 1e-2)
        return 1e-2

    def batch(self, phase: Phase, step: int, rung: Rung) -> Work:
        return self.work(draw(self.config.seed, step, ROWS, len(self.rows)), rung)

    def validation(self, phase: Phase, rung: Rung) -> Work:
        return self.work(torch.arange(self.config.eval.windows), rung)

    def work(self, places: Tensor, rung: Rung) -> Work:
        micros = []
        for part in split(len(places), self.session.world, rung.micro):
            assert not part.missing
            rows = self.rows[places[part.rows.start : part.rows.stop]]
            micros.append(Micro((rows[:, :-1], rows[:, 1:]), len(part.rows) * 8, part.rows.start))
        return Work(micros, len(places) * 8)

    def logged(self, aux: dict[str, Tensor]) -> dict[str, Any]:
        return {"seen": int(aux["seen"].sum())}

    def end(self, phase: Phase, module: nn.Module, weights: Weights) -> None:
        whole = parallel.gather(module.state_dict(), self.session.world)
        if self.session.world.first:
            model = RankModel()
            model.load_state_dict(whole)
            export.export(self.session.workdir / "final", model, {})

    def finish(self) -> None:
        pass


def make(workdir: Path, *, sharded: bool, micro: int = 4) -> Path:
    """A work folder for the toy."""
    parameters = {**PARAMETERS, "reshard_after_forward": sharded, "batch": {"rows": ROWS, "micro": micro}}
    workdir.mkdir(parents=True, exist_ok=True)
    rows = torch.randint(0, VOCAB, (64, LENGTH), generator=torch.Generator().manual_seed(7), dtype=torch.uint8)

    def write(folder: Path) -> None:
        (folder / "rows.bin").write_bytes(rows.numpy().tobytes())

    publish(
        workdir / "data",
        kind="characters",
        source="random",
        facts=dict.fromkeys(("train_characters", "validation_characters", "vocab"), 64),
        write=write,
    )
    tree = {"schema": 1, "job": {"experiment": "pretrain-d64", "parameters": parameters}}
    (workdir / "run.json").write_text(json.dumps(tree))
    return workdir


def free_port() -> int:
    """The first of WORLDS free ports in a row: for processes that meet as often. Below those that Linux hands out
    unasked (from 32768): of 125 worlds one found its port taken by a connection of the world before.
    """
    for first in random.SystemRandom().sample(range(20_000, 32_000, WORLDS), 100):
        with ExitStack() as probes, suppress(OSError):
            for port in range(first, first + WORLDS):
                probes.enter_context(socket.socket()).bind(("", port))
            return first
    raise AssertionError("no free ports")


def launched(target: Callable[..., None], size: int, *given: Any) -> list[int | None]:
    """Exit codes of `size` processes that run target(rank, size, port, *given)."""
    port = free_port()
    ranks = [CONTEXT.Process(target=target, args=(rank, size, port, *given), daemon=True) for rank in range(size)]
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(HANG_S)
    finally:
        for process in ranks:
            process.kill()  # no effect on one that has ended
            process.join()
    return [process.exitcode for process in ranks]


def environment(rank: int, size: int, port: int, nodes: int = 1) -> None:
    """As torchrun sets it."""
    here = size // nodes
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank % here),
        LOCAL_WORLD_SIZE=str(here),
        WORLD_SIZE=str(size),
        GROUP_RANK=str(rank // here),
        GROUP_WORLD_SIZE=str(nodes),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )


def of_node(workdir: Path, node: int) -> Path:
    """The work folder of a node: each has a disk of its own."""
    return workdir if node == 0 else workdir.with_name(f"{workdir.name}-node{node}")


def train(
    size: int,
    workdir: Path,
    look: int | None = None,
    *,
    saves: tuple[int, ...] = (),
    broken: str = "",
    others: int | None = 0,
    nodes: int = 1,
) -> int:
    """One start of `size` ranks on `nodes`; the run's exit code. `look`, `saves`: train_world.StopAt, on rank 0;
    `others`: what the other ranks see, which counts only where each of them is on its own.
    """
    for node in range(nodes):
        folder = of_node(workdir, node)
        if not folder.exists():
            shutil.copytree(workdir, folder, ignore=shutil.ignore_patterns("ckpt"))
        (folder / "ended.json").unlink(missing_ok=True)
    looks = (look, *[others] * (size - 1))
    codes = launched(one, size, workdir, looks, saves, broken, nodes)
    if size == 1:
        assert codes[0] is not None
        return codes[0]
    assert codes == [0] * size, codes
    ended = atomic.read_object(workdir / "ended.json")
    assert ended is not None
    code: int = ended["code"]
    return code


def one(
    rank: int,
    size: int,
    port: int,
    workdir: Path,
    looks: tuple[int | None, ...],
    saves: tuple[int, ...],
    broken: str,
    nodes: int = 1,
) -> None:
    """A rank's process."""
    environment(rank, size, port, nodes)
    workdir = of_node(workdir, parallel.expected().node)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
    PretrainConfig.trainer = "tests.job.rank_world:RankExperiment"
    if broken == "disk of rank 1" and rank == 1:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        FileSystemWriter.write_data = full  # type: ignore[method-assign, assignment]
    if broken == "slow rank 0":
        from torch.distributed.checkpoint.filesystem import FileSystem

        clear, make = shutil.rmtree, FileSystem.mkdir

        def slow_clear(*given: Any, **named: Any) -> None:
            time.sleep(0.2)
            clear(*given, **named)

        def slow_make(self: FileSystem, path: str | os.PathLike[str]) -> None:
            existed = Path(path).is_dir()
            time.sleep(0.4 if rank else 0.8)
            if existed and not Path(path).is_dir():
                raise FileExistsError(17, "File exists")  # what pathlib does when it goes between two looks
            make(self, path)

        shutil.rmtree = slow_clear if rank == 0 else clear  # type: ignore[assignment]
        FileSystem.mkdir = slow_make  # type: ignore[method-assign]
    if broken == "count":
        count_sums(workdir, nodes)
    if broken == "compiled":
        from gpufleet.job.experiments.engine import step

        warnings.simplefilter("default")  # dynamo reads .grad of a tensor that is no leaf
        real = torch.compile
        torch.compile = lambda *given, **named: real(*given, **{**named, "backend": "eager"})
        within = step.compiled
        step.compiled = lambda module, device, **named: within(module, torch.device("cuda"), **named)
    sys.exit(trainer.train(workdir, 0, StopAt(workdir, looks[rank], saves=saves)))


def count_sums(workdir: Path, nodes: int) -> None:
    """From here on, a line in sums.txt for each sum of gradients over one rank of each node."""
    real = torch.distributed.all_reduce

    def counted(tensor: Tensor, *given: Any, **named: Any) -> Any:
        group = named.get("group")
        if group is not None and torch.distributed.get_process_group_ranks(group) == [0, 2] and tensor.numel() > 1:
            with (workdir / "sums.txt").open("a") as file:
                file.write(f"{tensor.numel()}\n")
        return real(tensor, *given, **named)

    torch.distributed.all_reduce = counted


def train_on_one_rank(workdir: Path) -> None:
    """A run on one rank, in a process that has nothing else to import."""
    torch.set_num_threads(1)
    sys.exit(trainer.main([str(workdir)]))


if __name__ == "__main__":  # under torchrun
    PretrainConfig.trainer = "tests.job.rank_world:RankExperiment"
    sys.exit(trainer.main())
