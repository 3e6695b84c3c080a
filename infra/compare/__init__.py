"""Compares instance types, regions and markets for the same work."""
