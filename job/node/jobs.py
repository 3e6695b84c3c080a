"""Starts and removes the training container, when the supervisor asks for it by a file (job/command/places.py). No
container has docker's socket. A request is only a number: image, mounts and rights are decided here alone. A user's
command has a third container, the watcher. The watcher can see only the command's processes. It reports them and passes
signals on to them, because the supervisor cannot see them.
"""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path
from types import TracebackType

from gpufleet.job import atomic
from gpufleet.job.contract.workdir import CONTAINED, CONTAINER, CONTROL, FIRST, PACKAGES, SCRIPTS, USER, WATCHER
from gpufleet.job.node import container
from gpufleet.job.node.outside import ask, bounded, last_line, say
from gpufleet.job.node.settings import InstanceIdentity, Settings

LOOK_S = 0.2
REMOVE_S = 60
# Rights that are needed to read files of a data volume as root, and to run candidates as another user.
OVER_FILES = ("CHOWN", "DAC_OVERRIDE", "KILL", "SETGID", "SETUID")
# Rights that are needed to install packages as root. Docker's other rights, for raw packets and devices, are not
# needed.
RIGHTS = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID")
# Rights to read and signal processes of any user, whose environment shows their rank. DAC_READ_SEARCH is left out,
# because with it docker's filter would allow a system call that opens any file on the disk of a mount by its number.
OVER_PROCESSES = ("DAC_OVERRIDE", "KILL", "SYS_PTRACE")


def name(instance: str) -> str:
    return f"{container.name(instance)}-job"


def watcher_name(instance: str) -> str:
    """The name of the container that watches the training one."""
    return f"{container.name(instance)}-watcher"


