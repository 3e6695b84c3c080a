"""Whole definition files: unreadable ones, the rehearsal's form, search, pinning, and what `up` still needs."""

from __future__ import annotations

import dataclasses
import stat
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpufleet.infra.definition.loader import find, load, names_of, project_root, rehearsal_text
from gpufleet.infra.definition.pin import pin
from gpufleet.infra.errors import DefinitionError, GpufleetError
from gpufleet.infra.inputs.readiness import not_ready
from gpufleet.job.experiments.growth.spec import GrowthConfig
from tests.repository import ROOT

NOW = datetime(2026, 11, 21, 12, 0, 0, tzinfo=UTC)
SHIPPED = ROOT / "stacks" / "tinystories-growth.yaml"
AMI = "ami-0123456789abcdef0"
DIGEST = "sha256:" + "ab" * 32


def stack(folder: Path, raw: bytes) -> Path:
    path = folder / "some-stack.yaml"
    path.write_bytes(raw)
    return path


@pytest.mark.parametrize(
    ("raw", "line", "words"),
    [
        pytest.param(b"run: {owner: caf\xe9}", 1, "UTF-8", id="latin-1"),
        pytest.param(b"run:\n  id: \xff", 2, "byte 0xff", id="a binary byte"),
        pytest.param(b'run:\n  owner: "you\n  id: r1\nfleet: {}\n', 2, "not closed", id="an open quote"),
        pytest.param(b"run:\n  id: \x00", 2, "printable", id="binary"),
        pytest.param(b"", 1, "sections", id="empty"),
        pytest.param(b"# only a comment\n", 1, "sections", id="only comments"),
        pytest.param(b"- a\n- b\n", 1, "sections", id="a list"),
        pytest.param(b"just words", 1, "sections", id="a sentence"),
        pytest.param(b"run:\n\tid: r1\n", 2, "spaces", id="tabs"),
        pytest.param(b'run:\n  id: "step (\\d+)"\n', 2, "between single quotes", id="a backslash in quotes"),
        pytest.param(b"run: {id: r1\n", 1, "A { opens here and is not closed", id="an open brace"),
        pytest.param(b"run: {", 1, "A { opens here and is not closed", id="an open brace, and no more"),
        pytest.param(b"run: {\n", 2, "A [ or { opens here and is not closed", id="an open brace a line before"),
        pytest.param(b"run:\n  z: [a, b\n  id: r1\n", 2, "A [ opens here and is not closed", id="an open bracket"),
        pytest.param(b"run: {id: r1 owner: me}\n", 1, "or a comma is missing in it", id="no comma"),
        pytest.param(b"run:\n  id r1\n  owner: me\n", 3, "Line 2, `id r1`, is not `key: value`", id="no colon"),
        pytest.param(b"run:\n  id:r1\n  owner: me\n", 3, "a colon and a space are missing", id="no space"),
        pytest.param(b"a:\n  note: two: three\n", 2, "needs quotes", id="a second colon"),
        pytest.param(b"run\n  id: r1\n", 2, "Line 1, `run`, is not a section: a colon is missing", id="no colon above"),
        pytest.param(b"a:\n  - b\n    c: d\n", 3, "Line 2 is indented by 2, line 3 by 4", id="a key under an item"),
        pytest.param(
            b"a:\n  - b: c\n  d: e\n", 3, "Line 2 is an item of a list, but line 3 is a key", id="items and keys"
        ),
        pytest.param(
            b"run:\n  owner: me\n  id r1\n\n# where\nfleet:\n  ami: x\n",
            3,
            "a colon and a space",
            id="a section's last",
        ),
        pytest.param(b"run:\n  id: @r1\n", 2, "This is not YAML: found character '@'", id="no YAML"),
        pytest.param(b"", 1, "'an empty file' is not accepted", id="empty, in words"),
        pytest.param(b"run:\n  id: r1\n   owner: me\n", 3, "YAML", id="wrong indentation"),
        pytest.param(
            b"run:\n  id: r1\n   owner: me\n", 3, "Line 2 is indented by 2, line 3 by 3", id="one space too many"
        ),
        pytest.param(
            b"run:\n   id: r1\n   # me\n  owner: me\n", 4, "Line 2 is indented by 3, line 4 by 2", id="one too few"
        ),
        pytest.param(b"run: {id: r1}\nrun: {id: r2}\n", 2, "each key once", id="a section twice"),
        pytest.param(b"run: {id: r1, id: r2}\n", 1, "First at line 1", id="a key twice"),
        pytest.param(b"a: &x [1]\nb: *x\n", 2, "write it out", id="alias"),
        pytest.param(b"a: &x [*x]\n", 1, "write it out", id="alias of itself"),
        pytest.param(b"run: !!python/object:os.system {}\n", 1, "tag", id="tag"),
        pytest.param(b"run: {}\n---\nrun: {}\n", 2, "one document", id="two documents"),
        pytest.param(b"? [a]\n: b\n", 1, "name as a key", id="a list as key"),
        pytest.param(b"a: " + b"[" * 5000, 1, "levels", id="5000 levels"),
        pytest.param(b"#" * 300_000, 1, "262144 bytes", id="large"),
    ],
)
def test_a_file_that_cannot_be_read_says_where_and_why(tmp_path: Path, raw: bytes, line: int, words: str) -> None:
    with pytest.raises(DefinitionError) as caught:
        load(stack(tmp_path, raw), now=NOW)
    assert caught.value.problems[0].line == line
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "raw", [b"run:\n  id r1 %s\n  owner: me\n", b"run:\n  id: [%s\n", b"run: {%s: 1}\n", b"run: {id: '%s'}\n"]
)
def test_a_line_of_any_length_gives_a_short_message(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "broken.yaml").write_bytes(raw.replace(b"%s", b"z" * 900))
    with pytest.raises(DefinitionError) as refused:
        load(tmp_path / "broken.yaml", now=NOW)
    assert all(len(str(problem)) < 600 for problem in refused.value.problems)


