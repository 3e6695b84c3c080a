"""bench/gpu.sh, the prepared quarter of an hour on a GPU: a part that is cut off takes no other with it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from tests.repository import ROOT

SCRIPT = ROOT / "bench" / "gpu.sh"
PARTS = re.findall(r'^part (\S+) "\$python" (-m pytest|bench/\w+\.py) *(.*)$', SCRIPT.read_text(), re.MULTILINE)


def test_a_part_that_hangs_or_fails_leaves_what_it_has_printed_and_the_others(tmp_path: Path) -> None:
    stub = tmp_path / "python"
    stub.write_text(
        '#!/usr/bin/env bash\necho "measured $*"\ncase $* in *serving*) exec sleep 5000 ;; *judge*) exit 3 ;; esac\n'
    )
    stub.chmod(0o755)
    here = {**os.environ, "PYTHON": str(stub), "LIMIT_S": "1"}
    subprocess.run([SCRIPT, tmp_path / "found", "clone"], cwd=ROOT, env=here, check=True, stdout=subprocess.DEVNULL)
    ended = {"serving": 124, "judge": 3}
    for name, program, _ in PARTS:
        first, *_, last = (tmp_path / "found" / f"{name}.txt").read_text().splitlines()
        assert first.startswith(f"measured {program}")
        assert last == f"exit code {ended.get(name, 0)}"


def test_its_parts_are_programs_with_these_options_and_fit_into_a_quarter_of_an_hour() -> None:
    assert len(PARTS) * 120 <= 15 * 60
    assert len(PARTS) == SCRIPT.read_text().count("\npart ")
    for _, program, words in PARTS:
        if program == "-m pytest":
            assert all((ROOT / word).exists() for word in words.split() if word.startswith("tests/"))
            continue
        options = re.findall(r"--\w+", (ROOT / program).read_text())  # their --help imports torch, which takes seconds
        assert set(re.findall(r"--\w+", words)) <= set(options)
