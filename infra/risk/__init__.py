"""What interruptions do to a run: how often they come, and what they cost."""
