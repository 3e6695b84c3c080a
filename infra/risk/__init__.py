"""What interruptions do to a run: how often, and what they cost."""
