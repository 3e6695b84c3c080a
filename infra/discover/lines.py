"""Turns the lines in which a script prints its progress into regular expressions with the groups of job.progress."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import partial

from gpufleet.infra.discover.expressions import Piece, Values, braced, joined, percented, pieces, unit
from gpufleet.infra.discover.reach import Reach, Site, called, dotted, walk
from gpufleet.infra.discover.saves import loop_unit
from gpufleet.infra.discover.settings import literal

NUMBER = r"(?:[-+]?[\d.]+(?:e[-+]?\d+)?|nan|[-+]?inf)"
COUNTED = ("step", "epoch", "batch", "total", "batches")
BAR = r"\d+%\|[^|]*\| *(?P<{count}>\d+)/(?P<{total}>\d+) \["
METER = r" *\[ *(?P<{count}>\d+)/(?P<{total}>\d+)\]"
_METERS = {"log_every": (2, "header"), "ProgressMeter": (2, "prefix")}  # where a meter is given the text before it
_TELLS = ("set_description", "set_description_str", "set_postfix")  # methods that change the text of a bar
_TOTALS = {"step": "total", "batch": "batches"}
_PRINTS = re.compile(r"\w*print\w*|info|log|echo|warning|debug|log_(string|info|msg)|logging|set_description")
_PRINTS_ALL = re.compile(r"\w*print\w*")  # print each argument, with blanks between
_BARS = {"tqdm", "trange", "tqdm_notebook", "track"}
_TRAINS = re.compile(r"backward|loss|train_step|\.step\(|training_step|fit\(")
# names of functions that do not train
_NO_TRAINING = re.compile(r"val|eval|test|sample|infer|generat|load|resume|restore|summary")
_NO_PROGRESS = re.compile(
    r"load|resum|restor|sav|checkpoint|best|early|eval|test|skip|start|stop|unable|fail|error|warn|after|retry|merg|profil",
    re.IGNORECASE,
)
_NO_COUNT = re.compile(r"max|total_|\bnum_(?!update|iter)|\bn_|len\(|\blr\b|rate|_per_|/sec|speed|start|loss|time")
_SAVED = re.compile(r"\b(sav(ed|ing)|loaded)\b", re.IGNORECASE)
_OF_ALL = re.compile(r"global|complet|total")  # a step of the whole training
_COUNT_WORDS = re.compile(r"(step|iter|epoch|update|iteration|it)s?\W*$", re.IGNORECASE)  # directly before a number
# For each figure: words that its name, or the text before it, must have, and words that they must not have.
_FIGURES = (
    ("val", re.compile(r"(?=.*(\bval|\btest|eval)).*(loss|perplexity|bpb|ppl)"), re.compile(r"(?!)")),
    ("loss", re.compile(r"loss"), re.compile(r"val\b|valid|eval|best|test|aux")),
)
_TAKES_MS = re.compile(r"dt|time|ms|elapsed|step")


@dataclass(frozen=True, kw_only=True, slots=True)
class PrintedLine:
    """A line that the script prints."""

    regex: str
    where: str
    is_of_training: bool = True  # whether the line is printed in the training loop, not in an evaluation

    @property
    def groups(self) -> frozenset[str]:
        return frozenset(re.findall(r"\(\?P<(\w+)>", self.regex))

    @property
    def counts(self) -> str:
        """What the line counts: steps, epochs, or batches within an epoch."""
        return "step" if "step" in self.groups else "batch" if {"epoch", "batch"} <= self.groups else "epoch"


def find_lines(reach: Reach, values: Values) -> list[PrintedLine]:
    """The printed lines that give a step, an epoch or both. Lines of the training loop come first, among these the
    lines with a loss, and among these the lines that count in the smallest unit.
    """
    lines: dict[str, PrintedLine] = {}
    for site in reach.sites:
        regex = ""
        is_bars_own = site.name == "write" and re.search(r"std(out|err)|tqdm|bar", dotted(site.call.func))
        into = site.keyword("file")
        is_output = into is None or dotted(into) in ("sys.stdout", "sys.stderr")
        if site.call.args and is_output and (_PRINTS.fullmatch(site.name) or is_bars_own):
            regex = _line(_printed(site, values), site, values)
        elif site.name in (*_BARS, *_METERS):
            regex = _bar(site, reach, values)
        if regex:
            names = " ".join((site.scope.file, *(function.name for function in site.scope.functions))).lower()
            names += regex.partition("%")[0].lower() if site.name in _BARS else ""
            line = PrintedLine(regex=regex, where=site.where, is_of_training=not _NO_TRAINING.search(names))
            lines.setdefault(regex, line)
    return sorted(lines.values(), key=partial(_order, reach.entry))


def _order(entry: str, line: PrintedLine) -> tuple[int, ...]:
    fine, groups = {"step": 0, "batch": 1, "epoch": 2}[line.counts], line.groups
    elsewhere = not line.where.startswith(f"{entry}:")
    known = ("loss" not in groups, fine, "val" in groups, elsewhere, -len(groups))
    return (not line.is_of_training, len(groups) < 2, *known)


def _printed(site: Site, values: Values) -> list[Piece]:
    """The pieces of the text that a call prints."""
    first, *more = site.call.args
    is_json = called(first) == "dumps" and isinstance(first, ast.Call) and bool(first.args)
    if is_json and not more:
        first = first.args[0]  # type: ignore[attr-defined]
    if chain := dotted(first):
        bound = (node for node, _ in values.bound(chain, first, site.scope))
        first = next((node for node in bound if isinstance(node, ast.expr) and (pieces(node) or _items(node))), first)
    if items := _items(first):
        # trackers such as wandb.log({...}) print nothing
        return [] if more or site.name == "log" else _of_dictionary(items, '"' if is_json else "'")
    if more and _PRINTS_ALL.fullmatch(site.name):
        return [piece for argument in site.call.args for piece in (" ", *(pieces(argument) or [(argument, "")]))][1:]
    if more and isinstance(text := literal(first), str):  # logging.info("step %d", step)
        return percented(text, more) if "%" in text else braced(text, ast.Call(first, more, []))
    return pieces(first)


def _items(node: ast.AST) -> list[tuple[str, ast.expr]]:
    """The keys and values of a dictionary that the code writes out; empty if a key is no constant text."""
    if isinstance(node, ast.Dict):
        keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
        pairs = list(zip(keys, node.values, strict=True))
    elif called(node) == "dict" and isinstance(node, ast.Call) and not node.args:
        pairs = [(keyword.arg, keyword.value) for keyword in node.keywords]
    else:
        return []
    known = [(key, value) for key, value in pairs if isinstance(key, str)]
    return known if len(known) == len(pairs) else []


def _of_dictionary(items: list[tuple[str, ast.expr]], quote: str) -> list[Piece]:
    """The pieces of a printed dictionary: `{'step': 7, 'loss': 0.5}`, or the same as JSON with the other quote."""
    opening = ["{", *[", "] * (len(items) - 1)]
    return [
        piece
        for before, (key, value) in zip(opening, items, strict=True)
        for piece in (f"{before}{quote}{key}{quote}: ", (value, ""))
    ]


def _line(several: list[Piece], site: Site, values: Values) -> str:
    """The regular expression of one printed line, up to its last useful figure; empty if the line has neither step nor
    epoch.
    """
    text, used, last, says_what = _text(several, site, values)
    has_figure = {"loss", "val", "step_ms"} & set(used)
    is_progress = (has_figure and not _SAVED.search(text)) or (
        (says_what or len(used) > 1) and not _NO_PROGRESS.search(text)
    )
    is_counted = "step" in used or ("epoch" in used and ("batch" not in used or "batches" in used))
    text = re.sub(r"^(\\s\+|\.\*\?)+", "", text[:last])
    is_plain = re.search(r"[A-Za-z\[/:|]", re.sub(r"\(\?P<\w+>[^)]*\)|\\[sd]", "", text)) and "\\n" not in text
    return text if is_progress and is_counted and is_plain else ""


def _text(several: list[Piece], site: Site, values: Values) -> tuple[str, list[str], int, bool]:
    """The regular expression of a printed text, its groups, where the last of them ends, and whether a word before a
    number says what it counts.
    """
    text, used, last, says_what = "", list[str](), 0, False
    several = list(joined(several))
    for before, piece, after in zip(["", *several], several, [*several[1:], ""], strict=False):
        if isinstance(piece, str):
            text += re.sub(r"\s+", r"\\s+", re.sub(r"([.^$*+?{}\[\]|()\\])", r"\\\1", piece))
            continue
        words = before if isinstance(before, str) else ""
        group = _group(piece[0], words, after if isinstance(after, str) else "", used, site, values)
        if group:
            used.append(group)
            says_what = says_what or bool(_COUNT_WORDS.search(words))
            is_padded = re.match(r"[<>^ ]|-?\d", piece[1]) or text[-1:] not in ("", "+")
            text += r"\s*" if is_padded and not text.endswith(r"\s+") else ""
            text += f"(?P<{group}>" + (r"\d+" if group in COUNTED else NUMBER) + ")"
            text += r"(?:\.\d+)?" if group in COUNTED and re.search(r"\.\d+f", piece[1]) else ""
            last = len(text)
        else:
            text += ".*?"
    return text, used, last, says_what


def _group(value: ast.expr | None, before: str, after: str, used: list[str], site: Site, values: Values) -> str:
    """The regular expression's group for a figure, chosen by the figure's name and the words around it; empty if none
    fits.
    """
    if re.search(r"(/|\bof)\s*$", before) and used and used[-1] in ("step", "epoch", "batch"):
        group = _TOTALS.get(used[-1], "")
        return group if group not in used else ""
    named = ast.unparse(value).lower() if value is not None else ""
    near = re.split(r"[,|;]", before.rstrip(" :=|([#").lower())[-1][-24:]
    counted = _counted(value, named, near, "epoch" in used, site, values)
    is_part = "epoch" in used and "batch" not in used and re.match(r"\s*(/|of )", after)
    if (
        is_part
        and not _OF_ALL.search(named)
        and (counted == "step" or (re.search(r"[\[(|] *$", before) and "epoch" not in named))
    ):
        counted = "batch"  # a total: rows, or batches of the epoch
    if counted and counted not in used:
        return counted
    # a meter's newest value and its mean, as of PyTorch's ImageNet example
    words = f"{near} {re.sub(r'[.](val|avg)$', '', named)}"
    for group, wanted, unwanted in _FIGURES:
        if group not in used and wanted.search(words) and not unwanted.search(words):
            return group
    is_step_ms = re.match(r"\s*ms\b", after) and _TAKES_MS.search(words) and not re.search("total|training", words)
    return "step_ms" if is_step_ms and "step_ms" not in used else ""


def _counted(value: ast.expr | None, named: str, near: str, in_epoch: bool, site: Site, values: Values) -> str:
    """What a printed number counts, read from its name, or else from the loop that counts it; empty if not known."""
    plain = re.sub(r"\s*[-+]\s*\d+|\b(int|str)\(|\)", "", named).strip("() ")
    is_setting = isinstance(value, ast.Attribute) and dotted(value.value) != "self" and values.settings.find(value.attr)
    counted: str | None = None
    if re.fullmatch(r"[\w.]+", plain) and not is_setting and not _NO_COUNT.search(named):
        counted = unit(plain)
    loops = [node for node in site.around if isinstance(node, ast.For)]
    if isinstance(value, ast.Name):
        if any(called(node) == "len" for node, _ in values.bound(value.id, value, site.scope)):
            return ""  # as many as there are
        own = [loop for loop in loops if value.id in (n.id for n in walk(loop.target) if isinstance(n, ast.Name))]
        kind = values.kinds(value, site.scope) if counted is None and own else None
        counted = counted or ("epoch" if kind == "step" and near.strip() == "epoch" else kind)
        anew = [loop for loop in own if not _goes_on(loop)]
        if counted == "step" and in_epoch and any(loop_unit(values, loop, site.scope) == "batch" for loop in anew):
            counted = "batch"
    return counted or ""


def _goes_on(loop: ast.For) -> bool:
    """Whether the loop counts on from epoch to epoch: `for step, batch in enumerate(loader, epoch * len(loader))`."""
    if called(loop.iter) != "enumerate" or not isinstance(loop.iter, ast.Call):
        return False
    starts = [*loop.iter.args[1:], *(keyword.value for keyword in loop.iter.keywords)]
    return any(not isinstance(start, ast.Constant) for start in starts)


def _bar(site: Site, reach: Reach, values: Values) -> str:
    """The pattern of a progress bar, or of the like of DETR's MetricLogger and PyTorch's ProgressMeter: over steps or
    epochs, or over batches if the text before it names the epoch.
    """
    loop = next(
        (
            statement
            for statement in reversed(site.around)
            if isinstance(statement, ast.For) and site.call in walk(statement.iter)
        ),
        None,
    )
    body = loop or (site.scope.functions[-1] if site.scope.functions else site.call)
    ranges = [node for node in walk(site.call) if isinstance(node, ast.Call) and called(node) in ("range", "trange")]
    total, over = site.keyword("total"), site.argument(0, "iterable")
    count = loop_unit(values, loop, site.scope) if loop is not None else None
    if count is None and over is None and total is not None:
        count = "step" if re.search(r"step|iter", ast.unparse(total).lower()) else None
    if count is None and ranges and ranges[0].args:
        count = unit(ast.unparse(ranges[0].args[-1]).replace("max_", ""))
    meter = _METERS.get(site.name)
    beside = [other for name in _TELLS for other in reach.by_name.get(name, []) if _is_beside(other, site)]
    descriptions = [other.argument(0, "desc") for other in beside if other.name != "set_postfix"]
    words = site.argument(*meter) if meter else next(iter(descriptions), site.keyword("desc"))
    several = (
        [words, *(node for node, _ in values.bound(dotted(words), words, site.scope))] if words is not None else []
    )
    prefix, used, _, _ = _text(next(filter(None, map(pieces, several)), []), site, values)
    if meter or count is None:
        count = "batch" if "epoch" in used else "step" if meter and prefix else None
    wrong = count is None or count in used or (count == "batch" and "epoch" not in used)
    if wrong or not _TRAINS.search(ast.unparse(body)):
        return ""
    counted = (METER if meter else BAR).format(count=count, total=_TOTALS.get(str(count), "x"))
    posted = " ".join(ast.unparse(other.call) for other in beside if other.name == "set_postfix")
    key = re.search(r"['\"( ](?!\w*(?:val|test))(\w*[Ll]oss\w*)['\"]?(?:=|: )", posted)
    name = r"[Ll]oss:? +" if meter else rf"\b{key[1]}=" if key is not None else ""
    loss = f"(?:.*?{name}(?P<loss>{NUMBER}))?" if name and "loss" not in used else ""
    start = "" if meter else ":?\\s*" if prefix else r"^\s*"
    return prefix + start + counted.replace("(?P<x>", "(?:") + loss


def _is_beside(other: Site, site: Site) -> bool:
    return (other.scope.file, other.scope.functions) == (site.scope.file, site.scope.functions)
