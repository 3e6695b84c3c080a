"""What a definition's own text says to whoever reads it: lines that are still to be looked at, and processes that its
command starts whatever the type has.
"""

from __future__ import annotations

import re

from gpufleet.job.text import counted

CHECK = re.compile(r"# CHECK\b")
# How a launcher is asked for a number of processes on a node, and frameworks that start them by themselves.
PROCESSES = re.compile(
    r"(?<!\S)(?P<flag>--nproc[-_]per[-_]node|--num[-_]processes|--num[-_]gpus|--nproc|--(?:trainer\.)?devices|--n?gpus"
    r"|(?:mpirun|mpiexec|horovodrun|srun)\b[^;&|]*?\s-np?|trainer\.devices)(?P<between>[= ]\s*)(?P<count>[^\s]+)"
)
_SHOWN = 6  # numbers of lines in a sentence


def checks_left(text: str) -> list[int]:
    """The numbers of the lines of a definition that still ask to be looked at."""
    return [number for number, line in enumerate(text.splitlines(), 1) if CHECK.search(line)]


def checks_warning(text: str, name: str) -> list[str]:
    """A sentence that says which lines are still marked; empty where none is."""
    if not (left := checks_left(text)):
        return []
    shown = ", ".join(map(str, left[:_SHOWN])) + (", ..." if len(left) > _SHOWN else "")
    return [
        f"{counted(len(left), 'line')} of {name} still marked CHECK ({shown}): `gpufleet new` could not know them;"
        " remove the mark when you have looked"
    ]


def processes_asked(command: str) -> int | None:
    """How many processes a command starts on each node by a plain number; None: it has {gpus}, or says none."""
    match = PROCESSES.search(command)
    return int(match["count"]) if match and match["count"].isdigit() else None
