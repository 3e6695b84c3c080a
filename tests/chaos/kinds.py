"""The kinds of faults that `make chaos` injects: what the tests do at one seed, at any seed.

Each kind is called with a seed and an empty folder. It gives how many faults came, counted where they come, not where
they are ordered; what does not hold raises.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import io
import os
import random
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import boto3
from botocore.awsrequest import AWSResponse
from botocore.exceptions import ConnectionClosedError, ReadTimeoutError
from botocore.response import StreamingBody
from moto import mock_aws

from gpufleet.job.contract import bucket, reading
from gpufleet.job.contract.commit import Manifest
from gpufleet.job.supervisor import store as stores
from gpufleet.job.supervisor.store import S3Store
from gpufleet.rehearsal.clock import ManualClock
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.imds import Imds
from tests.infra.boot_stubs import DELETE, SHUTDOWN, StubNode
from tests.job import train_world
from tests.job.command_world import FORMATS
from tests.job.supervisor_world import STEPS, Bench, FaultyStore, NodeDeath, state
from tests.rehearsal.engine_world import pinned, project
from tests.rehearsal.killed import WRITES, Mode
from tests.rehearsal.killed_calls import shared_account

TESTS = Path(__file__).parents[1]
CALLS = 75  # `up` and `destroy` have more of them each
FAR = {"max_usd": "300", "max_hours": "200", "deadline": None}  # limits that no outage reaches
NODES = 60  # more than any seed needs: where S3 refuses 1 call of 5, 30 of 30 runs took 5 or fewer
DEATHS = 0.005  # of a node's calls to S3
OUTAGE = 8  # calls in a row that S3 refuses: a client tries one four times
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
        mock.patch.object(module, "end", wraps=module.end) as script,
    ):
        module.put_back_is_whole(module.killed(folder, name, 2))
    return sum(bool(call.args[0]) for call in script.call_args_list) + host.call_count - 1  # the last one cleans up


def trainer_stopped(seed: int, folder: Path) -> int:
    """The trainer stopped at any of its looks: the same weights in the end."""
    module = tests("job/experiments/engine/test_resume.py")
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


class FaultyAnswers:
    """What S3 answers, below boto3, goes wrong with a chance of its own: nothing comes, a call is refused, or OUTAGE in
    a row, a body is cut, and of a checkpoint's file a byte is another, or half of it is what S3 has.
    """

    def __init__(self, client: Any, clean: Any, draw: random.Random, share: float) -> None:
        self._clean, self._draw, self._share, self.faults = clean, draw, share, 0
        self._flipped, self._ended = False, False
        self._out = 0  # calls that are still to be refused
        self._drawing = threading.Lock()  # of files several parts are under way
        client.meta.events.register_first("before-send.s3", self._send)
        client.meta.events.register("after-call.s3.GetObject", self._got)
        client.meta.events.register("after-call.s3.PutObject", self._put)

    def _is_drawn(self, among: int, share: float | None = None) -> int:
        """The number of a fault, 1 to `among`; 0: none."""
        with self._drawing:
            is_drawn = self._draw.random() < (self._share / 2 if share is None else share)
            self.faults += is_drawn
            return self._draw.randint(1, among) if is_drawn else 0

    def _send(self, request: Any, **_: Any) -> Any:
        is_end = "/final/" in request.url and not self._ended  # of each node once, whatever is drawn
        self._ended = self._ended or is_end
        if not self._out and self._is_drawn(1, 1.0 if is_end else self._share / 10):
            self._out = OUTAGE
        kind, self._out = (3, self._out - 1) if self._out else (self._is_drawn(3), 0)
        if kind == 1:
            raise ConnectionClosedError(endpoint_url=request.url)
        if kind == 2:
            raise ReadTimeoutError(endpoint_url=request.url)
        body = SimpleNamespace(stream=lambda: iter([b"<Error><Code>InternalError</Code></Error>"]))
        return AWSResponse(request.url, 500, {}, body) if kind else None

    def _got(self, parsed: dict[str, Any], context: Any, **_: Any) -> None:
        if "Body" not in parsed:
            return
        body, is_weights = parsed["Body"].read(), context["input_params"]["Key"].endswith("w.bin")
        length, kind = len(body), self._is_drawn(2 if is_weights else 1, 0.5 if is_weights else None)
        if is_weights and not self._flipped:  # of each node the first, whatever is drawn
            self._flipped, kind = True, 2
            self.faults += 1
        if kind == 1:
            body = body[: length // 2]
        elif kind == 2:
            body = bytes([body[0] ^ 1]) + body[1:]
        parsed["Body"] = StreamingBody(io.BytesIO(body), length)

    def _put(self, context: Any, **_: Any) -> None:
        key = context["input_params"]["Key"]
        if key.endswith("w.bin") and self._is_drawn(1, 0.25):
            content = self._clean.get_bytes(key.removeprefix("r1/"))
            self._clean.put_bytes(content[: len(content) // 2], key.removeprefix("r1/"))


def s3_faulty(seed: int, folder: Path) -> int:
    """S3's answers that go wrong before boto3 sees them, and nodes that die amid a call: the run ends whole, with the
    weights of one undisturbed.
    """
    draw, faults = random.Random(seed), 0

    def dies(*_: object) -> NodeDeath | None:
        return NodeDeath() if draw.random() < DEATHS else None

    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
    no_sleep = SimpleNamespace(sleep=lambda seconds: None)
    with (
        mock.patch.dict(os.environ, keys),
        mock_aws(),
        mock.patch("botocore.endpoint.time", no_sleep),
        mock.patch.object(stores, "session", functools.cache(boto3.Session)),
    ):
        os.environ.pop("AWS_ENDPOINT_URL", None)
        client = stores._client()
        client.create_bucket(Bucket="bucket")
        bench = Bench(folder, limits=FAR)
        clean = S3Store("s3://bucket/r1", client)
        bench.store = clean
        for path in (folder / "bucket").rglob("*"):  # its inputs
            if path.is_file():
                client.upload_file(str(path), "bucket", path.relative_to(folder / "bucket").as_posix())
        for number in range(1, NODES):
            client = stores._client()
            answers = FaultyAnswers(client, clean, draw, draw.uniform(0.02, 0.2))
            is_taken = number < 4 or draw.random() < 0.3  # by AWS, so that others go on
            code, began = None, len(bench.trainers)
            notice = {draw.randint(1, STEPS - 1): lambda _: bench.notice(120)} if is_taken else {}
            store = FaultyStore(S3Store("s3://bucket/r1", client), dies)
            with contextlib.suppress(NodeDeath):
                code = bench.attempt(f"i-{number}", store=store, script=notice).run()
                assert code in (0, 1, 71, 75), code
            bench.answers.clear()
            faults += answers.faults
            _check_published(clean)
            if clean.get_bytes("done.json"):
                break
            trained = any(each.step == STEPS for each in bench.trainers[began:])
            assert code in (None, 75) or not trained, "a node trained to the end, and did not say so"
        _check_whole(bench)
    return faults


def _check_published(store: S3Store) -> None:
    """What a manifest names is there, as it names it."""
    for place in bucket.published(entry.key for entry in store.entries(bucket.CHECKPOINTS)):
        manifest = Manifest.from_json(reading.parse(store.get_bytes(place.manifest) or b""), place.generation)
        for key, file in manifest.objects.items():
            assert hashlib.sha256(store.get_bytes(key) or b"").hexdigest() == file.sha256, key


def _check_whole(bench: Bench) -> None:
    """The run has ended as one that nobody disturbed."""
    assert bench.json("done.json")["reason"] == "finished"
    assert bench.manifests()[-1] == STEPS
    assert len(bench.manifests()) > 1, "there is none before the newest, should that not verify"
    assert bench.store.get_bytes("final/model.safetensors") == state(STEPS)
    assert bench.json("receipt.json")["reason"] == "finished"


def clock_set(seed: int, folder: Path) -> int:
    """The machine's clock is set while a command trains: it goes on, and its checkpoints are what they would be."""
    by_s = random.Random(seed).choice((-1, 1)) * random.Random(seed).uniform(60, 86_400)
    tests("job/command/test_command_host.py").test_a_clock_that_is_set_ends_no_command_and_changes_no_checkpoint(
        folder, by_s
    )
    return 1


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
    module, fault = tests("job/supervisor/test_metadata.py"), METADATA_FAULTS[seed % len(METADATA_FAULTS)]
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
