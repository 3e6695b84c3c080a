"""The page of a run: its content, for whole and for damaged files, and its look in a browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from gpufleet.infra.commands import report as command
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.report import charts, run
from gpufleet.job.contract import metrics
from gpufleet.job.text import stamp
from tests.receipt_tree import node, receipt

BEGAN = 1_790_000_000.0
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def results(folder: Path, *, steps: int = 200, beats: int = 50) -> Path:
    """The results of a run with three nodes: AWS took one with a notice, one without, and the third finished."""
    exits = [{"code": 75, "reason": "notice", "notice": True, "at": stamp(moment(0.45))}, None]
    exits.append({"code": 0, "reason": "finished", "notice": False, "at": stamp(moment(3.0))})
    nodes = [
        {**node(f"i-{at}", seconds="1800.000", interrupted=at < 3), "exit": left, "last_step": at * 60}
        | {"started_s": "120.000", "usd": "0.3333"}
        for at, left in enumerate(exits, start=1)
    ]
    phase = {"name": "main", "step_ms": {"median": 120.0, "q1": 118.0, "q3": 125.0}, "memory_gb": None}
    tree = receipt(attempts=nodes, detail="<script>alert(1)</script>", measured={"phases": [phase]})
    for name in ("attempts", "heartbeat"):
        (folder / name).mkdir(parents=True)
    (folder / "receipt.json").write_text(json.dumps(tree))
    bill = {
        "cap": {"max_usd": "2.00"},
        "phases": [{"phase": "main", "step_ms": 100.0, "memory_gb": 12.5}],
        "basis": "the roofline",
        "warnings": ["uncalibrated"],
        "interruptions": {"p10": "0.0000", "p50": "2.0000", "p90": "9.0000", "mean": "19.2400"},
        "cheaper": {"options": [option("p6-b200.48xlarge", "0.50")]},
    }
    (folder / "run.json").write_text(json.dumps({"estimate": bill}))
    with (folder / "metrics.jsonl").open("wb") as file:
        for step in range(1, steps + 1):
            saved = [{"step": step, "reason": "timed", "bytes": 10, "blocked_s": 0.5}] if step % 50 == 0 else None
            line = {"ts": BEGAN + 10 * step, "phase": "main", "step": step, "loss": 5 / step, "step_ms": 120.0}
            file.write(metrics.write({**line, "tok_s": 1000.0, "gpu_util": 98.0, "saves": saved}))
    for at in range(3):
        record = {"instance": f"i-{at + 1}", "launched_at": stamp(moment(at * 0.6))}
        (folder / "attempts" / f"i-{at + 1}.json").write_text(json.dumps(record))
        shares = [number / beats for number in range(beats)]
        said = [{"ts": stamp(moment(at * 0.6 + share)), "spent_usd": f"{at + share}"} for share in shares]
        (folder / "heartbeat" / f"i-{at + 1}.jsonl").write_text("\n".join(map(json.dumps, said)) + "\n{torn")
    return folder


def option(type_: str, usd: str) -> dict[str, Any]:
    shares = {"p10": usd, "p50": usd, "p90": usd, "mean": usd}
    return {"type": type_, "capacity": "spot", "gpus": "8 x B200", "gpus_used": 8, "usd": shares, "hours": shares}


def moment(hours: float) -> datetime:
    return datetime.fromtimestamp(BEGAN + hours * 3600, UTC)


class Seen(HTMLParser):
    """Collects captions, headings, cells, and every resource that a page would load from elsewhere."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts, self.loads, self.tags = list[str](), list[str](), list[str]()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attrs if name in {"src", "href", "xlink:href"}]

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


def test_the_page_has_what_was_said_and_what_came_of_it(tmp_path: Path) -> None:
    page = run.html(run.read(results(tmp_path / "r1")))
    seen = Seen(page)
    for text in ("small-growth, run r1", "1.10 USD", "compute", "i-2", "gone without a word", "notice (exit 75)"):
        assert text in seen.texts
    assert {"What it cost, in the range of the bill", "receipt 1.10 USD", "0.80", "1.30"} <= {*seen.texts}
    assert {"Why the receipt is not the bill", "+0.10", "Dollars spent", "Loss", "Nodes over time"} <= {*seen.texts}
    assert {"100.00", "120.00", "+20%", "12.50", "The bill stood on: the roofline."} <= {*seen.texts}
    assert "p6-b200.48xlarge spot, 8 x B200" in seen.texts
    assert "GPU memory, peak" not in seen.texts  # the files say nothing about this
    assert {"waiting for a node", "after a notice", "gone", "save", "limits.max_usd", "node gone without a notice"} <= {
        *seen.texts
    }
    assert "bill 2; 0 with a notice, 0 without" in seen.texts  # the median, because few runs make the mean of 19


