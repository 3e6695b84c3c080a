"""Draws a bill's range as a band from p10 to p90, with a dot for the actual cost, as SVG and in characters."""

from __future__ import annotations

from decimal import Decimal

from gpufleet.infra.bill.answer import amount_within, figures_within
from gpufleet.infra.bill.side import Quantiles
from gpufleet.job.contract.receipt import Receipt

WIDTH, HEIGHT, LEFT, RIGHT = 374, 60, 48, 326  # the drawing is as wide as the charts; its scale goes from LEFT to RIGHT
CHARACTERS = 21
SCALE = f"0 to 2x the bill{' ' * (CHARACTERS - 16)}"  # the heading of `characters`


def svg(usd: Quantiles, actual: Decimal | None = None) -> str:
    """The band on a scale from 0 USD, with a dot at `actual`, the receipt's amount. The drawing needs no matplotlib.
    The drawing has the colours of infra.report.page; on other pages, which do not define these, the drawing has the
    light colours.
    """
    cost = usd.p50 if actual is None else actual
    most = max(usd.p90, cost, Decimal("0.0001"))
    low, middle, high, dot = (
        LEFT + float(value / most) * (RIGHT - LEFT) for value in (usd.p10, usd.p50, usd.p90, cost)
    )
    p10, p50, p90 = figures_within(usd)
    parts = [
        f'<path d="M{LEFT} 24H{RIGHT}" stroke="var(--line,#d1d9e0)"/>',
        f'<rect x="{low:.1f}" y="18" width="{max(high - low, 2):.1f}" height="12" rx="2" fill="var(--blue,#0969da)"'
        ' fill-opacity=".4"/>',
        f'<path d="M{middle:.1f} 15V33" stroke="var(--blue,#0969da)" stroke-width="2"/>',
        _text(LEFT - 4, 27, "0", "end"),
        _text(low - 2, 43, p10, "end"),
        _text(high + 2, 43, p90, "start"),
        _text(middle, 56, f"bill {p50} USD"),
    ]
    if actual is not None:
        parts.append(f'<circle cx="{dot:.1f}" cy="24" r="5" fill="var(--purple,#8250df)" stroke="var(--back,#fff)"/>')
        parts.append(_text(dot, 10, f"receipt {amount_within(actual, usd)} USD"))
    return (
        f'<svg role="img" aria-label="range of the bill, {p10} to {p90} USD" viewBox="0 0 {WIDTH} {HEIGHT}"'
        f' style="width:100%;max-width:760px;font:9px system-ui,sans-serif">{"".join(parts)}</svg>'
    )


def of_receipt(receipt: Receipt) -> Quantiles:
    """The range of the bill that a receipt contains."""
    return Quantiles(p10=receipt.p10, p50=receipt.estimate, p90=receipt.p90, mean=receipt.estimate)


def characters(receipt: Receipt) -> str:
    """The band on a scale from 0 to twice the bill, so that rows of runs are aligned: `[` is at p10, `|` at p50, `]` at
    p90, `o` at the actual cost, and `>` at the end if the cost is beyond the scale.
    """
    usd, actual, drawn = of_receipt(receipt), receipt.actual, [" "] * CHARACTERS

    def column(value: Decimal) -> int:
        return min(CHARACTERS - 1, round(value / usd.p50 * (CHARACTERS // 2)))

    low, high = column(usd.p10), column(usd.p90)
    drawn[low : high + 1] = "=" * (high + 1 - low)
    drawn[low], drawn[high], drawn[column(usd.p50)] = "[", "]", "|"
    drawn[column(actual)] = "o" if actual <= 2 * usd.p50 else ">"
    return "".join(drawn)


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}" fill="currentColor">{text}</text>'
