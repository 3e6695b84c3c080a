"""Writes a run, or a comparison, as one self-contained HTML page without network and script, for light and dark
displays.
"""
