"""`gpufleet init [NAME]`: makes the working folder a project of gpufleet; it may be in a repository of your own."""

from __future__ import annotations

import argparse
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from gpufleet.infra.canary import stacks
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.commands import new
from gpufleet.infra.definition import json_schema
from gpufleet.infra.definition.layers import MODELINE
from gpufleet.infra.definition.loader import PROGRAM, SCHEMA
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.evidence.observations import observations
from gpufleet.infra.inputs import git
from gpufleet.infra.program import project
from gpufleet.infra.review import policy, workflow


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", metavar="NAME", nargs="?", help="the name of a first stack, to write as `gpufleet new` does"
    )
    parser.add_argument("--code", metavar="DIR", type=Path, default=Path(), help="its training code (default: here)")
    parser.add_argument(
        "--yes", action="store_true", help="write the project even if the folder is not in a git repository"
    )
    parser.add_argument(
        "--command", metavar="TEXT", default="", help="the command that starts it there, as you would type it"
    )


def run(args: argparse.Namespace) -> int:
    """Writes missing files and prints each. If other files of the folder have names that gpufleet would read, raises
    GpufleetError before it writes anything.
    """
    root = Path.cwd()
    if args.name:
        new.named(root, args.name)
    _refuse_others(root)
    repository = git.top(root)
    if repository is None and not args.yes and not _confirmed(root):
        raise GpufleetError(
            f"{root} is not in a git repository, so nothing was written: cd into the repository of your code, run"
            " `git init` here, or pass --yes"
        )
    repository = repository or root
    _project(root, repository)
    # a checkout of gpufleet itself needs no copy of the schema
    if json_schema.modeline(root / "stacks", root) in ("", f"{MODELINE}{Path(SCHEMA).name}"):
        _write(root / SCHEMA, json_schema.text(), root)
    for name, text in stacks.shipped().items():
        _write(root / name, text, root)
    _ignore(root)
    _workflow(root, repository)
    if args.name:
        new.write_definition(root, args.name, args.code, args.command)
    else:
        print("Next: `gpufleet new NAME --code DIR` writes the definition of a folder of training code.")
    return 0


def _confirmed(root: Path) -> bool:
    """Whether the user agrees to write the files into a folder that is in no repository; False if there is no terminal
    to ask.
    """
    return sys.stdin.isatty() and input(f"{root} is in no git repository. Write a project here? [y/N] ") in ("y", "yes")


def _refuse_others(root: Path) -> None:
    """Raises GpufleetError if the folder has files that would make every bill fail."""
    try:
        load_catalog(root)
        observations(root)
        policy.find_policy(root)
    except GpufleetError as error:
        raise GpufleetError(
            f"{error}\ngpufleet reads prices/, receipts/, traces/ and policy.yaml of its project. If these files are "
            f"not for gpufleet, run this in a new folder of the repository; from there, `--code ..` names your code."
        ) from None


def _project(root: Path, repository: Path) -> None:
    """Writes Pulumi.yaml and the program, or neither of them."""
    there = next((name for name in project.NAMES if (root / name).exists()), None)
    if there and not (root / PROGRAM).exists():
        print(
            f"{there} exists already, so no Pulumi program is written. Your own program can declare a run by "
            f"gpufleet.TrainingRun. For a new Pulumi project, run this in another folder."
        )
        return
    options = project.python_of(root, repository)
    written = [_write(file, text, root) for file, text in project.files(root, project.name_for(root), options).items()]
    if any(written):
        print(f"  Pulumi runs it with {_python(options)}.")


def _python(options: dict[str, str]) -> str:
    """A sentence about which Python the Pulumi engine uses with these options, and what the user has to correct in
    Pulumi.yaml.
    """
    if options["toolchain"] != "pip":
        return f"the environment of {options['toolchain']}.lock"
    lacks = "" if find_spec("pip") else "; CHECK: it has no pip, which the engine needs to list packages: add it"
    if "virtualenv" in options:
        return options["virtualenv"] + lacks
    if Path(shutil.which("python3") or "").parent == Path(sys.executable).parent:
        return f"the python3 of PATH, {sys.prefix}{lacks}"
    return f"the python3 of PATH; CHECK: gpufleet is in {sys.prefix}, which has to come first in PATH{lacks}"


def _ignore(root: Path) -> None:
    """Adds this environment and the files that commands write to .gitignore, unless .gitignore already has them in some
    form. Leaves results/ out if the folder exists, because it then belongs to the repository.
    """
    prefix, file = Path(sys.prefix), root / ".gitignore"
    names = [".gpufleet", "rehearsals"] + ["results"] * (not (root / "results").exists())
    if sys.prefix != sys.base_prefix and prefix.is_relative_to(root):
        names.append(prefix.relative_to(root).as_posix())
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    there = {line.strip().strip("/") for line in text.splitlines()}
    missing = [f"/{name}/" for name in names if name not in there]
    if missing:
        begun = text + "\n" if text and not text.endswith("\n") else text
        file.write_text(begun + "".join(f"{line}\n" for line in missing), encoding="utf-8")
    print(f"Added to .gitignore: {', '.join(missing)}" if missing else ".gitignore has all lines already.")


def _workflow(root: Path, repository: Path) -> None:
    folder = root.resolve().relative_to(repository.resolve()).as_posix()
    name = "gpufleet-review.yml" if folder == "." else f"gpufleet-review-{folder.replace('/', '-')}.yml"
    install = workflow.installation(root)
    new_one = _write(repository / ".github" / "workflows" / name, workflow.workflow(folder, install), repository)
    if new_one and install.endswith(workflow.CHECK):
        print("  CHECK in that file from where CI installs gpufleet: here it was installed from a file.")


def _write(file: Path, text: str, below: Path) -> bool:
    """Writes the file unless it exists, and prints whether it was written."""
    if file.exists():
        print(f"{file.relative_to(below)} exists already and is not changed.")
        return False
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    print(f"Wrote {file.relative_to(below)}.")
    return True
