"""Finds checkpoints that a command has written outside of the declared folder, and the line of the definition with
which they would be found.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from gpufleet.job.command.given import Folders
from gpufleet.job.command.names import Names
from gpufleet.job.contract.workdir import KEPT, OUTPUTS, STATE
from gpufleet.job.kind.command import CommandConfig

FIRST_S, LONGEST_S = 2.0, 60.0  # seconds between two searches: each pause is twice as long as the previous one
SKIPPED = {".git", "__pycache__", ".venv", "venv", "node_modules", "wandb", "tb", "runs.tb"}
KEPT_AS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".npz", ".npy", ".pkl", ".h5", ".keras", ".msgpack", ".tar")
SHOWN = 3
MOST = 10_000  # a search looks at no more than this number of new files per folder
TEMPORARY = re.compile(r"tmp|temp|part|lock|^\.", re.IGNORECASE)
NO_CHECKPOINT = re.compile(  # paths of files that training programs write beside their checkpoints
    r"(^|/)(__pycache__|\.git|wandb|\.cache|mlruns|\.ipynb_checkpoints)/|\.pyc$|tfevents|\.lock$|\.log$|\.csv$|\.txt$|\.md$"
    r"|\.(ya?ml|html|png|jpe?g|gif|svg|pdf|mp4|wav)$|metrics|history|\.tmp$|~$|\.part$"
    r"|(^|[/_.-])(config|args|arguments|hparams|hyperparam\w*|options|settings)\.\w+$"
)


class Search:
    """Searches for files that one start has written outside of the declared folder. `folder` is the declared folder of
    checkpoints; `moment` converts a file's time to the clock of `began`.
    """

    def __init__(
        self,
        config: CommandConfig,
        names: Names,
        folders: Folders,
        folder: Path,
        began: float,
        moment: Callable[[float], float] = lambda written: written,
    ) -> None:
        self._config, self._names, self._folders, self._folder, self._began = config, names, folders, folder, began
        self._moment = moment
        self._at, self._pause, self._answer = began + FIRST_S, FIRST_S, ""

    def look(self, now: float, *, at_once: bool = False) -> str:
        """A sentence that says which files were written elsewhere, and what to write into the definition. Empty if no
        file looks like a checkpoint.
        """
        if (now >= self._at or at_once) and self._config.saves:
            self._at, self._pause = now + self._pause, min(2 * self._pause, LONGEST_S)
            self._answer = self._search()
        return self._answer

    def _search(self) -> str:
        written = list(dict.fromkeys(self._written()))
        for path in written:
            if (place := self._matching(path)) is not None:
                return f"{_shown(path, self._folders.user)} is outside of job.checkpoint.folder: {self._cure(place)}"
        written = [path for path in written if not NO_CHECKPOINT.search(_shown(path, self._folders.user))]
        inside = [path.relative_to(self._folder).as_posix() for path in written if path.is_relative_to(self._folder)]
        if inside:
            pattern, is_counted = pattern_of(inside)
            more = "" if is_counted else ", rewritten: true"
            return (
                f"the command wrote {', '.join(inside[:SHOWN])} into {self._config.checkpoint.folder}, but"
                f" job.checkpoint.each, {', '.join(self._config.names)}, matches none of these: if that is a"
                f" checkpoint, write each: '{pattern}'{more}"
            )
        if likely := [_shown(path, self._folders.user) for path in written if path.suffix in KEPT_AS]:
            return (
                f"the command wrote nothing into {self._config.checkpoint.folder}, but {', '.join(likely[:SHOWN])}: if"
                " one of these is a checkpoint, name it in job.checkpoint.folder and job.checkpoint.each"
            )
        return ""

    def _cure(self, place: str) -> str:
        """The value that the definition needs for checkpoints in `place`; an empty `place` is the folder of
        the code.
        """
        if not place:
            return "write job.workdir: '{checkpoints}', and {code}/ before the script's name in job.command"
        option = re.search(rf"(--?[\w.-]+[= ])(?:\./)?{re.escape(place.partition('/')[0])}\b", self._config.command)
        other = f"{option[1]}{{checkpoints}} in job.command" if option else "make the command write into {checkpoints}"
        return f"write job.checkpoint.folder: '{place}', or {other}"

    def _written(self) -> Iterator[Path]:
        """Files that were written after the start of the command, below the folders that the host can see. The declared
        folder of checkpoints comes first. Files whose names cannot be printed or published are left out.
        """
        for root in (self._folder, self._folders.code, *self._folders.written):
            new = list[Path]()
            for name, look in self._folders.own.files(root, SKIPPED):
                path = root / name
                if name.isprintable() and not TEMPORARY.search(path.name) and len(new) < MOST:
                    # the file may have been removed meanwhile, or may be a link to another place
                    with suppress(OSError):
                        if self._moment(look().st_mtime) >= self._began:
                            new.append(path)
            yield from sorted(new, key=lambda path: (path.parent.parts, path.name))

    def _matching(self, path: Path) -> str | None:
        """The folder below which the path matches the declared checkpoints, as a definition would name it; None if
        there is none.
        """
        for text, root in self._roots():
            if path.is_relative_to(root):
                parts = path.relative_to(root).parts
                for depth in range(len(parts)):
                    if self._names.match("/".join(parts[depth:])) is not None:
                        return "/".join([text, *parts[:depth]]).lstrip("/")
        return None

    def _roots(self) -> Iterator[tuple[str, Path]]:
        yield "", self._folders.code
        for text, name in (("{checkpoints}", KEPT), ("{outputs}", OUTPUTS), ("{state}", STATE)):
            yield text, self._folders.user / name


def _shown(path: Path, user: Path) -> str:
    """The path as the user writes it."""
    relative = path.relative_to(user).parts
    return "/".join(relative[1:] if relative[0] == "code" else ("{" + relative[0] + "}", *relative[1:]))


def pattern_of(names: list[str]) -> tuple[str, bool]:
    """The pattern that matches most of the names, and whether one was found. A number that differs between names
    becomes {step} or {epoch}, preferably a number that the name calls a step. Other differences become `*`. For files
    in a numbered folder, the pattern is that of the folder.
    """
    kind = re.sub(r"\d+", "#", names[-1])
    rows = [re.split(r"(\d+)", name) for name in names if re.sub(r"\d+", "#", name) == kind]
    last, numbers = rows[-1], range(1, len(rows[-1]), 2)
    differing = [index for index in numbers if len({row[index] for row in rows}) > 1 or len(numbers) == 1]
    if not differing:
        return names[-1], False
    steps = [index for index in differing if re.search(r"step|iter", last[index - 1], re.IGNORECASE)]
    chosen = (steps or differing)[-1]
    word = "epoch" if re.search(r"(?<![a-z])ep(och)?[-_=]?$", last[chosen - 1], re.IGNORECASE) else "step"
    is_padded = any(len(row[chosen]) > 1 and row[chosen].startswith("0") for row in rows)
    count = f"{{{word}:0{len(last[chosen])}d}}" if is_padded else f"{{{word}}}"
    parts = "".join(
        count if index == chosen else "*" if index in differing else text for index, text in enumerate(last)
    ).split("/")
    depth = next(index for index, part in enumerate(parts) if count in part) + 1
    return "/".join(parts[:depth]) + ("/" if depth < len(parts) else ""), True
