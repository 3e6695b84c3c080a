"""The figures of a run in W&B or MLflow: each line once over all attempts, and no tracker that fails ends a run."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gpufleet.job.contract import environment
from gpufleet.job.kind import Checkpoint, Log
from gpufleet.job.supervisor import tracker_process
from gpufleet.job.supervisor.tracker import Tracker
from tests.job import runs
from tests.job.supervisor_world import STEPS, Bench, notice_at

# Writes what it is given into a file, as W&B keeps a run.
WANDB = """\
import json, os
LOST, AT = os.environ.get("LOST"), os.environ["SENT"]
if LOST == "missing":
    raise ImportError("No module named wandb")

class Run:
    def __init__(self, given):
        lines = open(AT).read().splitlines() if os.path.exists(AT) else []
        self.step = max((json.loads(line)["step"] + 1 for line in lines if '"figures"' in line), default=0)
        key = os.environ["WANDB_API_KEY"]
        names = {name: os.environ[name] for name in ("WANDB_RUN_ID", "WANDB_PROJECT")}
        print(f"logged in with {key}", flush=True)
        self.put(init=given, key=key, mine=[name for name in os.environ if name.startswith("AWS_")], **names)
        self.summary = self

    def put(self, **line):
        with open(AT, "a") as file:
            file.write(json.dumps(line) + "\\n")

    def log(self, figures, step):
        if LOST == "offline" and step > 2:
            raise ConnectionError("api.wandb.ai is not reached")
        self.put(step=step, figures=figures)

    def update(self, figures):
        self.put(summary=figures)

    def finish(self):
        self.put(finished=True)

def init(**given):
    if LOST == "stuck":
        os.read(os.pipe()[0], 1)
    return Run(given)
