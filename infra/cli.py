"""`gpufleet`: the command line. Each command is a module of infra/commands, which is imported only if it is used."""

from __future__ import annotations

import argparse
import atexit
import errno
import gc
import importlib
import io
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

from gpufleet.infra.envelope import Envelope, filled
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.progress import Screen
from gpufleet.infra.show.terminal import Shown
from gpufleet.infra.text import wrap
from gpufleet.job.progress import shown_by

# Groups of commands by purpose, in the order in which a person needs them.
GROUPS = {
    "Set up": {
        "init": "make this folder of your repository a project: Pulumi program, stacks/, ignore lines, review workflow",
        "new": "look at a folder of training code and write its definition file: what was found, what was not",
        "schema": "the JSON Schema of the definition file, by which editors check it; campaign; answers: of --json",
        "docs": "these pages by name, such as bill: what screens and written files cite",
        "mcp": "the commands as tools for an agent, by the Model Context Protocol; it spends only on your approval",
        "completion": "lines for bash, zsh or fish, by which a tab completes commands, stacks, scenarios, runs",
    },
    "Know what it costs": {
        "cost": "the bill of a run, before anything exists; needs no account and no network",
        "compare": "a stack's scenarios and every instance type for their work, ranked by mean dollars",
        "diff": "the cost review of a change: the dollars of two commits' stacks side by side, and whether bounds and"
        " rules hold",
        "prices": "how old and complete the known prices are; prices refresh reads them anew from AWS",
        "calibrate": "measure a few hundred steps of the real job on this machine, for the bill",
        "replay": "whether the bill's range held on availability traces of spot nodes",
    },
    "Try it without an account": {
        "rehearse": "the whole run on this machine, against an embedded AWS",
        "cloud": "start the embedded AWS alone, for your own pulumi, boto3 or aws",
    },
    "Launch it": {
        "canary": "the first run on an account, for less than half a dollar: it checks the assumptions about AWS",
        "bake": "an AMI that holds a stack's images, deleted after some days: its nodes then start without a pull",
        "prepare": "what a run reads: your folders and prefixes hashed, a ready-made job's tokens made",
        "doctor": "check the account: credentials, quotas, roles, offers, AMI, image; --pin writes AMI and image"
        " digest",
        "run": "all of a run in one command: bill, approval, up, wait, results, destroy, sweep; run again, it goes on",
        "campaign": "the runs of a file of campaigns/ under one cap: each begins once its own limit is reserved",
        "wait": "after pulumi up: wait for a node, and explain why there is none",
    },
    "While it runs": {
        "ps": "every run of the account and the project, one line each",
        "status": "where the run stands: fleet, node, checkpoints, dollars spent",
        "logs": "what the job prints",
        "shell": "a shell in the job's container, by Session Manager",
        "tensorboard": "the run's figures in TensorBoard on this machine, as they come",
        "stop": "end the run early, as a limit would: saved, and with a receipt",
    },
    "Afterwards": {
        "results": "download what the run left: results, receipt, model",
        "report": "an ended run, or those of a campaign, as one HTML page: bill against receipt, training, nodes",
        "receipts": "what every run cost against its bill, why the two differ, and how right the bills are",
        "sweep": "after pulumi destroy, or an up cut short: what is left in the account and what it costs; --delete",
    },
}
COMMANDS = {name: summary for group in GROUPS.values() for name, summary in group.items()}
ANSWERS = ("cost", "compare", "doctor", "ps", "receipts", "status")  # commands whose first line of output is the answer
FOR_PROGRAMS = ("completion", "docs", "logs", "schema", "shell")  # commands that print text for programs
WITHOUT_JSON = ("cloud", "completion", "mcp", "shell", "tensorboard")  # commands that serve a terminal or a program
_TO_DO = {
    errno.ENOSPC: "Free some space on the disk of this folder and of the temporary files, then run it again.",
    errno.EDQUOT: "Free some of your quota, then run it again.",
    errno.EROFS: "That disk can only be read: run this in a copy of the project that can be written.",
    errno.EACCES: "Give yourself the right to it, then run it again.",
    errno.EPERM: "Give yourself the right to it, then run it again.",
    errno.EEXIST: "A file or link has the name of a folder that this command needs. Move it away, then run this again.",
    errno.ENOTDIR: "A file has the name of a folder that this command needs. Move it away, then run this again.",
    errno.EISDIR: "A folder has the name of a file that this command needs. Move it away, then run this again.",
}
DESCRIPTION = (
    "Train on rented AWS GPUs with the bill known before anything exists: your own script in any container, or a"
    " ready-made job. Begin with `gpufleet init NAME` in your repository."
)
EPILOG = (
    "`gpufleet COMMAND --help` explains one of them. STACK is a file of stacks/ without its .yaml, or a path to such a"
    " file. Where the Pulumi stack of that name is configured to run another file or a scenario (`pulumi config set"
    " definition`, `scenario`), that is what is meant. Exit codes: 0 done, 1 the answer is no, 2 something has to be"
    " put right first."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    gc.set_threshold(50_000)  # with Python's 700, garbage collection takes a twentieth of a command's start
    atexit.register(gc.freeze)  # otherwise the last collections visit every object: a twelfth of a bill's time
    words = list(sys.argv[1:] if argv is None else argv)
    if "_ARGCOMPLETE" in os.environ:  # the user's shell asks for completions
        from gpufleet.infra.commands.completion import answer

        answer(COMMANDS, os.environ.get("COMP_LINE", ""))
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the caller closed this stream: gpufleet cost STACK >&-
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    if isinstance(sys.stdout, io.TextIOWrapper):  # so that each line of `logs --follow | tee` is passed on at once
        strict = sys.stdout.errors == "strict"
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace" if strict else None)
    for number in (signal.SIGTERM, signal.SIGHUP):  # these signals end the command like Ctrl-C, with its clean-up
        if signal.getsignal(number) is not signal.SIG_IGN:  # under nohup the signal stays ignored
            signal.signal(number, signal.default_int_handler)
    screen = Screen(sys.stderr)
    out, err = Shown(sys.stdout, screen), Shown(sys.stderr, screen)
    with shown_by(screen.show), redirect_stdout(out), redirect_stderr(err):
        return _answered(words, screen, out)


def _answered(words: list[str], screen: Screen, out: Shown) -> int:
    """Runs the command; returns its exit code, even if the command raised an error."""
    try:
        code = _run(words, screen, out)
        sys.stdout.flush()
    except GpufleetError as error:
        return _say(error, out)
    except BrokenPipeError:  # such as in `gpufleet logs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # the exit code of other tools; with 0, `gpufleet doctor | head` would look as if no check had failed
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except Exception as error:
        refused = _refused(error)
        if refused is None and isinstance(error, OSError):
            refused = _of_the_machine(error)
        if refused is None:
            raise
        return _say(refused, out)
    return code


def _run(words: list[str], screen: Screen, out: Shown) -> int:
    name = words[0] if words else ""
    if name not in COMMANDS:
        parser = _parser()
        parser.parse_known_args(words)  # argparse ends the process for --help and --version
        if not name:
            parser.print_help()
            return 2
        import difflib  # imported here, because only an unknown command needs it

        close = difflib.get_close_matches(name, COMMANDS, n=1)
        nearest = f" Nearest: gpufleet {close[0]}." if close else ""
        raise GpufleetError(f"there is no command {name!r}.{nearest} `gpufleet --help` lists all of them.")
    with _without_blas_threads():
        module = importlib.import_module(f"gpufleet.infra.commands.{name}")
    command = argparse.ArgumentParser(prog=f"gpufleet {name}", description=f"gpufleet {name}: {COMMANDS[name]}.")
    module.arguments(command)
    own_json = any(action.dest == "json" for action in command._actions)
    if not own_json and name not in WITHOUT_JSON:
        command.add_argument("--json", action="store_true", help="one object; `gpufleet schema answers` has its schema")
    args = command.parse_intermixed_args(words[1:])  # allows options between STACK and TEXT
    screen.quiet = getattr(args, "quiet", False)
    out.folds = name not in FOR_PROGRAMS and not any(getattr(args, option, None) for option in ("json", "focus"))
    out.answers_first = name in ANSWERS
    if own_json or not getattr(args, "json", False):
        code: int = module.run(args)
        return code
    screen.quiet = True
    out.envelope = Envelope(name)
    with filled(out.envelope):
        code = module.run(args)
    print(out.envelope.text(code))
    return code


@contextmanager
def _without_blas_threads() -> Iterator[None]:
    """A context in which numpy starts no threads when it is first imported. No command computes large matrix products,
    and waiting threads would take 4 % of a bill's time. Processes that are started after the context get the old
    environment.
    """
    name = "OPENBLAS_NUM_THREADS"
    before = os.environ.get(name)
    os.environ.setdefault(name, "1")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]


