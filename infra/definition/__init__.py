"""Reads and checks definition files, and applies their `rehearsal` section and their scenarios to them."""
