"""Finds how a script resumes: by words on its command line, or by looking for a checkpoint itself."""

from __future__ import annotations

import ast
import posixpath
import re

from gpufleet.infra.discover.expressions import Hole, Values
from gpufleet.infra.discover.frameworks import Framework
from gpufleet.infra.discover.reach import Reach, Site, dotted, walk
from gpufleet.infra.discover.saves import OTHER, CodeSave, Saves, around_of
from gpufleet.infra.discover.settings import Setting, literal
from gpufleet.infra.discover.source import Finding

# Names of settings that count as resuming if the code shows no use of them.
RESUME = (
    "resume_from_checkpoint", "resume_from_step", "resume_from", "ckpt_path", "init_from", "resume", "load_checkpoint",
    "resume_path", "checkpoint_path",
)  # fmt: skip
_SAYS_SO = re.compile(r"resum|restor|continue")
_BEGINS = re.compile(r"pretrain|weights|init")  # settings that start from other weights, which is not a resume
_MORE_THAN_WEIGHTS = re.compile(
    r"optim\w*\.load_state_dict|start_epoch|start_step|\[['\"](epoch|step|iteration|global_step|optimizer)"
)
_SETS_UP = ("__init__", "resume", "load", "load_checkpoint", "restore")  # methods that may load a checkpoint
_AFTER = re.compile(r"eval|test|sample|infer|predict|best|final")  # functions that read the results of a training


def find_resume(
    reach: Reach, values: Values, saves: Saves, chosen: CodeSave | None, row: Framework | None
) -> tuple[Finding | None, Finding | None]:
    """Two findings, each perhaps None: the words that make the script resume, or else the place where the script itself
    reads its newest checkpoint before it trains.
    """
    head = chosen.parts[0] if chosen is not None and chosen.parts else None
    folder = head.name if isinstance(head, Hole) and head.kind == "setting" else ""
    used: list[tuple[Setting, Site]] = []
    for parts, site in saves.loads:
        if site.name in ("load_state_dict", "from_pretrained", "loads", "glob", "open"):
            continue  # the value was read already, or holds foreign weights
        if len(parts) > 1 and isinstance(parts[-1], str) and OTHER.search(parts[-1]):
            continue  # the file holds something else, such as settings
        if isinstance(parts[0], Hole) and parts[0].kind == "setting" and parts[0].name != folder:
            setting = values.settings.find(parts[0].name)
            if setting is not None and not _BEGINS.search(setting.name):
                used.append((setting, site))
    named = values.settings.first((*filter(None, [row.resume_setting if row else ""]), *RESUME))
    candidates = [setting for setting, _ in used if _SAYS_SO.search(setting.name)]
    candidates += [named] if named is not None and named.name != folder else []
    candidates += [setting for setting, site in used if _goes_on(site)]
    if (counted := _step_setting(values, saves, chosen)) is not None:
        return counted, None
    for setting in candidates:
        if setting.form and "wandb" not in setting.name:
            return Finding(_resume_words(reach, setting), setting.where), None
    if row is not None and row.resume:
        return Finding(row.resume, row.name), None
    return None, _by_itself(reach, values, saves, chosen)


def _by_itself(reach: Reach, values: Values, saves: Saves, chosen: CodeSave | None) -> Finding | None:
    """The place where the script reads a checkpoint of its own before the loop in which it saves."""
    if chosen is None or not chosen.parts:
        return None
    loops = [statement for statement, _ in around_of(reach, chosen.site) if isinstance(statement, ast.For | ast.While)]
    for parts, site in saves.loads if loops else ():
        named = any(isinstance(part, str) and re.search(r"[A-Za-z]", part) for part in parts)
        is_listed = len(parts) > 1 and isinstance(parts[-1], Hole) and parts[-1].kind == "any"  # for example files[-1]
        is_there = (named or is_listed) and parts[0] == chosen.parts[0] and isinstance(parts[0], Hole)
        endings = [posixpath.splitext(str(path[-1]))[1] for path in (parts, chosen.parts)]
        is_there = is_there and (is_listed or endings[0] == endings[1])
        same = parts == chosen.parts or (is_there and site.name in ("glob", "load"))
        if same and loops[-1] not in site.around and _is_before(reach, site, loops[-1], chosen):
            folder = chosen.parts[0].name if isinstance(chosen.parts[0], Hole) else ""
            if values.never_runs(site, folder):
                return None  # a setting would have to be on
            return Finding(f"it reads {shown(chosen)} by itself", site.where)
    return None


