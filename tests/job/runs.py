"""A run as the node script would leave it for the supervisor: a store with inputs, a work folder with run.json."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpufleet.job.contract.reading import iso
from gpufleet.job.experiments.dataset.prepare import prepare, read_manifest
from gpufleet.job.experiments.dataset.sources import Generated
from gpufleet.job.experiments.growth.spec import Batch, Eval, GrowthConfig, GrowthModel, Precision, TextData
from gpufleet.job.kind import Checkpoint, Log
from tests.repository import ROOT

LAUNCHED = 1_800_000_000.0

TINY = GrowthConfig(
    steps_per_phase=4,
    device="cpu",
    model=GrowthModel(vocab=512, layers=2, width=32, heads=2, ffn=64, new_layers=1, experts=4),
    data=TextData(sequence=16, source="generated-stories", stories=200),
    batch=Batch(sequences=4),
    precision=Precision(compute="fp32", phase3_state="fp32"),
    checkpoint=Checkpoint(interval_s=0.5, heartbeat_s=0.5),
    eval=Eval(every=2, windows=4, sample_tokens=2),
    log=Log(every=1),
)

ESTIMATE: dict[str, Any] = {
    "usd": {"p10": "0.1000", "p50": "0.2000", "p90": "0.4000", "mean": "0.2200"},
    "hours": {"p10": "0.3000", "p50": "0.5000", "p90": "0.9000", "mean": "0.5500"},
    "lines": [
        {
            "kind": "compute",
            "name": "compute",
            "quantity": "0.500000",
            "unit": "hour",
            "unit_price": "0.3600",
            "amount": "0.1800",
        },
        {
            "kind": "hourly",
            "name": "root disk",
            "quantity": "0.068493",
            "unit": "GB-month",
            "unit_price": "0.08",
            "amount": "0.0055",
        },
        {
            "kind": "hourly",
            "name": "public IPv4",
            "quantity": "0.500000",
            "unit": "hour",
            "unit_price": "0.005",
            "amount": "0.0025",
        },
        {
            "kind": "fixed",
            "name": "S3 storage",
            "quantity": "0.4",
            "unit": "GB-month",
            "unit_price": "0.023",
            "amount": "0.0092",
        },
        {
            "kind": "interruptions",
            "name": "interruptions",
            "quantity": "1",
            "unit": "run",
            "unit_price": "0.0028",
            "amount": "0.0028",
        },
    ],
    "interruptions_expected": 0.4,
    "phases": [{"phase": name, "step_ms": 100.0} for name in ("dense", "moe", "grown")],
    "notice": [{"type": "g5.2xlarge", "phase": n, "seconds": 7.0, "fits": True} for n in ("dense", "moe", "grown")],
}


def tree(config: GrowthConfig = TINY, **changes: Any) -> dict[str, Any]:
    """run.json as the program writes it; `changes` replace whole keys."""
    return {
        "schema": 1,
        "run": {"id": "r1", "stack": "tinystories-growth", "experiment": "tinystories-growth", "owner": "you"},
        "region": "us-east-2",
        "job": {"experiment": "tinystories-growth", "parameters": json.loads(json.dumps(asdict(config)))},
        "limits": {"max_usd": "3.00", "max_hours": "2", "deadline": None},
        "capacity": "spot",
        "rates": {"g5.2xlarge": {"on_demand": "1.2120", "spot": {"us-east-2a": "0.3600", "us-east-2b": "0.4000"}}},
        "extras": {"hourly_usd": {"root disk": "0.010959", "public IPv4": "0.005"}, "fixed_usd": "0.0092"},
        "estimate": ESTIMATE,
        "predicted": [
            {"phase": name, "steps": 4, "step_ms": 100.0, "tokens_per_s": 640.0, "mfu": None, "memory_gb": 0.1}
            for name in ("dense", "moe", "grown")
        ],
        "inputs": {"archive": {"sha256": "0" * 64, "bytes": 1}, "dataset": {"uri": None, "sha256": None, "files": []}},
        **changes,
    }


def place(folder: Path, run: dict[str, Any]) -> Path:
    """Writes run.json into a work folder and gives its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.json"
    path.write_text(json.dumps(run))
    return path


def with_files(run: dict[str, Any], bucket: Path, files: dict[str, bytes]) -> dict[str, Any]:
    """The run with a dataset of these files, put where a node looks for them."""
    listed = [{"name": n, "bytes": len(c), "sha256": hashlib.sha256(c).hexdigest()} for n, c in files.items()]
    digest = hashlib.sha256(json.dumps(listed).encode()).hexdigest()
    for name, content in files.items():
        path = bucket / "inputs" / digest / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return {**run, "inputs": {**run["inputs"], "dataset": {"uri": None, "sha256": digest, "files": listed}}}


def with_stories(run: dict[str, Any], bucket: Path) -> dict[str, Any]:
    """The run with a real prepared dataset of generated stories."""
    prepare(bucket / "prepared", Generated(count=TINY.data.stories, seed=7), model_vocab=TINY.model.vocab)
    manifest = read_manifest(bucket / "prepared")
    return with_files(
        run, bucket, {file.name: (bucket / "prepared" / file.name).read_bytes() for file in manifest.files}
    )


def start(run_json: Path, bucket: Path, instance: str, **environment: str) -> subprocess.Popen[bytes]:
    """`python -m gpufleet.job run.json` as the container would, in its own process group, one thread per operation."""
    return subprocess.Popen(
        [sys.executable, "-m", "gpufleet.job", str(run_json)],
        cwd=ROOT,
        env=environment_of(bucket, instance, **environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def environment_of(bucket: Path, instance: str, **environment: str) -> dict[str, str]:
    """What a node gives the supervisor, on a machine where nobody answers for AWS."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GPUFLEET_RUN_URI": str(bucket / "r1"),
        "GPUFLEET_INSTANCE_ID": instance,
        "GPUFLEET_INSTANCE_TYPE": "g5.2xlarge",
        "GPUFLEET_ZONE": "us-east-2a",
        "AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:9",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_REGION": "us-east-2",
        "AWS_DEFAULT_REGION": "us-east-2",
        **environment,
    }


def launched(*, seconds_ago: float) -> str:
    """For GPUFLEET_LAUNCHED_AT."""
    return iso(time.time() - seconds_ago)
