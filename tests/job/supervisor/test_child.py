"""A real child process: its output, its end, its group, and its leash. And packages before anything else."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import signal
import subprocess
import sys
import time
from io import BytesIO
from pathlib import Path

import pytest

from gpufleet.job import gpus
from gpufleet.job.contract.messages import Stop
from gpufleet.job.supervisor import bootstrap, machine
from gpufleet.job.supervisor.child import Child, GroupedProcess, JobLog, MetricsFollower, trainer
from tests.repository import ROOT
from tests.waiting import is_alive, wait_for

ENGINE = "gpufleet.job.experiments.engine"


def start(log: JobLog, code: str) -> Child:
    return Child(lambda: GroupedProcess([sys.executable, "-c", code], os.environ), log, time.time)


def wait_for_end(child: Child) -> None:
    wait_for("the end of the child", lambda: child.poll() is not None)


def test_nothing_that_a_terminal_would_obey_is_logged(tmp_path: Path) -> None:
    stream, log = BytesIO(), tmp_path / "job.log"
    said = r"import sys; sys.stdout.buffer.write(b'\x1b[2J10 %\r20 %\ttwo\xff\x9b\n')"
    child = start(JobLog(log, stream), said)
    wait_for_end(child)
    assert log.read_bytes() == stream.getvalue() == "\\x1b[2J10 %\n20 %\ttwo\ufffd\ufffd\n".encode()


def test_output_goes_to_the_log_and_on_and_the_code_is_kept(tmp_path: Path) -> None:
    stream = BytesIO()
    child = start(
        JobLog(tmp_path / "job.log", stream), "import sys; print('out'); sys.stderr.write('err\\n'); sys.exit(69)"
    )
    wait_for_end(child)
    assert child.poll() == 69
    assert sorted((tmp_path / "job.log").read_text().splitlines()) == ["err", "out"]
    assert sorted(stream.getvalue().decode().splitlines()) == ["err", "out"]


@pytest.mark.parametrize(
    ("code", "ends"),
    [
        ("", 1),  # as torchrun ends although no rank has said how the run did
        ("import sys; sys.exit(3)", 3),
        ("open({path!r}, 'w').write('{{\"code\": 72}}')", 72),
    ],
)
def test_ranks_end_with_what_one_of_them_has_left_and_an_earlier_start_has_not(
    tmp_path: Path, code: str, ends: int
) -> None:
    path = tmp_path / "ended.json"
    path.write_text('{"code": 0}')
    words = [sys.executable, "-c", code.format(path=str(path))]
    child = Child(lambda: GroupedProcess(words, os.environ), JobLog(tmp_path / "job.log", BytesIO()), time.time, path)
    wait_for_end(child)
    assert child.poll() == ends


def test_a_log_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    stream = BytesIO()
    child = start(JobLog(tmp_path / "no" / "folder" / "job.log", stream), "print('out')")
    wait_for_end(child)
    assert child.poll() == 0
    assert stream.getvalue() == b"out\n"


def test_no_link_that_the_trainer_leaves_leads_its_words_or_a_message_elsewhere(tmp_path: Path) -> None:
    other = tmp_path / "packages.py"
    other.write_text("")
    (tmp_path / "job.log").symlink_to(other)
    (tmp_path / f".stop.json.{os.getpid()}").symlink_to(other)
    child = start(JobLog(tmp_path / "job.log", BytesIO()), "print('import os')")
    wait_for_end(child)
    Stop().write(tmp_path)
    assert not other.read_text()
    assert Stop.read(tmp_path) == Stop()


def test_a_kill_ends_the_whole_group(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(5000)']);"
        "print(p.pid, flush=True); time.sleep(5000)"
    )
    stream = BytesIO()
    child = start(JobLog(tmp_path / "job.log", stream), code)
    wait_for("the number of the process below", lambda: stream.getvalue().endswith(b"\n"), process=child)
    grandchild = int(stream.getvalue())
    assert is_alive(grandchild)
    child.kill()
    child.kill()
    wait_for("the end of the process below", lambda: not is_alive(grandchild))
    assert child.poll() == -signal.SIGKILL


WAITS = """
import sys, time
from pathlib import Path
print("imported", flush=True)
Path(sys.argv[1]).with_name("imported").touch()
while not Path(sys.argv[1]).exists():
    time.sleep(0.01)
