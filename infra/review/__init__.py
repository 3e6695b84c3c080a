"""Reviews the cost of a change: prices two commits' stacks side by side, without credentials or network."""
