"""The lines that a script prints of its progress, as regular expressions with the groups that job.progress names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from gpufleet.infra.discover.reach import Reach, Site, called, dotted, walk
from gpufleet.infra.discover.saves import loop_unit
from gpufleet.infra.discover.settings import literal
from gpufleet.infra.discover.values import Values, loop_range, unit

NUMBER = r"(?:[-+]?[\d.]+(?:e[-+]?\d+)?|nan|[-+]?inf)"
COUNTED = ("step", "epoch", "batch", "total", "batches")
_PRINTERS = {
    "print",
    "print0",
    "print_rank_0",
    "rank0_print",
    "master_print",
    "info",
    "log",
    "write",
    "echo",
    "warning",
    "debug",
    "printf",
    "log_string",
    "logging",
    "set_description",
    "printlog",
    "print_log",
    "log_info",
    "log_msg",
}
_TRAINS = re.compile(r"backward|loss|train_step|\.step\(|training_step|fit\(")
BAR = r"\d+%\|[^|]*\| *(?P<{count}>\d+)/(?P<{total}>\d+) \["


@dataclass(frozen=True, kw_only=True, slots=True)
class PrintedLine:
    """A line that the script prints."""

    regex: str
    groups: frozenset[str]
    where: str
    is_of_training: bool = True  # it stands where the training goes round, not an evaluation

    @property
    def counts(self) -> str:
        """What its number counts: step, epoch, or batch, which counts both."""
        return "step" if "step" in self.groups else "batch" if {"epoch", "batch"} <= self.groups else "epoch"


_NO_PROGRESS = re.compile(
    r"load|resum|restor|sav|checkpoint|best|early|eval|test|skip|start|stop|unable|fail|error|warn|after|retry|merg|profil",
    re.IGNORECASE,
)
_COUNT_WORDS = re.compile(r"(step|iter|epoch|update|iteration|it)s?\W*$", re.IGNORECASE)  # before a number alone
_MEANS = {"loss", "val", "step_ms"}  # what makes a line with a number one of the training's progress
Piece = str | tuple[ast.expr | None, str]  # a text, or a value with its format


def find_lines(reach: Reach, values: Values) -> list[PrintedLine]:
    """Those that tell a step, an epoch or both, the best first: of the training, with a loss, of the finest count."""
    found: dict[str, PrintedLine] = {}
    for site in reach.sites:
        name = called(site.call)
        is_file = name == "write" and not re.search(r"std(out|err)|tqdm|bar", dotted(site.call.func))
        if name in _PRINTERS and site.call.args and not is_file:
            for pieces in _pieces(site):
                if line := _line(pieces, site, values):
                    found.setdefault(line.regex, line)
        elif name in ("tqdm", "trange", "tqdm_notebook", "track") and (line := _bar(site, values)):
            found.setdefault(line.regex, line)
    return sorted(found.values(), key=_order)


def _order(line: PrintedLine) -> tuple[int, ...]:
    fine = {"step": 0, "batch": 1, "epoch": 2}[line.counts]
    alone = len(line.groups) < 2
    return (not line.is_of_training, alone, "loss" not in line.groups, fine, "val" in line.groups, -len(line.groups))


def _pieces(site: Site) -> Iterator[list[Piece]]:
    """What a call prints, in pieces, for each form that the text may have."""
    args = [each for each in site.call.args if not isinstance(each, ast.Starred)]
    if not args:
        return
    first = args[0]
    if isinstance(first, ast.Name):
        first = next(_set_to(first.id, site), first)
    if (
        isinstance(first, ast.Constant)
        and isinstance(first.value, str)
        and called(site.call) != "print"
        and len(args) > 1
    ):
        text = str(first.value)
        yield _percent(text, args[1:]) if "%" in text else _braces(text, args[1:], {})
    elif called(site.call) in ("print", "print0", "print_rank_0", "rank0_print") and len(args) > 1:
        pieces: list[Piece] = []
        for each in args:
            pieces += [*([" "] if pieces else []), *_text(each, site)]
        yield pieces
    else:
        yield _text(first, site)


def _set_to(name: str, site: Site) -> Iterator[ast.expr]:
    """What a name is set to that holds a text, in the function around."""
    for function in reversed(site.scope.functions):
        for node in walk(function):
            if (
                isinstance(node, ast.Assign)
                and any(isinstance(each, ast.Name) and each.id == name for each in node.targets)
                and isinstance(node.value, ast.JoinedStr | ast.BinOp | ast.Call)
                and node.lineno <= site.call.lineno
            ):
                yield node.value


def _text(expr: ast.expr, site: Site) -> list[Piece]:
    if isinstance(expr, ast.JoinedStr):
        pieces: list[Piece] = []
        for each in expr.values:
            if isinstance(each, ast.FormattedValue):
                form = ast.unparse(each.format_spec)[2:-1] if each.format_spec else ""
                pieces += _text(each.value, site) if isinstance(each.value, ast.Constant) else [(each.value, form)]
            else:
                pieces.append(str(each.value) if isinstance(each, ast.Constant) else "")
        return pieces
    if isinstance(expr, ast.Constant):
        return [str(expr.value)]
    if isinstance(expr, ast.BinOp) and isinstance(expr.op, ast.Mod) and isinstance(text := literal(expr.left), str):
        return _percent(text, list(expr.right.elts) if isinstance(expr.right, ast.Tuple) else [expr.right])
    if isinstance(expr, ast.BinOp) and isinstance(expr.op, ast.Add):
        left, right = _text(expr.left, site), _text(expr.right, site)
        if any(isinstance(each, str) for each in (*left, *right)):
            return [*left, *right]
    if isinstance(expr, ast.Call) and called(expr) == "format" and isinstance(expr.func, ast.Attribute):
        of = literal(expr.func.value)
        if isinstance(of, str):
            return _braces(of, expr.args, {str(each.arg): each.value for each in expr.keywords})
    if isinstance(expr, ast.Call) and called(expr) == "str" and expr.args:
        return _text(expr.args[0], site)
    return [(expr, "")]


def _percent(text: str, values: list[ast.expr]) -> list[Piece]:
    given, pieces = iter(values), list[Piece]()
    for piece in re.split(r"(%(?:\(\w+\))?[-+ 0#]*\d*(?:\.\d+)?[a-zA-Z])", text):
        if re.fullmatch(r"%(?:\(\w+\))?[-+ 0#]*\d*(?:\.\d+)?[a-zA-Z]", piece):
            pieces.append((next(given, None), piece[1:]))
        elif piece:
            pieces.append(piece.replace("%%", "%"))
    return pieces


def _braces(text: str, values: list[ast.expr], keywords: dict[str, ast.expr]) -> list[Piece]:
    given, pieces = iter(values), list[Piece]()
    for piece in re.split(r"(\{[\w.\[\]]*(?:![rsa])?(?::[^{}]*)?\})", text):
        if match := re.fullmatch(r"\{([\w.\[\]]*)(?:![rsa])?(?::([^{}]*))?\}", piece):
            key = re.split(r"[.\[]", match[1])[0]
            if key.isdigit():
                value = values[int(key)] if int(key) < len(values) else None
            else:
                value = keywords.get(key, ast.Name(id=match[1], ctx=ast.Load())) if key else next(given, None)
            if isinstance(value, ast.Name | ast.Attribute) and "." in match[1]:
                value = ast.Name(id=match[1], ctx=ast.Load())  # {loss.val:.4f}
            pieces.append((value, match[2] or ""))
        elif piece:
            pieces.append(piece.replace("{{", "{").replace("}}", "}"))
    return pieces


def _line(pieces: list[Piece], site: Site, values: Values) -> PrintedLine | None:
    """The regular expression of one printed line, up to the last figure that means something; None where it tells
    neither a step nor an epoch with a figure.
    """
    text, used, last, says_what = "", list[str](), 0, False
    for index, piece in enumerate(pieces):
        if isinstance(piece, str):
            text += re.sub(r"\s+", r"\\s+", re.sub(r"([.^$*+?{}\[\]|()\\])", r"\\\1", piece))
            continue
        value, form = piece
        before = _words(pieces, index, -1)
        after = _words(pieces, index, 1)
        group = _group(value, before, after, used, site, values)
        if group:
            used.append(group)
            says_what = says_what or bool(_COUNT_WORDS.search(before))
            pads = bool(re.match(r"[<>^ ]|-?\d", form)) or (text[-1:] not in ("", "+"))
            digits = r"\d+" if group in COUNTED else NUMBER
            text += (r"\s*" if pads and not text.endswith(r"\s+") else "") + f"(?P<{group}>{digits})"
            if group in COUNTED and re.search(r"\.\d+f", form):
                text += r"(?:\.\d+)?"
            last = len(text)
        else:
            text += ".*?"
    if not {"step", "epoch"} & set(used):
        return None
    if not _MEANS & set(used) and (_NO_PROGRESS.search(text) or not (says_what or len(used) > 1)):
        return None
    if "batch" in used and "step" not in used and not {"epoch", "batches"} <= set(used):
        return None
    text = re.sub(r"^(\\s\+)+", "", text[:last])
    while text.startswith(".*?"):
        text = text[3:]
    if "\\n" in text or not re.search(r"[A-Za-z\[/:|]", re.sub(r"\(\?P<\w+>[^)]*\)|\\[sd]", "", text)):
        return None
    return PrintedLine(
        regex=text, groups=frozenset(used), where=site.where, is_of_training=_is_of_training(site, values)
    )


def _words(pieces: list[Piece], index: int, step: int) -> str:
    at = index + step
    piece = pieces[at] if 0 <= at < len(pieces) else ""
    return piece if isinstance(piece, str) else ""


def _is_of_training(site: Site, values: Values) -> bool:
    names = " ".join(each.name for each in site.scope.functions).lower()
    return not re.search(r"val|eval|test|sample|infer|generat|load|resume|restore|summary", names)


def _group(value: ast.expr | None, before: str, after: str, used: list[str], site: Site, values: Values) -> str:
    """What a figure of a line is, by its name and by the words around it; empty: nothing that is asked for."""
    named = ast.unparse(value).lower() if value is not None else ""
    near = re.split(r"[,|;]", before.rstrip(" :=|([#").lower())[-1][-24:]
    plain = re.sub(r"\s*[-+]\s*\d+|\bint\(|\bstr\(|\)", "", named).strip("() ")
    is_total = before.rstrip().endswith(("/", "of")) and bool(used) and used[-1] in ("step", "epoch", "batch")
    if is_total:
        group = {"step": "total", "epoch": "", "batch": "batches"}[used[-1]]
        return group if group not in used else ""
    is_setting = (
        isinstance(value, ast.Attribute)
        and not named.startswith("self.")
        and values.settings.find(value.attr) is not None
    )
    counted = (
        unit(plain)
        if not is_setting and re.fullmatch(r"[\w.]+", plain) and "loss" not in plain and "time" not in plain
        else None
    )
    if re.search(r"max|total_|\bnum_|\bn_|len\(|\blr\b|rate|_per_|/sec|speed|start", named) and not re.search(
        r"num_update|iter_num|num_iter", named
    ):
        counted = None
    if counted is None and isinstance(value, ast.Name):
        for statement in reversed(site.around):
            if isinstance(statement, ast.For) and any(
                isinstance(n, ast.Name) and n.id == value.id for n in walk(statement.target)
            ):
                first = statement.target.elts[0] if isinstance(statement.target, ast.Tuple) else statement.target
                if isinstance(first, ast.Name) and first.id == value.id:
                    is_loader = isinstance(statement.iter, ast.Call) and called(statement.iter) == "enumerate"
                    counted = "batch" if is_loader else "step" if loop_range(statement) is not None else None
        counted = {"epoch": "epoch"}.get(near.strip(), counted) if counted == "step" else counted  # type: ignore[assignment]
    if counted == "step" and isinstance(value, ast.Name) and "epoch" in used:
        for statement in site.around:
            if isinstance(statement, ast.For) and loop_unit(values, statement, site.scope) == "batch":
                counted = (
                    "batch"
                    if any(isinstance(n, ast.Name) and n.id == value.id for n in walk(statement.target))
                    else counted
                )
    is_part = "epoch" in used and "batch" not in used and after.lstrip().startswith(("/", "of "))
    if is_part and (counted == "step" or (before.rstrip(" ").endswith(("[", "(", "|")) and "epoch" not in named)):
        return "batch"  # of so many: rows, or batches of the epoch
    if counted in ("step", "epoch", "batch") and counted not in used:
        return str(counted)
    words = f"{near} {named}"
    if (
        re.search(r"\bval\w*|valid|\btest|eval", words)
        and re.search(r"loss|perplexity|bpb|ppl", words)
        and "val" not in used
    ):
        return "val"
    if "loss" in words and not re.search(r"val\b|valid|eval|best|test|aux", words) and "loss" not in used:
        return "loss"
    is_sum = re.search(r"total|train(ing)?_time", words)
    if (
        not is_sum
        and re.match(r"\s*ms\b", after)
        and re.search(r"dt|time|ms|elapsed|step", words)
        and "step_ms" not in used
    ):
        return "step_ms"
    return ""


def _bar(site: Site, values: Values) -> PrintedLine | None:
    """A progress bar over a range of steps or epochs, or over the batches of an epoch that its words name."""
    said = {each.arg: each.value for each in site.call.keywords}
    loop = next(
        (each for each in reversed(site.around) if isinstance(each, ast.For) and site.call in walk(each.iter)), None
    )
    over = site.call.args[0] if site.call.args else said.get("iterable")
    ranges = [node for node in walk(site.call) if isinstance(node, ast.Call) and called(node) in ("range", "trange")]
    count = loop_unit(values, loop, site.scope) if loop is not None else None
    desc = _text(said["desc"], site) if "desc" in said else []
    if count is None and over is None and "total" in said:
        count = "step" if re.search(r"step|iter", ast.unparse(said["total"]).lower()) else None
    count = count or (unit(ast.unparse(ranges[0].args[-1])) if ranges and ranges[0].args else None)
    names = {"step": ("step", "total"), "epoch": ("epoch", ""), "batch": ("batch", "batches")}
    if count is None and any("epoch" in ast.unparse(p[0]) for p in desc if isinstance(p, tuple) and p[0] is not None):
        count = "batch"
    if count not in names or not _TRAINS.search(
        ast.unparse(loop or site.scope.functions[-1] if site.scope.functions else site.call)
    ):
        return None
    prefix, used = "", list[str]()
    for index, piece in enumerate(desc):
        if isinstance(piece, str):
            prefix += re.sub(r"\s+", r"\\s+", re.escape(piece).replace("\\ ", " "))
        elif (group := _group(piece[0], _words(desc, index, -1), "", used, site, values)) == "epoch":
            used.append(group)
            prefix += r"(?P<epoch>\d+)"
        else:
            prefix += ".*?"
    number, total = names[count]
    if (number == "epoch" and "epoch" in used) or (number == "batch" and "epoch" not in used):
        return None
    bar = BAR.format(count=number, total=total or "x").replace("(?P<x>", "(?:")
    regex = f"{prefix}:?\\s*{bar}" if prefix else rf"^\s*{bar}"
    groups = frozenset(filter(None, {number, total, *used}))
    return PrintedLine(regex=regex, groups=groups, where=site.where, is_of_training=_is_of_training(site, values))
