"""`gpufleet cost STACK`: prints the bill of a definition or of a campaign, without Pulumi, credentials or network.

A scenario that cannot be launched (because it has a buffer, or keeps nodes longer than the work needs) has a bill too,
and the bill says so. For a scenario that ran elsewhere, the command shows only the claim in the file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from gpufleet.infra.bill import bake, limits, record
from gpufleet.infra.bill.answer import answer
from gpufleet.infra.bill.estimate import problems
from gpufleet.infra.bill.table import render
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.commands import stack
from gpufleet.infra.compare.cheaper import bill_and_cheaper
from gpufleet.infra.definition.loader import names_of, project_root
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.definition.scenarios import scenario
from gpufleet.infra.discover.marks import checks_warning
from gpufleet.infra.errors import BeforeLaunch, DefinitionError, GpufleetError, Problem, in_order
from gpufleet.infra.evidence.receipts import score
from gpufleet.infra.inputs.readiness import code_problems, image_problems, not_ready
from gpufleet.infra.review import policy
from gpufleet.infra.text import wrap

if TYPE_CHECKING:
    from gpufleet.infra.bill.bill import Bill
    from gpufleet.infra.bill.fallback import Fallback


def arguments(parser: argparse.ArgumentParser) -> None:
    stack.argument(parser)
    parser.add_argument(
        "others", metavar="STACK", nargs="*", help="more stacks: shows what the runs of all cost together"
    )
    parser.add_argument(
        "--times", metavar="N", type=_times, help="the number of runs of each stack: a sweep under one budget"
    )
    parser.add_argument(
        "--scenario", metavar="NAME", help="the bill of this scenario of the file, even if the stack runs another"
    )
    view = parser.add_mutually_exclusive_group()
    view.add_argument("--all", action="store_true", help="the whole bill: every line, phase, doubt and warning")
    view.add_argument("--json", action="store_true", help="the same for programs; keys in gpufleet docs bill")


def run(args: argparse.Namespace) -> int:
    """Prints the bill. Returns 1, and names the rule on standard error, if the bill breaks a rule of the project's
    policy.yaml. Raises DefinitionError, after printing the bill, if the bill shows a reason to refuse the definition.
    """
    root = project_root(Path.cwd())
    now = datetime.now(UTC)
    if args.stack not in names_of(root):
        # imported here, because most bills are for a stack
        from gpufleet.infra.definition import campaign as campaigns

        if campaigns.path_of(args.stack, root):
            return _campaign(args, root, now)
    if args.others or args.times is not None:
        return _several(args, root, now)
    if args.scenario is not None:
        definition = scenario(stack.path_of(args), args.scenario, now=now, to_run=False)
    else:
        definition = stack.definition_of(args, past_deadline=False, staged=True)
    if definition.stages:
        return _stages(definition, root, now, as_json=args.json)
    if definition.variant.reference:
        claim = _claim(definition)
        if args.json:
            raise GpufleetError(claim)
        print(claim)
        return 0
    rules = policy.find_policy(root) or policy.Policy()
    definition = policy.held_to(definition, rules)
    missing = [] if definition.variant.only_priced else [*map(BeforeLaunch, not_ready(definition, root))]
    catalog = load_catalog(day=now.date())
    bill, options = bill_and_cheaper(definition, root, catalog, now=now, rules=rules, not_ready=missing)
    unanswered = checks_warning(definition.source.read_text(), definition.source.name)
    first = [*limits.deadline_warnings(definition, bill, now), *unanswered]
    bill = replace(bill, warnings=(*bill.warnings, *map(BeforeLaunch, first)))
    fallbacks, without = list["Fallback"](), list[Problem]()
    if definition.fleet.market.stands_by:
        # imported here, because most bills have no fallback
        from gpufleet.infra.bill.fallback import fallback_problems, price_fallbacks

        fallbacks = price_fallbacks(definition, bill, now)
        without = [*fallback_problems(definition, bill, fallbacks)]
    if args.json:
        tree = record.to_json(bill) | {"cheaper": options and options.to_json()}
        tree["baked"] = bake.to_json(definition, root)
        for priced in fallbacks:
            tree["fallback"] = priced.to_json()
        sys.stdout.write(json.dumps(tree, indent=2) + "\n")
    elif args.all:
        cheaper = options.lines() if options else None
        sys.stdout.write(render(bill, today=now.date(), accuracy=score(root), cheaper=cheaper, fallbacks=fallbacks))
    else:
        line = options.line if options else ""
        command = f"gpufleet cost {definition.priced_argument}"
        print("\n".join(answer(bill, command, today=now.date(), cheaper=line, fallbacks=fallbacks)))
    for sentence in () if args.json else bake.lines([(definition, bill)], root):
        print("\n".join(wrap(sentence)))
    sys.stdout.flush()
    facts = policy.facts(definition, bill, fallbacks)
    broken = () if definition.variant.only_priced else policy.broken(rules, facts)
    _print_broken(broken)
    late = [*limits.deadline_problems(definition, bill, now), *without]
    if refusals := [*code_problems(definition, root), *image_problems(definition), *problems(definition, bill), *late]:
        raise DefinitionError(str(definition.source), refusals)
    return 1 if broken else 0


def _print_broken(broken: Iterable[policy.Broken]) -> None:
    for breach in broken:
        print(f"gpufleet: breaks {breach.rule} of policy.yaml: {breach.message}", file=sys.stderr)


def _stages(definition: StackDefinition, root: Path, now: datetime, *, as_json: bool) -> int:
    """Prints the bill of a run that has several stages."""
    from gpufleet.infra.bill.project import bill_of
    from gpufleet.infra.bill.stages import price_stages
    from gpufleet.infra.evidence.observations import observations
    from gpufleet.infra.risk.hazard import learn

    catalog, hazards = load_catalog(day=now.date()), learn(observations(root))
    rules = policy.find_policy(root) or policy.Policy()

    def price_stage(stage: StackDefinition) -> Bill:
        missing = map(BeforeLaunch, not_ready(stage, root))
        held = policy.held_to(stage, rules)
        return bill_of(held, root, catalog, today=now.date(), hazards=hazards, not_ready=[*missing])

    whole, wrong = price_stages(definition, price_stage, now.date())
    broken: tuple[policy.Broken, ...] = ()
    if whole is not None:
        priced = list(zip(definition.stages, whole.bills, strict=True))
        if as_json:
            print(json.dumps(whole.to_json() | {"baked": bake.to_json(definition, root)}, indent=2))
        else:
            baked = (line for sentence in bake.lines(priced, root) for line in wrap(sentence))
            print("\n".join([*whole.lines(), *baked]))
        wrong += [problem for stage, bill in priced for problem in problems(stage, bill)]
        parts = [(stage, bill, ()) for stage, bill in priced]
        broken = policy.broken_by_any(rules, parts, whole.usd.p90)
    for stage in definition.stages:
        wrong += [*code_problems(stage, root), *image_problems(stage)]
    _print_broken(broken)
    if wrong:
        raise DefinitionError(str(definition.source), in_order(wrong))
    return 1 if broken else 0


def _campaign(args: argparse.Namespace, root: Path, now: datetime) -> int:
    """Prints the bill of a campaign."""
    from gpufleet.infra.bill.campaign import PricedTrial, price
    from gpufleet.infra.bill.project import bill_of
    from gpufleet.infra.definition import campaign as campaigns
    from gpufleet.infra.evidence.observations import observations
    from gpufleet.infra.risk.hazard import learn

    if args.others or args.times is not None or args.scenario is not None:
        raise GpufleetError(f"{args.stack} is a campaign, which is priced alone: leave out the other arguments")
    described = campaigns.load(args.stack, root)
    trials = campaigns.trials(described, root)
    campaigns.write(trials, root)
    catalog, hazards, priced = load_catalog(day=now.date()), learn(observations(root)), []
    for trial in trials:
        args_of_trial = argparse.Namespace(stack=trial.name)
        whole = stack.definition_of(args_of_trial, past_deadline=False, staged=bool(trial.members))
        parts = zip(trial.members or (trial,), whole.parts, strict=True)
        priced.append(
            [
                PricedTrial.build(
                    str(member),
                    definition,
                    bill_of(definition, root, catalog, today=now.date(), hazards=hazards),
                    is_made=trial.is_made,
                )
                for member, definition in parts
            ]
        )
    if described.order == "cheapest":
        priced.sort(key=lambda trial: trial[0].bill.usd.p90)
    hands = [len(of_node) for of_node in priced] if described.share_node else []
    campaign_bill = price([trial for of_node in priced for trial in of_node], described, hands)
    sys.stdout.write(
        json.dumps(campaign_bill.to_json(), indent=2) + "\n" if args.json else "\n".join(campaign_bill.lines()) + "\n"
    )
    return 0


def _several(args: argparse.Namespace, root: Path, now: datetime) -> int:
    """Prints what the runs of all stacks cost together."""
    from gpufleet.infra.bill import several
    from gpufleet.infra.bill.project import bill_of
    from gpufleet.infra.evidence.observations import observations
    from gpufleet.infra.risk.hazard import learn

    if args.scenario is not None:
        raise GpufleetError("--scenario is for one stack; `pulumi config set scenario NAME` sets a stack's scenario")
    catalog, hazards, bills = load_catalog(day=now.date()), learn(observations(root)), []
    for name in (args.stack, *args.others):
        definition = stack.definition_of(argparse.Namespace(stack=name), past_deadline=False)
        if definition.variant.reference:
            raise GpufleetError(_claim(definition))
        bills.append((definition, bill_of(definition, root, catalog, today=now.date(), hazards=hazards)))
    all_runs = several.repeated(bills, args.times or 1, now.date())
    text = json.dumps(all_runs.to_json(), indent=2) if args.json else "\n".join(all_runs.lines())
    sys.stdout.write(text + "\n")
    return 0


def _times(text: str) -> int:
    if text.isdecimal() and 1 <= int(text) <= 1000:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text}: allowed are 1 to 1000 runs of each")


def _claim(definition: StackDefinition) -> str:
    claim = definition.variant.claim
    words = [f"{claim.hours} h" if claim.hours is not None else "", f"{claim.usd} USD" if claim.usd is not None else ""]
    claimed = " and ".join(filter(None, words)) or "nothing"
    return (
        f"{definition.name}, scenario {definition.scenario}: ran elsewhere, so there is nothing to price or to launch;"
        f" its plan claims {claimed}."
    )
