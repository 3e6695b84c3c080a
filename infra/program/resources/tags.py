"""The tags of all resources of a stack. Each resource states them, because the provider's default tags do not reach a
fleet's nodes.
"""

from __future__ import annotations

from gpufleet.infra.definition.model import StackDefinition
from gpufleet.job.contract.aws import OWN_TAGS

STACK_TAG, RUN_TAG, OWNER_TAG = OWN_TAGS
DELETE_AFTER = "gpufleet:delete-after"  # on the AMI of a bake: the time at which its schedule deletes it


def own_tags(definition: StackDefinition) -> dict[str, str]:
    """The three tags by which the other commands, the sweep and the node's own rights find a run's resources."""
    return {
        STACK_TAG: definition.name,
        RUN_TAG: definition.run.id,
        OWNER_TAG: definition.run.owner,
    }


def owned(definition: StackDefinition) -> dict[str, str | list[str]]:
    """The condition on tags that limits rights to what the run owns. Each of its stages counts as a run."""
    every = [own_tags(part) for part in definition.with_fleets]
    values = {key: [run_tags[key] for run_tags in every] for key in every[0]}
    return {
        f"aws:ResourceTag/{key}": alternatives[0] if len(set(alternatives)) == 1 else alternatives
        for key, alternatives in values.items()
    }


def tags(definition: StackDefinition) -> dict[str, str]:
    """The stack's own tags and those of the definition file."""
    return {**own_tags(definition), **(definition.account.tags or {})}


def named(tags: dict[str, str], name: str) -> dict[str, str]:
    """The tags with `Name`, which the EC2 console shows."""
    return {"Name": name, **tags}
