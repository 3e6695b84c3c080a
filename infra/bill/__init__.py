"""What a run costs before anything exists."""
