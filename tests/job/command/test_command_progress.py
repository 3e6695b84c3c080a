"""Bytes that a command prints, to lines and steps."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from gpufleet.job import atomic
from gpufleet.job.command.given import Mask
from gpufleet.job.command.output import LONGEST, Output
from gpufleet.job.command.progress import Metrics, StepReader
from gpufleet.job.contract.commit import Commit
from gpufleet.job.contract.metrics import Save
from gpufleet.job.kind import convert
from gpufleet.job.kind.command import FORMATS, CommandConfig
from tests.job.command_world import as_restored

STEP = r"^step (?P<step>\d+)( loss (?P<loss>[\d.]+))?( val (?P<val>[\d.]+))?( of (?P<total>\d+))?"


class Reading:
    """A reader of its own clock, what it has shown, and what it has understood."""

    def __init__(
        self, folder: Path, patterns: tuple[str, ...] = (STEP,), secrets: tuple[str, ...] = (), **sections: Any
    ) -> None:
        self.now, self.shown, self.notes, self.alarms = 100.0, list[str](), list[str](), list[str]()
        self.file, self.metrics = folder / "progress.jsonl", folder / "metrics.jsonl"
        tree = {
            "command": "x",
            "checkpoint": {"each": ["a-{step}"]},
            "progress": {"stdout": list(patterns)},
            **sections,
        }
        self.config = convert.from_json(CommandConfig, tree, "job", CommandConfig())
        self.progress = StepReader(Metrics(self.metrics), self.config, self.notes.append, self.alarm)
        self.begin()
        pipe, self._other = os.pipe()
        mask = Mask(secrets)
        self.output = Output(
            pipe,
            self.progress.line,
            lambda line: self.shown.append(line.decode()),
            mask,
            lambda: self.now,
            overlap=mask.longest,
        )
        os.close(pipe)
        os.close(self._other)

    def alarm(self, kind: str, text: str) -> None:
        self.alarms.append(f"{kind}: {text}")

    def begin(self, restored: Commit | None = None) -> None:
        self.progress.begin(restored, self.file)

    def take(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.now += 1.0
            self.output.take(piece)
        self.progress.flush()

    def records(self) -> list[dict[str, Any]]:
        return atomic.objects(self.metrics.read_bytes()) if self.metrics.exists() else []


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        ([b"a\nb\n"], ["a\n", "b\n"]),
        ([b"a", b"b", b"\n"], ["ab\n"]),
        ([b"a\r\nb\r\n"], ["a\n", "b\n"]),
        ([b"\r 1%", b"\r 2%", b"\r 3%", b"\nend\n"], [" 1%\n", " 3%\n", "end\n"]),  # the last state of a bar is a line
        ([b"\n\n  \n"], []),
    ],
)
def test_output_is_shown_line_by_line(tmp_path: Path, pieces: list[bytes], shown: list[str]) -> None:
    reading = Reading(tmp_path)
    reading.take(*pieces)
    assert reading.shown == shown


def test_every_byte_is_a_sign_of_life_and_a_bar_is_shown_every_ten_seconds(tmp_path: Path) -> None:
    reading = Reading(tmp_path)
    for number in range(40):
        reading.take(f"{number}\r".encode())
        assert reading.output.at == reading.now
    assert len(reading.shown) == 4


def test_a_line_without_an_end_is_cut_and_not_kept_for_ever(tmp_path: Path) -> None:
    reading = Reading(tmp_path)
    reading.take(b"x" * 100_000)
    assert sum(map(len, reading.shown)) < 70_000


@pytest.mark.parametrize(
    ("name", "lines", "step", "figures"),
    [
        ("hf-trainer", ["Map: 100%|##| 5000/5000 [00:01<00:00]\r", "  5%|#| 25/500 [00:03<05:12,  1.58it/s]\r",
                        "{'loss': 2.5, 'learning_rate': 5e-05, 'epoch': 0.1}\n", " 50%|##| 10/20 [00:01<00:01]\r"],
         25, {"loss": 2.5}),
        ("hf-trainer", [" 5%|#| 25/500 [00:03<05:12]\r", "{'eval_loss': '1.5', 'eval_runtime': '3'}\n"],
         25, {"val_loss": 1.5}),
        ("lightning", ["Epoch 2:  10%|#| 5/100 [00:01<00:09, train_loss=0.250]\r"], 205, {"loss": 0.25}),
        ("litgpt", ["Epoch 1 | iter 8 step 2 | loss train: 6.25, val: 7.5 | iter time: 10 ms (step)\n"], 2,
         {"loss": 6.25, "val_loss": 7.5}),
        ("nanochat", ["step 00250/21400 (1.17%) | loss: 3.5 | lrm: 1.00 | dt: 812.5ms | tok/sec: 64\n"], 250,
         {"loss": 3.5, "step_ms": 812.5}),
    ],
)  # fmt: skip
def test_what_a_framework_prints_is_understood(
    tmp_path: Path, name: str, lines: list[str], step: int, figures: dict[str, float]
) -> None:
    reading = Reading(tmp_path, FORMATS[name].progress)
    reading.take(*(line.encode() for line in lines))
    assert reading.progress.step == step
    (record, *_) = reversed(reading.records())
    assert {key: record[key] for key in figures} == figures


EPOCHS = FORMATS["lightning"].progress


@pytest.mark.parametrize(
    ("restored", "bars", "steps"),
    [
        (None, ["Epoch 0:  10%|9| 31/313 [", "Epoch 1:  12%|#| 31/248 ["], [31, 344]),
        (None, ["Epoch 1:  10%|9| 31/313 [", "Epoch 2:  12%|#| 31/248 ["], [31, 344]),  # counted from 1
        # A start in the last epoch, which is cut, sees no other: the checkpoint has kept how long one is.
        (as_restored(1400, batches=313, base=0), ["Epoch 4:  60%|#| 149/248 [", "Epoch 4: 100%|#| 248/248 ["],
         [1401, 1500]),
        (as_restored(1400, batches=313, base=1), ["Epoch 5:  60%|#| 149/? [", "Epoch 5: 100%|#| 248/? ["],
         [1401, 1500]),
        (as_restored(626, batches=313, base=0), ["Epoch 0:   1%|#| 5/313 [", "Epoch 2:  10%|#| 31/313 ["], [657]),
    ],
)  # fmt: skip
def test_the_steps_of_epochs_are_counted_by_what_the_run_has_shown_and_not_by_what_was_restored(
    tmp_path: Path, restored: Commit | None, bars: list[str], steps: list[int]
) -> None:
    reading = Reading(tmp_path, EPOCHS)
    reading.begin(restored)
    for bar in bars:
        reading.take(f"{bar}00:01<00:09, 9.1it/s]\r".encode())
    assert [record["step"] for record in reading.records() if record["step"]] == steps


@pytest.mark.parametrize(
    ("lines", "steps"),
    [
        (["epoch 0 loss 2", "epoch 1 loss 1"], [1, 2]),
        (["epoch 1 loss 2", "epoch 2 loss 1"], [1, 2]),
    ],
)
def test_a_run_in_epochs_counts_them_from_its_first(tmp_path: Path, lines: list[str], steps: list[int]) -> None:
    pattern = r"^epoch (?P<epoch>\d+) loss (?P<loss>[\d.]+)"
    reading = Reading(tmp_path, (pattern,), work={"epochs": 6})
    for line in lines:
        reading.take(f"{line}\n".encode())
    assert [record["step"] for record in reading.records()] == steps


@pytest.mark.parametrize(
    ("printed", "steps"),
    [
        (b"\x1b[K\x1b[1;32mstep 7\x1b[0m loss 1.5\n", [7]),  # colours, and what clears a line
        (b"\x1b]0;training\x07step 7 loss 1.5\n", [7]),  # a terminal's title
        (b"step 1,250 loss 1.5\n", [1250]),
        (b"step 12_500 loss 1.5\n", [12_500]),
        (b"step 7 loss nan\nstep 8 loss inf\n", [8]),
        (b"step 0 loss 2.5\n", []),
    ],
)
def test_lines_are_read_as_scripts_write_them(tmp_path: Path, printed: bytes, steps: list[int]) -> None:
    reading = Reading(tmp_path)
    reading.take(printed)
    assert [record["step"] for record in reading.records()] == steps


def test_a_count_in_front_of_a_comma_is_a_column(tmp_path: Path) -> None:
    reading = Reading(tmp_path, (r"^(?P<step>\d+),(?P<loss>[\d.]+)",))
    reading.take(b"12,345\n")
    assert reading.progress.step == 12
    assert reading.records()[0]["loss"] == 345


def test_a_loss_that_is_no_number_is_said_once_with_its_step_and_goes_on(tmp_path: Path) -> None:
    reading = Reading(tmp_path)
    for step in range(1, 5):
        reading.take(f"step {step} loss {'nan' if step > 2 else 1.5}\n".encode())
    assert reading.alarms == ["loss: loss is nan from step 3 on"]
    assert [(record["step"], record["loss"], record["event"]) for record in reading.records()] == [
        (1, 1.5, None),
        (2, 1.5, None),
        (3, None, "loss is nan from step 3 on"),
        (4, None, None),
    ]


BARS = (r"(?P<step>[0-9]+)/(?P<total>[0-9?]+) \[",)
DATA = ["Map:  50%|##| 25000/50000 [", "Map: 100%|##| 50000/50000 ["]


@pytest.mark.parametrize(
    ("work", "bars", "step"),
    [
        ({"steps": 200}, [*DATA, "Steps:   5%|#| 10/200 ["], 10),
        ({}, [*DATA, "Steps:   5%|#| 10/200 ["], 10),
        ({"steps": 200}, [*DATA, " 5%|#| 10/200 [", "Evaluating: 100%|##| 200/200 ["], 10),
        ({}, ["things: 100%|##| 9000/9000 [", " 5%|#| 10/200 [", "things: 6%|##| 11/200 ["], 11),  # once it trains
        ({"steps": 200}, ["50000/50000 [", "10/200 ["], 10),  # a total that is not the declared one
        ({"steps": 200}, ["10/203 ["], 10),
        ({"steps": 200}, ["100/? ["], 100),
    ],
)
def test_a_bar_of_something_else_is_none_of_the_trainings(
    tmp_path: Path, work: dict[str, Any], bars: list[str], step: int
) -> None:
    reading = Reading(tmp_path, BARS, work=work)
    reading.take(*(f"{bar}00:01<00:09, 9.1it/s]\r".encode() for bar in bars))
    assert reading.progress.step == step


def test_steps_beyond_the_last_one_show_that_lines_count_something_else_and_checkpoints_tell_them(
    tmp_path: Path,
) -> None:
    reading = Reading(tmp_path, BARS, work={"steps": 200})
    reading.take(*(f"{batch}/? [\n".encode() for batch in (180, 190)))
    reading.progress.saved(Save(step=50, reason="timed", bytes=7, blocked_s=0.0), 150.0, is_counted=True)
    assert reading.progress.step == 190
    reading.progress.flush()
    reading.take(*(f"{batch}/? [\n".encode() for batch in (230, 240, 199)))
    assert reading.progress.step == 50
    assert not reading.progress.is_believed
    assert reading.notes == [
        "a line shows step 230 of 200, so job.progress.stdout reads another number; only checkpoints count as progress:"
        " 230/? ["
    ]
    reading.progress.saved(Save(step=100, reason="timed", bytes=7, blocked_s=0.0), 160.0, is_counted=True)
    assert reading.progress.step == 100


def test_where_nobody_looks_whether_it_resumes_a_counter_that_begins_anew_goes_on(tmp_path: Path) -> None:
    reading = Reading(tmp_path, resume={"check": "none"})
    reading.begin(as_restored(30, interval=1))
    reading.take(b"step 1\n", b"step 2\n")
    assert reading.progress.step == 32


def test_a_file_of_json_lines_tells_the_same_whole_lines_only(tmp_path: Path) -> None:
    reading = Reading(tmp_path)
    reading.file.write_text(json.dumps({"step": 5, "loss": 0.5, "val": 0.6, "mfu": 0.4, "name": "x"}) + '\n{"step": 6')
    reading.progress.poll()
    assert reading.progress.step == 5
    reading.progress.flush()
    (record,) = reading.records()
    assert (record["loss"], record["val_loss"], record["mfu"]) == (0.5, 0.6, 0.4)
    assert reading.progress.val == {5: 0.6}
    with reading.file.open("a") as file:
        file.write(', "loss": 0.4}\n[]\nnothing\n{"step": ' + "9" * 400 + "}\n" + "[" * 100_000 + "\n")
    reading.progress.poll()
    assert reading.progress.step == 6


@pytest.mark.parametrize(
    ("steps", "kept", "named"),
    [
        ([1, 2, 3, 4, 5, 2, 6], [1, 2, 3, 4, 5, 6], "steps go back without a restart, from 5 to 2: ignored"),
        ([1, 2, 3, 4, 5, 9000, 6, 7], [1, 2, 3, 4, 5, 6, 7], "steps jump from 5 to 9,000"),
        ([1, 2, 3, 4, 5, 9000, 9001, 9002], [1, 2, 3, 4, 5, 9001, 9002], "steps jump from 5 to 9,000"),
        ([10, 20, 30, 40, 700], [10, 20, 30, 40, 700], ""),
        ([0, 1, 2], [1, 2], ""),
        ([5, 5, 6], [5, 5, 6], ""),
    ],
)
def test_steps_that_cannot_be_are_kept_out_and_named_once(
    tmp_path: Path, steps: list[int], kept: list[int], named: str
) -> None:
    reading = Reading(tmp_path)
    for step in [*steps, *([2] if "back" in named else [])]:
        reading.take(f"step {step}\n".encode())
    assert [record["step"] for record in reading.records()] == kept
    assert len(reading.notes) == bool(named)
    assert named in "".join(reading.notes)


def test_a_start_cuts_off_what_it_repeats_and_says_where_it_goes_on(tmp_path: Path) -> None:
    reading = Reading(tmp_path)
    for step in range(10, 60, 10):
        reading.take(f"step {step} loss 0.5\n".encode())
    reading.begin(as_restored(30))
    assert reading.progress.interval == 10
    reading.take(b"step 40 loss 0.4\n")
    assert [(each["step"], each["resumed"]) for each in reading.records()] == [
        (10, None),
        (20, None),
        (30, None),
        (40, 30),
    ]
    assert reading.progress.first is not None
    assert reading.progress.first.step == 40


def test_the_step_of_a_moment_is_the_newest_told_by_then(tmp_path: Path) -> None:
    reading = Reading(tmp_path)
    reading.take(b"step 5\n", b"step 10\n")
    moments = [reading.progress.told_by(100 + moment) for moment in (0.5, 1.0, 1.9, 2.0, 9.0)]
    assert [each.step for each in moments] == [None, 5, 5, 10, 10]
    assert [each.counting.newest and each.counting.newest.step for each in moments] == [None, 5, 5, 10, 10]


SECRET = {"me": "me-and-you", "of": [{"pw": "pw-of-a-database", "x": 'a "quote"', "u": "\u00fcber-allem"}, 5432]}
JSON = json.dumps({**SECRET, "number": 123456789})


@pytest.mark.parametrize(
    ("secret", "printed", "shown"),
    [
        ("hf_abcdefgh", b"token hf_abcdefgh!\n", "token ***!\n"),
        ("short", b"short\n", "short\n"),  # it would blank words that are none of it
        ("first-line\nsecond-line", b"second-line\n", "***\n"),
        ("hf_abcdefgh", b"hf_abc\rdefgh\n", "hf_abc\n"),  # in pieces: nobody can see that
        (JSON, b"as me-and-you with pw-of-a-database\n", "as *** with ***\n"),
        (JSON, f"{JSON}\n".encode(), "***\n"),
        (JSON, b'it is a "quote" or a \\"quote\\"\n', "it is *** or ***\n"),  # as it is, and as JSON has it
        (JSON, b"port 5432 of 123456789, in \xc3\xbcber-allem\n", "port 5432 of ***, in ***\n"),
        (json.dumps(JSON), b"pw-of-a-database\n", "***\n"),  # JSON in JSON
        ("[" * 100_000, b"[[[\n", "[[[\n"),
    ],
)
def test_the_value_of_a_secret_is_blanked(tmp_path: Path, secret: str, printed: bytes, shown: str) -> None:
    reading = Reading(tmp_path, secrets=(secret,))
    reading.take(printed)
    assert reading.shown[0] == shown
    assert all(secret not in line for line in reading.output.last if len(secret) >= 8)


@pytest.mark.parametrize("piece", [1000, 4096, 65_536])
def test_a_secret_that_lies_across_a_cut_is_blanked(tmp_path: Path, piece: int) -> None:
    secret = "pw-of-a-database-" * 20
    reading = Reading(tmp_path, secrets=(secret,))
    printed = b"".join(b"x" * (LONGEST - 7 * number) + secret.encode() for number in range(20))
    reading.take(*(printed[at : at + piece] for at in range(0, len(printed), piece)), b"\n")
    shown = "".join(reading.shown)
    assert "database" not in shown
    assert "***" in shown


def test_where_no_line_tells_a_step_checkpoints_whose_names_count_do(tmp_path: Path) -> None:
    reading = Reading(tmp_path)
    for step in (200, 400):
        reading.take(b"a bar that is drawn for nobody\n")
        reading.progress.saved(Save(step=step, reason="timed", bytes=7, blocked_s=0.0), reading.now, is_counted=True)
    reading.progress.saved(Save(step=401, reason="timed", bytes=7, blocked_s=0.0), reading.now, is_counted=False)
    reading.progress.flush()
    assert (reading.progress.first, reading.progress.step) == (None, 400)  # a save is not a printed line
    assert [record["step"] for record in reading.records()][-1] == 400
    reading.take(b"step 410\n")
    reading.progress.saved(Save(step=405, reason="timed", bytes=7, blocked_s=0.0), reading.now, is_counted=True)
    assert reading.progress.step == 410
    assert not reading.notes


TRACE = "Traceback (most recent call last):"
WATCHDOG = (
    "[rank1]:[E218 10:48:25 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective operation timeout:"
    " WorkNCCL(SeqNum=1512, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600027 milliseconds before timing out."
)


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (["Traceback", "ValueError: no GPUs found!", "torch.elastic.ChildFailedError:", "===="],
         "ValueError: no GPUs found!"),
        (["[rank0]: RuntimeError: no driver"], "[rank0]: RuntimeError: no driver"),
        (["loss 2.1 Error rate 0.3: fine"], ""),
        ([TRACE, "KeyError: 'lr'", TRACE, "subprocess.CalledProcessError: Command 'x' returned"], "KeyError: 'lr'"),
        (["[rank1]: " + TRACE, "[rank1]: ValueError: a shape", WATCHDOG], "[rank1]: ValueError: a shape"),
        ([WATCHDOG, "torch.distributed.DistBackendError: NCCL"], "NCCL: rank 1's ALLREDUCE ran for 600 s"),
        ([TRACE, "KeyError: 'a'", "During handling of the above exception, another exception occurred:", TRACE,
          "ConfigError: no a"], "ConfigError: no a"),
        (["ImportError: no flash_attn, falling back", TRACE, "OSError: [Errno 28] No space left on device"],
         "OSError: [Errno 28] No space left on device"),
        (["sh: write error: No space left on device"], "sh: write error: No space left on device"),
        (["a look", "sh: 1: torchrun: not found"], "sh: 1: torchrun: not found"),
        (["bash: line 1: accelerate: command not found"], "bash: line 1: accelerate: command not found"),
        (["python: can't open file '/app/train.py': [Errno 2] No such file or directory"],
         "python: can't open file '/app/train.py': [Errno 2] No such file or directory"),
        (["bash: ./train.sh: Permission denied"], "bash: ./train.sh: Permission denied"),
        (["usage: train.py [-h]", "train.py: error: unrecognized arguments: --lr 3"],
         "train.py: error: unrecognized arguments: --lr 3"),
        (["cache of the tokenizer: not found, downloading", "config.json not found"], ""),
        ([TRACE, "ConnectionError: once more", "step 1", "step 2", "step 3", "TypeError: x"], "TypeError: x"),
    ],
)  # fmt: skip
def test_the_cause_is_the_commands_own_first_exception_that_no_step_followed(
    tmp_path: Path, lines: list[str], cause: str
) -> None:
    reading = Reading(tmp_path)
    reading.take("".join(f"{line}\n" for line in lines).encode())
    assert reading.output.cause.text == cause