@pytest.mark.parametrize(
    "odd",
    ["[{a: [b]}]", pytest.param("1e999", marks=pytest.mark.slow), pytest.param("'é\\t\"'", marks=pytest.mark.slow)],
)
def test_no_value_anywhere_in_a_file_can_crash_the_loader(tmp_path: Path, odd: str) -> None:
    lines, refused = SHIPPED.read_text().splitlines(), []
    for number, line in enumerate(lines):
        key, colon, _ = line.partition(":")
        if colon and not line.startswith("#"):
            try:
                load(
                    stack(tmp_path, "\n".join([*lines[:number], f"{key}: {odd}", *lines[number + 1 :]]).encode()),
                    now=NOW,
                )
            except DefinitionError as error:
                refused.append(str(error))
    assert len(refused) > 30


def test_a_key_that_looks_like_a_path_is_only_unknown(tmp_path: Path) -> None:
    with pytest.raises(DefinitionError) as caught:
        load(stack(tmp_path, SHIPPED.read_bytes().replace(b"\nscenarios:", b"  run[x].id: 1\n\nscenarios:")), now=NOW)
    assert [problem.path for problem in caught.value.problems] == ["rehearsal.run[x].id"]


def test_a_long_value_is_cut_in_the_message(tmp_path: Path) -> None:
    with pytest.raises(DefinitionError) as caught:
        load(stack(tmp_path, SHIPPED.read_bytes().replace(b"id: r1", b"id: " + b"r" * 100_000)), now=NOW)
    assert len(str(caught.value)) < 1000


def test_a_missing_file_is_no_traceback(tmp_path: Path) -> None:
    with pytest.raises(GpufleetError, match=r"cannot be read: No such file"):
        load(tmp_path / "nothing.yaml", now=NOW)


def test_the_rehearsal_overlays_sections_key_by_key() -> None:
    plain, rehearsed = load(SHIPPED, now=NOW), load(SHIPPED, now=NOW, rehearsal=True)
    model, small = (
        each.job.parameters.model for each in (plain, rehearsed) if isinstance(each.job.parameters, GrowthConfig)
    )
    assert (model.width, small.width) == (832, 64)
    assert small.experts == model.experts
    assert rehearsed.job.image == plain.job.image
    assert rehearsed.storage.dataset == "data/generated-stories"
    assert rehearsed.storage.root == plain.storage.root
    assert rehearsed.run == plain.run
    assert plain.interruptions == rehearsed.interruptions


def test_the_rehearsals_text_is_a_plain_file_that_loads_to_the_same_object(tmp_path: Path) -> None:
    path = tmp_path / SHIPPED.name
    path.write_text(rehearsal_text(SHIPPED))
    again = load(path, now=NOW)
    assert dataclasses.replace(again, source=SHIPPED) == load(SHIPPED, now=NOW, rehearsal=True)
    assert again == load(path, now=NOW, rehearsal=True)
    assert rehearsal_text(path) == path.read_text()


