"""Computes the changes between two commits, in dollars and by setting, also as an object for programs. The installed
version of gpufleet prices both commits, each with the prices and measurements of that commit. The difference of a stack
is split into steps from BASE to HEAD: first the prices, then the measurements, then each changed key in the file's
order, applied on top of those before. A key that cannot be applied alone is applied together with the next keys; keys
that can never be applied separately are one step. So the sum of a stack's steps is exactly its difference, and the
dollars of a key depend on the keys above it in the file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

from gpufleet.infra.bill.bill import Bill
from gpufleet.infra.bill.estimate import price_of, problems
from gpufleet.infra.bill.fallback import price_fallbacks
from gpufleet.infra.bill.limits import AS_COUNTED
from gpufleet.infra.bill.options import BillBasis
from gpufleet.infra.bill.side import Quantiles
from gpufleet.infra.bill.stages import StagedBill, price_stages
from gpufleet.infra.bill.table import price_age
from gpufleet.infra.catalog import Catalog
from gpufleet.infra.definition.loader import load
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.definition.yaml_tree import Items, Mapping, Node, Scalar, UnreadableError, decode, dump, read
from gpufleet.infra.errors import DefinitionError, GpufleetError
from gpufleet.infra.evidence import own_speeds
from gpufleet.infra.evidence.calibration import find_all
from gpufleet.infra.review.policy import Broken, Policy, broken_by_any, held_to
from gpufleet.infra.risk.hazard import Hazards
from gpufleet.infra.show.sheet import plain

ASIDE = ("rehearsal", "scenarios")  # sections of the file that do not affect the stack's bill
Path_ = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """A commit's prices and measurements."""

    catalog: Catalog
    measured: str  # a hash of calibrations/, receipts/ and traces/
    folder: Path = field(compare=False)  # the folder that contains prices and measurements
    hazards: Hazards = field(compare=False)  # hazards that are learned from receipts and traces


@dataclass(frozen=True, kw_only=True, slots=True)
class StackAtCommit:
    """One stack at one commit. `errors`: the reasons why it has no bill."""

    tree: Mapping | None = None
    definition: StackDefinition | None = None
    bill: Bill | None = None
    staged: StagedBill | None = None  # the bill of a run in stages, which has no single bill
    errors: tuple[str, ...] = ()

    @property
    def usd(self) -> Quantiles | None:
        """The bill's USD to finish the work. The USD within the limits are not used, because a run that a limit stops
        is cheap but not done.
        """
        if self.staged:
            return self.staged.usd
        return self.bill.chosen.needed_usd if self.bill else None

    @property
    def priced(self) -> list[tuple[StackDefinition, Bill]]:
        """Each part that has its own fleet, with its bill."""
        bills = self.staged.bills if self.staged else (self.bill,) if self.bill else ()
        return list(zip(self.definition.parts if self.definition else (), bills, strict=False))

    @property
    def counted_p90(self) -> Decimal | None:
        """The p90 with which limits.max_usd is compared."""
        if self.staged:
            return self.staged.usd.p90
        return self.bill.chosen.metered_usd.p90 if self.bill else None


@dataclass(frozen=True, kw_only=True, slots=True)
class CostStep:
    """One step of a difference: the changed settings, and their effect on the bill's p50 and p90."""

    keys: tuple[str, ...]
    before: str
    after: str
    p50: Decimal
    p90: Decimal


@dataclass(frozen=True, kw_only=True, slots=True)
class StackReview:
    """One stack at BASE and at HEAD. If `base` or `head` is None, that commit does not have the stack."""

    name: str
    base: StackAtCommit | None
    head: StackAtCommit | None
    steps: tuple[CostStep, ...] = ()
    aside: tuple[str, ...] = ()  # changed sections that no bill uses
    over_cap: str = ""  # a sentence if p90 exceeds limits.max_usd; otherwise empty
    refused: tuple[str, ...] = ()  # reasons why `up` would refuse the stack
    policy: tuple[Broken, ...] = ()
    age: str = ""

    @property
    def changed(self) -> bool:
        if self.base is None or self.head is None or self.steps or self.aside:
            return True
        return self.base.errors != self.head.errors

    @property
    def fails(self) -> bool:
        return bool(self.over_cap or self.refused or self.policy)


@dataclass(frozen=True, kw_only=True, slots=True)
class Review:
    """The content of a review. A review does not depend on the clock."""

    base: str  # the commits' hashes
    head: str
    base_prices: str
    head_prices: str
    stacks: tuple[StackReview, ...]
    folder: str = ""  # the folder of the project in its repository
    notes: tuple[str, ...] = ()
    rules: bool = False  # whether there is a policy
    policy_uncommitted: bool = False  # whether the working folder has a policy.yaml that HEAD lacks

    @property
    def exit_code(self) -> int:
        """2 if HEAD has a stack without a bill; otherwise 1 if a cap or a rule is broken, and 0 if not."""
        if any(stack.head and stack.head.errors for stack in self.stacks):
            return 2
        return 1 if any(stack.fails for stack in self.stacks) else 0


