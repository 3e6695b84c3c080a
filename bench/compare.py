"""Speed of the comparison against its bar: `python bench/compare.py >> bench/results/cost.md`, after bench/cost.py.

Every type of the catalog x spot and on demand x every scenario of the stack, and the scenarios on their own fleets with
10,000 runs each.
"""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime

from cost import HEAD, ROOT, STACKS, Taken, cold, machine, seconds  # bench/cost.py, beside this file

from infra.catalog import load_catalog
from infra.compare import ranking
from infra.definition.loader import find, load
from infra.definition.scenarios import scenarios


def measured(stack: str) -> tuple[str, Taken]:
    """(what was compared, the comparison in this process)."""
    now, catalog, path = datetime.now(UTC), load_catalog(), find(stack, ROOT)
    definition, variants = load(path, now=now), scenarios(path, now=now)
    rows = ranking.every_option(definition, variants, catalog)

    def measure_all() -> None:
        ranking.scenarios(definition, variants, catalog)
        ranking.refined(ranking.every_option(definition, variants, catalog))

    types, works = len({row.type for row in rows}), len({row.scenario for row in rows})
    said = f"{types} types x 2 capacities x {works} pieces of work of {len(variants)} scenarios = {len(rows)} options"
    return f"{stack}: {said}", seconds(measure_all, times=3)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    head = machine("compare.py")
    sys.stdout.write("\n# Speed of the comparison\n\n" + head + HEAD)
    for stack in STACKS:
        what, taken = measured(stack)
        sys.stdout.write(taken.row(what, "3 s"))
        whole = cold("-m", "infra.cli", "compare", stack, times=5)
        sys.stdout.write(whole.row(f"`gpufleet compare {stack}` cold", "3 s"))


if __name__ == "__main__":
    main()
