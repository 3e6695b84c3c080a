"""Which files of a run come home to its user's machine: all data, and nothing that a program of theirs runs unasked."""

from __future__ import annotations

import re

from gpufleet.job.contract import reading

METADATA = ".metadata"  # torch.distributed.checkpoint's, without which the files beside it cannot be read
# Files that programs run, or obey like programs, as soon as somebody enters, opens, completes, tests or lists their
# folder. Names of folders are free, but for a leading dot.
_RUN_UNASKED = re.compile(
    "|".join(
        (
            r"head",  # with objects/ and refs/ a folder is a git repository without a .git, whose config git obeys
            r"(gnu|bsd)?makefile(\..*)?|justfile|(rake|jake|vagrant)file|(gulp|grunt)file\..*",  # shells complete them
            r"cmakelists\.txt|cmakepresets\.json|package\.json|cargo\.toml|build\.rs|pom\.xml|build\.sbt",  # editors
            r"(build|settings)\.gradle(\.kts)?|.*\.config\.[cm]?[jt]s|.*\.code-workspace",
            r"pyproject\.toml|setup\.(py|cfg)|tox\.ini|mypy\.ini|pylintrc|conftest\.py|test_.*\.py|.*_test\.py",
            r"(site|user)customize\.py|(jupyter|ipython)_.*config\.(py|json)",
            r"mise\.toml|(flake|shell|default)\.nix",
            r"desktop\.ini|autorun\.inf|.*\.(desktop|library-ms|lnk|scf|url)",  # file managers
        )
    )
)


def refusal(name: str) -> str:
    """Why a file of this name is neither sent as a result nor brought to anybody's machine, as what follows "whose
    name"; empty: it comes.
    """
    try:
        reading.name(name)
    except reading.DoubtError as error:
        return str(error)
    *folders, file = name.casefold().split("/")
    if any(each.startswith(".") for each in (*folders, file.removeprefix(METADATA))) or _RUN_UNASKED.fullmatch(file):
        return f"is {reading.show(name)}: git, shells, editors or tests run or obey what is called so"
    return ""
