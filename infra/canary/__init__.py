"""The first run on an account: what it asks AWS, what it does there, and what AWS's answers say about this project."""
