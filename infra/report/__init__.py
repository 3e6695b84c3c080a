"""A run, or a comparison, as one self-contained HTML page: no network, no script, light and dark."""
