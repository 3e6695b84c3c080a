"""Downloads what an attempt needs before it can train: dataset, base weights, and the newest checkpoint that verifies.

A checkpoint is valid only if its manifest has the right schema, run and config, and if every file exists with its size
and, after the download, has its sha256. The highest step that is valid is used. A step that is not valid is set aside,
and the next lower one is tried.
"""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from gpufleet.job import atomic
from gpufleet.job.contract import bucket, reading
from gpufleet.job.contract import inputs as listing
from gpufleet.job.contract.bucket import CheckpointPlace
from gpufleet.job.contract.commit import BEST, COMMIT, Best, Manifest
from gpufleet.job.contract.inputs import DATASET, WEIGHTS, InputFile
from gpufleet.job.contract.reading import DoubtError, Fields
from gpufleet.job.contract.run import InputData, RunFile
from gpufleet.job.contract.workdir import CHECKPOINTS, CODE, DATA, EXPORTS, FINAL, HANDED_ON, INPUTS, NAMED, RUN, USER
from gpufleet.job.foreign import ForeignFolder
from gpufleet.job.supervisor.store import Entry, GivenUpError, MissingError, Store, StoreError, bucket_uri, open_store

UNFIT = (DoubtError, MissingError)  # errors of a checkpoint from which no node may resume
T = TypeVar("T")
PARALLEL = 8
LOOK_S = 0.25  # seconds between two calls of `check`
TRIES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """The source and the target of files. `check` is called often in the caller's thread, and may raise an error to
    stop.
    """

    store: Store
    run: RunFile
    workdir: Path
    say: Callable[[str], None]
    check: Callable[[], None] = lambda: None
    pause: Callable[[float], None] = lambda seconds: None
    # whether this node is taken to be the cause of wrong bytes of a key
    doubts: Callable[[str], bool] = lambda key: False
    node: int = 0  # the node's rank, if there are several nodes


class MismatchError(Exception):
    """The bytes that arrived do not have the expected hash."""

    def __init__(self, key: str, actual: str, promised: str) -> None:
        super().__init__(f"{key}: sha256 is {actual}, expected {promised}")
        self.key = key


def clear(workdir: Path) -> None:
    """Empties a used work folder, because an attempt begins only from what is in the store."""
    for name in (CHECKPOINTS, EXPORTS, FINAL, f"{USER}/{CODE}"):
        shutil.rmtree(workdir / name, ignore_errors=True)
    for path in workdir.glob("*"):
        if path.suffix in (".json", ".jsonl", ".log", ".csv") and path.name != RUN:
            path.unlink()


def inputs(stage: Stage, opened: Callable[[str], Store] = open_store) -> None:
    """Fills <workdir>/data with the dataset, and <workdir>/inputs with the run's base weights; for a command,
    <workdir>/user with its code and its inputs.

    Raises ValueError if these are not the inputs in run.json, and MismatchError if wrong bytes arrive.
    """
    if stage.run.dataset is not None:
        names = _fill(stage, "dataset", stage.run.dataset, DATASET, stage.workdir / DATA, opened)
        _remove_others(stage.workdir / DATA, {*names, DATASET})
    if stage.run.weights is not None:
        _fill(stage, "base weights", stage.run.weights, WEIGHTS, stage.workdir / INPUTS, opened)
    user = stage.workdir / USER
    for name, wanted in stage.run.folders.items():
        manifest, takes = (HANDED_ON, stage.run.config.demands.takes) if wanted.stage else ("", ())
        names = _fill(stage, f"input {name}", wanted, manifest, user / NAMED / name, opened, takes)
        _remove_others(user / NAMED / name, {*names, manifest})
        ForeignFolder(user).open_to_all(user / NAMED / name)
    if stage.run.code is not None:
        _fill(stage, "code", stage.run.code, "", stage.workdir / INPUTS, opened)
        with tarfile.open(stage.workdir / INPUTS / bucket.CODE) as packed:
            packed.extractall(user / CODE, filter="data")
        ForeignFolder(user).open_to_all(user / CODE)  # the command's container may run as any user


def _fill(
    stage: Stage,
    title: str,
    wanted: InputData,
    manifest: str,
    folder: Path,
    opened: Callable[[str], Store],
    takes: Sequence[str] = (),
) -> list[str]:
    """Downloads an input's files into `folder`, and returns their names. The list of files is in run.json; if not, in
    the input's own `manifest`; if there is none, the input's place is listed. With `takes`, only the files of these
    names are downloaded.
    """
    shared = bucket_uri(stage.store.uri, stage.run.run)
    stage_uri = f"{shared}/{wanted.stage}/{FINAL}"
    place = opened(stage_uri if wanted.stage else wanted.uri or f"{shared}/{bucket.INPUTS}/{wanted.sha256}")
    files = wanted.files
    try:
        if not files and manifest:
            files = retried(stage, lambda: _listed(place, folder / manifest, wanted, title), f"{place.uri}/{manifest}")
        elif not files:
            files = _as_listed(retried(stage, lambda: place.entries(""), place.uri), wanted, title)
        files = tuple(file for file in files if not takes or file.name in takes)
        folder.mkdir(parents=True, exist_ok=True)
        stage.say(f"{title}: {len(files)} files, {sum(file.bytes for file in files) / 1e6:.1f} MB from {place.uri}")
        _download(stage, place, {file.name: file for file in files}, folder)
    except MissingError as error:
        raise ValueError(f"the {title} is not at the place that the run names: {error}") from error
    return [file.name for file in files]


