"""Typed documents that one process writes and another one reads: each document's reader stands beside its writer."""
