"""Typed documents that one process writes and another process reads: each document's reader stands beside its
writer.
"""
