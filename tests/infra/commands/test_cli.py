"""The command line: every command is wired, nothing is imported that a command does not need, errors are sentences."""

from __future__ import annotations

import errno
import importlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from botocore.config import Config

from gpufleet.infra import cli
from gpufleet.infra.account import aws
from gpufleet.infra.commands import prices
from tests.repository import ROOT


def test_the_package_itself_is_the_command_line() -> None:
    done = subprocess.run([sys.executable, "-m", "gpufleet", "--version"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()[0]) == (0, "gpufleet")


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    for name in cli.COMMANDS:
        assert f"\n    {name} " in said


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_exists_and_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: gpufleet {name}" in capsys.readouterr().out
    assert callable(importlib.import_module(f"gpufleet.infra.commands.{name}").run)


def test_no_command_at_all_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "usage: gpufleet" in capsys.readouterr().out


def test_an_unknown_command_names_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    """The message names the nearest command if one has a similar spelling."""
    for word, nearest in (("cst", " Nearest: gpufleet cost."), ("stats", " Nearest: gpufleet status."), ("--x", "")):
        assert cli.main([word]) == 2
        said = capsys.readouterr().err
        assert said == f"gpufleet: there is no command {word!r}.{nearest} `gpufleet --help` lists all of them.\n"


def test_a_word_too_many_shows_the_usage_of_its_own_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["cost", "two-tower", "--scenaro", "o"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("usage: gpufleet cost")
    assert "--scenaro" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["stop", "two-tower", "--run", ""], "--run: '' is not accepted; allowed: 1 to 32 of a-z"),
        (["status", "two-tower", "--run", "../r1"], "--run: '../r1' is not accepted; allowed: 1 to 32 of a-z"),
        (["logs", "two-tower", "--follow", "--boot"], "--boot: not allowed with argument --follow"),
        (["wait", "two-tower", "--timeout", "nan"], "--timeout nan: allowed are seconds, 0 or more"),
        (["wait", "two-tower", "--timeout", "-5"], "--timeout -5: allowed are seconds, 0 or more"),
        (["compare", "two-tower", "--all", "--json"], "--json: not allowed with argument --all"),
        (["cost", "two-tower", "--scenario", ""], "two-tower.yaml has no scenario ''"),
    ],
)
def test_an_option_that_means_nothing_is_refused_and_not_left_out(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty value comes from an unset variable of the shell: `stop --run "$OLD"` would end the run that trains."""
    monkeypatch.chdir(ROOT)
    try:
        code: object = cli.main(words)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert said in capsys.readouterr().err


def test_a_wrong_stack_is_a_sentence_on_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT / "infra")
    assert cli.main(["status", "tinystories-grow"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("gpufleet: there is no stack 'tinystories-grow'")
    assert "Nearest: tinystories-growth." in said.err


def test_a_wrong_definition_is_reported_in_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text("run: {id: R}\n")
    assert cli.main(["status", str(path)]) == 2
    said = capsys.readouterr().err
    assert "broken.yaml: 10 problems\n" in said
    assert "line 1, run.id: 'R' is not accepted" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("program", "also"),
    [
        ("import gpufleet.infra.definition.loader; gpufleet.infra.cli._parser().format_help()", {"numpy"}),
        ("import gpufleet.infra.catalog; gpufleet.infra.catalog.load_catalog()", {"numpy", "yaml"}),
        (
            "import gpufleet.infra.compare.ranking, gpufleet.infra.risk.replay, gpufleet.infra.bill.table",
            {"http.client", "matplotlib"},
        ),
        (
            "assert gpufleet.infra.cli.main(['cost', 'tinystories-growth']) == 0",
            {"http.client", "matplotlib", "gpufleet.infra.definition.campaign", "gpufleet.infra.inputs.folders"},
        ),
        ("assert gpufleet.infra.cli.main(['prices']) == 0", {"numpy"}),
        ("import gpufleet.infra.commands.diff", set()),
    ],
)
def test_what_needs_neither_aws_nor_the_engine_nor_torch_loads_none_of_them(program: str, also: set[str]) -> None:
    heavy = {"boto3", "botocore", "grpc", "moto", "pulumi", "pulumi_aws", "torch", *also}
    program = f"import sys, gpufleet.infra.cli; {program}; print('loaded', *{heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "loaded"


def test_the_interpreter_visits_no_object_again_when_it_ends() -> None:
    # the function that is registered first is called last
    program = "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count()));"
    program += "import gpufleet.infra.cli; gpufleet.infra.cli.main(['completion', 'bash'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert int(done.stdout.splitlines()[-1]) > 10_000


def test_no_credentials_end_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.chdir(ROOT)
    assert cli.main(["status", "tinystories-growth"]) == 2
    assert capsys.readouterr().err.startswith("gpufleet: there are no AWS credentials. Run `aws configure sso`")


@pytest.mark.parametrize("address", ["localhost", "http://", "http://127.0.0.1:port"])
def test_an_endpoint_that_is_no_address_ends_in_a_sentence(
    address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    monkeypatch.chdir(ROOT)
    assert cli.main(["status", "tinystories-growth"]) == 2
    assert "Check AWS_ENDPOINT_URL and endpoint_url" in capsys.readouterr().err


def test_an_endpoint_that_is_not_there_ends_in_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(aws, "_CONFIG", aws._CONFIG.merge(Config(retries={"total_max_attempts": 1})))
    assert cli.main(["status", "tinystories-growth"]) == 2
    assert "`gpufleet cloud` must be running where it is set" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "stacks/a.yaml"), "stacks/a.yaml: Permission denied. Give"),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "rehearsals/x"), "rehearsals/x: .* Move it away"),
        (OSError(errno.ENOSPC, "No space left on device"), f"{ROOT}: No space left on device. Free some space"),
        (OSError("the peer is gone"), "gpufleet: the peer is gone."),
        (
            FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp', '/']"),
            r"found in \['/tmp', '/'\]: free some space there, or name a folder with room in TMPDIR",
        ),
        (OSError(errno.ENOENT, "No such file or directory"), "the folder in which this was run no longer exists"),
    ],
)
def test_trouble_with_files_is_a_sentence_with_the_path_and_what_to_do(
    error: OSError, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(_: object) -> int:
        raise error

    monkeypatch.setattr(prices, "run", run)
    monkeypatch.chdir(ROOT)
    assert cli.main(["prices"]) == 2
    assert re.search(said, capsys.readouterr().err)


def test_ctrl_c_while_a_command_is_still_being_loaded_prints_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("importlib.import_module", interrupted)
    assert cli.main(["cost", "tinystories-growth"]) == 130
    assert capsys.readouterr().err == "\n"


def test_a_closed_standard_output_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(["prices", "--json"]) == 0
    sys.stdout.close()


def test_an_error_that_cannot_be_written_is_still_exit_code_2() -> None:
    """Writing fails in `>log 2>&1` on a full disk, or in `2>&1 | head`. Exit code 1 would mean "no"."""
    reader, writer = os.pipe()
    os.close(reader)
    program = [sys.executable, "-m", "gpufleet.infra.cli", "cost", "no-such-stack"]
    assert subprocess.run(program, stderr=writer, cwd=ROOT).returncode == 2
    os.close(writer)


def test_a_command_whose_reader_leaves_is_not_done() -> None:
    """Such a command is `gpufleet doctor STACK | head -1 && pulumi up`, with pipefail."""
    reader, writer = os.pipe()
    os.close(reader)
    program = [sys.executable, "-m", "gpufleet.infra.cli", "prices"]
    done = subprocess.run(program, stdout=writer, stderr=subprocess.PIPE, cwd=ROOT)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_line_into_a_pipe_arrives_when_it_is_printed_and_in_any_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise `logs --follow | tee` would be silent for hours, and a terminal in latin-1 would show a traceback."""
    pipe = io.BytesIO()
    arrived = list[bytes]()

    def run(_: object) -> int:
        sys.stdout.write("waiting \u2615\n")
        arrived.append(pipe.getvalue())
        return 0

    monkeypatch.setattr(prices, "run", run)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(pipe, encoding="latin-1"))
    assert cli.main(["prices"]) == 0
    assert arrived == [b"waiting \\u2615\n"]


def test_a_file_named_from_outside_of_its_project_is_said_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the project's policy.yaml would not be checked, and prepare would write the data elsewhere."""
    (tmp_path / "stacks").mkdir()
    path = tmp_path / "stacks" / "mine.yaml"
    path.write_text((ROOT / "stacks" / "two-tower.yaml").read_text())
    for folder, said in ((tmp_path.parent, True), (tmp_path, False), (tmp_path / "stacks", False), (ROOT, False)):
        monkeypatch.chdir(folder)
        assert cli.main(["cost", str(path)]) == 0
        assert ("this runs outside of it" in capsys.readouterr().err) is said
