"""`campaigns/NAME.yaml`: several runs under one cap. This module reads the file and makes the definitions of its
trials.

A trial is a plain definition: a file of `stacks/`, or such a file with other values. A changed file is written into
`.gpufleet/trials/`, where every command and the program find it by its name. This name is made from the file's name and
the values, so that it stays the same when values are added to the campaign. Instead of values the file may have ranges.
A sampler then chooses the values of each trial from these ranges while the campaign goes on (infra/search.py). A
campaign that is `open` also takes each definition that somebody, or an agent, puts into `campaigns/NAME/` while it
runs.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator
from collections.abc import Mapping as Named
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from decimal import ROUND_DOWN, Decimal
from pathlib import Path
from typing import Literal

from gpufleet.infra.definition.layers import OVERLAID
from gpufleet.infra.definition.loader import STACK_NAME, TRIALS, find
from gpufleet.infra.definition.model import Limits
from gpufleet.infra.definition.rules import RULES
from gpufleet.infra.definition.schema import Findings, build, check_keys, entries_of, nearest
from gpufleet.infra.definition.stages import LIMITS, MOST_ON_NODE, STAGES, STAYS
from gpufleet.infra.definition.yaml_tree import Items, Mapping, Node, Scalar, dump, find_node, merge, open_file
from gpufleet.infra.errors import DefinitionError, GpufleetError
from gpufleet.job import atomic
from gpufleet.job.contract import reading
from gpufleet.job.contract.reading import DoubtError, Fields
from gpufleet.job.text import counted

FOLDER = "campaigns"
VALUES = "values.json"  # the file with a trial's values, which is kept with its results
SCHEMA_FILE = Path(__file__).with_name("campaign.schema.json")
# a campaign's name; it is short, because a trial's name begins with it and may have 40 characters
NAME = re.compile(r"[a-z][a-z0-9-]{0,29}[a-z0-9]")
DIGITS = 8  # number of digits at the end of a trial's name
MOST = 1000  # most trials; our own bound, because each trial is a bill
SCENARIOS = "scenarios"
MOST_HOURS = Decimal(RULES[Limits, "max_hours"].maximum or 0)
OF_TRIAL = ("job", "estimate", LIMITS)  # sections in which trials on one node may differ
NEEDED = {  # for each key, other keys that it needs
    "metric": ("direction",),
    "direction": ("metric",),
    "pruner": ("metric", "every"),
    "every": ("pruner",),
    "reduction": ("pruner",),
    "sampler": ("metric", "draw"),
    "draw": ("sampler", "trials"),
    "trials": ("draw",),
}
_ARGUMENT = re.compile(r"--?[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnRange:
    """The values that a sampler may choose for a key: one of `choices`; if there are none, a number from `low` to
    `high`.
    """

    low: Decimal = Decimal(0)
    high: Decimal = Decimal(0)
    step: Decimal | None = field(default=None, metadata={"minimum": 1e-12, "maximum": 1e12})
    log: bool = False  # on a logarithmic scale: from 1e-5 to 1e-4 is as likely as from 1e-4 to 1e-3
    choices: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether only whole numbers are chosen. This is so if the file writes all numbers of the range without a
        decimal point.
        """
        numbers = (self.low, self.high, self.step or Decimal(1))
        return all(int(number.as_tuple().exponent) >= 0 for number in numbers)


@dataclass(frozen=True, kw_only=True, slots=True)
class CampaignFile:
    """The values of a campaign's file. `grid` and `list` are empty if the trials are files of `stacks/` unchanged."""

    name: str
    files: tuple[str, ...]  # names of stacks; the ledger is in the region of the first one
    max_usd: Decimal = field(metadata={"minimum": 0.01, "maximum": 1_000_000})
    max_hours: Decimal | None = field(default=None, metadata={"minimum": 0.01, "maximum": 8784})  # wall-clock hours
    at_once: int = field(default=1, metadata={"minimum": 1, "maximum": 100})
    share_node: bool = False  # whether a node takes the next trial when one ends
    order: Literal["listed", "cheapest"] = "listed"
    open: bool = False
    metric: str | None = None  # the name of the metric value in metrics.jsonl by which trials are compared
    direction: Literal["minimize", "maximize"] | None = None
    pruner: Literal["asha", "median"] | None = None  # the method that stops trials which do worse than others
    # the number of steps between two judgements
    every: int | None = field(default=None, metadata={"minimum": 1, "maximum": 1_000_000_000})
    # asha lets one of this many trials continue
    reduction: int = field(default=4, metadata={"minimum": 2, "maximum": 100})
    sampler: Literal["tpe", "random"] | None = None
    # the most trials whose values a sampler chooses
    trials: int | None = field(default=None, metadata={"minimum": 1, "maximum": MOST})
    # for each key its values; a trial is made for each combination
    grid: Named[str, tuple[Node, ...]] = field(default_factory=dict)
    list: tuple[Named[str, Node], ...] = ()  # named entries, each with the values of one trial
    draw: Named[str, DrawnRange] = field(default_factory=dict)  # ranges of keys, instead of grid and list

    @property
    def allowed(self) -> dict[str, str]:
        """The keys, as text, that say what the campaign may do beyond its listed trials."""
        but = ("files", "grid", "list")
        return {key.name: str(getattr(self, key.name)) for key in fields(self) if key.name not in but}


