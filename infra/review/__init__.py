"""Reviews the cost of a change: prices the stacks of two commits side by side, without credentials or network."""