@dataclass(slots=True)
class Pricer:
    """Prices definitions that are given as text. This function writes the definitions as files into a folder of its
    own, and loads them with the time of HEAD as the current time.
    """

    now: datetime
    folder: Path
    rules: Policy

    def side(self, name: str, text: bytes, known: Known) -> StackAtCommit:
        """The stack `name`, whose file contains `text`."""
        try:
            tree = read(decode(text))
        except UnreadableError as error:
            return StackAtCommit(errors=tuple(str(problem) for problem in error.problems))
        path = self.folder / f"{name}.yaml"
        path.write_bytes(text)
        try:
            whole = load(path, now=self.now, past_deadline=True, catalog=known.catalog, staged=True)
            definition = whole.changed(lambda part: held_to(part, self.rules))
            if not definition.stages:
                return StackAtCommit(tree=tree, definition=definition, bill=self._price(definition, known))
            staged, wrong = price_stages(definition, lambda part: self._price(part, known), self.now.date())
            return StackAtCommit(tree=tree, definition=definition, staged=staged, errors=tuple(map(str, wrong)))
        except DefinitionError as error:
            return StackAtCommit(tree=tree, errors=tuple(str(problem) for problem in error.problems))
        except GpufleetError as error:
            return StackAtCommit(tree=tree, errors=(str(error).replace(f"{self.folder}/", "stacks/"),))

    def usd(self, name: str, tree: Mapping, known: Known) -> Quantiles | None:
        """USD to finish for a tree that is not in a file; None if the tree does not load or has no price."""
        entries = {key: node for key, node in tree.entries.items() if key not in ASIDE}
        return self.side(name, dump(replace(tree, entries=entries)).encode(), known).usd

    def _price(self, definition: StackDefinition, known: Known) -> Bill:
        instances = known.catalog.instances
        basis = BillBasis(
            definition,
            known.catalog,
            calibrations=find_all(definition, instances, known.folder),
            hazards=known.hazards,
            speeds=own_speeds.known(known.folder, instances, definition.name),
            today=self.now.date(),
        )
        return price_of(basis)


def compare(
    base: dict[str, bytes], head: dict[str, bytes], known: tuple[Known, Known], policy: Policy, now: datetime
) -> tuple[StackReview, ...]:
    """Every stack of the two commits, by name. `now`: the time of HEAD."""
    with tempfile.TemporaryDirectory(prefix="gpufleet-diff-") as folder:
        pricer = Pricer(now, Path(folder), policy)
        return tuple(
            _stack(name, base.get(name), head.get(name), known, policy, pricer) for name in sorted({*base, *head})
        )


def _stack(
    name: str, old: bytes | None, new: bytes | None, known: tuple[Known, Known], policy: Policy, pricer: Pricer
) -> StackReview:
    base = None if old is None else pricer.side(name, old, known[0])
    head = None if new is None else pricer.side(name, new, known[1])
    steps: tuple[CostStep, ...] = ()
    aside: tuple[str, ...] = ()
    if base and head and base.tree and head.tree:
        aside = tuple(key for key in ASIDE if _plain(base.tree.entries.get(key)) != _plain(head.tree.entries.get(key)))
        if base.usd and head.usd:
            steps = tuple(_attribute(name, base, head, known, pricer))
    judged: dict[str, Any] = {}
    if head and head.definition and (p90 := head.counted_p90) is not None:
        cap = head.definition.limits.max_usd
        parts = [(part, bill, price_fallbacks(part, bill, pricer.now)) for part, bill in head.priced]
        whole = head.staged.usd.p90 if head.staged else None
        ages = [price_age(bill, pricer.now.date()) for _, bill in head.priced]
        judged = {
            "over_cap": f"p90 {p90:.2f} {AS_COUNTED} passes limits.max_usd {cap}" if p90 > cap else "",
            "refused": tuple(str(problem) for priced in head.priced for problem in problems(*priced)),
            "policy": broken_by_any(policy, parts, whole),
            "age": "; ".join(dict.fromkeys(ages)),
        }
    return StackReview(name=name, base=base, head=head, steps=steps, aside=aside, **judged)


