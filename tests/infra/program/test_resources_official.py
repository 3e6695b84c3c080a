"""The arguments we pass against the official provider's own SDK: names, required ones, enums, conflicts.

pulumi-aws ships no schema, but its generated classes contain one: typed arguments, and the provider's documentation in
their docstrings. docs/decisions/2026-11-21-provider-arguments.md lists what we learned from these.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import boto3
import pytest
from pulumi._types import input_type_py_to_pulumi_names

from gpufleet.job.text import stamp
from gpufleet.rehearsal.handlers import HANDLERS
from gpufleet.rehearsal.handlers.table import UNKNOWN
from tests.infra.command_files import in_block, several_nodes
from tests.infra.declared_world import Declared, declare
from tests.repository import ROOT

# When a package of the SDK is imported, it warns about resources that it has renamed, even if we use none of these.
pytestmark = pytest.mark.filterwarnings("ignore:.* has been deprecated in favor of:DeprecationWarning")

# Values that the SDK's pages do not have yet: the provider accepts every value of the API's own enum (read in its
# source, ec2_fleet.go, 2026-11-26), and the page of Instance has them.
BEHIND = {
    "LaunchTemplate.instance_market_options[0].market_type": "MarketType",
    "Fleet.target_capacity_specification[0].default_target_capacity_type": "DefaultTargetCapacityType",
}
_DOC = re.compile(r":param [^\n]*?\b(\w+): (.*?)(?=\n\s*:param |\Z)", re.DOTALL)
_VALUES = re.compile(
    r"(?:Valid values(?: are)?(?: include)?:?|Valid options:?|Can be(?: one of)?|Must be one of)"
    r"((?:[\s,:]|or|and|`\"?[\w.-]+\"?`)+)"
)


@dataclass(frozen=True)
class Argument:
    """One value we pass, with what the SDK says about it."""

    path: str
    value: Any
    doc: str
    siblings: frozenset[str]

    @property
    def allowed(self) -> list[str]:
        found = _VALUES.search(self.doc)
        return re.findall(r"`\"?([\w.-]+)\"?`", found.group(1)) if found else []

    @property
    def conflicts(self) -> list[str]:
        return re.findall(r"[Cc](?:onflicts|annot be used) with `(\w+)`", self.doc)


def resource_class(token: str) -> type[Any]:
    """aws:ec2/vpcEndpoint:VpcEndpoint -> pulumi_aws.ec2.VpcEndpoint's Args."""
    module, kind = token.removeprefix("aws:").split(":")
    folder, file = module.split("/")
    snake = re.sub(r"(?<!^)([A-Z])", r"_\1", file).lower()
    sdk = importlib.import_module(f"pulumi_aws.{folder}.{snake}")
    # `InitArgs` where a nested block of another resource has taken the plain name.
    found: type[Any] = getattr(sdk, f"{kind}InitArgs", None) or getattr(sdk, f"{kind}Args")
    return found


def arguments(cls: type[Any], values: dict[str, Any], path: str) -> Iterator[Argument]:
    """Every argument in `values` and below. Fails on a name that the class does not have."""
    names = {theirs: ours for ours, theirs in input_type_py_to_pulumi_names(cls).items()}
    signature = inspect.signature(cls.__init__)
    docs = dict(_DOC.findall(cls.__init__.__doc__ or ""))
    unknown = set(values) - set(names)
    assert not unknown, f"{path} has no {unknown}"
    required = {name for name, each in signature.parameters.items() if each.default is each.empty} - {"__self__"}
    missing = required - {names[key] for key in values}
    assert not missing, f"{path} needs {missing}"
    for key, value in values.items():
        ours = names[key]
        yield Argument(
            path=f"{path}.{ours}", value=value, doc=docs.get(ours, ""), siblings=frozenset(names[k] for k in values)
        )
        nested = re.search(r"'(\w+Args)'", str(signature.parameters[ours].annotation))
        if nested and value != UNKNOWN:
            inner = getattr(sys.modules[f"{cls.__module__.rpartition('.')[0]}._inputs"], nested.group(1))
            for index, item in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(item, dict):
                    yield from arguments(inner, item, f"{path}.{ours}[{index}]")


@pytest.fixture(scope="module")
def declared(tmp_path_factory: pytest.TempPathFactory) -> Declared:
    text = (ROOT / "stacks" / "tinystories-growth.yaml").read_text()
    with_data = text.replace("  root:\n    size_gib: 100", "  root: {size_gib: 100}\n  data: {size_gib: 50}")
    assert with_data != text
    told = f"{with_data}\nnotify: {{email: me@example.org}}\n"
    told = told.replace("{capacity: on-demand}", "{capacity: on-demand, fallback: none}")
    late = told.replace("\nlimits:\n", "\nlimits:\n  deadline: in 6 h\n", 1).replace(
        "  capacity: spot\n", "  capacity: spot\n  fallback: on-demand\n", 1
    )
    return declare(tmp_path_factory.mktemp("official") / "project", "tinystories-growth", late)


