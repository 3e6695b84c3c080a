"""What else could do the same work, where, and for how much."""
