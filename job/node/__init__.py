"""One machine of a run, from boot to shutdown: `python3 -m gpufleet.job.node`, from user-data (docs/node.md).

It runs on the machine's own Python, before any container exists: so it uses the standard library alone, and of job only
modules that do too (job.atomic, job.contract's names and codes). That Python is 3.9 on Amazon Linux 2023 for all its
life (AL2023 User Guide, "Python in AL2023", 2026-11-25).
"""
