"""The data that a kind of job trains on, for the commands that prepare and declare a run. Nodes do not use it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from gpufleet.job.contract.inputs import DatasetManifest
from gpufleet.job.kind.common import Say

C = TypeVar("C")


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """The arguments of `gpufleet prepare` in addition to the definition."""

    text: Path | None = None  # a file that is used instead of data.source
    tokenizer: Path | None = None
    weights: Path | None = None  # the folder of base weights
    say: Say = lambda line: None


class Dataset(ABC, Generic[C]):
    """The dataset of one kind of job, and its base weights, for the parameters `config`."""

    takes_tokenizer: ClassVar[bool] = True
    generated: str = ""  # the value of data.source for generated data, which are neither downloaded nor the user's

    def __init__(self, config: C) -> None:
        self.config = config

    @abstractmethod
    def prepare(self, folder: Path, supplied: Given) -> DatasetManifest:
        """The dataset in `folder`. If it is missing, it is made from the given text or from data.source. Raises
        ValueError.
        """

    @abstractmethod
    def accept(self, folder: Path, supplied: Given) -> DatasetManifest:
        """Checks every file of the dataset in `folder`, and prints a description of it. Raises ValueError."""

    def is_own(self, made_from: str) -> bool:
        """Whether a dataset whose manifest has this `made_from` comes from a user's file."""
        return True

    def argument(self, *, own: bool = False) -> str:
        """The further argument of `gpufleet prepare` if the source, or the data (`own`), is a user's file; otherwise
        empty.
        """
        return ""

    def differs(self, manifest: DatasetManifest, weights: Path | None) -> str:
        """How a prepared dataset of this kind differs from the parameters, as a phrase that follows its name; empty if
        it does not. `weights`: the folder of base weights.
        """
        return ""

    def check(self, folder: Path, say: Say) -> None:
        """Warns of a prepared dataset. Raises ValueError if the dataset leaves nothing to learn."""

    def read_by_steps(self, manifest: DatasetManifest) -> tuple[int, str, str] | None:
        """For a run whose length is given in steps: the number of units that it reads, the name of a unit, and the
        setting. None if the length is given in epochs.
        """
        return None

    def weights_differ(self, folder: Path) -> str:
        """How the base weights in `folder` contradict the parameters, as a phrase that follows their name; empty if
        they do not.
        """
        return ""

    def check_weights(self, folder: Path, say: Say) -> None:
        """Raises ValueError if a node could not read the base weights in `folder`, or would refuse them."""

    def check_input(self, folder: Path) -> None:
        """Raises ValueError if a node could not use the folder that the parameters name as an input."""

    def list_weights(self, folder: Path, say: Say) -> None:
        """Writes weights.json into `folder`, and prints its content. Raises ValueError."""


class NoDataset(Dataset[C]):
    """The answers of a job whose inputs are used without preparation."""

    def prepare(self, folder: Path, supplied: Given) -> DatasetManifest:
        raise ValueError("a command's inputs are not prepared: storage.inputs names them as they are")

    accept = prepare