@pytest.fixture(scope="module")
def over_all_cards(tmp_path_factory: pytest.TempPathFactory) -> Declared:
    by_id = several_nodes("all").replace("us-east-2a", "use2-az1")
    return declare(tmp_path_factory.mktemp("nodes") / "project", "pretrain-d64", by_id)


@pytest.fixture(scope="module")
def into_block(tmp_path_factory: pytest.TempPathFactory) -> Declared:
    folder, text = tmp_path_factory.mktemp("block") / "project", several_nodes("one").replace("usd: 1000", "usd: 2000")
    start = datetime.now(UTC)
    block = f"{{reservation: cr-0123456789abcdef0, start: {stamp(start)}, end: {stamp(start + timedelta(days=2))}, "
    return declare(folder, "pretrain-d64", in_block(text, f"{block}fee_usd: 900}}"))


@pytest.fixture(scope="module")
def passed(declared: Declared, over_all_cards: Declared, into_block: Declared) -> list[Argument]:
    return [
        argument
        for each in (*declared.resources, *over_all_cards.resources, *into_block.resources)
        for argument in arguments(resource_class(each["type"]), each["inputs"], each["type"].split(":")[-1])
    ]


def test_every_argument_has_its_name_and_none_that_is_required_is_missing(passed: list[Argument]) -> None:
    assert len(passed) > 150
    assert {argument.path for argument in passed} >= {
        "Fleet.launch_template_configs[0].overrides[0].subnet_id",
        "LaunchTemplate.block_device_mappings[1].ebs.volume_size".replace("ebs.", "ebs[0]."),
    }


def test_every_enum_value_is_one_the_provider_documents(passed: list[Argument]) -> None:
    checked = set()
    for argument in passed:
        if (
            argument.path == "TopicSubscription.protocol"
        ):  # the list on that page has only protocols that confirm by themselves
            assert "`email`" in argument.doc
        elif argument.value == "capacity-block" and argument.path in BEHIND:
            shapes = boto3.client("ec2", "us-east-2").meta.service_model
            assert argument.value in shapes.shape_for(BEHIND[argument.path]).enum
        elif argument.allowed and isinstance(argument.value, str):
            assert argument.value in argument.allowed, f"{argument.path}={argument.value}: {argument.allowed}"
            checked.add((argument.path, argument.value))
    assert (
        checked
        >= {
            "Fleet.type": "maintain",
            "Fleet.excess_capacity_termination_policy": "termination",
            "Fleet.spot_options[0].allocation_strategy": "price-capacity-optimized",
            "Fleet.spot_options[0].instance_interruption_behavior": "terminate",
            "Fleet.target_capacity_specification[0].default_target_capacity_type": "spot",
            "LaunchTemplate.metadata_options[0].http_tokens": "required",
            "LaunchTemplate.block_device_mappings[0].ebs[0].volume_type": "gp3",
        }.items()
    )


def test_no_two_arguments_are_passed_that_exclude_each_other(passed: list[Argument]) -> None:
    documented = 0
    for argument in passed:
        documented += len(argument.conflicts)
        assert not argument.siblings & set(argument.conflicts), f"{argument.path}: {argument.conflicts}"
    assert documented > 0


def test_no_deprecated_resource_or_argument_is_used(declared: Declared) -> None:
    for kind in declared.kinds:
        cls = resource_class(kind)
        source = inspect.getsource(sys.modules[cls.__module__])
        for name in re.findall(r'pulumi.log.warn\("""(\w+) is deprecated', source):
            assert name not in {key for key, value in declared.inputs(kind)[0].items() if value is not None}, (
                kind,
                name,
            )


def test_the_embedded_aws_replaces_on_documented_properties_only() -> None:
    for token, handler in HANDLERS.items():
        names = set(input_type_py_to_pulumi_names(resource_class(token)).values())
        known = handler.required | handler.optional | handler.answered
        assert known <= names, token
        assert {path.split(".")[0] for path in handler.replaces} <= known, token


def test_the_embedded_aws_has_what_the_program_declares_and_nothing_else(
    declared: Declared, over_all_cards: Declared
) -> None:
    elsewhere = {
        "aws:s3/bucketObjectv2:BucketObjectv2",
        "aws:ec2/amiFromInstance:AmiFromInstance",  # tests/rehearsal/test_bake.py
        "aws:ebs/snapshot:Snapshot",  # the same
    }
    assert declared.kinds | over_all_cards.kinds | elsewhere == set(HANDLERS)
