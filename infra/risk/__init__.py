"""Models the interruptions of a run: how often they come, and what they cost."""
