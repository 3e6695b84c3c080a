"""`python -m job <workdir>/run.json`: the supervisor, with its packages and its places."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from job.supervisor import bootstrap


def main() -> int:
    run_json = Path(sys.argv[1]).resolve()
    try:
        bootstrap.ensure(run_json.parent / "packages")
    except RuntimeError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return supervise(run_json)


def supervise(run_json: Path) -> int:
    from concurrent.futures import ThreadPoolExecutor

    from job import sizing
    from job.run_file import Node, load
    from job.supervisor import machine
    from job.supervisor.child import Child, Log, trainer
    from job.supervisor.endings import FAILED
    from job.supervisor.metadata import Metadata, Watch, http_fetch
    from job.supervisor.meter import spot_history
    from job.supervisor.store import open_store, parent
    from job.supervisor.supervisor import Supervisor
    from job.supervisor.world import World

    terminated: list[float] = []
    signal.signal(signal.SIGTERM, lambda *_: terminated.append(time.time()))
    workdir, environment = run_json.parent, os.environ
    log = Log(workdir / "job.log")
    try:
        run, node = load(run_json), Node.of(environment, time.time())
    except ValueError as error:  # the same on every node: the run ends here
        log.say(f"fatal: {error}")
        return FAILED
    gpus = machine.gpus() if run.config.device == "cuda" else ()
    ranks = sizing.ranks(run.config, len(gpus))
    ended = workdir / "ended.json" if ranks > 1 else None
    metadata = Metadata(
        fetch=http_fetch(environment.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "")), clock=time.time, say=log.say
    )
    child_environment = {**environment, "PYTHONUNBUFFERED": "1"}
    with Watch(metadata), ThreadPoolExecutor(1) as uploads, ThreadPoolExecutor(1) as pulse:
        world = World(
            store=open_store(environment.get("GPUFLEET_RUN_URI") or f"{parent(str(workdir))}/store/{run.run}"),
            metadata=metadata,
            start=lambda rung: Child(trainer(workdir, rung, ranks), child_environment, log, time.time, ended),
            terminated=lambda: terminated[0] if terminated else None,
            uploads=uploads,
            pulse=pulse,
            log=log,
            spot_price=spot_history(node.type, node.zone),
            ranks=ranks,
            gpus=lambda: gpus,
        )
        return Supervisor(run, node, workdir, world).run()


if __name__ == "__main__":
    sys.exit(main())