"""
KEY = "0123456789-of-wandb"


def bench(folder: Path, monkeypatch: pytest.MonkeyPatch, lost: str = "") -> Bench:
    (folder / "lib").mkdir()
    (folder / "lib" / "wandb.py").write_text(WANDB)
    monkeypatch.setenv(environment.SECRET + "WANDB_API_KEY", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of the node")
    env = {"PYTHONPATH": str(folder / "lib"), "SENT": str(folder / "sent"), **({"LOST": lost} if lost else {})}
    log = Log(every=1, tracker="wandb", env=env, secrets={"WANDB_API_KEY": "ssm:/mine/wandb"})
    config = replace(runs.TINY, checkpoint=Checkpoint(interval_s=300, heartbeat_s=60), log=log)
    return Bench(folder, job=runs.tree(config)["job"])


def sent(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "sent").read_text().splitlines()]


def test_a_run_s_configuration_lines_and_results_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = bench(tmp_path, monkeypatch)
    assert run.attempt().run() == 0
    begin, *lines, summary, end = sent(tmp_path)
    assert begin["init"]["config"]["parameters"]["log"]["tracker"] == "wandb"
    assert begin["init"]["config"]["run"] == "r1"
    assert (begin["WANDB_RUN_ID"], begin["WANDB_PROJECT"]) == ("tinystories-growth-r1", "tinystories-growth")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert lines[3]["figures"]["loss"] == pytest.approx(1 / 4)
    assert summary["summary"] == {"ended": "finished", "results/schema": 1.0, "results/steps": float(STEPS)}
    assert end == {"finished": True}
    assert (begin["key"], begin["mine"]) == (KEY, [])  # the node's own credentials are not for it
    assert "tracker: logged in with ***" in run.said
    assert KEY not in run.said


def test_an_interrupted_run_goes_on_under_its_id_and_sends_each_line_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = bench(tmp_path, monkeypatch)
    assert run.attempt(script={5: notice_at(run, 120)}).run() == 75
    run.answers.clear()
    assert run.attempt("i-2").run() == 0
    lines = sent(tmp_path)
    assert [line["step"] for line in lines if "figures" in line] == list(range(1, STEPS + 1))
    assert {line["WANDB_RUN_ID"] for line in lines if "init" in line} == {"tinystories-growth-r1"}


@pytest.mark.parametrize(
    ("lost", "says"),
    [
        ("missing", "the image lacks a package (No module named wandb): build wandb into the image"),
        ("offline", "ConnectionError: api.wandb.ai is not reached"),
    ],
)
def test_a_tracker_that_fails_says_why_and_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str, says: str
) -> None:
    run = bench(tmp_path, monkeypatch, lost)
    assert run.attempt().run() == 0
    assert run.json("done.json")["reason"] == "finished"
    assert f"tracker: {says}" in run.said or says in run.said
    assert "warning: log.tracker, wandb, ended with 1" in run.said


def test_figures_for_a_tracker_that_has_ended_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = bench(tmp_path, monkeypatch, "missing").attempt().tracker
    tracker.take({"step": 1})
    assert tracker.wait(60)
    waiting = tracker._lines.qsize()
    tracker.take({"step": 2})
    assert tracker._lines.qsize() == waiting


def test_a_secret_that_cannot_be_read_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = bench(tmp_path, monkeypatch)
    monkeypatch.delenv(environment.SECRET + "WANDB_API_KEY")

    def refuse(kind: str, place: str) -> str:
        raise LookupError("AccessDenied")

    monkeypatch.setattr("gpufleet.job.command.given._asked", refuse)
    assert run.attempt().run() == 0
    assert "no metrics are sent to wandb: ValueError: job.secrets.WANDB_API_KEY: ssm:/mine/wandb" in run.said


def test_a_tracker_that_is_stuck_is_waited_for_a_minute_and_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = bench(tmp_path, monkeypatch, "stuck")
    wait, waited = Tracker.wait, list[float]()

    def pass_time(tracker: Tracker, seconds: float) -> bool:
        waited.append(seconds)
        run.clock.sleep(seconds)
        return wait(tracker, 0.0)

    monkeypatch.setattr(Tracker, "wait", pass_time)
    attempt = run.attempt()
    assert attempt.run() == 0
    assert sum(waited) == pytest.approx(60)
    assert "warning: log.tracker did not end in time" in run.said
    assert run.json("done.json")["reason"] == "finished"
    attempt.tracker._thread.join()  # its process is gone


def test_without_a_tracker_no_process_begins(tmp_path: Path) -> None:
    run = Bench(tmp_path)
    attempt = run.attempt()
    assert attempt.run() == 0
    assert attempt.tracker._thread.ident is None


@dataclass
class Client:
    """MLflow's server, as its client shows it."""

    runs: list[SimpleNamespace] = field(default_factory=list)
    batches: list[dict[str, Any]] = field(default_factory=list)

    def get_experiment_by_name(self, name: str) -> SimpleNamespace | None:
        return SimpleNamespace(experiment_id=name) if self.runs else None

    def create_experiment(self, name: str) -> str:
        return name

    def search_runs(self, experiments: list[str], wanted: str) -> list[SimpleNamespace]:
        return [run for run in self.runs if wanted == f"tags.gpufleet_run = '{run.tags['gpufleet_run']}'"]

    def create_run(self, experiment: str, run_name: str, tags: dict[str, str]) -> SimpleNamespace:
        made = SimpleNamespace(
            info=SimpleNamespace(run_id=f"{experiment}/{run_name}"), data=SimpleNamespace(metrics={}), tags=tags
        )
        self.runs.append(made)
        return made

    def update_run(self, run_id: str, status: str) -> None:
        self.batches.append({"status": status})

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        assert len(params) <= 100
        self.batches.append({"metrics": list(metrics), "params": list(params)})
        self.runs[0].data.metrics |= {name: value for name, value, _, _ in metrics}

    def set_tag(self, run_id: str, name: str, value: str) -> None:
        self.runs[0].tags[name] = value

    def set_terminated(self, run_id: str) -> None:
        self.batches.append({"status": "FINISHED"})


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Client:
    client = Client()
    for name, content in {
        "mlflow": {},
        "mlflow.entities": {"Metric": lambda *parts: parts, "Param": lambda *parts: parts},
        "mlflow.tracking": {"MlflowClient": lambda: client},
    }.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    monkeypatch.setenv("WANDB_RUN_ID", "mine-r1")
    return client


def lines(*messages: dict[str, Any]) -> list[str]:
    return [json.dumps(message) for message in messages]


def test_mlflow_gets_the_same_and_goes_on_with_a_run_that_it_has(server: Client) -> None:
    config = {"config": {"run": "r1", "parameters": {"optim": {"lr": 0.001}, "many": list(range(120))}}}
    records = [{"record": {"ts": 1.0, "step": step, "loss": 1 / step, "router_load": [0.5]}} for step in (1, 2, 3)]
    assert tracker_process.send("mlflow", lines(config, *records[:2])) == 0
    assert (
        tracker_process.send("mlflow", lines(config, *records, {"reason": "finished", "results": {"ndcg": 0.48}})) == 0
    )
    (run,) = server.runs
    assert run.tags == {"gpufleet_run": "mine-r1", "ended": "finished"}
    parameters = [pair for batch in server.batches for pair in batch.get("params", [])]
    assert ("parameters/optim/lr", "0.001") in parameters
    assert len(parameters) == 122
    logged = [(name, step) for batch in server.batches for name, _, _, step in batch.get("metrics", [])]
    assert [step for name, step in logged if name == "loss"] == [1, 2, 3]
    assert ("router_load/0", 3) in logged
    assert run.data.metrics["results/ndcg"] == 0.48
    assert [batch["status"] for batch in server.batches if "status" in batch] == ["RUNNING", "FINISHED"]


def test_the_id_of_a_stage_has_no_slash() -> None:
    assert environment.tracker_id("mine", "r1/train") == "mine-r1-train"
