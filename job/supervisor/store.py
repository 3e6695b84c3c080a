"""Stores a run's files beyond the life of its node, in an S3 prefix or a folder. In both, objects appear completely or
not at all.

`open_store("s3://bucket/run")` or `open_store("/a/folder")` opens a store. Keys are relative to this place. Every
failure is a StoreError. The store itself repeats only requests that failed in a way which its client calls transient;
the caller decides about others. A put has a condition on the object that exists at that moment: ANY, ABSENT, or the
etag that the object must have. TakenError means that a different object exists.
"""

from __future__ import annotations

import fcntl
import functools
import re
import shutil
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gpufleet.job.kind.common import PART_BYTES

METADATA_TIMEOUT_S = 5  # seconds per request to the metadata service; botocore's default is 1
CONNECTIONS = 32  # number of connections, because one TCP connection is limited to 5 Gbit/s
ANY, ABSENT = "*", ""  # conditions of a put: an existing object may be replaced; no object may exist


class StoreError(OSError):
    """The store cannot be reached, or refuses."""


class MissingError(StoreError):
    """There is no such object."""


class RefusedError(StoreError):
    """The store answers 403."""


class TakenError(StoreError):
    """A put found an object that its condition does not allow, or another put of this object is going on."""


class SupersededError(StoreError):
    """Another node of the run is the leader by now (presence.py), so trying again cannot help."""


class GivenUpError(StoreError):
    """The transfer was cancelled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    key: str
    bytes: int
    etag: str = ""  # changes with the content
    at: float = 0.0  # when the object was put, by the store's clock


class Store(Protocol):
    """The methods of a store that the supervisor needs. The methods may be called from several threads."""

    uri: str

    def put_file(self, path: Path, key: str, over: str = ANY) -> None: ...
    def put_bytes(self, content: bytes, key: str, over: str = ANY) -> None: ...
    def get_file(self, key: str, path: Path) -> None: ...
    def get_bytes(self, key: str) -> bytes | None: ...
    def size(self, key: str) -> int | None: ...
    def entries(self, prefix: str) -> list[Entry]: ...
    def delete(self, keys: Iterable[str]) -> None: ...
    def cancel(self) -> None: ...


def open_store(uri: str) -> Store:
    return S3Store(uri) if uri.startswith("s3://") else FolderStore(Path(uri))


def create(store: Store, content: bytes, key: str) -> bool:
    """Puts an object only if there is none at `key`; returns whether the object was put. Raises StoreError."""
    try:
        store.put_bytes(content, key, over=ABSENT)
    except TakenError:
        return False
    return True


def parent(uri: str) -> str:
    """The place that contains `uri`: a run's bucket."""
    return uri.rstrip("/").rsplit("/", 1)[0]


def bucket_uri(uri: str, run: str) -> str:
    """The bucket that holds the run at `uri`; a stage's run is one folder deeper than another run."""
    return parent(parent(uri)) if "/" in run else parent(uri)


_UNDER_WAY = re.compile(r".*\.[0-9a-f]{32}~", re.DOTALL)
_LOCK = f"lock.{'0' * 32}~"  # a file of this name is not an object either


