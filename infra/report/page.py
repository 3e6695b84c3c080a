"""HTML: a page of sections with tables and charts. Every text is escaped; a page loads no other files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from gpufleet.infra.show import html
from gpufleet.infra.show.sheet import Sheet

# Names of the colours of charts. The page defines each for light and dark displays.
COLOURS = {
    "ink": ("#1f2328", "#e6edf3"),
    "faint": ("#59636e", "#9198a1"),
    "line": ("#d1d9e0", "#3d444d"),
    "back": ("#ffffff", "#0d1117"),
    "soft": ("#f6f8fa", "#151b23"),
    "blue": ("#0969da", "#4493f8"),
    "orange": ("#bc4c00", "#db8f55"),
    "green": ("#1a7f37", "#3fb950"),
    "purple": ("#8250df", "#ab7df8"),
    "red": ("#cf222e", "#f85149"),
    "grey": ("#8c959f", "#656c76"),
}

_STYLE = """
body{margin:0 auto;max-width:1400px;padding:1rem;background:var(--back);color:var(--ink);
font:15px/1.5 system-ui,sans-serif;box-sizing:border-box}
h1{font-size:1.5rem;margin:.5rem 0 0}h2{font-size:1.15rem;margin:2rem 0 .5rem}p{margin:.4rem 0;max-width:75ch}
.faint,small{color:var(--faint)}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:.75rem;margin:1rem 0}
.figures div{background:var(--soft);border:1px solid var(--line);border-radius:6px;padding:.6rem .8rem}
.figures b{display:block;font-size:1.25rem;font-variant-numeric:tabular-nums}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,420px),1fr));gap:1rem}
figure{margin:0}figure svg{display:block;width:100%;height:auto}figcaption{font-weight:600;margin-bottom:.2rem}
.wide{overflow-x:auto;background:linear-gradient(90deg,var(--back) 50%,#0000) 0/3rem 100% no-repeat local,
linear-gradient(270deg,var(--back) 50%,#0000) 100%/3rem 100% no-repeat local,
linear-gradient(90deg,var(--line),#0000) 0/.8rem 100% no-repeat scroll,
linear-gradient(270deg,var(--line),#0000) 100%/.8rem 100% no-repeat scroll}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.9rem}
th,td{text-align:left;padding:.3rem .7rem;border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--faint);font-weight:600}td.number,th.number{text-align:right}
td:not(:last-child){white-space:nowrap}td:not(.number):last-child{min-width:9rem}
.charts figure{max-width:760px}.charts figure:only-child{grid-column:1/-1}tr.total td{font-weight:600}
.key{margin:.2rem 0 .6rem;display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;max-width:none}
.key i{display:inline-block;width:.8rem;height:.8rem;margin-right:.35rem;vertical-align:-.1rem}
@media print{body{max-width:none;padding:0;font-size:9pt}figure,tr,.figures{break-inside:avoid}h2{break-after:avoid}
.charts{grid-template-columns:1fr 1fr}.figures{grid-template-columns:repeat(auto-fit,minmax(90px,1fr))}
.wide{overflow:visible;background:none}.figures b{font-size:11pt}
td:not(:last-child){white-space:normal}*{print-color-adjust:exact}}
"""


def page(title: str, below: str, parts: Iterable[str]) -> str:
    """The whole document. `below`: the line under the title."""
    day, night = ("".join(f"--{name}:{shades[number]};" for name, shades in COLOURS.items()) for number in range(2))
    colours = f":root{{color-scheme:light dark;{day}}}@media(prefers-color-scheme:dark){{:root{{{night}}}}}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">\n'
        f"<style>{colours}{_STYLE}</style></head>\n"
        f'<body><h1>{escape(title)}</h1><p class="faint">{escape(below)}</p>\n{"".join(parts)}</body></html>\n'
    )


def section(title: str, *parts: str) -> str:
    """A heading with its content; empty if there is no content."""
    inside = "\n".join(part for part in parts if part)
    return f"<section><h2>{escape(title)}</h2>\n{inside}</section>\n" if inside else ""


def figures(rows: Sequence[tuple[str, str, str]]) -> str:
    """The most important numbers: (name, number, comparison)."""
    cells = (
        f'<div><span class="faint">{escape(name)}</span><b>{escape(figure)}</b><small>{escape(beside)}</small></div>'
        for name, figure, beside in rows
    )
    return f'<div class="figures">{"".join(cells)}</div>\n'


def charts(drawn: Iterable[tuple[str, str]]) -> str:
    """The charts, given as pairs (caption, SVG), side by side if the window is wide."""
    cells = [f"<figure><figcaption>{escape(caption)}</figcaption>{svg}</figure>" for caption, svg in drawn if svg]
    return f'<div class="charts">{"".join(cells)}</div>' if cells else ""


def key(colours: Mapping[str, str]) -> str:
    """The legend of a section's charts; empty if there are no colours."""
    names = "".join(
        f'<span><i style="background:var(--{colour})"></i>{escape(name)}</span>' for name, colour in colours.items()
    )
    return f'<p class="key">{names}</p>' if names else ""


def table(sheet: Sheet, *, total: bool = False) -> str:
    """A table in HTML; empty if it has no rows. If `total`, the last row is the total."""
    return f'<div class="wide">{html.table(sheet, total=total)}</div>' if sheet.rows else ""
