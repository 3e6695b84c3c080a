"""The bill as text for people: plain ASCII, at most 100 columns, for Pulumi's Diagnostics or a terminal. docs/bill.md
says what each figure means; figures that are not in the table are in the JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from gpufleet.infra.bill.bill import Bill
from gpufleet.infra.bill.fit import Fit, Notice
from gpufleet.infra.bill.limits import AS_COUNTED
from gpufleet.infra.bill.lines import NOT_PRICED, account_discount
from gpufleet.infra.bill.options import TypeCost
from gpufleet.infra.bill.runtime import PhaseTime
from gpufleet.infra.bill.side import Quantiles, Side
from gpufleet.infra.definition.model import Capacity, deadline_text
from gpufleet.infra.market import WAYS
from gpufleet.infra.risk.hazard import word
from gpufleet.infra.show.sheet import Column, Sheet
from gpufleet.infra.text import share, wrap
from gpufleet.job.contract.aws import MINIMUM_S, NOTICE_S
from gpufleet.job.contract.goal import goal_text
from gpufleet.job.kind.common import DEVICE_RESERVE_GB
from gpufleet.job.text import counted

if TYPE_CHECKING:
    from gpufleet.infra.bill.fallback import Fallback


def render(
    bill: Bill,
    *,
    today: date | None = None,
    accuracy: object = None,
    cheaper: Iterable[str] | None = None,
    fallbacks: Sequence[Fallback] = (),
) -> str:
    """The whole bill. Optional parts: `today` for the age of prices; `accuracy`, a Score of infra.evidence.receipts,
    which says how right earlier bills were; `cheaper`, the lines of infra.compare.cheaper; `fallbacks`, with which the
    run's cost is shown too.
    """
    types = [_types(bill)] if len(bill.types) > 1 else []
    options = [] if cheaper is None else [cheaper]
    rest = _rest(bill, today, accuracy, fallbacks)
    blocks = [_head(bill), _lines(bill), _totals(bill, fallbacks), *options, *types, _phases(bill), rest]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _head(bill: Bill) -> Iterator[str]:
    side = bill.chosen
    dearest = "the dearest listed type, " if len(bill.types) > 1 else ""
    price = bill.market.at_price(side.price.amount)
    if side.zone:
        price += " (dearest zone)" if len(side.option.offers[bill.capacity].zones) > 1 else ""
    nodes = bill.market.filled_in(bill.market.counts)
    yield from wrap(f"{bill.title}, run {bill.run}: {nodes} in {bill.region}, {dearest}{side.type} {price}")


LINES = (
    Column("name", "line", of=lambda line: f"{line.name} *" if line.inferred else line.name),
    Column("quantity", unit="units", digits=4),
    Column("unit"),
    Column("unit_price", "USD each", "USD", "{:f}".format),
    Column("amount", "USD", "USD", 4),
)


def _lines(bill: Bill) -> Iterator[str]:
    sums = [("interruptions", interruptions_usd(bill))]
    unknown = bill.chosen.needed_usd.p50 - bill.chosen.alone_usd.p50
    if unknown:
        sums.append(("uncertain speed and price", unknown))
    if bill.buys is not None and bill.cap is not None:
        sums = [(f"interruptions, and the stop at {bill.cap.first}", bill.usd.p50 - bill.chosen.total)]
    elif bill.cap is not None and (cut := bill.usd.p50 - bill.chosen.needed_usd.p50):
        sums += [("total to finish = p50", bill.chosen.needed_usd.p50), (f"stopped by {bill.cap.first}", cut)]
    sums.append((f"total = p50{_limits_note(bill)}", bill.usd.p50))
    more = ((name, "", "", "", f"{amount:.4f}") for name, amount in sums)
    yield from Sheet.build(LINES, bill.chosen.lines, *more).text()
    if any(line.inferred for line in bill.lines):
        yield f"* price inferred, not read in any source for {bill.region}"


def interruptions_usd(bill: Bill) -> Decimal:
    """The USD that interruptions add to a run that finishes. The bill's line also contains what a limit cuts off."""
    return bill.chosen.alone_usd.p50 - bill.chosen.total


