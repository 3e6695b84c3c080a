"""Typed documents that one process writes and another one reads: the function that reads a document is beside the one
that writes it.
"""
