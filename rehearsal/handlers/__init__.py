"""Every resource type our program declares, over boto3. A type that is not in this table is an error, not a success."""

from gpufleet.rehearsal.handlers import compute, identity, network, notices, scheduler, states, storage
from gpufleet.rehearsal.handlers.table import ResourceHandler, UnsupportedError, handlers

_MODULES = (network, storage, identity, compute, scheduler, states, notices)
HANDLERS = handlers({kind: calls for module in _MODULES for kind, calls in module.CALLS.items()})


def handler(kind: str) -> ResourceHandler:
    """The handler of a type token. Raises RefusedError for a type that this AWS does not have."""
    if kind not in HANDLERS:
        raise UnsupportedError(f"the embedded AWS has no resource type {kind}; it has {', '.join(sorted(HANDLERS))}")
    return HANDLERS[kind]
