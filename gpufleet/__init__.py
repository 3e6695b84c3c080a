"""gpufleet for programs and notebooks: price, compare and grade training runs on rented AWS GPUs, and declare them.

    import gpufleet

    bill = gpufleet.price("stacks/sft-h100.yaml")
    bill.usd.p90, bill.hours.p50        # USD and node-hours of the whole run, as floats
    gpufleet.compare("stacks/sft-h100.yaml").frontier
    gpufleet.receipts()

`gpufleet.TrainingRun` declares a run in your Pulumi program, `gpufleet.program()` is a whole program. Names outside
`__all__` are private and may change in any version; so may modules of `infra`, `job` and `rehearsal`. Only a Pulumi
program asks AWS or a network.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpufleet._bill import Bill, BillLine, Figures
    from gpufleet._compare import Comparison, Frontier, Option
    from gpufleet._definition import Definition
    from gpufleet._functions import compare, load, price, receipts
    from gpufleet._program import program
    from gpufleet._receipt import Receipt, ReceiptLine
    from gpufleet._training_run import TrainingRun
    from gpufleet.infra.errors import DefinitionError, GpufleetError

__all__ = [
    "Bill",
    "BillLine",
    "Comparison",
    "Definition",
    "DefinitionError",
    "Figures",
    "Frontier",
    "GpufleetError",
    "Option",
    "Receipt",
    "ReceiptLine",
    "TrainingRun",
    "compare",
    "load",
    "price",
    "program",
    "receipts",
]

# Imported on first use: `import gpufleet` is quick, and only TrainingRun needs Pulumi.
_MODULES = {
    "gpufleet._bill": ("Bill", "BillLine", "Figures"),
    "gpufleet._compare": ("Comparison", "Frontier", "Option"),
    "gpufleet._definition": ("Definition",),
    "gpufleet._functions": ("compare", "load", "price", "receipts"),
    "gpufleet._program": ("program",),
    "gpufleet._receipt": ("Receipt", "ReceiptLine"),
    "gpufleet._training_run": ("TrainingRun",),
    "gpufleet.infra.errors": ("DefinitionError", "GpufleetError"),
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"gpufleet has no {name}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return __all__
