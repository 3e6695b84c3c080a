"""Both stores behave alike: objects appear whole, what is missing says so, every trouble is a StoreError."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError
from moto import mock_aws

from gpufleet.job.kind.common import PART_BYTES
from gpufleet.job.supervisor.store import (
    ABSENT,
    FolderStore,
    GivenUpError,
    MissingError,
    S3Store,
    Store,
    StoreError,
    TakenError,
    create,
    open_store,
    parent,
    session,
)
from gpufleet.rehearsal.imds import Imds
from tests.dates import skip_where_the_clock_is_moved


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with mock_aws():
        made = boto3.client("s3")
        made.create_bucket(Bucket="bucket")
        yield made


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "folder":
        return open_store(str(tmp_path / "bucket" / "r1"))
    request.getfixturevalue("client")
    return open_store("s3://bucket/r1")


def test_what_is_put_can_be_got_listed_and_measured(store: Store, tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(b"weights")
    store.put_file(tmp_path / "w.bin", "ckpt/step_1/w.bin")
    store.put_bytes(b"{}", "ckpt/step_1/.metadata")
    store.put_bytes(b"~", "old/w.bin~")  # names of a command's own are free
    assert [each.key for each in store.entries("old/")] == ["old/w.bin~"]
    store.put_bytes(b"x", "done.json")
    assert store.get_bytes("ckpt/step_1/w.bin") == b"weights"
    store.get_file("ckpt/step_1/w.bin", tmp_path / "deep" / "back.bin")
    assert (tmp_path / "deep" / "back.bin").read_bytes() == b"weights"
    assert store.size("ckpt/step_1/w.bin") == 7
    assert {(e.key, e.bytes) for e in store.entries("ckpt/")} == {
        ("ckpt/step_1/.metadata", 2),
        ("ckpt/step_1/w.bin", 7),
    }


def test_what_is_created_is_created_once(store: Store) -> None:
    began = time.time()
    assert create(store, b"first", "gang/000001.json")
    assert not create(store, b"second", "gang/000001.json")
    assert store.get_bytes("gang/000001.json") == b"first"
    if isinstance(store, FolderStore):
        skip_where_the_clock_is_moved("moves the times of no files")
    assert began - 1 < store.entries("gang/")[0].at < time.time() + 1  # S3 tells whole seconds


def test_what_is_put_over_something_replaces_that_and_nothing_else(store: Store, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"a file's")
    store.put_bytes(b"first", "a.json")
    seen = store.entries("a.json")[0].etag
    store.put_file(tmp_path / "file", "a.json", over=seen)
    for over in (seen, ABSENT):
        with pytest.raises(TakenError):
            store.put_bytes(b"late", "a.json", over=over)
        with pytest.raises(TakenError):
            store.put_file(tmp_path / "file", "a.json", over=over)
    with pytest.raises(StoreError):
        store.put_bytes(b"late", "gone.json", over=seen)
    assert [(entry.key, store.get_bytes(entry.key)) for entry in store.entries("")] == [("a.json", b"a file's")]
    store.put_file(tmp_path / "file", "b.json")


def test_a_large_file_is_put_on_the_same_condition(client: Any, tmp_path: Path) -> None:
    """The embedded AWS holds no If-Match against an upload in parts: what is asked of S3 is looked at."""
    path, asked = tmp_path / "w.bin", []
    path.write_bytes(bytes(PART_BYTES + 1))
    store = S3Store("s3://bucket/r1")
    store._client.meta.events.register(
        "before-call.s3.CompleteMultipartUpload", lambda params, **_: asked.append(params["headers"].get("If-Match"))
    )
    store.put_file(path, "w.bin", over=ABSENT)
    with pytest.raises(TakenError):
        store.put_file(path, "w.bin", over=ABSENT)
    store.put_file(path, "w.bin", over="an etag")
    assert asked == [None, None, "an etag"]


@pytest.mark.parametrize("code", ["412", "PreconditionFailed", "409", "ConditionalRequestConflict"])
def test_a_creation_that_another_is_at_is_lost(client: Any, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store("s3://bucket/r1")

    def refuse(**_: Any) -> None:
        raise ClientError({"Error": {"Code": code}}, "PutObject")

    monkeypatch.setattr(store, "_client", type("Refusing", (), {"put_object": staticmethod(refuse)}))
    assert not create(store, b"{}", "gang/000001.json")


def test_what_is_missing_says_so(store: Store, tmp_path: Path) -> None:
    assert store.get_bytes("done.json") is None
    assert store.size("done.json") is None
    assert store.entries("ckpt/") == []
    with pytest.raises(MissingError):
        store.get_file("done.json", tmp_path / "x")


def test_a_put_replaces_and_a_delete_removes(store: Store) -> None:
    store.put_bytes(b"old", "a/b.json")
    store.put_bytes(b"new", "a/b.json")
    assert store.get_bytes("a/b.json") == b"new"
    store.delete(["a/b.json", "a/never-was.json"])
    assert store.entries("") == []


def test_a_large_file_goes_in_parts_and_arrives_whole(client: Any, tmp_path: Path) -> None:
    path = tmp_path / "w.bin"
    path.write_bytes(bytes(range(256)) * (PART_BYTES // 256 + 4096))
    store = S3Store("s3://bucket/r1")
    store.put_file(path, "w.bin")
    head = client.head_object(Bucket="bucket", Key="r1/w.bin")
    assert head["ETag"].strip('"').endswith("-2")
    store.get_file("w.bin", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == path.read_bytes()


def test_runs_of_one_bucket_do_not_see_each_other(client: Any) -> None:
    S3Store("s3://bucket/r1").put_bytes(b"1", "done.json")
    assert S3Store("s3://bucket/r2").get_bytes("done.json") is None
    assert S3Store("s3://bucket/r").entries("") == []


def test_a_cancelled_upload_raises_and_leaves_no_object(tmp_path: Path) -> None:
    class Transfer:
        cancelled = False

        def cancel(self) -> None:
            self.cancelled = True

        def result(self) -> None:
            from s3transfer.exceptions import CancelledError

            asked.cancel()  # as another thread would
            assert self.cancelled
            raise CancelledError

    asked = S3Store("s3://bucket/r1", client=boto3.client("s3", region_name="us-east-1"))
    asked._transfers = type("Manager", (), {"upload": lambda *_: Transfer()})()
    with pytest.raises(GivenUpError):
        asked.put_file(tmp_path / "w.bin", "w.bin")


@pytest.mark.parametrize("name", ["RetriesExceededError", "S3DownloadFailedError", "S3ValidationError"])
def test_what_the_transfer_itself_gives_up_is_a_store_error(client: Any, tmp_path: Path, name: str) -> None:
    from s3transfer import exceptions

    error = exceptions.RetriesExceededError(TimeoutError()) if name.startswith("R") else getattr(exceptions, name)("x")

    class Transfer:
        def result(self) -> None:
            raise error

    store = S3Store("s3://bucket/r1", client=client)
    store._transfers = type("Manager", (), {"download": lambda *_: Transfer()})()
    with pytest.raises(StoreError, match=r"download of w\.bin"):
        store.get_file("w.bin", tmp_path / "w.bin")


def test_an_s3_that_does_not_answer_is_a_store_error(tmp_path: Path) -> None:
    from botocore.config import Config

    dead = boto3.client(
        "s3",
        endpoint_url="http://127.0.0.1:9",
        region_name="us-east-1",
        aws_access_key_id="x",
        aws_secret_access_key="x",
        config=Config(retries={"total_max_attempts": 1}, connect_timeout=1),
    )
    store = S3Store("s3://bucket/r1", client=dead)
    (tmp_path / "w.bin").write_bytes(b"w")
    for act in (
        lambda: store.get_bytes("done.json"),
        lambda: store.put_file(tmp_path / "w.bin", "w.bin"),
        lambda: store.entries(""),
        lambda: store.delete(["x"]),
    ):
        with pytest.raises(StoreError):
            act()


def test_a_metadata_service_that_is_slow_still_gives_the_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    with Imds(access_key="ASIASLOW") as imds:
        imds.token_s = 1.2
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", imds.endpoint)
        assert session.__wrapped__().get_credentials().access_key == "ASIASLOW"


def test_a_missing_bucket_is_a_store_error_not_a_missing_object(client: Any) -> None:
    with pytest.raises(StoreError) as raised:
        S3Store("s3://other/r1").put_bytes(b"x", "done.json")
    assert not isinstance(raised.value, MissingError)


class Guarded:
    """S3 as a role sees it that may list a prefix only: a missing object is a 403."""

    def __init__(self, listed: list[str]) -> None:
        self.listed = listed

    def refuse(self, **_: Any) -> None:
        raise ClientError({"Error": {"Code": "AccessDenied"}}, "GetObject")

    get_object = head_object = refuse

    def get_paginator(self, _: str) -> Any:
        put = {"Size": 1, "LastModified": datetime(2026, 11, 26, tzinfo=UTC)}
        pages = [{"Contents": [{"Key": key, **put} for key in self.listed]}]
        return type("Pages", (), {"paginate": lambda *a, **k: pages})()


def guarded(listed: list[str]) -> S3Store:
    store = S3Store("s3://bucket/r1", client=boto3.client("s3", region_name="us-east-1"))
    store._client = Guarded(listed)
    return store


def test_a_refusal_of_what_is_not_listed_means_missing() -> None:
    store = guarded(["r1/done.json.old"])
    assert store.get_bytes("done.json") is None
    assert store.size("done.json") is None


def test_a_refusal_of_what_is_listed_is_an_error() -> None:
    with pytest.raises(StoreError, match="AccessDenied"):
        guarded(["r1/done.json"]).get_bytes("done.json")


class Deleting:
    """S3 that accepts each deletion of many keys, but refuses to delete one of the keys."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def delete_objects(self, *, Bucket: str, Delete: dict[str, Any]) -> dict[str, Any]:
        self.asked.append([each["Key"] for each in Delete["Objects"]])
        return {"Errors": [{"Key": "r1/1000", "Message": "denied"}]} if "r1/1000" in self.asked[-1] else {}


def test_more_keys_than_s3_takes_at_once_are_deleted_and_one_that_stays_is_an_error() -> None:
    store = guarded([])
    store._client = client = Deleting()
    with pytest.raises(StoreError, match="deletion of r1/1000: denied"):
        store.delete(str(number) for number in range(1001))
    assert [len(keys) for keys in client.asked] == [1000, 1]


def test_a_write_that_was_cut_short_is_no_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FolderStore(tmp_path)
    store.put_bytes(b"old", "w.bin")

    def full(source: Path, target: Path) -> None:
        target.write_bytes(b"ha")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gpufleet.job.supervisor.store.shutil.copyfile", full)
    with pytest.raises(StoreError, match="No space"):
        store.put_file(tmp_path / "w.bin", "w.bin")
    assert store.get_bytes("w.bin") == b"old"
    assert [entry.key for entry in store.entries("")] == ["w.bin"]


def test_the_parent_of_a_run_is_its_bucket() -> None:
    assert parent("s3://bucket/r1") == "s3://bucket"
    assert parent("/bucket/r1/") == "/bucket"
