"""The kinds of faults that `make chaos` injects: what the tests do at one seed, at any seed.

Each kind is called with a seed and an empty folder. It gives how many faults came, counted where they come, not where
they are ordered; what does not hold raises.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import boto3
import botocore.endpoint
import train_world
from boot_stubs import DELETE, SHUTDOWN, StubNode
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.config import Config
from botocore.exceptions import ConnectionClosedError, ReadTimeoutError
from command_world import FORMATS
from engine_world import pinned, project
from killed import WRITES, Mode
from killed_calls import shared_account
from moto import mock_aws
from moto.core.botocore_stubber import MockRawResponse
from moto.core.models import botocore_stubber
from supervisor_world import STEPS, Bench, FakeTrainer, FaultyStore, NodeDeath, state
from urllib3.exceptions import IncompleteRead

from gpufleet.job.supervisor.store import S3Store
from gpufleet.rehearsal.clock import ManualClock
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.imds import Imds

TESTS = Path(__file__).parents[1]
CALLS = 75  # `up` and `destroy` have more of them each
FAR = {"max_usd": "300", "max_hours": "200", "deadline": None}  # limits that no outage reaches
NODES = 60  # more than any seed needs: where S3 refuses 1 call of 5, 30 of 30 runs took 5 or fewer
S3_CALLS = 40  # a node that nothing happens to makes more
Kind = Callable[[int, Path], int]


@functools.cache
def tests(path: str) -> Any:
    """A module of tests, by its path; its own fixtures are not used."""
    spec = importlib.util.spec_from_file_location(f"chaos_{Path(path).stem}", TESTS / path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Kills --------------------------------------------------------------------------------------------------------------


def node_lost(seed: int, folder: Path) -> int:
    """Supervisor and trainer killed while they train: the weights are those of a run that nobody disturbed."""
    module, phase = tests("job/test_interruption_contract.py"), random.Random(seed).randrange(3)
    with (
        mock.patch.object(module, "SEED", seed),
        mock.patch.object(
            module.TrainerAttempt, "sigkill", autospec=True, side_effect=module.TrainerAttempt.sigkill
        ) as kill,
    ):
        module.test_an_interruption_changes_no_bit_of_the_weights(False, (phase,), folder)
    return int(kill.call_count)


def command_killed(seed: int, folder: Path) -> int:
    """A command of the user's killed amid its saves: nothing torn is committed, nothing torn is put back."""
    module, name = tests("job/command/test_command_kills.py"), random.Random(seed).choice(list(FORMATS))
    with (
        mock.patch.object(module, "SEED", seed),
        mock.patch.object(module, "kill", wraps=module.kill) as host,
        mock.patch.object(module.processes, "send", wraps=module.processes.send) as script,
    ):
        module.put_back_is_whole(module.killed(folder, name, 2))
    return sum(bool(call.args[0]) for call in script.call_args_list) + host.call_count - 1  # the last one cleans up


def trainer_stopped(seed: int, folder: Path) -> int:
    """The trainer stopped at any of its looks: the same weights in the end."""
    module = tests("job/train/test_resume.py")
    look = random.Random(seed).randrange(module.LOOKS)
    with mock.patch.object(module, "StopAt", wraps=module.StopAt) as stops:
        module.test_a_run_stopped_at_a_seeded_point_ends_with_the_same_weights(look, _uninterrupted(), folder)
    return int(stops.call_count)


@functools.cache
def _uninterrupted() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="gpufleet-chaos-"))
    assert train_world.train(train_world.make(folder)) == 0
    return folder


def up_killed(seed: int, folder: Path) -> int:
    """`up` killed at one of its writes to AWS: a sweep removes what it left, and the next `up` works."""
    module, at = tests("rehearsal/test_killed_up.py"), random.Random(seed).randint(1, WRITES - 1)
    root = pinned(project(folder / "project")).parents[1]
    with (
        Cloud(folder / "cloud", clock=ManualClock()) as cloud,
        mock.patch.dict(os.environ, cloud.environment()),
        contextlib.chdir(root),
        mock.patch.object(module, "killed_standin", wraps=module.killed_standin) as kill,
    ):
        said = SimpleNamespace(readouterr=lambda: SimpleNamespace(out=""))  # what is printed is kept elsewhere
        module.test_a_sweep_removes_what_a_killed_up_has_left(module.KilledWorld(cloud, root), at, said)
    return int(kill.call_count)


