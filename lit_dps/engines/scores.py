"""ScoreCache: the pruning scores of a point, taken once for all its cells."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from lit_dps.training.workload import Workload
from lit_dps.trial import Trial

SCORES_KEPT = 2**26  # elements: 256 MiB in float32, all 100 points of the paper's networks many times over


Key = tuple[int, ...]  # of the pass that scores were taken over: `TrainingPass.key`


@dataclass(frozen=True)
class ScoreCache:
    """Scores by study seed, point and further axes, while there is room; they cost as much as an epoch."""

    workload: Workload
    _known: dict[tuple, tuple[Key, dict[str, Tensor]]] = field(default_factory=dict, init=False, repr=False)

    def of(self, trial: Trial) -> tuple[Key, dict[str, Tensor]] | None:
        """The scores of the trial's point, if they are known, and the key of the pass that they were taken over."""
        return self._known.get((trial.seed, trial.point, trial.cell.others))

    def keep(self, trial: Trial, key: Key | None, scores: dict[str, Tensor] | None) -> None:
        """Keeps the scores for the point's other cells, where they are the same there.

        Args:
            trial: The trial.
            key: Of the pass; None where the batch size of the training decides it.
            scores: Its scores; None where it has none.
        """
        if scores is None or key is None or not network_is_shared(self.workload):
            return
        known = sum(score.numel() for _, kept in self._known.values() for score in kept.values())
        if known + sum(score.numel() for score in scores.values()) <= SCORES_KEPT:
            self._known[trial.seed, trial.point, trial.cell.others] = key, scores


def network_is_shared(workload: Workload) -> bool:
    """Whether the network of a point is the same at every batch size: it is not told of it."""
    return workload.batch_size_key.startswith("data.")
