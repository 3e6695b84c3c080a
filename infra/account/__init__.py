"""Asks AWS for the commands: about the account, and about a stack's resources, runs and leftovers in it."""
