"""What a node tells by e-mail and webhook, and the hour at which AWS tells that nothing trains."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from gpufleet.job.contract.aws import SILENCE
from gpufleet.job.contract.messages import Alarm
from gpufleet.job.node import notices
from gpufleet.job.node.notices import TOLD_ALARM, TOLD_MOST, Notices
from gpufleet.job.node.outside import Said
from tests.infra.boot_stubs import INSTANCE, BootOutcome, StubNode

TOPIC = "arn:aws:sns:us-east-2:111122223333:gpufleet-x"
SILENT_S = 6 * 3600
RUN = "gpufleet tinystories-growth, run r1"


@pytest.fixture
def node(tmp_path: Path) -> StubNode:
    made = StubNode(tmp_path)
    made.launched(minutes_ago=2)
    made.notify = {"topic": TOPIC, "webhook": "", "silent_s": SILENT_S}
    return made


def spends(
    node: StubNode,
    usd: float,
    *,
    trained: bool = True,
    attempt: int = 1,
    alarm: Alarm | None = None,
    waits_min: float = 0,
    until: str,
) -> None:
    """A job that has told this, and ends once `until` holds."""
    told = {"spent_usd": str(usd), "spent_s": "3600", "at": time.time(), "attempt": attempt}
    told |= {"trained_at": time.time()} if trained else {}
    told |= {"waits_since": time.time() - 60 * waits_min} if waits_min else {}
    node.job_ends_with(
        0,
        f"find {node.root} -path '*/run/run.json' -printf '%h\\n' >$WORLD/folder\n"
        + (f"echo '{json.dumps(asdict(alarm))}' >$(cat $WORLD/folder)/{alarm.FILE}\n" if alarm else "")
        + f"echo '{json.dumps(told)}' >$(cat $WORLD/folder)/control/spent.json\n"
        f"until {until}; do /bin/sleep 0.05; done",
    )


def subjects(node: StubNode) -> list[str]:
    """Subjects of the messages, without the run's name."""
    path = node.world / "told"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.removeprefix(f"{RUN}: ") for line in lines if line.startswith(f"{RUN}: ") and "Node i-" not in line]


def text(node: StubNode) -> str:
    return (node.world / "told").read_text()


def test_of_two_nodes_the_one_that_ended_the_run_says_so(node: StubNode) -> None:
    node.nodes = 2
    node.imds("meta-data/local-ipv4", "10.1.2.3")
    done = node.s3 / "r1/done.json"
    spends(node, 11.9, trained=False, until=f"""echo '{{"reason": "finished", "instance": "i-other"}}' >{done}""")
    node.boot()
    assert subjects(node) == []


def test_a_run_is_told_to_train_and_to_end_with_its_figures_and_silence_is_expected_then(node: StubNode) -> None:
    spends(node, 3.2, until=f'grep -q "it trains" $WORLD/told && grep -q {SILENCE} $WORLD/moves')

    node.boot()

    assert subjects(node) == ["it trains", "it is over: finished"]
    assert "Spent: 3.20 of 1000 USD, 1.0 of 100 billed hours. Node i-0123456789abcdef0, g5.2xlarge in" in text(node)
    assert "What it does now: gpufleet status tinystories-growth" in text(node)
    assert node.moves(SILENCE)[0] == node.after_a_moment_of_its_life(SILENT_S)
    assert json.loads((node.world / "moves").read_text().splitlines()[-1])["State"] == "DISABLED"


def test_a_later_node_trains_on(node: StubNode) -> None:
    spends(node, 3.2, attempt=2, until='grep -q "it trains" $WORLD/told')
    node.boot()
    assert subjects(node)[0] == "it trains on, node 2 of the run"


@pytest.mark.parametrize("minutes", [14, 16])
def test_the_oldest_of_several_that_wait_tells_after_a_quarter_of_an_hour_and_of_most_of_the_cap(
    node: StubNode, minutes: float
) -> None:
    node.nodes = 2
    node.imds("meta-data/local-ipv4", "10.1.2.3")
    spends(node, 850, waits_min=minutes, trained=False, until='grep -q "is used up" $WORLD/told')
    node.boot()
    waits = [each for each in subjects(node) if each.startswith("a node has waited for others for")]
    assert waits == [f"a node has waited for others for {minutes} minutes, billed"][: minutes >= 15]
    assert "85% of max_usd is used up" in subjects(node)


