"""No text in a picture overlaps another, whatever the picture shows. matplotlib's boxes show it, without a browser."""

from __future__ import annotations

import itertools
import json
import random
import re
import xml.etree.ElementTree as ET
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from gpufleet.infra.bill.side import Quantiles
from gpufleet.infra.compare import plot
from gpufleet.infra.report import band, charts
from gpufleet.infra.report.charts import Mark, Series
from gpufleet.job.contract.receipt import parse
from tests.receipt_tree import receipt

DRAWN = 5  # pictures of each kind


@pytest.fixture(autouse=True)
def overlaps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts that lie over each other, or are cut off, in any figure that is written as SVG."""
    found, boxes = list[str](), dict[int, tuple[str, Bbox]]()
    draw, save = Text.draw, Figure.savefig

    def drawn(text: Text, renderer: Any) -> None:
        draw(text, renderer)
        if text.get_text().strip() and text.get_visible():
            boxes[id(text)] = (text.get_text(), text.get_window_extent(renderer).padded(-1))

    def saved(figure: Figure, *args: Any, **options: Any) -> None:
        boxes.clear()
        save(figure, *args, **options)
        width, height = 72 * figure.get_size_inches()
        for name, box in boxes.values():
            if not (box.x0 >= -2 and box.y0 >= -2 and box.x1 <= width + 2 and box.y1 <= height + 2):
                found.append(f"{name} is cut off")
        pairs = itertools.combinations(boxes.values(), 2)
        found.extend(f"{name} / {other}" for (name, box), (other, beside) in pairs if box.overlaps(beside))

    monkeypatch.setattr(Text, "draw", drawn)
    monkeypatch.setattr(Figure, "savefig", saved)
    return found


def test_two_texts_at_one_place_are_found(overlaps: list[str], tmp_path: Path) -> None:
    figure = Figure()
    figure.text(0.5, 0.5, "one")
    figure.text(0.51, 0.5, "two")
    figure.savefig(tmp_path / "x.svg")
    assert overlaps == ["one / two"]


@pytest.mark.parametrize("seed", range(DRAWN))
def test_a_waterfall_s_values_stand_apart(seed: int, overlaps: list[str]) -> None:
    draw = random.Random(seed)
    names = ("price", "runtime", "interruptions", "other")
    changes = {name: draw.choice((0.0, draw.uniform(-0.3, 0.6), draw.uniform(-3, 9))) for name in names}
    bill = draw.uniform(3, 20)
    text = charts.steps_to(("bill", bill), changes, ("receipt", bill + sum(changes.values())), unit="USD", digits=2)
    assert f"{bill:.2f}" in text
    assert overlaps == []


def test_a_waterfall_without_a_cause_to_be_seen_is_left_out() -> None:
    assert charts.steps_to(("bill", 1.0), {"price": 0.001}, ("receipt", 1.001), unit="USD", digits=2) == ""


@pytest.mark.parametrize("seed", range(DRAWN))
def test_lines_are_named_apart(seed: int, overlaps: list[str]) -> None:
    draw = random.Random(seed)
    ends = [draw.choice((1.0, draw.uniform(0.99, 1.01), draw.uniform(0, 5))) for _ in range(draw.randint(1, 5))]
    series = [
        Series(name=f"phase {at}", points=[(0, 5.0), (100, end)], colour="blue") for at, end in enumerate(ends, start=1)
    ]
    marks = [Mark(at=draw.uniform(0, 100), name="node gone", colour="red")]
    text = charts.lines(series, x="step", y="loss", marks=marks, level=(draw.uniform(0, 5), "limits.max_usd"))
    assert (">phase 1<" in text) is (len(ends) > 1)
    assert overlaps == []


@pytest.mark.parametrize("seed", range(DRAWN))
def test_options_stand_apart(seed: int, overlaps: list[str]) -> None:
    draw = random.Random(seed)
    least, spread = 10 ** draw.uniform(-1.5, 3), 10 ** draw.uniform(0.1, 2.5)
    rows: list[Any] = [Option(draw, least, spread) for _ in range(draw.randint(1, 60))]
    rows.sort(key=lambda row: row.usd.p50)
    edge = [
        row for row in rows if row.wall_hours.p50 <= min(each.wall_hours.p50 for each in rows[: rows.index(row) + 1])
    ]
    picture = plot.drawn(rows, edge, "mine: cost against time in us-east-2", ".svg").decode()
    with charts.style():
        figure = charts.figure(plot.height(rows, edge))
        shades = {"spot": charts.SENTINELS["blue"], "on-demand": charts.SENTINELS["orange"]}
        plot.fill(figure, rows, edge, shades)
        charts.svg(figure, "options")
    assert overlaps == []
    assert not re.search(r">\d+e[-+]?\d+<", picture)


class Option:
    """What a picture reads of a row."""

    ranked = True

    def __init__(self, draw: random.Random, least: float, spread: float) -> None:
        self.place = draw.choice(("g6.xlarge", "p6-b200.48xlarge", "8 x p5en.48xlarge"))
        self.capacity = draw.choice(("spot", "on-demand"))
        self.usd, self.wall_hours = (quantiles(draw, least * spread ** draw.random()) for _ in range(2))


def quantiles(draw: random.Random, middle: float) -> Quantiles:
    low, high = middle * draw.uniform(0.5, 1), middle * draw.uniform(1, 3)
    return Quantiles(p10=Decimal(low), p50=Decimal(middle), p90=Decimal(high), mean=Decimal(middle))


def test_the_figures_of_a_range_stand_apart_and_within_it() -> None:
    for seed in range(300):
        check_range(random.Random(seed))


def check_range(draw: random.Random) -> None:
    usd = quantiles(draw, 10 ** draw.uniform(-2, 4))
    actual = usd.p50 * Decimal(draw.choice((0.0, draw.uniform(0.5, 2), draw.uniform(2, 40))))
    root = ET.fromstring(band.svg(usd, actual))
    boxes = []
    for text in root.iter("text"):
        assert text.text
        width, x, y = 5.2 * len(text.text), float(text.attrib["x"]), float(text.attrib["y"])
        left = x - {"start": 0, "middle": width / 2, "end": width}[text.attrib["text-anchor"]]
        boxes.append((text.text, left, left + width, y - 8, y + 2))
    assert [box for box in boxes if not (box[1] >= 0 and box[2] <= band.WIDTH)] == []
    for (_, l1, r1, t1, b1), (_, l2, r2, t2, b2) in itertools.combinations(boxes, 2):
        assert min(r1, r2) <= max(l1, l2) or min(b1, b2) <= max(t1, t2)
    dot = root.find("circle")
    assert dot is not None
    inside, (rect,) = usd.p10 < actual < usd.p90, root.iter("rect")
    left = float(rect.attrib["x"])
    assert (left <= float(dot.attrib["cx"]) <= left + float(rect.attrib["width"])) is inside


def test_in_characters_the_receipt_stands_where_it_is_in_the_range() -> None:
    def drawn(actual: str) -> str:
        return band.characters(parse(json.dumps(receipt(actual)).encode()))

    assert drawn("1.10") == "        [=|o=]       "
    assert drawn("0.50") == "     o  [=|==]       "
    assert drawn("7.00") == "        [=|==]      >"
