"""Where the checkout is, and its definition files."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
STACKS = sorted((ROOT / "stacks").glob("*.yaml"))
OF_ONE_JOB = [
    path for path in STACKS if "\nstages:\n" not in path.read_text()
]  # the others have a fleet for each stage
