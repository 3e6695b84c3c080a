"""`python -m gpufleet`: the command line."""

import sys

from gpufleet.infra.cli import main

sys.exit(main())
