"""The user's, not gpufleet's."""

PAUSE = 0.002  # seconds between two pieces of a file
