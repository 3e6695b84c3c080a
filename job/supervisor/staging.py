"""What an attempt needs before it can train: dataset, base weights, and the newest checkpoint that verifies.

A checkpoint counts only through its manifest: right schema, run and config, every file there with its size, its sha256
right once downloaded. The highest step that passes is taken; one that fails is set aside and the next lower is tried.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from job import atomic
from job.config import KEEPS_BEST
from job.run_file import Dataset, InputFile, RunFile
from job.supervisor.store import GivenUpError, MissingError, Store, StoreError, open_store, parent

BEST = "best.json"
DATASET, WEIGHTS = "dataset.json", "weights.json"
MANIFEST = re.compile(r"ckpt/step_(\d{8})/manifest\.json")  # as manifest_key makes it
T = TypeVar("T")
PARALLEL = 8
LOOK_S = 0.25  # between two calls of `check`
TRIES = 3
ADDED = ("run", "spent_usd", "spent_s", "attempt", "instance", "published_at")  # what a manifest has beyond commit.json


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Where things come from and go to. `check` is called often, by the caller's thread, and may raise to give up."""

    store: Store
    run: RunFile
    workdir: Path
    say: Callable[[str], None]
    check: Callable[[], None] = lambda: None
    pause: Callable[[float], None] = lambda seconds: None
    doubts: Callable[[str], bool] = lambda key: False  # a key's bytes that arrive wrong are this node's fault


def manifest_key(step: int) -> str:
    """Of a checkpoint, in the store."""
    return f"ckpt/step_{step:08d}/manifest.json"


class MismatchError(Exception):
    """Bytes that are not the promised ones."""

    def __init__(self, key: str, found: str, promised: str) -> None:
        super().__init__(f"{key}: sha256 is {found}, expected {promised}")
        self.key = key


def clear(workdir: Path) -> None:
    """Empties a used work folder: what counts is in the store, a node's disk is no memory."""
    for name in ("ckpt", "exports", "final"):
        shutil.rmtree(workdir / name, ignore_errors=True)
    for path in workdir.glob("*"):
        if path.suffix in (".json", ".jsonl", ".log", ".csv") and path.name != "run.json":
            path.unlink()


def inputs(stage: Stage, opened: Callable[[str], Store] = open_store) -> None:
    """Fills <workdir>/data with the dataset, and <workdir>/inputs with base weights where the run names any.

    Raises ValueError when they are not what the run names, MismatchError when bytes arrive wrong.
    """
    _fill(stage, "dataset", stage.run.dataset, DATASET, stage.workdir / "data", opened)
    if stage.run.weights is not None:
        _fill(stage, "base weights", stage.run.weights, WEIGHTS, stage.workdir / "inputs", opened)


def _fill(
    stage: Stage, what: str, wanted: Dataset, manifest: str, folder: Path, opened: Callable[[str], Store]
) -> None:
    place = opened(wanted.uri or f"{parent(stage.store.uri)}/inputs/{wanted.sha256}")
    files = wanted.files
    try:
        if not files:
            files = retried(stage, lambda: _listed(place, folder / manifest, wanted, what), f"{place.uri}/{manifest}")
        stage.say(f"{what}: {len(files)} files, {sum(file.bytes for file in files) / 1e6:.1f} MB from {place.uri}")
        _download(stage, place, "", files, folder)
    except MissingError as error:
        raise ValueError(f"the {what} is not where the run says: {error}") from error


def _listed(place: Store, path: Path, wanted: Dataset, what: str) -> tuple[InputFile, ...]:
    place.get_file(path.name, path)
    if wanted.sha256 is not None and (found := atomic.sha256(path)) != wanted.sha256:
        raise MismatchError(path.name, found, wanted.sha256)
    tree = atomic.read_object(path)
    if tree is None or not isinstance(tree.get("files"), list):
        raise ValueError(f"{path.name} of the {what} names no files; prepare it again")
    return tuple(InputFile(name=f["name"], bytes=f["bytes"], sha256=f["sha256"]) for f in tree["files"])


def checkpoint(stage: Stage) -> dict[str, Any] | None:
    """Puts the newest good checkpoint into <workdir>/ckpt and gives its manifest; None: start from scratch.

    Raises MismatchError where bytes arrive wrong and the stage doubts this node.
    """
    sizes = _sizes(stage)
    for key in sorted((key for key in sizes if MANIFEST.fullmatch(key)), reverse=True):
        manifest = _manifest(stage, key)
        why = unfit(manifest, key, sizes, stage.run) or _restored(stage, key, manifest or {}, "resuming from")
        if why is None:
            return manifest
        stage.say(f"{key} does not verify: {why}")
        _reject(stage, key, why)
    return None


def set_aside(stage: Stage, step: Any, why: str) -> bool:
    """Rejects a step that verifies but cannot be read. False: there is no other that is fit, and nothing is done."""
    sizes = _sizes(stage)
    key = manifest_key(step) if isinstance(step, int) else None
    others = [other for other in sizes if MANIFEST.fullmatch(other) and other != key]
    manifests = {other: _manifest(stage, other) for other in others}
    if key is None or all(unfit(manifests[other], other, sizes, stage.run) is not None for other in others):
        return False
    if key in sizes:
        stage.say(f"{key} verifies but cannot be used: {why}")
        _reject(stage, key, why)
    return True


def _reject(stage: Stage, key: str, why: str) -> None:
    """Out of the way, but kept to look at: the node script counts progress by the newest manifest."""

    def act() -> None:
        stage.store.put_bytes(f"{why}\n".encode(), key.replace("manifest.json", "rejected.txt"))
        stage.store.delete([key])

    retried(stage, act, key)


