"""What was measured: calibrations, receipts of runs, what finished runs came to, traces of spot nodes."""
