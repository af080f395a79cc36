"""ScoreCache: the pruning scores of a point, taken once for all its cells."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning.pytorch import LightningDataModule
from torch import Tensor

from lit_dps.trial import Trial
from lit_dps.workload import Workload

SCORES_KEPT = 2**26  # elements: 256 MiB in float32, all 100 points of the paper's networks many times over


@dataclass(frozen=True)
class ScoreCache:
    """Scores by study seed and point, while there is room; they cost as much as an epoch."""

    workload: Workload
    _scores: dict[tuple[int, int], dict[str, Tensor]] = field(default_factory=dict, init=False, repr=False)

    def of(self, trial: Trial) -> dict[str, Tensor] | None:
        """The scores of the trial's point, if they are known."""
        return self._scores.get((trial.seed, trial.point))

    def keep(self, trial: Trial, scores: dict[str, Tensor] | None, data: LightningDataModule) -> None:
        """Keeps the scores for the point's other cells, where they are the same there."""
        if scores is None or not scores_are_shared(self.workload, data):
            return
        known = sum(score.numel() for kept in self._scores.values() for score in kept.values())
        if known + sum(score.numel() for score in scores.values()) <= SCORES_KEPT:
            self._scores[trial.seed, trial.point] = scores


def scores_are_shared(workload: Workload, data: LightningDataModule) -> bool:
    """Whether a point has the same pruning scores at every batch size: neither network nor pass knows it."""
    return hasattr(data, "pruning_dataloader") and workload.batch_size_key.startswith("data.")
