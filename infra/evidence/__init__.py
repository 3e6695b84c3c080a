"""Reads measurements and observations: calibrations, receipts of runs, rehearsals, traces of spot nodes."""