class FolderStore:
    """A store in a folder. Unfinished writes have separate names (_UNDER_WAY), and are not objects."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.uri = str(root)

    def put_file(self, path: Path, key: str, over: str = ANY) -> None:
        self._put(key, over, lambda temporary: shutil.copyfile(path, temporary))

    def put_bytes(self, content: bytes, key: str, over: str = ANY) -> None:
        self._put(key, over, lambda temporary: temporary.write_bytes(content))

    def get_file(self, key: str, path: Path) -> None:
        if not (self.root / key).is_file():
            raise MissingError(f"{self.root / key}: no such object")
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.root / key, path)

    def get_bytes(self, key: str) -> bytes | None:
        try:
            return (self.root / key).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(str(error)) from error

    def size(self, key: str) -> int | None:
        path = self.root / key
        return path.stat().st_size if path.is_file() else None

    def entries(self, prefix: str) -> list[Entry]:
        entries = []
        for path in sorted(self.root.rglob("*")) if self.root.is_dir() else ():
            key = path.relative_to(self.root).as_posix()
            if key.startswith(prefix) and path.is_file() and not _UNDER_WAY.fullmatch(path.name):
                stat = path.stat()
                entries.append(Entry(key=key, bytes=stat.st_size, etag=_etag(path), at=stat.st_mtime))
        return entries

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            (self.root / key).unlink(missing_ok=True)
            with suppress(OSError):
                (self.root / key).parent.rmdir()  # fails if there are other objects in the folder

    def cancel(self) -> None:
        """Does nothing, because a copy into a folder takes little time."""

    def _put(self, key: str, over: str, write: Callable[[Path], Any]) -> None:
        target = self.root / key
        temporary = target.with_name(f"{target.name}.{uuid.uuid4().hex}~")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            write(temporary)
            if over == ANY:
                temporary.replace(target)
                return
            with (self.root / _LOCK).open("w") as held:
                fcntl.flock(held, fcntl.LOCK_EX)
                if _etag(target) != over:
                    raise TakenError(f"{target} has been replaced by another object")
                temporary.replace(target)
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(f"{target}: {error}") from error
        finally:
            temporary.unlink(missing_ok=True)


def _etag(path: Path) -> str:
    """A text that is different for each file which a put has made; ABSENT if there is no file."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return ABSENT
    return f"{stat.st_ino:x}-{stat.st_mtime_ns:x}-{stat.st_size:x}"


class S3Store:
    """A store below a prefix of a bucket. Large files are sent in parallel parts; `cancel` stops parts that were not
    sent yet.
    """

    def __init__(self, uri: str, client: Any = None) -> None:
        from boto3.s3.transfer import TransferConfig, create_transfer_manager

        self.uri = uri.rstrip("/")
        self._bucket, _, prefix = self.uri.removeprefix("s3://").partition("/")
        self._prefix = prefix + "/" if prefix else ""
        self._client = client or _client()
        self._transfers = create_transfer_manager(
            self._client,
            TransferConfig(
                max_concurrency=CONNECTIONS // 2,
                multipart_threshold=PART_BYTES,
                multipart_chunksize=PART_BYTES,
                preferred_transfer_client="classic",  # the other kind of client has neither these settings nor `cancel`
            ),
        )
        self._running: set[Any] = set()
        self._lock = threading.Lock()
        self._conditions: dict[str, str] = {}  # conditions of the running transfers, by key
        for name in ("PutObject", "CompleteMultipartUpload"):  # s3transfer does not pass conditions to these calls
            self._client.meta.events.register(f"before-parameter-build.s3.{name}", self._add_condition)

    def put_file(self, path: Path, key: str, over: str = ANY) -> None:
        self._conditions[self._prefix + key] = over
        try:
            with _translated(f"upload of {key}"):
                self._wait(self._transfers.upload(str(path), self._bucket, self._prefix + key))
        finally:
            self._conditions.pop(self._prefix + key, None)

    def put_bytes(self, content: bytes, key: str, over: str = ANY) -> None:
        with _translated(f"upload of {key}"):
            self._client.put_object(Bucket=self._bucket, Key=self._prefix + key, Body=content, **_condition(over))

    def get_file(self, key: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._told_apart(key), _translated(f"download of {key}"):
            self._wait(self._transfers.download(self._bucket, self._prefix + key, str(path)))

    def get_bytes(self, key: str) -> bytes | None:
        try:
            with self._told_apart(key), _translated(f"download of {key}"):
                answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + key)
                content: bytes = answer["Body"].read()
                return content
        except MissingError:
            return None

    def size(self, key: str) -> int | None:
        try:
            with self._told_apart(key), _translated(f"size of {key}"):
                return int(self._client.head_object(Bucket=self._bucket, Key=self._prefix + key)["ContentLength"])
        except MissingError:
            return None

    def entries(self, prefix: str) -> list[Entry]:
        with _translated(f"listing of {prefix}"):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix + prefix
            )
            return [
                Entry(
                    key=item["Key"].removeprefix(self._prefix),
                    bytes=int(item["Size"]),
                    etag=item.get("ETag", "").strip('"'),
                    at=item["LastModified"].timestamp(),
                )
                for page in pages
                for item in page.get("Contents", ())
            ]

    def delete(self, keys: Iterable[str]) -> None:
        named = [{"Key": self._prefix + key} for key in keys]
        for start in range(0, len(named), 1000):
            with _translated("deletion"):
                answer = self._client.delete_objects(
                    Bucket=self._bucket, Delete={"Objects": named[start : start + 1000], "Quiet": True}
                )
                if refused := answer.get("Errors"):
                    raise StoreError(f"deletion of {refused[0]['Key']}: {refused[0].get('Message')}")

    def cancel(self) -> None:
        with self._lock:
            for transfer in self._running:
                transfer.cancel()

    def _add_condition(self, params: dict[str, Any], **_: Any) -> None:
        params.update(_condition(self._conditions.get(params["Key"], ANY)))

    @contextmanager
    def _told_apart(self, key: str) -> Iterator[None]:
        """Distinguishes a missing object from a refusal: without the right to list, S3 answers 403 in both cases, so
        the prefix is listed.
        """
        try:
            yield
        except RefusedError:
            if any(entry.key == key for entry in self.entries(key)):
                raise
            raise MissingError(f"{key}: no such object") from None

    def _wait(self, transfer: Any) -> None:
        with self._lock:
            self._running.add(transfer)
        try:
            transfer.result()
        finally:
            with self._lock:
                self._running.discard(transfer)


