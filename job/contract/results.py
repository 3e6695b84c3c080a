"""Decides which of a run's files are downloaded to the user's machine: all except those that a program would run
without being asked.
"""

from __future__ import annotations

import re

from gpufleet.job.contract import reading

METADATA = ".metadata"  # torch.distributed.checkpoint's index, which is needed to read its files
# Names of files that programs run, or from which they take commands, as soon as somebody enters, opens, completes,
# tests or lists their folder. Folders may have any name without a leading dot.
_RUN_UNASKED = re.compile(
    "|".join(
        (
            # with objects/ and refs/ beside it, a file HEAD makes a folder a git repository, whose config git follows
            r"head",
            # files that shells read for completion
            r"(gnu|bsd)?makefile(\..*)?|justfile|(rake|jake|vagrant)file|(gulp|grunt)file\..*",
            # Files that editors run.
            r"cmakelists\.txt|cmakepresets\.json|package\.json|cargo\.toml|build\.rs|pom\.xml|build\.sbt",
            r"(build|settings)\.gradle(\.kts)?|.*\.config\.[cm]?[jt]s|.*\.code-workspace",
            r"pyproject\.toml|setup\.(py|cfg)|tox\.ini|mypy\.ini|pylintrc|conftest\.py|test_.*\.py|.*_test\.py",
            r"(site|user)customize\.py|(jupyter|ipython)_.*config\.(py|json)",
            r"mise\.toml|(flake|shell|default)\.nix",
            r"desktop\.ini|autorun\.inf|.*\.(desktop|library-ms|lnk|scf|url)",  # files that file managers run
        )
    )
)


def refusal(name: str) -> str:
    """Why a file of this name is not transferred, as words that follow "whose name"; empty if it is transferred."""
    try:
        reading.name(name)
    except reading.DoubtError as error:
        return str(error)
    *folders, file = name.casefold().split("/")
    if any(part.startswith(".") for part in (*folders, file.removeprefix(METADATA))) or _RUN_UNASKED.fullmatch(file):
        return f"is {reading.show(name)}: git, shells, editors or tests run or obey files of that name"
    return ""
