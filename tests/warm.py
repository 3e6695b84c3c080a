"""The Python that the Pulumi engine's programs run on in the tests: a virtual environment whose `python` lets one
process, which has imported the SDK, fork each program. A start of its own takes three seconds, and before each program
the engine asks Python for its packages, which takes one more and is answered the same every time.

A program whose PYTHONPATH has another gpufleet imports that one.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from gpufleet.rehearsal.engine import Pulumi
from gpufleet.rehearsal.environment import scratch
from tests.forked import PROGRAMS_USE
from tests.repository import ROOT

# Hands over a program, and waits for its end. What is no program is a question, whose answer is kept.
PYTHON = """#!{python} -IS
import hashlib, json, os, socket, subprocess, sys

here, words = {folder!r}, sys.argv[1:]
if words and words[0].endswith("pulumi-language-python-exec"):
    asked = json.dumps([words, os.getcwd(), dict(os.environ)]).encode() + b"\\n"
    os.chdir(here)
    with socket.socket(socket.AF_UNIX) as server:
        server.connect("socket")
        socket.send_fds(server, [b"\\n"], [0, 1, 2])
        server.sendall(asked)
        sys.exit(int(server.recv(4) or b"255"))
kept = os.path.join(here, hashlib.sha256(repr(words).encode()).hexdigest())
if not os.path.exists(kept):
    done = subprocess.run([{python!r}, *words], stdout=subprocess.PIPE)
    if done.returncode:
        sys.exit(done.returncode)
    with open(f"{{kept}}.{{os.getpid()}}", "wb") as file:
        file.write(done.stdout)
    os.replace(file.name, kept)
with open(kept, "rb") as file:
    sys.stdout.buffer.write(file.read())
"""
SERVER = f"""{PROGRAMS_USE}
import pulumi.runtime, select, signal, socket
listening = socket.socket(socket.AF_UNIX)
os.chdir(sys.argv[1])
listening.bind("socket")
listening.listen()
print("listening", flush=True)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def run(words, folder, environment, streams):
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    own = [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each]
    sys.argv, sys.path[:1] = words, [os.path.dirname(words[0]), *own]
    if own not in ([], [{str(ROOT)!r}]):  # it has a gpufleet of its own
        for name in [each for each in sys.modules if each.partition(".")[0] == "gpufleet"]:
            del sys.modules[name]
    runpy.run_path(words[0], run_name="__main__")


def answer(connection):
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    asked = json.loads(connection.makefile().readline())
    ended, held = os.pipe()
    child = os.fork()
    if not child:
        return run(*asked, streams)
    os.close(held)
    if connection.fileno() in select.select([connection.fileno(), ended], [], [])[0]:  # who asked is gone
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    connection.sendall(b"%d" % (code if code >= 0 else 128 - code))
    os._exit(0)


while listening.fileno() in select.select([listening.fileno(), 0], [], [])[0]:
    connection, _ = listening.accept()
    if not os.fork():
        listening.close()
        answer(connection)
        break
    connection.close()
"""
_made: Any = Pulumi.__init__


@contextmanager
def programs() -> Iterator[None]:
    """Projects in which the engine runs take that Python in the place of this one."""

    def made(self: Pulumi, folder: Path, *words: Any) -> None:
        file = folder / "Pulumi.yaml"
        file.write_text(file.read_text().replace(f"virtualenv: {sys.prefix}\n", f"virtualenv: {_environment()}\n"))
        _made(self, folder, *words)

    with mock.patch.object(Pulumi, "__init__", made):
        yield


def cold() -> AbstractContextManager[Any]:
    """Projects in which the engine runs take this Python."""
    return mock.patch.object(Pulumi, "__init__", _made)


@functools.cache
def _environment() -> Path:
    """The virtual environment of this process's tests; its server ends when its input does."""
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    (folder / "bin").mkdir()
    python = folder / "bin" / "python"
    python.write_text(PYTHON.format(python=sys.executable, folder=str(folder)))
    python.chmod(0o755)
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(folder)],
        cwd=ROOT,
        env=scratch({}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    assert server.stdout.readline() == "listening\n"
    atexit.register(shutil.rmtree, folder)
    atexit.register(server.communicate)
    return folder
