"""The embedded AWS: moto on a loopback port, with additions for what moto lacks.

    with Cloud(folder) as cloud:
        boto3.client("ec2", endpoint_url=cloud.endpoint, ...)   # or set cloud.environment() and use any SDK

Each Cloud is an account of its own, so several can live in one process. With the system clock a thread drives the
Cloud; with a ManualClock it stands still until the test acts:

    cloud.interrupt(instance_id)  # notice now, end after 120 s of that clock
    clock.advance(121)
    cloud.tick()
    cloud.kill(instance_id)  # gone without notice
    cloud.quotas["L-3819A6DF"] = 0  # or cloud.no_capacity(), cloud.deny("DeleteFleets", node=True), ...
    cloud.leftovers()  # everything that exists now and did not exist at the beginning
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

os.environ.setdefault("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")  # hundreds of images would be loaded, which are not needed

from moto import backends
from moto.ec2.models import ec2_backends
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import BaseWSGIServer, make_server

from gpufleet.infra.definition.model import Account
from gpufleet.job.contract import environment
from gpufleet.rehearsal import account
from gpufleet.rehearsal.aws_answers import FLEETS
from gpufleet.rehearsal.clock import Clock, SystemClock
from gpufleet.rehearsal.controller import FleetController
from gpufleet.rehearsal.environment import past_proxies
from gpufleet.rehearsal.gate import NODE_KEY, SECRET, USER_KEY, Gate
from gpufleet.rehearsal.habits import Habits, renaming
from gpufleet.rehearsal.imds import Imds
from gpufleet.rehearsal.launch import CloudInstance, Launcher, Reservation
from gpufleet.rehearsal.schedules import Schedules

# otherwise moto lists its package's folder for each request under a lock, which takes half a millisecond
_SERVICES = frozenset(backends.list_of_moto_modules())
backends.list_of_moto_modules = lambda: _SERVICES
_ACCOUNTS = itertools.count(111_122_223_333)
TICK_S = 0.1
WORD = "rehearsal"  # the value of a secret for which the shell has none


class Cloud:
    """One embedded AWS account, from __enter__ to __exit__."""

    def __init__(
        self,
        root: Path,
        *,
        clock: Clock | None = None,
        launch: Callable[[CloudInstance], None] | None = None,
        end: Callable[[CloudInstance], None] | None = None,
        habits: Habits | None = None,
        region: str = "us-east-2",
        port: int = 0,
    ) -> None:
        os.environ.update(past_proxies(os.environ))  # the clients in this process read these variables too
        self.root = root
        self.clock: Clock = clock or SystemClock()
        self.region = region
        self.account = f"{next(_ACCOUNTS):012d}"
        self.launcher = Launcher(self.account)
        self.quotas = self.launcher.quotas
        self.fleets = FleetController(
            self.launcher,
            self.clock,
            on_launch=self._launched,
            on_end=self._ended,
            on_image=self._copied,
            habits=habits or Habits(),
        )
        self.schedules = Schedules(self.account, self.fleets, self._tags_of)
        self.endpoint = ""
        self.launch, self.end = launch, end  # called for every instance that starts or ends
        self.copy: Callable[[str, CloudInstance], None] | None = None  # called for every AMI made of an instance's disk
        self.trouble: OSError | None = None  # why this machine could not start a launched instance
        self._port = port
        self._clients: dict[tuple[str, str], Any] = {}
        self._imds: dict[str, Imds] = {}
        self._seeded: set[str] = set()
        self._seeding = threading.Lock()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._gate = Gate(
            DomainDispatcherApplication(create_backend_app),
            self.account,
            self._seed,
            statements=self._statements,
            statements_of=lambda role: account.statements_of(self.account, role),
            tags=self._tags_of,
            key_of=lambda bucket: account.key_of(self.account, bucket),
            clock=self.clock,
        )
        self._server: BaseWSGIServer | None = None
        self._baseline: set[account.Resource] = set()

    def __enter__(self) -> Cloud:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        # moto reads an object's hash again after it has answered. A second PUT of the same key at this moment fails
        # with 500, and the client repeats it.
        logging.getLogger("moto").setLevel(logging.CRITICAL)
        FLEETS[self.account] = self.fleets
        account.seed(self.account)
        app = renaming(self._gate, self.fleets.habits.codes)
        self._server = make_server("127.0.0.1", self._port, app, threaded=True, request_handler=_QuietHandler)
        self.endpoint = self._gate.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._seed(self.region)
        self._start(functools.partial(self._server.serve_forever, poll_interval=0.05))
        if isinstance(self.clock, SystemClock):
            self._start(self._drive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        assert self._server is not None
        self._server.shutdown()
        for thread in self._threads:
            thread.join()
        self._server.server_close()
        for instance in list(self.fleets.instances.values()):
            if not instance.ended_at:
                self._ended(instance)
        for imds in self._imds.values():
            imds.close()
        del FLEETS[self.account]
        account.forget(self.account)

    def environment(self) -> dict[str, str]:
        """The variables with which any SDK, the AWS CLI and our own program use only this Cloud."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": USER_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "GPUFLEET_REGISTRY_ENDPOINT": self.endpoint,
            **past_proxies(os.environ),
        }

    def client(self, service: str, region: str | None = None) -> Any:
        """A boto3 client of this Cloud with the dummy credentials. The client is cached: making one for EC2 takes 50
        ms.
        """
        import boto3

        key = service, region or self.region
        if key not in self._clients:
            self._clients[key] = boto3.client(
                service,
                region_name=key[1],
                endpoint_url=self.endpoint,
                aws_access_key_id=USER_KEY,
                aws_secret_access_key=SECRET,
            )
        return self._clients[key]

    def instances(self) -> list[CloudInstance]:
        """Every instance that a fleet ever launched here, in order; `ended_at` shows which ones have ended."""
        return list(self.fleets.instances.values())

    def interrupt(self, instance_id: str) -> None:
        """Interrupts the instance: it gets a notice now, and ends after `notice_s` of the habits."""
        self.fleets.notice(instance_id)

    def kill(self, instance_id: str) -> None:
        """Ends the instance without any notice."""
        self.launcher.terminate(instance_id)
        self.tick()

    def rebalance(self, instance_id: str) -> None:
        self.fleets.rebalance(instance_id)

    def shut_down(self, instance_id: str) -> None:
        """Stops or terminates an instance whose operating system has shut down, as the launch template says."""
        if self.fleets.instances[instance_id].shutdown_behavior == "terminate":
            self.launcher.terminate(instance_id)
        else:
            self.launcher.stop(instance_id)
        self.tick()

    def tick(self) -> None:
        """Does everything that is due by the clock."""
        self.schedules.tick()
        self.fleets.tick()

    def deny(self, action: str, *, node: bool = False) -> None:
        """Refuses an action from now on: to the user, or to the nodes' role."""
        self._gate.denied.add((NODE_KEY if node else USER_KEY, action))

    def allow(self, action: str) -> None:
        """Cancels every `deny` of the action."""
        self._gate.denied -= {(NODE_KEY, action), (USER_KEY, action)}

    def calls(self, action: str) -> int:
        """How often the action was requested; actions of S3 are not counted."""
        return sum(name == action for _, name in self._gate.calls)

    def no_capacity(self, instance_type: str = "*", zone: str = "*") -> None:
        """Removes all capacity for the type in the zone, from now on."""
        self.launcher.no_capacity.add((instance_type, zone))

    def deregister_ami(self, image: str) -> None:
        """Deregisters the AMI, so that fleets that name it launch nothing more."""
        ec2_backends[self.account][self.region].amis.pop(image, None)

    def has(self, named: Account, secrets: Mapping[str, str] | None = None) -> None:
        """Makes the resources that a definition's `account` names, as if they had existed before, and the job's
        secrets. A secret's value is that of the environment variable GPUFLEET_SECRET_NAME; if it is not set, WORD.
        """
        before = set(self.inventory())
        account.seed_named(self.account, self.region, named)
        for name, reference in (secrets or {}).items():
            value = os.environ.get(environment.SECRET + name, WORD if name != "registry" else f"{WORD}:{WORD}")
            service, _, place = reference.partition(":")
            if service == "ssm":
                self.client(service).put_parameter(Name=place, Value=value, Type="SecureString", Overwrite=True)
            else:
                self.client(service).create_secret(Name=place, SecretString=value)
        self._baseline |= set(self.inventory()) - before

    def has_block(self, block: Reservation) -> None:
        """Gives the account a bought Capacity Block."""
        self.launcher.blocks[block.id] = block

    def has_images(self, digests: Mapping[str, str]) -> None:
        """Makes the registry answer with the real digests of these images."""
        for image, digest in digests.items():
            name, _, tag = image.partition("/")[2].partition(":")
            self._gate.images |= {(name, tag): digest, (name, digest): digest}

    def metadata(self, instance_id: str) -> Imds:
        return self._imds[instance_id]

    def inventory(self) -> dict[account.Resource, dict[str, str]]:
        """Everything that exists now, including what AWS makes by itself."""
        return account.inventory(self.account, self._fleet_tags)

    def leftovers(self, tags: Mapping[str, str] | None = None) -> dict[account.Resource, dict[str, str]]:
        """Everything except the account's initial resources. If `tags` are given, only resources that have all
        of them.
        """
        wanted = dict(tags or {}).items()
        return {
            key: has for key, has in self.inventory().items() if key not in self._baseline and wanted <= has.items()
        }

    def _fleet_tags(self, region: str) -> list[tuple[str, dict[str, str]]]:
        fleets = self.fleets.fleets.values()
        return [(f.id, f.tags) for f in fleets if f.region == region and not f.is_gone]

    def _tags_of(self, name: str) -> dict[str, str]:
        """The tags of a fleet or of one of its instances, by id."""
        tagged = self.fleets.fleets.get(name) or self.fleets.instances.get(name)
        return tagged.tags if tagged else {}

    def _statements(self, token: str) -> list[dict[str, Any]] | None:
        """The statements of the inline policies of the instance's role; its session token is its id."""
        instance = self.fleets.instances.get(token)
        return account.statements(self.account, instance.profile) if instance and instance.profile else None

    def _seed(self, region: str) -> None:
        with self._seeding:
            if region and region not in self._seeded and region not in ("aws", "aws-global"):
                before = set(self.inventory())
                account.seed_region(self.account, region)
                self._seeded.add(region)
                self._baseline |= set(self.inventory()) - before if self._baseline else set(self.inventory())

    def _launched(self, instance: CloudInstance) -> None:
        self._imds[instance.id] = Imds(
            instance,
            account=self.account,
            access_key=NODE_KEY,
            secret_key=SECRET,
            clock=self.clock,
            address=loopback(len(self._imds)),
        )
        if self.launch is not None:
            try:
                self.launch(instance)
            except OSError as error:  # for example a full disk; the cause is this machine, and not AWS
                self.trouble = error

    def _copied(self, image: str, instance: CloudInstance) -> None:
        if self.copy is not None:
            self.copy(image, instance)

    def _ended(self, instance: CloudInstance) -> None:
        instance.ended_at = instance.ended_at or self.clock.now()
        if self.end is not None:
            self.end(instance)
        self._imds[instance.id].close()

    def _start(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _drive(self) -> None:
        while not self._stop.wait(TICK_S):
            self.tick()


def loopback(number: int) -> str:
    """A loopback address for the rehearsed node with this number, from 0 on. As in a subnet, the text order of
    addresses differs from the order of launches. On systems other than Linux all nodes share one address.
    """
    return f"127.0.0.{9 + number % 240}" if sys.platform == "linux" else "127.0.0.1"


class _QuietHandler(MotoRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:
        """Logs nothing."""
