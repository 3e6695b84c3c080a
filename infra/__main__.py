"""The Pulumi program of this repository; `gpufleet init` writes the same into others."""

import gpufleet

gpufleet.program()