@dataclass(frozen=True, kw_only=True, slots=True)
class DefinedTrial:
    """One run of a campaign. `values`: the values, as text, that replace those of its file, by key."""

    name: str
    file: str = ""  # the stack from which it is made
    values: Named[str, str] = field(default_factory=dict)
    text: str | None = None  # the text of its definition; None if the definition is a file of stacks/
    is_made: bool = False  # whether the campaign writes its definition
    members: tuple[DefinedTrial, ...] = ()  # the trials that one node does one after another; this is then their run
    tree: Mapping | None = field(default=None, compare=False, repr=False)  # the text as a tree

    @property
    def stage(self) -> str:
        """The name of this trial's stage if it shares a node."""
        return f"t{self.name[-DIGITS:]}"

    def __str__(self) -> str:
        return show_values(self.values) or self.name


def show_values(values: Named[str, str]) -> str:
    """The values on one line, for people to read."""
    return ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in values.items())


def path_of(name: str, root: Path) -> Path | None:
    """The file of the campaign `name` in the project `root`; None if there is none."""
    path = root / FOLDER / f"{name}.yaml"
    return path if NAME.fullmatch(name) and path.is_file() else None


def load(name: str, root: Path) -> CampaignFile:
    """The campaign `name`. Raises DefinitionError with every problem of its file; GpufleetError if it has no file."""
    path = path_of(name, root)
    if path is None:
        names = sorted(file.stem for file in (root / FOLDER).glob("[!.]*.yaml"))
        allowed = f"has {', '.join(names)}" if names else "has no file"
        raise GpufleetError(f"there is no campaign {name!r}: {FOLDER}/ {allowed}. {nearest(name, names)}".rstrip())
    _, tree = open_file(path)
    findings = Findings(tree=tree)
    keys = [spec.name for spec in fields(CampaignFile) if spec.name != "name"]
    check_keys(tree.entries, keys, "", findings)
    grid, rows, draw = _grid(tree, findings), _rows(tree, findings), _read_ranges(tree, findings)
    own = {key: node for key, node in tree.entries.items() if key in keys and key not in ("grid", "list", "draw")}
    named = Scalar(path="name", line=0, text=name)
    campaign: CampaignFile = build(CampaignFile, replace(tree, entries={**own, "name": named}), "", findings)
    if not campaign.files and ".files" not in findings.bad:
        findings.add(".files", "at least one stack", value="an empty list")
    if campaign.open and campaign.max_hours is None:
        findings.add(".max_hours", "hours, after which an open campaign ends")
    for key in (key for key in NEEDED if key in tree.entries):
        for other in (other for other in NEEDED[key] if other not in tree.entries):
            findings.add(f".{other}", f"a value, as {key} needs it")
    if "draw" in tree.entries and (grid or rows or len(campaign.files) > 1):
        findings.add("draw", "a file alone, without grid and list", value="beside other values")
    if campaign.share_node and (not (grid or rows) or len(campaign.files) > 1 or campaign.open):
        allowed = "true only with one file, its grid or list, and without open and draw"
        later = "Runs that come later cannot join a node: without share_node each run has its own."
        findings.add(".share_node", allowed, later if campaign.open or draw else "", value="true")
    if campaign.share_node and campaign.order != "listed":  # a driver that goes on would deal by other prices
        hint = "Each node does its runs in the file's order: list the cheapest first."
        findings.add(".order", "listed, as share_node is true", hint, value=campaign.order)
    if findings.problems:
        raise DefinitionError(str(path), findings.problems)
    return replace(campaign, grid=grid, list=rows, draw=draw)


