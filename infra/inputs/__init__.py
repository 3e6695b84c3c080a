"""What a run reads: made here by `gpufleet prepare`, and whether it is what the file asks for."""
