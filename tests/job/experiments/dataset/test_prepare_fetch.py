"""Fetching from a server of our own: ranges, continuation, changed files, no server at all."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from gpufleet.job.experiments.dataset import prepare, sources
from gpufleet.job.experiments.dataset.sources import FetchError, TextTokenizer, TinyStories

STORY = "Once upon a time there was a fox.\n\nIt slept.\n<|endoftext|>\n"


class Files:
    """What the server serves, and what it was asked for."""

    def __init__(self) -> None:
        self.content = (STORY * 400).encode()
        self.etag = '"v1"'
        self.cut: int | None = None  # the connection breaks after so many bytes
        self.status: int | None = None
        self.ranges = True
        self.asked: list[str | None] = []
        self.sent = 0


@pytest.fixture
def files() -> Files:
    return Files()


@pytest.fixture
def url(files: Files) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            files.asked.append(wanted)
            if files.status is not None:
                self.send_error(files.status)
                return
            match = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted or "")
            changed = self.headers.get("If-Range", files.etag) != files.etag
            first, last = 0, len(files.content) - 1
            if match and files.ranges and not changed:
                first, last = int(match[1]), min(last, int(match[2] or last))
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {first}-{last}/{len(files.content)}")
            else:
                self.send_response(200)
            self.send_header("Content-Length", str(last + 1 - first))
            self.send_header("ETag", files.etag)
            self.end_headers()
            body = files.content[first : last + 1][: files.cut]
            files.sent += len(body)
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/file"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_whole_file_arrives(url: str, files: Files, tmp_path: Path) -> None:
    path = sources.fetch(url, tmp_path / "deep" / "file", total_bytes=len(files.content))
    assert path.read_bytes() == files.content
    assert [p.name for p in path.parent.iterdir()] == ["file"]


def test_a_file_that_is_there_is_not_fetched_again(url: str, files: Files, tmp_path: Path) -> None:
    for _ in range(2):
        sources.fetch(url, tmp_path / "file")
    assert len(files.asked) == 1


def test_only_the_beginning_is_fetched_when_that_is_enough(url: str, files: Files, tmp_path: Path) -> None:
    assert sources.fetch(url, tmp_path / "file", first_bytes=100).read_bytes() == files.content[:100]
    assert files.sent == 100


def test_more_of_a_beginning_continues_it(url: str, files: Files, tmp_path: Path) -> None:
    sources.fetch(url, tmp_path / "file", first_bytes=100)
    assert sources.fetch(url, tmp_path / "file", first_bytes=250).read_bytes() == files.content[:250]
    assert files.asked == ["bytes=0-99", "bytes=100-249"]


def test_a_broken_connection_is_continued_by_the_next_attempt(url: str, files: Files, tmp_path: Path) -> None:
    files.cut = 1000
    with pytest.raises(FetchError):
        sources.fetch(url, tmp_path / "file")
    assert not (tmp_path / "file").exists()
    files.cut = None
    assert sources.fetch(url, tmp_path / "file").read_bytes() == files.content
    assert files.asked == [None, "bytes=1000-"]


def test_what_has_arrived_already_is_not_asked_for(url: str, files: Files, tmp_path: Path) -> None:
    files.cut = 1000
    with pytest.raises(FetchError):
        sources.fetch(url, tmp_path / "file", first_bytes=2000)
    files.status = 416
    assert sources.fetch(url, tmp_path / "file", first_bytes=500).read_bytes() == files.content[:1000]


def test_a_file_that_changed_meanwhile_is_fetched_from_its_start(url: str, files: Files, tmp_path: Path) -> None:
    files.cut = 1000
    with pytest.raises(FetchError):
        sources.fetch(url, tmp_path / "file")
    files.cut, files.etag, files.content = None, '"v2"', b"other" * 500
    assert sources.fetch(url, tmp_path / "file").read_bytes() == files.content


def test_a_server_without_ranges_gives_the_beginning_too(url: str, files: Files, tmp_path: Path) -> None:
    files.ranges = False
    assert len(sources.fetch(url, tmp_path / "file", first_bytes=100).read_bytes()) >= 100


def test_a_file_of_another_size_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="12345 expected: the file has changed"):
        sources.fetch(url, tmp_path / "file", total_bytes=12345)
    assert not (tmp_path / "file").exists()


def test_a_server_that_says_no_is_quoted(url: str, files: Files, tmp_path: Path) -> None:
    files.status = 403
    with pytest.raises(FetchError, match="answered 403 Forbidden"):
        sources.fetch(url, tmp_path / "file")


def tinystories(url: str, files: Files, tmp_path: Path, count: int) -> TinyStories:
    chosen = TextTokenizer(model_vocab=300, cache=tmp_path / "cache")
    return TinyStories(
        count=count, text_tokenizer=chosen, cache=tmp_path / "cache", url=url, total_bytes=len(files.content)
    )


def test_tinystories_becomes_a_dataset_of_its_first_stories(
    url: str, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Too little at first: it grows.
    monkeypatch.setattr("gpufleet.job.experiments.dataset.sources.TINYSTORIES_STORY_BYTES", 10)
    manifest = prepare.prepare(tmp_path / "set", tinystories(url, files, tmp_path, 200), model_vocab=300)
    assert manifest.facts["stories"] == {"train": 198, "validation": 2}
    assert files.sent < len(files.content)
    assert len(files.asked) > 1


def test_without_a_network_tinystories_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"(?s)could not be fetched.*where there is internet.*generated-stories"):
        tinystories("http://127.0.0.1:1/file", Files(), tmp_path, 200).stories()


def test_without_gpt2s_tokenizer_a_large_model_is_refused_and_never_made_of_bytes(tmp_path: Path) -> None:
    chosen = TextTokenizer(model_vocab=50257, cache=tmp_path, url="http://127.0.0.1:1/t")
    with pytest.raises(ValueError, match=r"could not be fetched .*--tokenizer FILE, or set model.vocab: 257"):
        chosen.choose()


def test_without_the_tokenizers_package_a_large_model_is_refused(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    for file in (None, tmp_path / "tokenizer.json"):
        with pytest.raises(ValueError, match=r"pip install tokenizers, or set model.vocab: 257"):
            TextTokenizer(model_vocab=50257, cache=tmp_path, url=url, file=file).choose()