def trials(campaign: CampaignFile, root: Path) -> list[DefinedTrial]:
    """The trials that the file names, in its order. Raises GpufleetError."""
    names = campaign.files
    if not campaign.grid and not campaign.list:  # if `draw` is set, this is the file in which the values are replaced
        made = [DefinedTrial(name=find(name, root).stem, is_made=bool(campaign.draw)) for name in names]
    else:
        count = len(names) * len(campaign.list or (1,))
        for values in campaign.grid.values():
            count *= len(values)
        if count > MOST:
            raise GpufleetError(f"{FOLDER}/{campaign.name}.yaml: {count} trials; at most {MOST} are allowed")
        made = [_trial(campaign, name, values, root) for name in names for values in _combined(campaign)]
    if twice := sorted({trial.name for trial in made if [other.name for other in made].count(trial.name) > 1}):
        shown = next(str(trial) for trial in made if trial.name == twice[0])
        raise GpufleetError(f"{FOLDER}/{campaign.name}.yaml: {shown} twice; to repeat a trial, give it another seed")
    return _dealt(campaign, made) if campaign.share_node else made


def _dealt(campaign: CampaignFile, made: list[DefinedTrial]) -> list[DefinedTrial]:
    """The trials, dealt to one run for each node, whose stages they are. Each run may spend an equal share of the cap.
    Raises GpufleetError if a node would get too many trials.
    """
    if len(made) > (most := campaign.at_once * MOST_ON_NODE):
        where = f"{FOLDER}/{campaign.name}.yaml"
        raise GpufleetError(f"{where}: {len(made)} trials; with share_node and this at_once at most {most} are allowed")
    hands = [tuple(made[number :: campaign.at_once]) for number in range(min(campaign.at_once, len(made)))]
    share = (campaign.max_usd / len(hands)).quantize(Decimal("0.01"), ROUND_DOWN)
    return [_of_node(campaign, hand, share) if len(hand) > 1 else hand[0] for hand in hands]


def _of_node(campaign: CampaignFile, members: tuple[DefinedTrial, ...], share: Decimal) -> DefinedTrial:
    """The run whose stages are these trials. Its limits are `share`, and the hours of all trials together, at most
    those of the campaign. Raises GpufleetError if they differ in what belongs to the node.
    """
    trees = [member.tree.entries for member in members if member.tree]
    hours = [find_node(member.tree, "limits.max_hours") for member in members if member.tree]
    limits = {"max_usd": f"{share:f}"}
    with suppress(ArithmeticError):  # a text that is no number is reported when the definition is read
        together = sum(Decimal(node.text) for node in hours if isinstance(node, Scalar))
        limits["max_hours"] = f"{min(together, campaign.max_hours or MOST_HOURS, MOST_HOURS):f}"
    stages: list[Node] = []
    for index, (member, entries) in enumerate(zip(members, trees, strict=True)):
        stay = {STAYS: _scalar("true")} if index else {}
        laid = {key: entries[key] for key in OF_TRIAL if key in entries}
        stages.append(_mapping({"name": _scalar(member.stage), **stay, **laid}))
    rest, *others = (
        {key: node for key, node in entries.items() if key not in (*OF_TRIAL, "rehearsal", "goal")} for entries in trees
    )
    texts = [{key: dump(_mapping({key: node})) for key, node in part.items()} for part in (rest, *others)]
    if differing := sorted({key for text in texts for key in text if text[key] != texts[0].get(key)}):
        allowed = f"with share_node trials may differ in {', '.join(OF_TRIAL)}"
        raise GpufleetError(f"{FOLDER}/{campaign.name}.yaml: trials differ in {', '.join(differing)}; {allowed}")
    whole = merge(trees[0].get(LIMITS), _mapping({key: _scalar(text) for key, text in limits.items()}))
    tree = _mapping({**rest, LIMITS: whole, STAGES: Items(path="", line=0, items=stages)})
    digest = hashlib.sha256("\n".join(member.name for member in members).encode()).hexdigest()[:DIGITS]
    head = f"# {counted(len(members), 'trial')} of {FOLDER}/{campaign.name}.yaml on one node"
    text = f"{head}\n\n{dump(tree)}"
    return replace(members[0], name=f"{campaign.name}-{digest}", values={}, text=text, members=members, tree=tree)


