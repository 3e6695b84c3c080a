"""The docker commands for the supervisor's image and container. The training has another container (jobs.py)."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from gpufleet.job.contract import environment
from gpufleet.job.contract.workdir import RUN
from gpufleet.job.node.outside import NOT_REACHED, answer, ask, complaint, say
from gpufleet.job.node.settings import InstanceIdentity, Settings

USER = 1000  # the user of containers with gpufleet's own jobs, whatever the user's name in the image
# A command's files belong to the user of its image, which may be any user. For that the supervisor needs rights: it
# reads and removes these files, opens them to everybody, and checks whether a process has them open for writing. It
# cannot see the processes of the command.
OVER_ANOTHERS_FILES = ("DAC_OVERRIDE", "FOWNER", "LEASE")
# The most processes and threads of a container. It is fewer than a machine allows, so that a fork bomb leaves some for
# the node.
PROCESSES = 30_000
STOP_S = 115  # seconds in which the job can save and upload; EC2's notice comes 120 s ahead
PULL_S = 1800
# after these errors, another pull would fail too
HOPELESS = re.compile("no space|not found|unknown|denied|no basic auth")
DOCKER_HUB = "https://index.docker.io/v1/"  # docker's name of the registry of an image whose name has no host
_ECR = re.compile(r"\.dkr\.ecr\.([a-z0-9-]+)\.amazonaws\.")
_PASSED_ON = ("AWS_ENDPOINT_URL", "AWS_EC2_METADATA_SERVICE_ENDPOINT", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


def name(instance: str) -> str:
    return f"gpufleet-{instance}"


def stop(machine: InstanceIdentity) -> tuple[str, ...]:
    """The command that asks the job to stop."""
    return ("docker", "stop", "-t", str(STOP_S), name(machine.instance))


def pull(image: str, login: Path, registry: str = "") -> str | None:
    """Pulls the image, unless the disk already contains it (`gpufleet bake`). Returns None if the image is on the disk,
    and otherwise the reason. `login`: the folder where docker keeps its login during the pull. `registry`: the place of
    the secret user:password for a registry other than ECR.
    """
    if "@sha256:" in image and answer("docker", "image", "inspect", "-f", "{{.Id}}", image) is not None:
        say(f"{image} is on this machine's disk: nothing is pulled")
        return None
    try:
        refused = _log_in(image, login, registry)
        return complaint(PULL_S, "docker", "pull", "-q", image) if refused is None else refused
    finally:
        shutil.rmtree(login, ignore_errors=True)


def _log_in(image: str, login: Path, registry: str) -> str | None:
    """Logs docker in: to a private ECR with this node's role (docker keeps the token as a login), to other registries
    with the registry's secret. Returns None, or the reason of the failure.
    """
    first, named, _ = image.partition("/")
    host = first if named and re.search("[.:]|^localhost$", first) else DOCKER_HUB
    private = _ECR.search(host)
    if private is None and not registry:
        return None
    read = ask(*(_ecr_token(private[1]) if private else secret(registry)), "--output", "text", *NOT_REACHED)
    if read.code != 0:
        return read.why
    token = read.out if private else base64.b64encode(read.out.encode()).decode()
    login.mkdir(parents=True, exist_ok=True)
    (login / "config.json").write_text(json.dumps({"auths": {host: {"auth": token}}}))
    return None


def _ecr_token(region: str) -> tuple[str, ...]:
    words = ("aws", "ecr", "get-authorization-token", "--region", region)
    return (*words, "--query", "authorizationData[0].authorizationToken")


def secret(place: str) -> tuple[str, ...]:
    """The AWS call that returns the secret at ssm:/name or secretsmanager:name."""
    kind, _, name = place.partition(":")
    if kind == "ssm":
        return ("aws", "ssm", "get-parameter", "--name", name, "--with-decryption", "--query", "Parameter.Value")
    return ("aws", "secretsmanager", "get-secret-value", "--secret-id", name, "--query", "SecretString")


def devices(settings: Settings) -> list[str]:
    """The options that give a container the machine's GPUs and its data volume, if it has them."""
    options: list[str] = []
    if settings.device != "cpu":  # needed because the image has its own CUDA, whose version some toolkits refuse
        options += ["--gpus", "all", "-e", "NVIDIA_DISABLE_REQUIRE=true"]
    if settings.data_volume:
        options += ["-v", f"{settings.root / 'data'}:/data"]
    return options


