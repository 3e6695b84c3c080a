"""A run's inputs: `gpufleet prepare` makes the inputs, and these modules check that the inputs match the definition
file.
"""
