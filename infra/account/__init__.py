"""Asks AWS about the account, and about a stack's resources, runs and leftovers in it."""
