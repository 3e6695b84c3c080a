"""A machine whose disk is a copy of another machine's, as of `gpufleet bake`: it pulls nothing, and takes nothing of
the other one's for its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.infra.boot_stubs import INSTANCE, RUN, StubNode

BUILDER = "i-0b0b0b0b0b0b0b0b0"


@pytest.fixture
def node(tmp_path: Path) -> StubNode:
    """A node on the disk of a builder that has run to its end."""
    made = StubNode(tmp_path)
    made.job_ends_with(1)
    made.boot()
    (made.root / "opt/gpufleet/instance").write_text(BUILDER + "\n")
    (made.root / "opt/gpufleet/attempt.json").write_text('{"instance": "of the builder", "exit": {"code": 9}}')
    (made.world / "calls").write_text("")
    (made.s3 / f"r1/attempts/{INSTANCE}.json").unlink()
    (made.world / "images").write_text(f"{made.image}\n")
    made.job_ends_with(0)
    return made


def test_an_image_that_the_disk_has_is_not_pulled(node: StubNode) -> None:
    outcome = node.boot()
    assert outcome.calls_starting("docker pull", RUN) == [RUN]
    assert node.stored("done.json")["reason"] == "finished"


def test_an_image_with_another_digest_is_pulled(node: StubNode) -> None:
    node.image = node.image.replace("sha256:aa", "sha256:bb")
    assert node.boot().calls_starting("docker pull", RUN) == ["docker pull", RUN]


def test_a_new_machine_takes_nothing_of_the_builder_for_its_own(node: StubNode) -> None:
    outcome = node.boot()
    assert node.stored(f"attempts/{INSTANCE}.json")["instance"] == INSTANCE
    assert "the machine was rebooted" not in outcome.log


def test_the_builder_s_script_does_nothing_on_another_machine(node: StubNode) -> None:
    of_builder = node.root / "var/lib/cloud/scripts/per-boot/gpufleet"  # what cloud-init runs before the user-data
    assert node.boot(of_builder).calls == []
