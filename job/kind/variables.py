"""Environment variables and secrets that a definition names: checks their names and values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SECRET = re.compile(r"ssm:/[A-Za-z0-9_.\-/]{1,1000}|secretsmanager:[A-Za-z0-9/_+=.@\-]{1,500}")
# Tokens of Hugging Face, AWS and GitHub, and 40 hexadecimal digits (W&B's keys).
KEY_LIKE = re.compile(r"\bhf_[A-Za-z0-9]{20,}|\bAKIA[A-Z0-9]{16}\b|\bgh[pousr]_[A-Za-z0-9]{20,}|\b[0-9a-f]{40}\b")
NODES_OWN = ("AWS_", "GPUFLEET_")  # beginnings of names that the node sets


def without_keys(text: str) -> str:
    """The text for display, in which everything that looks like a secret key is replaced."""
    return KEY_LIKE.sub("(looks like a key)", text)


def problems(
    section: str, at: str, env: Mapping[str, str] | None, secrets: Mapping[str, str] | None
) -> Iterator[tuple[str, str]]:
    """Problems of the entries `env` and `secrets` of a section, as (key path, what is allowed). The path of the section
    is `section` in the definition, and `at` in the parameters.
    """
    for name, value in (env or {}).items():
        if not VARIABLE.fullmatch(name):
            yield f"{at}env.{name}", "a name of letters, digits and _, not beginning with a digit"
        elif name.startswith(NODES_OWN):
            yield f"{at}env.{name}", "a name that does not begin with AWS_ or GPUFLEET_: gpufleet sets those variables"
        elif name in (secrets or {}):
            yield f"{at}env.{name}", f"a name that is not in {section}.secrets too"
        elif KEY_LIKE.search(value):
            where = f"Put it under {section}.secrets"
            yield f"{at}env.{name}", f"no secret key, because run.json can be read. {where}"
    for name, value in (secrets or {}).items():
        if not VARIABLE.fullmatch(name):
            yield f"{at}secrets.{name}", "a name of letters, digits and _, not beginning with a digit"
        elif not SECRET.fullmatch(value):
            yield f"{at}secrets.{name}", "the place of the value: ssm:/name or secretsmanager:name"
