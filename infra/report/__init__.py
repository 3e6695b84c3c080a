"""Writes a run, or a comparison, as one HTML page that needs no network and no script, for light and dark displays."""