print(Path(sys.argv[1]).read_text())
"""


def waiting(tmp_path: Path, stream: BytesIO) -> Child:
    file = tmp_path / "start.json"
    file.write_text('{"rung": 9}')  # an earlier start's
    return Child(
        lambda: GroupedProcess([sys.executable, "-c", WAITS, str(file)], os.environ),
        JobLog(tmp_path / "job.log", stream),
        time.time,
        waits=file,
    )


def test_one_that_waits_says_nothing_until_it_is_let_go(tmp_path: Path) -> None:
    stream = BytesIO()
    child = waiting(tmp_path, stream)
    wait_for("its start", (tmp_path / "imported").exists)
    assert child.poll() is None
    assert not stream.getvalue()
    child.go(3)
    wait_for_end(child)
    assert child.poll() == 0
    assert stream.getvalue().split() == [b"imported", b'{"rung":', b"3}"]


def test_one_that_waits_can_be_killed(tmp_path: Path) -> None:
    child = waiting(tmp_path, BytesIO())
    child.kill()
    assert child.poll() == -signal.SIGKILL


def test_a_process_that_left_the_group_and_holds_the_output_does_not_hold_the_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpufleet.job.supervisor.child.KILL_S", 0.2)
    code = "import subprocess; print(subprocess.Popen(['sleep', '5000'], start_new_session=True).pid)"
    stream = BytesIO()
    child = start(JobLog(tmp_path / "job.log", stream), code)
    wait_for_end(child)
    assert child.poll() == 0
    os.kill(int(stream.getvalue()), signal.SIGKILL)
    child._reader.join()
    assert child._process.stdout is not None
    child._process.stdout.close()


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_the_trainer_does_not_outlive_a_killed_supervisor() -> None:
    code = (
        "import os, subprocess, sys, time;"
        "inner = 'import os, time; print(os.getpid(), flush=True); time.sleep(5000)';"
        "words = [sys.executable, '-m', 'gpufleet.job.supervisor.leash', str(os.getpid()), '-c', inner];"
        "subprocess.Popen(words, process_group=0); time.sleep(5000)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert is_alive(pid)
    assert os.getpgid(pid) != os.getpgid(parent.pid)
    parent.kill()
    parent.wait()
    wait_for("the end of the trainer", lambda: not is_alive(pid))
    parent.stdout.close()


def test_the_trainers_command_line_is_the_contracts() -> None:
    words = trainer(Path("/gpufleet/run"), 3, 1, ENGINE)
    assert words[words.index(ENGINE) :] == [ENGINE, "/gpufleet/run", "--rung", "3"]
    assert trainer(Path("/gpufleet/run"), None, 1, ENGINE)[-2:] == ["/gpufleet/run", "--wait"]


def test_progress_follows_new_lines_only_and_waits_for_whole_ones(tmp_path: Path) -> None:
    path, now = tmp_path / "metrics.jsonl", [100.0]
    path.write_text('{"step": 1}\n')
    progress = MetricsFollower(path, lambda: now[0])
    progress.skip(1)
    progress.poll()
    assert (progress.step, progress.first_at) == (1, None)
    now[0] = 110.0
    with path.open("a") as file:
        file.write('{"step": 2, "step_ms": 250.0, "loss": 3.5}\n{"step": 3, "lo')
    progress.poll()
    assert (progress.step, progress.first_at, progress.step_s) == (2, 110.0, 0.25)
    with path.open("a") as file:
        file.write('ss": 3.0, "step_ms": 100.0}\nnonsense\n[]\n')
    progress.poll()
    assert (progress.step, progress.record["loss"], progress.step_s) == (3, 3.0, 0.25)  # the slower one of both


def test_progress_survives_the_cut_of_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 9)))
    progress = MetricsFollower(path, lambda: 0.0)
    progress.skip(5)
    path.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 6)))
    progress.poll()
    with path.open("a") as file:
        file.write('{"step": 6}\n')
    progress.poll()
    assert progress.step == 6


@pytest.mark.parametrize(("gap", "expected"), [(1.0, 900.0), (60.0, 1200.0), (600.0, 1800.0), (1000.0, 3000.0)])
def test_how_long_silence_is_normal_follows_the_pace(tmp_path: Path, gap: float, expected: float) -> None:
    path, now = tmp_path / "metrics.jsonl", [0.0]
    progress = MetricsFollower(path, lambda: now[0])
    assert progress.quiet_limit_s() == 1800.0
    for step in range(1, 5):
        now[0] += gap
        with path.open("a") as file:
            file.write(f'{{"step": {step}}}\n')
        progress.poll()
    assert progress.quiet_limit_s() == expected


PINNED = """# a comment
safetensors==0.8.0 \\
    --hash=sha256:aa \\
    --hash=sha256:bb