def _goes_on(site: Site) -> bool:
    """Whether the function reads more than weights from the checkpoint: an optimizer, a step or an epoch too."""
    text = " ".join(ast.unparse(function) for function in site.scope.functions[-1:])
    return site.name == "load_state" or bool(_MORE_THAN_WEIGHTS.search(text))


def _step_setting(values: Values, saves: Saves, chosen: CodeSave | None) -> Finding | None:
    """A setting such as `--epoch 40`, which names the epoch or step whose files the script loads."""
    for parts, _ in saves.loads if chosen is not None else ():
        if chosen is None or len(parts) != len(chosen.parts):
            continue
        differing = [(a, b) for a, b in zip(parts, chosen.parts, strict=True) if a != b]
        says_what = any(isinstance(part, str) and re.search(r"[A-Za-z]{2}", part) for part in parts)
        for read, saved in differing if says_what and len(differing) == 1 else ():
            if isinstance(read, Hole) and isinstance(saved, Hole) and saved.kind in ("step", "epoch"):
                setting = values.settings.find(read.name.rpartition(".")[2])
                if setting is not None and setting.form:
                    return Finding(setting.with_value(f"{{{saved.kind}}}"), setting.where)
    return None


def shown(save: CodeSave) -> str:
    text = "".join(part if isinstance(part, str) else "*" for part in save.parts)
    return posixpath.basename(text.rstrip("/")) or "a checkpoint"


def _is_before(reach: Reach, site: Site, loop: ast.stmt, chosen: CodeSave, depth: int = 0) -> bool:
    """Whether a call comes before the training loop: in the same function, or in a function called before the loop."""
    holder = next((at for statement, at in around_of(reach, chosen.site) if statement is loop), None)
    if holder is None or depth > 4:
        return False
    is_same_file = site.scope.file == holder.scope.file
    if is_same_file and site.scope.functions == holder.scope.functions:
        return site.call.lineno < loop.lineno
    if not site.scope.functions:
        return not is_same_file or site.call.lineno < loop.lineno or not holder.scope.functions
    function = site.scope.functions[-1]
    if _AFTER.search(function.name.lower()):
        return False
    is_of_set_up = site.scope.cls is not None and function.name in _SETS_UP
    callers = reach.calls_of(function, site.scope)[:4]
    return is_of_set_up or any(_is_before(reach, caller, loop, chosen, depth + 1) for caller in callers)


def _resume_words(reach: Reach, setting: Setting) -> str:
    """The setting with the value that makes the script resume: a word that the code compares the setting with, a step,
    or the checkpoint's path.
    """
    plain = setting.name.rpartition(".")[2].lower()
    if setting.is_flag:
        return setting.form
    for node, _ in reach.units:
        for inner in walk(node):
            if isinstance(inner, ast.Compare) and dotted(inner.left).rpartition(".")[2].lower() == plain:
                word = literal(inner.comparators[0])
                if isinstance(word, str) and word in ("resume", "auto", "must"):
                    return setting.with_value(word)
    if setting.is_truth:
        return setting.with_value("True")
    if re.search(r"step|iter|epoch", plain) and "checkpoint" not in plain and not isinstance(setting.default, str):
        return setting.with_value("{step}")
    return setting.with_value("{checkpoint}")
