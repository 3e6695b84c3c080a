"""`python -m gpufleet.job WORKDIR/run.json`: the supervisor. The supervisor starts and watches the trainer. Only the
supervisor writes to S3.

Everything else of the run lies in WORKDIR: data/, ckpt/, job.log, packages/ (what the image lacks, installed first).

environment, set by the node script; if it is not set, the run is of this machine alone:
  GPUFLEET_RUN_URI         s3://BUCKET/RUN or a folder, for what is kept (default: store/RUN beside WORKDIR)
  GPUFLEET_INSTANCE_ID, GPUFLEET_INSTANCE_TYPE, GPUFLEET_ZONE, GPUFLEET_LAUNCHED_AT, GPUFLEET_NODE_UPTIME,
  GPUFLEET_PULLED_S        the machine, for its price and its record (default: one called local, started now)
  GPUFLEET_ADDRESS         where the other nodes of the run reach this one (one node: not set)
  GPUFLEET_CAPACITY        spot or on-demand, if the run may use both
  GPUFLEET_JOB_CONTAINER   1: the node starts another container for the training
  AWS_ENDPOINT_URL, AWS_EC2_METADATA_SERVICE_ENDPOINT
                           the address of an embedded AWS

exit codes:
  0   the run is over: finished, or a limit was reached; done.json says which
  70  the run failed for good: run.json is not accepted, or the trainer's fatal.json says why
  71  this machine is refused (GPUs, pre-flight, bytes that arrive wrong); another one may go on
  75  interrupted; the newest checkpoint is published if time sufficed: go on elsewhere, not here
  any other: a crash; the next attempt goes on from the newest checkpoint
"""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from gpufleet.job.clock import SteadyClock, uptime
from gpufleet.job.contract.attempt import Node
from gpufleet.job.contract.bucket import FLEETS
from gpufleet.job.contract.codes import AttemptExit
from gpufleet.job.contract.environment import BOOTED_AT, JOB_CONTAINER, NODE_UPTIME, RUN_URI
from gpufleet.job.contract.run import RunFile, load
from gpufleet.job.contract.workdir import ENDED, LOG, PACKAGES, START
from gpufleet.job.kind import batch
from gpufleet.job.supervisor import bootstrap


def main(argv: Sequence[str] | None = None) -> int:
    """Carries out one attempt of the run; returns the exit code."""
    summary, _, epilog = (__doc__ or "").partition("\n\n")
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m gpufleet.job", description=summary, epilog=epilog, formatter_class=layout
    )
    parser.add_argument("run_json", metavar="RUN_JSON", type=Path, help="the run config, as the program declares it")
    run_json: Path = parser.parse_args(argv).run_json.resolve()
    try:
        with suppress(ValueError):  # `read` below reports an invalid file
            bootstrap.ensure(run_json.parent / PACKAGES, bootstrap.listed(load(run_json).config.module))
    except RuntimeError as error:
        sys.stderr.write(f"{error}\n")
        return AttemptExit.CRASHED
    return supervise(run_json)


def supervise(run_json: Path) -> int:
    try:
        run, node = load(run_json), Node.from_environment(os.environ, time.time())
        clock = SteadyClock(node.launched_at + uptime() - float(os.environ.get(NODE_UPTIME) or uptime()))
    # Every node would refuse this file, so the run ends. Nothing is written into its folder.
    except ValueError as error:
        sys.stdout.write(f"fatal: {error}\n")
        return AttemptExit.FAILED
    # an attempt first empties the folder, so no other attempt may use it at the same time
    with run_json.open("rb") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.stdout.write(f"{run_json} is already being run: wait for that attempt, or end it\n")
            return AttemptExit.CRASHED
        return attempt(run, node, run_json.parent, clock)


