"""Documents as somebody else may have written them: every value replaced by each that it cannot be, and torn files."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from typing import Any

DEEP = "[" * 2_000 + "]" * 2_000  # more than Python follows
HUGE = "1" + "0" * 400
VALUES = ("null", "true", '"x"', '""', "-1", "0.5", "1e400", "NaN", HUGE, f'"{HUGE}"', "[]", "{}", "[[7]]", '{"a": {}}',
          r'"\ud800"', r'"\u001b[2J"', '"../x"', '"/usr/x"', "[null]", '"1e9999"', DEEP)  # fmt: skip


def mutations(tree: Any) -> Iterator[bytes]:
    """The bytes of `tree`, each of its values replaced or left out; then what is no such document at all."""
    gc.collect()
    gc.disable()  # at the depth where Python gives up, a finalizer of another test's garbage would give up too
    try:
        whole = json.dumps(tree)
        for path in _paths(tree):
            marked = json.dumps(_with_value(tree, path, "\0here"))
            for value in VALUES:
                yield marked.replace(json.dumps("\0here"), value).encode()
            if path:
                yield json.dumps(_without_value(tree, path)).encode()
        for end in (0, 1, len(whole) // 3, len(whole) - 1):
            yield whole[:end].encode()
        yield from (b"\xff\xfe\0", b"\x00", b"null", DEEP.encode(), whole.encode() * 2, f"[{whole}]".encode())
    finally:
        gc.enable()


def _paths(tree: Any) -> Iterator[tuple[Any, ...]]:
    yield ()
    children = tree.items() if isinstance(tree, dict) else enumerate(tree[:2]) if isinstance(tree, list) else ()
    for key, value in children:
        yield from ((key, *rest) for rest in _paths(value))


def _with_value(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    key, *rest = path
    changed = _with_value(tree[key], tuple(rest), value)
    return {**tree, key: changed} if isinstance(tree, dict) else [*tree[:key], changed, *tree[key + 1 :]]


def _without_value(tree: Any, path: tuple[Any, ...]) -> Any:
    *above, key = path
    parent = tree
    for step in above:
        parent = parent[step]
    left = (
        {k: v for k, v in parent.items() if k != key} if isinstance(parent, dict) else parent[:key] + parent[key + 1 :]
    )
    return _with_value(tree, tuple(above), left)
