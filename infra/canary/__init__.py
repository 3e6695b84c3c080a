"""The first run on an account: what it asks AWS, what it does there, and what its answers say of this project."""
