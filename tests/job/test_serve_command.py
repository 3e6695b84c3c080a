"""`python -m job.serve`: what it serves, what it refuses, what its page says."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

import pytest
from serve_world import SHAPE, exported, served

from job.serve import main
from job.serving import request
from job.serving import server as serving
from job.serving.request import Generation

ROOT = Path(__file__).parents[2]


def test_the_command_serves_from_the_folder_alone_and_ends_at_sigterm(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "job.serve", str(exported(tmp_path / "final")), "--port", "0", "--device", "cpu"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "http://127.0.0.1:" in line  # nobody outside by default
        port = int(line.split("127.0.0.1:")[1].split()[0])
        idle = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        idle.request("POST", "/generate", json.dumps({"prompt": "1+1", "max_tokens": 5, "temperature": 0}))
        assert json.loads(idle.getresponse().read())["tokens_generated"] == 5
        process.send_signal(signal.SIGTERM)  # the connection is still open
        assert process.wait(timeout=20) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
        idle.close()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"experiment": "tinystories-growth"}, "only the character models of pretrain-d64 can be served"),
        ({"shape": {"layers": 2}}, "damaged export"),
        ({"shape": {**asdict(SHAPE), "width": 64}}, "damaged export"),
        ({"shape": {**asdict(SHAPE), "layers": 3}}, "damaged export"),
        ({"sequence": None}, "damaged export"),
    ],
    ids=str,
)
def test_what_is_no_character_model_is_refused(
    tmp_path: Path, changed: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(exported(tmp_path / "final", **changed)), "--port", "0", "--device", "cpu"]) == 2
    assert said in capsys.readouterr().err


def test_a_missing_or_cut_export_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--port", "0"]) == 2
    assert "no exported model" in capsys.readouterr().err
    folder = exported(tmp_path / "final")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert main([str(folder), "--port", "0"]) == 2
    assert "copy it again" in capsys.readouterr().err


def test_a_taken_port_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with served(tmp_path / "final") as running:
        assert main([str(tmp_path / "final"), "--port", str(running.server_address[1])]) == 2
    assert "in use" in capsys.readouterr().err


def test_the_page_names_every_option_route_field_and_limit() -> None:
    page = (ROOT / "docs/serve.md").read_text()
    for word in ("--port 8000", "--host 127.0.0.1", "--device", *serving.ROUTES):
        assert word in page
    for field in fields(Generation):
        default = "null" if field.default is None else str(field.default).lower()
        shown = "needed" if field.default is MISSING else default
        assert re.search(rf"^\| `{field.name}` \| .* \| {re.escape(shown)} \|$", page, re.MULTILINE), field.name
    assert f"1 to {request.MAX_TOKENS} characters" in page
    assert f"to {request.MAX_TEMPERATURE:g} |" in page
    assert f"1 to {request.MAX_TOP_K}, or null" in page
    assert f"{serving.BODY_BYTES // 1024} KiB" in page
    assert f"when {serving.AT_ONCE} generations" in page