QUANTILES = (Column("name", ""), *(Column(part, unit="USD or hours") for part in ("p10", "p50", "p90", "mean")))


def _totals(bill: Bill, fallbacks: Sequence[Fallback]) -> Iterator[str]:
    chosen = bill.chosen
    if bill.buys is not None and bill.cap is not None:
        node_hours = bill.hours.times(chosen.exposure.nodes)
        rows = [figures("USD", bill.usd), figures("node-hours", node_hours), figures("hours of training", bill.buys)]
        yield from Sheet(QUANTILES, rows).text()
        yield from wrap(
            f"Nobody says how long the run is (job.work), so this is what the money buys: {bill.buys.p10:.1f} to"
            f" {bill.buys.p90:.1f} h of training (p10 to p90) until {bill.cap.first}, interruptions taken off."
        )
        return
    within = _limits_note(bill)
    rows = [figures(f"USD{within}, done or not" if within else "USD", bill.usd)]
    if within:
        rows.append(figures("USD to finish, were there no limit", chosen.needed_usd))
    rows += _parts(bill)
    # The mean is not shown, because it depends on a few runs whose nodes rarely last longer than an hour. Even with
    # 10,000 simulated runs, it is not yet near the mean of a million.
    counted_usd = (*figures(f"USD {AS_COUNTED}", chosen.metered_usd)[:4], "-")
    beside = bill.cap is not None and counted_usd[2:4] != figures("", chosen.needed_usd)[2:4]
    if beside:
        rows.append(counted_usd)
    by_the_hour = (("spot", bill.spot), ("on-demand", bill.on_demand))
    rows += [_other(bill, name, side) for name, side in by_the_hour if name != bill.capacity]
    rows += [figures(*fallback.row()) for fallback in fallbacks]
    rows.append(figures(bill.market.hours_of, bill.hours))
    if bill.market.is_interrupted:
        rows.append(figures("hours with waits for capacity", chosen.wall_hours))
    yield from Sheet(QUANTILES, rows).text()
    if beside:
        yield "limits.max_usd counts interrupted first hours as well, which AWS does not charge."


def _parts(bill: Bill) -> Iterator[tuple[str, ...]]:
    """Rows with the range that each uncertainty alone would give, and with the range after a calibration."""
    if bill.market.is_interrupted:
        yield figures("  interruptions alone", bill.chosen.alone_usd)
    if bill.chosen.idle_usd.mean:
        yield figures("  waiting for the others, of it", bill.chosen.idle_usd)
    middle = bill.chosen.total
    names = {"price": "  price alone", "speed": f"  speed alone, {_SPEED[bill.chosen.runtime.speed]}"}
    for part, name in names.items():
        if part in bill.span_usd:
            low, high = bill.span_usd[part]
            yield *figures(name, Quantiles(p10=low, p50=middle, p90=high, mean=middle))[:4], "-"
    if bill.measured_usd is not None:
        yield figures("  all, after `gpufleet calibrate`", bill.measured_usd)


_SPEED = {"measured": "measured", "declared": "as declared", "guessed": "guessed", "derived": "not measured"}


def _limits_note(bill: Bill) -> str:
    """The words that follow "p50" if a limit may stop the run, because that p50 is not the cost to finish; otherwise
    empty.
    """
    if bill.buys is not None:
        return ""
    stopped = bill.chosen.probability_stopped >= 0.01 or bill.usd.p50 != bill.chosen.needed_usd.p50
    return " within the limits" if stopped else ""


def figures(name: str, values: Quantiles, digits: int | None = None) -> tuple[str, ...]:
    """A row with QUANTILES of dollars or hours. `digits`: the number of decimals; None to show all that are needed."""
    digits = (2 if values.p90 >= Decimal("0.1") else 4) if digits is None else digits
    return name, *(f"{value:.{digits}f}" for value in (values.p10, values.p50, values.p90, values.mean))


