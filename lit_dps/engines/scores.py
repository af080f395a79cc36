"""ScoreCache: the pruning scores of a point, taken once for all its cells."""

from __future__ import annotations

from dataclasses import dataclass, field

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

    def keep(self, trial: Trial, scores: dict[str, Tensor] | None, shared: bool) -> None:
        """Keeps the scores for the point's other cells, where they are the same there.

        Args:
            trial: The trial.
            scores: Its scores; None where it has none.
            shared: Whether the pass that they were taken over is the same at every batch size.
        """
        if scores is None or not (shared and network_is_shared(self.workload)):
            return
        known = sum(score.numel() for kept in self._scores.values() for score in kept.values())
        if known + sum(score.numel() for score in scores.values()) <= SCORES_KEPT:
            self._scores[trial.seed, trial.point] = scores


def network_is_shared(workload: Workload) -> bool:
    """Whether the network of a point is the same at every batch size: it is not told of it."""
    return workload.batch_size_key.startswith("data.")
