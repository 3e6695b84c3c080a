"""Scripts of transformers and of Lightning, from `gpufleet new` to the end of a rehearsal, as a new user would."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from gpufleet.infra import cli
from gpufleet.rehearsal.rehearse import rehearse
from tests.repository import ROOT

pytestmark = pytest.mark.optional
SCRIPTS = Path(__file__).parent / "scripts"
SMALL = {  # what a user changes of the file that is written: how long the rehearsal is
    "hf_trainer": {"--max_steps 60 --save_steps 10": "--max_steps 400 --save_steps 50", "steps: 60": "steps: 400"},
    "lightning_fit": {
        "--max_steps 60 --save_every 10": "--max_steps 3000 --save_every 200",
        "steps: 60": "steps: 3000",
    },
}


@pytest.mark.parametrize(
    ("name", "package", "command", "told"),
    [
        (
            "hf_trainer",
            "transformers",
            "python hf_trainer.py --output_dir {checkpoints} --max_steps 5000 --save_steps 500"
            " --enable_jit_checkpoint true",
            "it did: write job.stop.saves: true",
        ),
        ("lightning_fit", "lightning", "python lightning_fit.py", ""),  # its saves alone tell steps: it may be either
    ],
)
def test_a_framework_that_saves_on_a_signal_loses_nothing_to_a_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str, command: str, told: str
) -> None:
    pytest.importorskip(package)
    code, project = tmp_path / "code", tmp_path / "project"
    code.mkdir()
    shutil.copy(SCRIPTS / f"{name}.py", code)
    (project / "stacks").mkdir(parents=True)
    shutil.copy(ROOT / "Pulumi.yaml", project)
    monkeypatch.chdir(project)
    assert cli.main(["new", "mine", "--code", str(code), "--command", command]) == 0
    path = project / "stacks" / "mine.yaml"
    text = (
        path.read_text().replace("every: {steps: 10}", "every: {steps: 50}").replace("step_ms: [500]", "step_ms: [50]")
    )
    for found, instead in SMALL[name].items():
        assert found in text
        text = text.replace(found, instead)
    path.write_text(text.replace("rehearsal:  ", f"rehearsal:\n  python: {sys.executable}\n  #", 1))
    said: list[str] = []
    assert rehearse("mine", root=project, out=said.append) == 0, "\n".join(said)
    summary = json.loads((project / "rehearsals" / "mine" / "r1" / "summary.json").read_text())
    assert [each.split()[0] for each in summary["interruptions"]] == ["notice", "loss"]
    assert any(f"saves on the signal of a notice: {told}" in line for line in said)