def _attribute(
    name: str, base: StackAtCommit, head: StackAtCommit, known: tuple[Known, Known], pricer: Pricer
) -> Iterator[CostStep]:
    assert base.tree is not None
    assert head.tree is not None
    assert base.usd is not None
    assert head.usd is not None
    old, new = known
    tree, now, usd = base.tree, old, base.usd
    waits: list[str] = []  # keys that could not be applied alone yet
    for key, step, before, after in (
        ("prices", replace(old, catalog=new.catalog), _named(old.catalog), _named(new.catalog)),
        ("measurements", new, "", ""),
    ):
        if replace(step, catalog=now.catalog) == now if waits else step == now:
            continue
        moved = None if waits else pricer.usd(name, tree, step)
        if moved is None:
            waits.append(key)
            continue
        cost_step = _step((key,), before, after, usd, moved)
        # left out without an effect, because most measurements belong to other stacks
        if key == "prices" or cost_step.p50 or cost_step.p90:
            yield cost_step
        now, usd = step, moved
    pending = _changes(base.tree, head.tree)
    going = not waits
    while going and pending:
        going, waiting = False, []
        for path, value, wanted in pending:
            trial = _with_value(tree, path, wanted)
            moved = pricer.usd(name, trial, now)
            if moved is None:
                waiting.append((path, value, wanted))
                continue
            yield _step((".".join(path),), _shown(value), _shown(wanted), usd, moved)
            tree, usd, going = trial, moved, True
        pending = waiting
    if rest := (*waits, *(".".join(path) for path, _, _ in pending)):
        yield _step(rest, "", "", usd, head.usd)


def _step(keys: tuple[str, ...], before: str, after: str, was: Quantiles, now: Quantiles) -> CostStep:
    return CostStep(keys=keys, before=before, after=after, p50=now.p50 - was.p50, p90=now.p90 - was.p90)


def _changes(base: Mapping, head: Mapping) -> list[tuple[Path_, Node | None, Node | None]]:
    """(path, before, after) of every value that differs: in HEAD's order, then values that HEAD lacks. An empty section
    (`estimate:`) is not a difference if the other commit has keys in this section, because then these keys are the
    difference.
    """
    old, new = dict(_leaves(base)), dict(_leaves(head))
    changes = [
        (path, old.get(path), node)
        for path, node in new.items()
        if _plain(old.get(path)) != _plain(node) and not _has_descendant(path, old)
    ]
    return changes + [
        (path, node, None) for path, node in old.items() if path not in new and not _has_descendant(path, new)
    ]


def _has_descendant(path: Path_, others: Iterable[Path_]) -> bool:
    """Whether one of the paths lies below `path`."""
    return any(len(other) > len(path) and other[: len(path)] == path for other in others)


def _leaves(tree: Mapping, above: Path_ = ()) -> Iterator[tuple[Path_, Node]]:
    for key, node in tree.entries.items():
        if not above and key in ASIDE:
            continue
        if isinstance(node, Mapping) and node.entries:
            yield from _leaves(node, (*above, key))
        else:
            yield (*above, key), node


def _with_value(tree: Mapping, path: Path_, node: Node | None) -> Mapping:
    """The tree with one changed value. If `node` is None, the key is removed, with sections that become empty by it."""
    entries, key = dict(tree.entries), path[0]
    if len(path) == 1:
        if node is None:
            entries.pop(key, None)
        else:
            entries[key] = node
    else:
        below = entries.get(key)
        inner = _with_value(below if isinstance(below, Mapping) else Mapping(path="", line=0), path[1:], node)
        if inner.entries:
            entries[key] = inner
        else:
            entries.pop(key, None)
    return replace(tree, entries=entries)


def _plain(node: Node | None) -> Any:
    """The value in the file, without quotes and line number. A key without a value differs from a missing key."""
    if isinstance(node, Scalar):
        return ("", None) if node.is_null else node.text
    if isinstance(node, Items):
        return [_plain(item) for item in node.items]
    if isinstance(node, Mapping):
        return {key: _plain(child) for key, child in node.entries.items()}
    return None


def _shown(node: Node | None) -> str:
    if node is None:
        return ""
    if isinstance(node, Scalar):
        return node.text
    if isinstance(node, Items):
        return f"[{', '.join(_shown(item) for item in node.items)}]"
    return "{}" if not node.entries else "{...}"


def _named(catalog: Catalog) -> str:
    return f"{catalog.name}, {catalog.as_of}"


def record(review: Review) -> dict[str, Any]:
    """Keys as documented in docs/review.md. Money is a decimal string."""
    return {
        "schema": 1,
        "base": {"commit": review.base, "prices": review.base_prices},
        "head": {"commit": review.head, "prices": review.head_prices},
        "exit_code": review.exit_code,
        "notes": list(review.notes),
        "stacks": [_stack_record(stack) for stack in review.stacks],
    }


def _stack_record(stack: StackReview) -> dict[str, Any]:
    return {
        "stack": stack.name,
        "changed": stack.changed,
        "base": stack.base and _side_record(stack.base),
        "head": stack.head and _side_record(stack.head),
        "steps": plain(stack.steps),
        "without_effect": list(stack.aside),
        "over_cap": stack.over_cap,
        "refused": list(stack.refused),
        "policy": plain(stack.policy, "rule", "message"),
    }


def _side_record(side: StackAtCommit) -> dict[str, Any]:
    usd = side.usd
    return {
        "p50": str(usd.p50) if usd else None,
        "p90": str(usd.p90) if usd else None,
        "calibrated": all(bill.calibrated for _, bill in side.priced) if side.priced else None,
        "errors": list(side.errors),
    }
