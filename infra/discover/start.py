"""Finds the Python file that a command starts: through shell scripts, make, Dockerfiles, console scripts, launchers."""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace

from gpufleet.infra.discover.marks import PROCESSES
from gpufleet.infra.discover.source import CodeFolder
from gpufleet.infra.errors import GpufleetError

PYTHON = re.compile(
    r"python(\d(\.\d+)?)?|pypy3?|ipython|torchrun|deepspeed|composer|accelerate|accelerate-launch|horovodrun|fabric"
)
_SHELL = ("sh", "bash", "zsh", "dash", "source", ".")
_DEEP = 6  # most levels of scripts that start scripts
_BEFORE = {  # programs that start the program named after them
    "env", "nohup", "time", "nice", "exec", "sudo", "uv", "run", "poetry", "pipenv", "pdm", "rye", "hatch", "conda",
    "micromamba", "mamba", "pixi", "xvfb-run", "srun", "numactl", "stdbuf", "mpirun", "mpiexec", "do", "then", "else",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class StartedProgram:
    """One program that a command starts."""

    script: str = ""  # the file of the folder that Python runs; empty if it runs none
    function: str = ""  # a function in that file, if a console script names one
    program: str = ""  # a program from outside the folder, such as yolo
    launcher: str = ""  # torchrun, accelerate, ...
    is_module: bool = False
    folder: str = ""  # the program's working folder, below the code's folder
    roots: tuple[str, ...] = ("", "src")  # folders in which Python searches the program's imports
    words: tuple[str, ...] = ()  # the words after the script or program
    environment: tuple[str, ...] = ()  # NAME=value before the program
    typed: str = ""  # the command that contains the program's words
    part: int = -1  # the program's index in `parts` of the typed command: 1 for b.py in `python a.py && python b.py`
    through: tuple[str, ...] = ()  # places of the files that lead to the program, such as run.sh:2
    passes_on: bool = True  # whether words added to the typed command reach the program
    processes: str = ""  # processes per node, from the launcher's options: 8, gpu, {gpus}


def starts(folder: CodeFolder, command: str) -> list[StartedProgram]:
    """Every program that the command starts, programs of the folder first. Raises GpufleetError if a script does not
    exist, or if a quote is not closed.
    """
    programs = list(_of_text(folder, command, StartedProgram(typed=command), 0))
    for program in programs:
        if program.script and program.script not in folder.files:
            some = ", ".join([*(name for name in folder.python if "/" not in name), *folder.python][:8])
            raise GpufleetError(f"--command: {program.script} is not in the folder; it has {some or 'no Python file'}")
    return sorted(programs, key=lambda program: not program.script)


def _of_text(folder: CodeFolder, text: str, at: StartedProgram, depth: int) -> Iterator[StartedProgram]:
    """The programs that a text starts in a shell, command by command."""
    text = re.sub(r"\\\n", " ", text)
    for number, (begin, end) in enumerate(parts(text)):
        line = text[begin:end].strip()
        at = at if depth else replace(at, part=number)
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            if depth:
                continue  # a script may contain text that only a shell understands
            raise GpufleetError(f"--command: {error}") from None
        if words[:1] == ["cd"] and len(words) > 1:
            at = replace(at, folder=_joined_path(at.folder, words[1]))
        elif words:
            yield from _of_words(folder, words, at, depth)


def parts(text: str) -> Iterator[tuple[int, int]]:
    """Yields start and end of each command in a shell's text. Separators within quotes do not split a command."""
    quote, begin = "", 0
    for index, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in ";&|\n" and text[index - 1 : index] != ">":
            yield begin, index
            begin = index + 1
    yield begin, len(text)


def _of_words(folder: CodeFolder, words: list[str], at: StartedProgram, depth: int) -> Iterator[StartedProgram]:
    if depth > _DEEP:
        return
    wrapped = False
    for index, word in enumerate(words):
        base, rest = posixpath.basename(word), words[index + 1 :]
        if match := re.fullmatch(r"PYTHONPATH=(.*)", word):
            paths = [_joined_path(at.folder, path) for path in match[1].split(":") if path and "$" not in path]
            at = replace(at, roots=(*paths, *at.roots))
        elif re.match(r"[A-Za-z_]\w*=", word):
            at = replace(at, environment=(*at.environment, word))
        elif PYTHON.fullmatch(base):
            yield from _of_python(folder, base, rest, at)
            return
        elif base in _SHELL and rest:
            if rest[0].startswith("-") and "c" in rest[0] and len(rest) > 1:
                yield from _of_text(folder, rest[1], at, depth + 1)
                return
            if (name := _joined_path(at.folder, rest[0])) in folder.files:
                yield from _of_script(folder, name, rest[1:], at, depth)
                return
        elif base == "make":
            goal = next((argument for argument in rest if not argument.startswith("-") and "=" not in argument), "")
            yield from _of_makefile(folder, goal, [argument for argument in rest if "=" in argument], at, depth)
            return
        elif (name := _joined_path(at.folder, word)) in folder.files and not word.startswith("-"):
            if _is_python(folder, name):
                yield _script(folder, name, rest, at)
            elif folder.text(name).startswith("#!") or name.endswith(".sh"):
                yield from _of_script(folder, name, rest, at, depth)
            return
        elif target := _console_scripts(folder).get(word):
            module, _, function = target.partition(":")
            at = replace(at, function=function.split(".")[0], program=word)
            yield _script(folder, folder.module(module, at.roots), rest, at)
            return
        elif not depth and word.endswith(".py"):
            raise GpufleetError(f"--command: {word} is not in the folder; it has {', '.join(folder.python[:8])}")
        elif base in _BEFORE:
            wrapped = True
            at = replace(at, processes=_processes(words[index + 1 :]) or at.processes)
        elif not wrapped and not word.startswith("-"):
            yield replace(at, program=base, words=tuple(rest))
            return


def _of_python(folder: CodeFolder, launcher: str, words: list[str], at: StartedProgram) -> Iterator[StartedProgram]:
    """The script that Python or a launcher starts: the first word that is a file, or the module after -m."""
    launcher = "" if launcher.startswith(("python", "pypy", "ipython")) else launcher.removesuffix("-launch")
    for index, word in enumerate(words):
        rest = words[index + 1 :]
        if word in ("-m", "--module") and rest:
            if rest[0] in ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"):
                return (yield from _of_python(folder, "torchrun", rest[1:], replace(at, processes=_processes(rest))))
            name = folder.module(rest[0], at.roots) or folder.module(f"{rest[0]}.__main__", at.roots)
            name = name.replace("__init__.py", "__main__.py") if name.endswith("__init__.py") else name
            at = replace(at, is_module=True, launcher=launcher, processes=_processes(words[:index]) or at.processes)
            yield _script(folder, name, rest[1:], at) if name else replace(at, program=rest[0], words=tuple(rest[1:]))
            return
        if word == "-c":
            return
        name = _joined_path(at.folder, word)
        # a launcher's options may name files of the folder: --config_file cluster.yaml, --hostfile hosts
        is_script = _is_python(folder, name) if launcher else name in folder.files
        if word.endswith(".py") or (is_script and not word.startswith("-")):
            processes = _processes(words[:index]) or _processes_of_file(folder, words[:index], at) or at.processes
            at = replace(at, launcher=launcher, processes=processes)
            yield _script(folder, name, rest, at)
            return
        if not word.startswith("-") and (target := _console_scripts(folder).get(word)):
            module, _, function = target.partition(":")
            at = replace(at, launcher=launcher, function=function, processes=_processes(words[:index]) or at.processes)
            yield _script(folder, folder.module(module, at.roots), rest, at)
            return


def _is_python(folder: CodeFolder, name: str) -> bool:
    return name.endswith(".py") or bool(re.match(r"#!.*python", folder.text(name)[:80]))


def _script(folder: CodeFolder, name: str, words: list[str], at: StartedProgram) -> StartedProgram:
    """The started file with its words. Python first looks for imports beside this file."""
    beside = () if at.is_module else (posixpath.dirname(name),)
    return replace(at, script=name, words=tuple(words), roots=tuple(dict.fromkeys((*beside, *at.roots, at.folder))))


def _processes(words: list[str]) -> str:
    match = PROCESSES.search(shlex.join(words).replace("'", ""))
    return match["count"] if match else ""


def _processes_of_file(folder: CodeFolder, words: list[str], at: StartedProgram) -> str:
    """The number of processes in a launcher's configuration file, as accelerate's --config_file names one."""
    texts = (folder.text(_joined_path(at.folder, word.rpartition("=")[2])) for word in words if ".y" in word)
    return next((match[1] for text in texts if (match := re.search(r"(?m)^num_processes: *(\d+)", text))), "")


def _joined_path(folder: str, name: str) -> str:
    """A typed path, made relative to the code's folder."""
    return posixpath.normpath(posixpath.join(folder, name)).removeprefix("./") if name not in ("", ".") else folder


def _of_script(
    folder: CodeFolder, name: str, words: list[str], at: StartedProgram, depth: int
) -> Iterator[StartedProgram]:
    """The programs that a shell script starts, with the script's words in place of $1 and "$@"."""
    text = folder.text(name)
    values = {str(number): word for number, word in enumerate(words, 1)}
    here = re.sub(r"(?m)^\s*#.*$", "", text)
    for match in re.finditer(
        r"(?m)^\s*(?:export\s+|local\s+|readonly\s+)?(\w+)=(\"[^\"\n]*\"|'[^'\n]*'|[^\s;]*)", here
    ):
        values.setdefault(match[1], _expanded(match[2].strip("\"'"), values, words))
    for match in re.finditer(r"(?ms)^\s*(\w+)=\(([^()]*)\)\s*$", re.sub(r"(?m)\s#.*$", "", here)):
        values[match[1]] = _expanded(" ".join(match[2].split()), values, words)  # an array
    for number, line in _numbered(text):
        passes_on = bool(re.search(r"\$[@*]|\$\{[@*]", line))
        inner = replace(at, through=(*at.through, f"{name}:{number}"), passes_on=at.passes_on and passes_on)
        for program in _of_text(folder, _expanded(line, values, words), inner, depth + 1):
            at = replace(at, folder=program.folder)
            yield program
        if moved := re.match(r"\s*cd\s+(\S+)", line):
            at = replace(at, folder=_joined_path(at.folder, _expanded(moved[1].strip("\"'"), values, words)))


def _numbered(text: str) -> Iterator[tuple[int, str]]:
    """Yields lines with their numbers; continued lines are joined."""
    number, held = 0, ""
    for index, line in enumerate(text.splitlines(), 1):
        number = number or index
        if line.endswith("\\"):
            held += line[:-1] + " "
            continue
        if not (held + line).lstrip().startswith("#"):
            yield number, held + line
        number, held = 0, ""


def _expanded(text: str, values: dict[str, str], words: list[str]) -> str:
    """The text with the values of known shell variables and of the script's arguments."""

    def several(match: re.Match[str]) -> str:
        return shlex.join(words[int(match[1] or 1) - 1 :])

    text = re.sub(r'"?\$\{[@*]:(\d+)\}"?', several, text)
    text = re.sub(r'"?\$(?:[@*]|\{[@*]\})()"?', several, text)

    text = re.sub(r'"?(\$\{\w+)\[[@*]\]\}"?', r"\1}", text)  # all of an array

    def one(match: re.Match[str]) -> str:
        return values.get(match[1] or match[3] or "", match[2] if match[2] is not None else match[0])

    for _ in range(3):  # variables may contain variables
        text = re.sub(r"\$\{(\w+)(?::?[-=]([^}]*))?\}|\$(\w+)", one, text)
    return text


def _of_makefile(
    folder: CodeFolder, target: str, assignments: list[str], at: StartedProgram, depth: int
) -> Iterator[StartedProgram]:
    name = next(
        (
            candidate
            for candidate in ("Makefile", "makefile", "GNUmakefile")
            if _joined_path(at.folder, candidate) in folder.files
        ),
        "",
    )
    text = folder.text(_joined_path(at.folder, name)) if name else ""
    values = {key: value for key, _, value in (assignment.partition("=") for assignment in assignments)}
    for match in re.finditer(r"(?m)^(\w+)\s*[:?]?=[ \t]*(.*)$", text):
        values.setdefault(match[1], match[2].strip())
    target = target or next(iter(re.findall(r"(?m)^([\w.-]+)\s*:(?!=)", text)), "")
    inside = False
    for number, line in _numbered(text):
        if not line.startswith("\t") and line.strip():
            inside = bool(re.match(rf"{re.escape(target)}\s*:(?!=)", line)) if target else False
        elif inside and line.strip():
            line = re.sub(r"\$\((\w+)\)", r"${\1}", line.strip().lstrip("@-")).replace("$$", "$")
            uses = bool(re.search(r"\$\{?ARGS", line))
            inner = replace(at, through=(*at.through, f"{name}:{number}"), passes_on=at.passes_on and uses)
            yield from _of_text(folder, _expanded(line, values, []), inner, depth + 1)


def dockerfile_command(folder: CodeFolder) -> str:
    """The command that the folder's Dockerfile starts, as a shell's text; empty if there is none."""
    instructions = {}
    for _, line in _numbered(folder.text("Dockerfile")):
        if match := re.match(r"\s*(CMD|ENTRYPOINT)\s+(.*)", line):
            try:
                instructions[match[1]] = shlex.join(json.loads(match[2])) if match[2].startswith("[") else match[2]
            except (ValueError, TypeError):
                instructions[match[1]] = match[2]
    return " ".join(instructions[key] for key in ("ENTRYPOINT", "CMD") if key in instructions).strip()


def _console_scripts(folder: CodeFolder) -> dict[str, str]:
    """Programs that the folder creates when it is installed as a package, each with its `module:function`."""
    texts = [folder.text(name) for name in ("pyproject.toml", "setup.cfg", "setup.py")]
    lines = (line.strip(" \t,'\"") for text in texts for line in re.split(r"[\n\[\]]", text))
    matches = (re.fullmatch(r"(?:scripts\.)?([\w.-]+)[\"']?\s*=\s*[\"']?([\w.]+:[\w.]+)", line) for line in lines)
    return {match[1]: match[2] for match in matches if match}
