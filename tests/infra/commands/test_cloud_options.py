"""What `gpufleet cloud` and `gpufleet rehearse` refuse before they start anything."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from gpufleet.infra.cli import main
from gpufleet.infra.commands import cloud


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--region", "mars"], "--region mars: allowed are us-east-1, us-east-2"),
        (["--port", "-5"], "--port -5: allowed are 1 to 65535, or 0 for any free one"),
        (["--port", "99999"], "--port 99999: allowed are 1 to 65535"),
        (["--timeout", "-1"], "--timeout -1: allowed are seconds above 0"),
        (["--timeout", "nan"], "--timeout nan: allowed are seconds above 0"),
    ],
)
def test_an_option_that_the_embedded_aws_cannot_have_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cloud", *words]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.out == ""


def test_a_port_that_is_taken_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["cloud", "--port", str(port)]) == 2
    assert f"--port {port} on 127.0.0.1: Address already in use; give another port, or 0" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], [""]])
def test_a_rehearsal_of_no_stack_names_those_there_are(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks" / "growth.yaml").touch()
    monkeypatch.chdir(tmp_path)
    assert main(["rehearse", *words]) == 2
    assert "which stack is to be rehearsed? There are growth; --all" in capsys.readouterr().err
    assert main(["rehearse", "growth", "--all"]) == 2
    assert "give one of the two" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["mine", "tinystories-growth"], "stack init tinystories-growth &&"),
        (["mine"], "stack init mine &&"),
        ([], "There is no stack"),
    ],
)
def test_the_example_is_of_a_stack_that_is_there(names: list[str], said: str) -> None:
    assert said in cloud.example(names)
