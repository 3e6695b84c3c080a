"""Reads prices from AWS (price_list, spot_history, refresh), and shows how old and complete the known prices are
(coverage).
"""
