"""A user's program, for the record of a release: tests/released/record.py."""

import pulumi

import gpufleet

run = gpufleet.TrainingRun("training", "command.yaml")
pulumi.export("bucket", run.bucket)