def test_the_rehearsals_text_keeps_quoting_and_odd_values(tmp_path: Path) -> None:
    text = SHIPPED.read_text().replace("owner: you ", "owner: 'null' ").replace("  root:", "  base_weights:\n  root:")
    text = text.replace("steps_per_phase: 1000", 'eval: {prompts: ["yes: no", "# not a comment", "é  "]}')
    path = stack(tmp_path, text.encode())
    loaded = load(path, now=NOW, rehearsal=True)
    assert isinstance(loaded.job.parameters, GrowthConfig)
    assert loaded.job.parameters.eval.prompts == ("yes: no", "# not a comment", "é  ")
    assert loaded.run.owner == "null"
    assert loaded.storage.base_weights is None
    path.write_text(rehearsal_text(path))
    assert load(path, now=NOW) == loaded


def test_find_takes_a_name_or_a_path_and_names_the_nearest() -> None:
    assert find("tinystories-growth", ROOT) == SHIPPED
    assert find(str(SHIPPED), Path("/nowhere")) == SHIPPED
    with pytest.raises(GpufleetError, match=r"Nearest: tinystories-growth"):
        find("tinystory-grow", ROOT)
    with pytest.raises(GpufleetError, match=r"Nearest: tinystories-growth"):
        find("TINYSTORIES-GROWTH", ROOT)
    with pytest.raises(GpufleetError, match=r"no file stacks/none.yaml"):
        find("stacks/none.yaml", ROOT)
    with pytest.raises(GpufleetError, match=r"stacks is a folder, but a stack is one file: name the file"):
        find(str(SHIPPED.parent), ROOT)
    with pytest.raises(GpufleetError, match=r"inside the project"):
        find("x", Path(__file__).parent)


@pytest.mark.parametrize("written", ["tinystories-growth.yaml", "stacks/tinystories-growth", "tinystories-growth.yml"])
def test_a_path_that_misses_a_stack_that_is_there_says_its_name(written: str) -> None:
    with pytest.raises(GpufleetError, match=r"no file .*; stacks/tinystories-growth.yaml is there: write tinystories-"):
        find(written, ROOT)


def test_a_stack_with_the_other_ending_is_told_to_take_this_one(tmp_path: Path) -> None:
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks" / "mine.yml").touch()
    with pytest.raises(GpufleetError, match=r"stacks/mine\.yml has the wrong ending: rename it to mine\.yaml"):
        find("mine", tmp_path)


def test_a_hidden_file_is_no_stack(tmp_path: Path) -> None:
    (tmp_path / "stacks").mkdir()
    for name in ("mine.yaml", "._mine.yaml"):  # macOS writes the second file beside the first on foreign disks
        (tmp_path / "stacks" / name).touch()
    assert names_of(tmp_path) == ["mine"]


def test_a_folder_called_like_a_stack_is_not_offered_as_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "stacks" / "foo.yaml").mkdir(parents=True)
    with pytest.raises(GpufleetError, match=r"foo.yaml is a folder or device"):
        find("foo", tmp_path)


def test_the_project_is_found_from_a_folder_inside_it() -> None:
    assert project_root(ROOT / "infra" / "cost") == ROOT
    assert project_root(Path("/")) == Path("/")


def image_in(text: str) -> str:
    return next(line for line in text.splitlines() if "image:" in line).split("image: ")[1].strip()


def test_pin_changes_two_values_and_no_other_byte(tmp_path: Path) -> None:
    before = SHIPPED.read_text()
    path = stack(tmp_path, before.encode())
    path.chmod(0o640)
    image = image_in(before) + "@" + DIGEST
    pin(path, ami=AMI, image=image)
    expected = before.replace("ami: unpinned ", f"ami: {AMI} ").replace(image_in(before), image)
    assert path.read_bytes() == expected.encode()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    pin(path, ami=AMI, image=image)
    assert path.read_bytes() == expected.encode()


