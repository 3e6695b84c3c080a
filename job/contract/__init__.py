"""Typed documents that one process writes and another reads: each reader stands beside its writer."""