no-such-package-here==1.0 \\
    --hash=sha256:cc
"""


def test_only_what_the_image_lacks_is_installed_with_its_hashes() -> None:
    assert bootstrap.missing(PINNED) == {"no-such-package-here": "no-such-package-here==1.0 \\\n    --hash=sha256:cc"}


@pytest.mark.parametrize(
    ("module", "needed"),
    [
        (ENGINE, {"safetensors", "tokenizers"}),
        ("gpufleet.job.command", {"boto3", "botocore"}),
    ],
)
def test_every_package_of_the_real_lists_has_a_pin_and_a_hash(module: str, needed: set[str]) -> None:
    def none(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    blocks = bootstrap.missing(bootstrap.listed(module).read_text(), none)
    assert needed <= set(blocks)
    assert all("--hash=sha256:" in block for block in blocks.values())


def test_pip_is_told_to_take_nothing_but_the_pinned_bytes(tmp_path: Path) -> None:
    words = bootstrap.command(tmp_path / "requirements.txt", tmp_path)
    assert {"--require-hashes", "--no-deps", "--only-binary"} <= set(words)
    assert words[words.index("--target") + 1] == str(tmp_path)


def test_nothing_is_installed_when_nothing_is_missing(tmp_path: Path) -> None:
    bootstrap.ensure(tmp_path / "packages", bootstrap.listed(ENGINE))
    assert not (tmp_path / "packages").exists()


def test_packages_that_pip_cannot_give_are_an_error_after_three_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[list[str]] = []

    def fail(words: list[str], check: bool) -> subprocess.CompletedProcess[bytes]:
        tries.append(words)
        return subprocess.CompletedProcess(words, 1)

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(RuntimeError, match="pip cannot install safetensors"):
        bootstrap.install({"safetensors": "safetensors==0.8.0 --hash=sha256:aa"}, tmp_path / "packages")
    assert len(tries) == 3


def test_missing_packages_are_installed_and_the_program_starts_anew_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    (tmp_path / "requirements.txt").write_text(PINNED)
    listed = tmp_path / "requirements.txt"
    monkeypatch.setattr(bootstrap, "install", lambda lacking, folder: None)
    monkeypatch.setattr(os, "execv", lambda path, words: started.append(words))
    monkeypatch.setattr(sys, "argv", ["job", "run.json"])
    monkeypatch.delenv(bootstrap.MARK, raising=False)
    monkeypatch.setenv("PYTHONPATH", "/app")
    bootstrap.ensure(tmp_path / "packages", listed)
    assert started == [[sys.executable, "-m", "gpufleet.job", "run.json"]]
    assert os.environ["PYTHONPATH"] == f"/app{os.pathsep}{tmp_path / 'packages'}"
    with pytest.raises(RuntimeError, match="but Python does not find them there"):
        bootstrap.ensure(tmp_path / "packages", listed)
    monkeypatch.delenv(bootstrap.MARK)


def test_a_run_config_that_no_node_can_read_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"schema": 1, "job": {}}')
    words = [sys.executable, "-m", "gpufleet.job", str(tmp_path / "run.json")]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 70
    assert "fatal" in ended.stdout
    assert "Traceback" not in ended.stderr


def test_gpus_are_read_from_the_driver_in_decimal_gigabytes() -> None:
    found = machine.parse(gpus.rows("NVIDIA A10G, 23028, 595.91.07\nNo devices were found\n"))
    assert [(gpu.name, gpu.driver) for gpu in found] == [("NVIDIA A10G", "595.91.07")]
    assert found[0].memory_gb == pytest.approx(24.15, abs=0.01)
    described = machine.describe(found)
    assert (described.gpu, described.gpu_count, described.gpu_memory_gb) == ("NVIDIA A10G", 1, 24.15)
    assert machine.describe(()).gpu is None


@pytest.mark.parametrize(("options", "told"), [("'--shutdown-timeout',", True), ("'--standalone',", False)])
def test_torchrun_is_told_to_wait_only_where_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, told: bool
) -> None:
    (tmp_path / "torch" / "distributed").mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "distributed" / "run.py").write_text(f"parser.add_argument({options})")
    spec = importlib.util.spec_from_file_location("torch", tmp_path / "torch" / "__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    words = trainer(Path("/gpufleet/run"), 0, 2, ENGINE)
    assert ("--shutdown-timeout" in words) is told
    assert words[words.index("--nproc-per-node") + 1] == "2"
