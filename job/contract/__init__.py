"""What crosses from one process to another, typed: each document's reader stands beside its writer."""
