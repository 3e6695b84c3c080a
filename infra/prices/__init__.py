"""Prices read from AWS (price_list, spot_history, refresh); how old and complete the known ones are (coverage)."""
