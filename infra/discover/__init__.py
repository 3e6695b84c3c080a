"""Reads a folder of training code, and writes a definition file from what it finds: `gpufleet new`."""