def _remove_others(folder: Path, names: Collection[str]) -> None:
    """Removes what an earlier run on this node has left in the folder of an input."""
    for path in folder.rglob("*"):
        if (path.is_symlink() or not path.is_dir()) and path.relative_to(folder).as_posix() not in names:
            path.unlink()


def _listed(place: Store, path: Path, wanted: InputData, title: str) -> tuple[InputFile, ...]:
    place.get_file(path.name, path)
    if wanted.sha256 is not None and (actual := atomic.sha256(path)) != wanted.sha256:
        raise MismatchError(path.name, actual, wanted.sha256)
    try:
        return listing.files(Fields(reading.parse(path.read_bytes())))
    except DoubtError as error:
        raise ValueError(f"{path.name} of the {title}: {error}; prepare it again") from error


def _as_listed(entries: Sequence[Entry], wanted: InputData, title: str) -> tuple[InputFile, ...]:
    """The listed files, if they are those that `gpufleet prepare` has found. There are no hashes of the files, so only
    the listing can show whether they are the same.
    """
    files = [(entry.key, entry.bytes, entry.etag) for entry in entries if listing.is_file(entry.key)]
    if listing.digest(files) != wanted.sha256:
        raise ValueError(
            f"the {title} has changed since it was listed: run `gpufleet prepare` again and use a new run.id"
        )
    return tuple(InputFile(name=reading.name(name), bytes=size, sha256="") for name, size, _ in files)


def checkpoint(stage: Stage) -> Manifest | None:
    """Puts the newest good checkpoint into <workdir>/ckpt; returns its manifest, or None to start from scratch. Raises
    MismatchError if wrong bytes arrive and this node is taken to be the cause.
    """
    sizes = _sizes(stage)
    manifests = (checkpoint_at(stage, place, sizes) for place in reversed(bucket.published(sizes)))
    return next((manifest for manifest in manifests if manifest is not None), None)


def checkpoint_at(stage: Stage, place: CheckpointPlace, sizes: dict[str, int] | None = None) -> Manifest | None:
    """Like `checkpoint`, for the checkpoint at `place`. Returns None if the checkpoint does not verify and is set
    aside. `sizes`: bytes of the objects at `place`, by key.
    """
    try:
        return _restored(stage, place, _sizes(stage) if sizes is None else sizes, "resuming from")
    except UNFIT as error:
        stage.say(f"{place.manifest} does not verify: {error}")
        _reject(stage, place, str(error))
        return None


def set_aside(stage: Stage, step: int, why: str) -> bool:
    """Rejects a step that verifies but cannot be read.

    Returns False, and does nothing, if there is no other valid checkpoint.
    """
    sizes = _sizes(stage)
    places = bucket.published(sizes)
    if not any(_is_fit(stage, place, sizes) for place in places if place.step != step):
        return False
    for place in places:
        if place.step == step:
            stage.say(f"{place.manifest} verifies but cannot be used: {why}")
            _reject(stage, place, why)
    return True


def _reject(stage: Stage, place: CheckpointPlace, why: str) -> None:
    """Moves the manifest of a checkpoint aside, where people can look at it. The manifest must not stay, because the
    node sees progress by the newest manifest.
    """

    def act() -> None:
        stage.store.put_bytes(f"{why}\n".encode(), place.prefix + bucket.REJECTED)
        stage.store.delete([place.manifest])

    retried(stage, act, place.manifest)


def best_too(stage: Stage, newest: CheckpointPlace) -> bool:
    """Downloads the best checkpoint beside a newer one, for a job that exports it. Returns False if the best checkpoint
    is lost.
    """
    if not stage.run.config.delivers_best:
        return True
    best = Best.from_bytes(retried(stage, lambda: stage.store.get_bytes(BEST), BEST))
    if best is None or best.place >= newest:
        return True
    sizes = _sizes(stage)
    if best.place.manifest not in sizes:
        return False
    try:
        _restored(stage, best.place, sizes, "the best so far, of")
    except UNFIT as error:
        stage.say(f"{best.place.manifest}, the best so far, does not verify: {error}")
        return False
    return True


