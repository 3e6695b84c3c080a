"""Computes what a run will cost, before any of its resources exists."""
