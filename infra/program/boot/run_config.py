"""Makes run.json from a definition and its bill. Only the program writes it, once per run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from gpufleet.infra.bill import record
from gpufleet.infra.bill.bill import Bill
from gpufleet.infra.bill.fallback import Fallback
from gpufleet.infra.bill.limits import least_usd
from gpufleet.infra.bill.side import Quantiles
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.job.contract import run
from gpufleet.job.text import stamp


def run_config(
    definition: StackDefinition,
    bill: Bill,
    inputs: Mapping[str, Any],
    *,
    expires: str,
    fallbacks: Iterable[Fallback] = (),
    whole_usd: Quantiles | None = None,
    following: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The content of run.json. `inputs` and `expires` are as in job.contract.run.document; if there is a deadline, the
    fleet ends then. `whole_usd`: for a stage, the USD of its whole run. `following`: the stage that begins on its node.
    """
    limits, market = definition.shared or definition.limits, definition.fleet.market
    own = {"max_usd": str(definition.limits.max_usd), "max_hours": str(definition.limits.max_hours)}
    by_market = market.last is not None and expires == stamp(market.last)
    return run.document(
        run=definition.run.id,
        stack=definition.name,
        owner=definition.run.owner,
        region=definition.fleet.region,
        experiment=definition.job.experiment,
        parameters=asdict(definition.job.parameters),
        max_usd=limits.max_usd,
        max_hours=limits.max_hours,
        deadline=None if limits.deadline is None or by_market else expires,
        expires=expires,
        capacity=market.metered_as,
        fallback=next((fallback.run_json() for fallback in fallbacks), None),
        rates=_rates(definition, bill),
        extras=record.extras(bill),
        estimate=record.to_json(bill),
        predicted=record.predicted(bill),
        inputs=inputs,
        image=definition.job.image if not definition.job.parameters.code_folders() else None,
        nodes=definition.fleet.nodes,
        before=definition.before,
        own=own if definition.shared else None,
        least_usd=str(least_usd(definition, bill)) if definition.fleet_of else None,
        following=following,
        # the goals of a run in stages are graded once all stages have ended
        goal={} if definition.stage else {name: str(figure) for name, figure in definition.goal.wanted.items()},
        whole_usd=None if whole_usd is None else {"p10": str(whole_usd.p10), "p90": str(whole_usd.p90)},
        gather_s=round(bill.chosen.exposure.gather_h * 3600, 1) if definition.fleet.lets_go else None,
    )


def _rates(definition: StackDefinition, bill: Bill) -> dict[str, Any]:
    """The hourly prices of the types; for several nodes, also the facts that decide whether they use EFA."""
    rates, fleet = record.rates(bill), definition.fleet
    for option in bill.types if fleet.is_gang else ():
        if option.type in rates and option.instance.has_efa(fleet.cards):
            rates[option.type]["gbps"] = option.instance.between_nodes_gbps(fleet.cards)
            rates[option.type]["efa"] = option.instance.efa_devices(fleet.cards)
    return rates