def _scalar(text: str) -> Scalar:
    return Scalar(path="", line=0, text=text)


def _mapping(entries: dict[str, Node]) -> Mapping:
    return Mapping(path="", line=0, entries=entries)


def define_drawn(campaign: CampaignFile, values: Named[str, str], root: Path) -> DefinedTrial:
    """The trial with the values that a sampler drew. Raises GpufleetError."""
    nodes: dict[str, Node] = {key: Scalar(path=key, line=0, text=text) for key, text in values.items()}
    return _trial(campaign, campaign.files[0], nodes, root)


def write_values(values: Named[str, str]) -> bytes:
    return json.dumps({"schema": 1, "values": dict(values)}).encode()


def read_values(content: bytes) -> dict[str, str]:
    """The values in the bytes of values.json; empty if they cannot be read."""
    try:
        return dict(Fields(reading.parse(content)).take("values", reading.mapping(reading.text), {}))
    except DoubtError:
        return {}


def lower_limit(name: str, usd: Decimal, root: Path) -> None:
    """Writes `usd` as limits.max_usd into a definition that the campaign has made. Raises GpufleetError."""
    path = root / TRIALS / f"{name}.yaml"
    _, tree = open_file(path)
    laid = merge(tree, _mapping({LIMITS: _mapping({"max_usd": _scalar(f"{usd:f}")})}))
    assert isinstance(laid, Mapping)
    atomic.write_bytes(path, f"# With what is left of its campaign's dollars.\n\n{dump(laid)}".encode())


def write(made: list[DefinedTrial], root: Path) -> None:
    """Writes the definitions of trials that are not files of `stacks/`; a file that is up to date is not touched."""
    for trial in made:
        path = root / TRIALS / f"{trial.name}.yaml"
        if trial.text is not None and not (path.is_file() and path.read_text(encoding="utf-8") == trial.text):
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic.write_bytes(path, trial.text.encode())


def offered(campaign: CampaignFile, root: Path) -> list[DefinedTrial]:
    """The trials that somebody put into the folder of an open campaign, in the order of their names. Other files in the
    folder are ignored.
    """
    if not campaign.open:
        return []
    paths = sorted((root / FOLDER / campaign.name).glob("[!.]*.yaml"))
    named = [(f"{campaign.name}-{path.stem}", path) for path in paths]
    return [
        DefinedTrial(name=name, text=path.read_text(encoding="utf-8", errors="replace"), is_made=True)
        for name, path in named
        if STACK_NAME.fullmatch(name) and path.is_file()
    ]


def _grid(tree: Mapping, findings: Findings) -> dict[str, tuple[Node, ...]]:
    allowed = "a section with a list of values for each key, as in --lr: [1e-3, 3e-3]"
    entries = entries_of(tree.entries.get("grid"), "grid", allowed, findings)
    grid = {}
    for key, node in entries.items():
        _check_key(key, f"grid.{key}", node, findings)
        if isinstance(node, Items) and node.items:
            grid[key] = tuple(node.items)
        else:
            findings.add(f"grid.{key}", "a list with at least one value", "Write [VALUE, VALUE].", node=node)
    return grid


def _rows(tree: Mapping, findings: Findings) -> tuple[dict[str, Node], ...]:
    node, allowed = tree.entries.get("list"), "a list of sections, each with the values of one trial"
    if node is None:
        return ()
    if not isinstance(node, Items) or not node.items:
        findings.add("list", allowed, value="an empty list" if isinstance(node, Items) else None, node=node)
        return ()
    rows = []
    for index, item in enumerate(node.items):
        entries = entries_of(item, f"list[{index}]", allowed, findings)
        for key, value in entries.items():
            _check_key(key, f"list[{index}].{key}", value, findings)
        rows.append(entries)
    return tuple(rows)