def efa_devices(root: Path = Path("/")) -> list[Path]:
    """The machine's network cards with an Elastic Fabric Adapter."""
    return sorted((root / "dev/infiniband").glob("uverbs*"))


def network(root: Path = Path("/")) -> list[str]:
    """The options by which a training container reaches the training containers of the run's other nodes: the machine's
    own network, and its EFA devices if it has any.
    """
    cards = (word for card in efa_devices(root) for word in ("--device", str(card)))
    return ["--network", "host", *cards]


def capabilities(*needed: str) -> list[str]:
    """The options that take all rights except `needed` from a container, prevent it from gaining others, and limit its
    processes.
    """
    dropped = ["--cap-drop", "ALL", *(word for name in needed for word in ("--cap-add", name))]
    return [*dropped, "--security-opt", "no-new-privileges", "--pids-limit", str(PROCESSES)]


def own_code(settings: Settings, scratch: Path) -> list[str]:
    """The options of a container in which gpufleet's own code runs: the code, the run's folder, and its user."""
    options = ["-v", f"{settings.folder / 'app'}:/gpufleet/app:ro", "-v", f"{scratch / 'run'}:/gpufleet/run"]
    options += ["-w", "/gpufleet/app", "-e", "PYTHONPATH=/gpufleet/app"]
    if not _has_files_of_others(settings):
        options += ["--user", f"{USER}:{USER}", "-e", "HOME=/tmp", "-e", "USER=gpufleet"]
    return options


def _has_files_of_others(settings: Settings) -> bool:
    """Whether files may belong to a user of a command's image or of a data volume; only root can serve such files."""
    return bool(settings.job_image or settings.data_volume)


def give(settings: Settings, folder: Path) -> None:
    """Makes the user of the containers the owner of the folder. In a rehearsal, it already is."""
    if not _has_files_of_others(settings):
        with suppress(PermissionError):
            for path in (folder, *folder.iterdir()):
                os.chown(path, USER, USER)


def command(
    settings: Settings, machine: InstanceIdentity, scratch: Path, pulled_s: float, address: str = "", capacity: str = ""
) -> list[str]:
    """The command that runs the supervisor; `scratch` holds its work folder, `pulled_s` is how long the pulls took.
    `address`: where the other nodes reach this one; `capacity`: the node's market, if the run may use both. The
    container uses the machine's network: a container on a bridge network, one hop further away, cannot reach the
    metadata service, and so has no role (launch template).
    """
    options = ["--network", "host", *own_code(settings, scratch)]
    options += capabilities(*(OVER_ANOTHERS_FILES if settings.job_image else ()))
    options += devices(settings)
    options += ["-e", "NVIDIA_DRIVER_CAPABILITIES=utility"] if settings.device != "cpu" else []
    for passed in _PASSED_ON:
        if os.environ.get(passed):
            options += ["-e", passed]
    logs = {
        "mode": "non-blocking",
        "max-buffer-size": "25m",
        "awslogs-region": settings.region,
        "awslogs-group": settings.log_group,
        "awslogs-stream": f"{settings.run}/{machine.instance}",
    }
    variables = {
        environment.JOB_CONTAINER: "1",
        environment.RUN_URI: f"s3://{settings.bucket}/{settings.run}",
        environment.INSTANCE_ID: machine.instance,
        environment.INSTANCE_TYPE: machine.type,
        environment.ZONE: machine.zone,
        environment.LAUNCHED_AT: machine.launched_at,
        environment.NODE_UPTIME: f"{machine.uptime:.3f}",
        environment.PULLED_S: f"{pulled_s:.3f}",
        **({environment.SINCE: settings.since} if settings.since else {}),
        **({environment.OLDER_S: f"{machine.older_s:.0f}"} if machine.older_s else {}),
        **({environment.ADDRESS: address} if address else {}),
        **({environment.CAPACITY: capacity} if capacity else {}),
    }
    return [
        *("docker", "run", "--name", name(machine.instance), "--stop-timeout", str(STOP_S)),
        *("--log-driver", "awslogs"),
        *(word for key, value in logs.items() for word in ("--log-opt", f"{key}={value}")),
        *(word for key, value in variables.items() for word in ("-e", f"{key}={value}")),
        *("-e", "AWS_REGION", "-e", "AWS_DEFAULT_REGION", "-e", "AWS_METADATA_SERVICE_NUM_ATTEMPTS"),
        *options,
        *(settings.image, "python", "-m", "gpufleet.job", f"/gpufleet/run/{RUN}"),
    ]