def best_too(stage: Stage, newest: int) -> bool:
    """The best checkpoint beside a newer one, for a job that exports the best. False: best.json names one that cannot
    be had.
    """
    if not isinstance(stage.run.config, KEEPS_BEST):
        return True
    best = atomic.parse_object(retried(stage, lambda: stage.store.get_bytes(BEST), BEST)) or {}
    step = best.get("step")
    if not isinstance(step, int) or step >= newest:
        return True
    key = manifest_key(step)
    sizes = _sizes(stage)
    if key not in sizes:
        return False
    manifest = _manifest(stage, key)
    why = unfit(manifest, key, sizes, stage.run) or _restored(stage, key, manifest or {}, "the best so far, of")
    if why is not None:
        stage.say(f"{key}, the best so far, does not verify: {why}")
    return why is None


def _manifest(stage: Stage, key: str) -> dict[str, Any] | None:
    return atomic.parse_object(retried(stage, lambda: stage.store.get_bytes(key), key))


def _sizes(stage: Stage) -> dict[str, int]:
    return {entry.key: entry.bytes for entry in retried(stage, lambda: stage.store.entries("ckpt/"), "ckpt/")}


def unfit(manifest: dict[str, Any] | None, key: str, sizes: dict[str, int], run: RunFile) -> str | None:
    """Why this manifest must not be resumed from; None when all that can be seen without a download is right."""
    match = MANIFEST.fullmatch(key)
    if manifest is None or manifest.get("schema") != 1 or match is None:
        return "no manifest of schema 1"
    if manifest.get("step") != int(match[1]):
        return f"it is of step {manifest.get('step')!r}"
    if manifest.get("run") != run.run:
        return f"it is of run {manifest.get('run')!r}, this is {run.run!r}"
    if manifest.get("config_sha256") != run.config_sha256:
        return "it is of another config"
    files = manifest.get("files")
    if not isinstance(files, list) or not files:
        return "it names no files"
    prefix = key.removesuffix("manifest.json")
    for entry in files:
        if not _well_formed(entry):
            return f"a file entry is malformed: {str(entry)[:80]}"
        found = sizes.get(prefix + entry["name"])
        if found != entry["bytes"]:
            return f"{entry['name']} has {found} bytes, not {entry['bytes']}"
    return None


def _well_formed(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not isinstance(entry.get("bytes"), int):
        return False
    path = PurePosixPath(entry["name"])
    return (
        bool(path.parts) and not path.is_absolute() and ".." not in path.parts and isinstance(entry.get("sha256"), str)
    )


def _restored(stage: Stage, key: str, manifest: dict[str, Any], what: str) -> str | None:
    """None, and the checkpoint is in <workdir>/ckpt; or why not. Raises MismatchError on a doubted node."""
    try:
        _restore(stage, key, manifest, what)
    except (MismatchError, MissingError) as error:
        if isinstance(error, MismatchError) and stage.doubts(error.key):
            raise
        return str(error)
    return None


def _restore(stage: Stage, key: str, manifest: dict[str, Any], what: str) -> None:
    name = key.split("/")[1]
    unfinished = stage.workdir / "ckpt" / f".{name}"
    shutil.rmtree(unfinished, ignore_errors=True)
    files = [InputFile(name=f["name"], bytes=f["bytes"], sha256=f["sha256"]) for f in manifest["files"]]
    stage.say(f"{what} step {manifest['step']}: {sum(file.bytes for file in files) / 1e6:.1f} MB")
    try:
        _download(stage, stage.store, key.removesuffix("manifest.json"), files, unfinished)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    commit = {key: value for key, value in manifest.items() if key not in ADDED}
    commit["files"] = [{"name": file.name, "bytes": file.bytes} for file in files]
    atomic.write_json(unfinished / "commit.json", commit)
    unfinished.replace(unfinished.with_name(name))


def _download(stage: Stage, store: Store, prefix: str, files: Sequence[InputFile], folder: Path) -> None:
    def one(file: InputFile) -> None:
        retried(stage, lambda: _verified(store, prefix + file.name, file, folder / file.name), prefix + file.name)

    with ThreadPoolExecutor(PARALLEL) as pool:
        waiting: set[Future[None]] = {pool.submit(one, file) for file in files}
        try:
            while waiting:
                stage.check()
                done, waiting = wait(waiting, LOOK_S, FIRST_EXCEPTION)
                for each in done:
                    each.result()
        except BaseException:
            for each in waiting:
                each.cancel()
            while waiting:  # again and again: one may just be beginning
                store.cancel()
                waiting = wait(waiting, LOOK_S).not_done
            raise


def _verified(store: Store, key: str, file: InputFile, path: Path) -> None:
    if path.is_file() and path.stat().st_size == file.bytes and atomic.sha256(path) == file.sha256:
        return
    store.get_file(key, path)
    if (found := atomic.sha256(path)) != file.sha256:
        raise MismatchError(key, found, file.sha256)


def retried(stage: Stage, act: Callable[[], T], what: str) -> T:
    """What `act` gives, tried again a moment later where the store refuses: a node that gives up costs a boot."""
    for attempt in range(1, TRIES + 1):
        try:
            return act()
        except (StoreError, MismatchError) as error:
            if attempt == TRIES or isinstance(error, MissingError | GivenUpError):
                raise
            stage.say(f"{what}: {error}; again")
            stage.pause(2.0**attempt)
    raise AssertionError
