"""two-tower's ranking: a folder of judged queries, or generated relevance."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from gpufleet.job.contract.inputs import DatasetManifest
from gpufleet.job.experiments.dataset.prepared import PreparedDataset
from gpufleet.job.experiments.two_tower.spec import TwoTowerConfig
from gpufleet.job.kind.common import Say
from gpufleet.job.kind.dataset import Given


class RankingData(PreparedDataset[TwoTowerConfig]):
    """Queries, models and labels. The modules that prepare them are imported on use, because they import numpy."""

    arguments: ClassVar[dict[str, str]] = {"million-llms": "FOLDER"}
    takes_tokenizer: ClassVar[bool] = False

    def prepare(self, folder: Path, supplied: Given) -> DatasetManifest:
        from gpufleet.job.experiments.two_tower.ranking import prepare_ranking

        return prepare_ranking(folder, self.config, text=supplied.text, say=supplied.say)

    def differs(self, manifest: DatasetManifest, weights: Path | None) -> str:
        from gpufleet.job.experiments.two_tower.ranking import mismatches

        queries, models, width = (int(manifest.facts.get(fact, 0)) for fact in ("queries", "models", "width"))
        problems = mismatches(self.config, (queries, width), (queries, models))
        return f"is of other settings ({'; '.join(problems)})" if problems else ""

    def check(self, folder: Path, say: Say) -> None:
        """Prints the folds for which no epoch can be chosen."""
        from gpufleet.job.experiments.two_tower.folds import members, require_relevant, without_relevant
        from gpufleet.job.experiments.two_tower.ranking import read

        labels = read(folder).labels
        for member in members(self.config):
            require_relevant(member, labels)
        if empty := without_relevant(self.config, labels):
            say(
                f"warning: no query of fold {', '.join(map(str, empty))} has a label 1 or 2: the model that watches"
                " such a fold keeps its first epoch, and the one tested on it scores 0; fewer folds"
                " (job.parameters.data.folds) have one each"
            )