def _read_ranges(tree: Mapping, findings: Findings) -> dict[str, DrawnRange]:
    allowed = "a section with {low: A, high: B} or a list of choices for each key"
    entries = entries_of(tree.entries.get("draw"), "draw", allowed, findings)
    if "draw" in tree.entries and not entries:
        findings.add("draw", allowed)
    ranges = {}
    for key, node in entries.items():
        _check_key(key, f"draw.{key}", node, findings)
        if isinstance(node, Items) and node.items and all(isinstance(choice, Scalar) for choice in node.items):
            ranges[key] = DrawnRange(choices=tuple(map(_as_text, node.items)))
            continue
        drawn = ranges[key] = build(DrawnRange, node, f"draw.{key}", findings)
        if not isinstance(node, Mapping) or not {"low", "high"} <= node.entries.keys() or "choices" in node.entries:
            findings.add(f"draw.{key}", "{low: A, high: B}, or a list of choices", value=_as_text(node), node=node)
        elif not drawn.low < drawn.high or (drawn.log and (drawn.low <= 0 or drawn.step)):
            least = "low above 0 and no step with log, and " if drawn.log else ""
            findings.add(f"draw.{key}", f"{least}high above low", value=_as_text(node), node=node)
        elif drawn.step and (drawn.high - drawn.low) % drawn.step:
            findings.add(f"draw.{key}", "high a multiple of step above low", value=_as_text(node), node=node)
    return ranges


def _check_key(key: str, where: str, node: Node, findings: Findings) -> None:
    section, dot, _ = key.partition(".")
    if not _ARGUMENT.fullmatch(key) and not (dot and section in OVERLAID):
        allowed = f"a key below one of {', '.join(OVERLAID)}, as job.parameters.seed, or an argument, as --seed"
        findings.add(where, allowed, nearest(section, OVERLAID), value=key, node=node)


def _combined(campaign: CampaignFile) -> Iterator[dict[str, Node]]:
    keys = list(campaign.grid)
    for row in campaign.list or ({},):
        for values in itertools.product(*campaign.grid.values()):
            yield {**row, **dict(zip(keys, values, strict=True))}


def _trial(campaign: CampaignFile, file: str, values: dict[str, Node], root: Path) -> DefinedTrial:
    """The trial that is made from the file of a stack and these values. Raises GpufleetError."""
    path = find(file, root)
    _, tree = open_file(path)
    entries = {key: node for key, node in tree.entries.items() if key != SCENARIOS}
    laid: Node = replace(tree, entries=entries)
    shown = {key: _as_text(node) for key, node in values.items()}
    for key, node in values.items():
        if _ARGUMENT.fullmatch(key):
            key, node = "job.command", _with_argument(laid, key, node, path)
        for part in reversed(key.split(".")):
            node = Mapping(path="", line=node.line, entries={part: node})
        laid = merge(laid, node)
    assert isinstance(laid, Mapping)
    digest = hashlib.sha256("\n".join([path.stem, *(f"{key}={shown[key]}" for key in sorted(shown))]).encode())
    made = DefinedTrial(name=f"{campaign.name}-{digest.hexdigest()[:DIGITS]}", file=file, values=shown, is_made=True)
    text = f"# Trial of {FOLDER}/{campaign.name}.yaml, from {file}: {made}\n\n{dump(laid)}"
    return replace(made, text=text, tree=laid)


def _as_text(node: Node) -> str:
    """The value on one line."""
    if isinstance(node, Scalar):
        return " ".join(node.text.split())
    if isinstance(node, Items):
        return f"[{', '.join(map(_as_text, node.items))}]"
    return "{" + ", ".join(f"{key}: {_as_text(value)}" for key, value in node.entries.items()) + "}"


def _with_argument(laid: Node, argument: str, value: Node, path: Path) -> Scalar:
    """The command with this argument. If the command has the argument, its value is replaced; otherwise the argument is
    added at the end. Raises GpufleetError.
    """
    command = find_node(laid, "job.command")
    if not isinstance(command, Scalar) or not isinstance(value, Scalar):
        wrong = "needs a job.command" if not isinstance(command, Scalar) else "takes single values"
        raise GpufleetError(f"{path}: {argument} of the campaign {wrong}; other keys look like job.parameters.seed")
    if not re.fullmatch(r"[\w.,:/@%+=-]+", value.text):
        allowed = "letters, digits and . , : / @ % + = - _, because a shell reads the command"
        raise GpufleetError(f"{argument}: {value.text!r} is not accepted; allowed: {allowed}")
    written = re.compile(rf"(?<!\S){re.escape(argument)}(=|\s+)(?!-)\S+")
    if (times := len(written.findall(command.text))) > 1:
        raise GpufleetError(f"{path}: job.command has {argument} {counted(times, 'time')}; allowed is once")
    if not times:
        return replace(command, text=f"{command.text.rstrip()} {argument}={value.text}")
    return replace(command, text=written.sub(lambda old: f"{argument}{old[1]}{value.text}", command.text))