class Jobs:
    """The containers of one machine. Inside of `with`, requests are served; after it, no training process runs."""

    def __init__(self, settings: Settings, machine: InstanceIdentity, scratch: Path, *, meets: bool = False) -> None:
        """`meets`: whether the training process communicates with those of the run's other nodes."""
        self._settings, self._scratch, self._meets = settings, scratch, meets
        self._control = scratch / "run" / CONTROL
        self._control.mkdir(parents=True, exist_ok=True)  # made here, because this process writes its answers into it
        if settings.job_image:
            (scratch / "run" / WATCHER).mkdir(exist_ok=True)
            (scratch / "run" / WATCHER).chmod(0o777)  # in a container root has no rights over another user's folder
        container.give(settings, self._control)
        self._name, self._watcher_name = name(machine.instance), watcher_name(machine.instance)
        self._number, self._pid = 0, 0  # number and process of the newest requested container
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="jobs", daemon=True)
        self._running: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Jobs:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self.remove()

    def remove(self) -> None:
        """Ends the containers and all of their processes at once."""
        for running, its in ((self._running, self._name), (self._watcher, self._watcher_name)):
            if running is not None:
                ask(*bounded(REMOVE_S, "docker", "rm", "-f", its))
                running.kill()  # kill docker's client too, if it has not noticed the end
                running.wait()
        self._running = self._watcher = None

    def _serve(self) -> None:
        last_error = ""
        while not self._ended.wait(LOOK_S):
            try:
                self._look()
            except OSError as error:  # the disk is full; the answer is written once there is room
                if last_error != (last_error := str(error)):
                    say(f"the job's container cannot be served: {error}")
                if self._running is None:
                    self._number = 0

    def _look(self) -> None:
        """Serves the newest request, and writes the state of the container."""
        asked = atomic.read_object(self._control / CONTAINER) or {}
        if asked.get("number", 0) != self._number or not asked.get("wanted"):
            self.remove()
            self._number, self._pid = asked.get("number", 0), 0
            if asked.get("wanted"):
                self._start()
        if self._running is None:
            return
        if self._running.poll() is not None:
            self._end("the job's container is gone", self._running, "command.log")
        elif self._watcher is not None and self._watcher.poll() is not None:
            self._end("the container that watches the job's is gone", self._watcher, "watcher.log")
        elif not self._pid:
            answer = ask("docker", "inspect", "-f", "{{.State.Pid}}", self._name)
            pid = int(answer.out) if answer.out.isdigit() else 0
            if pid:
                if self._settings.job_image:
                    self._watcher = self._started(self.watcher(), "watcher.log")
                self._answer({"number": self._number, "pid": pid})
            self._pid = pid

    def _start(self) -> None:
        say("starting the job's container")
        self._running = self._started(self.command(), "command.log")

    def _started(self, command: list[str], log: str) -> subprocess.Popen[bytes]:
        with (self._settings.folder / log).open("wb") as printed:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.STDOUT)

    def _end(self, title: str, ended: subprocess.Popen[bytes], log: str) -> None:
        """Removes both containers and informs the supervisor, after the training container or its watcher has ended."""
        code = ended.wait()
        code = code if code >= 0 else 128 - code
        why = last_line((self._settings.folder / log).read_text(errors="replace")) or f"it ended with {code}"
        say(f"{title}: {why}")
        self._answer({"number": self._number, "problem": why, "code": code})
        self.remove()

    def _answer(self, answer: dict[str, object]) -> None:
        atomic.write_json(self._control / CONTAINED, answer)

    def command(self) -> list[str]:
        """The docker command that runs the training container."""
        return [
            *("docker", "run", "--name", self._name, "--stop-timeout", str(container.STOP_S)),
            *("--ipc", "host", "--ulimit", "memlock=-1", "--log-driver", "none"),
            *container.devices(self._settings),
            *(self._users_own() if self._settings.job_image else self._ready_made()),
            f"/gpufleet/run/{CONTROL}/{SCRIPTS}/{FIRST}",
        ]

    def watcher(self) -> list[str]:
        """The docker command for the watcher of a command: it shares the command's process namespace, has no network,
        and mounts only its own program and the folder for its answers.
        """
        app = self._settings.folder / "app"
        program = "/gpufleet/app/gpufleet/job/command/processes.py"
        return [
            *("docker", "run", "--name", self._watcher_name, "--log-driver", "none"),
            *("--pid", f"container:{self._name}", "--network", "none", *container.capabilities(*OVER_PROCESSES)),
            *("-v", f"{app}:/gpufleet/app:ro", "-v", f"{self._scratch / 'run' / WATCHER}:/gpufleet/run/{WATCHER}"),
            *(self._settings.image, "python", "-I", program, "watch", f"/gpufleet/run/{WATCHER}"),
        ]

    def _users_own(self) -> list[str]:
        """The options for a user's command. The command's network is a bridge. So it has no role, because the metadata
        service answers only within one hop (launch template). In a run with several nodes it has the machine's network,
        and so also the role. The command can see the user's folders at the same paths as the supervisor, and of
        gpufleet's own files only scripts and pipes.
        """
        options = container.network() if self._meets else ["--network", "bridge"]
        options += ["-e", "AWS_REGION", "-e", "AWS_DEFAULT_REGION"]
        for part in (USER, f"{CONTROL}/{SCRIPTS}"):
            options += ["-v", f"{self._scratch / 'run' / part}:/gpufleet/run/{part}"]
        return [*options, *container.capabilities(*RIGHTS), "--entrypoint", "sh", self._settings.job_image]

    def _ready_made(self) -> list[str]:
        """The options for a ready-made job. It has no network, because all inputs are already downloaded; if there are
        several nodes, it has the machine's network. The ranks find each other by the container's name. The job cannot
        change the supervisor's code or requests.
        """
        settings = self._settings
        options = container.network() if self._meets else ["--network", "none", "--hostname", "localhost"]
        options += container.own_code(settings, self._scratch)
        for part in (CONTROL, PACKAGES):
            options += ["-v", f"{self._scratch / 'run' / part}:/gpufleet/run/{part}:ro"]
        options += container.capabilities(*(OVER_FILES if settings.data_volume else ()))
        options += settings.container_options.replace("{app}", str(settings.folder / "app")).split()
        return [*options, settings.image, "sh"]
