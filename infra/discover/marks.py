"""Reads a definition's own text: lines still to be checked, and processes that its command starts on any type."""

from __future__ import annotations

import re

from gpufleet.job.text import counted

CHECK = re.compile(r"# CHECK\b")
# How a launcher's number of processes per node is written, and frameworks that start processes by themselves.
PROCESSES = re.compile(
    r"(?<!\S)(?P<flag>--nproc[-_]per[-_]node|--num[-_]processes|--num[-_]gpus|--nproc|--(?:trainer\.)?devices|--n?gpus"
    r"|(?:mpirun|mpiexec|horovodrun|srun)\b[^;&|]*?\s-np?|trainer\.devices)(?P<between>[= ]\s*)(?P<count>[^\s]+)"
)
_SHOWN = 6  # most line numbers in a sentence


def checks_left(text: str) -> list[int]:
    """The numbers of the definition's lines that are still marked CHECK."""
    return [number for number, line in enumerate(text.splitlines(), 1) if CHECK.search(line)]


def checks_warning(text: str, name: str) -> list[str]:
    """A sentence with the lines that are still marked; empty without any."""
    if not (marked := checks_left(text)):
        return []
    shown = ", ".join(map(str, marked[:_SHOWN])) + (", ..." if len(marked) > _SHOWN else "")
    return [
        f"{counted(len(marked), 'line')} of {name} still marked CHECK ({shown}): `gpufleet new` could not know them;"
        " remove the mark when you have looked"
    ]


def processes_in(command: str) -> re.Match[str] | None:
    """The first number of processes per node that is not a placeholder, else the first placeholder: a launcher may have
    {gpus} where the script's own option beside it still has a number.
    """
    return min(PROCESSES.finditer(command), key=lambda match: match["count"] in ("{gpus}", "{ranks}"), default=None)


def processes_asked(command: str) -> int | None:
    """How many processes a command starts per node by a plain number; None if the command has {gpus}, or no number."""
    match = processes_in(command)
    return int(match["count"]) if match and match["count"].isdigit() else None
