"""Extracts the program from a model's answer, without parts that the program never uses. Models often add a test, a
main block, a module class or imports. The rules would refuse them, although they do not matter. Such parts are dropped
before the judgement. Only the remaining program is checked and run, so the dropped parts have no effect.
"""

from __future__ import annotations

import ast
import re
import symtable
import textwrap

from gpufleet.job.experiments.kernel.judge.catalog import ENTRY

# A code fence: three or more backticks or tildes. The fence ends with as many again, or with the text.
FENCE = re.compile(r"^[ \t]*(`{3,}+|~{3,}+)[^\n`]*\n(.*?)(?:\1|\Z)", re.DOTALL | re.MULTILINE)
THOUGHT = "</think>"
DEFINED = re.compile(rf"^[ \t]*(def[ \t]+{ENTRY}\b|{ENTRY}[ \t]*=)", re.MULTILINE)
# torch.jit is excluded, because torch.jit.script decorates the program in the question
JIT = re.compile(r"@(?!torch\.)(\w+\.)?jit\b")


def program(answer: str) -> str:
    """The program in an answer. The program is the first code fence that defines the entry and also has a kernel,
    because earlier fences may contain the question's program or a draft. If there is no such fence, the program is all
    fences joined, because one fence may contain the kernel and a later one the entry. If they have no kernel or no
    entry, it is any fence that defines the entry; if there is none, the first fence; if there is none, the whole
    answer. The end of a fence may be missing. If an answer begins with the program, the beginning of the fence may be
    missing too. Thoughts that a model writes before its answer, as Qwen3 does, are ignored.
    """
    answer = answer.rpartition(THOUGHT)[2]
    fenced = [textwrap.dedent(fence[1]) for fence in FENCE.findall(answer)]
    earlier = [part for part in fenced if DEFINED.search(part)][:-1]
    together = "\n".join(part for part in fenced if part not in earlier)
    parts = [*fenced, *filter(None, [together]), answer.partition("```")[0], answer]
    whole = [part for part in parts if DEFINED.search(part)]
    chosen = next((part for part in whole if JIT.search(part)), (whole or fenced or parts)[0])
    return used(chosen.strip() + "\n")


def used(source: str) -> str:
    """The source without four kinds of parts: top-level definitions, imports and assignments that the entry never uses;
    the main block; calls and assertions after the entry; annotations outside of kernels, which Python ignores. The
    source stays unchanged if it has no such parts, has no entry, or cannot be parsed.
    """
    try:
        tree = ast.parse(source)
        if not any(ENTRY in _names(node) for node in tree.body):
            return source
        before = ast.dump(tree)
        main = [node for node in tree.body if isinstance(node, ast.If) and not node.orelse and _is_main(node.test)]
        entry = max(number for number, node in enumerate(tree.body) if ENTRY in _names(node))
        tried = [node for node in tree.body[entry:] if isinstance(node, ast.Expr | ast.Assert)]  # an example or a test
        tree.body = [node for node in tree.body if node not in main and node not in tried]
        for function in [node for node in tree.body if isinstance(node, ast.FunctionDef)]:
            if not any("jit" in ast.unparse(decorator) for decorator in function.decorator_list):
                _forget_annotations(function)
        tree.body = _reached(tree.body)
        return source if ast.dump(tree) == before else ast.unparse(tree) + "\n"
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return source


def _is_main(test: ast.expr) -> bool:
    return ast.unparse(test) in ("__name__ == '__main__'", "'__main__' == __name__")


class _Plain(ast.NodeTransformer):
    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        return node if node.value is None else ast.copy_location(ast.Assign([node.target], node.value), node)


def _forget_annotations(function: ast.FunctionDef) -> None:
    for node in ast.walk(_Plain().visit(function)):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef):
            node.returns = None


def _reached(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements that the entry uses, those that these use in turn, and so on; and all statements that define no
    name.
    """
    whole = {alias.name for node in body if isinstance(node, ast.Import) for alias in node.names if not alias.asname}
    wanted, seen, givers = [ENTRY], set[str](), dict[str, list[ast.stmt]]()
    for node in body:
        if not (names := _names(node)):
            wanted += _mentions(node)
        for name in names if not isinstance(node, ast.Import | ast.ImportFrom) else []:
            givers.setdefault(name, []).append(node)
    while wanted:
        name = wanted.pop()
        if name not in seen:
            seen.add(name)
            for node in givers.get(name, []):
                wanted += _mentions(node)
    reached: list[ast.stmt] = []
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            node.names = [alias for alias in node.names if _is_wanted(alias, seen, whole)]
            if node.names and not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
                reached.append(node)
        elif seen.intersection(_names(node)) or not _names(node):
            reached.append(node)
    return reached


def _is_wanted(alias: ast.alias, seen: set[str], whole: set[str]) -> bool:
    """Whether the import is needed: `import a.b` only defines `a`, which `import a` may have done."""
    name = alias.asname or alias.name.partition(".")[0]
    return alias.name == "*" or (name in seen and (bool(alias.asname) or name == alias.name or name not in whole))


def _names(node: ast.stmt) -> list[str]:
    """The names that a top-level statement defines; empty if the statement may do more than define names."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    defined = [one for target in targets for one in (target.elts if isinstance(target, ast.Tuple) else [target])]
    names = [target.id for target in defined if isinstance(target, ast.Name)]
    return names if len(names) == len(defined) else []


def _mentions(node: ast.stmt) -> list[str]:
    """The names of the module that a statement may need. Names that a function defines for itself, such as the `x` of
    an example, are not included.
    """
    names, scopes = list[str](), [symtable.symtable(ast.unparse(node), "answer", "exec")]
    while scopes:
        scope = scopes.pop()
        scopes += scope.get_children()
        within = scope.get_type() != "module"
        names += [symbol.get_name() for symbol in scope.get_symbols() if symbol.is_global() or not within]
    return names
