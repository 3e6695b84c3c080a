"""The tags on everything a stack owns, stated each time: a provider's default tags do not reach a fleet's nodes."""

from __future__ import annotations

from infra.definition import StackDefinition


def tags(definition: StackDefinition) -> dict[str, str]:
    """By these three the other commands, the sweep and the node's own rights find what belongs to a run."""
    return {
        "gpufleet:stack": definition.name,
        "gpufleet:run": definition.run.id,
        "gpufleet:owner": definition.run.owner,
    }


def named(tags: dict[str, str], name: str) -> dict[str, str]:
    """The same, with the name that the EC2 console shows."""
    return {"Name": name, **tags}