@pytest.mark.parametrize(
    ("written", "after"),
    [
        pytest.param("fleet: {ami: unpinned, region: x}", f"fleet: {{ami: {AMI}, region: x}}", id="flow"),
        pytest.param("fleet:\n  'ami': \"unpinned\"  # c", f"fleet:\n  'ami': \"{AMI}\"  # c", id="quoted"),
        pytest.param("fleet:\r\n  ami:   unpinned\r\n", f"fleet:\r\n  ami:   {AMI}\r\n", id="windows lines"),
        pytest.param("fleet:\n  ami:", f"fleet:\n  ami: {AMI}", id="nothing yet"),
        pytest.param("fleet:\n  ami:\n    unpinned\n", f"fleet:\n  ami:\n    {AMI}\n", id="on the next line"),
        pytest.param("fleet:\n  ami: ünpinned # é\n", f"fleet:\n  ami: {AMI} # é\n", id="accents"),
        pytest.param("fleet:\n  # c\n  region: x", f"fleet:\n  # c\n  ami: {AMI}\n  region: x", id="no key"),
        pytest.param("fleet:\n  ami: ami-00000000\n", f"fleet:\n  ami: {AMI}\n", id="pinned before"),
    ],
)
def test_pin_copes_with_every_way_to_write_one_line(tmp_path: Path, written: str, after: str) -> None:
    path = stack(tmp_path, f"# ü\njob: {{image: 'r.example/a:1'}}\n{written}".encode())
    pin(path, ami=AMI, image=f"r.example/a:1@{DIGEST}")
    assert path.read_bytes().decode() == f"# ü\njob: {{image: 'r.example/a:1@{DIGEST}'}}\n{after}"


@pytest.mark.parametrize(
    ("written", "words"),
    [
        pytest.param("fleet: {region: x}", "Add the line `ami: unpinned` under `fleet:`", id="no key in braces"),
        pytest.param("fleet: {\n  region: x\n }", "Add the line `ami: unpinned`", id="no key in braces over lines"),
        pytest.param("fleet:\n  ami: >\n    unpinned\n", "on one line", id="folded"),
        pytest.param("fleet:\n  ami: [unpinned]\n", "Add the line", id="a list"),
    ],
)
def test_pin_says_what_to_do_where_it_cannot_write(tmp_path: Path, written: str, words: str) -> None:
    raw = f"job: {{image: r.example/a:1}}\n{written}".encode()
    path = stack(tmp_path, raw)
    with pytest.raises(DefinitionError, match=words):
        pin(path, ami=AMI, image=f"r.example/a:1@{DIGEST}")
    assert path.read_bytes() == raw


def test_pin_follows_a_link_instead_of_replacing_it(tmp_path: Path) -> None:
    real = stack(tmp_path, b"job: {image: r.example/a:1}\nfleet: {ami: unpinned}\n")
    link = tmp_path / "link.yaml"
    link.symlink_to(real)
    pin(link, ami=AMI, image=f"r.example/a:1@{DIGEST}")
    assert link.is_symlink()
    assert AMI in real.read_text()


def test_what_up_still_needs_is_said_in_one_sentence_each(tmp_path: Path) -> None:
    definition = load(SHIPPED, now=NOW)
    sentences = not_ready(definition, tmp_path)
    assert [sentence.split(" ")[0].rstrip(",") for sentence in sentences] == [
        "fleet.ami",
        "job.image",
        "storage.dataset",
    ]
    assert all("run `gpufleet " in sentence for sentence in sentences)


def test_a_pinned_stack_on_an_s3_dataset_is_ready(tmp_path: Path) -> None:
    definition = load(SHIPPED, now=NOW)
    ready = dataclasses.replace(
        definition,
        fleet=dataclasses.replace(definition.fleet, ami=AMI),
        job=dataclasses.replace(definition.job, image=f"{definition.job.image}@{DIGEST}"),
        storage=dataclasses.replace(definition.storage, dataset="s3://somewhere/tokens"),
    )
    assert not_ready(ready, tmp_path) == []
    weights = dataclasses.replace(ready, storage=dataclasses.replace(ready.storage, base_weights="data/weights"))
    assert not_ready(weights, tmp_path)[0].startswith("storage.base_weights, data/weights, is not there")


def test_advice_for_a_file_that_is_not_in_stacks_names_its_path(tmp_path: Path) -> None:
    elsewhere = tmp_path / "my plans" / "xx.yaml"
    elsewhere.parent.mkdir()
    elsewhere.write_text(SHIPPED.read_text())
    assert f"run `gpufleet doctor '{elsewhere}' --pin`" in not_ready(load(elsewhere, now=NOW), tmp_path)[0]
    assert "run `gpufleet doctor tinystories-growth --pin`" in not_ready(load(SHIPPED, now=NOW), ROOT)[0]