def _sizes(stage: Stage) -> dict[str, int]:
    return {
        entry.key: entry.bytes
        for entry in retried(stage, lambda: stage.store.entries(bucket.CHECKPOINTS), bucket.CHECKPOINTS)
    }


def _fit(stage: Stage, place: CheckpointPlace, sizes: dict[str, int]) -> Manifest:
    """The manifest at `place`. Raises DoubtError if the manifest shows that no run may resume from it."""
    content = retried(stage, lambda: stage.store.get_bytes(place.manifest), place.manifest)
    manifest = Manifest.from_json(reading.parse(content or b""), place.generation)
    if manifest.place != place:
        raise DoubtError(f"it belongs to step {manifest.commit.step}")
    if manifest.run != stage.run.run:
        raise DoubtError(f"it belongs to run {reading.show(manifest.run)}, not to {stage.run.run!r}")
    if manifest.commit.config_sha256 != stage.run.config_sha256:
        raise DoubtError("it belongs to another config")
    for key, file in manifest.objects.items():
        if (there := sizes.get(key)) != file.bytes:
            raise DoubtError(f"{key.removeprefix(place.prefix)} has {there} bytes, not {file.bytes}")
    return manifest


def _is_fit(stage: Stage, place: CheckpointPlace, sizes: dict[str, int]) -> bool:
    try:
        _fit(stage, place, sizes)
    except DoubtError:
        return False
    return True


def _restored(stage: Stage, place: CheckpointPlace, sizes: dict[str, int], title: str) -> Manifest:
    """Downloads the checkpoint of the manifest at `place` into <workdir>/ckpt, or, with several nodes, the part that
    this node reads; returns the manifest. Files on the disk are not downloaded again. Raises the errors of UNFIT, and
    MismatchError if this node is taken to be the cause of wrong bytes.
    """
    manifest = _fit(stage, place, sizes)
    files = manifest.read_by(stage.node, stage.run.config.parts.is_of_rank)
    commit = replace(manifest.commit, files=tuple((file.name, file.bytes) for file in files.values()))
    if manifest.parts:
        own = place.part_prefix(stage.node)
        borrowed = tuple(file.name for key, file in files.items() if key != own + file.name)
        commit = replace(commit, node=stage.node, borrowed=borrowed)
    folder = stage.workdir / CHECKPOINTS / commit.folder
    unfinished = folder.with_name(f".{commit.folder}")
    shutil.rmtree(unfinished, ignore_errors=True)
    for file in files.values():
        (unfinished / file.name).parent.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):  # there is no such file
            os.link(folder / file.name, unfinished / file.name)
    stage.say(f"{title} step {commit.step}: {commit.bytes / 1e6:.1f} MB")
    try:
        _download(stage, stage.store, files, unfinished)
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if isinstance(error, MismatchError) and not stage.doubts(error.key):
            raise DoubtError(str(error)) from error
        raise
    atomic.write_json(unfinished / COMMIT, commit.to_json())
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.replace(folder)
    return manifest


def _download(stage: Stage, store: Store, files: Mapping[str, InputFile], folder: Path) -> None:
    """Downloads the files, by their keys, into the folder."""

    def one(key: str, file: InputFile) -> None:
        retried(stage, lambda: _verified(store, key, file, folder / file.name), key)

    with ThreadPoolExecutor(PARALLEL) as pool:
        waiting: set[Future[None]] = {pool.submit(one, key, file) for key, file in files.items()}
        try:
            while waiting:
                stage.check()
                done, waiting = wait(waiting, LOOK_S, FIRST_EXCEPTION)
                for future in done:
                    future.result()
        except BaseException:
            for future in waiting:
                future.cancel()
            while waiting:  # cancelled repeatedly, because a transfer may be about to begin
                store.cancel()
                waiting = wait(waiting, LOOK_S).not_done
            raise


def _verified(store: Store, key: str, file: InputFile, path: Path) -> None:
    known = file.sha256 != ""
    if path.is_file() and path.stat().st_size == file.bytes and known and atomic.sha256(path) == file.sha256:
        return
    store.get_file(key, path)
    if not known and (size := path.stat().st_size) != file.bytes:
        raise ValueError(f"{store.uri}/{key} has {size} bytes, not the listed {file.bytes}: it has changed")
    if known and (actual := atomic.sha256(path)) != file.sha256:
        raise MismatchError(key, actual, file.sha256)


def retried(stage: Stage, act: Callable[[], T], title: str) -> T:
    """The result of `act`. If the store refuses, `act` is tried again after a short pause, because otherwise another
    node would have to boot.
    """
    for attempt in range(1, TRIES + 1):
        try:
            return act()
        except (StoreError, MismatchError) as error:
            if attempt == TRIES or isinstance(error, MissingError | GivenUpError):
                raise
            stage.say(f"{title}: {error}; again")
            stage.pause(2.0**attempt)
    raise AssertionError
