"""The package as a new user has it: installed from dist/ into an environment of its own, used outside of any clone.

What is typed is the README's section on other repositories; the script, and what is shown of its rehearsal, are the
tutorial's. One environment, first without extras, then with what the README installs: the order of the tests is theirs.
"""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpufleet.infra.inputs import archive
from tests import pages
from tests.repository import ROOT

pytestmark = pytest.mark.wheel
COMMANDS = re.findall(r"(?ms)^```sh own\n(.*?)^```$", (ROOT / "README.md").read_text())[0].splitlines()
SCRIPT = re.findall(r"(?ms)^```python\n(.*?)^```$", pages.TUTORIAL.read_text())[0]
MOST_MB = 500
COMPILED = 1.25  # bytes that pip compiles for one of source: of pulumi-aws 156 MB for 126
ENGINE = pytest.mark.skipif(shutil.which("pulumi") is None, reason="the Pulumi engine is not on PATH")
THEIRS = ("infra", "job", "tests", "stacks", "gpufleet", "rehearsal")


@dataclass
class User:
    """Somebody with a shell in a folder."""

    folder: Path
    wheel: Path

    def types(self, command: str, *, folder: Path | None = None, code: int = 0) -> str:
        """What the command prints, in the environment that the README's first line makes. `code`: how it must end."""
        done = subprocess.run(
            ["bash", "-c", f"{self.activated}\n{command}"],
            cwd=folder or self.folder,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == code, f"{command} gave {done.returncode}\n{done.stdout}"
        return done.stdout

    @property
    def activated(self) -> str:
        return f"source {shlex.quote(str(self.folder / '.venv' / 'bin' / 'activate'))}"

    @staticmethod
    def environment() -> dict[str, str]:
        """Without a word about this clone, AWS or Pulumi; versions are those of CI."""
        ours = ("AWS_", "PULUMI_", "GPUFLEET_", "PYTHON", "VIRTUAL_ENV")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        path = [
            f"{sys.base_prefix}/bin",
            *(p for p in kept["PATH"].split(":") if p != str(Path(sys.executable).parent)),
        ]
        nowhere = dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), os.devnull)
        # `no` is how pip takes it: nothing is compiled ahead, half of the CPU time of an installation.
        pip = {"PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "PIP_NO_COMPILE": "no"}
        return {**kept, **nowhere, **pip, "PATH": ":".join(path)}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> User:
    """A user without extras."""
    (wheel,) = (ROOT / "dist").glob("gpufleet-*.whl")
    folder = tmp_path_factory.mktemp("new")
    (folder / "train.py").write_text(SCRIPT)
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    user = User(folder, wheel)
    subprocess.run(["bash", "-c", COMMANDS[0]], cwd=folder, env=user.environment(), check=True)
    user.types(f"pip install --quiet {shlex.quote(str(wheel))}")
    return user


@pytest.fixture(scope="module")
def full(base: User) -> User:
    """After the README's second line."""
    base.types(COMMANDS[1].replace("../gpufleet", str(base.wheel)) + "\npip check")
    return base


@pytest.fixture(scope="module")
def cloud(full: User) -> Iterator[Mapping[str, str]]:
    """An embedded AWS, as the variables that `gpufleet cloud` prints."""
    command = ["bash", "-c", f"{full.activated}; exec gpufleet cloud"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=full.folder, env=full.environment(), text=True, **pipes) as running:  # type: ignore[call-overload]
        exports = {}
        for line in running.stdout:
            if found := re.match(r"export (\w+)=(.*)", line):
                exports[found[1]] = shlex.split(found[2])[0]
            if "Ctrl-C" in line:
                break
        yield exports
        running.stdin.close()


def in_a_terminal(command: str, folder: Path, environment: Mapping[str, str]) -> tuple[int, str]:
    """Exit code and output of a command at whose question Enter is pressed."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        ["bash", "-c", command], cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    ) as running:
        os.close(theirs)
        printed, answered = b"", False
        while True:
            try:
                more = os.read(ours, 4096)
            except OSError:  # its end
                break
            printed += more
            if b"\x1b[6n" in more:  # where is the cursor?
                os.write(ours, b"\x1b[1;1R")
            if b"press <ENTER>" in printed and not answered:
                answered = bool(os.write(ours, b"\r"))
    os.close(ours)
    return running.returncode, re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", printed.decode())


def test_the_readme_has_six_commands_and_the_script_thirteen_lines() -> None:
    assert len(COMMANDS) == 6
    assert len([line for line in SCRIPT.splitlines() if line]) == 13


def test_the_sdist_makes_the_same_package(tmp_path: Path) -> None:
    (wheel,), (sdist,) = (ROOT / "dist").glob("gpufleet-*.whl"), (ROOT / "dist").glob("gpufleet-*.tar.gz")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(tmp_path), str(sdist)], check=True)
    (again,) = tmp_path.glob("*.whl")
    held = [{each.filename: each.CRC for each in zipfile.ZipFile(path).infolist()} for path in (wheel, again)]
    assert held[0] == held[1]
    assert "LICENSE" in {Path(name).name for name in held[0]}


def test_no_link_of_its_readme_leads_to_a_file_that_an_index_does_not_have() -> None:
    (wheel,) = (ROOT / "dist").glob("gpufleet-*.whl")
    with zipfile.ZipFile(wheel) as package:
        (name,) = (name for name in package.namelist() if name.endswith("/METADATA"))
        text = package.read(name).decode()
    linked = re.findall(r"\]\(([^)\s]*)\)", text)
    assert "https://example.org/gpufleet/raw/v0.1.0/docs/parts.svg" in linked
    assert [link for link in linked if not link.startswith(("https://", "#"))] == []


def test_without_extras_it_is_under_half_a_gigabyte_and_has_no_torch(base: User) -> None:
    (packages,) = (base.folder / ".venv").glob("lib/python*/site-packages")
    files = [path for path in packages.rglob("*") if path.suffix != ".pyc"]
    size = sum(path.lstat().st_blocks * 512 * (1 + COMPILED * (path.suffix == ".py")) for path in files)
    assert size < MOST_MB * 1e6
    assert not (packages / "torch").exists()


def test_the_import_computes_for_under_a_tenth_of_a_second_and_loads_none_of_the_large_packages(base: User) -> None:
    program = "import time; t = time.process_time(); import gpufleet; t = time.process_time() - t; import sys, json; "
    program += (
        "print(json.dumps([t, sorted({'torch', 'pulumi', 'boto3', 'numpy'} & {*sys.modules}), gpufleet.__file__]))"
    )
    tries = [json.loads(base.types(f"python -c {shlex.quote(program)}")) for _ in range(3)]
    assert min(tries)[0] < 0.1
    assert tries[0][1] == []
    assert Path(tries[0][2]).is_relative_to(base.folder)


def test_its_job_archive_is_the_clone_s_so_that_both_declare_the_same_run(base: User) -> None:
    (package,) = (base.folder / ".venv").glob("lib/python*/site-packages/gpufleet/job")
    assert archive.build(package).sha256 == archive.build(ROOT / "job").sha256


def test_the_commands_for_a_bill_need_no_extra(base: User, tmp_path: Path) -> None:
    git = "git -c user.name=me -c user.email=me@example.org"
    (tmp_path / "train.py").write_text(SCRIPT)

    def typed(command: str, code: int = 0) -> str:
        return base.types(command, folder=tmp_path, code=code)

    typed("git init -q && gpufleet init && gpufleet new mine --code .")
    typed(f"git add -A && {git} commit -qm one && sed -i 's/max_usd: 20/max_usd: 9/' stacks/mine.yaml")
    typed(f"{git} commit -qam two")
    assert "in eight runs of ten" in typed("gpufleet cost mine")
    assert "mine: train" in typed("gpufleet compare mine --all")
    assert "`limits.max_usd`" in typed("gpufleet diff HEAD~1 HEAD")
    assert "there are no AWS credentials" in typed("gpufleet doctor mine", code=1)
    assert "us-east-2" in typed("gpufleet prices")
    assert "No receipt yet" in typed("gpufleet receipts", code=1)
    assert typed("gpufleet docs bill") == (ROOT / "docs" / "bill.md").read_text()
    assert "no results of mine" in typed("gpufleet report mine", code=2)
    assert "Its charts need matplotlib" in typed("gpufleet compare mine --html x.html >/dev/null && cat x.html")
    assert json.loads(typed("gpufleet schema")) == json.loads((tmp_path / "stacks/definition.schema.json").read_text())


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("gpufleet rehearse {stack}", "rehearsal"),
        ("gpufleet cloud", "rehearsal"),
        ("gpufleet compare {stack} --plot x.png", "report"),
    ],
)
def test_a_missing_extra_is_one_sentence_with_the_command_that_adds_it(command: str, extra: str, base: User) -> None:
    said = base.types(command.format(stack=ROOT / "stacks" / "two-tower.yaml"), code=2)
    assert said.splitlines()[-1].endswith(f": pip install 'gpufleet[{extra}]'")
    assert "Traceback" not in said


def test_from_an_empty_folder_with_a_script_to_a_bill(full: User) -> None:
    assert sorted(path.name for path in full.folder.iterdir()) == [".git", ".venv", "train.py"]
    said = full.types(COMMANDS[2])
    assert "Pulumi runs it with .venv." in said
    assert "CHECK in that file from where CI installs gpufleet" in said
    assert "in eight runs of ten" in full.types(COMMANDS[3])


def test_a_ready_made_job_says_that_it_needs_the_extra_for_training(full: User) -> None:
    said = full.types(f"gpufleet rehearse {ROOT / 'stacks' / 'two-tower.yaml'}", code=2)
    assert said.splitlines()[-1].endswith(": pip install 'gpufleet[job,rehearsal]'")


def test_to_a_rehearsal(full: User) -> None:
    before = {path.relative_to(full.folder) for path in full.folder.rglob("*") if ".venv" not in path.parts}
    said = full.types(COMMANDS[4])
    assert f"Engine: {'pulumi' if shutil.which('pulumi') else 'in-process'}" in said
    assert re.search(r"ok +goes on from its checkpoint: goes on: ", said)
    assert "Everything held" in said
    (shown,) = pages.console(pages.TUTORIAL, "varies").values()
    assert not (different := pages.difference(shown, said, figures=False)), different
    after = {path.relative_to(full.folder) for path in full.folder.rglob("*") if ".venv" not in path.parts}
    assert {path.parts[0] for path in after - before} == {"rehearsals"}


@ENGINE
def test_to_a_preview(full: User, cloud: Mapping[str, str]) -> None:
    code, said = in_a_terminal(
        f"{full.activated}; {COMMANDS[5]}", full.folder, {**full.environment(), **cloud, "TERM": "xterm"}
    )
    assert code == 0, said
    assert "press <ENTER>" in said
    assert "in eight runs of ten" in said
    assert re.search(r"\+ \d\d to create", said)


@ENGINE
def test_beside_packages_of_the_same_names_and_with_the_environment_of_elsewhere(
    full: User, cloud: Mapping[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "services" / "llm"
    for name in THEIRS:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("raise RuntimeError('somebody else')")
    (folder / "train.py").write_text(SCRIPT)
    full.types("git init -q ../..; gpufleet init mine", folder=folder)
    command = f"{full.activated}; gpufleet cost mine && pulumi stack init mine && pulumi preview --non-interactive"
    code, said = in_a_terminal(command, folder, {**full.environment(), **cloud})
    assert code == 0, said
    cost, _, preview = said.partition("Previewing update")
    shown = preview.partition("Diagnostics:")[2]  # the engine also prints the first line while it works
    assert [each.count("in eight runs of ten") for each in (cost, shown)] == [1, 1]
