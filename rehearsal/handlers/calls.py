"""The calls of a resource type, as its row of resources.yaml describes them: AWS makes, reads, tags and deletes most
types in the same way.

`create`, `read` and `delete` name the operation to `do`. A create sends the properties in `send`, and puts those in
`hold` `inside` one parameter; `ours=Theirs` is written if the two names differ by more than a capital; `else` holds
constants. `give` names the id in the answer, or `id` the properties of which it is made. `by` is the parameter for that
id: its value is a list if the name ends with Ids; there are two parameters for an id of two parts. `in` says where the
answer has the object; `gone` lists the error codes for a missing one; `named` lists properties with other names in the
answer. An `update` sends the create again, or calls another operation with the same parameters. `tag` is the type's
kind in EC2, the type's name in IAM's operations, the resource's ARN elsewhere. Calls of another form are functions of
the type's module, in that module's OwnCalls.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from gpufleet.infra.account.refusals import absent
from gpufleet.rehearsal.handlers import table
from gpufleet.rehearsal.handlers.table import Aws, Change, Properties, Read

# A function of the properties as declared, the properties as read, and AWS's own answer.
Seen = Callable[[Aws, Properties, Properties, Mapping[str, Any]], Properties]


class OwnCalls(NamedTuple):
    """The calls of a type that a row cannot describe."""

    create: Callable[[Aws, Properties], str] | None = None
    read: Read | None = None
    delete: Callable[[Aws, str, Properties], Any] | None = None
    before: Callable[[Aws, Properties], Any] | None = None  # called before a create
    made: Callable[[Aws, str, Properties], Any] | None = None  # called after a create
    settle: Change | None = None  # called after a create, and at an update
    change: Change | None = None  # called at an update
    seen: Seen | None = None  # adds properties to a read


@dataclass(frozen=True, slots=True)
class SharedCalls:
    """A type's row together with the calls that its module defines."""

    service: str
    row: Mapping[str, Any]
    own: OwnCalls

    def create(self, aws: Aws, inputs: Properties) -> str:
        if self.own.before:
            self.own.before(aws, inputs)
        if self.own.create:
            resource_id = self.own.create(aws, inputs)
        else:
            spec = self.row["create"]
            answer = self._send(aws, spec["do"], inputs)
            resource_id = str(table.get(answer, spec["give"])) if "give" in spec else spec["id"].format(**inputs)
        if self.own.made:
            self.own.made(aws, resource_id, inputs)
        if self.own.settle:
            self.own.settle(aws, resource_id, {}, inputs)
        return resource_id

    def read(self, aws: Aws, resource_id: str, like: Properties) -> Properties | None:
        spec = self.row["read"]
        operation = getattr(aws.client(self.service), spec["do"])
        answer = absent(lambda: operation(**_named_by(spec["by"], resource_id)), *spec["gone"].split())
        raw = table.get(answer, spec["in"]) if "in" in spec else answer
        if isinstance(raw, list):
            raw = next((entry for entry in raw if entry.get("State") not in ("deleted", "deleting")), None)
        if not raw:
            return None
        named = (word.split("=") for word in spec.get("named", "").split())
        live = {**table.from_api(raw), **{ours: table.get(raw, theirs) for ours, theirs in named}}
        live |= _parts(self.row.get("create", {}).get("id", ""), resource_id)
        if self.service == "ec2":
            live["arn"] = aws.arn("ec2", f"{self.row['tag']}/{resource_id}")
        elif resource_id.startswith("arn:"):
            live["arn"] = resource_id
        if "tag" in self.row:
            listed = raw.get("Tags") if self.service in ("ec2", "iam") else self._listed(aws, live["arn"])
            live |= table.tagged(listed)
        return live | self.own.seen(aws, like, live, raw) if self.own.seen else live

    def update(self, aws: Aws, resource_id: str, old: Properties, new: Properties) -> None:
        if again := self.row.get("update"):
            self._send(aws, self.row["create"]["do"] if again == "create" else again, new)
        for change in (self.own.settle, self.own.change):
            if change:
                change(aws, resource_id, old, new)
        if "tag" in self.row:
            self._retag(aws, resource_id, *table.tag_diff(old, new))

    def delete(self, aws: Aws, resource_id: str, state: Properties) -> None:
        spec = self.row["delete"]
        operation = getattr(aws.client(self.service), spec["do"])
        absent(lambda: operation(**_named_by(spec["by"], resource_id)), *spec.get("gone", "").split())

    @property
    def changes(self) -> bool:
        """Whether AWS can change such a resource in place."""
        return bool({"update", "tag"} & set(self.row) or self.own.settle or self.own.change)

    def _send(self, aws: Aws, operation: str, inputs: Properties) -> Any:
        spec = self.row["create"]
        sent, rest = _named(spec.get("send", ""), inputs), spec.get("else", {})
        if "inside" in spec:
            sent[spec["inside"]] = {**rest, **_named(spec["hold"], inputs)}
        else:
            sent = {**rest, **sent}
        tags = inputs.get("tags") or {}
        if self.service == "ec2" and "tag" in self.row:
            sent["TagSpecifications"] = table.tag_specification(self.row["tag"], inputs)
        elif "tag" in self.row:
            sent[self._spelled("Tags")] = self._tags(tags)
        return getattr(aws.client(self.service), operation)(**sent)

    def _retag(self, aws: Aws, resource_id: str, gone: list[str], changed: dict[str, str]) -> None:
        client, tag = aws.client(self.service), self.row["tag"]
        target: dict[str, Any]
        removed: dict[str, Any] = {self._spelled("TagKeys"): gone}
        if self.service == "ec2":
            target, add, remove = {"Resources": [resource_id]}, client.create_tags, client.delete_tags
            removed = {"Tags": [{"Key": key} for key in gone]}
        elif self.service == "iam":
            target = _named_by(self.row["read"]["by"], resource_id)
            add, remove = getattr(client, f"tag_{tag}"), getattr(client, f"untag_{tag}")
        else:
            target = self._target(resource_id if tag == "{}" else aws.arn(self.service, tag.format(resource_id)))
            add, remove = client.tag_resource, client.untag_resource
        if gone:
            remove(**target, **removed)
        if changed:
            add(**target, **{self._spelled("Tags"): self._tags(changed)})

    def _listed(self, aws: Aws, arn: str) -> list[dict[str, str]]:
        """A resource's tags, in the form in which most services list them."""
        tags = aws.client(self.service).list_tags_for_resource(**self._target(arn))[self._spelled("Tags")]
        return [{key.capitalize(): value for key, value in tag.items()} for tag in tags]

    def _target(self, arn: str) -> dict[str, str]:
        return {"ResourceARN" if self.service == "events" else self._spelled("ResourceArn"): arn}

    def _spelled(self, name: str) -> str:
        """A parameter about tags, in the service's spelling."""
        return name[0].lower() + name[1:] if self.service in ("logs", "stepfunctions") else name

    def _tags(self, tags: dict[str, str]) -> Any:
        if self.service == "logs":
            return tags
        return [{self._spelled(key): value for key, value in tag.items()} for tag in table.tag_list(tags)]


def _named(words: str, inputs: Properties) -> dict[str, Any]:
    pairs = (word.partition("=") for word in words.split())
    return {theirs or table.api(ours): table.to_api(inputs[ours], ours) for ours, _, theirs in pairs if ours in inputs}


def _named_by(parameter: str, resource_id: str) -> dict[str, Any]:
    mark = next((character for character in ":/" if character in parameter), None)
    if mark:
        return dict(zip(parameter.split(mark), resource_id.split(mark, 1), strict=True))
    return {parameter: [resource_id] if parameter.endswith("Ids") else resource_id}


def _parts(form: str, resource_id: str) -> dict[str, str]:
    """The properties from which an id is made."""
    mark = re.sub(r"{\w+}", "", form)
    return dict(zip(re.findall(r"{(\w+)}", form), resource_id.split(mark, 1) if mark else [resource_id], strict=False))
