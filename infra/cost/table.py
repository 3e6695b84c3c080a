"""The bill as text for people: plain ASCII, at most 100 columns, one block for Pulumi's Diagnostics or a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from datetime import date
from decimal import Decimal

from infra.cost.bill import Bill
from infra.cost.fit import NOTICE_S
from infra.cost.risk import HAZARD_MEDIAN, HAZARD_SIGMA
from infra.cost.side import Quantiles, Side

WIDTH = 100
_STALE_DAYS = 90  # compute prices older than this get a sentence


def render(bill: Bill, *, today: date | None = None) -> str:
    """The whole bill. With `today` it also says how old the prices are."""
    blocks = [_head(bill), _lines(bill), _totals(bill), _risk(bill), _types(bill), _phases(bill), _rest(bill, today)]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _head(bill: Bill) -> Iterator[str]:
    side = bill.chosen
    where = f"spot zone {side.zone}, the dearest listed" if side.zone else "on demand"
    yield f"{bill.stack}, run {bill.run}: one node in {bill.region}, {bill.capacity}"
    yield f"priced on {side.type} at {side.price.amount} USD/h ({where})"


def _lines(bill: Bill) -> Iterator[str]:
    rows = [
        (
            line.name,
            "" if line.name == "interruptions" else f"{line.quantity.normalize():f}",
            "" if line.name == "interruptions" else line.unit,
            "" if line.name == "interruptions" else f"{line.unit_price:f}",
            f"{line.amount:.4f}",
            "" if line.name == "interruptions" else f"{line.as_of}{' (inferred)' if line.inferred else ''}",
        )
        for line in bill.lines
    ]
    rows.append(("total = p50", "", "", "", f"{bill.usd.p50:.4f}", ""))
    yield from _table(("line", "quantity", "unit", "USD each", "USD", "price of"), rows, right=(1, 3, 4))


def _totals(bill: Bill) -> Iterator[str]:
    chosen = bill.chosen
    rows = [_row(f"USD, {bill.capacity}", bill.usd), _row("node-hours", bill.hours)]
    if bill.capacity == "spot":
        rows.append(_row("hours with waits for capacity", chosen.wall_hours))
    if chosen.probability_stopped >= 0.01:
        rows.append(_row("USD to finish, were there no limit", chosen.needed_usd))
    rows.append(_row("USD at half the speed, no limit", bill.half_speed))
    other = bill.on_demand if bill.capacity == "spot" else bill.spot
    rows.append(_other(bill, other))
    yield from _table(("", "p10", "p50", "p90", "mean"), rows, right=(1, 2, 3, 4))


def _row(name: str, values: Quantiles) -> tuple[str, ...]:
    digits = 2 if values.p90 >= Decimal("0.1") else 4
    return name, *(f"{value:.{digits}f}" for value in (values.p10, values.p50, values.p90, values.mean))


def _other(bill: Bill, other: Side | None) -> tuple[str, ...]:
    kind = "on demand" if bill.capacity == "spot" else "spot"
    if other is None:
        return f"USD, {kind}: no price known", "", "", "", ""
    return _row(f"USD, {kind} ({other.type} at {other.price.amount} USD/h)", other.needed_usd)


def _risk(bill: Bill) -> Iterator[str]:
    if bill.capacity == "on-demand":
        yield from _wrap("Interruptions: none on demand.")
        return
    if bill.hazard is None:
        drawn = f"drawn per run, log-normal, median {HAZARD_MEDIAN}, sigma {HAZARD_SIGMA}: it is not known better"
    else:
        drawn = f"{bill.hazard}, fixed by estimate.hazard_per_hour"
    yield from _wrap(
        f"Interruptions: {bill.interruptions_expected:.2f} expected. Hazard per node-hour: {drawn}. An interrupted"
        " first hour is free of compute (AWS), so a short run can end below its uninterrupted price."
    )
    means = ", ".join(f"{word} {hazard}: {usd:.2f}" for word, hazard, usd in bill.usd_at_hazard)
    yield from _wrap(f"Mean USD to finish by hazard: {means}.")
    if bill.on_demand is None:
        yield from _wrap("Break-even: no on-demand price to compare with.")
    elif bill.break_even_hazard is None:
        yield from _wrap("Break-even: spot stays cheaper than on demand up to 10 interruptions per node-hour.")
    else:
        yield from _wrap(
            f"Break-even: on demand wins above {bill.break_even_hazard:.2g} interruptions per node-hour (interrupted"
            " first hours counted as billed)."
        )


def _types(bill: Bill) -> Iterator[str]:
    rows = []
    for option in bill.types:
        instance, runtime = option.instance, option.runtime
        hourly = option.hourly(bill.capacity)
        low, high = (option.spot[0].price.amount, option.spot[-1].price.amount) if option.spot else (None, None)
        compute = "no price or speed"
        if hourly and runtime:
            compute = f"{hourly.amount * Decimal(max(runtime.total_s, 60)) / 3600:.4f}"
        rows.append(
            (
                option.type,
                f"{instance.gpu_count} x {instance.gpu.name}" if instance else "?",
                f"{runtime.total_s / 3600:.3f}" if runtime else "-",
                "-" if low is None else f"{low}" if low == high else f"{low} to {high}",
                f"{option.on_demand.amount}" if option.on_demand else "-",
                compute,
                "yes" if option.holds_the_job else "NO",
            )
        )
    heads = ("listed type", "GPU", "hours", "spot USD/h by zone", "on demand", "compute USD", "fits")
    yield from _table(heads, rows, right=(2, 5))
    for option in bill.types:
        if option.why:
            yield from _wrap(f"{option.type}: {option.why}")


def _phases(bill: Bill) -> Iterator[str]:
    runtimes = {option.type: option.runtime for option in bill.types}
    notices = {(notice.type, notice.phase): notice for notice in bill.notice}
    rows = []
    for fit in bill.fits:
        runtime = runtimes[fit.type]
        time = next((phase for phase in runtime.phases if phase.name == fit.phase), None) if runtime else None
        notice = notices.get((fit.type, fit.phase))
        rows.append(
            (
                fit.type,
                fit.phase,
                f"{time.step_ms:.1f}" if time else "-",
                f"{time.tokens_per_s:,.0f}" if time else "-",
                f"{time.mfu:.0%}" if time and time.mfu else "-",
                f"{fit.needs_gb:.1f} of {fit.has_gb:g} GB" + ("" if fit.fits else " NO"),
                f"{fit.micro}{' ckpt' if fit.checkpointing else ''}",
                f"{notice.total_s:.0f} of {NOTICE_S:.0f} s{'' if notice.fits else ' NO'}" if notice else "-",
            )
        )
    heads = ("type", "phase", "step ms", "tok/s", "MFU", "GPU memory", "micro", "save + upload")
    yield from _table(heads, rows, right=(2, 3, 4))
    yield from _wrap(
        f"Speed: {bill.chosen.runtime.basis}{'' if bill.calibrated else ', uncalibrated'}. Save + upload: from a notice"
        " to a published checkpoint, one step and hashing included."
    )
    for fit in bill.fits:
        if not fit.fits:
            yield from _wrap(f"{fit.type}, phase {fit.phase} does not fit: {fit.why}. Nearest: {fit.nearest}.")


def _rest(bill: Bill, today: date | None) -> Iterator[str]:
    cap, kept = bill.cap, bill.kept
    chance = f"{cap.probability:.0%}" if cap.probability >= 0.005 or not cap.probability else "under 1%"
    yield from _wrap(
        f"Cap: {cap.max_usd} USD and {cap.max_hours} node-hours; {cap.first} stops the run at {cap.at_hours:.2f}"
        f" node-hours; probability {chance}."
    )
    yield from _wrap(f"Kept after destroy: {kept.what}; {kept.usd_per_month:.2f} USD a month until then.")
    days = [line.as_of for line in bill.lines]
    age = ""
    if today is not None:
        old = (today - bill.chosen.price.as_of).days
        age = f"; the compute price is {old} days old" + (", refresh before trusting it" if old > _STALE_DAYS else "")
    yield from _wrap(f"Prices: {min(days)} to {max(days)}{age}. Spot prices move; zone ids are not zone names.")
    yield from _wrap(f"Not priced: {'; '.join(bill.not_priced)}.")
    for warning in bill.warnings:
        yield from _wrap(f"Warning: {warning}")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for row in (heads, ["-" * width for width in widths], *rows):
        cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        yield "  ".join(cells).rstrip()


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
