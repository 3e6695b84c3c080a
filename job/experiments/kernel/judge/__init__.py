"""Judges generated Triton kernels: tasks, static rules, isolated processes, timing, statistics.

Nothing here trains. The judge decides in its own process, from bytes that it received; a candidate runs in another
process.
"""