def test_one_of_several_that_neither_waits_as_the_oldest_nor_trains_says_nothing(node: StubNode) -> None:
    node.nodes = 2
    node.imds("meta-data/local-ipv4", "10.1.2.3")
    spends(node, 850, trained=False, until="[ -e $WORLD/s3/gpufleet-test/r1/attempts ] && /bin/sleep 0.5")
    node.boot()
    assert not [each for each in subjects(node) if "used up" in each or "waited" in each]


def test_while_nothing_trains_the_hour_stays_where_it_is(node: StubNode) -> None:
    spends(node, 3.2, trained=False, until="[[ -e $WORLD/never ]] || [[ $((SECONDS)) -gt 1 ]]")
    node.boot()
    assert node.moves(SILENCE)[:-1] == []  # only the end, which disables it
    assert subjects(node) == ["it is over: finished"]


@pytest.mark.parametrize(
    ("limits", "share"), [({"max_usd": "4"}, "80% of max_usd"), ({"max_hours": "1.1"}, "91% of max_hours")]
)
def test_most_of_a_limit_is_told_once_in_a_run(node: StubNode, limits: dict[str, str], share: str) -> None:
    node.limits |= limits
    spends(node, 3.2, until=f"[[ -e $WORLD/s3/gpufleet-test/r1/{TOLD_MOST} ]]")

    node.boot()

    assert subjects(node)[:2] == ["it trains", f"{share} is used up"]
    (node.world / "told").unlink()
    again = StubNode(node.root.parent / "again")
    again.launched(minutes_ago=2)
    again.notify, again.limits = node.notify, node.limits
    again.put(TOLD_MOST, "told")
    spends(again, 3.2, until='grep -q "it trains" $WORLD/told')
    again.boot()
    assert subjects(again) == ["it trains", "it is over: finished"]


def test_what_a_job_warns_of_is_told_once_in_a_run(node: StubNode) -> None:
    key = f"{TOLD_ALARM}loss"
    warning = Alarm(kind="loss", text="loss is nan from step 21 on")
    for each, told in ((node, True), (StubNode(node.root.parent / "again"), False)):
        each.launched(minutes_ago=2)
        each.notify = node.notify
        if not told:
            each.put(key, "told")
        spends(each, 3.2, until='grep -q "it trains" $WORLD/told', alarm=warning)
        each.boot()
        assert ("warning: loss is nan from step 21 on" in subjects(each)) is told


def test_a_notice_and_a_crash_are_told(node: StubNode) -> None:
    node.notice()
    node.job_ends_with(75)
    node.boot()
    assert subjects(node) == ["AWS takes the node, and the run waits for another"]


def test_a_node_that_leaves_since_it_is_slow_is_not_said_to_be_taken(node: StubNode) -> None:
    written = node.s3 / f"r1/attempts/{INSTANCE}.json"
    node.job_ends_with(75, f"""echo '{{"exit": {{"code": 75, "reason": "slow"}}}}' > {written}""")
    node.boot()
    assert subjects(node) == ["a slow node leaves, and the run waits for another"]


def test_a_crash_is_told_with_its_reason(node: StubNode) -> None:
    node.job_ends_with(1)
    node.boot()
    assert subjects(node) == ["a node has failed, the container ended with 1"]


def test_what_cannot_be_told_is_said_and_keeps_nothing_from_ending(node: StubNode) -> None:
    node.fails("sns", "scheduler")
    outcome = node.boot()
    assert "no message could be sent by e-mail" in outcome.log
    assert "the schedule that reports silence cannot be disabled" in outcome.log
    assert node.stored("done.json")["reason"] == "finished"


def test_nobody_named_nobody_told(node: StubNode) -> None:
    node.notify = {}
    outcome = node.boot()
    assert not [call for call in outcome.calls if "sns" in call or SILENCE in call]


