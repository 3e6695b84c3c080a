"""One machine's attempt at the run, from boot to shutdown.

A run ends by these steps: upload everything, write the done marker, delete the fleet, shut down. Every other end is a
failed attempt: the node records it, counts it, and shuts down too. No error leaves a machine running: if anything else
fails, this process ends with a code other than 0, and the script that started it deletes the fleet and shuts the
machine down.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import NoReturn

from gpufleet.job import atomic
from gpufleet.job.clock import SteadyClock
from gpufleet.job.contract import done as ends
from gpufleet.job.contract import terms
from gpufleet.job.contract.attempt import SLOW, SUPERSEDED, AttemptRecord, Exit, Node
from gpufleet.job.contract.aws import FLEET_TAG, FREE_S, NOTICE_PATH, asks_again, begins
from gpufleet.job.contract.bucket import ARCHIVE, ASKED, ATTEMPTS, DONE, HEARTBEATS, attempt_key, boot_log_key, stage_of
from gpufleet.job.contract.codes import AttemptExit
from gpufleet.job.contract.messages import AskAgain
from gpufleet.job.contract.reading import Fields, epoch, iso
from gpufleet.job.contract.spent import KEPT_S, Means, OtherNodes
from gpufleet.job.contract.terms import Following
from gpufleet.job.contract.workdir import DATA, INPUTS, NAMED, PACKAGES, RUN, USER
from gpufleet.job.node import container, disks, earlier_boots
from gpufleet.job.node.allowance import LEAST_S, LOOK_S, Allowance
from gpufleet.job.node.fallback import choose_hand_over, delete_fleet
from gpufleet.job.node.jobs import Jobs
from gpufleet.job.node.notices import Notices
from gpufleet.job.node.outside import (
    MetadataService,
    Objects,
    aws,
    bounded,
    call,
    complaint,
    history,
    last_line,
    log,
    nodes_there,
    retry,
    say,
    tries,
    utc_now,
)
from gpufleet.job.node.schedule import Schedule
from gpufleet.job.node.settings import InstanceIdentity, Settings

LOG_LINES = 200  # last lines of a crashed job's log that go into the boot log
OTHERS_S = 300  # seconds in which a block's other nodes can end by themselves after the run is over
TIMER_STOP_S = 180  # this many seconds after its start, the timer stops waiting for a docker that hangs
# The seconds after which a fleet whose id is not in the bucket is taken to be unknown. `up` writes the id some seconds
# after it made the fleet, and `destroy` removes the id before the fleet.
UNKNOWN_S, KNOWN_LOOK_S = 600, 120


BEFORE = "before"  # what earlier stages have spent
# what stays in the node's folder when the next stage begins on the machine
KEPT = frozenset({"app", ARCHIVE, "boot.log", "instance", "booted", BEFORE, "run"})
KEPT_OF_WORK = frozenset({DATA, INPUTS, PACKAGES, USER})  # in the work folder; of a command's folders only its inputs


class TerminatedError(BaseException):
    """SIGTERM came while no job was running."""


class NodeRun:
    """One machine. `run` does not return: it ends the process."""

    def __init__(self, settings: Settings, machine: InstanceIdentity) -> None:
        self.settings, self.machine = settings, machine
        self.folder, self.booted_at = settings.folder, utc_now()
        self.clock = SteadyClock(machine.launched)
        self.allowance = Allowance(Schedule(settings.schedule, settings.folder), self.clock, settings.timer_s)
        self.metadata = MetadataService(settings.metadata)
        self.objects = Objects(settings.bucket, settings.run)
        self.fleet_objects = Objects(settings.bucket, settings.fleet_run or settings.run)
        self.hand_over = choose_hand_over(settings, self.metadata, self.objects, self.clock)
        self.notices = Notices(settings, machine, self.objects, self.clock)
        self.record = AttemptRecord(
            instance=machine.instance,
            type=machine.type,
            zone=machine.zone,
            launched_at=machine.launched_at,
            older_s=Decimal(f"{machine.older_s:.0f}") if machine.older_s else None,
            booted_at=self.booted_at,
        )
        self.manifest: str | None = None
        self.keys: list[str] = []
        self.others: OtherNodes  # exists from the time at which the attempt's record is begun
        self.workdir: Path | None = None  # the job's folder; None before it exists
        self.timer = threading.Thread(target=self._end_by_timer, name="timer", daemon=True)
        self.fired, self.ender, self._taking_over = threading.Event(), self.timer, threading.Lock()
        self.job: subprocess.Popen[bytes] | None = None
        self.command: Jobs | None = None
        self._fetching: threading.Thread | None = None
        self._recording = threading.Lock()
        self._ended = self._job_looks = self._run_file_is_here = False
        # a program that took the place of another one (`_stay`) finds that one's file
        self.rebooted = (self.folder / "booted").exists() and not settings.since

    def run(self) -> NoReturn:
        """Runs from boot to shutdown. The timer is set before anything that may hang."""
        self.timer.start()
        threading.Thread(target=self._end_unless_known, name="state", daemon=True).start()
        signal.signal(signal.SIGTERM, self._terminated)
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # `_stay` blocks it
            say(f"gpufleet node of stack {self.settings.stack}, run {self.settings.run}")
            here = self.machine
            say(f"{here.instance} {here.type} {here.zone}, launched {here.launched_at}")
            self._conclude(self._attempt())
        except TerminatedError:
            say("terminated before or after the job")
            self._record_exit(AttemptExit.TERMINATED, "terminated")
            self.allowance.open()
            self._leave("terminated")
        except Exception:  # noqa: BLE001 - whatever it is, it is recorded and counted
            say(traceback.format_exc())
            self._crash("the node script stopped unexpectedly")

    def _attempt(self) -> int:
        """Does everything up to the end of the job; returns the job's exit code."""
        self._leave_if_over()
        self._meet()
        if self.rebooted:
            self._crash("the machine was rebooted")
        (self.folder / "booted").touch()
        self._fetching = threading.Thread(target=self._fetch_run_file, name="run file", daemon=True)
        self._fetching.start()
        self._begin_record()
        threading.Thread(target=self._watch_notice, name="notice", daemon=True).start()
        is_ready = bool(self.settings.scratch)
        scratch = Path(self.settings.scratch) if is_ready else disks.scratch(self.settings.root, self.folder)
        if (volume := self.settings.data_volume) and not is_ready:
            problem = disks.mount_data(self.settings.root, self.settings.data_device, blank=volume == "blank")
            if problem is not None:
                self._crash(problem)
        self._fetching.join()
        if not self._run_file_is_here:
            self._crash(f"{RUN} cannot be had as declared")
        self.workdir = scratch / "run"
        self.workdir.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.folder / RUN, self.workdir / RUN)
        container.give(self.settings, self.workdir)
        self._limit(self.workdir)
        self._check_gpu()
        self._check_cards()
        began = self.clock()
        self._pull()
        pulled_s = self.clock() - began
        self._yield()
        say("starting the container")
        self.notices.watch(self.workdir, self.keys)
        self.hand_over.watch(self.workdir)
        self._job_looks = True
        addresses = (self.metadata.get("meta-data/local-ipv4") for _ in tries(3))
        address = next(filter(None, addresses), None) if self._terms().is_gang else ""
        if address is None:
            self._crash("the metadata service does not give this machine's address")
        here = (self.settings, self.machine, scratch)
        with Jobs(*here, meets=bool(address)) as self.command:
            return self._run_job(container.command(*here, pulled_s, address.strip(), self.hand_over.market))

    def _terms(self) -> terms.Terms:
        """The run's terms. As long as run.json is missing, they are those of a single node that would be replaced."""
        if self._fetching is not None:
            self._fetching.join()
        run = atomic.read_object(self.folder / RUN)
        return terms.UNKNOWN if run is None else terms.read(Fields(run))

    def _is_futile(self, boots: int) -> bool:
        """Whether the run must end because too many boots in a row made no progress. False if there are several nodes,
        because they boot at the same time.
        """
        return boots >= earlier_boots.MOST_FUTILE and boots >= earlier_boots.MOST_FUTILE * self._terms().nodes

    def _leave_if_over(self) -> None:
        if not self._list():
            self._crash("the bucket cannot be listed")
        if DONE in self.keys:
            self._ended = True
            if self._fetching is None:
                self._fetch_run_file()  # run.json says which kind of fleet this is
            self._upload_log()
            self._hand_on()
            self._stop_fleet()
            self._leave("the run was over before this boot")
        if self.settings.since and ASKED in self.keys and not any(key.startswith(ATTEMPTS) for key in self.keys):
            say("somebody asked the run to end: this stage does not begin")
            self._upload_log()
            self._stop_fleet()
            self._leave("the run was asked to end")

    def _meet(self) -> None:
        """Looks for nodes in the other market, so that only one node trains at a time."""
        try:
            trains = self.hand_over.meet(self._find_fleet, self.keys)
        except OSError as error:
            self._crash(str(error))
        if not trains:
            self._stand_down()
        self.record = replace(self.record, capacity=self.hand_over.market)
        if self.hand_over.took_over:
            self.notices.tell("on spot it would miss its deadline: it continues on demand")
        if "/" in self.settings.run and (own := self._find_fleet()) is not None:
            self.allowance.fleets = [own]  # the fleet of another stage has its own schedule
        if self.hand_over.fleet:
            # The spot node's time may run out, but this must not end the on-demand fleet.
            self.allowance.fleets = [self.hand_over.fleet]
            self._leave_if_over()  # checked again, because another node may have ended the run meanwhile

    def _list(self) -> bool:
        """Lists the run's objects once: whether the run is over, the newest manifest, earlier attempts."""
        for _ in tries(6):  # AWS may refuse a new role for half a minute
            if (keys := self.objects.keys()) is not None:
                self.keys = keys
                newest = earlier_boots.newest_manifest(keys)
                self.manifest = None if newest is None else f"{self.settings.run}/{newest}"
                return True
        return False

    def _begin_record(self) -> None:
        """Records this boot; if the boots before this one made no progress, ends the run instead."""
        here, market = self.machine, self.hand_over.market
        since = epoch(self.settings.since) or 0.0
        own = Node(here.instance, here.type, here.zone, here.launched, capacity=market, since=since)
        self.others = OtherNodes(own)
        if any(key.startswith(ATTEMPTS) for key in self.keys):
            records = self._records()
            if records is None or not self.objects.get_folder(HEARTBEATS, self.folder / HEARTBEATS):
                self._crash("the attempts cannot be read")
            boots = earlier_boots.futile_boots(records, self.manifest)
            if self._is_futile(boots):
                self._end_run(ends.BOOT_LOOP, f"{boots} boots in a row without progress")
            beats = self.folder / HEARTBEATS
            self.others.hear((record, earlier_boots.beat(beats, record.instance, _set_aside)) for record in records)
        self.record = replace(self.record, manifest_at_boot=self.manifest, capacity=self.hand_over.market)
        if not (self.machine.older_s and not self.others.nodes):  # else this machine was the only one all along
            self._ask_others()
        if not self._record(self.record):
            self._crash("the attempt cannot be recorded")

    def _records(self) -> list[AttemptRecord] | None:
        """The records of all boots, including this one's if it exists. None if they cannot be read. In that case the
        attempt cannot be counted, and must not be repeated.
        """
        folder = self.folder / ATTEMPTS
        return earlier_boots.read(folder, _set_aside) if self.objects.get_folder(ATTEMPTS, folder) else None

    def _ask_others(self) -> bool:
        """Asks AWS when other nodes ended; returns whether AWS answered. This node's record keeps the times for later
        nodes.
        """
        fleet = self._find_fleet() if self.others.doubtful else None
        if fleet is not None:
            now = self.clock()
            if (answer := history([fleet, *self.hand_over.others(fleet)], now - KEPT_S)) is not None:
                self.others.take(answer, now)
        self.record = replace(self.record, ended=self.others.ended, untold=self.others.untold)
        return fleet is not None

    def _means(self) -> Means:
        """What the run may still spend, by the run.json from AWS, because the training process could change the other
        copy.
        """
        return self.others.means(terms.read(Fields(atomic.read_object(self.folder / RUN))))

    def _spent_before(self) -> tuple[Decimal, Decimal]:
        """USD and seconds that the stages before this one have spent."""
        usd, seconds = Decimal(0), Decimal(0)
        before, own = self._terms().before, replace(self.others.own, instance="")
        with ThreadPoolExecutor(8) as pool:
            for stage, is_here in zip(before, pool.map(self._fetch_spent, before)):
                if not is_here:
                    self._crash(f"what the stage {stage} has spent cannot be read")
        for stage in before:
            folder = self.folder / BEFORE / stage
            records, beats = earlier_boots.read(folder / ATTEMPTS, _set_aside), folder / HEARTBEATS
            nodes = OtherNodes(
                own, [(record, earlier_boots.beat(beats, record.instance, _set_aside)) for record in records]
            )
            of_stage = terms.read(Fields(atomic.read_object(folder / RUN) or {}))
            spent = nodes.total(of_stage)
            usd, seconds = usd + spent[0] + of_stage.fixed_usd, seconds + spent[1]
        return usd, seconds

    def _fetch_spent(self, stage: str) -> bool:
        """Whether the records of an earlier stage are on this machine; they stay, because it spends nothing more."""
        there, folder = Objects(self.settings.bucket, stage_of(self.settings.run, stage)), self.folder / BEFORE / stage
        if (folder / RUN).exists():
            return True
        with ThreadPoolExecutor(2) as pool:
            copied = pool.map(lambda prefix: there.get_folder(prefix, folder / prefix), (ATTEMPTS, HEARTBEATS))
        return all(copied) and retry(4, lambda: there.get(RUN, folder / RUN))

    def _limit(self, workdir: Path) -> None:
        """Sets timer and schedule by what the run may still spend. Ends the run if this is too little. A node that was
        lost before its first heartbeat may have been lost before this look, so a record alone begins no stage.
        """
        self.others.before = self._spent_before()
        run, is_new = self._terms(), not (self.others.nodes or self.others.untold)
        is_begun = any(key.startswith(HEARTBEATS) for key in self.keys)
        if not is_begun and (left_usd := run.limits.max_usd - self.others.before[0]) < run.least_usd:
            why = f"it did not begin: it needs {run.least_usd:f} USD, and {left_usd:.2f} are left"
            self._end_run(ends.MAX_USD, why, hands_on=False)
        over, limit = self.allowance.begin(self._means(), workdir, moves=not self.machine.older_s)

        def recount() -> Means | None:
            return self._means() if self._ask_others() else None

        watch = (self._noticed, recount)
        threading.Thread(target=self.allowance.watch, args=watch, name="allowance", daemon=True).start()
        say(f"timer: {self.allowance.timer_at - self.clock():.0f} s from now, at the highest price")
        left_s = over - self.clock()
        if left_s <= (0 if is_new else LEAST_S):
            self._end_run(limit, f"only {max(left_s, 0):.0f} s were left for this boot")

    def _watch_notice(self) -> None:
        """Watches for an interruption notice until the job watches for it, because a boot that AWS interrupts is not a
        failed attempt.
        """
        while not self._job_looks:
            if self._noticed() and not self._job_looks:
                self._record_exit(AttemptExit.INTERRUPTED, "interrupted")
                return
            time.sleep(4)

    def _fetch_run_file(self) -> None:
        declared = self.settings.run_config_sha256
        self._run_file_is_here = retry(4, lambda: self.objects.get(RUN, self.folder / RUN, declared))

    def _check_gpu(self) -> None:
        if self.settings.device == "cpu":
            return
        why = ""
        for _ in tries(3):
            query = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
            if (problem := complaint(120, *query)) is None:
                return
            why = problem
        self._crash("no working GPU", why=why)

    def _check_cards(self) -> None:
        """Checks the EFA devices: without them, nodes would train slowly over TCP, and nobody would be told."""
        listed = self._terms().prices.get(self.machine.type)
        wanted = 0 if listed is None or self.settings.device == "cpu" else listed.efa
        here = len(container.efa_devices(self.settings.root))
        if wanted and here != wanted:
            self._crash(f"this machine has {here} EFA devices, but its launch template asks for {wanted}")

    def _pull(self) -> None:
        """Pulls the image, or both images of a command, whose own image may come from another registry."""
        if self.settings.job_image:
            self._pull_image(self.settings.image)
        job = (atomic.read_object(self.folder / RUN) or {}).get("job") or {}
        registry = (job.get("parameters") or {}).get("registry")
        self._pull_image(self.settings.job_image or self.settings.image, str(registry or ""))

    def _pull_image(self, image: str, registry: str = "") -> None:
        login = self.folder / "docker"
        os.environ["DOCKER_CONFIG"] = str(login)
        why = ""
        for _ in tries(5):
            if (problem := container.pull(image, login, registry)) is None:
                return
            why = problem
            if container.HOPELESS.search(why):
                break
        self._crash("the image cannot be pulled", why=why)

    def _run_job(self, command: list[str]) -> int:
        """Runs the job; returns its exit code as a shell does."""
        with (self.folder / "container.log").open("wb") as printed:
            self.job = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.STDOUT)
            code = self.job.wait()
        self.job = None
        code = code if code >= 0 else 128 - code
        say(f"the container ended with {code}")
        return code

    def _conclude(self, code: int) -> NoReturn:
        """Ends the attempt in the way that belongs to the job's exit code."""
        self._yield()
        if code == AttemptExit.FINISHED:
            self._record_exit(code, "finished")
            self._end_run(ends.FINISHED)
        if code == AttemptExit.FAILED:
            self._record_exit(code, "failed")
            self._end_run(ends.FAILED, "the job failed for good")
        if code == AttemptExit.INTERRUPTED:
            self._interrupted()
        dockers_own = 125 <= code <= 127  # these exit codes mean that the job never began
        why = last_line((self.folder / "container.log").read_text(errors="replace")) if dockers_own else ""
        self._crash(f"the container ended with {code}", code, why=why)

    def _end_run(self, reason: str, detail: str = "", *, hands_on: bool = True) -> NoReturn:
        self._ended = True
        say(f"the run is over: {reason}{detail and ': '}{detail}")
        if not (hands_on and self._terms().following):  # else `_stay` sends it, and all else, at once
            self._upload_log()
        if not self._mark_done(reason, detail):
            say("the done marker cannot be written")
        if self._speaks():  # AWS may end this machine during the next steps
            self.notices.end(f"it is over: {reason}{detail and ', '}{detail}")
        self.hand_over.end()
        if hands_on:
            self._hand_on()
        self._stop_fleet()
        self._leave(reason)

    def _hand_on(self) -> None:
        """Begins the next stage, if there is one and this stage has done its work. If it is begun twice, this does no
        harm, because its fleet then already has its size. If it cannot be begun, this fleet stays, and its next node
        tries again.
        """
        if (following := self._terms().following) is not None:
            ending = self._read_ending()
            return self._stay(following, ending) if ending and ending.reason in ends.LEAVES_NODE else self._upload_log()
        stage = self.settings.next_stage
        ending = self._read_ending() if stage else None
        if ending is None or ending.reason != ends.FINISHED:
            return
        listed = self._list()
        if listed and ASKED in self.keys:
            return say(f"somebody asked the run to end: the stage {stage} does not begin")
        self.allowance.open()  # no node of the run costs money until the next stage has one
        if not listed or not retry(5, lambda: self._start_machine(begins(stage), "{}")):
            self._leave(f"the stage {stage} could not be begun: the next node tries again")
        say(f"the stage {stage} begins")

    def _stay(self, following: Following, ending: ends.Done) -> NoReturn:
        """Begins the next stage on this machine: this program starts anew in its own place, with that stage's settings.
        Of the ended stage the machine keeps the image, and the inputs and packages in the work folder, which are
        checked anew. A fresh node, to which the fleet gives the same settings as to the first, also comes here, because
        it finds the stages before its own ended.
        """
        if self.rebooted:
            self._leave("the machine was rebooted")
        say(f"the stage {following.stage} begins on this node")
        with ThreadPoolExecutor() as pool:
            pool.submit(self._upload_log)
            pool.submit(self._record_stay)
            pool.submit(call, "docker", "rm", "-f", container.name(self.machine.instance))
        self.allowance.hold()
        for folder, stays in (
            (self.folder, KEPT),
            *(((self.workdir, KEPT_OF_WORK), (self.workdir / USER, {NAMED})) if self.workdir else ()),
        ):
            for path in folder.iterdir() if folder.exists() else ():
                if path.name not in stays:
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        settings = {
            "RUN_ID": stage_of(self.settings.run, following.stage),
            "RUN_CONFIG_SHA256": following.sha256,
            "FLEET_RUN": self.settings.fleet_run or self.settings.run,
            "SINCE": ending.at,
            "SCRATCH": self.settings.scratch if self.workdir is None else str(self.workdir.parent),
        }
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until the new program can handle it
        os.execvpe("python3", ["python3", "-B", "-m", "gpufleet.job.node"], {**os.environ, **settings})

    def _record_stay(self) -> None:
        """Records that this machine goes on, if it has a record in the ended stage."""
        key = attempt_key(self.machine.instance)
        if key in self.keys and self.objects.get(key, self.folder / "attempt.json"):
            self._record(replace(self.record, stayed=True))

    def _start_machine(self, suffix: str, content: str, *options: str) -> bool:
        """Starts the run's state machine whose name has this suffix; returns whether it was started."""
        group, account = self.settings.schedule.partition("/")[0], self.machine.account
        machine = f"arn:aws:states:{self.settings.region}:{account}:stateMachine:{group}{suffix}"
        asked = ("aws", "stepfunctions", "start-execution", "--state-machine-arn", machine, "--output", "text")
        return call(*asked, *options, "--input", content)

    def _stand_down(self) -> NoReturn:
        """Ends this spot node, because the run continues on demand, and its fleet if it still exists."""
        self._ended = True
        self._upload_log()
        if (fleet := self._find_fleet()) is not None:
            delete_fleet(fleet)
        self._leave("the run continues on demand")

    def _crash(self, reason: str, code: int = AttemptExit.CRASHED, *, why: str = "") -> NoReturn:
        """Records a failed attempt. The fleet then makes the next node, unless three attempts in a row made no
        progress. The fleet of a block does not replace nodes: the fleet is ended, and the next `up` launches all of its
        nodes again.
        """
        self._yield()
        self._ended = True
        reason = f"{reason}: {why}" if why else reason
        say(f"attempt failed: {reason}")
        printed = self.folder / "container.log"
        if printed.exists():
            log("".join(printed.read_text(errors="replace").splitlines(keepends=True)[-LOG_LINES:]))
        self._upload_log()
        records = self._records() if self._record_exit(code, reason) and self._list() else None
        if records is None:
            say("the attempt cannot be counted")  # if there are several nodes, the others go on, and end by themselves
        elif self._is_futile(boots := earlier_boots.futile_boots(records, self.manifest)):
            self._end_run(ends.BOOT_LOOP, f"{boots} boots in a row without progress; the last: {reason}")
        ended = ""
        if not self._terms().replaces:
            ended = ": its fleet is ended, because it replaces no node; `pulumi up` launches all nodes again"
        elif records is None and not self._terms().is_gang:
            ended = ": its fleet is ended"
        self.notices.tell(f"a node has failed, {reason}{ended}")  # sent before AWS may end this machine
        if ended:
            self._stop_fleet()
        self._leave(reason)

    def _interrupted(self) -> NoReturn:
        self._ended = True
        self._record_exit(AttemptExit.INTERRUPTED, "interrupted")
        ending = AttemptRecord.from_json(atomic.read_object(self.folder / "attempt.json") or {}, _set_aside).exit
        if ending is not None and ending.reason == SUPERSEDED:
            self._stand_down()
        if self.workdir is not None and (asked := AskAgain.read(self.workdir)) is not None:
            self._ask_again(asked.name, asked.pause_s)
        self.allowance.open()
        self._upload_log()
        how = "a slow node leaves" if ending is not None and ending.reason == SLOW else "AWS takes the node"
        self.notices.tell(f"{how}{', and the run waits for another' if self._terms().replaces else ''}")
        age = self.clock() - self.machine.launched + self.machine.older_s
        if ending is not None and ending.notice and age < FREE_S:
            say(f"interrupted {age:.0f} s after launch: waiting for AWS to end this machine")
            for _ in range(180):
                time.sleep(5)
        self._leave("interrupted")

    def _ask_again(self, name: str, pause_s: float) -> NoReturn:
        """Ends this node, because other nodes were missing for too long. After a pause, AWS launches all nodes
        again.
        """
        run = self.settings.run
        pause, once = json.dumps({"pause_s": round(pause_s)}), ("--name", f"{run.replace('/', '-')}-{name}")
        begun = retry(3, lambda: self._start_machine(asks_again(run), pause, *once))
        then = f"AWS launches all again in {pause_s / 60:.0f} minutes" if begun else "its fleet launches nodes at once"
        say(f"others were missing: {then}")
        self.allowance.open()
        self._upload_log()
        if self.notices.speaks_while_it_waits:
            self.notices.tell(f"other nodes were missing, and the waiting nodes end: {then}")
        self._leave("others were missing")

    def _leave(self, why: str) -> NoReturn:
        """Shuts the machine down. Every way in which a node ends leads here."""
        self._ended = True
        say(f"shutting down: {why}")
        if retry(5, lambda: call("shutdown", "-h", "now")):
            os._exit(0)
        if threading.current_thread() is not self.ender:
            self.ender.join()
        os._exit(1)

    def _end_by_timer(self) -> None:
        """Ends the run when the timer of this machine fires, whatever job and supervisor do."""
        while (seconds_left := self.allowance.timer_at - self.clock()) > 0:
            time.sleep(min(seconds_left, LOOK_S))
        self._take_over(lambda: self._end_run(ends.TIMER, f"{self.clock() - self.machine.launched:.0f} s after launch"))

    def _end_unless_known(self) -> None:
        """Ends a fleet that no stack's state names, because `up` was killed after it made the fleet, or `destroy` lost
        it. A fleet that a state has named once is not ended if S3 does not answer. A fleet that no state has named yet
        has UNKNOWN_S seconds until S3 must name it.
        """
        fleet, seen, since = self._find_fleet(), False, time.monotonic()
        while not self._ended:
            known = None if fleet is None else self.fleet_objects.fleets()
            if fleet in (known or ()):
                seen, since = True, time.monotonic()
            elif known is None and (seen or fleet is None):
                fleet, since = fleet or self._find_fleet(), time.monotonic()
            elif time.monotonic() - since >= UNKNOWN_S:
                self._take_over(self._end_unknown)
            threading.Event().wait(KNOWN_LOOK_S)

    def _end_unknown(self) -> NoReturn:
        """Ends an unknown fleet. Does not write done.json, because the run may belong to another fleet."""
        why = "its fleet is in no stack's state"
        say(f"{why}: docs/real-aws.md, A command that was killed")
        self._record_exit(AttemptExit.TERMINATED, why)
        self._upload_log()
        self._stop_fleet(alone=True)
        self._leave(why)

    def _take_over(self, end: Callable[[], NoReturn]) -> None:
        """Stops the job, then runs `end`, in a thread for which all other threads wait."""
        with self._taking_over:
            self.ender = threading.current_thread()
            self._ended = True
            self.fired.set()
            try:
                (self.folder / "timer").touch()
                call(*bounded(TIMER_STOP_S, *container.stop(self.machine)))
                if self.command is not None:
                    self.command.remove()
                end()
            finally:
                os._exit(1)

    def _yield(self) -> None:
        """Waits for the thread that ends the run, if there is one."""
        if self.fired.is_set() and threading.current_thread() is not self.ender:
            self.ender.join()

    def _terminated(self, *_: object) -> None:
        if self.job is not None:  # stop the job's container; its exit code then decides how this node ends
            subprocess.Popen(container.stop(self.machine), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        elif not self._ended:
            self._ended = True
            raise TerminatedError

    def _noticed(self) -> bool:
        return '"action"' in (self.metadata.get(NOTICE_PATH) or "")

    def _record(self, own: AttemptRecord) -> bool:
        """Adds missing fields to this machine's record. Returns False if the bucket refuses the record."""
        file = self.folder / "attempt.json"
        atomic.write_json(file, {**own.to_json(), **(atomic.read_object(file) or {})})
        return retry(3, lambda: self.objects.put(file, attempt_key(self.machine.instance)))

    def _record_exit(self, code: int, reason: str) -> bool:
        """Records the exit, unless the supervisor has recorded one."""
        with self._recording:
            retry(3, lambda: self.objects.get(attempt_key(self.machine.instance), self.folder / "attempt.json"))
            at = iso(self.clock())
            return self._record(replace(self.record, exit=Exit(int(code), reason, self._noticed(), at)))

    def _mark_done(self, reason: str, detail: str) -> bool:
        """Writes done.json, unless the supervisor has written it; uploads the supervisor's file if the supervisor could
        not.
        """
        if self._list() and DONE in self.keys:
            return True
        unsent = None if self.workdir is None else atomic.read_object(self.workdir / DONE)
        marker = ends.Done(reason, detail, self.machine.instance, utc_now())
        atomic.write_json(self.folder / DONE, unsent or marker.to_json())
        return retry(4, lambda: self.objects.put(self.folder / DONE, DONE))

    def _speaks(self) -> bool:
        """Whether this is the one of several nodes that has ended the run. That node sends the message to people."""
        return not self._terms().is_gang or self._who_ended() in ("", self.machine.instance)

    def _who_ended(self) -> str:
        """The instance id of the node that ended the run; empty if unknown."""
        ending = self._read_ending()
        return "" if ending is None else ending.instance

    def _read_ending(self) -> ends.Done | None:
        """How the run ended; None if unknown."""
        is_there = self.objects.get(DONE, self.folder / DONE)
        return ends.read((self.folder / DONE).read_bytes()) if is_there else None

    def _upload_log(self) -> None:
        retry(2, lambda: self.objects.put(self.folder / "boot.log", boot_log_key(self.machine.instance)))

    def _stop_fleet(self, *, alone: bool = False) -> None:
        """Deletes the fleet. A deleted fleet has no expiry that would end a machine which hangs in its shutdown, so AWS
        also ends this machine from outside. If `alone`, the run's other fleet stays. If a block's fleet is deleted, all
        of its nodes end and are not replaced, so the node that ended the run first waits for the others.
        """
        fleet = next((fleet_id for _ in tries(3) if (fleet_id := self._find_fleet())), None)
        others = [] if alone else self.hand_over.others(fleet)
        for other in others:
            if not delete_fleet(other):
                say(f"fleet {other} cannot be deleted, or is deleted already")
        run = self._terms()
        if fleet is None:
            say("no fleet id: nothing to delete")
        elif run.is_gang and not run.replaces and not self._is_last(fleet):
            say("the node that ended the run deletes the fleet")
        elif retry(3, lambda: delete_fleet(fleet, with_nodes=not run.replaces)):
            say(f"fleet {fleet} is deleted")
            if not call(
                "aws", "ec2", "terminate-instances", "--instance-ids", self.machine.instance, "--output", "text"
            ):
                say("only the shutdown ends the machine")
        else:
            by = (
                "AWS ends it by the schedule"
                if self.allowance.end_fleets([fleet, *others])
                else "its schedule or its expiry ends it"
            )
            say(f"fleet {fleet} cannot be deleted: {by}")
            self._upload_log()

    def _is_last(self, fleet: str) -> bool:
        """Whether this node also ends the other nodes: they have had their time to end, or the run is not over. A node
        that boots after the run's end also ends them, if the node that ended the run does not exist any more.
        """
        ender = self._who_ended()
        if ender not in ("", self.machine.instance) and ender in (nodes_there(fleet) or {ender}):
            return False
        for _ in range(OTHERS_S // 10 if ender else 0):
            if nodes_there(fleet) == {self.machine.instance}:
                break
            time.sleep(10)
        return True

    def _find_fleet(self) -> str | None:
        tag = f"Reservations[0].Instances[0].Tags[?Key=='{FLEET_TAG}']|[0].Value"
        described = ("ec2", "describe-instances", "--instance-ids", self.machine.instance, "--output", "text")
        fleet_id = self.metadata.get(f"meta-data/tags/instance/{FLEET_TAG}") or aws(*described, "--query", tag)
        return fleet_id if fleet_id is not None and fleet_id.startswith("fleet-") else None


def _set_aside(why: str) -> None:
    say(f"of a record: set aside: {why}")


if __name__ == "__main__":
    given = Settings.from_environment(os.environ)
    NodeRun(given, InstanceIdentity.from_document(os.environ["IDENTITY"]).counted_since(given.since)).run()
