"""`python -m gpufleet.job.supervisor.tracker_process KIND`: passes the lines of JSON that tracker.py writes to its
standard input on to W&B or MLflow: the configuration, the lines of metrics.jsonl, and the end with the results.

The libraries are those in the image. Lines that an earlier attempt has sent are not sent again.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from gpufleet.job.contract import metrics

MOST_PARAMETERS = 100  # the most parameters in one request to MLflow (its REST API, runs/log-batch)
MOST_CHARACTERS = 6000  # the most characters of a parameter's value in MLflow


class Figures(Protocol):
    """A run in a tracker. `last`: the newest step that it has; -1 for a new run."""

    last: int

    def log(self, step: int, figures: Mapping[str, float]) -> None: ...
    def end(self, reason: str, results: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class WandbRun:
    """A run in W&B. WANDB_RUN_ID, WANDB_PROJECT, WANDB_MODE and WANDB_API_KEY are W&B's own variables."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        import wandb

        self._run = wandb.init(config=dict(config), name=str(config["run"]), resume="allow")
        self.last = int(self._run.step) - 1

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)
        self.last = step

    def end(self, reason: str, results: Mapping[str, float]) -> None:
        self._run.summary.update({"ended": reason, **{f"results/{name}": value for name, value in results.items()}})

    def close(self) -> None:
        self._run.finish()


class MlflowRun:
    """A run in MLflow, found by its tag. MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME are MLflow's own variables."""

    TAG = "gpufleet_run"

    def __init__(self, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric, self._client, name = Metric, MlflowClient(), os.environ["MLFLOW_EXPERIMENT_NAME"]
        own, run = os.environ["WANDB_RUN_ID"], str(config["run"])
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        earlier = self._client.search_runs([experiment], f"tags.{self.TAG} = '{own}'")
        if earlier:
            self._id, figures = earlier[0].info.run_id, earlier[0].data.metrics
            self.last = int(figures.get("step", -1))
            self._client.update_run(self._id, status="RUNNING")
            return
        self.last = -1
        self._id = self._client.create_run(experiment, run_name=run, tags={self.TAG: own}).info.run_id
        parameters = [Param(key, str(value)[:MOST_CHARACTERS]) for key, value in flat(config)]
        for first in range(0, len(parameters), MOST_PARAMETERS):
            self._client.log_batch(self._id, params=parameters[first : first + MOST_PARAMETERS])

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        now, self.last = int(time.time() * 1000), step
        numbers = {"step": float(step), **figures}
        self._client.log_batch(
            self._id, metrics=[self._metric(name, value, now, step) for name, value in numbers.items()]
        )

    def end(self, reason: str, results: Mapping[str, float]) -> None:
        self._client.set_tag(self._id, "ended", reason)
        self.log(max(self.last, 0), {f"results/{name}": value for name, value in results.items()})
        self._client.set_terminated(self._id)

    def close(self) -> None:
        """Does nothing, because each value was sent when it came, and the next attempt continues the run."""


KINDS: Mapping[str, type[WandbRun] | type[MlflowRun]] = {"wandb": WandbRun, "mlflow": MlflowRun}


def flat(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a tree by its path, such as `optim/lr`."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else None
    if items is None:
        yield path, tree
        return
    for key, value in items:
        yield from flat(value, f"{path}/{key}" if path else str(key))


def numbers(tree: Any) -> dict[str, float]:
    """The numbers of a tree by their paths."""
    return {
        path: float(value)
        for path, value in flat(tree)
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def send(kind: str, lines: Iterable[str]) -> int:
    """Sends all lines; returns the exit code, which is 1 if the library is not installed."""
    figures: Figures | None = None
    for line in lines:
        message = json.loads(line)
        if figures is None:
            try:
                figures = KINDS[kind](message["config"])
            except ImportError as error:
                lacks = f"log.tracker is {kind}, and the image lacks a package ({error})"
                sys.stdout.write(f"{lacks}: build {kind} into the image, or set log.tracker to none\n")
                return 1
        elif "record" in message:
            if message["record"]["step"] > figures.last:
                figures.log(message["record"]["step"], dict(metrics.scalars(message["record"])))
        else:
            figures.end(message["reason"], numbers(message["results"]))
    if figures is not None:
        figures.close()
    return 0


if __name__ == "__main__":
    sys.exit(send(sys.argv[1], sys.stdin))