def _other(bill: Bill, market: Capacity, other: Side | None) -> tuple[str, ...]:
    """A row with the run's price in another market."""
    place = WAYS[market].place
    if other is None:
        above = any(option.offers[market].left_out for option in bill.types)
        return f"USD {place}: {'above limits.usd_per_hour' if above else 'no price known'}", "", "", "", ""
    return figures(f"USD {place}, {other.type} at {other.price.amount} USD/h", other.needed_usd)


def _types(bill: Bill) -> Iterator[str]:
    def compute(option: TypeCost) -> str:
        if (hourly := option.hourly(bill.capacity)) and option.runtime:
            node_s = Decimal(max(option.runtime.total_s, MINIMUM_S)) * bill.chosen.exposure.nodes
            return f"{hourly.amount * node_s / 3600:.4f}"
        return "left out" if option.offers[bill.capacity].left_out else "no price or speed"

    columns = (
        Column("type", "listed type"),
        Column("GPU", of=lambda option: option.instance.gpus),
        Column("hours", None, "h", 3, lambda option: option.runtime and option.runtime.total_s / 3600),
        Column("spot USD/h by zone", of=_spot_span),
        Column("on demand", of=lambda option: option.on_demand and option.on_demand.amount),
        Column("compute USD", unit="USD", of=compute),
        Column("fits", of=lambda option: "yes" if option.holds_the_job else "NO"),
    )
    yield from Sheet.build(columns, bill.types).text()
    for option in bill.types:
        if option.why and not option.offers[bill.capacity].left_out:
            yield from wrap(f"{option.type}: {option.why}")


def _spot_span(option: TypeCost) -> str | None:
    """The spot prices of the type's zones, as text."""
    prices = [zone.price.amount for zone in option.spot]
    return " to ".join(map(str, dict.fromkeys((prices[0], prices[-1])))) if prices else None


def _phases(bill: Bill) -> Iterator[str]:
    times = {
        (option.type, time.name): time for option in bill.types if option.runtime for time in option.runtime.phases
    }
    notices = {(notice.type, notice.phase): notice for notice in bill.notice}

    def timed(value: Callable[[PhaseTime], Any]) -> Callable[[Fit], Any]:
        return lambda fit: value(times[fit.type, fit.phase]) if (fit.type, fit.phase) in times else None

    columns = (
        Column("type"),
        Column("phase"),
        Column("hours", None, "h", 3, timed(lambda time: time.seconds / 3600)),
        Column(
            "step ms", None, "ms", 1, timed(lambda time: time.step_ms if time.steps and time.counts_steps else None)
        ),
        Column(
            *("tok/s", None, "tokens/s", "{:,.0f}".format),
            timed(lambda time: time.tokens_per_s if time.steps and time.flops_per_token else None),
        ),
        Column("MFU", None, "share", "{:.0%}".format, timed(lambda time: time.mfu or None)),
        Column("GPU memory", of=_memory),
        Column("micro", of=lambda fit: f"{fit.micro}{' ckpt' if fit.checkpointing else ''}"),
        Column("save + upload", of=lambda fit: _notice(notices.get((fit.type, fit.phase)))),
    )
    yield from Sheet.build(columns, bill.fits).text()
    for fit in bill.fits:
        if fit.type == bill.chosen.type and (text := _held_by(fit, times.get((fit.type, fit.phase)))):
            yield from wrap(text)
    yield from wrap(_setup_and_idle(bill))
    yield from wrap(_trained(bill))
    for fit in bill.fits:
        if not fit.fits:
            yield from wrap(f"{fit.type}, phase {fit.phase} does not fit: {fit.why}. Nearest: {fit.nearest}.")


def _notice(notice: Notice | None) -> str | None:
    """A cell that says whether a save and its upload can be done within AWS's notice."""
    if notice is None:
        return None
    if not notice.saves:
        return "no save shown"
    return f"{notice.total_s:.0f} of {NOTICE_S:.0f} s{'' if notice.fits else ' NO'}"


