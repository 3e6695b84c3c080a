"""Compares other instance types, regions and ways of buying for the same work."""
