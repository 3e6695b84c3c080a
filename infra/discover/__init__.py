"""What a folder of training code says of itself, and the definition file that follows from it: `gpufleet new`."""
