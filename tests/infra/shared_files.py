"""A definition with three trials on one node."""

from __future__ import annotations

from tests.infra.staged_files import PINNED

HEAD = PINNED.partition("stages:\n")[0]
HEAD = (
    HEAD.replace("(?P<step>[0-9]+)'", r"(?P<step>[0-9]+) loss (?P<loss>[0-9.]+)'")
    .replace(
        "checkpoint: none",
        "checkpoint: {each: state.json, rewritten: true, every: {steps: 1}, size_gb: 0.001, heartbeat_s: 1}",
    )
    .replace("work: {hours: {low: 0.1, likely: 0.2, high: 0.4}}", "work: {steps: 3}\n  exit: {fatal: [3]}")
)
ONE = (
    HEAD.replace("max_usd: 8, max_hours: 8", "max_usd: 2, max_hours: 2").replace(
        "  code: {folder: code}\n",
        "  code: {folder: code}\n  command: python trial.py {checkpoints} {outputs} --x=0\n",
    )
    + "estimate: {step_ms: [100]}\n"
)
SHARED = (
    HEAD
    + """\
estimate: {step_ms: [100]}
stages:
  - name: t1
    job: {command: 'python trial.py {checkpoints} {outputs} --x=1'}
    limits: {max_usd: 2, max_hours: 2}
  - name: t2
    stays: true
    job: {command: 'python trial.py {checkpoints} {outputs} --x=2'}
    limits: {max_usd: 2, max_hours: 2}
  - name: t3
    stays: true
    job: {command: 'python trial.py {checkpoints} {outputs} --x=3'}
    limits: {max_usd: 2, max_hours: 2}
"""
)
