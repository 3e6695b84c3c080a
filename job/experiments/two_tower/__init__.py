"""two-tower: a ranking model of users and items, and its baselines."""