def _memory(fit: Fit) -> str:
    """The memory that one GPU needs, and its size."""
    if not fit.needs_gb:
        return "not predicted" if fit.fits else "NO"
    return f"{fit.needs_gb:.1f} of {fit.has_gb:g} GB" + ("" if fit.fits else " NO")


def _held_by(fit: Fit, time: PhaseTime | None) -> str:
    """A sentence about what takes most of a phase's steps and what fills its memory; empty if neither is known."""
    parts = []
    if time is not None and time.bound:
        parts.append(f"most of a step is {time.bound}, by the data sheet")
    if fit.memory is not None:
        held = ", ".join(f"{name} {gb:.1f}" for name, gb in fit.memory.parts.items() if gb >= 0.05)
        parts.append(f"a GPU holds {held} GB (not all at one moment) and {DEVICE_RESERVE_GB:g} GB for CUDA")
    return f"{fit.phase}: {'; '.join(parts)}." if parts else ""


def _trained(bill: Bill) -> str:
    """A sentence: in which share of the billed GPU-hours at p50 the job takes steps, and what such an hour costs."""
    runtime, exposure = bill.chosen.runtime, bill.chosen.exposure
    (option,) = (listed for listed in bill.types if listed.type == bill.chosen.type)
    billed_h = float(bill.hours.p50) * option.instance.gpu_count
    used_h = min(runtime.ranks, exposure.nodes * option.instance.gpu_count) * runtime.compute_s / 3600
    if not billed_h or not used_h:
        return ""
    cost = float(bill.usd.p50) / used_h
    return (
        f"Of {billed_h:.3g} billed GPU-hours at p50 the steps take {used_h:.3g} ({used_h / billed_h:.0%}):"
        f" {cost:.2f} USD for a GPU-hour that trains."
    )


def _setup_and_idle(bill: Bill) -> str:
    """A sentence about the hours outside of the phases: set-up, and idle time at the end."""
    runtime = bill.chosen.runtime
    source = f" (from {runtime.setup_source})" if runtime.setup_source else ""
    parts = [f"{runtime.setup_s / 60:.1f} min of set-up before the first phase{source}"]
    if runtime.held_s:
        parts.append(f"{runtime.held_s / 3600:.2f} h held idle after the last")
    (used,) = (option.instance.used(runtime.ranks) for option in bill.types if option.type == bill.chosen.type)
    return f"{bill.chosen.type}: {', '.join(parts)}; {used} in use."


def _rest(bill: Bill, today: date | None, accuracy: object, fallbacks: Sequence[Fallback]) -> Iterator[str]:
    yield from wrap(_interruptions(bill))
    if bill.cadence is not None:
        cadence = bill.cadence.sentence()
        yield from wrap(f"{cadence[0].upper()}{cadence[1:]}.")
    yield from wrap(_limits(bill, fallbacks))
    yield from goals(bill)
    yield from wrap(kept_sentence(bill))
    days = [line.as_of for line in bill.lines]
    age = "" if today is None else f"; {price_age(bill, today)}"
    yield from wrap(f"Prices: of {min(days)} to {max(days)}{age}.")
    yield from wrap(f"Not priced: {'; '.join(NOT_PRICED)}.")
    if (less := account_discount(bill.chosen.lines)) >= Decimal("0.01"):
        yield from wrap(
            "An account that has not used its free 100 GB of transfer and 5 GB of logs this month pays"
            f" {less:.2f} less."
        )
    if bill.calibrated:
        yield from wrap(f"Calibrated: {bill.chosen.runtime.basis}.")
    if accuracy is not None:
        yield f"How right earlier bills were: {accuracy}."
    for warning in bill.warnings:
        yield from wrap(f"Warning: {warning}")


def goals(bill: Bill) -> Iterator[str]:
    """A sentence about the goals and the chance of each; nothing if there is no goal."""
    if not bill.goals:
        return
    phrases = [
        f"{goal_text(goal.name, goal.wanted)} ({'the run will tell' if goal.share is None else share(goal.share)})"
        for goal in bill.goals
    ]
    yield from wrap(f"Goals, and the share of runs that meet each: {', '.join(phrases)}.")