class Hook(BaseHTTPRequestHandler):
    """Keeps what is posted, and answers with the server's code."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.taken.append(json.loads(body))  # type: ignore[attr-defined]
        self.send_response(self.server.code)  # type: ignore[attr-defined]
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hook() -> Iterator[Any]:
    server: Any = HTTPServer(("127.0.0.1", 0), Hook)
    server.taken, server.code = [], 200
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def with_hook(node: StubNode, hook: Any) -> BootOutcome:
    node.notify["webhook"] = "ssm:/team/hook"
    (node.world / "secret").write_text(f"http://127.0.0.1:{hook.server_port}/T0/secret\n")
    return node.boot()


def test_a_webhook_gets_what_slack_takes_and_its_address_is_in_no_file(node: StubNode, hook: Any) -> None:
    outcome = with_hook(node, hook)
    assert [each.keys() for each in hook.taken] == [{"text"}]
    assert hook.taken[0]["text"].startswith(f"{RUN}: it is over: finished.")
    assert "T0/secret" not in outcome.log
    assert not [path for path in node.root.rglob("*") if path.is_file() and b"T0/secret" in path.read_bytes()]


def served(answer: bytes) -> str:
    """The URL of a server that answers so, once, and then no more; without a byte it leaves the connection open."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listening:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)
                if not answer:
                    connection.recv(1)

    threading.Thread(target=serve, daemon=True).start()
    return f"http://127.0.0.1:{listening.getsockname()[1]}/SECRET"


ANSWERS = {
    "nothing": b"",
    "garbage": b"garbage\r\n\r\n",
    "300 headers": b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 300 + b"\r\n",
    "a long line": b"HTTP/1.1 200 " + b"x" * 100_000,
    "a code of words": b"HTTP/1.1 many OK\r\n\r\n",
    "elsewhere": b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/SECRET\r\n\r\n",
    "to a file": b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\n\r\n",
    "no": b"HTTP/1.1 410 Gone\r\n\r\n",
}
URLS = (
    *("https://hooks.example.com/T0/SECRET TOKEN", "file:///SECRET", "http://hooks.example.com/SECRET", "SECRET", ""),
    *(
        "https://[SECRET",
        "https:///SECRET",
        "data:,SECRET",
        "ftp://127.0.0.1/SECRET",
        "https://a:SECRET/",
        "\x00SECRET",
    ),
)


@pytest.mark.parametrize("url", [*ANSWERS, *URLS])
def test_whatever_a_webhook_is_and_answers_is_no_more_than_not_taken(
    url: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = served(ANSWERS[url]) if url in ANSWERS else url
    told = Notices.__new__(Notices)
    told._webhook = "ssm:/team/hook"
    monkeypatch.setattr(notices, "WAIT_S", 0.5)
    monkeypatch.setattr(notices, "ask", lambda *words: Said(0, url, ""))
    assert told._post("hello") is False
    assert "SECRET" not in "".join(capfd.readouterr())


def test_a_message_is_taken_by_a_server_that_says_so(hook: Any) -> None:
    assert notices._post(f"http://127.0.0.1:{hook.server_port}/x", "hello")
    hook.code = 204
    assert notices._post(f"http://127.0.0.1:{hook.server_port}/x", "hello")
    assert hook.taken == [{"text": "hello"}] * 2


def test_a_disk_that_is_full_does_not_end_who_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the hour of silence stands, and AWS tells of a silence that is none."""
    told, looked = Notices.__new__(Notices), list[int]()
    told._ended = False
    monkeypatch.setattr(notices, "LOOK_S", 0)

    def look() -> None:
        looked.append(1)
        told._ended = len(looked) == 3
        raise OSError("No space left on device")

    monkeypatch.setattr(told, "_look", look)
    told._watch()
    assert len(looked) == 3


def test_a_webhook_that_refuses_is_said_without_its_address(node: StubNode, hook: Any) -> None:
    hook.code = 500
    outcome = with_hook(node, hook)
    assert "the webhook has not taken the message" in outcome.log
    assert "T0/secret" not in outcome.log
