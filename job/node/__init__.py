"""The program of one machine of a run, from boot to shutdown: `python3 -m gpufleet.job.node`, which user-data starts
(docs/node.md).

It runs on the machine's own Python, before any container exists. So it uses only the standard library, and only modules
of job that do the same (job.atomic, job.contract's names and codes). This Python is 3.9 on Amazon Linux 2023 and will
stay so (AL2023 User Guide, "Python in AL2023", 2026-11-25).
"""