def kept_sentence(bill: Bill) -> str:
    """A sentence about what stays in the bucket and its price."""
    remains = bill.kept
    stored = f"at most {remains.gb:.1f} GB for {remains.days} days, {remains.usd_per_month:.2f} USD a month"
    return f"Kept after destroy: {stored if remains.days else 'nothing'}."


def price_age(bill: Bill, today: date) -> str:
    """The age of the price of compute, and which share of the dollars has prices older than the definition allows. This
    is a share of the uninterrupted run's dollars, because the line `interruptions` has no price of its own.
    """
    age = bill.market.price_age((today - bill.chosen.price.as_of).days)
    old = stale_prices(bill, today)
    return f"{age}; {old}: `gpufleet prices refresh`" if old else age


def stale_prices(bill: Bill, today: date) -> str:
    """Which share of the dollars has prices older than the definition allows; empty if none has."""
    old = [line for line in bill.chosen.lines if (today - line.as_of).days > bill.max_price_age_days]
    if not old or not bill.chosen.total:
        return ""
    share = sum((line.amount for line in old), Decimal(0)) / bill.chosen.total
    return f"{share:.0%} of the dollars stand on prices older than {bill.max_price_age_days} days"


def _interruptions(bill: Bill) -> str:
    if never := bill.market.uninterrupted(bill.hours.p50):
        return never
    if bill.on_demand is None:
        against = "no on-demand price to compare with"
    elif bill.break_even_hazard == 0:
        against = "on demand costs no more at any hazard"
    elif bill.break_even_hazard is None:
        against = "spot is cheaper than on demand up to 10 per node-hour"
    else:
        against = f"on demand is cheaper above {bill.break_even_hazard:.2g} per node-hour"
    usual, most = bill.chosen.interruptions.p50, bill.chosen.interruptions.p90
    many = f"{f'at most {usual:.0f}' if usual else 'none'} in half of the runs, at most {most:.0f} in nine of ten"
    return f"Interruptions: {many}, {_hazard(bill)}; {against}.{_negative(bill)}"


def _negative(bill: Bill) -> str:
    """A sentence about why the line `interruptions` is negative; empty if it is not."""
    if interruptions_usd(bill) >= 0:
        return ""
    return " Their line is negative: AWS does not charge an interrupted first hour."


def _hazard(bill: Bill) -> str:
    chance = bill.chance
    assert chance is not None  # for mypy: a spot run always has a hazard
    if not chance.sigma:
        return f"at {chance.median:g} per node-hour ({word(chance.median)}; {chance.source})"
    p10, p90 = chance.quantile(0.1), chance.quantile(0.9)
    return (
        f"at about {chance.median:.2g} per node-hour, in eight runs of ten between {p10:.2g} and {p90:.2g}"
        f" ({word(p10)} to {word(p90)}; {chance.source})"
    )


def _limits(bill: Bill, fallbacks: Sequence[Fallback]) -> str:
    cap = bill.cap
    if cap is None:
        return f"Cannot be launched: it {bill.only_priced}. Only priced, so no limit of the file is held against it."
    money, hours = f"{cap.max_usd} USD", counted(cap.max_hours, "node-hour")
    if cap.first == "limits.max_usd":
        money += f" (comes first, at {cap.at_hours:.2f} node-hours)"
    elif cap.first == "limits.max_hours":
        hours += " (comes first)"
    else:
        hours += f", the block's end (comes first, at {cap.at_hours:.2f} node-hours)"
    if bill.buys is not None:
        return f"Limits: {money}, {hours}. The first one ends the run."
    sentence = f"Limits: {money}, {hours}; chance that one stops the run: {share(cap.probability)}."
    notes = [fallback.sentence() for fallback in fallbacks]
    if cap.deadline is not None and not notes:
        notes.append(
            f"limits.deadline, {deadline_text(cap.deadline)}, is not part of this chance, nor of any time or cost here:"
            " `gpufleet compare` holds it against the hours."
        )
    return " ".join([sentence, *notes])
