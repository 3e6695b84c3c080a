"""The host of a user's own command: it starts the command, finds its checkpoints, asks the command to stop, and decides
what its end means.

For the supervisor the host is a trainer like any other: start.json, stop.json, ckpt/step_N/ with commit.json,
metrics.jsonl and the exit codes are the same. It uses only the standard library and pure parts of job; torch is not
needed.
"""
