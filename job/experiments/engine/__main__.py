"""`python -m gpufleet.job.experiments.engine WORKDIR --rung N`: trains as WORKDIR/run.json says, from the newest
checkpoint in WORKDIR/ckpt.

With --wait the program imports what it needs, and begins when start.json exists, which names the rung.

Exit codes: 0 finished; 75 stopped on request; 69 out of memory (rung.json names the next rung); 65 cannot succeed, the
reason in fatal.json; 71 this node is refused, the reason in preflight.json; 72 the newest checkpoint cannot be read
(unreadable.json names its step); any other code is a crash, or means that another trainer uses WORKDIR.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError

from gpufleet.job.contract.codes import TrainerExit
from gpufleet.job.contract.messages import Ended, Fatal, Message, Preflight, Unreadable, await_start
from gpufleet.job.contract.run import Task
from gpufleet.job.contract.workdir import ACCEPT, CHECKPOINTS, DATA, INPUTS, LOCK, METRICS, START
from gpufleet.job.experiments.dataset.prepare import describe, read_manifest
from gpufleet.job.experiments.engine import device, parallel, preflight
from gpufleet.job.experiments.engine.checkpoint import CheckpointDamagedError, Checkpoints
from gpufleet.job.experiments.engine.experiment import Experiment, Session, Stopped
from gpufleet.job.experiments.engine.loop import Loop
from gpufleet.job.experiments.engine.metrics import MetricsFile
from gpufleet.job.experiments.engine.parallel import World
from gpufleet.job.experiments.engine.requests import Requests
from gpufleet.job.experiments.spec import ExperimentConfig
from gpufleet.job.kind import JobConfig
from gpufleet.job.kind.common import PhaseSize
from gpufleet.job.kind.job import named
from gpufleet.job.text import printable

SHORT_OF_MEMORY = (  # out-of-memory messages of libraries, each as parts that all occur in it, in lower case
    ("cuda", "out of memory"),  # in messages of the driver and Triton
    ("cublas_status_alloc_failed",),
    # from the creation of a handle; the backward pass creates another handle
    ("cublas_status_not_initialized", "create("),
    ("device_allocation_failed",),  # cuDNN 9
    # from NCCL, whose last error names the call and not its reason; this call allocates memory
    ("failed to cuda malloc",),
    ("failed to cuda calloc",),  # NCCL too, when the first collective runs, within a step
)


def main(argv: Sequence[str] | None = None) -> int:
    """One start of the trainer; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m gpufleet.job.experiments.engine", description=__doc__)
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--rung", type=int, default=0, help="rung of the micro-batch ladder (job/kind)")
    parser.add_argument("--wait", action="store_true", help=f"for WORKDIR/{START}")
    args = parser.parse_args(argv)
    # the warning is not needed, because a single process is intended
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
    # One core is left for the supervisor and for saves, because waiting threads use their cores.
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))
    requests = Requests(args.workdir)
    requests.heed_signals()
    if args.wait:
        with suppress(ValueError):  # the problem is reported below
            imported(Task.read(args.workdir).config)
        args.rung = await_start(args.workdir)
    return train(args.workdir, args.rung, requests)


def train(workdir: Path, rung: int, requests: Requests) -> int:
    """Trains; returns the exit code."""
    world = parallel.expected()
    try:
        run = Task.read(workdir)
        with workdir_lock(workdir):
            world = parallel.join(run.config.device)
            experiment, session = start(run, workdir, rung, requests, world)
            while not Loop(session, experiment).run():
                del experiment  # frees the weights before the next try makes new ones
                session.device.tidy()
                checkpoints = Checkpoints(workdir / CHECKPOINTS, config_sha256=run.digest, world=world)
                session = dataclasses.replace(session, checkpoints=checkpoints)
                experiment = imported(run.config)(session)
    except Stopped:
        code = TrainerExit.STOPPED
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        say(f"out of memory: {str(error).splitlines()[0]}")
        code = TrainerExit.OUT_OF_MEMORY
    except WorkdirBusyError as error:
        say(str(error))
        return TrainerExit.CRASHED  # nothing is written, because another trainer uses the folder
    except device.PeerRefusedError as error:
        say(f"another node is refused: {error}")
        code = TrainerExit.CRASHED
    except (device.NodeRefusedError, OSError) as error:  # an OSError comes from the node's disk
        if not isinstance(error, device.NodeRefusedError):
            say(traceback.format_exc())
        say(f"this node is refused: {error}")
        code = TrainerExit.REFUSED
        if (workdir / ACCEPT).exists():  # other nodes were refused before, so this node is not the cause
            note(workdir, Fatal(error=type(error).__name__, detail=str(error)))
            code = TrainerExit.FATAL
        elif not (Preflight.read(workdir) or Preflight()).problems:
            note(workdir, Preflight(problems=(str(error),)))
    except CheckpointDamagedError as error:
        note(workdir, Unreadable(step=error.step, problem=str(error)))
        say(f"{error}; the next start takes the checkpoint before it, if there is one")
        code = TrainerExit.UNREADABLE
    # An error of reading or writing in a library would be the same on another node.
    except (ValueError, SafetensorError) as error:
        say(f"fatal: {error}")
        if workdir.is_dir():
            note(workdir, Fatal(error=type(error).__name__, detail=str(error)))
        code = TrainerExit.FATAL
    else:
        code = TrainerExit.FINISHED
        if world.first:
            say("finished")
    return leave(workdir, world, code)


class WorkdirBusyError(Exception):
    """Another trainer uses this folder."""


