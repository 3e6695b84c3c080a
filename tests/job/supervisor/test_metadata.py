"""The notice is seen when there is one, and only then, whatever the metadata service does meanwhile."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from gpufleet.job.supervisor.metadata import NOTICE_PATH, REBALANCE_PATH, TOKEN_S, Metadata, MetadataThread, http_fetch
from gpufleet.rehearsal.imds import Fault, Imds
from tests.waiting import HANG_S

NOW = 1_800_000_000.0
SOON = datetime.fromtimestamp(NOW + 120, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class MetadataAnswers:
    """A metadata service by hand: a list of answers per path, the last one for ever."""

    def __init__(self, **by_end: list[object]) -> None:
        self.by_end, self.asked = by_end, []  # type: ignore[var-annotated]

    def __call__(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
        self.asked.append((method, path, headers))
        name = {"/latest/api/token": "token", NOTICE_PATH: "notice", REBALANCE_PATH: "rebalance"}[path]
        given = self.by_end.get(name, [(200, b"t") if name == "token" else (404, b"")])
        answer = given.pop(0) if len(given) > 1 else given[0]
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[return-value]


def metadata(answers: MetadataAnswers, clock: list[float] | None = None) -> tuple[Metadata, list[str]]:
    said: list[str] = []
    return Metadata(fetch=answers, clock=lambda: (clock or [NOW])[0], say=said.append), said


def action(time: object = SOON, action: object = "terminate") -> tuple[int, bytes]:
    return 200, json.dumps({"action": action, "time": time}).encode()


@pytest.mark.parametrize("name", ["terminate", "stop", "hibernate"])
def test_every_action_is_a_notice_with_its_time(name: str) -> None:
    found, _ = metadata(MetadataAnswers(notice=[action(action=name)]))
    found.poll()
    assert found.notice == NOW + 120


NONSENSE: dict[str, object] = {
    "404": (404, b""),
    "500": (500, b"oops"),
    "empty": (200, b""),
    "html": (200, b"<html>\x00 not what you asked for"),
    "a list": (200, b"[]"),
    "a number": (200, b"7"),
    "deep nesting": (200, b"[" * 60_000),
    "no action": (200, b'{"time": "%s"}' % SOON.encode()),
    "unknown action": action(action="dance"),
    "no time": (200, b'{"action": "terminate"}'),
    "time is no time": action("soon"),
    "time without zone": action(SOON[:-1]),
    "time long ago": action("2017-09-18T08:22:00Z"),
    "time far ahead": action("2099-01-01T00:00:00Z"),
    "time is a number": action(NOW + 120),
    "timeout": TimeoutError("slow"),
    "refused": ConnectionRefusedError(),
    "cut": ConnectionResetError(),
    "no thread left for the limit of time": RuntimeError("can't start new thread"),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_no_notice_and_the_next_good_answer_is(name: str) -> None:
    found, _ = metadata(MetadataAnswers(notice=[NONSENSE[name], NONSENSE[name], action()]))
    found.poll()
    found.poll()
    assert found.notice is None
    found.poll()
    assert found.notice is not None


@pytest.mark.parametrize("time", ["soon", "2017-09-18T08:22:00Z", None])
def test_a_doubtful_notice_asks_for_a_save(time: object) -> None:
    found, said = metadata(MetadataAnswers(notice=[action(time)]))
    found.poll()
    first = found.save_wanted
    found.poll()
    assert first is not None
    assert found.save_wanted == first
    assert len(said) == 1  # a trouble that lasts is said once


def test_a_trouble_of_recommendations_alone_is_said_once_until_it_is_over() -> None:
    broken, fine = (500, b"oops"), (404, b"")
    found, said = metadata(MetadataAnswers(rebalance=[broken, broken, broken, fine, broken]))
    for _ in range(9):
        found.poll()
    assert said == [f"metadata: {REBALANCE_PATH} answers 500"] * 2


def test_a_recommendation_asks_for_one_save_each() -> None:
    times: list[object] = [(200, b'{"noticeTime": "2027-01-15T08:0%d:00Z"}' % minute) for minute in (1, 1, 2)]
    found, said = metadata(MetadataAnswers(rebalance=times))
    seen = []
    for _ in range(6):
        found.poll()
        seen.append(found.save_wanted)
    assert seen[0] == seen[2] == "2027-01-15T08:01:00Z"
    assert seen[5] == "2027-01-15T08:02:00Z"
    assert len(said) == 2
    assert found.notice is None


@pytest.mark.parametrize("body", [b"", b"{}", b'{"noticeTime": 7}', b'{"noticeTime": "soon"}'])
def test_a_recommendation_without_a_time_is_none(body: bytes) -> None:
    found, _ = metadata(MetadataAnswers(rebalance=[(200, body)]))
    found.poll()
    assert found.save_wanted is None


def test_the_token_is_asked_for_once_and_renewed_before_it_ends() -> None:
    clock, answers = [NOW], MetadataAnswers()
    found, _ = metadata(answers, clock)
    for _ in range(5):
        found.poll()
    assert [method for method, _, _ in answers.asked].count("PUT") == 1
    clock[0] = NOW + TOKEN_S - 30
    found.poll()
    assert [method for method, _, _ in answers.asked].count("PUT") == 2


def test_a_refused_token_is_renewed_at_once() -> None:
    answers = MetadataAnswers(token=[(200, b"old"), (200, b"new")], notice=[(401, b""), action()])
    found, _ = metadata(answers)
    found.poll()
    assert found.notice is not None
    tokens = [headers.get("X-aws-ec2-metadata-token") for method, _, headers in answers.asked if method == "GET"]
    assert tokens[:2] == ["old", "new"]


@pytest.mark.parametrize("token", [(500, b"x"), (200, b"a\r\nb"), (200, "é".encode())])
def test_a_token_that_is_none_is_not_sent(token: tuple[int, bytes]) -> None:
    answers = MetadataAnswers(token=[token])
    found, said = metadata(answers)
    found.poll()
    assert all(method == "PUT" for method, _, _ in answers.asked)
    assert "no token" in said[0]


@pytest.fixture
def imds() -> Iterator[Imds]:
    with Imds() as made:
        made.slow_s = 2.0
        yield made


@pytest.mark.parametrize("fault", ["500", "garbage", "bad-time", "slow", "silent", "401"])
def test_a_real_service_that_misbehaves_neither_fools_nor_stops_the_watch(imds: Imds, fault: Fault) -> None:
    said: list[str] = []
    fetch = http_fetch(imds.endpoint, timeout_s=0.2)
    found = Metadata(fetch=lambda *asked: fetch(*asked), clock=time.time, say=said.append)
    imds.fault = fault
    found.poll()
    assert found.notice is None
    assert said
    imds.fault, at = None, imds.clock.now() + timedelta(seconds=120)
    imds.notice(at)
    fetch = http_fetch(imds.endpoint, timeout_s=HANG_S)
    found.poll()
    assert found.notice == int(at.timestamp())


def test_a_service_that_drips_is_cut_off_in_time() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def drip() -> None:
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
            while not stop.wait(0.02):
                try:
                    connection.sendall(b"x")
                except OSError:
                    return

    thread = threading.Thread(target=drip, daemon=True)
    thread.start()
    fetch = http_fetch(f"http://127.0.0.1:{server.getsockname()[1]}", timeout_s=0.3)
    found = Metadata(fetch=fetch, clock=time.time, say=lambda text: None)
    found.poll()  # returns, though the answer never ends
    assert found.notice is None
    stop.set()
    thread.join()
    server.close()


def test_nobody_there_is_no_notice() -> None:
    said: list[str] = []
    found = Metadata(fetch=http_fetch("http://127.0.0.1:9"), clock=time.time, say=said.append)
    found.poll()
    assert found.notice is None
    assert "ConnectionRefusedError" in said[0]


def test_the_watch_sees_a_notice_by_itself(imds: Imds) -> None:
    found = Metadata(fetch=http_fetch(imds.endpoint + "/"), clock=time.time, say=lambda text: None)
    seen = threading.Event()
    poll = found.poll

    def watched() -> None:
        poll()
        if found.notice is not None:
            seen.set()

    found.poll = watched  # type: ignore[method-assign]
    with MetadataThread(found, interval_s=0.02):
        imds.notice(imds.clock.now() + timedelta(seconds=120))
        assert seen.wait(HANG_S)
