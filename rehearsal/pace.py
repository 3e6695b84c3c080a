"""Explains why a rehearsal's run ended before all of its interruptions, and how many steps of its script would be
enough, because a script that ends within a second cannot be interrupted.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import cast

from gpufleet.infra.definition.model import REHEARSED_SAVES, rehearsed_steps
from gpufleet.infra.definition.yaml_tree import Mapping
from gpufleet.infra.errors import GpufleetError
from gpufleet.job import measured
from gpufleet.job.contract import bucket, metrics
from gpufleet.job.contract.done import EARLY, FAILURES, Done
from gpufleet.job.kind.command import CommandConfig
from gpufleet.rehearsal import own
from gpufleet.rehearsal.evidence import Rehearsal
from gpufleet.rehearsal.watch import Watch

LEAST_MS = 0.5  # lines of faster steps arrive together, so their times mean nothing

Change = Callable[[Mapping], Mapping]


def ended(rehearsal: Rehearsal, watch: Watch) -> GpufleetError | None:
    """An error if the run did not do its work, or ended before all of its interruptions; otherwise None."""
    place = {"Bucket": watch.bucket, "Key": f"{watch.run_id}/{bucket.DONE}"}
    done = Done.from_json(json.loads(rehearsal.cloud.client("s3").get_object(**place)["Body"].read()))
    unmet = ", ".join(f"{planned.kind} at step {planned.step}" for planned in watch.planned)
    if done.reason in FAILURES:
        rest = f"\nThe planned interruptions that did not happen: {unmet}." if unmet else ""
        hint = own.not_shipped(rehearsal.definition, rehearsal.root, done.detail)
        return GpufleetError(f"{done.detail.removeprefix('the command failed: ')}{rest}{hint}")
    if not watch.planned:
        return None
    if done.reason in EARLY:
        return GpufleetError(
            f"{done.reason} ended the run before it could be interrupted as planned ({unmet}): {done.detail}. Fewer or"
            " faster steps, or more under `limits` of the file's `rehearsal` section, leave time for that"
        )
    parameters = rehearsal.definition.job.parameters
    if parameters.processes == "own" and parameters.saves and not watch.manifests:
        config = cast(CommandConfig, rehearsal.definition.job.parameters)
        return GpufleetError(
            f"the run ended without a whole checkpoint: no file named {', '.join(config.names)} appeared in"
            f" {config.checkpoint.folder}. Say in job.checkpoint.each and folder what the script writes, and where"
        )
    view = max(
        watch.views.values(), key=lambda candidate: candidate.last_step
    )  # a later node may have had no work left
    began, ended = view.first_step_at, view.node.instance.ended_at
    seconds = (ended - began).total_seconds() if began and ended else 0.0
    took_ms = step_ms(view.logged(), seconds * 1000 / max(1, view.last_step))
    count = rehearsed_steps(took_ms)
    saves = f" with a save every {max(1, count // REHEARSED_SAVES):,}" if parameters.saves else ""
    return GpufleetError(
        f"the run ended before it could be interrupted as planned ({unmet}): its {view.last_step:,} steps took"
        f" {took_ms:.3g} ms each. {count:,} steps{saves} are enough: write that in job.command"
        f"{', job.work and job.checkpoint.every' if saves else ' and job.work'} of the file's `rehearsal` section"
    )


def step_ms(lines: list[bytes], otherwise: float) -> float:
    """Milliseconds per step, from the lines of metrics.jsonl; `otherwise` if they do not show this."""
    phases = measured.phases(metrics.records(lines))
    return max(LEAST_MS, phases[0]["step_ms"]["median"] if phases else otherwise)
