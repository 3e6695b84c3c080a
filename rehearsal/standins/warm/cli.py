"""The AWS CLI of a rehearsed node, imported only once: each call of `aws` on the node is a fork of one process that has
imported it.

`serve` is that process, which rehearsal/node.py starts. As a script, this file hands one call to it: words, folder,
environment and streams. Importing the CLI takes two thirds of a call's processor time, and a boot makes ten calls.
"""

# ruff: noqa: T201, PTH109 - it prints its output, and imports as little as it can

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import traceback
from typing import Any

NAME = "aws"  # the name of the socket in its folder; not a whole path, which can be too long for a socket


def call(folder: str, words: list[str]) -> int:
    """Lets the node's process run `aws WORDS`. Returns the exit code."""
    asked = {"words": words, "folder": os.getcwd(), "environment": dict(os.environ)}
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(folder)
        server.connect(NAME)
        socket.send_fds(server, [b"\n"], [0, 1, 2])
        server.sendall(json.dumps(asked).encode() + b"\n")
        return int(server.recv(4) or b"255")


def serve() -> None:
    """Runs the calls that come to the socket in this folder, each in a process of its own, until standard input ends,
    which means that the rehearsal is over. Prints a line as soon as it listens.
    """
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(NAME)
        listening.listen()
        print("listening", flush=True)
        import awscli.clidriver
        import awscli.handlers  # noqa: F401 - the CLI imports it with each call

        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # because the processes of calls are not waited for
        while listening.fileno() in select.select([listening.fileno(), 0], [], [])[0]:
            connection, _ = listening.accept()
            if not os.fork():
                _answer(connection)
            connection.close()


def _answer(connection: socket.socket) -> None:
    """Runs one call to its end, or until the caller has ended. Does not return."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    asked = json.loads(connection.makefile().readline())
    ended, held = os.pipe()
    child = os.fork()
    if not child:
        _run(asked, streams)
    os.close(held)
    if connection.fileno() in select.select([connection.fileno(), ended], [], [])[0]:
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        connection.sendall(b"%d" % (code if code >= 0 else 128 - code))
    finally:
        os._exit(0)


def _run(asked: dict[str, Any], streams: list[int]) -> None:
    import awscli.clidriver

    code = 255
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.chdir(asked["folder"])
        data_path = os.environ["AWS_DATA_PATH"]  # set by the import of the CLI
        os.environ.clear()
        os.environ.update({**asked["environment"], "AWS_DATA_PATH": data_path})
        sys.argv = ["aws", *asked["words"]]
        code = awscli.clidriver.main()
        sys.stdout.flush()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 - whatever it is, the call has failed
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve()
    else:
        sys.exit(call(os.environ["GPUFLEET_ROOT"] + "/run", sys.argv[1:]))
