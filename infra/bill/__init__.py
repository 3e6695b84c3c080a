"""Says what a run will cost before anything of it exists."""