def engine_cut_off(seed: int, folder: Path) -> int:
    """The engine's `up` or `destroy` killed, or without an answer of AWS from there on, at one of its calls."""
    draw = random.Random(seed)
    mode: Mode = draw.choice(("killed", "no answer"))
    with shared_account(folder) as account:
        found = account.kill(draw.choice(("up", "destroy")), mode, draw.randint(1, CALLS))
    assert found.holds, found
    return int(found.fired)


# S3, metadata, EC2 --------------------------------------------------------------------------------------------------


class CutShort(BytesIO):
    """The body of an answer whose connection ends before its last byte, as urllib3 tells it."""

    def read(self, size: int | None = -1) -> bytes:
        content = super().read(size)
        if not content and size != 0:
            raise IncompleteRead(self.tell(), 1)
        return content

    def stream(self, **_: Any) -> Iterator[bytes]:
        while True:
            yield self.read()


class FaultyNetwork:
    """Stands where boto3 has its connections to S3. Of each request a share, and the one numbered `certain`, meets a
    fault, drawn by what is asked for, so that threads in another order meet the same.
    """

    def __init__(self, seed: int, share: float, certain: int) -> None:
        self._seed, self._share, self._certain = seed, share, certain
        self._asked: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.faults: Counter[str] = Counter()

    def client(self) -> Any:
        """Of S3, through it."""
        made = boto3.client(
            "s3", region_name="us-east-2", config=Config(retries={"mode": "standard", "total_max_attempts": 2})
        )
        made.meta.events.unregister("before-send", botocore_stubber)
        made._endpoint.http_session = self
        return made

    def send(self, request: AWSPreparedRequest) -> AWSResponse:
        """The answer, or what comes of it."""
        fault = self._draw(f"{request.method} {request.url}")
        if fault == "503":
            body = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
            return AWSResponse(request.url, 503, {}, MockRawResponse(body))
        if fault == "half-sent":
            raise ConnectionClosedError(endpoint_url=request.url)
        answer = botocore_stubber("before-send.s3", request)
        assert answer is not None
        if fault == "unanswered":
            raise ReadTimeoutError(endpoint_url=request.url)
        if fault == "wrong ETag":
            answer.headers["ETag"] = '"00000000000000000000000000000000"'
        if fault == "cut short":
            return AWSResponse(request.url, answer.status_code, answer.headers, CutShort(answer.content[:-1]))
        return answer

    def _draw(self, asked: str) -> str:
        with self._lock:
            self._asked[asked] += 1
            drawn = random.Random(f"{self._seed} {asked} {self._asked[asked]}")
            if drawn.random() >= self._share and self._asked.total() != self._certain:
                return ""
            fault = drawn.choice(S3_FAULTS)
            self.faults[fault] += 1
            return fault


S3_FAULTS = ("503", "half-sent", "unanswered", "wrong ETag", "cut short")


@contextlib.contextmanager
def s3_bench(folder: Path, **changes: Any) -> Iterator[Bench]:
    """One whose bucket is an S3 of this process."""
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-2"}
    waits_for_nobody = SimpleNamespace(sleep=lambda seconds: None, time=time.time)
    with (
        mock.patch.dict(os.environ, keys),
        mock_aws(),
        mock.patch.object(botocore.endpoint, "time", waits_for_nobody),
    ):
        bench, client = Bench(folder, **changes), boto3.client("s3", region_name="us-east-2")
        client.create_bucket(Bucket="bucket", CreateBucketConfiguration={"LocationConstraint": "us-east-2"})
        inputs = bench.tree["inputs"]["dataset"]
        inputs["uri"] = str(bench.bucket / "inputs" / inputs["sha256"])
        bench.store = S3Store("s3://bucket/r1", client)
        yield bench


