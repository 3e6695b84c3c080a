"""The Pulumi program of this repository. `gpufleet init` writes the same program into other projects."""

import gpufleet

gpufleet.program()
