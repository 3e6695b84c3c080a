"""Images that a test makes of this machine's own programs, and a docker that has them without a registry."""

from __future__ import annotations

import importlib.metadata
import io
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.repository import ROOT

SHELL = ("sh", "bash", "cat", "chown", "cp", "env", "grep", "id", "ls", "mkdir", "mv", "rm", "sleep", "timeout", "true")
NETWORK = "gpufleet-test"
# Pulls nothing: the images were made here and have no digest. What this machine's daemon refuses of a node's own
# options is left out or replaced: limits above its own, and the bridge that it was started without.
SHIM = """#!{python} -SE
import os, re, sys
words, refused = sys.argv[1:], {refused!r}
if words[0] == "pull":
    sys.exit()
if words[:2] == ["image", "inspect"]:
    words[3] = "{{{{.Size}}}} it@{{{{.Id}}}}"
for old, new in refused:
    for at in reversed(range(len(words) - 1)):
        if words[0] == "run" and words[at:at + 2] == old:
            words[at:at + 2] = new
words = [re.sub("^(gpufleet[.]test/.+)@sha256:[0-9a-f]{{64}}$", r"\\1", word) for word in words]
with open(__file__ + ".asked", "a") as asked:
    asked.write(" ".join(words) + "\\n")
os.execv({docker!r}, ["docker", *words])
"""


def daemon() -> str:
    """Why there is none; nothing where one answers."""
    if shutil.which("docker") is None:
        return "no docker here"
    words = ("docker", "version", "-f", "{{.Server.Version}}")
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"no docker daemon answers here: {done.stderr.strip()}"


@contextmanager
def shim(folder: Path, probe: str) -> Iterator[Path]:
    """A folder for PATH with a docker that finds what `image` has made. `probe`: one of those."""
    refused: list[tuple[list[str], list[str]]] = []
    own = not _runs("--network", "bridge", probe)
    if own:
        subprocess.run(["docker", "network", "create", NETWORK], check=True, capture_output=True)
        refused.append((["--network", "bridge"], ["--network", NETWORK]))
    if not _runs("--network", "none", "--ulimit", "memlock=-1", probe):
        refused.append((["--ulimit", "memlock=-1"], []))
    folder.mkdir()
    docker = folder / "docker"
    docker.write_text(SHIM.format(python=sys.executable, docker=shutil.which("docker"), refused=refused))
    docker.chmod(0o755)
    try:
        yield folder
    finally:
        if own:
            subprocess.run(["docker", "network", "rm", NETWORK], check=False, capture_output=True)


def _runs(*words: str) -> bool:
    done = subprocess.run(["docker", "run", "--rm", "--entrypoint", "true", *words], capture_output=True, check=False)
    return done.returncode == 0


def image(name: str, *, packages: Sequence[str] | None = None) -> str:
    """`gpufleet.test/NAME:1`, of this machine's shell, and with `packages` of its Python and these."""
    full = f"gpufleet.test/{name}:1"
    words = ("docker", "import", "-c", "ENV PATH=/usr/local/bin:/usr/bin:/bin", "-", full)
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as made:
        assert made.stdin is not None
        with tarfile.open(fileobj=made.stdin, mode="w|", dereference=True) as tar:
            _fill(tar, packages)
    assert made.returncode == 0
    return full


def as_user(base: str, user: int) -> str:
    """The image with another user."""
    full = base.replace(":1", f"-{user}:1")
    text = f"FROM {base}\nUSER {user}\n"
    subprocess.run(["docker", "build", "-q", "-t", full, "-"], input=text, text=True, check=True, capture_output=True)
    return full


def required(listed: Path) -> list[str]:
    """The packages that a list of requirements names."""
    return re.findall(r"^([A-Za-z0-9._-]+)==", listed.read_text(), flags=re.M)


SUPERVISOR = ROOT / "job" / "command" / "requirements.txt"


def _fill(tar: tarfile.TarFile, packages: Sequence[str] | None) -> None:
    for name in ("tmp", "proc", "dev", "sys", "etc"):
        _folder(tar, name, 0o1777 if name == "tmp" else 0o755)
    _text(tar, "etc/passwd", "root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/tmp:/bin/sh\n")
    files = {Path("/bin", name): Path(found) for name in SHELL if (found := shutil.which(name))}
    linked = list(files.values())
    if packages is not None:
        library = Path(sysconfig.get_path("stdlib"))
        program = Path(sys.executable).resolve()
        linked.append(program)
        for name in ("python", "python3"):
            files[Path("/usr/local/bin", name)] = program
        for path in library.rglob("*"):
            below = path.relative_to(library).parts
            if path.is_file() and not {"test", "site-packages", "dist-packages", "__pycache__"} & {*below}:
                files[path] = path
                linked += [path] if path.suffix == ".so" else []
        site = library / "site-packages"
        for package in packages:
            distribution = importlib.metadata.distribution(package)
            for file in distribution.files or ():
                if (source := Path(str(file.locate()))).is_file() and ".." not in file.parts and file.suffix != ".pyc":
                    files[site / file] = source
    done = subprocess.run(["ldd", *linked], capture_output=True, text=True, check=False)
    files |= {Path(each): Path(each) for each in re.findall(r"(/\S+) \(0x", done.stdout)}
    folders = {above for path in files for above in path.parents if above != Path("/")}
    for folder in sorted(folders):  # else nobody but root sees what is below them
        _folder(tar, str(folder).lstrip("/"), 0o755)
    for path, source in sorted(files.items()):
        tar.add(source, str(path).lstrip("/"))


def _folder(tar: tarfile.TarFile, name: str, mode: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = tarfile.DIRTYPE, mode
    tar.addfile(entry)


def _text(tar: tarfile.TarFile, name: str, text: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(text), 0o644
    tar.addfile(entry, io.BytesIO(text.encode()))
