"""`python -m job.train WORKDIR --rung N`: trains what WORKDIR/run.json says, from WORKDIR/ckpt's newest checkpoint.

Exit codes: 0 finished; 75 stopped on request; 69 out of memory (rung.json names the next rung); 65 cannot succeed, the
reason in fatal.json; anything else is a crash.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from job import atomic
from job.config import JobConfig, from_json
from job.experiments.growth_check import GrowthCheckFailed
from job.experiments.tinystories_growth import TinystoriesGrowth
from job.run_file import config_digest
from job.train import banner, device
from job.train.checkpoint import Checkpoints
from job.train.data import Dataset
from job.train.experiment import Experiment, Session, Stopped
from job.train.loop import Loop
from job.train.metrics import MetricsFile
from job.train.requests import Requests

FINISHED, FATAL, OUT_OF_MEMORY, STOPPED = 0, 65, 69, 75
EXPERIMENTS: dict[str, Callable[[Session], Experiment]] = {"tinystories-growth": TinystoriesGrowth}


def main(argv: Sequence[str] | None = None) -> int:
    """One start of the trainer."""
    parser = argparse.ArgumentParser(prog="python -m job.train", description=__doc__)
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--rung", type=int, default=0, help="of the micro-batch ladder (job/sizing.py)")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # one process is what is meant
    if "OMP_NUM_THREADS" not in os.environ:  # one core for the supervisor and for saves: threads that wait spin
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))
    requests = Requests(args.workdir)
    requests.heed_signals()
    return train(args.workdir, args.rung, requests)


def train(workdir: Path, rung: int, requests: Requests) -> int:
    """The exit code."""
    try:
        experiment, session = start(workdir, rung, requests)
        Loop(session, experiment).run()
    except Stopped:
        return STOPPED
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        say(f"out of memory: {str(error).splitlines()[0]}")
        return OUT_OF_MEMORY
    except (ValueError, GrowthCheckFailed) as error:
        atomic.write_json(workdir / "fatal.json", {"error": type(error).__name__, "detail": str(error)})
        say(f"fatal: {error}")
        return FATAL
    say("finished")
    return FINISHED


def out_of_memory(error: RuntimeError) -> bool:
    """Also where it is not torch's allocator that asked in vain: cuBLAS's handles, Triton's modules, the driver."""
    words = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or (
        ("cuda" in words and "out of memory" in words) or "status_alloc_failed" in words
    )


def start(workdir: Path, rung: int, requests: Requests) -> tuple[Experiment, Session]:
    """Everything opened and checked, the banner said, nothing trained. Raises ValueError."""
    tree = atomic.read_object(workdir / "run.json")
    if tree is None:
        raise ValueError(f"{workdir / 'run.json'}: missing or not JSON")
    name, parameters = tree["job"]["experiment"], tree["job"]["parameters"]
    config: JobConfig = from_json(name, parameters)
    found = device.choose(config.device, bf16="bf16" in (config.precision.compute, config.precision.phase3_state))
    say(found.banner())
    digest = config_digest(name, parameters)
    session = Session(
        workdir=workdir,
        config=config,
        config_sha256=digest,
        device=found,
        dataset=Dataset(workdir / "data", vocab=config.model.vocab, sequence=config.data.sequence, device=found.torch),
        checkpoints=Checkpoints(workdir / "ckpt", config_sha256=digest),
        metrics=MetricsFile(workdir / "metrics.jsonl"),
        requests=requests,
        rung=rung,
        predicted=tree.get("predicted") or [],
        say=say,
    )
    for line in banner.lines(session, tree):
        say(line)
    return EXPERIMENTS[name](session), session


def say(line: str) -> None:
    """One line for job.log."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
