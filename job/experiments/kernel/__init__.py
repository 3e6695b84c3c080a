"""kernel-sft: a decoder that writes Triton kernels, and the judge of these kernels."""