def _parser() -> argparse.ArgumentParser:
    from importlib.metadata import version  # importing it takes 25 ms, and no command needs it

    lines = []
    for group, commands in GROUPS.items():
        lines += ["", f"{group}:"]
        for name, summary in commands.items():
            lines += wrap(f"    {name:<12} {summary}", indent=17)
    parser = argparse.ArgumentParser(
        prog="gpufleet",
        usage="gpufleet [-h] [-V] COMMAND ...",
        description="\n".join(wrap(DESCRIPTION, indent=0)),
        epilog="\n".join([*lines[1:], "", *wrap(EPILOG, indent=0)]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-V", "--version", action="version", version=f"gpufleet {version('gpufleet')}")
    return parser


def _refused(error: Exception) -> GpufleetError | None:
    """The error for a refusal by AWS or by the connection to it; None for other errors. This function imports no
    botocore.
    """
    if "botocore" not in sys.modules:
        return None
    from gpufleet.infra.account.refusals import refusal

    return refusal(error)


def _of_the_machine(error: OSError) -> GpufleetError:
    """The error for a failure of a disk, a folder or a connection, with the path if the system names one."""
    cause = error.strerror or str(error) or type(error).__name__
    path = error.filename
    # tempfile raises this if it can write into none of the usual folders, perhaps because the disk is full
    if "temporary directory" in cause:
        return GpufleetError(f"{cause}: free some space there, or name a folder with room in TMPDIR, then run it again")
    # os.getcwd raises this if the working directory was removed, as `gpufleet cloud` does with its project when it ends
    if path is None and error.errno == errno.ENOENT:
        return GpufleetError("the folder in which this was run no longer exists: cd into a project, then run it again")
    if path is None and error.errno in (errno.ENOSPC, errno.EDQUOT):
        path = Path.cwd()  # the error of a full disk names no file
    where = f"{path}: " if path else ""
    return GpufleetError(f"{where}{cause}. {_TO_DO.get(error.errno or 0, '')}".rstrip())


def _say(error: GpufleetError, out: Shown) -> int:
    try:
        if out.envelope is not None:
            print(out.envelope.text(2, str(error)), flush=True)
            return 2
        print(f"gpufleet: {error}", file=sys.stderr)
    except OSError:  # stderr is full or closed, so that nothing can be printed
        # otherwise Python would fail to write its buffer at exit, and exit with 120
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    return 2


if __name__ == "__main__":
    sys.exit(main())