def _condition(over: str) -> dict[str, str]:
    """The condition as arguments of S3's calls."""
    if over == ANY:
        return {}
    return {"IfNoneMatch": "*"} if over == ABSENT else {"IfMatch": over}


_KINDS: dict[str, type[StoreError]] = {
    "404": MissingError,
    "NoSuchKey": MissingError,
    "403": RefusedError,
    "AccessDenied": RefusedError,
    "412": TakenError,
    "PreconditionFailed": TakenError,
    "409": TakenError,
    "ConditionalRequestConflict": TakenError,
}


@functools.cache  # credentials and service descriptions are fetched once
def session() -> Any:
    """A boto3 session that waits for the metadata service. If a token takes a second, as on a node whose cores are all
    busy, botocore by default reports that there are no credentials, even with many retries (IMDSFetcher of 1.44).
    """
    import boto3
    from botocore.session import Session

    core = Session()
    core.set_config_variable("metadata_service_timeout", METADATA_TIMEOUT_S)
    return boto3.Session(botocore_session=core)


@functools.cache  # botocore takes half a second to read EC2's description
def ec2() -> Any:
    """An EC2 client with short timeouts, because training does not need its answers."""
    from botocore.config import Config

    retries = {"mode": "standard", "total_max_attempts": 2}
    return session().client("ec2", config=Config(connect_timeout=3, read_timeout=5, retries=retries))


def pages(call: Callable[..., dict[str, Any]], **asked: Any) -> Iterator[dict[str, Any]]:
    """Every answer of an EC2 call; an empty answer need not be the last one. Raises botocore's errors."""
    token: dict[str, str] = {}
    while answer := call(**asked, **token):
        yield answer
        if not answer.get("NextToken"):
            return
        token = {"NextToken": answer["NextToken"]}


def _client() -> Any:
    from botocore.config import Config

    return session().client(
        "s3",
        config=Config(
            connect_timeout=5,
            read_timeout=30,
            max_pool_connections=CONNECTIONS,
            retries={"mode": "standard", "total_max_attempts": 4},
        ),
    )


@contextmanager
def _translated(subject: str) -> Iterator[None]:
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError
    from s3transfer.exceptions import (
        CancelledError,
        RetriesExceededError,
        S3DownloadFailedError,
        S3UploadFailedError,
        S3ValidationError,
    )
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ClientError as error:
        code = str(error.response.get("Error", {}).get("Code"))
        raise _KINDS.get(code, StoreError)(f"{subject}: {error}") from error
    except CancelledError as error:
        raise GivenUpError(f"{subject}: given up") from error
    except (
        BotoCoreError,
        Boto3Error,
        HTTPError,
        OSError,
        RetriesExceededError,
        S3DownloadFailedError,
        S3UploadFailedError,
        S3ValidationError,
    ) as error:
        raise StoreError(f"{subject}: {error}") from error