def test_a_chart_that_would_be_a_straight_line_is_a_sentence(tmp_path: Path) -> None:
    seen = Seen(run.html(run.read(results(tmp_path / "r1"))))
    same = "The same at every step: time of a step 120 ms, throughput 1000 tokens/s, GPU use 98 %."
    assert {same, "A save kept training waiting for 0.5 s at most."} <= {*seen.texts}
    assert not {"Time of a step", "Throughput", "GPU use", "How long each save delayed training"} & {*seen.texts}
    lines = (tmp_path / "r1" / "metrics.jsonl").read_text().splitlines()
    slow = [line.replace('"step_ms": 120.0', f'"step_ms": {120 + at}') for at, line in enumerate(lines)]
    assert slow != lines
    (tmp_path / "r1" / "metrics.jsonl").write_text("\n".join(slow) + "\n")
    assert "Time of a step" in Seen(run.html(run.read(tmp_path / "r1"))).texts


def test_a_run_that_printed_nothing_and_saved_at_once_has_neither_charts_of_it_nor_their_key(tmp_path: Path) -> None:
    folder = results(tmp_path / "r1")
    line = {"ts": BEGAN + 60, "phase": "train", "step": 1}
    saved = {"step": 1, "reason": "timed", "bytes": 10, "blocked_s": 0.0}
    (folder / "metrics.jsonl").write_bytes(metrics.write({**line, "saves": [saved]}))
    texts = Seen(run.html(run.read(folder))).texts
    assert not {"Training", "Loss", "node gone without a notice"} & {*texts}
    assert "A save kept training waiting for less than 0.1 s." in texts


def test_an_error_of_the_driver_is_marked_at_its_step(tmp_path: Path) -> None:
    folder = results(tmp_path / "r1")
    with (folder / "metrics.jsonl").open("ab") as file:
        line = {"ts": BEGAN + 3000, "phase": "main", "step": 201, "loss": 0.1, "step_ms": 120.0, "gpu_xid": 79}
        file.write(metrics.write(line))
    assert "Xid 79, an error of the GPU driver" in Seen(run.html(run.read(folder))).texts


def test_a_rehearsals_page_holds_no_machine_against_the_bill(tmp_path: Path) -> None:
    folder = results(tmp_path / "r1")
    tree = json.loads((folder / "receipt.json").read_text())
    (folder / "receipt.json").write_text(json.dumps({**tree, "device": "cpu"}))
    page = run.html(run.read(folder))
    seen = Seen(page)
    assert seen.texts.index("interruptions") < seen.texts.index(
        "nothing"
    )  # the page says first what a rehearsal is for, then that it is free
    assert "rehearsal (<script>alert(1)</script>)" in " ".join(seen.texts)
    assert seen.texts.index("Nodes") < seen.texts.index("Dollars")
    assert any(text.startswith("Nothing was paid.") for text in seen.texts)
    for alarm in (
        "above p90",
        "range of the bill",
        "Why the receipt is not the bill",
        "Predicted and measured",
        "+20%",
    ):
        assert alarm not in page


def test_nothing_is_loaded_run_or_taken_for_html(tmp_path: Path) -> None:
    page = run.html(run.read(results(tmp_path / "r1")))
    seen = Seen(page)
    assert {load for load in seen.loads if not load.startswith("#")} == {"data:,"}
    assert "script" not in seen.tags
    assert "&lt;script&gt;alert(1)" in page
    assert not re.search(r"url\((?!#)|@import", page)
    assert not any(sentinel in page for sentinel in charts.SENTINELS.values())


def test_a_day_of_lines_stays_small(tmp_path: Path) -> None:
    page = run.html(run.read(results(tmp_path / "r1", steps=20_000, beats=2_000)))
    assert len(page.encode()) < 2_000_000


def test_a_receipt_alone_is_a_page(tmp_path: Path) -> None:
    (tmp_path / "receipt.json").write_text(json.dumps(receipt()))
    (tmp_path / "run.json").write_text("{torn")
    seen = Seen(run.html(run.read(tmp_path)))
    assert "compute" in seen.texts
    assert "Loss" not in seen.texts


