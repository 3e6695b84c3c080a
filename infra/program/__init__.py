"""The program: what is decided before the first resource, what is declared, what a node boots with."""