@contextmanager
def workdir_lock(workdir: Path) -> Iterator[None]:
    """A context in which no other trainer can start in this folder, because a node's first rank has locked it. Raises
    WorkdirBusyError.
    """
    if not parallel.expected().first_here:
        yield
        return
    with (workdir / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise WorkdirBusyError(
                f"{workdir} belongs to another trainer that is still running: wait for it, end it, or train elsewhere"
            ) from None
        yield


def leave(workdir: Path, world: World, code: int) -> int:
    """The exit code of this process. torchrun distinguishes only 0 from failure. So the run's own code is written into
    ended.json, and ranks that stopped together exit with 0.
    """
    if world.size == 1:
        return code
    together = code in (TrainerExit.FINISHED, TrainerExit.STOPPED)
    if world.first_here or not together:
        note(workdir, Ended(code=code, rank=world.rank))
    if together:
        world.close()
    return 0 if together else code


def note(workdir: Path, message: Message) -> None:
    """Writes a message for the parent process. If the disk is full, the message is lost, and the run ends
    without it.
    """
    try:
        message.write(workdir)
    except OSError as error:
        say(f"warning: {message.FILE} could not be written: {error}")


def out_of_memory(error: RuntimeError) -> bool:
    """Whether memory ran out, in torch's allocator or outside of it."""
    words = str(error).lower()
    short = any(all(part in words for part in parts) for parts in SHORT_OF_MEMORY)
    return isinstance(error, torch.OutOfMemoryError) or short


def imported(config: JobConfig) -> Callable[[Session], Experiment]:
    trainer: Callable[[Session], Experiment] = named(cast(ExperimentConfig, config).trainer)
    return trainer


def start(run: Task, workdir: Path, rung: int, requests: Requests, world: World) -> tuple[Experiment, Session]:
    """Opens and checks everything that training needs, and prints the banner. Raises ValueError."""
    config, inputs = cast(ExperimentConfig, run.config), workdir / INPUTS
    bf16 = "bf16" in (config.precision.compute, *(config.state_dtype(i) for i in range(len(config.phases()))))
    chosen = device.choose(config.device, bf16=bf16, local_rank=world.local_rank)
    speak = say if world.first else _silent
    speak(chosen.banner() + (f" | {world.size} ranks" if world.size > 1 else ""))
    if chosen.is_cuda:

        def hung(problem: str) -> None:
            say(f"this node is refused: {problem}")
            os._exit(leave(workdir, world, TrainerExit.REFUSED))

        preflight.run(workdir, chosen, world, gpus=config.gpus, say=speak, hung=hung)
    session = Session(
        workdir=workdir,
        config=config,
        config_sha256=run.digest,
        device=chosen,
        world=world,
        data=workdir / DATA,
        inputs=inputs if inputs.is_dir() else None,
        checkpoints=Checkpoints(workdir / CHECKPOINTS, config_sha256=run.digest, world=world),
        metrics=MetricsFile(workdir / METRICS),
        requests=requests,
        rung=rung,
        predicted=run.predicted,
        say=speak,
    )
    experiment = imported(config)(session)
    for line in banner_lines(session, run.tree):
        speak(line)
    return experiment, session


def _silent(line: str) -> None:
    """Prints nothing. This function replaces `say` on all ranks except the first."""


def say(line: str) -> None:
    """Writes one line into job.log, unless the disk is full."""
    with suppress(OSError):
        sys.stdout.write(printable(line) + "\n")
        sys.stdout.flush()


def banner_lines(session: Session, run: dict[str, Any]) -> Iterator[str]:
    """The lines of the banner that follow that of the device."""
    config = session.config
    sizes = config.phases()
    yield "phases: " + ", ".join(f"{s.name} {s.params_total:,} / {s.params_active:,} active" for s in sizes)
    if any(size.steps for size in sizes):
        yield _work(sizes)
    yield f"precision: products in {config.precision.compute}, state {config.state_in_words()}"
    if config.dataset_kind:
        yield f"data: {describe(read_manifest(session.data))}"
    for predicted in session.predicted:
        yield f"predicted {predicted['phase']}: {_figures(predicted)}"
    if session.predicted:
        yield _against_limits(session, run)


def _work(sizes: Sequence[PhaseSize]) -> str:
    """A sentence about which FLOPs mfu includes, because values by other definitions cannot be compared."""
    trained = ", ".join(f"{size.name} {size.flops_per_token / 1e6:,.1f}" for size in sizes if size.steps)
    counted = sizes[0].attention
    return f"useful work: {trained} MFLOP per token" + (f", attention counted {counted}" if counted else "")


def _figures(predicted: dict[str, Any]) -> str:
    mfu = predicted.get("mfu")
    return (
        f"{predicted['step_ms']:.1f} ms, {predicted['tokens_per_s']:,.0f} tok/s, "
        + (f"mfu {mfu:.1%}, " if mfu else "")
        + f"{predicted['memory_gb']:.1f} GB"
    )


def _against_limits(session: Session, run: dict[str, Any]) -> str:
    """The line that compares the predicted cost with the limit."""
    limits, estimate = run.get("limits") or {}, run.get("estimate") or {}
    hours, usd = (estimate.get(key) or {} for key in ("hours", "usd"))
    memory = max(predicted["memory_gb"] for predicted in session.predicted)
    return (
        f"predicted vs limit: {hours.get('p50', '?')} of {limits.get('max_hours', '?')} h, "
        f"${usd.get('p50', '?')} of ${limits.get('max_usd', '?')}, "
        f"{memory:.1f} of {session.device.memory_gb:.1f} GB"
    )


if __name__ == "__main__":
    sys.exit(main())
