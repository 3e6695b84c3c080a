"""A script whose Python lacks a module is reported before it runs, and a script that may run is not refused."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from gpufleet.infra.discover.lacking import lacking

PYTHON = Path(sys.executable)


def missing(folder: Path, text: str, command: str = "python train.py --out {checkpoints}") -> dict[str, str]:
    (folder / "train.py").write_text(text)
    return lacking(folder, command, PYTHON, os.environ)


def test_modules_that_its_files_import_are_named_with_their_places(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "__init__.py").write_text("from .inner import x\n")
    (tmp_path / "net" / "inner.py").write_text("import absent_two\n")
    text = "import json, yaml\nfrom absent_one.part import x\nfrom net import y\n"
    assert missing(tmp_path, text) == {"absent_one": "train.py:2", "absent_two": "net/inner.py:1"}


@pytest.mark.parametrize(
    "command",
    ["torchrun --standalone train.py", "python {code}/train.py", "cd . && LR=1 python -u train.py", "python -m train"],
)
def test_the_script_is_found_in_any_command(tmp_path: Path, command: str) -> None:
    assert missing(tmp_path, "import absent", command) == {"absent": "train.py:1"}


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    import absent\nexcept ImportError:\n    pass",
        "def f():\n    import absent",
        "if 0:\n    import absent",
        "import sys\nsys.path.append('..')\nimport absent",
        "import made_by_a_build",
        "import os.path, numpy.linalg",
        "import (",
    ],
)
def test_an_import_that_may_succeed_or_never_run_refuses_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "made_by_a_build.so").touch()
    assert missing(tmp_path, text) == {}


@pytest.mark.parametrize(
    "command",
    [
        "uv run python train.py",
        "conda run -n mine python train.py",
        ". ../venv/bin/activate && python train.py",
        "/opt/mine/bin/python train.py",
        "PYTHONPATH=../lib python train.py",
        "pip install absent && python train.py",
        "python gone.py",
        "yolo train",
    ],
)
def test_a_command_that_chooses_its_python_is_not_judged(tmp_path: Path, command: str) -> None:
    assert missing(tmp_path, "import absent", command) == {}


def test_a_python_that_does_not_answer_refuses_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import absent")
    assert lacking(tmp_path, "python train.py", Path("/bin/false"), os.environ) == {}
