"""Handlers for every resource type of the program, by boto3. A type without a row in resources.yaml is an error."""

from pathlib import Path
from typing import Any

import yaml

from gpufleet.rehearsal.handlers import compute, identity, network, notices, states, storage
from gpufleet.rehearsal.handlers.calls import OwnCalls, SharedCalls
from gpufleet.rehearsal.handlers.table import ResourceHandler, UnsupportedError, fields

_MODULES = (network, storage, identity, compute, states, notices)
_OWN = {kind: own for module in _MODULES for kind, own in module.OWN.items()}
_WORDS = ("required", "optional", "replaces", "computed", "volatile", "only_ours", "answered")


def _handler(kind: str, row: dict[str, Any]) -> ResourceHandler:
    """The handler of a type, from its row of resources.yaml and the calls that its module defines."""
    service = row.get("service") or {"vpc": "ec2"}.get(name := kind[4:].partition("/")[0], name)
    words: dict[str, Any] = {key: fields(row[key]) for key in _WORDS if key in row}
    own = _OWN.get(kind, OwnCalls())
    calls = SharedCalls(service, row, own)
    return ResourceHandler(
        source=row["source"],
        name=row.get("name"),
        allowed={path: fields(text) for path, text in row.get("allowed", {}).items()},
        create=calls.create,
        read=own.read or calls.read,
        delete=own.delete or calls.delete,
        update=calls.update if calls.changes else None,
        **words,
    )


_ROWS = yaml.safe_load((Path(__file__).parent / "resources.yaml").read_text(encoding="utf-8"))
HANDLERS = {kind: _handler(kind, row) for kind, row in _ROWS.items()}


def handler(kind: str) -> ResourceHandler:
    """The handler of a type token. Raises RefusedError for a type that this AWS does not have."""
    if kind not in HANDLERS:
        raise UnsupportedError(f"the embedded AWS has no resource type {kind}; it has {', '.join(sorted(HANDLERS))}")
    return HANDLERS[kind]
