"""The inference server's answers, on a free port of the loopback address."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from gpufleet.job.experiments.pretrain.serve import server as serving
from gpufleet.job.experiments.pretrain.serve.model import open_model
from gpufleet.job.experiments.pretrain.serve.server import Server
from tests.job.serve_world import ask, ask_until, exported, generate, served


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(tmp_path_factory.mktemp("run") / "final") as server:
        yield server


def test_health_and_info_say_what_is_served(running: Server) -> None:
    assert ask(running, "GET", "/health") == (200, {"status": "ok"})
    status, info = ask(running, "GET", "/info")
    assert status == 200
    assert {key: info[key] for key in ("step", "val_loss", "layers", "width", "sequence")} == {
        "step": 24,
        "val_loss": 1.5,
        "layers": 2,
        "width": 32,
        "sequence": 64,
    }
    assert "".join(info["vocabulary"]) == "0123456789+-HBL.\n"


def test_greedy_output_is_what_the_model_says_every_time(running: Server) -> None:
    status, answer = generate(running, prompt="12+3", max_tokens=20, temperature=0)
    assert status == 200
    assert set(answer) == {"prompt", "generated_text", "tokens_generated", "model"}
    assert (answer["prompt"], answer["tokens_generated"]) == ("12+3", 20)
    module = running.served.module
    text = "12+3"
    for _ in range(20):
        ids = torch.tensor([["0123456789+-HBL.\n".index(c) for c in text]])
        text += "0123456789+-HBL.\n"[int(module(ids).logits[0, -1, :17].argmax())]
    assert answer["generated_text"] == text[4:]
    assert generate(running, prompt="12+3", max_tokens=20, temperature=0) == (200, answer)


def test_defaults_are_100_characters_at_temperature_0_8(running: Server) -> None:
    assert generate(running, prompt="1")[1]["tokens_generated"] == 100
    stated = generate(running, prompt="1", max_tokens=100, temperature=0.8, top_k=None, seed=7)
    assert generate(running, prompt="1", seed=7) == stated
    assert generate(running, prompt="1", seed=8) != stated


def test_it_stops_at_a_newline_when_asked(running: Server) -> None:
    whole = generate(running, prompt="1", max_tokens=300, temperature=2, seed=3)[1]["generated_text"]
    assert "\n" in whole[:-1]
    cut = generate(running, prompt="1", max_tokens=300, temperature=2, seed=3, stop_on_newline=True)[1]
    assert cut["generated_text"] == whole[: whole.index("\n") + 1]
    assert cut["tokens_generated"] == len(cut["generated_text"])


def test_a_stream_brings_the_same_characters_one_by_one(running: Server) -> None:
    asked = {"prompt": "9-4", "max_tokens": 15, "seed": 1}
    connection = http.client.HTTPConnection(*running.address)
    connection.request("POST", "/generate", json.dumps({**asked, "stream": True}))
    response = connection.getresponse()
    assert response.headers["Content-Type"] == "text/event-stream"
    assert response.headers["Transfer-Encoding"] == "chunked"
    events = [json.loads(event.removeprefix("data: ")) for event in response.read().decode().split("\n\n") if event]
    whole = generate(running, **asked)[1]
    assert [event["text"] for event in events[:-1]] == list(whole["generated_text"])
    assert events[-1] == {**whole, "done": True}
    connection.request("GET", "/health")  # the same connection goes on
    assert connection.getresponse().status == 200
    connection.close()


def test_a_client_of_the_old_protocol_gets_its_stream_unchunked(running: Server) -> None:
    body = json.dumps({"prompt": "9", "max_tokens": 3, "temperature": 0, "stream": True}).encode()
    with socket.create_connection(running.address) as raw:
        raw.sendall(b"POST /generate HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        answer = b"".join(iter(lambda: raw.recv(4096), b""))
    head, _, content = answer.partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert [line[:6] for line in content.decode().split("\n\n")] == ["data: "] * 4 + [""]


ALLOWED_PROMPT = "1 to 64 of the characters '0123456789+-HBL.\\n'"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "prompt: missing"),
        ({"prompt": 5}, f"prompt: a number; allowed: a string, {ALLOWED_PROMPT}"),
        ({"prompt": ""}, f"prompt: 0 characters; allowed: {ALLOWED_PROMPT}"),
        ({"prompt": "1" * 65}, f"prompt: 65 characters; allowed: {ALLOWED_PROMPT}"),
        ({"prompt": "12=3"}, f"prompt: '=' at position 2; allowed: {ALLOWED_PROMPT}"),
        ({"prompt": "1", "max_tokens": 0}, "max_tokens: 0; allowed: a whole number from 1 to 2048"),
        ({"prompt": "1", "max_tokens": 2049}, "max_tokens: 2049; allowed: a whole number from 1 to 2048"),
        ({"prompt": "1", "max_tokens": 2.5}, "max_tokens: 2.5; allowed: a whole number from 1 to 2048"),
        ({"prompt": "1", "max_tokens": "9"}, "max_tokens: a string; allowed: a whole number from 1 to 2048"),
        ({"prompt": "1", "max_tokens": True}, "max_tokens: True; allowed: a whole number from 1 to 2048"),
        ({"prompt": "1", "max_tokens": None}, "max_tokens: a null; allowed: a whole number from 1 to 2048"),
        ({"prompt": "1", "temperature": 2.1}, "temperature: 2.1; allowed: a number from 0 (greedy) to 2"),
        ({"prompt": "1", "temperature": -1}, "temperature: -1; allowed: a number from 0 (greedy) to 2"),
        ({"prompt": "1", "temperature": float("nan")}, "temperature: nan; allowed: a number from 0 (greedy) to 2"),
        ({"prompt": "1", "top_k": 33}, "top_k: 33; allowed: a whole number from 1 to 32 or null"),
        ({"prompt": "1", "stop_on_newline": 1}, "stop_on_newline: a number; allowed: true or false"),
        ({"prompt": "1", "stream": "yes"}, "stream: a string; allowed: true or false"),
        ({"prompt": "1", "seed": -1}, "seed: -1; allowed: a whole number from 0 to 9223372036854775807 or null"),
        ({"prompt": "1", "seed": 1 << 63}, "seed: 9223372036854775808; allowed: a whole number from 0"),
        ({"prompt": "1", "topk": 3}, "topk: unknown; known are prompt, max_tokens"),
        ({"prompt": "=", "top_k": 0}, "; top_k: 0; allowed"),  # both at once
        ([1], "the body is a JSON list"),
        (b"{prompt: 1}", "the body is not JSON"),
        (b"", "the body is not JSON"),
        (b"\xff\xfe", "the body is not JSON"),
        (b"[" * 60_000, "the body is not JSON"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_bad_body_is_answered_with_what_is_allowed(running: Server, body: Any, said: str) -> None:
    status, answer = ask(running, "POST", "/generate", body)
    assert status == 400
    assert list(answer) == ["error"]
    assert said in answer["error"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "said"),
    [
        ("GET", "/generate", None, 405, "/generate takes POST, not GET"),
        ("POST", "/health", {}, 405, "/health takes GET, not POST"),
        ("DELETE", "/info", None, 405, "/info takes GET, not DELETE"),
        ("BREW", "/generate", None, 405, "/generate takes POST, not BREW"),
        ("GET", "/", None, 404, "there are /health, /info, /generate"),
        ("POST", "/v1/completions", {}, 404, "there is no /v1/completions"),
        ("POST", "/generate", b"1" * 65_537, 413, "at most 65536 bytes"),
        ("POST", "/generate", b"1" * 1_000_000, 413, "at most 65536 bytes"),  # whole before the answer is read
    ],
)
def test_a_wrong_method_path_or_size_is_refused(
    running: Server, method: str, path: str, body: Any, status: int, said: str
) -> None:
    found, answer = ask(running, method, path, body)
    assert found == status
    assert said in answer["error"]


@pytest.mark.parametrize(
    ("head", "status", "said"),
    [
        (b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"9" * 5_000 + b"\r\n\r\n", b"400", b"Length"),
        (b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n", b"400", b"bad Content-Length"),
        (
            b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 7\r\n\r\nhello",
            b"400",
            b"conflicting Content-Length",
        ),
        (
            b"GET /info HTTP/1.1\r\nHost: x\r\nContent-Length : 19\r\n\r\nGET / HTTP/1.1\r\n\r\n",
            b"400",
            b"illegal header line",
        ),
        (b"POST /generate HTTP/1.1\r\nnonsense\r\nContent-Length: 2\r\n\r\n{}", b"400", b"illegal header line"),
        (b"GET /health HTTP/1.1\r\n\r\n", b"400", b"Missing mandatory Host"),
        (b"nonsense\r\n\r\n", b"400", b"error"),
        (b"GET /health SPDY/3\r\n\r\n", b"400", b"illegal request line"),
        (b"GET /" + b"a" * 20_000, b"431", b"error"),
    ],
)
def test_a_broken_request_is_refused_in_json_and_the_connection_closed(
    running: Server, head: bytes, status: bytes, said: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_connection(running.address) as raw:
        raw.sendall(head)
        answer = b"".join(iter(lambda: raw.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert said in answer
    assert answer.count(b"HTTP/1.1 ") <= 1  # and its body is not taken for another request
    assert "error" in json.loads(answer.rpartition(b"\r\n")[2])
    assert capsys.readouterr().err == ""


def test_a_body_in_chunks_is_taken_up_to_the_same_length(running: Server) -> None:
    with closing(http.client.HTTPConnection(*running.address)) as connection:
        for parts, status in ((['{"prompt": "1"', ', "max_tokens": 1}'], 200), (["1" * 40_000] * 2, 413)):
            connection.request("POST", "/generate", (part.encode() for part in parts), encode_chunked=True)
            response = connection.getresponse()
            assert (response.status, bool(response.read())) == (status, True)


@pytest.mark.parametrize("stated", ["{:06}", "{} ", "\t{}\t "])
def test_a_length_with_leading_zeros_or_blanks_around_it_is_a_length(stated: str, running: Server) -> None:
    body = {"prompt": "1", "max_tokens": 1}
    stated = stated.format(len(json.dumps(body)))
    assert ask(running, "POST", "/generate", body, **{"Content-Length": stated})[0] == 200


def test_a_full_server_says_come_again_and_serves_on(running: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    ask_until(
        running, "no generation under way", lambda: running.under_way == 0
    )  # the answer before may be there sooner than its place
    monkeypatch.setattr(running, "under_way", serving.AT_ONCE)
    status, answer = generate(running, prompt="1")
    assert (status, ask(running, "GET", "/health")[0]) == (503, 200)
    assert "try again" in answer["error"]
    monkeypatch.undo()
    assert generate(running, prompt="1", max_tokens=1)[0] == 200


def test_many_clients_at_once_get_their_own_answers(running: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "AT_ONCE", 8)
    alone = [generate(running, prompt=str(i), max_tokens=30, seed=i)[1] for i in range(8)]
    found: dict[int, Any] = {}

    def one(i: int) -> None:
        found[i] = generate(running, prompt=str(i), max_tokens=30, seed=i)[1]

    threads = [threading.Thread(target=one, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(8)] == alone


def test_a_generation_under_way_is_told_that_the_server_ends(tmp_path: Path) -> None:
    server = Server(("127.0.0.1", 0), open_model(exported(tmp_path / "final")))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    connection = http.client.HTTPConnection(*server.address)
    connection.request("POST", "/generate", json.dumps({"prompt": "1", "max_tokens": 2048, "stream": True}))
    response = connection.getresponse()
    response.read(1)
    server.should_exit = True
    thread.join()
    last = response.read().decode().strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: ")) == {"error": "the server is ending"}
    connection.close()
