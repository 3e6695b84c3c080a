"""The host of a command of the user's own: it starts it, finds its checkpoints, asks it to stop, and judges its end.

To the supervisor it is one more trainer: start.json, stop.json, ckpt/step_N/ with commit.json, metrics.jsonl and the
exit codes are the same. Standard library and job's pure parts alone: no torch, whatever the command uses.
"""
