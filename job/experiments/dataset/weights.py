"""Base weights as a run's input: a downloaded folder with a `weights.json`, which lists the folder's files.

Only files that the trainer or the delivery needs are listed. Repositories contain more files. That of Llama has every
weight a second time below `original/`, and without the list gpufleet would hash, upload and bill this copy too.
`gpufleet prepare` writes the list once, because hashing 16 GB takes a quarter of a minute, and previews are frequent.
Later checks compare only sizes; uploads and downloads hash the files again. `safetensors` and numpy are imported only
to look at tensors.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from gpufleet.job import atomic
from gpufleet.job.contract import inputs
from gpufleet.job.contract.inputs import WeightsManifest

MANIFEST = inputs.WEIGHTS
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
# names of further files: settings, tokenizer, template
_ENDINGS, _NAMES = (".json", ".jinja"), ("tokenizer.model", "merges.txt", "vocab.txt")
_PUBLISHED = {  # where the weights are published, by the folder that a file of stacks/ names
    "llama-3.1-8b-instruct": "meta-llama/Llama-3.1-8B-Instruct",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
    "qwen3-8b": "Qwen/Qwen3-8B",
}
# the names of data types in safetensors and in numpy, which has no bfloat16
_DTYPES = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"  # the names of the two tables in published weights
_COMPARED = 4096  # number of rows of two matrices that are compared at once
_HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")


class Stored(NamedTuple):
    """A tensor in `file`, called `name` there; its numbers begin at byte `start`."""

    file: Path
    name: str
    dtype: str
    shape: list[int]
    start: int

    def rows(self, wanted: slice | list[int]) -> Any:
        """The `wanted` rows of a matrix, as fp32 [rows, columns]. Reads no other rows."""
        stored_rows = self._mapped()[wanted]
        return (stored_rows.astype("<u4") << 16).view("<f4") if self.dtype == "BF16" else stored_rows.astype("<f4")

    def equals(self, other: Stored) -> bool:
        """Whether another matrix has the same numbers in the same dtype."""
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        parts = (slice(start, start + _COMPARED) for start in range(0, self.shape[0], _COMPARED))
        return all((self._mapped()[part] == other._mapped()[part]).all() for part in parts)

    def _mapped(self) -> Any:
        import numpy as np

        return np.memmap(self.file, mode="r", dtype=_DTYPES[self.dtype], offset=self.start, shape=tuple(self.shape))


def paths(folder: Path) -> list[Path]:
    """Every file to list. Raises ValueError for a folder without weights, or with an incomplete set of files."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; download the base weights into it, once: {_download(folder)}")
    top = {path.name: path for path in folder.iterdir() if path.is_file() and not _hidden(path, folder)}
    names = tensor_files(folder)
    names += [name for name in top if name.endswith(_ENDINGS) or name in _NAMES]
    return [top[name] for name in sorted(names)]


def present(folder: Path) -> bool:
    """Whether the folder has weights, and not only a tokenizer.json."""
    return (folder / _WHOLE).is_file() or (folder / _INDEX).is_file()


def check(folder: Path) -> dict[str, Stored]:
    """Every tensor by its name, from the files' headers alone. Raises ValueError if `safetensors` cannot open a file,
    which may be cut off or a git-lfs pointer, if a file may not be read, if tensors are quantised, or for the reasons
    of `paths`. Raises ImportError if the library is not installed.
    """
    from safetensors import SafetensorError, safe_open

    paths(folder)
    tensors: dict[str, Stored] = {}
    for path in (folder / name for name in tensor_files(folder)):
        try:
            with path.open("rb") as file, safe_open(path, framework="numpy"):
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
        except OSError as error:
            raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
        except SafetensorError as error:
            raise ValueError(
                f"{path}: {path.stat().st_size:,} bytes, not a safetensors file that the library can open ({error}); "
                "download it again; if it is the same then, ask its author to save it anew"
            ) from error
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if entry["dtype"] not in _DTYPES:
                raise ValueError(
                    f"{path}: {name} is {entry['dtype']}; only {', '.join(_DTYPES)} are read: instead of quantised"
                    " weights use the original ones, and convert others"
                )
            if name in tensors:
                raise ValueError(f"{path}: {name} is in {tensors[name].file.name} too; keep one of them")
            tensors[name] = Stored(path, name, entry["dtype"], entry["shape"], 8 + length + entry["data_offsets"][0])
    return tensors


def left_out(folder: Path) -> dict[str, int]:
    """The bytes of all files that `paths` leaves out, by the names at the top of the folder. Names of folders end with
    a slash.
    """
    taken, sizes = set(paths(folder)), dict[str, int]()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path not in taken and not _hidden(path, folder):
            first, *below = path.relative_to(folder).parts
            name = f"{first}/" if below else first
            sizes[name] = sizes.get(name, 0) + path.stat().st_size
    return sizes


def name_of(folder: Path | None) -> str | None:
    """The usual name of the weights in `folder`: their id on the Hugging Face hub if config.json has it; otherwise the
    name of the folder from which they were prepared. None if neither is known.
    """
    if folder is None:
        return None
    origin = (atomic.read_object(folder / "config.json") or {}).get("_name_or_path")
    if isinstance(origin, str) and _HUB_ID.fullmatch(origin):  # the value may also be a path on somebody's machine
        return origin
    name = (atomic.read_object(folder / MANIFEST) or {}).get("name")
    return name if isinstance(name, str) and name else None


def describe(folder: Path) -> WeightsManifest:
    """Hashes every file and writes weights.json. Raises ValueError as `paths` does."""
    files = [asdict(file) for file in inputs.hashed(paths(folder), folder)]
    atomic.write_json(folder / MANIFEST, {"schema": 1, "name": folder.name, "files": files})
    return inputs.read_weights(folder)


def tensor_files(folder: Path) -> list[str]:
    """The files of one copy of the weights. Some folders contain two copies; this is the one that `transformers` would
    use. Raises ValueError if there are no weights.
    """
    if (folder / _WHOLE).is_file():
        return [_WHOLE]
    index = atomic.read_object(folder / _INDEX)
    places = None if index is None else index.get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError(
            f"{folder}: neither {_WHOLE} nor {_INDEX} in it; download the base weights in that format, or rename a "
            "single file of another name"
        )
    names = sorted(set(map(str, places.values())))
    taken = [name for name in names if "/" not in name and not _hidden(folder / name, folder)]
    if lacking := [name for name in names if name not in taken or not (folder / name).is_file()]:
        raise ValueError(f"{folder}: {_INDEX} names {lacking[0]}, which is not there; download it again")
    return names


def _download(folder: Path) -> str:
    """A sentence that says how to download the weights for a folder of this name."""
    if (model := _PUBLISHED.get(folder.name)) is None:
        return "those of job.parameters.model, as published, with config.json and tokenizer.json"
    return (
        f"hf download {model} --exclude 'original/*' --local-dir {shlex.quote(str(folder))} (pip install "
        f"huggingface_hub; the licence at https://huggingface.co/{model} is yours to accept, then `hf auth login`)"
    )


def _hidden(path: Path, folder: Path) -> bool:
    """Whether the file is in a download tool's cache, or is weights.json."""
    inside = path.relative_to(folder)
    return any(part.startswith(".") for part in inside.parts) or inside.as_posix() == MANIFEST
