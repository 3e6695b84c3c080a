"""The data that a kind of job trains on, as whoever prepares and declares a run asks for it. Nothing of it is asked on
a node.
"""

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
    """What `gpufleet prepare` was given beside the definition."""

    text: Path | None = None  # in place of data.source
    tokenizer: Path | None = None
    weights: Path | None = None  # the folder of base weights
    say: Say = lambda line: None


class Dataset(ABC, Generic[C]):
    """The dataset of one kind of job, and the base weights beside it, for the parameters `config`."""

    takes_tokenizer: ClassVar[bool] = True
    generated: str = ""  # the data.source that is made, not fetched or the user's

    def __init__(self, config: C) -> None:
        self.config = config

    @abstractmethod
    def prepare(self, folder: Path, given: Given) -> DatasetManifest:
        """The dataset in `folder`, made now from the text given or data.source, or found there. Raises ValueError."""

    @abstractmethod
    def accept(self, folder: Path, given: Given) -> DatasetManifest:
        """The dataset that is in `folder`, every file of it checked, and says what it is. Raises ValueError."""

    def is_own(self, made_from: str) -> bool:
        """Whether a dataset whose manifest says `made_from` is of a file of the user's, which is not named again."""
        return True

    def argument(self, *, own: bool = False) -> str:
        """What `gpufleet prepare` takes beside the stack, where the source, or the data at hand (`own`), is a file of
        the user's; empty: nothing.
        """
        return ""

    def differs(self, manifest: DatasetManifest, weights: Path | None) -> str:
        """How a prepared dataset of this kind differs from the parameters, as a phrase to put after its name; empty if
        it does not. `weights`: the folder of base weights.
        """
        return ""

    def check(self, folder: Path, say: Say) -> None:
        """Warns of a prepared dataset. Raises ValueError for one that leaves nothing to learn."""

    def read_by_steps(self, manifest: DatasetManifest) -> tuple[int, str, str] | None:
        """For a run whose length is given in steps: the units it trains on, what a unit is, and the setting. None: its
        length is given in epochs.
        """
        return None

    def weights_differ(self, folder: Path) -> str:
        """What base weights in `folder` have against the parameters, as a phrase to put after their name; or empty."""
        return ""

    def check_weights(self, folder: Path, say: Say) -> None:
        """Raises ValueError where a node could not read the base weights in `folder`, or would refuse them."""

    def list_weights(self, folder: Path, say: Say) -> None:
        """Writes weights.json into `folder`, and says what is in it. Raises ValueError."""


class NoDataset(Dataset[C]):
    """What is asked of a job whose inputs are taken as they are."""

    def prepare(self, folder: Path, given: Given) -> DatasetManifest:
        raise ValueError("a command's inputs are not prepared: storage.inputs names them as they are")

    accept = prepare