def attempt(run: RunFile, node: Node, workdir: Path, clock: SteadyClock) -> int:
    from concurrent.futures import ThreadPoolExecutor

    from gpufleet.job.gpus import Sampler
    from gpufleet.job.supervisor import fleet, leash, machine
    from gpufleet.job.supervisor.attempt import Supervisor
    from gpufleet.job.supervisor.child import Child, GroupedProcess, JobLog, TrainerProcess, trainer
    from gpufleet.job.supervisor.contained import ContainedProcess
    from gpufleet.job.supervisor.metadata import Metadata, MetadataThread, http_fetch
    from gpufleet.job.supervisor.meter import spot_history
    from gpufleet.job.supervisor.rendezvous import Rendezvous
    from gpufleet.job.supervisor.store import open_store, parent
    from gpufleet.job.supervisor.world import Outside

    terminated: list[float] = []
    signal.signal(signal.SIGTERM, lambda *_: terminated.append(clock()))
    environment = os.environ
    log = JobLog(workdir / LOG)
    gpus = machine.gpus() if run.config.device == "cuda" else ()
    ranks = run.config.ranks(len(gpus), run.nodes)
    launched, alone = batch.launched(run.config, ranks // run.nodes), run.nodes == 1
    ended = workdir / ENDED if launched > 1 or (run.config.processes == "per GPU" and not alone) else None
    # A user's command has a container of its own, without gpufleet's Python. The command's host runs in this container,
    # and asks the node for the other one.
    contained = JOB_CONTAINER in environment and run.config.processes != "own"
    above = leash.ABOVE if contained else ""

    def process(words: list[str], more: dict[str, str]) -> TrainerProcess:
        ours = {"PYTHONUNBUFFERED": "1", BOOTED_AT: repr(clock.booted), **more}
        if contained:
            path = environment.get("PYTHONPATH", "")  # adds the packages that the image did not have
            return ContainedProcess(workdir, words, {**ours, "PYTHONPATH": path})
        return GroupedProcess(words, {**environment, **ours})

    def begin() -> Child:
        words = trainer(workdir, None, launched, run.config.module, parent=above)
        return Child(lambda: process(words, {}), log, clock, ended, workdir / START)

    def join(rung: int, place: Rendezvous) -> Child:
        met = place if run.config.processes == "per GPU" else None
        words = trainer(workdir, rung, launched, run.config.module, met, parent=above)
        return Child(lambda: process(words, place.environment), log, clock, ended)

    def start(rung: int) -> Child:
        child = early.pop() if early else begin()
        # The trainer was killed while it waited, perhaps because memory ran out. The attempt goes on with another
        # trainer.
        if child.poll() is not None:
            child = begin()
        child.go(rung)
        return child

    sampler = Sampler(gpus=len(gpus), clock=clock) if gpus else None
    # The trainer takes seconds to import torch. Meanwhile this process downloads the training data.
    early = [begin()] if alone else []
    metadata = Metadata(
        fetch=http_fetch(environment.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "")), clock=clock, say=log.say
    )
    with MetadataThread(metadata), ThreadPoolExecutor(1) as uploads, ThreadPoolExecutor(1) as pulse:
        store = open_store(environment.get(RUN_URI) or f"{parent(str(workdir))}/store/{run.run}")

        takes_over = bool(node.capacity) and not run.rates(node.type, node.zone, node.capacity).moves

        def known_fleets() -> list[str]:  # the run has two fleets if it has a fallback
            return [entry.key.removeprefix(FLEETS) for entry in store.entries(FLEETS)] if node.capacity else []

        world = Outside(
            store=store,
            metadata=metadata,
            start=start if alone else join,
            terminated=lambda: terminated[0] if terminated else None,
            uploads=uploads,
            pulse=pulse,
            log=log,
            spot_price=spot_history(node.type, node.zone, say=log.say),
            ranks=ranks,
            fleet_history=fleet.of_node(node.instance, others=known_fleets, on_demand=takes_over),
            gpus=lambda: gpus,
            sampler=sampler,
            clock=clock,
        )
        try:
            if alone:
                return Supervisor(run, node, workdir, world).run()
            from gpufleet.job.contract.gang import Presence
            from gpufleet.job.supervisor.member import GangMember
            from gpufleet.job.supervisor.presence import Lookout, LookoutThread

            own = Presence(
                instance=node.instance,
                address=node.address,
                launched_at=node.launched_at,
                state="staging",
                since=clock(),
            )
            with LookoutThread(Lookout(world.store, own, clock, log.say)) as watch:
                return GangMember(run, node, workdir, world, watch).run()
        finally:
            for child in early:
                child.kill()
            if sampler is not None:
                sampler.close()


if __name__ == "__main__":
    sys.exit(main())
