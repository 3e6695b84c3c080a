"""The Pulumi program of this repository; `gpufleet init` writes the same into other projects."""

import gpufleet

gpufleet.program()
