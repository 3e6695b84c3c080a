"""Reads a definition's text: the lines marked CHECK, and how many processes the command starts per node."""

from __future__ import annotations

import re

from gpufleet.job.text import counted

CHECK = re.compile(r"# CHECK\b")
# How a launcher's number of processes per node is written, and frameworks that start processes by themselves.
PROCESSES = re.compile(
    r"(?<!\S)(?P<flag>--nproc[-_]per[-_]node|--num[-_]processes|--num[-_]gpus|--nproc|--(?:trainer\.)?devices|--n?gpus"
    r"|(?:mpirun|mpiexec|horovodrun|srun)\b[^;&|]*?\s-np?|trainer\.devices)(?P<between>[= ]\s*)"
    r"(?P<count>\d+(?=\s|$)|gpu|auto|[\"'{$][^\s]*)"
)
# GPUs by their numbers, each of which gets a process: 0,1,2 or cuda:0 cuda:1
_LISTED = re.compile(
    r"(?<!\S)(?:--(?:devices?|gpus?|gpu[-_]ids?)[= ] *|CUDA_VISIBLE_DEVICES=)"
    r"(?P<gpus>(?:cuda:)?\d+(?:[ ,](?:cuda:)?\d+)+)(?=\s|$)"
)
_SHOWN = 6  # most line numbers in a sentence


def checks_left(text: str) -> list[int]:
    """The numbers of the lines that are still marked CHECK."""
    return [number for number, line in enumerate(text.splitlines(), 1) if CHECK.search(line)]


def checks_warning(text: str, name: str) -> list[str]:
    """A sentence that names the lines still marked CHECK; empty if no line is."""
    if not (marked := checks_left(text)):
        return []
    shown = ", ".join(map(str, marked[:_SHOWN])) + (", ..." if len(marked) > _SHOWN else "")
    return [
        f"{counted(len(marked), 'line')} of {name} still marked CHECK ({shown}): `gpufleet new` could not know them;"
        " remove the mark when you have looked"
    ]


def processes_in(command: str) -> re.Match[str] | None:
    """The command's first number of processes per node that is a plain number; if all are placeholders, the first
    placeholder. The launcher may already have {gpus} while an option of the script still has a plain number.
    """
    return min(PROCESSES.finditer(command), key=lambda match: match["count"] in ("{gpus}", "{ranks}"), default=None)


def processes_asked(command: str) -> int | None:
    """The number of processes that a command starts per node, which it states or of which it lists the GPUs; None if
    the command has {gpus}, or neither.
    """
    match, listed = processes_in(command), _LISTED.search(command)
    if match is None and listed is not None:
        return len(re.split("[ ,]", listed["gpus"]))
    return int(match["count"]) if match and match["count"].isdigit() else None
