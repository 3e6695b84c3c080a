"""The cost review of a change: two commits' stacks priced side by side, without credentials or network."""
