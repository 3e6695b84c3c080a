"""What `make setup` compiles ahead is what the first commands import."""

from __future__ import annotations

import re

from tests.repository import ROOT


def test_setup_compiles_the_provider_modules_that_the_program_imports_and_no_others() -> None:
    left_out = re.search(r"-m compileall .* -x '([^']+)'", (ROOT / "Makefile").read_text())
    assert left_out is not None
    resources = (ROOT / "infra/program/resources").glob("*.py")
    used = {name for path in resources for name in re.findall(r"\baws\.([a-z0-9]+)\.", path.read_text())}
    assert {"ec2", "s3"} <= used
    for name in (*used, "rds", "sagemaker"):
        path = f".venv/lib/python3.11/site-packages/pulumi_aws/{name}/x.py"
        assert (re.search(left_out[1], path) is None) == (name in used), name
    assert re.search(left_out[1], ".venv/lib/python3.11/site-packages/pulumi_aws/_utilities.py") is None