def test_no_receipt_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(GpufleetError, match=r"there is no receipt\.json; `gpufleet results STACK` downloads"):
        run.read(tmp_path)
    (tmp_path / "receipt.json").write_text("{")
    with pytest.raises(GpufleetError, match=r"receipt\.json cannot be read"):
        run.read(tmp_path)


def test_lines_keep_their_ends_and_their_middle() -> None:
    points = [(float(at), float(at % 7)) for at in range(10_000)]
    found = charts.thinned(points)
    assert len(found) <= charts.POINTS
    assert (found[0], found[-1]) == (points[0], points[-1])
    assert set(found) <= set(points)
    assert charts.thinned(points[:5]) == points[:5]


def test_the_newer_of_results_and_rehearsal_is_taken(tmp_path: Path) -> None:
    with pytest.raises(GpufleetError, match="no results of small, run r1, here: `gpufleet results small` downloads"):
        command._newest(tmp_path, "small", "r1")
    older = results(tmp_path / "rehearsals" / "small" / "r1" / "results")
    assert command._newest(tmp_path, "small", "r1") == older
    newer = results(tmp_path / "results" / "small" / "r1")
    later = (newer / "receipt.json").stat().st_mtime + 60
    os.utime(newer / "receipt.json", (later, later))
    assert command._newest(tmp_path, "small", "r1") == newer


LOOK = """<script>
addEventListener('error', e => document.title += ' ERROR ' + e.message);
addEventListener('load', () => {
  const seen = {wide: document.documentElement.scrollWidth - innerWidth, low: [], small: [], over: []};
  const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(v => { v /= 255;
    return v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; }); return .2126 * r + .7152 * g + .0722 * b; };
  const back = light(getComputedStyle(document.body).backgroundColor);
  for (const e of document.querySelectorAll('h1, h2, p, td, th, small, b, svg text')) {
    const style = getComputedStyle(e), own = light(e.namespaceURI.includes('svg') ? style.fill : style.color);
    const ratio = (Math.max(own, back) + .05) / (Math.min(own, back) + .05);
    if (ratio < 4.5) seen.low.push(e.textContent.slice(0, 20) + ' ' + ratio.toFixed(1));
    const scale = e.ownerSVGElement ? e.ownerSVGElement.getScreenCTM().a : 1;
    if (parseFloat(style.fontSize) * scale < 7.5) seen.small.push(e.textContent.slice(0, 20));
  }
  for (const svg of document.querySelectorAll('svg')) {
    const boxes = [...svg.querySelectorAll('text')].map(e => [e.textContent, e.getBoundingClientRect()]);
    boxes.forEach(([a, p], at) => boxes.slice(at + 1).forEach(([b, q]) => {
      const over = Math.min(p.right, q.right) - Math.max(p.left, q.left) > 1
        && Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) > 1;
      if (over && a.trim() && b.trim()) seen.over.push(a + ' / ' + b);
    }));
  }
  seen.back = back;
  document.body.innerHTML = '<pre id="seen">' + JSON.stringify(seen) + '</pre>';
});
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH")
@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_shows_it(tmp_path: Path, width: int, dark: bool) -> None:
    page = run.html(run.read(results(tmp_path / "r1"))).replace("</body>", LOOK)
    (tmp_path / "page.html").write_text(page)
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--dump-dom"),
            *("--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=2000"),
            *(f"--window-size={width},2000", f"--blink-settings=preferredColorScheme={int(not dark)}"),
            (tmp_path / "page.html").as_uri(),
        ],
        capture_output=True,
        text=True,
    )
    assert "CONSOLE" not in done.stderr
    found = re.search(r'<pre id="seen">(.*)</pre>', done.stdout)
    assert found, done.stderr
    seen = json.loads(found[1])
    assert seen["wide"] <= 0
    assert (seen["low"], seen["small"], seen["over"]) == ([], [], [])
    assert (seen["back"] < 0.1) is dark


def test_without_matplotlib_there_is_a_page_without_charts_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    seen = Seen(run.html(run.read(results(tmp_path / "r1"))))
    assert "Its charts need matplotlib: pip install 'gpufleet[report]'" in seen.texts
    assert seen.tags.count("svg") == 1  # the picture of the range, which needs no matplotlib
    assert {"compute", "gone without a word"} <= {*seen.texts}
