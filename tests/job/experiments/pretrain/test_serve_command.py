"""`python -m gpufleet.job.experiments.pretrain.serve`: what it serves, what it refuses, what its page says."""

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
import torch

from gpufleet.job.experiments.pretrain.model import CharGpt
from gpufleet.job.experiments.pretrain.serve import request
from gpufleet.job.experiments.pretrain.serve import server as serving
from gpufleet.job.experiments.pretrain.serve.__main__ import main
from gpufleet.job.experiments.pretrain.serve.request import GenerateRequest
from tests.job.serve_world import SHAPE, exported, served
from tests.repository import ROOT

MODULE = "gpufleet.job.experiments.pretrain.serve"


def test_the_command_serves_from_the_folder_alone_and_ends_at_sigterm(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", MODULE, str(exported(tmp_path / "final")), "--port", "0", "--device", "cpu"],
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
        idle = http.client.HTTPConnection("127.0.0.1", port)
        idle.request("POST", "/generate", json.dumps({"prompt": "1+1", "max_tokens": 5, "temperature": 0}))
        assert json.loads(idle.getresponse().read())["tokens_generated"] == 5
        process.send_signal(signal.SIGTERM)  # the connection is still open
        assert process.wait() == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
        idle.close()
    finally:
        process.kill()
        process.communicate()


COMPUTING = """
import sys
import torch
from gpufleet.job.experiments.pretrain.serve import __main__ as serve
from gpufleet.job.experiments.pretrain.serve import batch, server

def computing(*args, **settings):  # its next character is far away, as behind a long prompt
    print("begun", flush=True)
    while True:
        torch.ones(64, 64) @ torch.ones(64, 64)
    yield 0

batch.TextWriter.write, server.CLOSING_S = computing, 0.1
sys.exit(serve.main(sys.argv[1:]))
"""


def test_sigterm_ends_it_in_good_order_while_a_generation_computes(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", COMPUTING, str(exported(tmp_path / "final")), "--port", "0", "--device", "cpu"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline().split("127.0.0.1:")[1].split()[0])
        client = http.client.HTTPConnection("127.0.0.1", port)
        client.request("POST", "/generate", json.dumps({"prompt": "1"}))
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
        client.close()
    finally:
        process.kill()
        process.communicate()


def test_help_and_wrong_words_wait_for_no_torch() -> None:
    code = f"import sys, {MODULE}.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


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


def test_a_flipped_bit_in_the_weights_is_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = exported(tmp_path / "final")
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    assert main([str(folder), "--port", "0", "--device", "cpu"]) == 2
    assert "model.safetensors is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Found no NVIDIA driver on your system.\nPlease"),
        torch.OutOfMemoryError("CUDA out of memory."),
        AssertionError("Torch not compiled with CUDA enabled"),
    ],
)
def test_a_device_that_fails_is_said_and_no_damage(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(module: CharGpt, *where: object) -> CharGpt:
        raise error

    monkeypatch.setattr(CharGpt, "to", failing)
    assert main([str(exported(tmp_path / "final")), "--port", "0", "--device", "cuda:1"]) == 2
    said = f"{type(error).__name__}: {error}".partition("\n")[0]
    assert f"cannot be put on device 'cuda:1' ({said}); try --device cpu\n" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["foo", "hpu", "xpu", "meta"])
def test_a_device_that_computes_nothing_is_refused_at_the_start_and_no_damage(
    device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(exported(tmp_path / "final")), "--port", "0", "--device", device]) == 2
    assert f"cannot be put on device '{device}'" in (said := capsys.readouterr().err)
    assert "damaged" not in said


def test_ctrl_c_while_it_loads_ends_it_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(path: Path) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("gpufleet.job.atomic.sha256", interrupted)
    assert main([str(exported(tmp_path / "final")), "--port", "0", "--device", "cpu"]) == 0
    assert capsys.readouterr().err == ""


def test_a_package_that_only_the_server_needs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "gpufleet.job.experiments.pretrain.serve.server")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main([str(exported(tmp_path / "final")), "--port", "0", "--device", "cpu"]) == 2
    assert capsys.readouterr().err.endswith(": pip install 'gpufleet[job,serve]'\n")


def test_a_taken_port_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with served(tmp_path / "final") as running:
        port = running.address[1]
        assert main([str(tmp_path / "final"), "--port", str(port)]) == 2
    said = capsys.readouterr().err
    assert said == f"--port {port} on 127.0.0.1 is in use; --port 0 takes a free one\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--port", "99999999"), "--port 99999999: 0 to 65535 are allowed; 0 takes a free one"),
        (("--port", "-1"), "--port -1: 0 to 65535 are allowed; 0 takes a free one"),
        (("--port", "0", "--host", "nope.invalid"), "--host nope.invalid: no IPv4 address of this machine"),
        (("--port", "0", "--host", "192.0.2.1"), "--host 192.0.2.1: no IPv4 address of this machine"),
    ],
)
def test_a_place_that_cannot_be_served_from_is_named(
    options: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(exported(tmp_path / "final")), "--device", "cpu", *options]) == 2
    assert capsys.readouterr().err.startswith(said)


def test_an_empty_host_is_not_every_address(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([str(exported(tmp_path / "final")), "--port", "99999999", "--host", ""])
    assert "--host is empty; 127.0.0.1 serves only this machine" in capsys.readouterr().err


def test_the_page_names_every_option_route_field_and_limit() -> None:
    page = (ROOT / "docs/serve.md").read_text()
    for word in ("--port 8000", "--host 127.0.0.1", "--device", *serving.ROUTES):
        assert word in page
    for field in fields(GenerateRequest):
        default = "null" if field.default is None else str(field.default).lower()
        shown = "needed" if field.default is MISSING else default
        assert re.search(rf"^\| `{field.name}` \| .* \| {re.escape(shown)} \|$", page, re.MULTILINE), field.name
    assert f"1 to {request.MAX_TOKENS} characters" in page
    assert f"to {request.MAX_TEMPERATURE:g} |" in page
    assert f"1 to {request.MAX_TOP_K}, or null" in page
    assert f"{serving.BODY_BYTES // 1024} KiB" in page
    assert f"when {serving.AT_ONCE} generations" in page
    assert f"{serving.CONNECTIONS} connections" in page
    assert f"{serving.PATIENCE_S:g} s after the connection" in page
    assert f"cut off after {serving.CLOSING_S:g} s" in page