def s3_faulty(seed: int, folder: Path) -> int:
    """S3 that answers wrong or not at all now and then, and nodes that die amid a call: the run ends whole, with every
    step.
    """
    draw = random.Random(seed)
    share, certain = draw.uniform(0.02, 0.2), draw.randint(1, S3_CALLS)

    def dies(*_: object) -> NodeDeath | None:
        return NodeDeath() if draw.random() < share / 20 else None

    with s3_bench(folder, limits=FAR) as bench:
        network = FaultyNetwork(seed, share, certain)
        for number in range(1, NODES):
            store = FaultyStore(S3Store("s3://bucket/r1", network.client()), dies)
            with contextlib.suppress(NodeDeath):
                code = bench.attempt(f"i-{number}", store=store).run()
                assert code in (0, 1), code
            if bench.store.get_bytes("done.json"):
                break
        _check_whole(bench)
    return network.faults.total()


def _check_whole(bench: Bench) -> None:
    """The run has ended as one that nobody disturbed."""
    assert bench.json("done.json")["reason"] == "finished"
    assert bench.manifests()[-1] == STEPS
    assert bench.store.get_bytes("final/model.safetensors") == state(STEPS)
    assert bench.json("receipt.json")["reason"] == "finished"


def clock_set(seed: int, folder: Path) -> int:
    """Clocks that are set while a node trains, forward and back: the run ends whole."""
    draw, bench, jumps = random.Random(seed), Bench(folder, limits=FAR), list[float]()

    def jump(_: FakeTrainer) -> None:
        jumps.append(draw.uniform(-3600, 3600))
        bench.clock.sleep(jumps[-1])

    script = dict.fromkeys(draw.sample(range(1, STEPS), draw.randint(1, 4)), jump)
    for number in range(1, NODES):
        if bench.attempt(f"i-{number}", script=script).run() == 0:
            break
    _check_whole(bench)
    return len(jumps)


def node_refused(seed: int, folder: Path) -> int:
    """AWS, docker or the GPU fail a booting node in what it asks of them: it shuts down, whatever fails."""
    draw, node = random.Random(seed), StubNode(folder)
    boot, end = ("read", "write", "list", "pull", "nvidia-smi", "read-once"), ("delete-fleets", "terminate-instances")
    node.fails(*draw.sample(boot, draw.randint(1, 3)), *draw.sample(end, draw.randint(0, 2)))  # not all come to an end
    node.job_ends_with(draw.choice((0, 1, 70, 75)))
    outcome = node.boot()
    assert outcome.calls_starting(SHUTDOWN) == [SHUTDOWN], outcome.log
    assert outcome.calls_starting(DELETE, SHUTDOWN)[-1] == SHUTDOWN, outcome.log
    return len((node.world / "refused").read_text().split())


def metadata_faulty(seed: int, folder: Path) -> int:
    """A metadata service that answers nonsense, late, or nothing: no notice is invented, and none overlooked."""
    module, fault = tests("job/supervisor/test_metadata.py"), random.Random(seed).choice(METADATA_FAULTS)
    imds = Imds()
    try:
        imds.slow_s = 2.0
        module.test_a_real_service_that_misbehaves_neither_fools_nor_stops_the_watch(imds, fault)
    finally:
        imds.close()
    return imds.faults


METADATA_FAULTS = ("500", "garbage", "bad-time", "slow", "silent", "401")
KINDS: dict[str, Kind] = {
    "S3 faults": s3_faulty,
    "clocks set": clock_set,
    "metadata faults": metadata_faulty,
    "node refused": node_refused,
    "trainer stopped": trainer_stopped,
    "command killed": command_killed,
    "node lost": node_lost,
    "up killed": up_killed,
    **({"engine cut off": engine_cut_off} if shutil.which("pulumi") else {}),
}
