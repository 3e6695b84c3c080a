"""A run's inputs: `gpufleet prepare` makes them, and these modules check that they match the definition file."""
