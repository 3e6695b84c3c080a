"""A run on two nodes of this machine against the embedded AWS: declared by hand, with the program's own role, user-data
and job archive.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpufleet.infra.definition.loader import load
from gpufleet.infra.inputs import archive
from gpufleet.infra.program.boot import user_data
from gpufleet.infra.program.resources.identity import node_statements
from gpufleet.infra.program.resources.tags import tags
from gpufleet.job import ledger
from gpufleet.job.contract import bucket, run
from gpufleet.job.supervisor.store import S3Store
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.habits import Habits
from gpufleet.rehearsal.launch import CloudInstance
from gpufleet.rehearsal.node import NodeRunner, RehearsalNode, _marked
from tests.job import runs
from tests.rehearsal.declared import fleet, role, template
from tests.repository import ROOT
from tests.waiting import wait_for

BUCKET, GROUP, RUN = "gang", "gpufleet-logs", "r1"
IMAGE = f"public.ecr.aws/x/train@sha256:{'0' * 64}"


class GangRun:
    """One, of `nodes`. `dataset`: its folder; `code`: of a command, one tar archive."""

    def __init__(self, cloud: Cloud, runner: NodeRunner, nodes: int, tree: dict[str, Any], job_image: str = "") -> None:
        self.cloud, self.runner, self.nodes = cloud, runner, nodes
        definition = load(ROOT / "stacks" / "pretrain-d64.yaml", now=datetime.now(UTC), rehearsal=True)
        logs = f"arn:aws:logs:{cloud.region}:{cloud.account}:log-group:{GROUP}"
        schedule, stop = (
            f"arn:aws:scheduler:{cloud.region}:{cloud.account}:schedule/g/s",
            f"arn:aws:iam::{cloud.account}:role/s",
        )
        role(cloud, node_statements(definition, f"arn:aws:s3:::{BUCKET}", logs, schedule, stop))
        cloud.client("logs").create_log_group(logGroupName=GROUP)
        self.s3 = cloud.client("s3")
        self.s3.create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": cloud.region})
        packed, config = archive.build(ROOT / "job"), run.encode(tree)
        self.put(bucket.input_key(packed.sha256, bucket.ARCHIVE), packed.content)
        self.put(f"{RUN}/run.json", config)
        script = user_data.render(
            stack=definition.name,
            run_id=RUN,
            region=cloud.region,
            image=IMAGE,
            job_image=job_image,
            bucket=BUCKET,
            log_group=GROUP,
            schedule="",
            archive_sha256=packed.sha256,
            run_config_sha256=hashlib.sha256(config).hexdigest(),
            timer_seconds=3600,
            device="cpu",
            container_options="",
            data_volume=None,
        )
        owned = [{"Key": key, "Value": value} for key, value in tags(definition).items()]
        made = template(
            cloud,
            user_data=script,
            IamInstanceProfile={"Name": "node"},
            TagSpecifications=[{"ResourceType": "instance", "Tags": owned}],
        )
        self.fleet = fleet(
            cloud,
            made,
            TargetCapacitySpecification={"TotalTargetCapacity": nodes, "DefaultTargetCapacityType": "spot"},
            TagSpecifications=[{"ResourceType": "fleet", "Tags": owned}],
        )
        self.known()

    def known(self) -> None:
        """As `up` leaves it in the bucket: a node whose fleet nobody knows ends it."""
        self.put(f"{RUN}/{bucket.fleet_key(self.fleet)}", b"")

    def put(self, key: str, content: bytes) -> None:
        self.s3.put_object(Bucket=BUCKET, Key=key, Body=content)

    @property
    def store(self) -> S3Store:
        return S3Store(f"s3://{BUCKET}/{RUN}", client=self.s3)

    def json(self, key: str) -> dict[str, Any]:
        content = self.store.get_bytes(key)
        assert content is not None, key
        found: dict[str, Any] = json.loads(content)
        return found

    def generations(self) -> list[dict[str, Any]]:
        return [
            self.json(entry.key)
            for entry in self.store.entries(bucket.GANG)
            if bucket.GENERATION_KEY.fullmatch(entry.key)
        ]

    def workdir(self, instance: str) -> Path:
        return next(self.runner.nodes[instance].root.glob("*/**/run/run.json")).parent

    def steps(self, instance: str) -> list[int]:
        """Those that a node has logged."""
        return [
            int(line["step"])
            for path in self.runner.nodes[instance].root.glob("**/metrics.jsonl")
            for line in ledger.read(path)
        ]

    def said(self, instance: str) -> str:
        path = self.runner.nodes[instance].container_log
        return path.read_text(errors="replace") if path.exists() else ""

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Fails with what the nodes say."""
        wait_for(what, condition, log=self._logs)

    def _logs(self) -> str:
        return "\n".join(
            f"== {name}\n{node.log.read_text()[-1500:]}\n{self.said(name)[-4000:]}"
            for name, node in self.runner.nodes.items()
        )

    def pause(self, instance: str) -> None:
        """SIGSTOP of all its processes: silence."""
        for pid in _marked(instance):
            os.kill(pid, signal.SIGSTOP)

    def lose(self, instance: str) -> None:
        """AWS takes it without a word."""
        self.cloud.kill(instance)


@contextmanager
def cloud_of_two(
    folder: Path, tree: Mapping[str, Any], *, notice_s: float = 20.0, job_image: str = "", programs: Path | None = None
) -> Iterator[GangRun]:
    """The run, launched."""
    with Cloud(folder, habits=Habits(notice_s=notice_s, relaunch_s=1.0)) as cloud:
        runner = NodeRunner(cloud, folder / "nodes", (lambda root: programs) if programs else None)
        try:
            yield GangRun(cloud, runner, 2, dict(tree), job_image)
        finally:
            runner.close()


def dataset_of(folder: Path) -> dict[str, Any]:
    """As run.json has a dataset whose files lie below inputs/ of the run's bucket."""
    files = [
        {"name": path.name, "bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in sorted(folder.iterdir())
    ]
    return {"uri": None, "sha256": hashlib.sha256(json.dumps(files).encode()).hexdigest(), "files": files}


def tree_of(
    experiment: str, parameters: dict[str, Any], inputs: dict[str, Any], *, phase: str = "train"
) -> dict[str, Any]:
    estimate = {
        **runs.ESTIMATE,
        "phases": [{"phase": phase, "step_ms": 100.0}],
        "notice": [{"type": "g5.2xlarge", "phase": phase, "seconds": 5.0, "fits": True}],
    }
    tree = runs.tree(nodes=2, estimate=estimate, predicted=[])
    tree["run"] = {"id": RUN, "stack": "pretrain-d64", "experiment": experiment, "owner": "you"}
    tree["job"] = {"experiment": experiment, "parameters": parameters}
    tree["limits"] = {"max_usd": "30.00", "max_hours": "20", "deadline": None, "expires": None}
    tree["inputs"] = {**tree["inputs"], **inputs}
    return tree


def instances(run: GangRun) -> list[CloudInstance]:
    return run.cloud.instances()


def node(run: GangRun, instance: str) -> RehearsalNode:
    return run.runner.nodes[instance]
